"""The collectives of a compiled step: how many bytes, how often, and how much of it computation overlaps."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from bert_jax.planning.hlo import Instruction, Program
from bert_jax.planning.topology import Topology

START, DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"  # targets of custom calls inside fusions
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
# Groups may name mesh axes: mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, or part of an axis, {'axis_1':(1)2}.
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over groups of one size; `bytes` counts a device's whole arrays in one step."""

    kind: str
    group: int
    count: float
    bytes: float
    overlapped_bytes: float  # the part of `bytes` moved while other instructions run

    def seconds(self, topology: Topology, bytes_sent: float) -> float:
        """Returns the time of a ring algorithm: n - 1 of n shards pass each link, twice in an all-reduce."""
        passes = 2.0 if self.kind == "all-reduce" else 1.0
        bandwidth = topology.chip.link_bandwidth * topology.links(self.group)
        return passes * bytes_sent * (self.group - 1) / self.group / bandwidth


def collectives(program: Program, devices: int) -> list[Collective]:
    """Returns the collectives of a program compiled for this many devices, the largest first.

    A `-start` instruction counts and its `-done` does not. A collective overlaps with computation if
    anything other than copies stands between the two.
    """
    found: dict[tuple[str, int], list[float]] = {}
    overlapping = _with_work_between(program)
    for instruction, times in program.runs():
        sent = fused_collective(program, instruction, START) or instruction
        kind = sent.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        size = _group(sent.text, devices)
        if size < 2:
            continue
        moved = times * _whole_bytes(sent, kind, size)
        entry = found.setdefault((kind, size), [0.0, 0.0, 0.0])
        entry[0] += times
        entry[1] += moved
        entry[2] += moved if instruction.name in overlapping else 0.0
    named = [Collective(kind, size, *entry) for (kind, size), entry in found.items()]
    return sorted(named, key=lambda one: -one.bytes)


def exposed_seconds(found: Iterable[Collective], topology: Topology) -> float:
    """Returns the time in which a device waits for communication."""
    return sum(one.seconds(topology, one.bytes - one.overlapped_bytes) for one in found)


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
    return next((one for one in body if one.opcode in KINDS), None)


def _whole_bytes(instruction: Instruction, kind: str, group: int) -> float:
    """Returns the bytes of the whole array: the result of an all-gather, the operand of a reduce-scatter."""
    size = instruction.bytes
    if instruction.opcode.endswith("-start") and instruction.shape.startswith("(") and kind != "all-reduce":
        # The shape holds operand and result. A permute's context words are too small to count.
        size = size * group // (group + 1) if kind in ("all-gather", "reduce-scatter") else size // 2
    return float(size * group if kind == "reduce-scatter" else size)


def _group(text: str, devices: int) -> int:
    if match := _GROUPS.search(text):
        return match[1].count(",") + 1
    if match := _IOTA_GROUPS.search(text):
        return int(match[2])
    if match := _MESH_GROUPS.search(text):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
        used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[axis]) for axis, part in used)
    return devices


def _with_work_between(program: Program) -> set[str]:
    """Returns the names of the instructions that start a collective and have computation before its end.

    Computation is an instruction with estimated cycles. One pass over each computation tracks the
    collectives under way, both those in start/done pairs and those spread over fusions, where only
    the channel id links start and end.
    """
    overlapped: set[str] = set()
    for body in program.computations.values():
        under_way: dict[str, bool] = {}
        channels: dict[str, str] = {}  # channel id -> the fusion that starts the collective
        for instruction in body:
            if instruction.opcode.endswith("-start"):
                under_way[instruction.name] = False
            elif instruction.opcode.endswith("-done"):
                overlapped.update(
                    name for name, worked in under_way.items() if worked and f"%{name}" in instruction.text
                )
            elif started := fused_collective(program, instruction, START):
                under_way[instruction.name] = False
                channels[_channel(started)] = instruction.name
            elif ended := fused_collective(program, instruction, DONE):
                name = channels.get(_channel(ended), "")
                overlapped.update({name} if under_way.get(name) else ())
            elif instruction.cycles and instruction.opcode in ("fusion", "convolution", "custom-call"):
                under_way = dict.fromkeys(under_way, True)
    return overlapped


def _channel(instruction: Instruction) -> str:
    found = _CHANNEL.search(instruction.text)
    return found[1] if found else ""
