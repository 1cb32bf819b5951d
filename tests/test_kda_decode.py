"""kda_decode, kda_verify, kda_commit: one token, several tokens unstored, and the accepted ones stored."""

import kda_calls as calls
import kda_oracle as oracle
import pytest
import torch

from thalweg.kda import kda_conv, kda_decode, kda_prefill

DECODE = calls.implementations("kda_decode", but=("triton", "hopper", "gfx950"))  # not all K and V
VERIFY, COMMIT = calls.implementations("kda_verify"), calls.implementations("kda_commit")
DRAFTS = [pytest.param(*v.values, *c.values, id=v.id, marks=v.marks) for v, c in zip(VERIFY, COMMIT)]
FLOAT = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check(call, b, out, state, conv_state):
    """Row b of an in-place decode call against the definition."""
    wanted, history, after = calls.row_truth(call, b)
    slot = int(call["read_slots"][b])
    assert oracle.error(out[b], wanted[0]) <= oracle.rounding(wanted[0], out.dtype)
    assert oracle.error(state[slot], after) <= oracle.rounding(after, state.dtype)
    assert torch.equal(conv_state[slot].double(), history)


KINDS = (  # of gate, tokens and state
    ("given", "float32", torch.float32),
    ("soft", "bfloat16", torch.float32),
    ("bounded", "float16", torch.float32),
    ("soft", "float32", torch.bfloat16),
    ("bounded", "bfloat16", torch.bfloat16),
)


@pytest.mark.parametrize("gate, dtype, state_dtype", KINDS)
@pytest.mark.parametrize("decode", DECODE)
def test_one_step_equals_the_definition(decode, gate, dtype, state_dtype):
    call = calls.layer(3, dtype=FLOAT[dtype], gate=gate, state_dtype=state_dtype)
    out, state, conv_state = calls.run(decode, call)
    assert out.dtype == FLOAT[dtype]
    for b in range(3):
        check(call, b, out, state, conv_state)
    assert calls.same(state[[0, 4, 5]], call["state"][[0, 4, 5]])
    assert calls.same(conv_state[[0, 4, 5]], call["conv_state"][[0, 4, 5]])


@pytest.mark.parametrize("decode", DECODE)
def test_options(decode):
    call = calls.layer(1)
    plain = calls.run(decode, call)
    changes = (
        {"scale": 2.0},
        {"allow_neg_eigval": True},
        {"lower_bound": -1.5},
        {"conv_bias": None},
        {"norm_eps": 0.5},
    )
    for change in changes:
        changed = {**call, **change}
        got = calls.run(decode, changed)
        check(changed, 0, *got)
        assert not torch.equal(got[0], plain[0])  # each option is really read


@pytest.mark.parametrize("heads, W", (((1, 1), 2), ((1, 4), 8), ((3, 3), 3), ((3, 6), 4), ((12, 12), 4), ((20, 20), 2)))
@pytest.mark.parametrize("decode", DECODE)
def test_b24_head_counts_and_conv_widths(decode, heads, W):
    call = calls.layer(1, H=heads[0], HV=heads[1], K=16, V=8, W=W)
    check(call, 0, *calls.run(decode, call))


@pytest.mark.parametrize("decode", DECODE)
def test_float32_conv_state_beside_narrow_tokens(decode):
    call = calls.layer(2, H=1, HV=2, dtype=torch.bfloat16)
    narrow = calls.run(decode, call)
    wide = calls.run(decode, call, conv_state=call["conv_state"].float())
    assert calls.same(narrow[0], wide[0]) and calls.same(narrow[2].float(), wide[2])


