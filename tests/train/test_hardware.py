"""Devices are found in made-up system files, and where jax finds them."""

from pathlib import Path

import pytest

from bert_jax import host


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
