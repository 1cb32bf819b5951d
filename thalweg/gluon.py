"""Gluon's names as Triton 3.6 and 3.9 have them, where they differ: kernels import them from here."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
bulk_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
bulk_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

__all__ = ["bulk_load", "bulk_store", "copy_async", "gdc_launch_dependents", "gdc_wait", "thread_barrier"]
