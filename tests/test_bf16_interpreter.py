"""The interpreter the kernels are tested with computes bfloat16 as the hardware does: rounded once an operation.

Torch on the CPU is the partner: it, too, widens bfloat16 to float32, computes and rounds to nearest even.
"""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import bf16_interpreter  # noqa: E402  (needs Triton)
import triton.language as tl  # noqa: E402

if not triton.knobs.runtime.interpret:
    pytest.skip("kernels are compiled here, not interpreted", allow_module_level=True)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SPECIAL = [0.0, -0.0, 1.0, -1.0, 3.0, -7.5, torch.inf, -torch.inf, torch.nan, 1e-40, 3.3e38, -65536.0, 0.1]


def numbers(count=64, dtype=BF16):
    """Random numbers of many sizes behind the special ones."""
    wide = torch.randn(count - len(SPECIAL)) * 2.0 ** torch.randint(-20, 20, (count - len(SPECIAL),))
    return torch.cat([torch.tensor(SPECIAL), wide]).to(dtype)


def same(got, wanted):
    """Bit for bit, any NaN for a NaN."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    nan = wanted.isnan()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return torch.equal(got.isnan(), nan) and torch.equal(got.view(bits)[~nan], wanted.view(bits)[~nan])


@triton.jit
def _pair(x, y, out, OP: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    a, b = tl.load(x + o), tl.load(y + o)
    if OP == "add":
        c = a + b
    elif OP == "sub":
        c = a - b
    elif OP == "mul":
        c = a * b
    elif OP == "div":
        c = a / b
    elif OP == "maximum":
        c = tl.maximum(a, b)
    elif OP == "minimum":
        c = tl.minimum(a, b)
    elif OP == "maximum_nan":
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "less":
        c = a < b
    elif OP == "equal":
        c = a == b
    elif OP == "negated":
        c = -a
    elif OP == "abs":
        c = tl.abs(a)
    elif OP == "scaled":
        c = a * 0.1 + 1.0
    elif OP == "where":
        c = tl.where(a < b, a, b)
    elif OP == "mixed":
        c = a.to(tl.float32) * b
    tl.store(out + o, c)


PAIRS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    # Triton divides in float32 where torch does
    "div": lambda a, b: a / b,
    "maximum": torch.fmax,
    "minimum": torch.fmin,
    "maximum_nan": torch.maximum,
    "less": lambda a, b: a < b,
    "equal": lambda a, b: a == b,
    "negated": lambda a, b: 0.0 - a,
    "abs": lambda a, b: a.abs(),
    "scaled": lambda a, b: a * torch.tensor(0.1, dtype=a.dtype) + 1.0,
    "where": lambda a, b: torch.where(a < b, a, b),
    "mixed": lambda a, b: a.float() * b.float(),
}


@pytest.mark.parametrize("op", PAIRS)
@pytest.mark.parametrize("dtype", (BF16, F32))
def test_elementwise(op, dtype):
    x = numbers(dtype=dtype)
    y = x[torch.randperm(64)]
    wanted = PAIRS[op](x, y)
    out = torch.empty_like(wanted)
    _pair[(1,)](x, y, out, op, 64)
    if op in ("maximum", "minimum", "negated"):  # either zero of two
        out, wanted = out + 0.0, wanted + 0.0
    if wanted.dtype == torch.bool:
        assert torch.equal(out, wanted)
    else:
        assert same(out, wanted)


@triton.jit
def _cast(x, out, ROUNDING: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.load(x + o).to(out.dtype.element_ty, fp_downcast_rounding=ROUNDING))


@pytest.mark.parametrize("source", (BF16, F16, F32, F64, torch.int32))
@pytest.mark.parametrize("target", (BF16, F16, F32, torch.int32))
def test_casts_round_to_nearest_even(source, target):
    if target == torch.int32 or source == torch.int32:
        x = torch.randint(-40000, 40000, (64,)).to(source)
    else:
        x = numbers(dtype=source)
    out = torch.empty(64, dtype=target)
    _cast[(1,)](x, out, None, 64)
    assert same(out, x.to(target)) if target != torch.int32 else torch.equal(out, x.to(target))


def test_every_halfway_case_and_its_neighbours():
    """Float32 values on, just below and just above the middle of two bfloat16, up to overflow; and plain truncation."""
    high = torch.randint(0, 2**16, (256,), dtype=torch.int32)
    bits = torch.cat([(high << 16) + low for low in (0, 0x7FFF, 0x8000, 0x8001)])
    x = torch.cat([bits.view(F32)[:-1], torch.tensor([3.4e38])])
    out = torch.empty(1024, dtype=BF16)
    _cast[(1,)](x, out, None, 1024)
    assert same(out, x.to(BF16))
    _cast[(1,)](x, out, "rtz", 1024)
    cut = (x.view(torch.int32) & -65536).view(F32).to(BF16)
    finite = x.isfinite()
    assert same(out[finite], cut[finite])


def test_float64_is_rounded_once():
    """1 + 2^-8 + 2^-40 lies above the middle; by way of float32 it would lie on it, and go down to even."""
    x = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40, 1 + 2.0**-8, -1 - 3 * 2.0**-8, np.nan, np.inf])
    wanted = [1 + 2.0**-7, 1 + 2.0**-7, 1.0, -1 - 2.0**-6, np.nan, np.inf]
    assert np.array_equal(bf16_interpreter.widen(bf16_interpreter.narrow(x)), wanted, equal_nan=True)


@triton.jit
def _product(x, y, z, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(x + m[:, None] * K + k[None, :])
    b = tl.load(y + n[None, :] * K + k[:, None])
    acc = tl.load(z + m[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(a, b, acc, input_precision="ieee"))


@pytest.mark.parametrize("dtype", (BF16, F16, F32))
def test_dot_multiplies_exactly_and_accumulates_in_float32(dtype):
    x, y, z = torch.randn(16, 64).to(dtype), torch.randn(32, 64).to(dtype), torch.randn(16, 32)
    out = torch.empty(16, 32)
    _product[(1,)](x, y, z, out, 16, 32, 64)
    truth = x.double() @ y.double().T + z
    assert (out - truth).norm() < 1e-6 * truth.norm()


def test_dot_passes_nan_and_infinity_on():
    x, y = torch.ones(16, 16, dtype=BF16), torch.ones(16, 16, dtype=BF16)
    x[2, 3], x[4, 5] = torch.nan, torch.inf
    out = torch.empty(16, 16)
    _product[(1,)](x, y, torch.zeros(16, 16), out, 16, 16, 16)
    assert out[2].isnan().all() and out[4].isposinf().all() and out.isfinite().sum() == 14 * 16


@triton.jit
def _keep_larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _reduced(x, out, OP: tl.constexpr, AXIS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    r, c = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    a = tl.load(x + r * C + c)
    if OP == "sum":
        s = tl.sum(a, AXIS, keep_dims=True)
    elif OP == "max":
        s = tl.max(a, AXIS, keep_dims=True)
    elif OP == "min":
        s = tl.min(a, AXIS, keep_dims=True)
    else:
        s = tl.reduce(a, AXIS, _keep_larger, keep_dims=True)
    if AXIS == 0:
        tl.store(out + c, s.to(a.dtype))
    else:
        tl.store(out + r, s.to(a.dtype))


def tree(x, axis):
    parts = x.movedim(axis, 0)
    while len(parts) > 1:
        parts = parts[: len(parts) // 2] + parts[len(parts) // 2 :]
    return parts[0]


@pytest.mark.parametrize("axis", (0, 1))
@pytest.mark.parametrize("op", ("sum", "max", "min", "custom"))
def test_reductions(op, axis):
    x = torch.randn(16, 32).to(BF16)
    wanted = {"sum": tree(x, axis), "min": x.amin(axis)}.get(op, x.amax(axis))
    out = torch.empty_like(wanted)
    _reduced[(1,)](x, out, op, axis, 16, 32)
    assert same(out, wanted)


def test_a_sum_of_bfloat16_loses_what_the_hardware_loses():
    """256 and 255 ones are 511 in float32, which bfloat16 could only round to 512; each step rounds to less."""
    x = torch.ones(1, 256, dtype=BF16)
    x[0, 0] = 256
    out = torch.empty(1, dtype=BF16)
    _reduced[(1,)](x, out, "sum", 1, 1, 256)
    assert same(out, tree(x, 1)) and out.item() < 511


@triton.jit
def _total(x, out, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out, tl.sum(a))
    tl.store(out + 1, tl.sum(tl.sum(a.to(tl.float32), 1), 0))


def test_a_sum_over_every_axis():
    x = torch.randn(16, 16).to(BF16)
    out = torch.empty(2)
    _total[(1,)](x, out, 16)
    assert out[0] == tree(x.flatten(), 0) and torch.isclose(out[1], x.float().sum())


@triton.jit
def _decayed(a, b):
    return a * 0.5 + b


@triton.jit
def _scanned(x, out, OP: tl.constexpr, REVERSE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    o = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    a = tl.load(x + o)
    if OP == "sum":  # what tl.cumsum does; some versions of it go to float32 first
        s = tl.associative_scan(a, 0, tl.standard._sum_combine, reverse=REVERSE)
    elif OP == "product":
        s = tl.associative_scan(a, 0, tl.standard._prod_combine, reverse=REVERSE)
    else:
        s = tl.associative_scan(a, 0, _decayed, reverse=REVERSE)
    tl.store(out + o, s)


SCANS = {"sum": lambda a, b: a + b, "product": lambda a, b: a * b, "custom": lambda a, b: a * 0.5 + b}


@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize("op", SCANS)
def test_scans_round_at_every_step(op, reverse):
    x = (torch.randn(16, 8) + 1).to(BF16)
    rows = list(x.flip(0) if reverse else x)
    for i in range(1, len(rows)):
        rows[i] = SCANS[op](rows[i - 1], rows[i])
    wanted = torch.stack(rows).flip(0) if reverse else torch.stack(rows)
    out = torch.empty_like(x)
    _scanned[(1,)](x, out, op, reverse, 16, 8)
    assert same(out, wanted)


@triton.jit
def _fused(x, y, z, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.fma(tl.load(x + o), tl.load(y + o), tl.load(z + o)))


def test_fma_rounds_once():
    """x y is 1 + 2^-6 + 2^-14, whose last bit decides, with z = 2^-8, on which side of a middle the sum lies."""
    x = torch.full((16,), 1 + 2.0**-7, dtype=BF16)
    z = torch.full((16,), 2.0**-8, dtype=BF16)
    out = torch.empty(16, dtype=BF16)
    _fused[(1,)](x, x, z, out, 16)
    assert out.tolist() == [1 + 3 * 2.0**-7] * 16 and (x * x + z).tolist() == [1 + 2.0**-6] * 16
    a, b, c = (numbers() for _ in range(3))
    out = torch.empty(64, dtype=BF16)
    _fused[(1,)](a, b.flip(0), c, out, 64)
    exact = a.double() * b.flip(0).double() + c.double()
    assert same(out[13:51], exact.to(F32).to(BF16)[13:51])


@triton.jit
def _select(x, y, out, N: tl.constexpr):
    o = tl.arange(0, N)
    a = tl.load(x + o, mask=o < N // 2, other=-2.5)
    b = tl.load(y + o)
    tl.store(out + o, tl.where(a == a, a, b) + tl.full([N], 0.1, a.dtype))


def test_select_ignores_what_it_does_not_take_and_masked_loads_give_the_other_value():
    x, y = torch.randn(32).to(BF16), torch.randn(32).to(BF16)
    x[3], y[4:] = torch.nan, torch.nan
    out = torch.empty(32, dtype=BF16)
    _select[(1,)](x, y, out, 32)
    x[3], x[16:] = y[3], -2.5
    assert same(out, x + torch.tensor(0.1, dtype=BF16))


@triton.jit
def _masked(x, out, limit, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] + tl.zeros([N, N], tl.int32)
    tl.store(out + o, tl.load(x + o), (o < N) & (limit < 3))


def test_a_scalar_comparison_is_a_mask():
    x, out = torch.randn(16), torch.full((16,), torch.nan)
    _masked[(1,)](x, out, 3, 16)
    assert out.isnan().all()
    _masked[(1,)](x, out, 2, 16)
    assert torch.equal(out, x)


@triton.jit
def _sorted(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(out + o, tl.sort(tl.load(x + o)))


def test_sort():
    x = torch.randn(32).to(BF16)
    out = torch.empty_like(x)
    _sorted[(1,)](x, out, 32)
    assert same(out, x.sort().values)


@triton.jit
def _bits(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    b = tl.load(x + o).to(tl.int16, bitcast=True) ^ -32768
    tl.store(out + o, b.to(tl.bfloat16, bitcast=True))


def test_bitcasts_move_bits():
    x = numbers()
    out = torch.empty_like(x)
    _bits[(1,)](x, out, 64)
    assert same(out, -x)


@triton.jit
def _atomic(x, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.atomic_add(x + o, tl.full([N], 1.0, tl.bfloat16))


def test_atomic_arithmetic_is_refused_not_wrong():
    with pytest.raises(Exception, match="no bfloat16 arithmetic|bfloat16|bf16"):
        _atomic[(1,)](torch.zeros(16, dtype=BF16), 16)


def test_outside_a_kernel_the_language_is_as_it_was():
    """Patched once a launch, not at every call of a device function, and set back."""
    _sorted[(1,)](torch.randn(32).to(BF16), torch.empty(32, dtype=BF16), 32)
    assert tl.core.is_builtin(tl.load)


def test_types_made_once_are_those_of_their_own_shape_and_element():
    """Asked for twice, in turns: number of elements, name, shape and numpy type of each."""
    blocks = [(dtype, shape) for dtype in (tl.float32, tl.bfloat16, tl.int1) for shape in ([4], [2, 2], [16, 1, 8])]
    for dtype, shape in 2 * blocks:
        made = tl.block_type(dtype, [tl.constexpr(shape[0]), *shape[1:]])
        assert (made.element_ty, [*made.shape], made.numel) == (dtype, shape, np.prod(shape))
        assert made.name == f"<{made.shape}, {dtype}>"
        value = tl.tensor("handle", made)
        assert [size.value for size in value.shape] == shape and value.numel.value == np.prod(shape)
        assert (value.handle, value.type, value.dtype) == ("handle", made, dtype)
        kind = {"fp32": np.float32, "bf16": np.uint16, "int1": np.bool_}[dtype.name]
        assert bf16_interpreter.interpreter._get_np_dtype(made) == kind
        assert bf16_interpreter.interpreter._get_np_dtype(dtype) == kind
    pointer = tl.pointer_type(tl.float32)
    assert bf16_interpreter.interpreter._get_np_dtype(pointer) == np.uint64
    assert tl.tensor("x", tl.float32).numel.value == 1 and not len(tl.tensor("x", pointer).shape)
