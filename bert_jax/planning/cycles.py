"""How long a step takes: the compiler's cycles, the Pallas kernels that it has none for, and what waits for others."""

from collections import defaultdict
from dataclasses import dataclass

from bert_jax.planning.chips import Chip
from bert_jax.planning.collectives import DONE, KINDS, START, carried
from bert_jax.planning.hlo import Instruction, Program

# A Pallas kernel of attention, as a share of what the matrix units could do with heads of its width: the backward pass
# of FlashAttention-2 reaches up to 63% and the forward pass up to 73% of an A100's peak (Dao 2023, section 4.1), and
# less on short rows, so half. Heads narrower than a matrix unit leave the rest of it idle.
KERNEL_EFFICIENCY = 0.5

PALLAS = 'custom_call_target="tpu_custom_call"'

# What costs nothing, or what runs beside the rest: copies between memories are started ahead by the compiler.
FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all", "partition-id")
    + ("replica-id", "broadcast", "reshape", "copy-start", "copy-done", "slice-start", "slice-done")
    + ("async-start", "async-update", "async-done", "domain", "opt-barrier", "add-dependency")
)
COLLECTIVES = frozenset((*KINDS, "send", "recv"))


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by kind, on each device."""

    by_kind: dict[str, float]  # products, elementwise, copies, others: the compiler's cycles; unpriced: by bytes
    pallas: float
    exposed_collectives: float
    unpriced: int  # instructions that the compiler gives no cycles for

    @property
    def without_pallas(self) -> float:
        return sum(self.by_kind.values()) + self.exposed_collectives

    @property
    def total(self) -> float:
        return self.without_pallas + self.pallas


def kernel_efficiency(chip: Chip, head_width: int) -> float:
    """The share of a device's peak that an attention kernel is counted at."""
    return KERNEL_EFFICIENCY * min(1.0, head_width / chip.unit)


def step_time(
    program: Program, chip: Chip, *, pallas_flops: float, head_width: int, exposed_collectives: float
) -> StepTime:
    """The time of a step. pallas_flops are those of one device.

    What has no cycles and is neither free nor a kernel nor a collective is counted by the bytes of its result, written
    once and read once, at the memory's bandwidth.
    """
    by_kind: dict[str, float] = defaultdict(float)
    unpriced = 0
    products = _computations_with_products(program)
    for instruction, times in program.runs():
        if instruction.cycles is not None:
            by_kind[_kind(instruction, products)] += times * instruction.cycles / chip.clock
        elif not _is_free(instruction) and not _carries(program, instruction):
            unpriced += 1
            by_kind["unpriced"] += times * 2 * instruction.bytes / chip.memory_bandwidth
    pallas = pallas_flops / (chip.peak_flops * kernel_efficiency(chip, head_width)) if pallas_flops else 0.0
    return StepTime(dict(by_kind), pallas, exposed_collectives, unpriced)


def _is_free(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode in FREE or opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        return True
    return opcode == "custom-call"  # markers of the compiler, and Pallas kernels, which are counted apart


def _carries(program: Program, instruction: Instruction) -> bool:
    return any(carried(program, instruction, target) for target in (START, DONE))


def _kind(instruction: Instruction, products: set[str]) -> str:
    if instruction.opcode in ("copy", "transpose"):
        return "copies"
    if instruction.opcode in ("convolution", "dot") or products.intersection(instruction.called):
        return "products"
    return "elementwise" if instruction.opcode in ("fusion", "convert", "reduce", "add") else "others"


def _computations_with_products(program: Program) -> set[str]:
    """Names of the computations with a matrix product in them, or in what they call."""
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
