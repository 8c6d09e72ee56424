import platform
import subprocess
import sys

import pytest

# Frees and asks again for a large block, counting the pages that the kernel had to hand out the second time.
PROGRAM = """
import ctypes, resource, sys
from bert_jax.train.host_memory import keep_freed_memory
assert "jax" not in sys.modules
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def touch():
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory")
def test_a_freed_block_is_not_faulted_in_again():
    assert faults("keep") < 100
    assert faults("as it is") > 1000
