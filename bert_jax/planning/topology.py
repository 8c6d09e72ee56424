"""Names of devices, such as v5e:16x16, v5litepod-64 or h100:8, for which programs are compiled but not run.

`CHIPS` and `GPUS` hold published figures, and `parse` looks them up by name. `open_topology` asks the compiler for the
devices: libtpu for TPUs, jax's CUDA plugin for GPUs. Neither needs a device.
"""

import dataclasses
import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from bert_jax.errors import UserError, install_hint
from bert_jax.planning.program import Collective
from bert_jax.storage.remote import first_line
from bert_jax.train.metric_accumulator import PEAK_FLOPS

GIB = 2**30
EXAMPLES = "v5litepod-64, v5e:8x8, v4-64, v5p:4x4x4, v6e-256, tpu7x:2x2x2, h100:8, h200:1, h100:8x4"


@dataclass(frozen=True)
class Chip:
    """A TPU device as libtpu compiles for it: a chip, or one of the two cores of a tpu7x chip.

    Peak FLOP/s and memory bandwidth are from docs.cloud.google.com/tpu/docs, the page of each version. Link and network
    bandwidths are bytes per second in one direction, from Austin et al. 2025, "How to Scale Your Model", part 2
    (jax-ml.github.io/scaling-book). The network of tpu7x is the 100 Gbit/s of its page.
    """

    name: str
    peak_flops: float  # bfloat16 FLOPs per second
    unit: int  # rows and columns of a matrix unit
    units: int  # matrix units
    memory_bytes: float  # available to a program, according to the compiler's messages
    memory_bandwidth: float
    link_bandwidth: float  # of one link in one direction
    network_bandwidth: float  # to other slices
    wraparound_from: int  # chips along an axis; see wraps_around
    dimensions: int  # axes of a slice
    largest: int  # chips in the largest slice
    cores: int = 1  # devices per chip
    named_cores: int = 1  # TensorCores per chip, if the cloud's names count them
    platform: str = "tpu"

    @property
    def clock(self) -> float:
        """Cycles per second."""
        # A unit of n x n performs n * n multiply-adds per cycle, which are two FLOPs each.
        return self.peak_flops / (2 * self.unit**2 * self.units)

    def wraps_around(self, sides: tuple[int, ...]) -> tuple[bool, ...]:
        """Returns for every axis whether its ends are linked, which makes it a ring instead of a line."""
        # On v5e and v6e, an axis of 16 chips wraps around. On other kinds, all axes wrap around if all are multiples of
        # 4 (docs.cloud.google.com/tpu/docs/v4).
        if self.dimensions == 3:
            return (all(side % self.wraparound_from == 0 for side in sides),) * len(sides)
        return tuple(side == self.wraparound_from for side in sides)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", PEAK_FLOPS["TPU v4"], 128, 8, 30.75 * GIB, 1228e9, 4.5e10, 6.25e9, 4, 3, 4096, named_cores=2),
        Chip("v5e", PEAK_FLOPS["TPU v5 lite"], 128, 4, 15.75 * GIB, 819e9, 4.5e10, 3.125e9, 16, 2, 256),
        Chip("v5p", PEAK_FLOPS["TPU v5"], 128, 8, 95.74 * GIB, 2765e9, 9e10, 6.25e9, 4, 3, 6144, named_cores=2),
        Chip("v6e", PEAK_FLOPS["TPU v6 lite"], 256, 4, 31.25 * GIB, 1638e9, 9e10, 12.5e9, 16, 2, 256),
        # A device is a core, with half of the chip's resources.
        Chip(
            "tpu7x", PEAK_FLOPS["TPU7x"], 256, 4, 94.75 * GIB, 3690e9, 9e10, 6.25e9, 4, 3, 9216, cores=2, named_cores=2
        ),
    )
}