def test_decode_follows_prefill():
    """Conv, prefill and norm over 70 tokens, or 65 of them and five decode steps: the same outputs and states."""
    T, HV, K, V = 70, 4, 24, 40
    call = calls.layer(1, T)
    row = {name: call[name][0] for name in ("qkv", "g_raw", "beta_logits", "out_gate")}
    wanted, history, after = calls.row_truth(call, 0)
    pools = {"state": calls.copy(call["state"]), "conv_state": calls.copy(call["conv_state"])}
    cu, slots = torch.tensor([0, 65]), call["read_slots"]
    y = kda_conv(row["qkv"][:65], call["conv_weight"], cu, pools["conv_state"], slots, bias=call["conv_bias"])
    q, k, v = (x.unflatten(1, (-1, d)) for x, d in zip(y.split((2 * K, 2 * K, HV * V), 1), (K, K, V)))
    gates = {name: call[name] for name in ("gate", "A_log", "dt_bias")}
    o = kda_prefill(q, k, v, row["g_raw"][:65], row["beta_logits"][:65], cu, pools["state"], slots, **gates)
    o = oracle.gated_norm(o, row["out_gate"][:65], call["norm_weight"], call["norm_eps"])
    assert oracle.error(o, wanted[:65]) < 1e-5
    for t in range(65, T):
        out = kda_decode(**{**calls.token(call, t), **pools})
        assert oracle.error(out[0], wanted[t]) < 1e-5
    assert oracle.error(pools["state"][1], after) < 1e-5 and torch.equal(pools["conv_state"][1].double(), history)


@pytest.mark.parametrize("decode", DECODE)
def test_b03_beta_and_decay_are_not_rounded_to_the_activation_dtype(decode):
    """(a) beta = sigmoid(0.5) from a bfloat16 logit; (b) steps of a decay that bfloat16 would round to 1."""
    kinds = {"norm_weight": torch.ones(2), "norm_eps": 1e-6, "gate": "given"}
    qkv = torch.tensor([[9.0, 0.0, 9.0, 0.0, 1.0, 1.0]], dtype=torch.bfloat16)  # q, k along e0, v = 1
    gates = (torch.zeros(1, 1, 2).bfloat16(), torch.tensor([[0.5]]).bfloat16(), torch.zeros(1, 1, 2).bfloat16())
    last = torch.tensor([0.0, 1.0]).expand(6, 2).bfloat16()
    conv_state, state, slots = torch.zeros(1, 6, 1).bfloat16(), torch.zeros(1, 1, 2, 2), torch.tensor([0])
    decode(qkv, *gates, last, conv_state, state, slots, **kinds)
    silu = 1 / (1 + torch.tensor(-1.0).exp())  # of v
    assert torch.allclose(state[0, 0, :, 0] / silu, torch.tensor(0.62246), atol=1e-5)
    g = torch.full((1, 1, 2), 0.99992).log()
    state = torch.ones(1, 1, 2, 2)
    for _ in range(24):
        decode(qkv, g, torch.full((1, 1), -200.0), gates[2], last, conv_state, state, slots, **kinds)
    assert (state - 0.99992**24).abs().max() < 1e-5


@pytest.mark.parametrize("decode", DECODE)
def test_bits_of_a_row_do_not_depend_on_the_batch(decode):
    call = calls.layer(3)
    together = calls.run(decode, call)
    again = calls.run(decode, call)
    assert all(calls.same(a, b) for a, b in zip(together, again))
    names = ("qkv", "g_raw", "beta_logits", "out_gate", "read_slots")
    for b in (0, 2):
        alone = calls.run(decode, {**call, **{name: call[name][b : b + 1] for name in names}})
        assert calls.same(alone[0][0], together[0][b])
        assert calls.same(alone[1][b + 1], together[1][b + 1]) and calls.same(alone[2][b + 1], together[2][b + 1])
    # The control: another row's token gives other bits, so equality above is not that of empty outputs.
    assert not calls.same(together[0][0], together[0][1])


