"""A Triton interpreter that is honest about bfloat16: `install()` before the first kernel runs.

The interpreter (TRITON_INTERPRET=1) keeps bfloat16 as raw 16-bit integers. Out of the box it adds, multiplies, sums and
compares those integers, and cuts float32 off instead of rounding it: silently wrong. Here every operation on bfloat16
widens to float32, computes, and rounds to nearest even, once an operation, as the hardware does. So a sum or a scan
over bfloat16 values loses what it would lose on a GPU: sums are rounded at every step of a tree, scans at every step.

Also set right: minimum and maximum of a number and NaN give the number, unless NaN propagation is asked for (Triton
3.6), and comparisons are of type int1 (else a scalar one, made a block of, is no mask).

And faster, with the same results: device functions called inside a kernel are no longer patched into the language
again at every call, and what depends on a type alone (the numpy type of an element, a block's name and number of
elements, the shape of a tensor as the language has it) is made once and not for every value.

Not caught by any interpreter: reads out of bounds (poison them), dots smaller than the hardware takes, races,
deadlocks, the rounding of tf32 operands. Tried with Triton 3.6.0 and 3.9.0.
"""

import functools

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

BFLOAT16 = tl.bfloat16
_TRUNCATE = interpreter._ir.ROUNDING_MODE.RTZ
_MOVES = (interpreter._ir.ATOMIC_OP.XCHG,)


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) as float32, exactly."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 or float64 as bfloat16 bits (uint16), rounded once to nearest even; NaN stays NaN."""
    values = np.asarray(values)
    single = values.astype(np.float32)
    if values.dtype == np.float64:
        # Rounded onto a float32 halfway between two bfloat16: step back to the side the float64 was on.
        halfway = (single.view(np.uint32) & 0xFFFF) == 0x8000
        nearer = np.nextafter(single, np.where(single < values, np.inf, -np.inf).astype(np.float32))
        single = np.where(halfway & (single != values), nearer, single)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FFF), rounded)


def _is_bf16(handle) -> bool:
    return isinstance(handle, interpreter.TensorHandle) and handle.dtype.scalar == BFLOAT16


def _wide(handle):
    return interpreter.TensorHandle(widen(handle.data), tl.float32) if _is_bf16(handle) else handle


def _bf16(values: np.ndarray):
    return interpreter.TensorHandle(narrow(values), BFLOAT16)


def _arithmetic(original):
    """An elementwise operation of the builder: (self, handles..., numpy function)."""

    def run(self, *arguments):
        *handles, op = arguments
        # A select moves bits, and its condition is no number.
        widened = op is not np.where and any(_is_bf16(handle) for handle in handles)
        result = original(self, *map(_wide, handles), op) if widened else original(self, *arguments)
        if result.data.dtype == np.bool_:  # comparisons come out with the type of what was compared
            return interpreter.TensorHandle(result.data, tl.int1)
        return _bf16(result.data) if widened else result

    return run


def _fma(original):
    def run(self, x, y, z):
        if not _is_bf16(z):
            return original(self, x, y, z)
        x, y, z = (_wide(handle).data.astype(np.float64) for handle in (x, y, z))
        return _bf16(x * y + z)  # exact in float64 up to its own last bit: rounded once

    return run


def _dot(original):
    return lambda self, a, b, *rest: original(self, _wide(a), _wide(b), *rest)


def _cast(original):
    def run(self, source, target):
        if _is_bf16(source) and target.scalar != BFLOAT16:
            source = _wide(source)
            return source if target.scalar == tl.float32 else original(self, source, target)
        if target.scalar == BFLOAT16 and not _is_bf16(source):
            exact = source.data if source.data.dtype.kind == "f" else source.data.astype(np.float64)
            return _bf16(exact)
        return original(self, source, target)

    return run


def _cast_rounding(original):
    def run(self, source, target, rounding):
        if source.dtype.scalar == tl.float32 and target.scalar == BFLOAT16:
            if rounding == _TRUNCATE:
                return interpreter.TensorHandle((source.data.view(np.uint32) >> 16).astype(np.uint16), BFLOAT16)
            return _bf16(source.data)
        return original(self, source, target, rounding)

    return run


def _atomic(original):
    def run(self, operation, pointers, value, *rest):
        if _is_bf16(value) and operation not in _MOVES:
            raise NotImplementedError("the interpreter has no bfloat16 arithmetic in memory")
        return original(self, operation, pointers, value, *rest)

    return run


