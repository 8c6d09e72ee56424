"""Estimates the time of a step on TPUs: the compiler's cycles, Pallas kernels, which have none, and waiting time."""

from collections import defaultdict

from bert_jax.planning.collectives import DONE, START, fused_collective
from bert_jax.planning.flops import Flops
from bert_jax.planning.hlo import COLLECTIVES, FREE, Instruction, Program
from bert_jax.planning.roofline import Roofline, memory_traffic
from bert_jax.planning.step_time import StepTime
from bert_jax.planning.tpu_chips import Chip

# An attention kernel in Pallas is counted at this share of what the matrix units can do with heads of
# its width. FlashAttention-2 reaches up to 63% of an A100's peak in the backward and 73% in the
# forward pass (Dao 2023, section 4.1), and less on short rows. Heads narrower than a matrix unit
# leave the rest of it idle.
KERNEL_EFFICIENCY = 0.5


def kernel_efficiency(chip: Chip, head_width: int) -> float:
    """Returns the share of a device's peak FLOP/s at which an attention kernel is counted."""
    return KERNEL_EFFICIENCY * min(1.0, head_width / chip.unit)


def roofline(program: Program, chip: Chip, flops: Flops, devices: int, head_width: int) -> Roofline:
    """Returns the roofline of a step with these FLOPs on all devices; head_width limits the peak of the kernels."""
    unit = min(1.0, head_width / chip.unit)
    work = (flops.xla + flops.pallas / unit) / devices
    traffic = memory_traffic(program)
    return Roofline(work / chip.peak_flops, traffic / chip.memory_bandwidth, traffic)


def step_time(
    program: Program, chip: Chip, *, pallas_flops: float, head_width: int, exposed_collectives: float
) -> StepTime:
    """Returns the time of a step; pallas_flops counts one device.

    Each instruction that has no estimated cycles and is neither free, a kernel nor a collective is
    counted by the bytes of its result, written once and read once at the memory's bandwidth.
    """
    by_kind: dict[str, float] = defaultdict(float)
    unpriced = 0
    matmuls = _computations_with_matmuls(program)
    for instruction, times in program.runs():
        if instruction.cycles is not None:
            by_kind[_kind(instruction, matmuls)] += times * instruction.cycles / chip.clock
        elif not _is_free(instruction) and not _fuses_collective(program, instruction):
            unpriced += 1
            by_kind["unpriced"] += times * 2 * instruction.bytes / chip.memory_bandwidth
    pallas = pallas_flops / (chip.peak_flops * kernel_efficiency(chip, head_width)) if pallas_flops else 0.0
    return StepTime(dict(by_kind), pallas, exposed_collectives, unpriced)


def _is_free(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode in FREE or opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        return True
    return opcode == "custom-call"  # compiler markers, and Pallas kernels, which are counted separately


def _fuses_collective(program: Program, instruction: Instruction) -> bool:
    return any(fused_collective(program, instruction, target) for target in (START, DONE))


def _kind(instruction: Instruction, matmuls: set[str]) -> str:
    if instruction.opcode in ("copy", "transpose"):
        return "copies"
    if instruction.opcode in ("convolution", "dot") or matmuls.intersection(instruction.called):
        return "products"
    return "elementwise" if instruction.opcode in ("fusion", "convert", "reduce", "add") else "others"


def _computations_with_matmuls(program: Program) -> set[str]:
    """Returns the names of the computations that contain a matmul, directly or in a computation that they call."""
    direct = {
        name for name, body in program.computations.items() if any(one.opcode in ("convolution", "dot") for one in body)
    }
    while more := {
        name
        for name, body in program.computations.items()
        if name not in direct and any(direct.intersection(one.called) for one in body if one.opcode == "fusion")
    }:
        direct |= more
    return direct
