"""Argument checks shared by the public ops: one clear error before anything is launched.

Every message reads `op: argument must be WANTED, got GOT`. Index values on the device are never trusted by an op
(offsets are clipped, bad slots are padding); the `*_values` functions here read them on the host and raise instead,
when the caller asks with `check=True` or `THALWEG_CHECK=1`. Nothing else here reads device memory, and all of it but
the memory checks is traced by a compiler, sizes and numbers symbolic.
"""

import math
import numbers
import os
import reprlib
import sys
from functools import lru_cache

import torch

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
STATES = (torch.float32, torch.bfloat16)
INDEX = (torch.int32, torch.int64)

COUNT = 2**31 - 1  # the most a count may be: ids are int32, and a count times a count fits int64
_INT64 = 2**63 - 1
_FLOAT64 = 1.7976931348623157e308
# Numbers are float32 on the device: a normal one, with room for a change of unit (log2 e).
_LEAST, _MOST = 2.0**-126, 2.0**126


def refuse(op: str, argument: str, wanted: str, got: object) -> None:
    raise ValueError(f"{op}: {argument} must be {wanted}, got {' '.join(str(got).split())}")


def checking(op: str, impl: str | None, check: bool | None) -> bool:
    """The effective value of an op's `check`, None meaning the environment variable THALWEG_CHECK; refuses both."""
    if impl is not None and not isinstance(impl, str):
        refuse(op, "impl", "None or the name of an implementation", _describe(impl))
    if check is None:
        return os.environ.get("THALWEG_CHECK", "0") not in ("", "0")
    expect_flag(op, "check", check, wanted="None, True or False")
    return check


def device_of(tensor: object) -> object:
    """The device the other arguments must be on; None for what is no tensor, which the first `expect` refuses."""
    return getattr(tensor, "device", None)


