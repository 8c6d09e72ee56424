"""What a process frees stays with it, once it was asked to."""

import ctypes
import subprocess
import sys

import pytest

# Touches and frees 20 MB, forty times, and prints how many pages the system gave for it.
PROGRAM = """
import resource, sys
from data_prep.memory import keep_freed
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
