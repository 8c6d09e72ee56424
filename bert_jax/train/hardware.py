"""Whether this machine has a TPU or a GPU, from the files of the system, before jax is imported. Linux only.

An installed plugin says nothing about the device: images for TPUs and GPUs also run on machines without one. The
checks are those by which jax itself finds devices (jax/_src/hardware_utils.py of jax 0.12.0).
"""

from pathlib import Path

ROOT = Path("/")
_WSL = "dxg"  # any GPU in the Windows Subsystem for Linux
_GOOGLE = "0x1ae0"  # the PCI vendor, also of network cards and displays of virtual machines
# TPU v2 and v3; one without a public name; v4; v5p; v5e; v6e; tpu7x; tpu8t; tpu8i.
TPU_DEVICES = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x007c", "0x0083"})


def has_tpu(root: Path = ROOT) -> bool:
    """Whether a TPU chip is on the PCI bus of the system whose files are under `root`."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if _read(device / "vendor") == _GOOGLE and _read(device / "device") in TPU_DEVICES:
            return True
    return False


def has_nvidia_gpu(root: Path = ROOT) -> bool:
    """Whether NVIDIA's driver offers a GPU. In a container that got one GPU of several, it need not be number 0."""
    devices = root / "dev"
    return any(devices.glob("nvidia[0-9]*")) or _exists(devices, "nvidiactl", _WSL)


def has_amd_gpu(root: Path = ROOT) -> bool:
    """Whether AMD's driver for computing offers a GPU: one of its nodes has SIMD units, which processors lack."""
    if _exists(root / "dev", _WSL):
        return True
    for properties in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        lines = [line.split() for line in _read(properties).splitlines()]
        if any(line[:1] == ["simd_count"] and line[1:] != ["0"] for line in lines):
            return True
    return False


def _exists(folder: Path, *names: str) -> bool:
    return any((folder / name).exists() for name in names)


def _read(path: Path) -> str:
    """The text of a file, empty if it cannot be read: a device may leave, and a container may hide it."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