def _plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values lie in its memory at its strides: not sparse, nested, opaque or negated when read."""
    if tensor.is_nested or tensor.layout != torch.strided:
        return False
    return torch.compiler.is_compiling() or not tensor.is_neg()


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {' '.join(reprlib.repr(value).split())}"
    if not _plain(value):
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        return f"a {'lazily negated' if layout == 'strided' else layout} tensor"
    return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')} on {value.device}"


def _matches(have: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(have) == len(wanted) and all(size is None or size == got for size, got in zip(wanted, have))


def expect(
    op: str,
    argument: str,
    tensor: torch.Tensor | None,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    *,
    names: str = "",
    unit_stride: bool = False,
    optional: bool = False,
    pool: bool = False,
) -> None:
    """Raises ValueError unless `tensor` has this shape (None: any size), one of the dtypes and the device.

    names: the shape in words for the message, as "[T, H, K]". unit_stride: the last dimension must be contiguous.
    pool: no two elements may share an address.
    """
    if tensor is None and optional:
        return
    fits = isinstance(tensor, torch.Tensor) and _plain(tensor)
    fits = fits and (tensor.shape == shape or _matches(tensor.shape, shape))
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        sizes = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        kinds = "/".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        where = f" on {device}" if isinstance(device, torch.device) else ""
        refuse(op, argument, f"{names + ' = ' if names else ''}{sizes} {kinds}{where}", _describe(tensor))
    if pool and not torch.compiler.is_compiling() and not (tensor.is_contiguous() or tensor.mT.is_contiguous()):
        _expect_no_overlap(op, argument, tensor)
    if unit_stride and tensor.numel() > 1 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        refuse(op, argument, "contiguous in its last dimension", f"strides {tuple(tensor.stride())}")


def expect_int(
    op: str, argument: str, value: object, least: int = -_INT64 - 1, most: int = _INT64, optional: bool = False
) -> None:
    if value is None and optional:
        return
    wanted = "None or an int" if optional else "an int"
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        bound = "in the int64 range" if least < -COUNT else f"at least {least}"
        refuse(op, argument, f"{wanted}, {bound}", reprlib.repr(value))
    if value < least:
        refuse(op, argument, f"{wanted}, at least {least}", reprlib.repr(value))
    if value > most:
        refuse(op, argument, f"{wanted}, at most {most}", reprlib.repr(value))


def expect_number(op: str, argument: str, value: object, sign: int = 0, optional: bool = False) -> None:
    """A finite real number that float32 holds; sign 1: above zero, -1: below zero, and not lost to zero there.

    Python ints and NumPy scalars are numbers.
    """
    if (value is None and optional) or (isinstance(value, float) and _LEAST <= sign * value <= _MOST):
        return
    real = isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool)
    if not real and isinstance(value, numbers.Real) and hasattr(value, "dtype"):
        value, real = float(value), True  # a NumPy scalar, compared as float64
    if not real or not -_FLOAT64 <= value <= _FLOAT64 or (sign and not sign * value > 0):
        wanted = "a finite number" + ("", " above 0", " below 0")[sign]
        refuse(op, argument, f"None or {wanted}" if optional else wanted, reprlib.repr(value))
    if not -_MOST <= value <= _MOST or (sign and sign * value < _LEAST):
        refuse(
            op, argument, "within " + "2**-126 to " * (sign != 0) + "2**126 in size, as float32", reprlib.repr(value)
        )


def expect_flag(op: str, argument: str, value: object, wanted: str = "True or False") -> None:
    if not isinstance(value, bool):
        refuse(op, argument, wanted, _describe(value))


def expect_choice(op: str, argument: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        refuse(op, argument, "one of " + ", ".join(choices), value if isinstance(value, str) else _describe(value))


# Memory. Which addresses a strided tensor uses is a sum of steps, stride times index, so whether two tensors share one
# is whether a sum of bounded steps can reach a number.


def _reaches(steps: dict[int, int], target: int) -> bool:
    """Whether the sum of stride * n, 0 <= n <= count, over the steps {stride: count} can be `target`.

    Exact for strides that nest, as those of views of one buffer do; a search grown too long counts as yes.
    """
    budget = 4096

    def search(rest: list[tuple[int, int]], target: int) -> bool:
        nonlocal budget
        if target <= 0 or not rest:
            return target == 0
        if target % math.gcd(*(stride for stride, _ in rest)):
            return False
        (stride, count), rest = rest[0], rest[1:]
        most = sum(stride * count for stride, count in rest)
        for n in range(max(0, -((most - target) // stride)), min(count, target // stride) + 1):
            budget -= 1
            if budget < 0 or search(rest, target - n * stride):
                return True
        return False

    return search(sorted(((s, n) for s, n in steps.items() if s and n), reverse=True), target)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of the tensor have one address."""
    if tensor.numel() < 2:
        return False
    try:
        return _overlap(tensor.stride(), tuple(tensor.shape))
    except TypeError:  # sizes known to a trace only
        return _overlap.__wrapped__(tensor.stride(), tensor.shape)


