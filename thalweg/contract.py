"""Argument checks shared by the public ops: one clear error before anything is launched.

Every message reads `op: argument must be WANTED, got GOT`. Index values on the device are never trusted by an op
(offsets are clipped, bad slots are padding); the `*_values` functions here read them on the host and raise instead,
when the caller asks with `check=True` or `THALWEG_CHECK=1`.
"""

import os

import torch

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
STATES = (torch.float32, torch.bfloat16)
INDEX = (torch.int32, torch.int64)


def refuse(op: str, argument: str, wanted: str, got: object) -> None:
    raise ValueError(f"{op}: {argument} must be {wanted}, got {got}")


def checking(check: bool | None) -> bool:
    """The effective value of an op's `check` argument: None means the environment variable THALWEG_CHECK."""
    return os.environ.get("THALWEG_CHECK", "0") not in ("", "0") if check is None else bool(check)


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"
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
) -> None:
    """Raises ValueError unless `tensor` has this shape (None: any size), one of the dtypes and the device.

    names: the shape in words for the message, as "[T, H, K]". unit_stride: the last dimension must be contiguous.
    """
    if tensor is None and optional:
        return
    fits = isinstance(tensor, torch.Tensor) and (tensor.shape == shape or _matches(tensor.shape, shape))
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        sizes = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        kinds = "/".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        refuse(op, argument, f"{names + ' = ' if names else ''}{sizes} {kinds} on {device}", _describe(tensor))
    if unit_stride and tensor.numel() > 1 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        refuse(op, argument, "contiguous in its last dimension", f"strides {tuple(tensor.stride())}")


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
