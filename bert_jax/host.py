"""The host: memory that stays in the process, and accelerators found before jax is imported. Imports nothing heavy.

Read `keep_freed_memory` first, at the end. Memory is set by parameters of GNU's C library, mallopt(3) and madvise(2).
Devices are looked up in system files, as jax itself does (jax/_src/hardware_utils.py of jax 0.12.0): an installed
plugin says nothing, because images for TPUs and GPUs also run on machines without one.
"""

import ctypes
import importlib.metadata
import importlib.util
import mmap
import os
import sys
from collections.abc import Mapping
from pathlib import Path

# Constants of glibc's malloc.h. NEVER as M_TRIM_THRESHOLD: memory is not returned to the system.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
NEVER = -1
DEFAULT_MMAP_MAX = 65536
_HUGE_PAGE = 1 << 21
# With less memory nothing is kept: fragmentation of a heap that never shrinks can double the memory of a process.
_LEAST_MEMORY = 6 << 30

ROOT = Path("/")
_WSL = "dxg"  # any GPU in the Windows Subsystem for Linux
_GOOGLE = "0x1ae0"  # the PCI vendor, also of network cards and displays of virtual machines
# TPU v2 and v3; one without a public name; v4; v5p; v5e; v6e; tpu7x; tpu8t; tpu8i.
TPU_DEVICES = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x007c", "0x0083"})


def load() -> ctypes.CDLL | None:
    """Returns this process's C library if it is GNU's on Linux, otherwise None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def set_malloc(library: ctypes.CDLL, settings: Mapping[int, int]) -> bool:
    """Sets parameters of malloc in order. Returns False, and stops, when one is refused."""
    return all(library.mallopt(name, value) for name, value in settings.items())


def back_by_huge_pages(library: ctypes.CDLL, size: int) -> None:
    """Grows the heap by `size` bytes of huge pages, which use memory only when they are touched.

    Before that, set_malloc must make the heap keep that memory and serve blocks of that size (M_TRIM_THRESHOLD,
    M_MMAP_MAX). The system decides whether huge pages are available (/sys/kernel/mm/transparent_hugepage/enabled).
    """
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if block := library.malloc(size):  # fails under `ulimit -v`; small pages work too
        # madvise takes whole pages, and the block may begin inside one.
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        library.madvise(start, block + size - start, mmap.MADV_HUGEPAGE)
        library.free(block)


def has_tpu(root: Path = ROOT) -> bool:
    """Whether a TPU chip is on the PCI bus of the system whose files are under `root`."""
    buses = (root / "sys/bus/pci/devices").glob("*")
    return any(_read(device / "vendor") == _GOOGLE and _read(device / "device") in TPU_DEVICES for device in buses)


def has_nvidia_gpu(root: Path = ROOT) -> bool:
    """Whether NVIDIA's driver offers a GPU. In a container that got one GPU of several, it need not be number 0."""
    devices = root / "dev"
    names = ("nvidiactl", _WSL)
    return any(devices.glob("nvidia[0-9]*")) or any((devices / name).exists() for name in names)


def has_amd_gpu(root: Path = ROOT) -> bool:
    """Whether AMD's compute driver offers a GPU: one of its nodes has SIMD units, which processors lack."""
    files = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    lines = [line.split() for file in files for line in _read(file).splitlines()]
    return (root / "dev" / _WSL).exists() or any(line[:1] == ["simd_count"] and line[1:] != ["0"] for line in lines)


def _read(path: Path) -> str:
    """Returns a file's text, empty if it cannot be read: a device may leave, and a container may hide it."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def total_memory(root: Path = ROOT) -> int:
    """Returns the bytes of memory that this process and its page cache may use: the machine's or the container's."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(root / "sys/fs/cgroup/memory.max")  # "max" without a limit
    return min(memory, int(limit)) if limit.isdecimal() else memory


def most_mappings(root: Path = ROOT) -> int:
    """Returns how many files and memory areas the kernel lets a process map."""
    limit = _read(root / "proc/sys/vm/max_map_count")
    return int(limit) if limit.isdecimal() else 65_530  # Linux's default


def trains_on_cpu(root: Path = ROOT) -> bool:
    """Whether jax will run on the CPU, as far as this is known before it starts.

    Without JAX_PLATFORMS, jax takes an accelerator if its plugin is installed and the machine, whose files are under
    `root`, has such a device. A plugin for devices other than TPUs and GPUs counts as one that has its device.
    """
    if requested := os.environ.get("JAX_PLATFORMS", ""):
        return requested == "cpu"
    has_libtpu = "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None
    if has_libtpu and has_tpu(root):
        return False
    for plugin in importlib.metadata.entry_points(group="jax_plugins"):  # such as xla_cuda12
        has_device = has_nvidia_gpu if "cuda" in plugin.name else has_amd_gpu if "rocm" in plugin.name else None
        if has_device is None or has_device(root):
            return False
    return True


def keep_freed_memory() -> bool:
    """Makes glibc serve every allocation from one heap of huge pages that is never returned to the system.

    XLA allocates the buffers of every step, and by default glibc maps and unmaps each large one, so the kernel zeroes
    gigabytes a step, page by page: a seventh of a base step on two cores, a quarter of a mini one. The process then
    keeps its peak memory and, through fragmentation, up to twice that.

    Call it before numpy, pyarrow or jax is imported. Their threads have heaps of their own, which glibc gives to other
    threads too, and which cannot hold a large block.

    Returns:
        False, without a change, if jax will use an accelerator (whose host threads would wait for the one heap), or on
        a machine with another C library or less than 6 GiB of memory.
    """
    library = load()
    if not trains_on_cpu() or library is None:
        return False
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: NEVER, M_ARENA_MAX: 1}
    if memory < _LEAST_MEMORY or not set_malloc(library, settings):
        return False
    back_by_huge_pages(library, memory // 2)
    return True
