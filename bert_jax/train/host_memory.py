"""Keeps freed host memory in the process, so that a CPU step's buffers are not faulted in again at every step."""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from bert_jax import glibc
from bert_jax.train import hardware

_SETTINGS = {glibc.M_MMAP_MAX: 0, glibc.M_TRIM_THRESHOLD: glibc.NEVER, glibc.M_ARENA_MAX: 1}
# With less memory nothing is kept: fragmentation of a heap that never shrinks can double what a process holds.
_LEAST_MEMORY = 6 << 30


def trains_on_cpu(root: Path = hardware.ROOT) -> bool:
    """Whether jax will run on the CPU, as far as is known before it starts.

    Without JAX_PLATFORMS, jax takes an accelerator if its plugin is installed and the machine, whose files are under
    `root`, has such a device. A plugin for other devices than TPUs and GPUs counts as one that has its device.
    """
    if requested := os.environ.get("JAX_PLATFORMS", ""):
        return requested == "cpu"
    has_libtpu = "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None
    if has_libtpu and hardware.has_tpu(root):
        return False
    return not any(_has_device(plugin.name, root) for plugin in importlib.metadata.entry_points(group="jax_plugins"))


def _has_device(plugin: str, root: Path) -> bool:
    """Whether the machine has a device for a plugin of that name, such as xla_cuda12."""
    if "cuda" in plugin:
        return hardware.has_nvidia_gpu(root)
    if "rocm" in plugin:
        return hardware.has_amd_gpu(root)
    return True


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
