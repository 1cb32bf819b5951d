"""Gluon's names as Triton 3.6 and 3.9 have them, where they differ: kernels import them from here."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
bulk_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
bulk_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

# gluon.jit for what mbarriers order. Triton 3.6 does not know what shared memory an argument is, and puts no barrier of
# the partition's threads between two accesses. Newer ones do, and each thread must come by: BARRIERS.
no_barriers = gluon.jit(noinline=True)
BARRIERS = gl.constexpr(not triton.__version__.startswith("3.6."))


@gluon.jit
def thread():
    """The number of this thread in its block."""
    return gl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def zero_behind_barrier(x):
    """0, the result of a barrier of all threads. x: int32, not negative.

    What is loaded in front of it is asked for before anything waits for a value that this is added to: ptxas moves
    loads behind such a wait, and through a plain barrier the wait to the front, but not through a barrier's result.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.s32 p, $1, 0; bar.red.popc.u32 $0, 0, p; }", "=r,r", [x], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


__all__ = [
    "BARRIERS",
    "bulk_load",
    "bulk_store",
    "copy_async",
    "gdc_launch_dependents",
    "gdc_wait",
    "no_barriers",
    "thread",
    "thread_barrier",
    "zero_behind_barrier",
]
