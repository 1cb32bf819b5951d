"""The KDA oracles: the chunk form is the recurrence to float64 rounding, and the recurrence is the definition."""

import math

import kda_oracle as oracle
import pytest
import torch

from thalweg.kda import reference

ROUNDING = 1e-12
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 130)


def sequence(T, H=2, K=24, V=40, g=None, seed=0, dtype=torch.float64):
    """Heads-first q, k, v, g, beta, state of one sequence."""
    make = torch.Generator().manual_seed(seed)
    q, k = (reference.l2norm(torch.randn(H, T, K, generator=make, dtype=dtype)) for _ in range(2))
    v = torch.randn(H, T, V, generator=make, dtype=dtype)
    beta = torch.rand(H, T, generator=make, dtype=dtype)
    state = torch.randn(H, V, K, generator=make, dtype=dtype)
    gates = -torch.rand(H, T, K, generator=make, dtype=dtype) if g is None else g.expand(H, T, K).to(dtype)
    return q, k, v, gates, beta, state


def tokens_first(*tensors):
    return [x.transpose(0, 1) for x in tensors]


def definition(q, k, v, g, beta, state, scale):
    o, after = oracle.delta_rule(*tokens_first(q, k, v, g, beta), state, scale)
    return o.transpose(0, 1), after


@pytest.mark.parametrize("T", LENGTHS)
def test_recurrence_and_chunk_form_are_the_definition(T):
    inputs = sequence(T)
    wanted, after = definition(*inputs, 0.3)
    for form in (reference.recurrence, reference.chunked):
        o, state = form(*inputs, 0.3)[:2]
        assert o.shape == wanted.shape
        assert oracle.error(o, wanted) < ROUNDING
        assert oracle.error(state, after) < ROUNDING


@pytest.mark.parametrize("chunk", (1, 2, 8, 16, 32, 64, 128))
def test_every_chunk_size_gives_the_same(chunk):
    inputs = sequence(77)
    wanted, after = definition(*inputs, 0.3)
    o, state, terms = reference.chunked(*inputs, 0.3, chunk=chunk)
    assert oracle.error(o, wanted) < ROUNDING and oracle.error(state, after) < ROUNDING
    assert terms.Akk.shape == (2, math.ceil(77 / chunk), chunk, chunk)


def test_no_state_means_zeros():
    q, k, v, g, beta, state = sequence(70)
    for form in (reference.recurrence, reference.chunked):
        without = form(q, k, v, g, beta, None, 0.3)
        zeros = form(q, k, v, g, beta, torch.zeros_like(state), 0.3)
        assert torch.equal(without[0], zeros[0]) and torch.equal(without[1], zeros[1])


@pytest.mark.parametrize("cut", (0, 1, 15, 63, 64, 65, 100, 130))
def test_cut_anywhere_and_resume(cut):
    q, k, v, g, beta, state = sequence(130)
    wanted, after = definition(q, k, v, g, beta, state, 0.3)
    first, middle = reference.chunked(*(x[:, :cut] for x in (q, k, v, g, beta)), state, 0.3)[:2]
    second, last = reference.chunked(*(x[:, cut:] for x in (q, k, v, g, beta)), middle, 0.3)[:2]
    assert oracle.error(torch.cat([first, second], 1), wanted) < ROUNDING
    assert oracle.error(last, after) < ROUNDING


def test_grouped_value_heads_are_repeated_query_heads():
    q, k, _, _, _, _ = sequence(70, H=2)
    _, _, v, g, beta, state = sequence(70, H=6)
    wanted, after = oracle.delta_rule(*tokens_first(q, k, v, g, beta), state, 0.3)
    q, k = q.repeat_interleave(3, 0), k.repeat_interleave(3, 0)
    o, last, _ = reference.chunked(q, k, v, g, beta, state, 0.3)
    assert oracle.error(o, wanted.transpose(0, 1)) < ROUNDING and oracle.error(last, after) < ROUNDING


def test_leading_dimensions_are_only_a_batch():
    rows = [sequence(70, seed=seed) for seed in range(3)]
    together = reference.chunked(*(torch.stack(x) for x in zip(*rows)), 0.3)
    for i, row in enumerate(rows):
        alone = reference.chunked(*row, 0.3)
        assert oracle.error(together[0][i], alone[0]) < ROUNDING
        assert oracle.error(together[1][i], alone[1]) < ROUNDING


