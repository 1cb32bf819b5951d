"""The list of cases: complete, seeded, honest about bytes and FLOPs, and free of memory on the meta device."""

import itertools

import pytest
import torch

import thalweg
from thalweg import cases, inputs
from thalweg.bench.calls import IMPLS, OPS, captured
from thalweg.kda import library as kda_library
from thalweg.kda import reference as kda
from thalweg.qsa import library as qsa_library

ENDINGS = ("p32k", "p128k", "p249k", "mix", "d1", "d16", "d64")
PREFILL = ("prefill-1x8192-h64", "prefill-16x512-h64", "prefill-1x32768-h32", "prefill-8x2048-h16")


def test_every_named_shape_is_there():
    wanted = {"conv-8192-h64", "conv-16x512-h64", "norm-8192-h64"}
    wanted |= {f"{op}-h12-b32-s{S}" for op in ("verify", "commit") for S in (4, 8)}
    wanted |= {"solve-8192x64", "solve-64x64", "prefill-equal-keys"} | {*PREFILL} | {f"{id}-fast" for id in PREFILL}
    shapes = itertools.product((12, 24, 32, 48, 64, 96), (1, 2, 4, 8, 16, 32, 64, 128), ("", "-bf16state"))
    wanted |= {f"decode-h{H}-b{B}{suffix}" for H, B, suffix in shapes}
    wanted |= {f"{op}-{ending}" for op in ("score", "topk", "select") for ending in (*ENDINGS, "p128k-784")}
    wanted |= {f"append-{ending}" for ending in (*ENDINGS, *(f"d{n}-s{new}" for n in (1, 16, 64) for new in (2, 3)))}
    wanted |= {f"attend-{ending}-{kind}" for ending in ("p128k", "mix") for kind in ("rnd", "ovl")}
    wanted |= {f"attend-{ending}" for ending in ("d1", "d16", "d64", "p128k-rnd-784")}
    assert set(cases.TIMED) == wanted


def test_every_public_op_has_small_cases():
    assert {case.op for case in cases.SMALL.values()} == set(OPS)
    assert set(OPS) | {"rope_table", "kda_prefill_workspace"} == set(thalweg.__all__)


