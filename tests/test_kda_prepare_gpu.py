"""The prepare stage of KDA prefill on Hopper, in Gluon, against the portable stage and the float64 formulas."""

import kda_calls as calls
import kda_oracle as oracle
import pytest
import torch

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def hopper():
    pytest.importorskip("triton")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for sm_90")


def call_of(lengths, H=2, HV=4, **changes):
    call = calls.prefill(lengths, H=H, HV=HV, K=128, V=64, dtype=BF16)
    given = {"lower_bound": -5.0, "scale": 128**-0.5, "allow_neg_eigval": False, "qk_l2norm": True}
    call = {**given, **call, "out": torch.full(call["v"].shape, torch.nan, dtype=BF16), **changes}
    return {name: x.cuda() if torch.is_tensor(x) else x for name, x in call.items()}


def prepared(stage, call, first=0, count=None):
    """What a stage hands over for a call, on buffers of NaN, and the out it was given."""
    T, HV = call["v"].shape[:2]
    count = count or T // 32 + call["cu_seqlens"].shape[0] + 1
    factors, pairs, decays = (
        torch.full((count, HV, *shape), torch.nan, dtype=dtype, device="cuda")
        for shape, dtype in (((3, 32, 128), BF16), ((3, 32, 32), BF16), ((128,), torch.float32))
    )
    out = call["out"].clone()
    names = ("gate", "A_log", "dt_bias", "lower_bound", "scale", "allow_neg_eigval", "qk_l2norm")
    tensors = (call[name] for name in ("q", "k", "g_raw", "beta_logits", "cu_seqlens"))
    rows = {"read_slots": call["read_slots"], "write_slots": call["read_slots"], "fresh": None, "null_slot": None}
    rows |= {"slots": call["state"].shape[0], **{name: call[name] for name in names}}
    stage.prepare(*tensors, out, factors, pairs, decays, first, **rows)
    return factors, pairs, decays, out


