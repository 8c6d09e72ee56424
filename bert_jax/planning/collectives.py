"""The collectives of a compiled step: how many bytes, how often, and how much of it computation overlaps."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from bert_jax.planning.hlo import COLLECTIVE_KINDS, Instruction, Program

START, DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"  # targets of custom calls inside fusions

_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_RANGE_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?[^{]*\{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over groups of one size; `bytes` counts a device's whole arrays in one step."""

    kind: str
    group: int
    count: float
    bytes: float
    overlapped_bytes: float  # the part of `bytes` moved while other instructions run
    slices: int = 1  # that a group spans

    def ring_seconds(self, sent: float, bandwidth: float) -> float:
        """Returns the time of `sent` of the bytes by a ring algorithm, for devices that send so many bytes a second.

        n - 1 of n shards pass each link, twice in an all-reduce.
        """
        passes = 2.0 if self.kind == "all-reduce" else 1.0
        return passes * sent * (self.group - 1) / self.group / bandwidth


# The share of one collective that the instructions between its start and its end hide.
Overlapped = Callable[[Program, Collective, list[Instruction]], float]


def collectives(
    program: Program, devices: int, overlapped: Overlapped = lambda *_: 0.0, slices: int = 1
) -> list[Collective]:
    """Returns the collectives of a program compiled for this many devices in so many slices, the largest first.

    A `-start` instruction counts and its `-done` does not.
    """
    found: dict[tuple[str, int, int], Collective] = {}
    between = _between(program)
    for instruction, times in program.runs():
        sent = fused_collective(program, instruction, START) or instruction
        kind = sent.opcode.removesuffix("-start")
        if kind not in COLLECTIVE_KINDS:
            continue
        group = group_of(sent.text, devices)
        size, spanned = len(group), len({device * slices // devices for device in group})
        if size < 2:
            continue
        one = Collective(kind, size, 1.0, _whole_bytes(sent, kind, size), 0.0, spanned)
        hidden = overlapped(program, one, between.get(instruction.name, [])) * one.bytes
        total = found.get((kind, size, spanned), Collective(kind, size, 0.0, 0.0, 0.0, spanned))
        found[kind, size, spanned] = dataclasses.replace(
            total,
            count=total.count + times,
            bytes=total.bytes + times * one.bytes,
            overlapped_bytes=total.overlapped_bytes + times * hidden,
        )
    return sorted(found.values(), key=lambda one: -one.bytes)


def exposed_seconds(found: Iterable[Collective], seconds: Callable[[Collective, float], float]) -> float:
    """Returns the time in which a device waits for communication; `seconds` is that of a number of bytes."""
    return sum(seconds(one, one.bytes - one.overlapped_bytes) for one in found)


def fused_collective(program: Program, instruction: Instruction, target: str) -> Instruction | None:
    """Returns the collective that a fusion starts or ends (target: START or DONE); None for any other instruction.

    The compiler writes a collective this way when it spreads it over several fusions. The fusions in
    between contain the collective, too, and send nothing themselves.
    """
    if instruction.opcode != "fusion":
        return None
    body = [one for name in instruction.called for one in program.computations.get(name, ())]
    if not any(f'custom_call_target="{target}"' in one.text for one in body):
        return None
    return next((one for one in body if one.opcode in COLLECTIVE_KINDS), None)


def _whole_bytes(instruction: Instruction, kind: str, group: int) -> float:
    """Returns the bytes of the whole array: the result of an all-gather, the operand of a reduce-scatter."""
    size = instruction.bytes
    if instruction.opcode.endswith("-start") and instruction.shape.startswith("(") and kind != "all-reduce":
        # The shape holds operand and result. A permute's context words are too small to count.
        size = size * group // (group + 1) if kind in ("all-gather", "reduce-scatter") else size // 2
    return float(size * group if kind == "reduce-scatter" else size)


def group_of(text: str, devices: int) -> tuple[int, ...]:
    """Returns the devices of the first group of a collective, by their places in the mesh; of all, if it names none.

    Those of a collective-permute are all that send or receive.

    Groups are listed, {{0,2},{1,3}}, given as a transposed range, [2,2]<=[2,2]T(1,0), or as axes of a mesh of devices:
    mesh['axis_0'=2,'axis_1'=8] {'axis_1'}. There {'axis_1':(2)4} stands for the second axis of an axis of 8 seen as
    2 x 4, and device_ids may give the devices of the mesh.
    """
    if match := _GROUPS.search(text):
        return tuple(int(device) for device in match[1].split(","))
    if match := _RANGE_GROUPS.search(text):
        groups = _range(match[2], match[3]).reshape(_integers(match[1]))
        return tuple(groups.reshape(-1, groups.shape[-1])[0].tolist())
    if match := _MESH_GROUPS.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        given = _range(match[2], match[3]) if match[2] else np.arange(math.prod(sizes.values()))
        split: list[int] = []  # the axes of the mesh, of which a used part is an axis of its own
        used = []
        parts = {name: (int(before or 1), int(part or 0)) for name, before, part in _AXIS.findall(match[4])}
        for name, size in sizes.items():
            before, part = parts.get(name, (1, 1))
            part = part or size
            used += [len(split) + 1] if name in parts else []
            split += [before, part, size // (before * part)]
        grid = np.moveaxis(given.reshape(split), used, range(-len(used), 0))
        return tuple(grid.reshape(-1, math.prod(grid.shape[len(split) - len(used) :]))[0].tolist())
    if match := _PAIRS.search(text):
        return tuple(sorted({int(device) for device in re.findall(r"\d+", match[1])}))
    return tuple(range(devices))


def _range(dimensions: str, order: str | None) -> np.ndarray:
    """Returns 0, 1, 2, ... in these dimensions, with their axes in another order if one is given."""
    numbers = np.arange(math.prod(_integers(dimensions))).reshape(_integers(dimensions))
    return numbers.transpose(_integers(order)) if order else numbers


def _integers(listed: str) -> tuple[int, ...]:
    return tuple(int(number) for number in listed.split(","))


def _between(program: Program) -> dict[str, list[Instruction]]:
    """Returns the instructions between the start and the end of each collective, by its name in Program.runs.

    One pass over each computation tracks the collectives under way: those in start/done pairs, by the operand of the
    latter, and those spread over fusions, where only the channel id links start and end.
    """
    found: dict[str, list[Instruction]] = {}
    for body in program.computations.values():
        under_way: dict[str, tuple[str, list[Instruction]]] = {}  # name or channel -> collective, instructions so far
        for instruction in body:
            if instruction.opcode.endswith("-start"):
                if name := _started(program, instruction):
                    under_way[instruction.name] = name, []
            elif instruction.opcode.endswith("-done"):
                for operand in instruction.operands:
                    found.update([under_way.pop(operand.name)] if operand.name in under_way else [])
            elif sent := fused_collective(program, instruction, START):
                under_way[_channel(sent)] = instruction.name, []
            elif received := fused_collective(program, instruction, DONE):
                found.update([under_way.pop(_channel(received))] if _channel(received) in under_way else [])
            else:
                for _, instructions in under_way.values():
                    instructions.append(instruction)
    return found


def _started(program: Program, instruction: Instruction) -> str | None:
    """Returns the name of the collective that an instruction starts; None if it starts something else, such as a copy.

    An async-start calls a computation that holds the collective.
    """
    if instruction.opcode.removesuffix("-start") in COLLECTIVE_KINDS:
        return instruction.name
    called = [one for name in instruction.called for one in program.computations.get(name, ())]
    return next((one.name for one in called if one.opcode in COLLECTIVE_KINDS), None)


def _channel(instruction: Instruction) -> str:
    found = _CHANNEL.search(instruction.text)
    return found[1] if found else ""
