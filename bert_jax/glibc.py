"""Memory allocation by GNU's C library in this process: mallopt(3), and huge pages by madvise(2). Linux only."""

import ctypes
import mmap
import sys
from collections.abc import Mapping

# Constants of glibc's malloc.h. NEVER as M_TRIM_THRESHOLD: memory is not returned to the system.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
NEVER = -1
DEFAULT_MMAP_MAX = 65536
_HUGE_PAGE = 1 << 21


def load() -> ctypes.CDLL | None:
    """The C library of this process if it is GNU's on Linux, otherwise None."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def set_malloc(library: ctypes.CDLL, settings: Mapping[int, int]) -> bool:
    """Sets parameters of malloc in order. Returns False, and stops, when one is refused."""
    return all(library.mallopt(name, value) for name, value in settings.items())


def back_by_huge_pages(library: ctypes.CDLL, size: int) -> None:
    """Grows the heap by `size` bytes of huge pages, which use memory only when they are touched.

    The heap must not return that memory to the system, and must serve blocks of that size (M_TRIM_THRESHOLD,
    M_MMAP_MAX). The system decides whether huge pages are available (/sys/kernel/mm/transparent_hugepage/enabled).
    """
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if block := library.malloc(size):  # fails under `ulimit -v`; small pages work too
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        library.madvise(start, block + size - start, mmap.MADV_HUGEPAGE)
        library.free(block)
