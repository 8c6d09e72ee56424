"""What a process frees stays with it, once it was asked to."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

# Touches and frees 20 MB, forty times, and prints how many pages the system gave for it.
PROGRAM = """
import resource, sys
from data_prep.processes import keep_freed
if "keep" in sys.argv:
    keep_freed()
def use():
    blocks = [bytearray(1 << 20) for _ in range(20)]
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str) -> int:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    return int(ended.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not GNU's")
def test_freed_memory_is_used_again_without_the_system() -> None:
    given_back, kept = faults(), faults("keep")
    assert kept < 1000 < given_back, (kept, given_back)


HUGE = """
from data_prep.processes import keep_freed
keep_freed()
areas = open("/proc/self/smaps").read().split("VmFlags:")
print(any("[heap]" in area and " hg" in flags.split("\\n")[0] for area, flags in zip(areas, areas[1:])))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not GNU's")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_the_heap_may_have_huge_pages() -> None:
    ended = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "True"
