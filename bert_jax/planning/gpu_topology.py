"""Describes GPUs by name, such as h100:8 or h100:8x4, with jax's CUDA plugin on a machine without a GPU."""

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bert_jax.command import UserError, install_hint
from bert_jax.config import ModelConfig
from bert_jax.planning.collectives import Collective, collectives
from bert_jax.planning.flops import Flops
from bert_jax.planning.gpu_chips import GPUS, LARGEST_HOST, Gpu
from bert_jax.planning.gpu_step_time import (
    COLLECTIVE_LAUNCH_SECONDS,
    PALLAS_EFFICIENCY,
    kernel_of,
    matmul_flops,
    step_time,
)
from bert_jax.planning.hlo import Instruction, Program
from bert_jax.planning.memory import Memory, gib
from bert_jax.planning.roofline import Roofline
from bert_jax.planning.step_time import Kernel, StepTime

EXAMPLES = "a100:8, h100:1, h100:8, h100:8x4, h200:8, b200:8"
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")  # of the extras gpu and gpu12

# The share of the links' bandwidth that a ring reaches, by XLA's model of collectives
# (xla/service/gpu/model/gpu_collective_performance_model.cc, kRingAlgorithmDiscountFactor).
RING_EFFICIENCY = 0.92

# jax gives a program this share of a GPU's memory unless XLA_CLIENT_MEM_FRACTION, or its older name, says otherwise
# (docs.jax.dev, "GPU memory allocation").
MEMORY_FRACTION = 0.75
MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
LARGE_FRACTION = 0.95  # what a run can set if nothing else uses the GPU

# Launches that take more than this share of a step's time are worth a line of advice.
WORTH = 0.05


@dataclass(frozen=True)
class GpuTopology:
    """GPUs of one kind, in hosts of the same size (planning.topology.Topology). A slice is a host.

    memory_fraction   the share of a GPU's memory that a program can use
    """

    name: str
    gpu: Gpu
    devices: tuple[Any, ...]
    slices: int = 1
    memory_fraction: float = MEMORY_FRACTION
    platform: str = "gpu"
    compiler: str = "XLA"
    slice_name: str = "host"
    fused_attention: str = "cuDNN's kernel"
    dropout_attention: str = "triton"
    dropout_attention_status: str = "opt-in here: timed on an H200 only, with heads of 64 in rows of 128 and 512"
    time_basis: str = (
        "A kernel takes the longer of its memory traffic and its arithmetic (docs/gpu_plan.md), and counts as often as "
        "it runs."
    )

    @property
    def title(self) -> str:
        return self.name

    @property
    def capability(self) -> str:
        return f"{self.gpu.capability[0]}.0"

    @property
    def peak_flops(self) -> float:
        return self.gpu.peak_flops

    @property
    def memory_bytes(self) -> float:
        return self.memory_fraction * self.gpu.memory_bytes

    @property
    def compile_only_options(self) -> dict[str, Any]:
        """Nothing can be timed: no autotuning, and no Triton matmuls, which fail to compile untuned for some shapes.

        The last option adds XLA's own estimates to the program.
        """
        untimed = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
        return untimed | ({"xla_gpu_collect_cost_model_stats": True} if self.gpu.modelled else {})

    def parse_out_of_memory(self, message: str, arguments: int) -> tuple[int, int] | None:
        """Returns None: XLA compiles steps for GPUs whatever memory they need."""
        return None

    def seconds(self, collective: Collective, sent: float) -> float:
        """The ring passes each host through the network adapters of the GPUs that it has there."""
        gpu, members = self.gpu, collective.group / collective.slices
        links = gpu.nvlink_bandwidth
        if collective.slices > 1:
            links = min(links, members * gpu.network_bandwidth) if members > 1 else gpu.network_bandwidth
        launches = collective.count * COLLECTIVE_LAUNCH_SECONDS * (sent / collective.bytes if collective.bytes else 0.0)
        return collective.ring_seconds(sent, RING_EFFICIENCY * links) + launches

    def collectives(self, program: Program) -> list[Collective]:
        return collectives(program, len(self.devices), self.overlapped, self.slices)

    def overlapped(self, program: Program, collective: Collective, between: list[Instruction]) -> float:
        """Returns the time of the kernels in between as a share of that of the collective, at most 1."""
        kernels = filter(None, (kernel_of(program, instruction, self.gpu) for instruction in between))
        work = sum(kernel.seconds + kernel.launch for kernel in kernels)
        return min(1.0, work / self.seconds(collective, collective.bytes))

    def flops(self, program: Program, counted: Flops) -> Flops:
        """The traced function shows a call of cuDNN without its FLOPs, so those of the program count."""
        return Flops(xla=matmul_flops(program) * len(self.devices), pallas=counted.pallas)

    def estimate(self, program: Program, flops: Flops, model: ModelConfig, exposed: float) -> tuple[StepTime, Roofline]:
        pallas = flops.pallas / len(self.devices)
        whole = not (model.causal or model.window)  # else masks skip blocks of Pallas kernels, which none of this shows
        return step_time(
            program,
            self.gpu,
            pallas_flops=pallas,
            least_pallas_flops=pallas * whole,
            exposed_collectives=exposed,
        )

    def assumptions(self, model: ModelConfig) -> dict[str, Any]:
        return {"matmul_efficiency": self.gpu.matmul_efficiency, "memory_fraction": self.memory_fraction}

    def notes(self, model: ModelConfig, flops: Flops, time: StepTime | None) -> list[str]:
        gpu = self.gpu
        notes = [
            "compiled without autotuning, and with cuBLAS instead of Triton for matmuls, since no GPU is there to time "
            "them",
            f"jax gives a program {self.memory_fraction:.0%} of a GPU's {gib(gpu.memory_bytes)}; "
            f"{MEMORY_VARIABLES[0]} in the environment, here and in training, sets another share",
            f"matmuls count at {gpu.matmul_efficiency:.0%} of the peak, attention by cuDNN at speeds measured on an "
            "H100, memory at its full bandwidth",
        ]
        if self.slices > 1:
            notes.append(
                f"{self.slices} hosts of {len(self.devices) // self.slices} GPUs: NVLink within a host, and between "
                f"hosts {gpu.network_bandwidth * 8e-9:.0f} Gbit/s for each GPU"
            )
        if time and gpu.modelled:
            notes.append(_compared(time.kernels))
        elif time:
            notes.append(f"XLA's cost model has no {gpu.name}, so arithmetic other than that of matmuls is not counted")
        if time and time.pallas:
            notes.append(f"Pallas kernels are counted at {PALLAS_EFFICIENCY:.0%} of the peak")
        if time and time.unpriced:
            notes.append(f"{time.unpriced} library calls of an unknown kind are counted by their bytes alone")
        return notes

    def advice(self, memory: Memory, time: StepTime | None) -> list[str]:
        whole = LARGE_FRACTION * self.gpu.memory_bytes
        if not memory.fits and memory.total <= whole:
            return [f"{MEMORY_VARIABLES[0]}={LARGE_FRACTION} in the environment of the run: fits in {gib(whole)}"]
        if memory.fits and time and (launches := time.by_bound["launches"]) > WORTH * time.total:
            return [f"{launches / time.total:.0%} of the time launches kernels: use more rows a device at a time"]
        return []


