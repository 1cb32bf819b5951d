"""The hybrid decoder through the public ops: every way of cutting and packing the same text gives the same text."""

import inspect
import json
import lzma
from pathlib import Path

import pytest
import safetensors.torch
import torch

from thalweg.layers import Config
from thalweg.model import (
    Decoder,
    Generation,
    Sampling,
    Session,
    bits_per_byte,
    default_checkpoint,
    encode,
    prefill_pieces,
    save,
)
from thalweg.state import PAGE_TOKENS, Pages

SOURCE = Path(__file__).with_name("text.txt").read_bytes()  # a text that no training file holds
PROMPT = SOURCE[:300]  # longer than the budget of 256 tokens, so selection leaves blocks out


@pytest.fixture(scope="module")
def model():
    return Decoder.load()


def write(model, prompts, new=24, piece=1024, **sampling):
    texts = [bytearray() for _ in prompts]
    for prompt, byte in Generation(model, prompts, Sampling(new, **sampling), piece=piece):
        texts[prompt].append(byte)
    return [bytes(text) for text in texts]


@pytest.fixture(scope="module")
def greedy(model):
    return write(model, [PROMPT])[0]


def test_prefill_in_pieces_writes_the_same_text(model, greedy):
    assert write(model, [PROMPT], piece=64)[0] == greedy
    assert write(model, [PROMPT], piece=192)[0] == greedy


def same_caches(one, other):
    """KDA state is bitwise the same only if its inputs are; the projections around it may round differently, and so may
    block keys, which a step of bfloat16 separates.
    """
    for whole, pieces in zip(one.states, other.states):
        for name in vars(whole):
            a, b = getattr(whole, name), getattr(pieces, name)
            worst = 1e-4 if a.dtype == torch.float32 else 1e-3
            assert (a.float() - b.float()).norm() <= worst * a.float().norm(), name


def test_token_by_token_writes_the_same_text(model, greedy):
    """From the start, and from within a group of tokens past the budget; the caches are those of one prefill."""
    tokens = encode(PROMPT)
    for first, last in ((0, 22), (262, len(tokens))):
        whole, session = (Session(model, [len(PROMPT) + 1 + len(greedy)]) for _ in range(2))
        whole.prefill([(0, tokens[:last])])
        if first:
            session.prefill([(0, tokens[:first])])
        for token in tokens[first:last]:
            logits = session.step(token[None])
        same_caches(whole, session)
    text = bytearray()
    for _ in greedy:
        text.append(int(logits[0].argmax()))
        logits = session.step(torch.tensor([text[-1]]))
    assert bytes(text) == greedy


def test_a_prompt_among_others_writes_the_same_text(model, greedy):
    others = [b"import os\n", SOURCE[1000:1300], b"x"]
    together = write(model, [others[0], PROMPT, *others[1:]])
    assert together[1] == greedy
    assert together[0] == write(model, [others[0]])[0]


def test_one_prefill_reads_what_decode_wrote(model, greedy):
    tokens = encode(PROMPT + greedy)[:-1]
    logits = Session(model, [len(tokens)]).prefill([(0, tokens)], every_row=True)
    assert bytes(logits[len(PROMPT) :].argmax(-1).tolist()) == greedy


def test_greedy_text_of_a_fixed_prompt(model):
    expected = json.loads(Path(__file__).with_name("golden.json").read_text())
    for prompt, text in expected.items():
        assert write(model, [prompt.encode()], new=len(text.encode()))[0].decode() == text


def test_prefill_in_pieces_gives_the_same_caches(model):
    tokens, sessions = encode(PROMPT), [Session(model, [800]) for _ in range(2)]
    sessions[0].prefill([(0, tokens)])
    for [(_, start, stop)] in prefill_pieces([len(tokens)], 128):
        sessions[1].prefill([(0, tokens[start:stop])])
    same_caches(*sessions)