def _sum(original):
    def run(self, operand):
        if operand.dtype.scalar != BFLOAT16:
            return original(self, operand)
        data, axis = operand.handle.data, self.axis
        if axis is None:
            data, axis = data.reshape(-1), 0
        parts = np.moveaxis(widen(data), axis, 0)
        while len(parts) > 1:  # a block has a power of two of everything
            half = len(parts) // 2
            parts = widen(narrow(parts[:half] + parts[half:]))
        bits = narrow(parts[0])
        if self.keep_dims:
            bits = bits.reshape([1] * operand.handle.data.ndim) if self.axis is None else np.expand_dims(bits, axis)
        return self.to_tensor(bits if bits.ndim else bits.item(), BFLOAT16)

    return run


def _extreme(original):
    def run(self, operand, val_reduce_op, idx_reduce_op=None):
        first = operand[0] if isinstance(operand, tuple) else operand
        if first.dtype.scalar != BFLOAT16:
            return original(self, operand, val_reduce_op, idx_reduce_op)
        wide = tl.core.tensor(_wide(first.handle), tl.block_type(tl.float32, list(first.handle.data.shape)))
        found = original(self, wide, val_reduce_op, idx_reduce_op)
        values = found[0] if isinstance(found, tuple) else found
        if val_reduce_op:
            bits = narrow(values.handle.data)
            values = self.to_tensor(bits if values.type.is_block() else bits.item(), BFLOAT16)
        return (values, *found[1:]) if isinstance(found, tuple) else values

    return run


def _scan(op, original):
    def run(self, operand):
        if operand.dtype.scalar != BFLOAT16:
            return original(self, operand)
        rows = np.moveaxis(widen(operand.handle.data), self.axis, 0).copy()
        for i in range(1, len(rows)):
            rows[i] = widen(narrow(op(rows[i - 1], rows[i])))
        return [self.to_tensor(narrow(np.moveaxis(rows, 0, self.axis)), BFLOAT16)]

    return run


def _patch_once(original):
    def run(fn):
        languages = [module for module in fn.__globals__.values() if module is tl or module is tl.core]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()  # an outer kernel did it, and undoes it
        return original(fn)

    return run


def _numpy_type(original):
    known = {}

    def run(dtype):
        name = (dtype.element_ty if dtype.is_block() else dtype).name
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    return run


def _block_type(original):
    known = {}

    def run(self, element_ty, shape):
        sizes = shape.values if type(shape) is tl.core.tuple else shape
        key = element_ty.name, *[size.value if type(size) is tl.constexpr else size for size in sizes]
        if key in known:
            vars(self).update(known[key], element_ty=element_ty)
        else:
            original(self, element_ty, shape)
            known[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}

    return run


def _tensor(original):
    known = {}

    def run(self, handle, type):
        key = (*type.shape.values,) if type.is_block() else ()
        if key in known:
            vars(self).update(known[key], handle=handle, type=type, dtype=type.scalar)
        else:
            original(self, handle, type)
            own = ("handle", "type", "dtype")
            known[key] = {name: value for name, value in vars(self).items() if name not in own}

    return run


def _unwrapped(original):
    """Most of what is asked for is a value, an int or a constant, not a list of them."""
    plain = (int, bool, float, str, type(None), tl.core.tensor, tl.core.dtype, tl.core.block_type)

    def run(o):
        kind = type(o)
        return o.value if kind is tl.constexpr else o if kind in plain else original(o)

    return run


_installed = False


def install() -> None:
    """Patches the interpreter of this process; a second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    np.seterr(all="ignore")  # hardware says nothing about overflow and NaN

    def wrap(owner, name, wrapper):
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(wrapper(original)))

    builder = interpreter.InterpreterBuilder
    for name in ("binary_op", "ternary_op", "unary_op"):
        wrap(builder, name, _arithmetic)
    wrap(builder, "create_fma", _fma)
    wrap(builder, "create_dot", _dot)
    wrap(builder, "cast_impl", _cast)
    wrap(builder, "create_fp_to_fp", _cast_rounding)
    wrap(builder, "create_atomic_rmw", _atomic)
    builder.get_bf16 = lambda self, value: _bf16(np.array([value], dtype=np.float64))
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    wrap(interpreter.ReduceOps, "sum", _sum)
    wrap(interpreter.ReduceOps, "min_max", _extreme)
    wrap(interpreter.ScanOps, "cumsum", functools.partial(_scan, np.add))
    wrap(interpreter.ScanOps, "cumprod", functools.partial(_scan, np.multiply))
    wrap(interpreter, "_patch_lang", _patch_once)
    wrap(interpreter, "_get_np_dtype", _numpy_type)
    wrap(tl.core, "_unwrap_if_constexpr", _unwrapped)
    wrap(tl.core.block_type, "__init__", _block_type)
    wrap(tl.core.tensor, "__init__", _tensor)
