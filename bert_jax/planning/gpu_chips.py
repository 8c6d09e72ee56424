"""The kinds of NVIDIA GPU and their peak figures, as in servers of eight GPUs (SXM modules).

What the compiler must know of a GPU (multiprocessors, caches, memory, bandwidth) is from openxla/xla,
xla/backends/gpu/target_config/specs (a100_sxm_80, h100_sxm, h200 and b200.txtpb), where it was read from such GPUs.
Peak FLOP/s without sparsity are from NVIDIA's data sheets of A100, H100, H200 and HGX B200; so is the bandwidth of
NVLink, of which half is that of one direction. The network is that of DGX A100, H100, H200 and B200: a ConnectX adapter
for each GPU, of 200 Gbit/s for A100 and of 400 Gbit/s for the others (data sheets of those systems).

The matmul efficiency is the speed of the fastest bfloat16 matmul that was measured, as a share of the peak: 271.2 of
312 TFLOP/s on A100, 794.5 of 989 on H100 (S. Bekman, "Machine Learning Engineering", Maximum Achievable Matmul FLOPS,
github.com/stas00/ml-engineering, compute/accelerator). H200, which has the processor of H100, and B200 take H100's.
"""

import dataclasses
from dataclasses import dataclass

from bert_jax.train.metrics import PEAK_FLOPS

LARGEST_HOST = 8  # GPUs with NVLink between them


@dataclass(frozen=True)
class Gpu:
    """One GPU. Bandwidths are bytes per second in one direction, except that of the memory."""

    name: str  # the kind in a topology's name, such as h100 in h100:8
    device_kind: str  # as jax names it
    peak_flops: float  # bfloat16 with float32 accumulation
    tf32_flops: float  # float32 arrays, as jax multiplies them by default
    float32_flops: float  # float32 arrays at highest precision
    matmul_efficiency: float
    memory_bytes: int
    memory_bandwidth: float
    nvlink_bandwidth: float
    network_bandwidth: float  # of a GPU's share of its host's network adapters
    capability: tuple[int, str]  # compute capability, and the set of instructions beyond it
    multiprocessors: int
    units: int  # float32 units of a multiprocessor
    clock_ghz: float
    cache_bytes: int  # the second level
    shared_bytes: int  # the first level and shared memory of a multiprocessor
    block_shared_bytes: int  # the most that a block may use of it
    modelled: bool = True  # whether XLA's cost model has measured tables for it, without which it fails

    @property
    def target(self) -> str:
        """What XLA compiles for, as text of its protocol buffer GpuTargetConfigProto."""
        major, extension = self.capability
        fields = {
            "threads_per_warp": 32,
            "threads_per_block_limit": 1024,
            "threads_per_core_limit": 2048,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "core_count": self.multiprocessors,
            "fpus_per_core": self.units,
            "clock_rate_ghz": self.clock_ghz,
            "memory_bandwidth": int(self.memory_bandwidth),
            "device_memory_size": self.memory_bytes,
            "l2_cache_size": self.cache_bytes,
            "shared_memory_per_block": 49152,
            "shared_memory_per_core": self.shared_bytes,
            "shared_memory_per_block_optin": self.block_shared_bytes,
        }
        listed = " ".join(f"{name}: {value}" for name, value in fields.items())
        capability = f"cuda_compute_capability {{ major: {major} feature_extension: {extension} }}"
        return (
            f'gpu_device_info {{ {listed} {capability} }} platform_name: "CUDA" '
            f'dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{self.device_kind}"'
        )


_H100 = Gpu(
    name="h100",
    device_kind="NVIDIA H100 80GB HBM3",
    peak_flops=PEAK_FLOPS["NVIDIA H100 80GB HBM3"],
    tf32_flops=494.5e12,
    float32_flops=67e12,
    matmul_efficiency=0.80,
    memory_bytes=84_942_979_072,
    memory_bandwidth=3.35232e12,
    nvlink_bandwidth=450e9,
    network_bandwidth=50e9,
    capability=(9, "ACCELERATED_FEATURES"),
    multiprocessors=132,
    units=128,
    clock_ghz=1.98,
    cache_bytes=52_428_800,
    shared_bytes=233_472,
    block_shared_bytes=232_448,
)
_H200 = dataclasses.replace(
    _H100,
    name="h200",
    device_kind="NVIDIA H200",
    peak_flops=PEAK_FLOPS["NVIDIA H200"],
    memory_bytes=151_397_597_184,
    memory_bandwidth=4.8e12,
)
_A100 = Gpu(
    name="a100",
    device_kind="NVIDIA A100-SXM4-80GB",
    peak_flops=PEAK_FLOPS["NVIDIA A100-SXM4-80GB"],
    tf32_flops=156e12,
    float32_flops=19.5e12,
    matmul_efficiency=0.87,
    memory_bytes=85_100_068_864,
    memory_bandwidth=2.03904e12,
    nvlink_bandwidth=300e9,
    network_bandwidth=25e9,
    capability=(8, "NONE"),
    multiprocessors=108,
    units=64,
    clock_ghz=1.41,
    cache_bytes=41_943_040,
    shared_bytes=167_936,
    block_shared_bytes=166_912,
    modelled=False,
)
_B200 = Gpu(
    name="b200",
    device_kind="NVIDIA B200",
    peak_flops=PEAK_FLOPS["NVIDIA B200"],
    tf32_flops=1125e12,
    float32_flops=75e12,
    matmul_efficiency=0.80,
    memory_bytes=191_514_411_008,
    memory_bandwidth=7.67232e12,
    nvlink_bandwidth=900e9,
    network_bandwidth=50e9,
    capability=(10, "ACCELERATED_FEATURES"),
    multiprocessors=148,
    units=128,
    clock_ghz=1.965,
    cache_bytes=132_644_864,
    shared_bytes=233_472,
    block_shared_bytes=232_448,
)
GPUS = {gpu.name: gpu for gpu in (_A100, _H100, _H200, _B200)}
