"""Gluon kernels run program by program in plain torch, where neither a GPU nor an interpreter takes them.

`load("decode_gluon")` gives a module of `thalweg.kda` whose kernels are the same Python text, with a stand-in for the
language: layouts mean nothing, tensors are torch's, shared memory is a NaN-filled tensor, bulk copies are done when
they are started, a pointer knows its storage and refuses to leave it. So indices, masks and formulas are checked;
layouts, barriers, races and the order of sums are not.
"""

import contextlib
import importlib.util
import sys
import types
from pathlib import Path

import torch

KDA = Path(__file__).parents[1] / "thalweg" / "kda"


class DType:
    def __init__(self, dtype: torch.dtype):
        self.torch, self.primitive_bitwidth = dtype, 8 * dtype.itemsize


class Tensor(torch.Tensor):
    def to(self, dtype):
        return super().to(dtype.torch if isinstance(dtype, DType) else dtype)


def tensor(value, dtype=None) -> Tensor:
    return torch.as_tensor(value, dtype=dtype).as_subclass(Tensor)


class Pointer:
    """Addresses in the storage of a tensor, in elements."""

    def __init__(self, flat: torch.Tensor, offsets: torch.Tensor):
        self.flat, self.offsets = flat, offsets
        self.dtype = types.SimpleNamespace(element_ty=DType(flat.dtype))

    def __add__(self, offsets):
        return Pointer(self.flat, self.offsets + offsets)

    def reached(self, mask):
        mask = torch.as_tensor(True if mask is None else mask).broadcast_to(self.offsets.shape)
        inside = (self.offsets >= 0) & (self.offsets < len(self.flat))
        assert (inside | ~mask).all(), "an address outside of the tensor's storage"
        return mask


def pointer(x: torch.Tensor) -> Pointer:
    count = x.untyped_storage().nbytes() // x.element_size()
    return Pointer(torch.as_strided(x, (count,), (1,), 0), tensor(x.storage_offset()))


class Shared:
    def __init__(self, data: torch.Tensor):
        self.data = data

    def index(self, i):
        return Shared(self.data[i])

    def slice(self, start, length):
        assert start % length == 0, "tiles are cut at multiples of their size"
        return Shared(self.data.narrow(0, start, length))

    def load(self, layout):
        return self.data.clone().as_subclass(Tensor)

    def store(self, x):
        self.data.copy_(x)


def _load(p: Pointer, mask=None, other=0.0, cache_modifier=""):
    mask = p.reached(mask)
    found = p.flat[torch.where(mask, p.offsets, 0)]
    return torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype)).as_subclass(Tensor)


def _store(p: Pointer, value, mask=None, cache_modifier=""):
    mask = p.reached(mask)
    value = torch.as_tensor(value, dtype=p.flat.dtype).broadcast_to(mask.shape)
    p.flat[p.offsets.broadcast_to(mask.shape)[mask]] = value[mask].as_subclass(torch.Tensor)


class Kernel:
    def __init__(self, fn):
        self.fn = fn

    def __getitem__(self, grid):
        def launch(*args, maxnreg=None, enable_fp_fusion=None, **constants):
            args = [pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
            for y in range(grid[1]):
                for x in range(grid[0]):
                    LANGUAGE.program_id = lambda axis, at=(x, y): tensor(at[axis])
                    self.fn(*args, **constants)

        return launch


def _jit(fn=None, **_):
    if fn is None or not fn.__name__.endswith("_kernel"):
        return fn
    return Kernel(fn)


class Descriptor:
    def __init__(self, base, shape, strides, block, layout):
        self.base, self.shape, self.strides, self.block, self.layout = pointer(base), shape, strides, block, layout


def _bulk_load(desc, where, barrier, shared, pred=True):
    if pred:
        assert where[0] >= 0 and where[0] + desc.block[0] <= desc.shape[0]
        o_r, o_c = torch.arange(desc.block[0])[:, None], torch.arange(desc.block[1])[None, :]
        shared.store(_load(desc.base + (where[0] + o_r) * desc.strides[0] + (where[1] + o_c)))


def _nothing(*_, **__):
    return None


def _language():
    dtypes = {name: DType(getattr(torch, name)) for name in ("int32", "int64", "float32", "bfloat16")}
    layouts = dict.fromkeys(("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "NVMMASharedLayout"), _nothing)
    return types.SimpleNamespace(
        **dtypes,
        **layouts,
        constexpr=lambda value: value,
        arange=lambda start, end, layout=None: torch.arange(start, end).as_subclass(Tensor),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype.torch).as_subclass(Tensor),
        allocate_shared_memory=lambda dtype, shape, layout=None: Shared(
            torch.full(shape, torch.nan if dtype.torch.is_floating_point else 0, dtype=dtype.torch)
        ),
        load=_load,
        store=_store,
        where=lambda c, a, b: torch.where(c, a, b),
        sum=lambda x, axis: x.sum(axis),
        exp=lambda x: torch.exp(x),
        log=lambda x: torch.log(x),
        rsqrt=lambda x: torch.rsqrt(x),
        minimum=lambda x, y: x.clamp(max=y),
        reshape=lambda x, shape: x.reshape(shape),
        static_range=range,
    )


LANGUAGE = _language()


def _module(name: str, **names) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(names)
    return module


@contextlib.contextmanager
def _replaced(modules: dict[str, types.ModuleType]):
    """Other modules under some names, also where a package holds the former one as an attribute."""
    places = [(sys.modules, name, module) for name, module in modules.items()]
    for name, module in modules.items():
        package, _, tail = name.rpartition(".")
        if package in sys.modules:
            places.append((vars(sys.modules[package]), tail, module))
    before = [(holder, key, holder.get(key)) for holder, key, _ in places]
    try:
        for holder, key, module in places:
            holder[key] = module
        yield
    finally:
        for holder, key, module in before:
            holder.pop(key, None)
            if module is not None:
                holder[key] = module


def _read(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"emulated_{name}", KDA / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def load(name: str) -> types.ModuleType:
    """The file `name` of `thalweg.kda` with the stand-in, as a module of its own."""
    gluon, root = _module("gluon", jit=_jit, constexpr_function=lambda fn: fn, language=LANGUAGE), "triton.experimental"
    mbarrier = types.SimpleNamespace(init=_nothing, expect=_nothing, wait=_nothing, MBarrierLayout=_nothing)
    language = {
        f"{root}.gluon": gluon,
        f"{root}.gluon.language": LANGUAGE,
        f"{root}.gluon.language.nvidia.hopper": _module("h", mbarrier=mbarrier, fence_async_shared=_nothing),
        f"{root}.gluon.nvidia.hopper": _module("h", TensorDescriptor=Descriptor),
        "thalweg.gluon": _module("g", bulk_load=_bulk_load, thread_barrier=_nothing),
    }
    importlib.import_module(root)
    importlib.import_module("thalweg.kda")
    with _replaced(language):
        step = _read("step_gluon")
        with _replaced({"thalweg.kda.step_gluon": step}):
            return _read(name)
