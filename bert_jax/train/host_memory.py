"""Keeps freed host memory in the process: on a CPU the buffers of a step are then not faulted in again each step."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform

# glibc's malloc.h, mallopt(3); -1 never trims. Linux's mman-common.h, madvise(2).
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
NEVER = -1
MADV_HUGEPAGE = 14

_SETTINGS = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_ARENA_MAX, 1))
_HUGE_PAGE = 1 << 21
# With less memory than this nothing is kept: the holes of a heap that never shrinks can double what a process holds.
_LEAST_MEMORY = 6 << 30


def trains_on_cpu() -> bool:
    """Whether jax will run on the CPU, as far as can be told before it starts: no plugin of an accelerator."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    plugins = importlib.util.find_spec("libtpu") or list(importlib.metadata.entry_points(group="jax_plugins"))
    return asked == "cpu" or (not asked and not plugins)


def keep_freed_memory() -> bool:
    """Tells glibc to serve every allocation from one heap of huge pages that is never given back.

    XLA allocates a step's buffers anew each step, and glibc's default maps and unmaps every large one, so that the
    kernel zeroes gigabytes a step, page by page: a seventh of a base step on two cores, a quarter of a mini one.
    Call it first in a training command: after jax has started its threads it comes too late to help. The process
    then keeps its peak memory, and by the holes of the heap up to twice that.

    Returns False, and does nothing, with an accelerator (whose host threads would wait for one heap), with another C
    library, or with less than 6 GiB of memory.
    """
    if not trains_on_cpu() or platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory < _LEAST_MEMORY:
        return False
    libc = ctypes.CDLL(None)
    if not all(libc.mallopt(name, value) for name, value in _SETTINGS):
        return False
    _back_by_huge_pages(libc, memory // 2)
    return True


def _back_by_huge_pages(libc: ctypes.CDLL, size: int) -> None:
    """Grows the heap by `size` bytes, which costs addresses but no memory until they are touched, as huge pages."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if block := libc.malloc(size):  # refused where addresses are rationed (ulimit -v); small pages serve too
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(start, block + size - start, MADV_HUGEPAGE)
        libc.free(block)
