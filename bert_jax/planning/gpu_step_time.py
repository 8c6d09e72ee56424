"""Estimates the time of a step on GPUs: the roofline of each kernel, and what launching it takes.

A kernel takes the longest of three times: its bytes at the bandwidth of the memory, its matmuls at the speed that a
large matmul reaches, and the arithmetic of its other operations according to XLA's cost model. Every operand is read
once and every result written once, as if no cache held any of it. What a library call moves in addition is not in the
program, and not counted. The FLOPs of attention by cuDNN count by its algorithm: the matmuls that the shapes of its
operands imply, at the speed that was measured for rows of that length.
"""

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass

from bert_jax.planning.gpu_chips import GPUS, Gpu
from bert_jax.planning.hlo import COLLECTIVES, FREE, Instruction, Program, dimensions, element_type, shape_bytes
from bert_jax.planning.roofline import Roofline, bytes_moved
from bert_jax.planning.step_time import PALLAS, Kernel, StepTime

# XLA's own figures (xla/service/gpu/model/gpu_performance_model_base.h, kKernelLaunchOverhead and
# kNcclKernelLaunchOverhead).
LAUNCH_SECONDS = 1e-6
COLLECTIVE_LAUNCH_SECONDS = 5e-6

# TFLOP/s of cuDNN's attention on an H100 without a mask, in float16, by head width and length of the rows (Shah et al.
# 2024, "FlashAttention-3", figures 5 and 6). Other GPUs take the same share of their peak. Shorter rows count as 512.
ATTENTION_TFLOPS = {
    (64, "forward"): {512: 335, 1024: 373, 2048: 395, 4096: 408, 8192: 412, 16384: 413},
    (64, "backward"): {512: 266, 1024: 348, 2048: 395, 4096: 417, 8192: 432, 16384: 433},
    (128, "forward"): {512: 497, 1024: 574, 2048: 617, 4096: 609, 8192: 600, 16384: 595},
    (128, "backward"): {512: 305, 1024: 408, 2048: 465, 4096: 499, 8192: 518, 16384: 516},
}
BACKWARD_MATMULS = 2.5  # of those of the forward pass: it has five, of which one recomputes the scores, not two
CAUSAL = ("CAUSAL", "PADDING_CAUSAL")  # cuDNN's masks, without and with lengths of the rows
PALLAS_EFFICIENCY = 0.5  # of the peak; FlashAttention-2 reaches 63% to 73% on an A100 (Dao 2023, section 4.1)

MATMULS, ATTENTION = "matmuls", "attention"
ELEMENTWISE, COPIES, OTHERS, LAUNCHES = "elementwise", "copies", "others", "kernel launches"

_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_WORKSPACE = re.compile(r"(?:^\(|, )[su]8\[\d+\](?:\{0\})?(?=[,)])")
_CONTRACTED = re.compile(r'lhs_contracting_(?:dimensions"\s*:\s*\[([^\]]*)\]|dims=\{([^}]*)\})')
_HIGHEST = re.compile(r'"operand_precision"\s*:\s*\[\s*"HIGHEST"|operand_precision=\{highest')
_SCORES = re.compile(r'"intermediate_tensor_shape"\s*:\s*\{[^{}]*?"dimensions"\s*:\s*\[([^\]]*)\]')
_MASK = re.compile(r'"mask_type"\s*:\s*"(\w+)"')
_SLIDING = re.compile(r'"sliding_window_length"\s*:\s*"?(\d+)')
_COSTS = re.compile(r'"reification_cost"\s*:\s*\[(.*?)\]')
_COST = re.compile(r"\{[^}]*\}")


@dataclass(frozen=True)
class Cost:
    """Seconds of an instruction by XLA's cost model: of the whole, and of its arithmetic (0 where not given)."""

    total: float
    arithmetic: float


