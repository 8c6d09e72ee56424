"""Keeps freed host memory in the process, so that a CPU step's buffers are not faulted in again at every step."""

import importlib.metadata
import importlib.util
import os

from bert_jax import glibc

_SETTINGS = {glibc.M_MMAP_MAX: 0, glibc.M_TRIM_THRESHOLD: glibc.NEVER, glibc.M_ARENA_MAX: 1}
# With less memory nothing is kept: fragmentation of a heap that never shrinks can double what a process holds.
_LEAST_MEMORY = 6 << 30


def trains_on_cpu() -> bool:
    """Whether jax will run on the CPU, as far as is known before it starts: no accelerator plugin is installed."""
    requested = os.environ.get("JAX_PLATFORMS", "")
    plugins = importlib.util.find_spec("libtpu") or list(importlib.metadata.entry_points(group="jax_plugins"))
    return requested == "cpu" or (not requested and not plugins)


def keep_freed_memory() -> bool:
    """Makes glibc serve every allocation from one heap of huge pages that is never returned to the system.

    XLA allocates the buffers of every step, and by default glibc maps and unmaps each large one, so the kernel zeroes
    gigabytes a step, page by page: a seventh of a base step on two cores, a quarter of a mini one. The process then
    keeps its peak memory and, through fragmentation, up to twice that.

    Call it before numpy, pyarrow or jax is imported. Their threads have heaps of their own, which glibc gives to other
    threads too, and which cannot hold a large block.

    Returns False, and does nothing, with an accelerator (whose host threads would wait for the one heap), with another
    C library, or with less than 6 GiB of memory.
    """
    library = glibc.load()
    if not trains_on_cpu() or library is None:
        return False
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory < _LEAST_MEMORY or not glibc.set_malloc(library, _SETTINGS):
        return False
    glibc.back_by_huge_pages(library, memory // 2)
    return True
