"""Keeps freed host memory in the process: on a CPU the buffers of a step are then not faulted in again each step."""

import ctypes
import logging
import platform

# glibc's malloc.h; mallopt(3). Values are ints, so the largest threshold is just below 2 GiB.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
M_ARENA_MAX = -8
LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tells glibc to serve every allocation from one heap that is never given back; False on another C library.

    XLA allocates a step's buffers anew each step, and glibc's default maps and unmaps every large one, so that the
    kernel zeroes hundreds of megabytes a step (a quarter of a mini step on two cores). Call it first in a training
    command: after jax has started its threads it comes too late to help. The process then keeps its peak memory.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    done = all(mallopt(name, value) for name, value in _SETTINGS)
    logging.getLogger(__name__).info("host memory: freed memory is %s", "kept" if done else "given back")
    return done


_SETTINGS = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, LARGEST), (M_ARENA_MAX, 1))