@pytest.mark.parametrize("bad", (-1, -9, 8, 2**31 - 1, 7))
@pytest.mark.parametrize("decode", DECODE)
def test_b09_padding_rows(decode, bad):
    """Two live rows of eight, the rest NaN and on a bad slot; pools NaN but for the live slots, in a wider buffer."""
    call = calls.layer(8)
    guard = {name: torch.full((12, *call[name].shape[1:]), torch.nan) for name in ("state", "conv_state")}
    for name, buffer in guard.items():
        buffer[[5, 7]] = call[name][[1, 2]]
        call[name] = buffer[2:10]  # slots 3 and 5 of the view
    for name in ("qkv", "g_raw", "beta_logits", "out_gate"):
        call[name][2:] = torch.nan
    call["read_slots"] = torch.tensor([3, 5] + [bad] * 6)
    before = {name: buffer.clone() for name, buffer in guard.items()}
    out = decode(**call, null_slot=7, out=torch.full((8, 4, 40), torch.nan))
    assert not out[2:].any() and out[:2].isfinite().all()
    for name, buffer in guard.items():
        others = [s for s in range(12) if s not in (5, 7)]
        assert calls.same(buffer[others], before[name][others])
        assert not calls.same(buffer[[5, 7]], before[name][[5, 7]])
    truth = {**call, **{name: before[name][2:10] for name in guard}}
    for b in range(2):
        check(truth, b, out, call["state"], call["conv_state"])


@pytest.mark.parametrize("lists", (([1, -1], [1, 2]), ([1, 2], [1, -1]), ([1, 2], [1, 99])))
@pytest.mark.parametrize("decode", DECODE)
def test_a_row_needs_both_slots(decode, lists):
    call = calls.layer(2, H=1, HV=2)
    read, write = (torch.tensor(x) for x in lists)
    out, state, conv_state = calls.run(decode, call, read_slots=read, write_slots=write)
    assert not out[1].any() and out[0].any()
    assert calls.same(state[2], call["state"][2]) and calls.same(conv_state[2], call["conv_state"][2])


@pytest.mark.parametrize("decode", DECODE)
def test_a_slot_must_exist_in_both_pools(decode):
    call = calls.layer(2, H=1, HV=2)
    out, state, _ = calls.run(decode, call, conv_state=call["conv_state"][:2])
    assert not out[1].any() and calls.same(state[2], call["state"][2])


@pytest.mark.parametrize("decode", DECODE)
def test_b10_null_slot_is_an_argument(decode):
    call = calls.layer(2, H=1, HV=2)
    call["state"][0], call["conv_state"][0] = 0.25, 0.5
    call["read_slots"] = torch.tensor([1, 0])
    out, state, conv_state = calls.run(decode, call, null_slot=0)
    assert not out[1].any()
    assert calls.same(state[0], call["state"][0]) and calls.same(conv_state[0], call["conv_state"][0])
    for null_slot in (None, -1):
        check(call, 1, *calls.run(decode, call, null_slot=null_slot))


@pytest.mark.parametrize("decode", DECODE)
def test_read_and_write_slots(decode):
    call = calls.layer(2, H=1, HV=2)
    in_place = calls.run(decode, call)
    read, write = call["read_slots"], torch.tensor([3, 4])
    out, state, conv_state = calls.run(decode, call, read_slots=read, write_slots=write)
    assert calls.same(out, in_place[0])
    assert calls.same(state[:3], call["state"][:3]) and calls.same(conv_state[:3], call["conv_state"][:3])
    assert calls.same(state[[3, 4]], in_place[1][[1, 2]]) and calls.same(conv_state[[3, 4]], in_place[2][[1, 2]])


def views(call):
    """The same values as strided views: fused rows, sparse elements, a time-major conv pool, a transposed state."""
    strided = dict(call)
    for name in ("qkv", "g_raw", "beta_logits", "out_gate"):
        sparse = torch.full((*call[name].shape[:-1], 2 * call[name].shape[-1] + 3), torch.nan, dtype=call[name].dtype)
        sparse[..., 1:-2:2] = call[name]
        strided[name] = sparse[..., 1:-2:2]
    strided["conv_state"] = call["conv_state"].transpose(1, 2).contiguous().transpose(1, 2)
    strided["state"] = call["state"].transpose(2, 3).contiguous().transpose(2, 3)
    strided["conv_weight"] = call["conv_weight"].t().contiguous().t()
    strided["read_slots"] = torch.stack([call["read_slots"], call["read_slots"] * 0 + 99], 1)[:, 0]
    return strided


