"""Keeps freed host memory in the process: on a CPU the buffers of a step are then not faulted in again each step."""

import importlib.metadata
import importlib.util
import os

from bert_jax import glibc

_SETTINGS = {glibc.M_MMAP_MAX: 0, glibc.M_TRIM_THRESHOLD: glibc.NEVER, glibc.M_ARENA_MAX: 1}
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
    library = glibc.load()
    if not trains_on_cpu() or library is None:
        return False
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory < _LEAST_MEMORY or not glibc.set_malloc(library, _SETTINGS):
        return False
    glibc.back_by_huge_pages(library, memory // 2)
    return True