@pytest.mark.parametrize("chip", ("sm_90", "gfx950"))
def test_every_implementation_takes_a_small_case_on_its_chip(chip, monkeypatch):
    """Or neither `thalweg check` nor `make sanitize` would ever run it."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for family in (kda_library, qsa_library):
        monkeypatch.setattr(family, "INTERPRETED", True)  # CPU tensors stand for those of the chip
        monkeypatch.setattr(family, "arch", lambda device: chip)
    taken, other = set(), {"sm_90": "gfx950", "gfx950": "hopper"}[chip]
    for case in cases.SMALL.values():
        call = captured(case.op, case.make())
        taken |= {(case.op, impl.name) for impl in IMPLS[case.op] if impl.why_not(call) is None}
    assert taken == {(op, impl.name) for op in OPS for impl in IMPLS[op] if impl.name != other}


@pytest.mark.parametrize("id", [*PREFILL, "solve-8192x64", "decode-h96-b128", "attend-d64", "topk-p249k", "score-mix"])
def test_inputs_on_the_meta_device_fit_the_op_and_take_no_memory(id):
    case = cases.TIMED[id]
    args = case.make("meta")
    tensors = [value for value in args.values() if isinstance(value, torch.Tensor)]
    assert tensors and all(t.device.type == "meta" for t in tensors)
    assert captured(case.op, args)


@pytest.mark.parametrize("id", [*cases.SMALL])
def test_a_seed_fixes_the_inputs(id):
    case = cases.SMALL[id]
    first, again, other = case.make("cpu", 3), case.make("cpu", 3), case.make("cpu", 4)
    same = []
    for name in (name for name, value in first.items() if isinstance(value, torch.Tensor)):
        value, twin, different = (x[name].float().nan_to_num(7.0) for x in (first, again, other))
        assert torch.equal(value, twin), name
        same.append(torch.equal(value, different))
    assert not all(same)
    assert captured(case.op, first)


def nbytes(args: dict, names: str) -> int:
    return sum(args[name].numel() * args[name].element_size() for name in names.split())


@pytest.mark.parametrize("id", PREFILL)
def test_prefill_bytes_are_those_of_its_tensors(id):
    case = cases.TIMED[id]
    args = case.make("meta")
    moved = nbytes(args, "q k v g_raw beta_logits A_log dt_bias") + 2 * nbytes(args, "state") + nbytes(args, "v")
    assert case.bytes == moved


@pytest.mark.parametrize("id", ["conv-8192-h64", "conv-16x512-h64"])
def test_conv_bytes_are_those_of_its_tensors(id):
    case = cases.TIMED[id]
    args = case.make("meta")
    assert case.bytes == 2 * nbytes(args, "x conv_state") + nbytes(args, "weight")


@pytest.mark.parametrize("id", ["verify-h12-b32-s4", "commit-h12-b32-s8"])
def test_draft_bytes_are_those_of_its_tensors(id):
    case = cases.TIMED[id]
    args = case.make("meta")
    read = nbytes(args, "qkv g_raw beta_logits conv_weight A_log dt_bias read_slots")
    if case.op == "kda_commit":
        assert case.bytes == read + nbytes(args, "accepted") + 2 * nbytes(args, "conv_state state")
    else:
        assert case.bytes == read + nbytes(args, "norm_weight conv_state state out_gate out_gate")


def test_norm_bytes_are_those_of_its_tensors():
    case = cases.TIMED["norm-8192-h64"]
    args = case.make("meta")
    assert case.bytes == nbytes(args, "o gate weight gate")


@pytest.mark.parametrize(
    ("id", "angles", "old", "complete"), [("append-d16-s3", 3, 32, 16), ("append-p128k", 4096, 0, 1024)]
)
def test_append_bytes_are_those_of_its_tensors(id, angles, old, complete):
    """Angles at so many positions, raw keys of earlier calls, block keys that become complete (and their pages)."""
    case = cases.TIMED[id]
    args = case.make("meta")
    ring = min(len(args["positions"]), args["raw_ring"].shape[0] * (3 if id.endswith("s3") else 8))
    moved = (
        nbytes(args, "index_qk q_norm_weight k_norm_weight positions row_request") + nbytes(args, "index_qk") * 4 // 5
    )
    assert case.bytes == moved + 256 * angles + 256 * (old + ring + complete) + 4 * complete


@pytest.mark.parametrize("id", ["decode-h12-b1", "decode-h96-b128", "decode-h64-b16-bf16state"])
def test_decode_bytes_are_those_of_its_tensors(id):
    case = cases.TIMED[id]
    args = case.make("meta")
    read = nbytes(args, "qkv g_raw beta_logits out_gate conv_weight A_log dt_bias norm_weight read_slots")
    assert case.bytes == read + 2 * nbytes(args, "conv_state state") + nbytes(args, "out_gate")


@pytest.mark.parametrize(
    ("id", "floor_us", "flop_us"),
    [
        ("solve-8192x64", 35.1, None),
        ("prefill-1x8192-h64", 158, 121),
        ("prefill-16x512-h64", 187.5, 121),
        ("prefill-1x32768-h32", 313.6, 241),
        ("prefill-8x2048-h16", 82.1, 60.3),
        ("decode-h12-b1", 0.40, None),
        ("decode-h96-b128", 392.3, None),
        ("score-p249k", None, 336),
        ("score-d16", 31.7, None),
        ("topk-p32k", 31.2, None),
        ("attend-p128k-rnd", None, 261),
        ("attend-d64", 62.8, None),
    ],
)
def test_floors_on_a_known_gpu(id, floor_us, flop_us):
    """At 4.3 TB/s and 790 TFLOP/s, against figures worked out by hand."""
    case = cases.TIMED[id]
    if floor_us:
        assert case.bytes / 4.3e6 == pytest.approx(floor_us, rel=0.01)
    if flop_us:
        assert case.flops / 790e6 == pytest.approx(flop_us, rel=0.01)


def test_slow_gates_remember_and_fast_gates_forget():
    """Per token about -0.005 to -1.3 nats against about -3.5: only the slow ones carry the state past a chunk."""
    found = {}
    for gates in ("slow", "fast"):
        args = inputs.prefill(inputs.Source(seed=1), [512], 4, gates)
        g = kda.log_decay(args["g_raw"], "bounded", args["A_log"], args["dt_bias"], -5.0)
        found[gates] = g.flatten()
    low, high = found["slow"].quantile(torch.tensor([0.02, 0.98])).tolist()
    assert -3.0 < low < -0.8 and -0.01 < high < 0.0
    assert -4.0 < found["fast"].mean() < -3.0


def test_equal_keys_are_equal():
    args = cases.SMALL["check-prefill-equal-keys"].make()
    assert (args["k"] == args["k"][:1]).all() and torch.equal(args["q"], args["k"])
    assert torch.sigmoid(args["beta_logits"].float()).min() > 0.999


ROWS = inputs.Rows((300, 1001, 77), 41, page=6, kv_page=25)


def test_page_tables_map_every_page_once_and_hold_holes_behind():
    table = ROWS.table(inputs.Source(), [5, 2, 7])
    assert sorted(table[table >= 0].tolist()) == list(range(14))
    assert [(row >= 0).sum().item() for row in table] == [5, 2, 7]
    assert (table[1, 2:] == -1).all() and table.dtype == torch.int32


@pytest.mark.parametrize(("shared", "least"), [(0.0, 0.0), (0.9, 0.85)])
def test_picks_are_ascending_visible_and_shared_as_asked(shared, least):
    k = 32
    ids = inputs.picks(inputs.Source(), ROWS, k, shared)
    _, positions = ROWS.metadata(inputs.Source())
    visible = (positions + 1) // 4
    for row, seen in zip(ids, visible.tolist()):
        picked = row[row >= 0]
        assert len(picked) == min(k, seen) and (row[len(picked) :] == -1).all()
        assert (picked[1:] > picked[:-1]).all() and (picked < seen).all()
    long = ids[41:82].tolist()
    common = len(set(long[0]).intersection(*long[1:]))
    assert common >= least * k and (shared or common < k // 2)


def test_topk_cases_hold_the_scores_of_the_score_cases():
    dims = {"heads": 4, "dim": 16}
    scored = thalweg.qsa_score(**inputs.score(inputs.Source(seed=5), ROWS, **dims))
    args = inputs.topk(inputs.Source(seed=5), ROWS, k=8, **dims)
    assert torch.equal(scored.isinf(), args["scores"].isinf())
    assert torch.allclose(scored, args["scores"], rtol=1e-5, atol=1e-5)


def test_unknown_ops_and_cases_are_named_with_near_matches():
    with pytest.raises(ValueError, match="op must be one of .*, got 'kda_decod'; near: kda_decode"):
        cases.find("kda_decod", "decode-h12-b8")
    with pytest.raises(ValueError, match="case must be one of the .* of kda_decode, got 'decode-h12-b9'; near: "):
        cases.find("kda_decode", "decode-h12-b9")
    with pytest.raises(ValueError, match="score-p32k is one of qsa_score, not of kda_decode"):
        cases.find("kda_decode", "score-p32k")
    with pytest.raises(ValueError, match="got '', e.g. "):
        cases.find("kda_decode", "")
    assert cases.find("qsa_topk", "check-topk").op == "qsa_topk"
