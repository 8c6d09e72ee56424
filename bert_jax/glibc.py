"""How GNU's C library allocates in this process: mallopt(3), and huge pages by madvise(2). Elsewhere there is none."""

import ctypes
import mmap
import sys
from collections.abc import Mapping

# glibc's malloc.h; -1 as a threshold for giving memory back: never.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
NEVER = -1
DEFAULT_MMAP_MAX = 65536
_HUGE_PAGE = 1 << 21


def load() -> ctypes.CDLL | None:
    """The C library of this process, where it is GNU's and the system Linux."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def set_malloc(library: ctypes.CDLL, settings: Mapping[int, int]) -> bool:
    """Sets parameters of malloc one after another, until one is refused: False."""
    return all(library.mallopt(name, value) for name, value in settings.items())


def back_by_huge_pages(library: ctypes.CDLL, size: int) -> None:
    """Grows the heap by `size` bytes, which costs addresses but no memory until they are touched, as huge pages.

    For a heap that gives less than that back and serves blocks of that size (M_TRIM_THRESHOLD, M_MMAP_MAX). Whether
    there are huge pages is for the system to say (/sys/kernel/mm/transparent_hugepage/enabled).
    """
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if block := library.malloc(size):  # refused where addresses are rationed (ulimit -v); small pages serve too
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        library.madvise(start, block + size - start, mmap.MADV_HUGEPAGE)
        library.free(block)