def places(call):
    """(chunk number, first token, tokens) of every chunk of the sequences, as `chunks` numbers them."""
    bounds = call["cu_seqlens"].tolist()
    for i, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        for j in range(-(-(hi - lo) // 32)):
            yield lo // 32 + i + 1 + j, lo + 32 * j, min(32, hi - lo - 32 * j)


def formulas(call, i_t, n, i_hv):
    """-Kp, Qp, Ke, the scaled inverse, Aqk and exp(Gc) of one chunk and head, in float64, zeros past its n rows.

    What k's norms are beyond powers of two is in the inverse and not in Ke.
    """
    rows, i_h = slice(i_t, i_t + n), i_hv // (call["v"].shape[1] // call["q"].shape[1])
    k, q = (oracle.unit(call[name][rows, i_h].cpu()) for name in ("k", "q"))
    rest = (call["k"][rows, i_h].cpu().double().square().sum(1) + 1e-6).rsqrt()
    rest = rest / torch.exp2(rest.log2().floor())
    names = ("A_log", "dt_bias")
    heads = {name: None if call[name] is None else call[name][i_hv : i_hv + 1].cpu() for name in names}
    g = oracle.log_decay(
        call["g_raw"][rows, i_hv : i_hv + 1].cpu(), "bounded", **heads, lower_bound=call["lower_bound"]
    )
    G, beta = g[:, 0].cumsum(0), oracle.strength(call["beta_logits"][rows, i_hv].cpu(), call["allow_neg_eigval"])
    decay = torch.exp(G[:, None] - G[None])
    decay = torch.where((torch.arange(n)[:, None] >= torch.arange(n))[..., None], decay, 0.0)
    Akk, Aqk = (torch.einsum("ic,jc,ijc->ij", x, k, decay) for x in (k, q))
    inverse = torch.linalg.inv(torch.eye(n, dtype=torch.float64) + beta[:, None] * Akk.tril(-1)) * beta
    inverse, Aqk = rest[:, None] * inverse, Aqk / rest
    Kp, Qp, Ke = k * G.exp(), call["scale"] * q * G.exp(), k * torch.exp(G[-1] - G) / rest[:, None]
    wide = [torch.nn.functional.pad(x, (0, 0, 0, 32 - n)) for x in (-Kp, Qp, Ke)]
    square = [torch.nn.functional.pad(x, (0, 32 - n, 0, 32 - n)) for x in (inverse, call["scale"] * Aqk)]
    return *wide, *square, G[-1].exp()


def check(call):
    from thalweg.kda import prepare, prepare_gluon

    assert prepare_gluon.why_not(call) is None
    got, portable = prepared(prepare_gluon, call), prepared(prepare, call)
    assert calls.same(got[3].cpu(), portable[3].cpu())
    for number, i_t, n in places(call):
        for i_hv in range(call["v"].shape[1]):
            wanted = formulas(call, i_t, n, i_hv)
            for (factors, pairs, decays, _), most_kp in ((got, 3e-3), (portable, 4e-3)):  # it rounds Kp twice
                pair = pairs[number, i_hv].cpu().double()
                found = (*factors[number, i_hv].cpu(), pair[0] + pair[1], pair[2], decays[number, i_hv].cpu())
                # Aqk cancels (the portable stage is off by up to 4.2e-3 here), and a decay may be less than float32
                # holds: neither is asked for the digits of nothing.
                least = (0.0, 0.0, 0.0, 0.0, 0.3 * call["scale"], 1e-30)
                for value, truth, most, size in zip(found, wanted, (most_kp, 3e-3, 3e-3, 4e-3, 6e-3, 1e-4), least):
                    assert (value.double() - truth).norm() <= most * max(truth.norm(), size)
                assert not pair[:, n:].any() and not pair[:, :, n:].any() and not factors[number, i_hv, :, n:].any()
    return got


@pytest.mark.parametrize(
    "changes",
    (
        {}, {"A_log": None}, {"dt_bias": None}, {"A_log": None, "dt_bias": None}, {"lower_bound": -1.5},
        {"allow_neg_eigval": True}, {"scale": 2.0}, {"scale": 2**-10},
    ),
    ids=str,
)  # fmt: skip
def test_ragged_sequences(changes):
    check(call_of((33, 0, 1, 64, 31, 32), **changes))


def test_more_sequences_than_are_looked_up_at_once():
    """Of 70 every tenth is empty; those that are padding, in front of the 32nd and behind, hand nothing over."""
    from thalweg.kda import prepare_gluon

    lengths = [33 if i % 7 == 0 else i % 10 for i in range(70)]
    call = call_of(lengths, H=1, HV=1)
    whole = check(call)
    slots = call["read_slots"].clone()
    slots[[14, 31, 32, 63]] = -1
    part = prepared(prepare_gluon, {**call, "read_slots": slots})
    starts = {lo: i for i, (lo, n) in enumerate(zip(call["cu_seqlens"].tolist(), lengths)) if n}
    for number, i_t, _ in places(call):
        padding = starts[max(lo for lo in starts if lo <= i_t)] in (14, 31, 32, 63)
        assert padding == bool(part[0][number].isnan().all())
        assert padding or all(calls.same(a[number].cpu(), b[number].cpu()) for a, b in zip(part[:3], whole[:3]))


@pytest.mark.parametrize("H,HV", ((1, 1), (3, 3), (2, 6)))
def test_b24_heads(H, HV):
    check(call_of((40,), H=H, HV=HV))


@pytest.mark.parametrize("x", (40.0, 0.0, -12.0), ids=("at the bound", "half of it", "hardly any decay"))
def test_b01_exponents_to_the_ends_of_their_range(x):
    """At the bound the operands of the scores span 2^-116 .. 2^115."""
    call = call_of((64,), A_log=None, dt_bias=None)
    even = torch.arange(128, device="cuda") % 2 == 0
    call["g_raw"] = torch.where(even, x, -9.0).expand(64, 4, 128).to(BF16).contiguous()
    check(call)
    call["g_raw"] = torch.full((64, 4, 128), x, dtype=BF16, device="cuda")
    check(call)


def test_b02_parallel_keys():
    call = call_of((64,))
    call["k"] = torch.randn(1, 2, 128, device="cuda").to(BF16).repeat(64, 1, 1)
    call |= {"q": call["k"].clone(), "g_raw": torch.full((64, 4, 128), -12.0, dtype=BF16, device="cuda")}
    call |= {"A_log": None, "dt_bias": None, "beta_logits": torch.full((64, 4), 8.0, dtype=BF16, device="cuda")}
    check(call)


def test_b06_nothing_past_an_end_is_read():
    """NaN in front of, between and behind the sequences; uncovered rows are cleared."""
    call = call_of((5, 33, 70, 7))
    for name in ("q", "k", "g_raw", "beta_logits"):
        for lo, hi in ((0, 5), (108, 115)):
            call[name][lo:hi] = torch.nan
    call["cu_seqlens"] = torch.tensor([5, 38, 108]).cuda()
    out = check(call)[3]
    assert not out[:5].any() and not out[108:].any() and out[5:108].isnan().all()
    alone = {**call, "cu_seqlens": torch.tensor([5, 38]).cuda()}
    for name in ("q", "k", "g_raw", "beta_logits"):
        alone[name] = call[name].clone()
        alone[name][38:] = torch.nan
    check(alone)


def test_b14_bits_do_not_depend_on_later_tokens():
    from thalweg.kda import prepare_gluon

    call = call_of((64,))
    whole = prepared(prepare_gluon, call)
    for n in (1, 17, 31):
        part = prepared(prepare_gluon, {**call, "cu_seqlens": torch.tensor([0, n]).cuda()})
        assert calls.same(part[0][1, :, :2, :n].cpu(), whole[0][1, :, :2, :n].cpu())
        assert calls.same(part[1][1, :, :, :n, :n].cpu(), whole[1][1, :, :, :n, :n].cpu())


def test_b08_views_and_pieces_give_the_same_bits():
    from thalweg.kda import prepare_gluon

    call = call_of((70, 33), H=4, HV=4)
    whole = prepared(prepare_gluon, call)
    fused = torch.cat([call[n].flatten(1) for n in ("q", "k", "g_raw")], 1)
    views = dict(zip(("q", "k", "g_raw"), (x.unflatten(1, (4, 128)) for x in fused.chunk(3, 1))))
    views["beta_logits"] = call["beta_logits"].t().contiguous().t()
    views["cu_seqlens"] = torch.stack([call["cu_seqlens"].long()] * 2, 1)[:, 0]
    assert prepare_gluon.why_not({**call, **views}) is None
    again = prepared(prepare_gluon, {**call, **views})
    numbers = [number for number, _, _ in places(call)]
    for a, b in zip(whole[:3], again[:3]):
        assert calls.same(a[numbers].cpu(), b[numbers].cpu())
    first = prepared(prepare_gluon, call, first=2, count=2)
    for a, b in zip(whole[:3], first[:3]):
        assert calls.same(a[2:4].cpu(), b.cpu())


def test_what_it_does_not_take():
    from thalweg.kda import prepare_gluon

    call = call_of((40,))
    odd = torch.zeros(40 * 4 * 130, dtype=BF16, device="cuda").view(40, 4, 130)[..., :128]
    for changes in (
        {"gate": "soft"}, {"lower_bound": -5.5}, {"qk_l2norm": False}, {"scale": 1e5}, {"g_raw": odd},
        {"q": call["q"].float()}, {"out": call["out"].float()}, {"k": call["k"][..., :64]},
    ):  # fmt: skip
        assert prepare_gluon.why_not({**call, **changes})