@lru_cache(1024)  # a pool has the same strides in every call
def _overlap(strides: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    reach, below = 0, []
    for stride, size in sorted(zip(strides, shape)):
        if size == 1:
            continue
        if stride <= reach:  # else no sum of shorter steps spans it
            # Two elements that differ by 1 + n in this dimension differ by -count .. count in every shorter one.
            steps = {stride: size - 2}
            for shorter, count in below:
                steps[shorter] = steps.get(shorter, 0) + 2 * count
            if stride == 0 or _reaches(steps, reach - stride):
                return True
        reach += stride * (size - 1)
        below.append((stride, size - 1))
    return False


def address(tensor: torch.Tensor) -> int:
    """Address of the first element; 0 where there is none: empty, on the meta device, or known to a trace only."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor begins at a multiple of 16 bytes; of one that is only explained, as if its storage did."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # there where fakes are; asked for addresses they warn
    if fakes is not None and isinstance(tensor, fakes.FakeTensor):
        return tensor.storage_offset() * tensor.element_size() % 16 == 0
    return address(tensor) % 16 == 0


def _end(tensor: torch.Tensor, start: int) -> int:
    """Address past the last byte."""
    if tensor.is_contiguous():
        return start + tensor.numel() * tensor.element_size()
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape))
    return start + (reach + 1) * tensor.element_size()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = address(tensor)
    return start, _end(tensor, start) if start else 0


def share_memory(a: torch.Tensor, b: torch.Tensor, span: tuple[int, int] | None = None) -> bool:
    """Whether an element of one tensor lies where an element of the other does; the storages need not be one.

    span: the addresses of a, where they are known.
    """
    first, last = span or _span(a)
    start = address(b)
    if not first or not start or last <= start:
        return False
    end = _end(b, start)
    if end <= first:
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    sizes = a.element_size(), b.element_size()
    unit = math.gcd(*sizes, start - first)
    steps = {1: sum(sizes) // unit - 2}
    for tensor, size in ((a, sizes[0]), (b, sizes[1])):
        for stride, n in zip(tensor.stride(), tensor.shape):
            stride = stride * size // unit
            steps[stride] = steps.get(stride, 0) + n - 1
    return _reaches(steps, (end - first) // unit - 1)  # a's steps forward, b's backward: from a's start to b's end


def _expect_no_overlap(op: str, argument: str, tensor: torch.Tensor) -> None:
    if overlaps_itself(tensor):
        got = f"{list(tensor.shape)} with strides {tuple(tensor.stride())}"
        refuse(op, argument, "a tensor that does not overlap itself", got)


def given(out: torch.Tensor | None) -> bool:
    """Whether `expect_apart` has anything to look at; a compiler sees no addresses."""
    return out is not None and not torch.compiler.is_compiling()


def expect_apart(op: str, call: dict[str, object], written: str = "out") -> None:
    """Refuses a tensor that the op overwrites, where it overlaps itself or another tensor of `call`, the op's
    arguments by name.
    """
    out = call[written]
    if not out.is_contiguous():
        _expect_no_overlap(op, written, out)
    span = _span(out)
    for name, other in call.items():
        if name != written and isinstance(other, torch.Tensor) and share_memory(out, other, span):
            refuse(op, written, "in memory of its own", f"memory shared with {name}")


def offsets(cu_seqlens: torch.Tensor, tokens: int) -> list[int]:
    """Host copy of device offsets as every op reads them: clipped to [0, tokens], never decreasing. Syncs."""
    bounds, last = [], 0
    for value in cu_seqlens.tolist():
        last = max(last, min(value, tokens))
        bounds.append(last)
    return bounds or [0]


def live_slots(slots: torch.Tensor, pool: int, null_slot: int | None) -> list[int]:
    """Host copy of a slot list; -1 for every entry that is padding (negative, at or past the pool, or null). Syncs."""
    return [slot if 0 <= slot < pool and slot != null_slot else -1 for slot in slots.tolist()]


def offset_values(op: str, cu_seqlens: torch.Tensor, tokens: int) -> None:
    values = cu_seqlens.tolist()
    if values != offsets(cu_seqlens, tokens):
        refuse(op, "cu_seqlens", f"non-decreasing offsets in [0, {tokens}]", values)


def index_values(op: str, argument: str, index: torch.Tensor | None, limit: int, null: int | None = None) -> None:
    """Padding must be written as a negative index (or the null slot); at or past `limit` is an error when checking."""
    if index is None:
        return
    bad = sorted({value for value in index.flatten().tolist() if value >= limit and value != null})
    if bad:
        refuse(op, argument, f"indices below {limit} (negative is padding)", bad[:8])


def unique_writes(op: str, argument: str, slots: torch.Tensor, pool: int, null_slot: int | None) -> None:
    """Two live rows that write one slot race on a device; with checking on that is an error."""
    live = [slot for slot in live_slots(slots, pool, null_slot) if slot >= 0]
    twice = sorted({slot for slot in live if live.count(slot) > 1})
    if twice:
        refuse(op, argument, "distinct among live rows", f"repeated slots {twice[:8]}")
