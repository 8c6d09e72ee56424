"""Memory that stays in the process, and devices that are found before jax is imported."""

import importlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from bert_jax import host
from bert_jax.host import trains_on_cpu

# Frees and asks again for large blocks, also in threads, counting the pages that the kernel had to hand out the
# second time.
PROGRAM = """
import ctypes, resource, sys, threading
from bert_jax.host import keep_freed_memory
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


@only_glibc
@pytest.mark.parametrize(
    ("name", "kept"), [("pretrain", True), pytest.param("finetune", True, marks=pytest.mark.slow), ("recipes", False)]
)
def test_a_training_command_keeps_memory_before_its_module_is_imported(name, kept):
    program = (
        "import sys; from bert_jax.commands import main as commands\n"
        "def keep(): print('kept', {'jax', 'numpy', 'pyarrow'}.isdisjoint(sys.modules))\n"
        "commands.keep_freed_memory = keep; commands.main([sys.argv[1], '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kept True\n" if kept else "usage: ")


def install(site, *plugins):
    """Makes the plugins installed packages of a folder: libtpu as a module, others by an entry point of jax."""
    site.mkdir()
    for plugin in plugins:
        if plugin == "libtpu":
            (site / plugin).mkdir()
            (site / plugin / "__init__.py").touch()
            continue
        package = site / f"{plugin}-1.0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text(f"[jax_plugins]\n{plugin} = jax_plugins.{plugin}\n")


def attach(root, *devices):
    """Makes the files of a machine with these devices."""
    for number, device in enumerate(devices):
        if device == "tpu":
            folder = root / f"sys/bus/pci/devices/0000:00:{number:02}.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text("0x1ae0\n")
            (folder / "device").write_text("0x0063\n")
        elif device == "nvidia":
            (root / "dev").mkdir(parents=True, exist_ok=True)
            (root / "dev/nvidia0").touch()


@pytest.mark.parametrize(
    ("platforms", "plugins", "devices", "on_cpu"),
    [
        ("", (), (), True),
        ("", ("libtpu", "xla_cuda12", "xla_rocm7"), (), True),
        ("", ("libtpu",), ("tpu",), False),
        ("", ("xla_cuda13",), ("nvidia",), False),
        ("", ("libtpu",), ("nvidia",), True),
        ("", (), ("tpu", "nvidia"), True),
        ("", ("some_other_device",), (), False),
        ("cpu", ("libtpu", "xla_cuda12"), ("tpu", "nvidia"), True),
        ("tpu", ("libtpu",), (), False),
    ],
)
def test_training_is_on_the_cpu_unless_a_device_and_its_plugin_are_there(
    platforms, plugins, devices, on_cpu, tmp_path, monkeypatch
):
    install(tmp_path / "site", *plugins)
    attach(tmp_path / "machine", *devices)
    # The packages of this Python are left out of the path, since they may include plugins.
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *(path for path in sys.path if "-packages" not in path)])
    monkeypatch.delitem(sys.modules, "libtpu", raising=False)
    importlib.invalidate_caches()
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    assert trains_on_cpu(tmp_path / "machine") is on_cpu


# Devices are found in made-up system files, and where jax finds them.


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_pci(root: Path, **parts: str) -> None:
    """Adds a PCI device with these files."""
    number = len(list((root / "sys/bus/pci/devices").glob("*")))
    for name, text in parts.items():
        write(root / f"sys/bus/pci/devices/0000:00:{number:02}.0" / name, f"{text}\n")


def found(root: Path) -> tuple[bool, bool, bool]:
    return host.has_tpu(root), host.has_nvidia_gpu(root), host.has_amd_gpu(root)


def test_a_machine_without_devices_or_without_these_files_has_none(tmp_path):
    assert found(tmp_path) == (False, False, False)
    write_pci(tmp_path, vendor="0x8086", device="0x0063", **{"class": "0x060000"})  # not Google's
    write_pci(tmp_path, vendor="0x1ae0", device="0x0042", **{"class": "0x020000"})  # the network card gVNIC
    write_pci(tmp_path, device="0x0063")
    write_pci(tmp_path, vendor="0x1ae0")
    write(tmp_path / "dev/null")
    write(tmp_path / "dev/nvidia-modprobe")
    assert found(tmp_path) == (False, False, False)


@pytest.mark.parametrize("device", sorted(host.TPU_DEVICES))
def test_a_tpu_is_found_among_other_devices(device, tmp_path):
    write_pci(tmp_path, vendor="0x1ae0", device="0x0042")
    write_pci(tmp_path, vendor="0x1ae0", device=device)
    assert found(tmp_path) == (True, False, False)


def test_every_tpu_that_jax_knows_is_found():
    """After an update of jax, its new identifiers belong into TPU_DEVICES."""
    known = pytest.importorskip("jax._src.hardware_utils", reason="this jax keeps its table elsewhere")
    assert set(known._TPU_PCI_DEVICE_IDS) <= host.TPU_DEVICES


@pytest.mark.parametrize(
    ("files", "nvidia", "amd"),
    [
        (["nvidia0"], True, False),
        (["nvidia5"], True, False),
        (["nvidiactl"], True, False),
        (["dxg"], True, True),
        (["kfd"], False, False),  # AMD's driver is loaded; whether it has a GPU is in its topology
    ],
)
def test_a_gpu_is_found_by_the_files_of_its_driver(files, nvidia, amd, tmp_path):
    for name in files:
        write(tmp_path / "dev" / name)
    assert found(tmp_path) == (False, nvidia, amd)


def test_an_amd_gpu_is_a_node_with_simd_units(tmp_path):
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 16\nsimd_count 0\nmem_banks_count 1\n")
    assert found(tmp_path) == (False, False, False)
    write(nodes / "1/properties", "cpu_cores_count 0\nsimd_count 432\nmem_banks_count 1\n")
    assert found(tmp_path) == (False, False, True)


def test_limits_of_memory_and_mappings_are_the_container_s_and_the_kernel_s(tmp_path: Path) -> None:
    whole = host.total_memory(tmp_path)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") and host.most_mappings(tmp_path) == 65_530
    for name, value in (("sys/fs/cgroup/memory.max", "1048576\n"), ("proc/sys/vm/max_map_count", "1000\n")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(value)
    assert (host.total_memory(tmp_path), host.most_mappings(tmp_path)) == (1 << 20, 1000)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert host.total_memory(tmp_path) == whole
