"""Keeps freed host memory in the process: on a CPU the buffers of a step are then not faulted in again each step."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform

# glibc's malloc.h; mallopt(3). Values are ints, so the largest threshold is just below 2 GiB.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
M_ARENA_MAX = -8
LARGEST = 2**31 - 1


_SETTINGS = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, LARGEST), (M_ARENA_MAX, 1))


def trains_on_cpu() -> bool:
    """Whether jax will run on the CPU, as far as can be told before it starts: no plugin of an accelerator."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    plugins = importlib.util.find_spec("libtpu") or list(importlib.metadata.entry_points(group="jax_plugins"))
    return asked == "cpu" or (not asked and not plugins)


def keep_freed_memory() -> bool:
    """Tells glibc to serve every allocation from one heap that is never given back; False where that is not done.

    XLA allocates a step's buffers anew each step, and glibc's default maps and unmaps every large one, so that the
    kernel zeroes hundreds of megabytes a step (a quarter of a mini step on two cores). Call it first in a training
    command: after jax has started its threads it comes too late to help. The process then keeps its peak memory.
    Nothing is done with an accelerator, whose host threads would wait for one heap, nor with another C library.
    """
    if not trains_on_cpu() or platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) for name, value in _SETTINGS)