def near(op, got, wanted, state_dtype=torch.float32):
    """The reference gives the steps' bits; others sum in another order: a float32 state is then within 1e-6, and where
    a bfloat16 one is rounded after every token a few values are rounded to the other side."""
    if op.impl == "reference":
        return calls.same(got, wanted)
    worst = 1e-6 if state_dtype == torch.float32 else 1e-3
    return oracle.error(got, wanted) < worst + (0 if got.dtype == torch.float32 else oracle.rounding(wanted, got.dtype))


@pytest.mark.parametrize("gate", ("given", "bounded"))
@pytest.mark.parametrize("decode", DECODE)
def test_b08_views_give_what_contiguous_copies_give(decode, gate):
    """The history's bits; of sums, that a compiler orders by where a state's elements lie, all but the last digits."""
    call = calls.layer(2, H=1, HV=2, K=23, V=9, gate=gate)
    wanted, got = calls.run(decode, call), calls.run(decode, views(call))
    assert calls.same(got[2], wanted[2])
    assert near(decode, got[0], wanted[0]) and near(decode, got[1][[1, 2]], wanted[1][[1, 2]])
    assert calls.same(got[1][[0, 3, 4]], wanted[1][[0, 3, 4]])


@pytest.mark.parametrize("verify, commit", DRAFTS)
def test_b08_views_of_drafts_give_what_contiguous_copies_give(verify, commit):
    call = calls.layer(2, 3, H=1, HV=2, K=23, V=9)
    wanted, got = calls.run(verify, call), calls.run(verify, views(call))
    assert near(verify, got[0], wanted[0]) and all(calls.same(a, b) for a, b in zip(got[1:], wanted[1:]))
    got, wanted = (calls.commit(x, [3, 2], op=commit) for x in (views(call), call))
    assert near(commit, got[0][[1, 2]], wanted[0][[1, 2]]) and calls.same(got[1], wanted[1])
    assert calls.same(got[0][[0, 3, 4]], wanted[0][[0, 3, 4]])


def stepped(call, tokens):
    """The pools and outputs of `tokens` decode steps of every row, by the reference."""
    pools = {"state": calls.copy(call["state"]), "conv_state": calls.copy(call["conv_state"])}
    outs = [kda_decode(**{**calls.token(call, s), **pools}, impl="reference") for s in range(tokens)]
    return torch.stack(outs, 1) if outs else None, pools["state"], pools["conv_state"]


@pytest.mark.parametrize(
    "S, dtype, state_dtype",
    (
        (1, "float32", torch.float32),
        (2, "bfloat16", torch.float32),
        (5, "float16", torch.bfloat16),
        (8, "float32", torch.float32),
    ),
)
@pytest.mark.parametrize("verify", VERIFY)
def test_verify_is_decode_step_by_step_and_stores_nothing(verify, S, dtype, state_dtype):
    kinds = {"dtype": FLOAT[dtype], "state_dtype": state_dtype, "gate": ("given", "soft", "bounded")[S % 3]}
    call = calls.layer(2, S, H=1, HV=2, **kinds)
    out, state, conv_state = calls.run(verify, call)
    assert near(verify, out, stepped(call, S)[0], state_dtype)
    assert calls.same(state, call["state"]) and calls.same(conv_state, call["conv_state"])