# Other names of kinds in clouds (docs.cloud.google.com/tpu/docs, "Accelerator type" of each version).
ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v6litepod": "v6e", "v7x": "tpu7x"}
# The shapes of slices that clouds name by size. Sizes count chips for v5e and v6e, and TensorCores, of which a chip has
# two, for v4, v5p and tpu7x. Here, keys are chips.
SHAPES = {
    2: {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    3: {
        **{1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"},
        **{512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16", 4096: "16x16x16", 6144: "16x16x24"},
    },
}
# A virtual machine holds four chips. A v5e or v6e slice of up to eight chips is one machine (ct5lp-hightpu-8t,
# ct6e-standard-8t).
HOST_CHIPS, SMALL_SLICE = 4, 8


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU in a server of eight (SXM modules). Bandwidths are bytes per second, for links in one direction.

    The compiler's figures (multiprocessors, caches, memory, bandwidth) are from openxla/xla,
    xla/backends/gpu/target_config/specs. Peak FLOP/s (without sparsity) and NVLink are from NVIDIA's data sheets for
    A100, H100, H200 and HGX B200. The network is from the sheets for DGX systems, with one ConnectX adapter per GPU.
    The matmul efficiency is the fastest measured bfloat16 matmul, as a share of the peak: 271.2 of 312 TFLOP/s on A100,
    794.5 of 989 on H100 (S. Bekman, "Machine Learning Engineering", Maximum Achievable Matmul FLOPS). H200 and B200
    use H100's.
    """

    name: str
    device_kind: str  # as jax names it
    matmul_efficiency: float
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float  # NVLink
    network_bandwidth: float
    capability: int  # the major compute capability
    multiprocessors: int
    units: int  # float32 units of a multiprocessor
    clock_ghz: float
    cache_bytes: int  # the second level
    shared_bytes: int  # the first level and shared memory of a multiprocessor
    platform: str = "gpu"

    @property
    def peak_flops(self) -> float:
        """bfloat16 FLOPs per second with float32 accumulation."""
        return PEAK_FLOPS[self.device_kind]

    @property
    def target(self) -> str:
        """Describes the GPU to XLA's compiler, as the text of a GpuTargetConfigProto."""
        # The limits that stand here as numbers are equal for all kinds in GPUS.
        extension = "NONE" if self.capability == 8 else "ACCELERATED_FEATURES"
        return (
            "gpu_device_info { threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048 "
            "registers_per_core_limit: 65536 registers_per_block_limit: 65536 "
            "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
            "thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 "
            f"core_count: {self.multiprocessors} fpus_per_core: {self.units} clock_rate_ghz: {self.clock_ghz} "
            f"memory_bandwidth: {int(self.memory_bandwidth)} device_memory_size: {self.memory_bytes} "
            f"l2_cache_size: {self.cache_bytes} shared_memory_per_block: 49152 "
            f"shared_memory_per_core: {self.shared_bytes} shared_memory_per_block_optin: {self.shared_bytes - 1024} "
            f"cuda_compute_capability {{ major: {self.capability} feature_extension: {extension} }} }} "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } '
            f'device_description_str: "{self.device_kind}"'
        )


_H100 = Gpu(
    *("h100", "NVIDIA H100 80GB HBM3", 0.80, 84_942_979_072, 3.35232e12, 450e9, 50e9),
    *(9, 132, 128, 1.98, 52_428_800, 233_472),
)
_A100 = Gpu(
    *("a100", "NVIDIA A100-SXM4-80GB", 0.87, 85_100_068_864, 2.03904e12, 300e9, 25e9),
    *(8, 108, 64, 1.41, 41_943_040, 167_936),
)
_B200 = Gpu(
    *("b200", "NVIDIA B200", 0.80, 191_514_411_008, 7.67232e12, 900e9, 50e9),
    *(10, 148, 128, 1.965, 132_644_864, 233_472),
)
_H200 = dataclasses.replace(
    _H100, name="h200", device_kind="NVIDIA H200", memory_bytes=151_397_597_184, memory_bandwidth=4.8e12
)
GPUS = {gpu.name: gpu for gpu in (_A100, _H100, _H200, _B200)}
LARGEST_HOST = 8  # GPUs with NVLink between them
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")  # in the extras gpu and gpu12

# The share of the links' bandwidth that a ring of GPUs reaches, according to XLA's model of collectives
# (xla/service/gpu/model/gpu_collective_performance_model.cc, kRingAlgorithmDiscountFactor).
RING_EFFICIENCY = 0.92

# jax gives a program this share of a GPU's memory, unless the first variable, or its older name, sets another share
# (docs.jax.dev, "GPU memory allocation").
MEMORY_FRACTION = 0.75
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

# Otherwise, libtpu would wait for the metadata server of a TPU machine, log while it compiles, warn that this machine
# has no accelerator type (any will do: the topology is given by its name), and allow only one process at a time, to
# protect real chips.
LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Topology:
    """The devices of one kind for which a program is compiled."""

    name: str
    chip: Chip | Gpu
    devices: tuple[Any, ...]  # slice by slice, or host by host
    sides: tuple[int, ...] = ()  # chips along each axis of a TPU slice; GPUs have none
    slices: int = 1  # TPU slices, or hosts of GPUs; the network between them is slower than the links within
    memory_fraction: float = 1.0  # share of a device's memory that a program can use

    @property
    def title(self) -> str:
        """The name, with the number of TPU slices: 4 x v5e:16x16."""
        return f"{self.slices} x {self.name}" if self.sides and self.slices > 1 else self.name

    @property
    def platform(self) -> str:
        """The platform's name in jax.default_backend()."""
        return self.chip.platform

    @property
    def capability(self) -> str:
        """The GPUs' compute capability, such as 9.0; empty for TPUs."""
        return f"{self.chip.capability}.0" if isinstance(self.chip, Gpu) else ""

    @property
    def memory_bytes(self) -> int:
        """The bytes on a device that a program can use."""
        return int(self.memory_fraction * self.chip.memory_bytes)

    @property
    def hosts(self) -> int:
        """How many machines feed the devices: GPU hosts, or virtual machines with TPUs."""
        if not self.sides:
            return self.slices
        chips = math.prod(self.sides)
        small = len(self.sides) == 2 and chips <= SMALL_SLICE
        return self.slices * (1 if small else math.ceil(chips / HOST_CHIPS))

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """Options for compiling without a device, in addition to the options of training."""
        # Autotuning needs a GPU to time kernels. Without it, Triton matmuls fail to compile for some shapes.
        return None if self.sides else {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

    def seconds(self, collective: Collective) -> float:
        """Returns a collective's time in a ring over the links, or over the network between slices or hosts."""
        chip = self.chip
        if isinstance(chip, Chip):
            within = chip.link_bandwidth * self.links(collective.group)
            return collective.ring_seconds(chip.network_bandwidth if collective.slices > 1 else within)
        bandwidth = chip.link_bandwidth
        if collective.slices > 1:  # the ring leaves a host through the network adapters of its own GPUs there
            bandwidth = min(bandwidth, max(collective.group / collective.slices, 1) * chip.network_bandwidth)
        return collective.ring_seconds(RING_EFFICIENCY * bandwidth)

    def links(self, group: int) -> float:
        """Returns how many of its links a TPU device can use at once within a group of devices."""
        assert isinstance(self.chip, Chip)
        # The group spans as few axes as possible: the longest one comes first, and divides the chips that are left. A
        # ring gives two links, a line only one, because its last device receives from one side. The devices on a chip
        # share its links.
        left, links = math.ceil(group / self.chip.cores), 0
        for side, wraps in sorted(zip(self.sides, self.chip.wraps_around(self.sides), strict=True), reverse=True):
            if side > 1 and left > 1:
                links += 2 if wraps else 1
                left = math.ceil(left / side)
        return max(links, 1) / self.chip.cores


def open_topology(name: str, slices: int = 1) -> Topology:
    """Opens the devices with a name for their compiler.

    Args:
        slices: The number of TPU slices.

    Raises:
        UserError: The name is unknown, the compiler does not know the devices or is not installed, or the environment
            sets an invalid share of memory.
    """
    described = parse(name, slices)
    options: dict[str, Any] = {}
    if isinstance(described.chip, Chip):
        if importlib.util.find_spec("libtpu") is None:
            raise UserError(f"libtpu, the TPU compiler, is not installed; run {install_hint('tpu')} (no TPU needed)")
        for variable, value in LIBTPU_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        compiler, names, fraction = "libtpu", (described.name, "tpu"), 1.0
        if math.prod(described.sides) == 1:  # libtpu assumes several chips per host unless this is set
            options["chips_per_host_bounds"] = [1, 1, 1]
        if described.chip.name == "v4":  # jax presents the two cores of a chip as one device
            options["chip_config_name"] = "megacore"
        if described.slices > 1:
            options["num_slices"] = described.slices
    else:
        fraction = _memory_fraction()
        if not any(importlib.util.find_spec(plugin) for plugin in PLUGINS):
            raise UserError(
                f"jax's CUDA plugin, which compiles for GPUs, is not installed; run {install_hint('gpu12')}, with gpu "
                "in place of gpu12 for CUDA 13 (no GPU needed)"
            )
        compiler, names = "jax's CUDA plugin", ("", "cuda")  # target_config describes the GPU instead of a name
        options["target_config"] = described.chip.target
        # Slices x hosts in a slice x GPUs in a host. Hosts count as slices, because NVLink does not connect them.
        options["topology"] = f"{described.slices}x1x{len(described.devices) // described.slices}"
    # Imported only now, because the import is slow, loads the plugin's libraries, and makes libtpu write to stderr.
    from jax.experimental import topologies

    try:
        opened = topologies.get_topology_desc(*names, **options)
    except (RuntimeError, ValueError) as error:  # jax.errors.JaxRuntimeError is a RuntimeError
        raise UserError(f"{compiler} refuses topology {described.name!r} ({first_line(error)})") from error
    return dataclasses.replace(described, devices=tuple(opened.devices), memory_fraction=fraction)


def parse(name: str, slices: int = 1) -> Topology:
    """Parses a name into a topology without devices.

    Args:
        name: For TPUs, KIND:AxB or KIND:AxBxC in chips, or KIND-SIZE as in clouds, such as v5e:4x8 or v5litepod-32. For
            GPUs, KIND, KIND:N or KIND:NxHOSTS, such as h100:8x4.

    Raises:
        UserError: The name is unknown.
    """

    def unknown(reason: str) -> UserError:
        return UserError(f"unknown topology {name!r}; {reason}. Examples: {EXAMPLES}")

    match = re.fullmatch(r"(\w+)(?::(\d+)(?:x(\d+))?)?", name)
    if match and match[1] in GPUS:
        gpu, gpus, hosts = GPUS[match[1]], int(match[2] or 1), int(match[3] or 1)
        if slices > 1:
            raise UserError(f"--slices is for TPUs; write several hosts of GPUs as {gpu.name}:{LARGEST_HOST}x{slices}")
        if not gpus or not hosts:
            raise unknown("use KIND:N, or KIND:NxHOSTS for N GPUs in each of several hosts")
        if gpus > LARGEST_HOST:
            several = f"{gpu.name}:{LARGEST_HOST}x{-(-gpus // LARGEST_HOST) * hosts}"
            raise unknown(f"a host has at most {LARGEST_HOST} GPUs; for more, use several hosts: {several}")
        full_name = f"{gpu.name}:{gpus}" + (f"x{hosts}" if hosts > 1 else "")
        return Topology(full_name, gpu, (None,) * (gpus * hosts), (), hosts)
    match = re.fullmatch(r"(\w+)(?::(\d+(?:x\d+)+)|-(\d+))", name)
    kind = ALIASES.get(match[1], match[1]) if match else ""
    if match is None or kind not in CHIPS:
        raise unknown(f"use KIND:AxB, KIND-SIZE or KIND:N with KIND one of {', '.join([*CHIPS, *GPUS])}")
    chip, shape = CHIPS[kind], match[2]
    if not shape:  # KIND-SIZE
        # SHAPES counts chips, but the names of some kinds count TensorCores.
        shapes = {
            chips * chip.named_cores: shape for chips, shape in SHAPES[chip.dimensions].items() if chips <= chip.largest
        }
        if int(match[3]) not in shapes:
            sizes = ", ".join(map(str, shapes))
            counted = "TensorCores, 2 per chip" if chip.named_cores > 1 else "chips"
            raise unknown(f"sizes of {kind} count {counted}: {sizes}; or write the shape, as in {kind}:AxB")
        shape = shapes[int(match[3])]
    sides = tuple(int(side) for side in shape.split("x"))
    if len(sides) != chip.dimensions or not all(sides):
        raise unknown(f"{kind} has {chip.dimensions} axes ({kind}:{'x'.join('ABC'[: chip.dimensions])})")
    if math.prod(sides) > chip.largest:
        raise unknown(f"a slice of {kind} has at most {chip.largest} chips; use --slices for more")
    return Topology(f"{kind}:{shape}", chip, (), sides, slices)


def _memory_fraction() -> float:
    """Returns the share of a GPU's memory available to a program in this environment."""
    for variable in MEMORY_VARIABLES:
        if value := os.environ.get(variable):
            try:
                fraction = float(value)
            except ValueError:
                fraction = 0.0
            if not 0 < fraction <= 1:
                raise UserError(f"{variable} is {value!r}; use a share of the memory above 0 and up to 1, such as 0.9")
            return fraction
    return MEMORY_FRACTION