def kernel_of(program: Program, instruction: Instruction, gpu: Gpu, times: float = 1.0) -> Kernel | None:
    """Returns what an instruction that runs `times` times per step costs; None for one that launches no kernel."""
    opcode = instruction.opcode
    if opcode != "copy-start" and (opcode in FREE or opcode.endswith("-done") or _is_collective(instruction)):
        return None
    kind, flops, speed = _work(program, instruction, gpu)
    moved = _library_bytes(instruction) if opcode == "custom-call" else bytes_moved(program, instruction)
    if opcode == "fusion" and kind == MATMULS:
        moved -= _workspace_bytes(instruction)
    cost = compiler_cost(instruction)
    arithmetic = flops / speed if flops else 0.0
    if kind == ELEMENTWISE and cost is not None:
        arithmetic = cost.arithmetic
    memory = moved / gpu.memory_bandwidth
    named = _OP_NAME.search(instruction.text)
    return Kernel(
        kind=kind,
        name=instruction.name,
        operation=named[1] if named else "",
        shape=instruction.shape,
        times=times,
        bytes=float(moved),
        flops=flops,
        seconds=max(memory, arithmetic),
        launch=LAUNCH_SECONDS,
        bound="memory" if memory >= arithmetic else "arithmetic",
        compiler_seconds=None if cost is None else cost.total,
    )


def step_time(
    program: Program, gpu: Gpu, *, pallas_flops: float, least_pallas_flops: float, exposed_collectives: float
) -> tuple[StepTime, Roofline]:
    """Returns the time of a step, and the least that its arithmetic and its memory traffic take.

    pallas_flops         of all Pallas kernels on one device
    least_pallas_flops   those of them that cannot be left out
    """
    found = (kernel_of(program, instruction, gpu, times) for instruction, times in program.runs())
    kernels = tuple(sorted(filter(None, found), key=lambda kernel: -kernel.times * kernel.seconds))
    by_kind: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_kind[kernel.kind] += kernel.times * kernel.seconds
        by_kind[LAUNCHES] += kernel.times * kernel.launch
    pallas = max(by_kind.pop(PALLAS, 0.0), pallas_flops / (gpu.peak_flops * PALLAS_EFFICIENCY))
    unpriced = sum(kernel.kind == OTHERS for kernel in kernels)
    time = StepTime(dict(by_kind), pallas, exposed_collectives, unpriced, kernels)
    flops = sum(kernel.times * kernel.flops for kernel in kernels) + least_pallas_flops
    traffic = float(sum(kernel.times * kernel.bytes for kernel in kernels))
    return time, Roofline(flops / gpu.peak_flops, traffic / gpu.memory_bandwidth, traffic)


def matmul_flops(program: Program) -> float:
    """Returns the FLOPs of the matmuls in a program on one device; attention counts as its algorithm has them."""
    gpu = GPUS["h100"]  # any: FLOPs do not depend on it
    return float(sum(times * _work(program, instruction, gpu)[1] for instruction, times in program.runs()))


def compiler_cost(instruction: Instruction) -> Cost | None:
    """Returns XLA's own estimate of an instruction, from --xla_gpu_collect_cost_model_stats; None where it has none.

    Of several models, that of tiled kernels is preferred where it was used: for such kernels the general one is
    too high by several orders of magnitude. The third, "sol", has matmuls and collectives.
    """
    listed = _COSTS.search(instruction.text)
    found = {cost.get("name", ""): cost for cost in map(json.loads, _COST.findall(listed[1]))} if listed else {}
    tiled = '"__triton' in instruction.text
    for model in ("indexing-cost-model", *(() if tiled else ("", "sol"))):
        if found.get(model, {}).get("exec_time_us", 0) > 0:
            return Cost(found[model]["exec_time_us"] * 1e-6, found[model].get("compute_time_us", 0) * 1e-6)
    return None