@pytest.mark.parametrize(
    "accepted, state_dtype", [*((n, torch.float32) for n in range(5)), (0, torch.bfloat16), (3, torch.bfloat16)]
)
@pytest.mark.parametrize("commit", COMMIT)
def test_b15_commit_is_a_run_that_only_saw_the_accepted_tokens(commit, accepted, state_dtype):
    call = calls.layer(2, 4, H=1, HV=2, state_dtype=state_dtype)
    state, conv_state = calls.commit(call, [accepted, 4], op=commit)
    for slot, count in ((1, accepted), (2, 4)):
        _, wanted, history = stepped(call, count)
        assert near(commit, state[slot], wanted[slot], state_dtype) and calls.same(conv_state[slot], history[slot])
        if count == 0:
            assert calls.same(state[slot], call["state"][slot])
    assert calls.same(state[[0, 3, 4]], call["state"][[0, 3, 4]])
    # The next step reads what was committed: it continues the accepted tokens, not the rejected ones.
    following = calls.layer(2, H=1, HV=2)
    pools = {"state": state, "conv_state": conv_state}
    row = {n: call[n][0][:accepted] for n in ("qkv", "g_raw", "beta_logits", "out_gate")}
    whole = {n: torch.cat([row[n], following[n][:1]]) for n in row}
    if state_dtype == torch.float32:
        out = kda_decode(**{**call, **{n: following[n] for n in row}, **pools})
        wanted, _, _ = oracle.layer(whole, call, call["conv_state"][1], call["state"][1])
        assert oracle.error(out[0], wanted[-1]) < 1e-5


@pytest.mark.parametrize("commit", COMMIT)
def test_commit_reads_no_rejected_token(commit):
    call = calls.layer(2, 3, H=1, HV=2)
    wanted = calls.commit(call, [2, 0], op=commit)
    for b, count in enumerate((2, 0)):
        for name in ("qkv", "g_raw", "beta_logits"):
            call[name][b, count:] = torch.nan
    got = calls.commit(call, [2, 0], op=commit)
    assert calls.same(got[0], wanted[0]) and calls.same(got[1], wanted[1])


@pytest.mark.parametrize("commit", COMMIT)
def test_commit_accepts_between_none_and_all(commit):
    """Counts are clipped to [0, S]; nothing at all is written for 0, not even to another slot."""
    call = calls.layer(2, 4, H=1, HV=2)
    state, conv_state = calls.commit(call, [99, -5], op=commit, write_slots=torch.tensor([1, 4]))
    wanted = calls.commit(call, [4, 0], op=commit)
    assert calls.same(state, wanted[0]) and calls.same(conv_state, wanted[1])
    assert calls.same(state[[2, 4]], call["state"][[2, 4]])


@pytest.mark.parametrize("commit", COMMIT)
def test_commit_to_other_slots(commit):
    call = calls.layer(2, 3, H=1, HV=2)
    in_place = calls.commit(call, [3, 2], op=commit)
    state, conv_state = calls.commit(call, [3, 2], op=commit, write_slots=torch.tensor([3, 4]))
    assert calls.same(state[[3, 4]], in_place[0][[1, 2]]) and calls.same(conv_state[[3, 4]], in_place[1][[1, 2]])
    assert calls.same(state[:3], call["state"][:3]) and calls.same(conv_state[:3], call["conv_state"][:3])


@pytest.mark.parametrize("bad", (-1, 99, 0))
@pytest.mark.parametrize("verify, commit", DRAFTS)
def test_b09_padding_rows_of_verify_and_commit(verify, commit, bad):
    call = calls.layer(2, 3, H=1, HV=2)
    clean = calls.run(verify, call)[0]
    slots = torch.tensor([1, bad])
    for name in ("qkv", "g_raw", "beta_logits", "out_gate"):
        call[name][1] = torch.nan
    out, _, _ = calls.run(verify, call, read_slots=slots, null_slot=0)
    assert calls.same(out[0], clean[0]) and not out[1].any()
    state, conv_state = calls.commit(call, [3, 3], op=commit, read_slots=slots, null_slot=0)
    others = [0, 2, 3, 4]
    assert calls.same(state[others], call["state"][others]) and state[1].isfinite().all()
    assert calls.same(conv_state[others], call["conv_state"][others])


def test_no_rows():
    for op in (op for param in (*DECODE, *VERIFY) for op in param.values if not param.marks):
        call = calls.layer(0, 2) if op in [p.values[0] for p in VERIFY] else calls.layer(0)
        out, state, _ = calls.run(op, call)
        assert out.shape[0] == 0 and calls.same(state, call["state"])
    for param in COMMIT:
        if not param.marks:
            call = calls.layer(0, 2)
            assert calls.same(calls.commit(call, [], op=param.values[0])[0], call["state"])