def test_padding_rows_change_nothing(model):
    full, padded = Session(model, [300, 300]), Session(model, [300, 300])
    for session in (full, padded):
        session.prefill([(0, encode(SOURCE[:200])), (1, encode(SOURCE[300:450]))])
    before = [getattr(state, name).clone() for state in padded.states for name in vars(state)]
    logits = padded.step(torch.tensor([65, 66]), [True, False])
    assert torch.allclose(logits[0], full.step(torch.tensor([65, 66]))[0], atol=1e-4)
    sequence, trash = 1, 0
    for (state, name), old in zip(((s, n) for s in padded.states for n in vars(s)), before):
        new = getattr(state, name)
        if name in ("k_cache", "v_cache", "block_keys"):
            pages = [page for page in padded.pages.table[sequence].tolist() if page > 0]
            assert torch.equal(new[pages], old[pages]) and trash not in pages
        else:
            assert torch.equal(new[sequence], old[sequence]), name


def test_draws_depend_on_the_seed_and_not_on_company(model):
    alone = write(model, [b"def main("], temperature=1.0, top_p=0.95, seed=3)[0]
    among = write(model, [b"class A:\n", b"def main("], temperature=1.0, top_p=0.95, seed=3)[1]
    assert among == alone
    assert write(model, [b"def main("], temperature=1.0, top_p=0.95, seed=4)[0] != alone


def test_top_p_keeps_the_likeliest_byte_only_when_small():
    logits = torch.tensor([0.0, 3.0, 1.0, -1.0])
    for seed in range(20):
        assert Sampling(temperature=2.0, top_p=1e-6).draw(logits, torch.Generator().manual_seed(seed)) == 1
        assert Sampling(temperature=1e-300).draw(logits, torch.Generator().manual_seed(seed)) == 1
    with pytest.raises(ValueError, match="not finite"):
        Sampling().draw(torch.tensor([1.0, torch.nan]), torch.Generator())
    drawn = {Sampling(temperature=5.0).draw(logits, torch.Generator().manual_seed(seed)) for seed in range(60)}
    assert drawn == {0, 1, 2, 3}


def test_rows_drawn_together_are_those_drawn_alone():
    """A row that ended has whatever logits; one that lives must have finite ones."""
    logits, live = torch.randn(4, 9), [True, False, True, True]
    for logits[1] in (0.0, torch.nan):
        for sampling in (Sampling(), Sampling(temperature=1.0)):
            makes = [[torch.Generator().manual_seed(i) for i in range(4)] for _ in range(2)]
            alone = [sampling.draw(row, make) if on else 0 for row, make, on in zip(logits, makes[0], live)]
            assert sampling.draws(logits, makes[1], live) == alone
    logits[2, 3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        Sampling().draws(logits, [None] * 4, live)


@pytest.mark.parametrize(
    "bad",
    [
        {"seed": -1},
        {"seed": 2**63},
        {"max_new_tokens": 10**9},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"max_new_tokens": -1},
    ],
)
def test_bad_sampling_is_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)


def test_the_model_predicts_better_than_xz(model):
    text = SOURCE[:2000]
    assert bits_per_byte(model, text) < 8 * len(lzma.compress(text, preset=9)) / len(text) / 1.3


def test_zero_new_tokens_and_ended_texts(model):
    assert write(model, [b"x", b"y"], new=0) == [b"", b""]


def test_prefill_pieces_cut_at_multiples_and_cover_everything():
    for lengths, piece in (([5, 700, 1, 64], 128), ([1], 64), ([64, 64, 64], 64)):
        passes = list(prefill_pieces(lengths, piece))
        assert all(sum(stop - start for _, start, stop in spans) <= piece for spans in passes)
        for sequence, length in enumerate(lengths):
            spans = [(a, b) for group in passes for s, a, b in group if s == sequence]
            assert spans[0][0] == 0 and spans[-1][1] == length and all(a % piece == 0 for a, _ in spans)
            assert all(a[1] == b[0] for a, b in zip(spans, spans[1:]))


def test_pages_are_mapped_once_and_run_out_with_an_error():
    pages = Pages(2, 3, 3)
    assert pages.grow(0, 1) and not pages.grow(0, PAGE_TOKENS) and pages.grow(1, PAGE_TOKENS + 1)
    used = sorted(page for page in pages.table.flatten().tolist() if page >= 0)
    assert used == [1, 2, 3]
    with pytest.raises(ValueError, match="request 0 needs 2 pages"):
        pages.grow(0, PAGE_TOKENS + 1)


def test_a_bf16_model_runs(model):
    half = Decoder.load(dtype=torch.bfloat16)
    logits = Session(half, [100]).prefill([(0, encode(SOURCE[:99]))])
    exact = Session(model, [100]).prefill([(0, encode(SOURCE[:99]))])
    assert (logits.float() - exact).norm() < 0.05 * exact.norm()