@pytest.mark.parametrize("gate", ("given", "soft", "bounded"))
@pytest.mark.parametrize("biased", (True, False))
def test_gate_forms(gate, biased):
    raw = 4 * torch.randn(70, 2, 24, dtype=torch.float64)
    raw = -raw.abs() if gate == "given" else raw
    A_log, dt_bias = (torch.randn(2), torch.randn(2, 24)) if biased and gate != "given" else (None, None)
    wanted = oracle.log_decay(raw, gate, A_log, dt_bias, -3.0)
    got = reference.log_decay(raw, gate, A_log, dt_bias, -3.0)
    assert oracle.error(got, wanted) < ROUNDING
    inputs = sequence(70, g=got.transpose(0, 1))
    o, state, _ = reference.chunked(*inputs, 0.3)
    truth, after = definition(*inputs, 0.3)
    assert oracle.error(o, truth) < ROUNDING and oracle.error(state, after) < ROUNDING


def test_gates_by_hand():
    zero = torch.zeros(1, 1, dtype=torch.float64)
    assert reference.log_decay(zero, "bounded").item() == -2.5
    assert math.isclose(reference.log_decay(zero, "soft").item(), -math.log(2), rel_tol=1e-15)
    assert reference.log_decay(zero + 30, "soft").item() == -30.0
    assert math.isclose(reference.log_decay(zero + 30, "soft", torch.tensor([1.0])).item(), -30 * math.e, rel_tol=1e-7)
    assert reference.log_decay(zero + 1e6, "bounded", lower_bound=-4.0).item() == -4.0
    # The bounded form is not the soft one clamped: it differs well inside the bound.
    assert reference.log_decay(zero + 1, "bounded").item() != max(-5.0, reference.log_decay(zero + 1, "soft").item())
    assert reference.write_strength(torch.tensor([0.0])).item() == 0.5
    assert reference.write_strength(torch.tensor([0.0]), True).item() == 1.0
    with pytest.raises(ValueError, match="gate must be given, soft or bounded, got 'hard'"):
        reference.log_decay(zero, "hard")


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("x", (0.0, 0.5, 1.0, 2.5, 3.0, 4.0, 5.0, 40.0))
def test_b01_strong_decay_beside_weak(x, dtype):
    """Even channels at -x, odd ones at -1e-3, from no decay through the gate's bound to far beyond it."""
    bound = ROUNDING if dtype == torch.float64 else 1e-6
    gates = torch.where(torch.arange(32) % 2 == 0, -x, -1e-3 if x else 0.0)
    for T in (16, 64, 65, 256 if x == 5 else 17):
        inputs = sequence(T, K=32, V=16, g=gates, dtype=dtype)
        o, state, _ = reference.chunked(*inputs, 0.3)
        wanted, after = definition(*inputs, 0.3)
        assert oracle.error(o, wanted) < bound and oracle.error(state, after) < bound


def test_b01_strong_gate_leaves_later_weak_ones_their_digits():
    """300 nats at once, then almost nothing: a difference of running sums would lose three digits of the rest."""
    gates = torch.full((64, 32), -1e-4)
    gates[5] = -300.0
    inputs = sequence(64, K=32, V=16, g=gates, dtype=torch.float32)
    wanted, after = definition(*inputs, 0.3)
    o, state, _ = reference.chunked(*inputs, 0.3)
    assert oracle.error(o, wanted) < 1e-6 and oracle.error(state, after) < 1e-6


def test_b01_complete_forgetting():
    """A log decay of minus infinity is a reset of the channel, not NaN."""
    gates = -torch.rand(64, 32)
    gates[20, ::2] = -torch.inf
    gates[21] = -torch.inf
    inputs = sequence(64, K=32, V=16, g=gates)
    wanted, after = definition(*inputs, 0.3)
    o, state, _ = reference.chunked(*inputs, 0.3)
    assert oracle.error(o, wanted) < ROUNDING and oracle.error(state, after) < ROUNDING


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_b02_near_parallel_keys(dtype):
    """One direction for all keys, slow decay, strong writes: powers of the lower matrix grow before they cancel."""
    q, _, v, g, _, state = sequence(64, K=128, V=32, g=torch.full((1,), -1e-4), dtype=dtype)
    k = reference.l2norm(torch.randn(1, 1, 128, dtype=dtype) + 1e-3 * torch.randn(2, 64, 128, dtype=dtype))
    beta = torch.full((2, 64), 0.99, dtype=dtype)
    o, after, _ = reference.chunked(q, k, v, g, beta, state, 0.3)
    wanted, last = definition(q, k, v, g, beta, state, 0.3)
    bound = 1e-11 if dtype == torch.float64 else 1e-5
    assert oracle.error(o, wanted) < bound and oracle.error(after, last) < bound