def parse_topology(name: str) -> tuple[Gpu, int, int]:
    """Parses KIND:N or KIND:NxHOSTS into the GPU, GPUs of a host, and hosts. Raises UserError for any other name."""
    match = re.fullmatch(r"(\w+):(\d+)(?:x(\d+))?", name)
    if not match or match[1] not in GPUS or not int(match[2]) or not int(match[3] or 1):
        raise UserError(
            f"unknown topology {name!r}; use KIND:N, or KIND:NxHOSTS for N GPUs in each of several hosts, with KIND "
            f"one of {', '.join(GPUS)}: {EXAMPLES}"
        )
    gpus, hosts = int(match[2]), int(match[3] or 1)
    if gpus > LARGEST_HOST:
        raise UserError(
            f"unknown topology {name!r}; a host has at most {LARGEST_HOST} GPUs; for more, use several hosts: "
            f"{match[1]}:{LARGEST_HOST}x{-(-gpus // LARGEST_HOST) * hosts}"
        )
    return GPUS[match[1]], gpus, hosts


def open_hosts(name: str) -> GpuTopology:
    """Returns the description of a topology's GPUs.

    Raises UserError for an unknown name or memory fraction, and if jax's CUDA plugin is not installed or refuses.
    """
    gpu, gpus, hosts = parse_topology(name)
    fraction = memory_fraction()
    if not any(importlib.util.find_spec(plugin) for plugin in PLUGINS):
        raise UserError(
            f"jax's CUDA plugin, which compiles for GPUs, is not installed; run {install_hint('gpu12')}, with gpu in "
            "place of gpu12 for CUDA 13 (no GPU needed)"
        )
    from jax.experimental import topologies  # here because it loads the plugin's libraries

    # Slices x hosts of a slice x GPUs of a host; the description of the GPU replaces its name.
    layout = f"{hosts}x1x{gpus}"
    try:
        found = topologies.get_topology_desc("", "cuda", target_config=gpu.target, topology=layout)
    except (RuntimeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"jax's CUDA plugin refuses topology {name!r} ({first}); use one such as {EXAMPLES}") from error
    return GpuTopology(name, gpu, tuple(found.devices), hosts, fraction)


def _compared(kernels: Sequence[Kernel]) -> str:
    """Returns the times of XLA's own cost model, where it has one, next to those of the plan."""
    modelled = [kernel for kernel in kernels if kernel.compiler_seconds is not None]
    parts = []
    for kind in sorted({kernel.kind for kernel in modelled}):
        ones = [kernel for kernel in modelled if kernel.kind == kind]
        theirs = sum(kernel.times * (kernel.compiler_seconds or 0.0) for kernel in ones)
        ours = sum(kernel.times * kernel.seconds for kernel in ones)
        parts.append(f"{kind} {theirs * 1e3:,.2f} ms ({ours * 1e3:,.2f} ms here)")
    return (
        f"XLA's own cost model has {sum(kernel.times for kernel in modelled):,.0f} of the "
        f"{sum(kernel.times for kernel in kernels):,.0f} kernels of a step: {', '.join(parts)}"
    )


def memory_fraction() -> float:
    """Returns the share of a GPU's memory that jax would give a program in this environment.

    Raises UserError for a value that is no share.
    """
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
