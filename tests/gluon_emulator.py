"""Gluon kernels run program by program in plain torch, where neither a GPU nor an interpreter takes them.

`load("kda", "decode_gluon")` gives that module of `thalweg` with kernels of the same Python text and a stand-in for the
language: layouts mean nothing, tensors are torch's, shared memory is a NaN-filled tensor, bulk copies and products are
done when they are started, a pointer knows its storage and refuses to leave it. So indices, masks and formulas are
checked; layouts, barriers, races and the order of sums are not.
"""

import contextlib
import importlib.util
import inspect
import sys
import types
from pathlib import Path

import torch

PACKAGE = Path(__file__).parents[1] / "thalweg"
PARTS = {"kda": ("step_gluon",), "qsa": ("heads_gluon", "share_gluon")}  # that kernels are made of, in order


class DType:
    def __init__(self, dtype: torch.dtype):
        self.torch, self.primitive_bitwidth = dtype, 8 * dtype.itemsize


class Tensor(torch.Tensor):
    """A value, as in a kernel: another name of it does not change when it does."""

    def __iadd__(self, x):
        return self + x

    def __isub__(self, x):
        return self - x

    def to(self, dtype, bitcast=False):
        dtype = dtype.torch if isinstance(dtype, DType) else dtype
        if bitcast:  # of 32 bits: whole numbers that torch made wider first become such again
            return (self if self.dtype.is_floating_point else super().to(torch.int32)).view(dtype)
        return super().to(dtype)


def tensor(value, dtype=None) -> Tensor:
    return torch.as_tensor(value, dtype=dtype).as_subclass(Tensor)


class Pointer:
    """Addresses in the storage of a tensor, in elements."""

    def __init__(self, flat: torch.Tensor, offsets: torch.Tensor):
        self.flat, self.offsets = flat, offsets
        self.dtype = types.SimpleNamespace(element_ty=DType(flat.dtype))

    def __add__(self, offsets):
        return Pointer(self.flat, self.offsets + offsets)

    def __getitem__(self, at):
        return Pointer(self.flat, self.offsets[at])

    def unsqueeze(self, axis):
        return Pointer(self.flat, self.offsets.unsqueeze(axis))

    def reached(self, mask):
        mask = torch.as_tensor(True if mask is None else mask).broadcast_to(self.offsets.shape)
        inside = (self.offsets >= 0) & (self.offsets < len(self.flat))
        assert (inside | ~mask).all(), "an address outside of the tensor's storage"
        return mask


def pointer(x: torch.Tensor) -> Pointer:
    count = x.untyped_storage().nbytes() // x.element_size()
    return Pointer(torch.as_strided(x, (count,), (1,), 0), tensor(x.storage_offset()))


class Constant(int):
    value = property(int)


class Shared:
    def __init__(self, data: torch.Tensor):
        self.data = data

    def index(self, i):
        return Shared(self.data[i])

    def slice(self, start, length, dim=0):
        assert start % length == 0, "tiles are cut at multiples of their size"
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def load(self, layout):
        return self.data.clone().as_subclass(Tensor)

    def store(self, x):
        self.data.copy_(x)


def _load(p: Pointer, mask=None, other=0.0, cache_modifier="", volatile=False):
    mask = p.reached(mask)
    found = p.flat[torch.where(mask, p.offsets, 0)]
    return torch.where(mask, found, torch.as_tensor(other, dtype=found.dtype)).as_subclass(Tensor)


def _store(p: Pointer, value, mask=None, cache_modifier=""):
    mask = p.reached(mask)
    value = torch.as_tensor(value, dtype=p.flat.dtype).broadcast_to(mask.shape)
    p.flat[p.offsets.broadcast_to(mask.shape)[mask]] = value[mask].as_subclass(torch.Tensor)


def _atomic_add(p: Pointer, value, mask=None, sem=""):
    before = _load(p, mask)
    _store(p, before + value, mask)
    return before


