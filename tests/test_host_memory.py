import ast
import importlib
import inspect
import platform
import subprocess
import sys

import pytest

# Frees and asks again for large blocks, also in threads, counting the pages that the kernel had to hand out the
# second time.
PROGRAM = """
import ctypes, resource, sys, threading
from bert_jax.train.host_memory import keep_freed_memory
assert not {"jax", "numpy", "pyarrow"}.intersection(sys.modules)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
import numpy, pyarrow
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def touch():
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
def in_threads():
    for _ in range(4):
        thread = threading.Thread(target=touch)
        thread.start()
        thread.join()
touch()
in_threads()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
in_threads()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


only_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory")


@only_glibc
def test_a_freed_block_is_not_faulted_in_again():
    assert faults("keep") < 100
    assert faults("as it is") > 1000


@pytest.mark.parametrize("module", ["bert_jax.pretrain", "bert_jax.finetune"])
def test_a_training_command_keeps_memory_before_it_imports_anything_else(module):
    source = ast.parse(inspect.getsource(importlib.import_module(module)))
    _, imported, guard, *_ = source.body
    assert ast.unparse(imported) == "from bert_jax.train.host_memory import keep_freed_memory"
    assert ast.unparse(guard) == "if __name__ == '__main__':\n    keep_freed_memory()"