def tiny_config(**changes):
    return Config(**{"hidden": 32, "mlp": 32, "kda_rank": 8, "blocks": ("kda", "qsa"), "budget": 16, **changes})


def test_save_and_load_round_trip(tmp_path):
    first = Decoder(tiny_config())
    save(first, tmp_path)
    again = Decoder.load(tmp_path)
    assert again.config == first.config
    for (name, a), (_, b) in zip(first.named_parameters(), again.named_parameters()):
        assert torch.allclose(a, b, rtol=2**-8), name


def spoiled(value, dtype):
    """The shipped weights, every entry replaced."""
    tensors = safetensors.torch.load_file(default_checkpoint() / "model.safetensors")
    return safetensors.torch.save({name: torch.full_like(t, value, dtype=dtype) for name, t in tensors.items()})


def broken_checkpoints(folder):
    """(what, path) of folders that are no checkpoint of ours."""
    good = {name: (default_checkpoint() / name).read_bytes() for name in ("config.json", "model.safetensors")}
    other = json.dumps({**json.loads(good["config.json"]), "mlp": 7}).encode()
    cases = {
        "no config": {"model.safetensors": good["model.safetensors"]},
        "no weights": {"config.json": good["config.json"]},
        "cut weights": {**good, "model.safetensors": good["model.safetensors"][:1000]},
        "empty weights": {**good, "model.safetensors": b""},
        "config is no JSON": {**good, "config.json": b"{"},
        "config is a list": {**good, "config.json": b"[1]"},
        "foreign config": {**good, "config.json": b'{"model_type": "llama", "hidden_size": 64}'},
        "config of another shape": {**good, "config.json": other},
        "bad block": {**good, "config.json": b'{"blocks": ["mamba"]}'},
        "bad type": {**good, "config.json": b'{"hidden": "big"}'},
        "deep config": {**good, "config.json": b"[" * 100_000},
        "endless model": {**good, "config.json": b'{"hidden": 1000000000}'},
        "bad eps": {**good, "config.json": b'{"norm_eps": "x"}'},
        "no rotation": {**good, "config.json": b'{"rotary_dim": 0}'},
        "budget of no blocks": {**good, "config.json": b'{"budget": 255}'},
        "NaN weights": {**good, "model.safetensors": spoiled(torch.nan, torch.float32)},
        "integer weights": {**good, "model.safetensors": spoiled(1, torch.int8)},
    }  # fmt: skip
    for what, files in cases.items():
        path = folder / what.replace(" ", "-")
        path.mkdir()
        for name, data in files.items():
            (path / name).write_bytes(data)
        yield what, path


def test_broken_and_foreign_checkpoints_are_refused_in_one_line(tmp_path):
    for what, path in broken_checkpoints(tmp_path):
        with pytest.raises((ValueError, OSError)) as error:
            Decoder.load(path)
        assert "\n" not in str(error.value) and path.name in str(error.value), what


@pytest.mark.parametrize("dtype,name", ((torch.bfloat16, "hopper"), (torch.float32, "triton")))
def test_prefill_of_the_shipped_model_is_what_kernels_take(dtype, name, monkeypatch):
    """On an H200: no quiet reference. Needs no GPU: implementations are only asked."""
    pytest.importorskip("triton")
    from thalweg.kda import library, prefill, prepare_gluon

    names = [*inspect.signature(prefill.prefill).parameters][:22]
    real, seen = library.kda_prefill, []

    def watched(*args, **more):
        seen.append(dict(zip(names, args)))
        return real(*args, **more)

    monkeypatch.setattr(library, "kda_prefill", watched)
    session = Session(Decoder.load(dtype=dtype), [400, 400])
    session.prefill([(0, encode(b"x" * 70)), (1, encode(b"def"))])
    assert len(seen) == 6
    for module in (library, prepare_gluon):
        monkeypatch.setattr(module, "arch", lambda device: "sm_90")
    monkeypatch.setattr(library, "INTERPRETED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for call in seen:
        assert next(impl for impl in library.IMPLS["kda_prefill"] if impl.why_not(call) is None).name == name
        assert dtype != torch.bfloat16 or prepare_gluon.why_not(call) is None