class Kernel:
    def __init__(self, fn):
        self.fn = fn

    def __getitem__(self, grid):
        def launch(*args, maxnreg=None, enable_fp_fusion=None, launch_pdl=False, **constants):
            if "num_warps" not in inspect.signature(self.fn).parameters:
                constants.pop("num_warps", None)
            args = [pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
            LANGUAGE.num_programs = lambda axis: tensor(grid[axis])
            for y in range(grid[1] if len(grid) > 1 else 1):
                for x in range(grid[0]):
                    LANGUAGE.program_id = lambda axis, at=(x, y): tensor(at[axis], torch.int32)
                    self.fn(*args, **constants)

        return launch


def _jit(fn=None, **_):
    if fn is None or not fn.__name__.endswith("_kernel"):
        return fn
    return Kernel(fn)


class Descriptor:
    def __init__(self, base, shape, strides, block, layout):
        self.base, self.shape, self.strides, self.block, self.layout = pointer(base), shape, strides, block, layout
        self.dtype = self.base.dtype.element_ty

    def box(self, where):
        """Addresses of the box at `where`, and which of them lie in the tensor."""
        o = [int(at) + torch.arange(size) for at, size in zip(where, self.block)]
        m = [(x >= 0) & (x < size) for x, size in zip(o, self.shape)]
        return self.base + (o[0][:, None] * self.strides[0] + o[1][None, :]), m[0][:, None] & m[1][None, :]


def _bulk_load(desc, where, barrier, shared, pred=True):
    if pred:
        shared.store(_load(*desc.box(where)))


def _bulk_store(desc, where, shared):
    p, m = desc.box(where)
    _store(p, shared.data, m)


def _tensors(start, end=None, step=1):
    """range, of tensors, as loops in kernels count."""
    first, last = (0, start) if end is None else (start, end)
    return (tensor(i, torch.int32) for i in range(first, last, step))


def _mma_wait(outstanding, deps):
    return deps[0] if len(deps) == 1 else tuple(deps)


def _nothing(*_, **__):
    return None


def _max(x, axis):
    """NaN gives way to any number."""
    if not x.dtype.is_floating_point:
        return x.amax(axis)
    best = x.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(axis)
    return best.where(~x.isnan().all(axis), torch.nan)


def _language():
    dtypes = {name: DType(getattr(torch, name)) for name in ("int32", "int64", "float32", "bfloat16")}
    layouts = dict.fromkeys(
        ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "NVMMASharedLayout", "NVMMADistributedLayout",
         "DotOperandLayout"), _nothing,
    )  # fmt: skip
    return types.SimpleNamespace(
        **dtypes,
        **layouts,
        constexpr=lambda value: Constant(value) if isinstance(value, int) else value,
        arange=lambda start, end, layout=None: torch.arange(start, end, dtype=torch.int32).as_subclass(Tensor),
        full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype.torch).as_subclass(Tensor),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype.torch).as_subclass(Tensor),
        allocate_shared_memory=lambda dtype, shape, layout=None, value=None: Shared(
            torch.full(shape, torch.nan if dtype.torch.is_floating_point else 0, dtype=dtype.torch)
            if value is None
            else value.clone()
        ),
        load=_load,
        store=_store,
        atomic_add=_atomic_add,
        where=lambda c, a, b: torch.where(c, a, b),
        sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
        max=_max,
        convert_layout=lambda x, layout: x,
        min=lambda x, axis: x.amin(axis),
        associative_scan=lambda x, axis, add: x.cumsum(axis, dtype=x.dtype),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        inline_asm_elementwise=lambda text, constraints, args, *_, **__: args[0],  # a move
        exp=lambda x: torch.exp(x),
        exp2=lambda x: torch.exp2(x),
        fma=lambda a, b, c: a * b + c,
        log=lambda x: torch.log(x),
        rsqrt=lambda x: torch.rsqrt(x),
        sqrt=lambda x: torch.sqrt(x),
        minimum=lambda x, y: torch.minimum(tensor(x), tensor(y)).as_subclass(Tensor),
        maximum=lambda x, y, propagate_nan=None: torch.maximum(tensor(x), tensor(y)).as_subclass(Tensor),
        reshape=lambda x, shape: x.reshape(shape),
        join=lambda x, y: torch.stack((x, y), -1),
        permute=lambda x, order: x.permute(order),
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


def _read(family: str, name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"emulated_{name}", PACKAGE / family / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    module.range = _tensors
    spec.loader.exec_module(module)
    return module


def _product(a, b, acc, use_acc=True, is_async=False):
    a = a.data if isinstance(a, Shared) else a
    return a.float() @ b.data.float() + (acc if use_acc else 0)


def _copy_async(shared, p, mask=None):
    """Zeros where the mask is not set, as the machine does it."""
    shared.store(_load(p, mask))


def load(family: str, name: str) -> types.ModuleType:
    """The file `name` of a family with the stand-in, as a module of its own."""
    gluon, root = _module("gluon", jit=_jit, constexpr_function=lambda fn: fn, language=LANGUAGE), "triton.experimental"
    mbarrier = dict.fromkeys(("init", "expect", "wait", "arrive", "invalidate", "MBarrierLayout"), _nothing)
    hopper = {
        "mbarrier": types.SimpleNamespace(**mbarrier),
        "fence_async_shared": _nothing,
        "tma": types.SimpleNamespace(store_wait=_nothing),
        "warpgroup_mma": _product,
        "warpgroup_mma_wait": _mma_wait,
    }
    ampere = {
        "async_copy": types.SimpleNamespace(commit_group=_nothing, wait_group=_nothing),
        "mma_v2": lambda a, b, acc: a.float() @ b.float() + acc,
    }
    parts = {"bulk_load": _bulk_load, "bulk_store": _bulk_store, "copy_async": _copy_async}
    parts |= dict.fromkeys(("thread_barrier", "gdc_wait", "gdc_launch_dependents"), _nothing)
    parts |= {"zero_behind_barrier": lambda x: x * 0, "no_barriers": lambda fn: fn, "BARRIERS": True}
    parts["thread"] = lambda: tensor(0, torch.int32)
    language = {
        f"{root}.gluon": gluon,
        f"{root}.gluon.language": LANGUAGE,
        f"{root}.gluon.language.nvidia.ampere": _module("a", **ampere),
        f"{root}.gluon.language.nvidia.hopper": _module("h", **hopper),
        f"{root}.gluon.nvidia.hopper": _module("h", TensorDescriptor=Descriptor),
        "thalweg.gluon": _module("g", **parts),
    }
    importlib.import_module(root)
    importlib.import_module(f"thalweg.{family}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(language))
        for part in PARTS[family]:
            stack.enter_context(_replaced({f"thalweg.{family}.{part}": _read(family, part)}))
        return _read(family, name)