@pytest.mark.parametrize("size", (16, 32, 64))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_b02_inverse_times_matrix_is_the_identity(size, dtype):
    key = torch.randn(1, 128, dtype=torch.float64)
    k = reference.l2norm(key + 1e-3 * torch.randn(size, 128, dtype=torch.float64))
    lower = (0.99 * k @ k.t()).to(dtype)
    got = reference.unit_lower_inverse(lower)
    eye = torch.eye(size, dtype=torch.float64)
    assert ((eye + lower.double().tril(-1)) @ got.double() - eye).abs().max() < (1e-13 if dtype == eye.dtype else 1e-5)
    assert oracle.error(got, oracle.inverse(lower.double())) < (ROUNDING if dtype == eye.dtype else 1e-5)


def test_solver_reads_the_strictly_lower_part_only():
    lower = torch.randn(3, 16, 16, dtype=torch.float64)
    spoiled = lower.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(), torch.nan)
    assert torch.equal(reference.unit_lower_inverse(lower), reference.unit_lower_inverse(spoiled))


def test_chunk_terms_by_their_definition():
    q, k, _, g, beta, _ = sequence(16, H=1)
    terms = reference.chunk_terms(q, k, g, beta, 0.3)
    G = g.cumsum(-2)[0]
    for i in range(16):
        for j in range(16):
            seen = (k[0, j] * (G[i] - G[j]).exp()) if i >= j else torch.zeros(24, dtype=torch.float64)
            assert math.isclose(terms.Aqk[0, i, j], 0.3 * (q[0, i] * seen).sum(), abs_tol=1e-14)
            wanted = beta[0, i] * (k[0, i] * seen).sum() if i > j else 0.0
            assert math.isclose(terms.Akk[0, i, j], wanted, abs_tol=1e-14)
    assert oracle.error(terms.g_cum, g.cumsum(-2)) < ROUNDING
    assert oracle.error(terms.g_tail, G[-1:] - G) < ROUNDING
    assert oracle.error(terms.inverse[0], oracle.inverse(terms.Akk[0])) < ROUNDING


def test_chunk_form_is_differentiable():
    leaves = [x.requires_grad_() for x in sequence(5, H=1, K=3, V=2)]
    assert torch.autograd.gradcheck(lambda *x: reference.chunked(*x, 0.3, chunk=4)[:2], leaves, fast_mode=True)


def test_gradients_of_the_chunk_form_are_those_of_the_recurrence():
    leaves = [x.requires_grad_() for x in sequence(70)]
    gradients = []
    for form in (reference.chunked, reference.recurrence):
        o, state = form(*leaves, 0.3)[:2]
        gradients.append(torch.autograd.grad(o.pow(2).sum() + state.sin().sum(), leaves))
    for ours, wanted in zip(*gradients):
        assert oracle.error(ours, wanted) < 1e-11


def test_everything_around_the_recurrence_is_differentiable():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    scalars = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w, b: reference.short_conv(x, w, b, None)[0], (x, weight, scalars))
    assert torch.autograd.gradcheck(reference.l2norm, (x,))
    assert torch.autograd.gradcheck(lambda o, w: reference.gated_norm(o, o * 2, w, 1e-5), (x, scalars))
    for gate in ("soft", "bounded"):
        rate, bias = scalars.detach()[:2].requires_grad_(), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        raw = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda *a, gate=gate: reference.log_decay(a[0], gate, *a[1:]), (raw, rate, bias)
        )


def test_norms_by_hand():
    """l2norm adds eps to the sum of squares, the gated norm to their mean, and its weight is not 1 + w."""
    assert reference.l2norm(torch.tensor([3e-3, 4e-3], dtype=torch.float64))[0].item() == 3e-3 / math.sqrt(26e-6)
    o, gate = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    got = reference.gated_norm(o, gate, torch.tensor([2.0, 2.0], dtype=torch.float64), 0.5)
    assert torch.allclose(got, o / math.sqrt(13.0), rtol=1e-15)


@pytest.mark.parametrize("T", (0, 1, 2, 3, 70))
@pytest.mark.parametrize("W", (2, 4))
def test_short_conv(T, W):
    x, weight, bias = torch.randn(T, 5).double(), torch.randn(5, W).double(), torch.randn(5).double()
    history = torch.randn(5, W - 1).double()
    wanted, after = oracle.conv(x, weight, bias, history)
    got, last = reference.short_conv(x, weight, bias, history)
    assert oracle.error(got, wanted) < ROUNDING and torch.equal(last, after)
    rows = []
    for t in range(T):
        y, history = reference.short_conv(x[t : t + 1], weight, bias, history)
        rows.append(y)
    assert oracle.error(torch.cat(rows) if rows else x, got) < ROUNDING and torch.equal(history, after)