def attention_flops(instruction: Instruction) -> tuple[float, float]:
    """Returns the FLOPs of a call of cuDNN's attention, and the TFLOP/s that an H100 reaches with such shapes.

    The forward pass has two matmuls, 4 * B * N * Q * T * H FLOPs for B rows, N heads of width H, Q queries and T keys
    of each row; the backward pass has five. A window, or a causal mask, leaves out the keys that no query sees.
    """
    width = dimensions(instruction.operands[0].shape)[-1]
    scores = _SCORES.search(instruction.text)
    if scores:
        batch, heads, queries, keys = (int(size.strip(' "')) for size in scores[1].split(","))
    else:
        batch, queries, heads, _ = dimensions(instruction.operands[0].shape)
        keys = dimensions(instruction.operands[1].shape)[1]
    mask, sliding = _MASK.search(instruction.text), _SLIDING.search(instruction.text)
    seen = float(keys)
    if sliding and int(sliding[1]):
        seen = min(seen, int(sliding[1]))
    elif mask and mask[1] in CAUSAL:
        seen = (keys + 1) / 2
    direction = "backward" if "Backward" in _target(instruction) else "forward"
    flops = 4.0 * batch * heads * queries * seen * width * (BACKWARD_MATMULS if direction == "backward" else 1.0)
    measured = ATTENTION_TFLOPS[64 if width <= 64 else 128, direction]
    length = max((length for length in measured if length <= keys), default=min(measured))
    return flops, float(measured[length])


def _work(program: Program, instruction: Instruction, gpu: Gpu) -> tuple[str, float, float]:
    """Returns the kind of a kernel, the FLOPs of its matmuls, and the FLOPs per second at which they count."""
    target = _target(instruction)
    if target.startswith("__cudnn$fmha"):
        flops, tflops = attention_flops(instruction)
        return ATTENTION, flops, tflops * 1e12 / GPUS["h100"].peak_flops * gpu.peak_flops
    if target.startswith("__cublas$"):
        return MATMULS, _matmul_flops(instruction), _matmul_speed(instruction, gpu)
    if "triton" in target or "mosaic_gpu" in target:
        return PALLAS, 0.0, gpu.peak_flops
    if dots := _dots(program, instruction):
        speed = min(_matmul_speed(one, gpu) for one in dots)
        return MATMULS, sum(map(_matmul_flops, dots)), speed
    if instruction.opcode == "custom-call":
        return OTHERS, 0.0, gpu.peak_flops
    copies = instruction.opcode in ("copy", "copy-start", "transpose")
    return COPIES if copies else ELEMENTWISE, 0.0, gpu.peak_flops


def _is_collective(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start") in COLLECTIVES


def _target(instruction: Instruction) -> str:
    found = _TARGET.search(instruction.text) if instruction.opcode == "custom-call" else None
    return found[1] if found else ""


def _matmul_flops(instruction: Instruction) -> float:
    """Returns two FLOPs for each multiply-add of a matmul of any batch dimensions."""
    found = _CONTRACTED.search(instruction.text)
    axes = (found[1] if found[1] is not None else found[2]) if found else ""
    left = dimensions(instruction.operands[0].shape)
    depth = math.prod(left[int(axis.strip(' "'))] for axis in axes.split(",") if axis.strip())
    return 2.0 * depth * math.prod(dimensions(instruction.shape))


def _matmul_speed(instruction: Instruction, gpu: Gpu) -> float:
    """Returns the FLOPs per second of a large matmul of such operands."""
    if element_type(instruction.operands[0].shape) not in ("f32", "f64"):
        peak = gpu.peak_flops
    else:
        peak = gpu.float32_flops if _HIGHEST.search(instruction.text) else gpu.tf32_flops
    return gpu.matmul_efficiency * peak


def _dots(program: Program, instruction: Instruction) -> list[Instruction]:
    """Returns the matmuls that an instruction is or fuses. XLA also fuses calls of cuBLAS with slices of operands."""
    if instruction.opcode == "dot" or _target(instruction).startswith("__cublas$"):
        return [instruction]
    called = instruction.called if instruction.opcode == "fusion" else ()
    return [dot for name in called for one in program.computations.get(name, ()) for dot in _dots(program, one)]


def _library_bytes(instruction: Instruction) -> int:
    """Returns the bytes of the operands and results of a library call, without its workspace."""
    whole = shape_bytes(instruction.shape) + sum(shape_bytes(one.shape) for one in instruction.operands)
    return whole - _workspace_bytes(instruction)


def _workspace_bytes(instruction: Instruction) -> int:
    """Returns the bytes of the workspace among the results of a library call, or of a fusion that has such a call."""
    if not instruction.shape.startswith("("):
        return 0
    return shape_bytes(instruction.shape) - shape_bytes(_WORKSPACE.sub("", instruction.shape))
