"""What devices say to each other in a step: bytes, how often, and whether work goes on meanwhile."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bert_jax.planning.hlo import Instruction, Program
from bert_jax.planning.topology import Topology

START, DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"  # custom calls within fusions
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
# By the axes of a mesh: mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, or a part of one, {'axis_1':(1)2}.
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over groups of one size. `bytes` are of a device's whole arrays, a step."""

    kind: str
    group: int
    count: float
    bytes: float
    overlapped_bytes: float  # of them, in a collective that is started and ended, with work between

    def seconds(self, topology: Topology, bytes_sent: float) -> float:
        """By rings over the links that the group has: n - 1 of n shares pass each, twice in an all-reduce."""
        passes = 2.0 if self.kind == "all-reduce" else 1.0
        bandwidth = topology.chip.link_bandwidth * topology.links(self.group)
        return passes * bytes_sent * (self.group - 1) / self.group / bandwidth

    def as_json(self, topology: Topology) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "group": self.group,
            "count": self.count,
            "bytes": self.bytes,
            "overlapped_bytes": self.overlapped_bytes,
            "seconds": self.seconds(topology, self.bytes),
        }


def collectives(program: Program, devices: int) -> list[Collective]:
    """The collectives of a program on so many devices, the largest first.

    A `-start` counts and its `-done` does not. One whose start and end have anything but copies between them runs
    beside that work.
    """
    found: dict[tuple[str, int], list[float]] = {}
    overlapping = _with_work_between(program)
    for instruction, times in program.runs():
        sent = carried(program, instruction, START) or instruction
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
    """Time in which a device does nothing else."""
    return sum(one.seconds(topology, one.bytes - one.overlapped_bytes) for one in found)


def carried(program: Program, instruction: Instruction, target: str) -> Instruction | None:
    """The collective within a fusion that starts or ends it (target: START or DONE); None for any other instruction.

    So the compiler writes collectives that it spreads over the fusions between: these hold it, too, and send nothing
    of their own.
    """
    if instruction.opcode != "fusion":
        return None
    body = [one for name in instruction.called for one in program.computations.get(name, ())]
    if not any(f'custom_call_target="{target}"' in one.text for one in body):
        return None
    return next((one for one in body if one.opcode in KINDS), None)


def _whole_bytes(instruction: Instruction, kind: str, group: int) -> float:
    """Bytes of the whole array: what an all-gather gives, what a reduce-scatter takes."""
    size = instruction.bytes
    if instruction.opcode.endswith("-start") and instruction.shape.startswith("(") and kind != "all-reduce":
        # The operand stands beside the result; the context words of a permute are small.
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
    """Names of what starts a collective before whose end an instruction with cycles stands."""
    overlapped: set[str] = set()
    for body in program.computations.values():
        under_way: dict[str, bool] = {}
        channels: dict[str, str] = {}  # of the fusions that start one, by what names the collective in both
        for instruction in body:
            if instruction.opcode.endswith("-start"):
                under_way[instruction.name] = False
            elif instruction.opcode.endswith("-done"):
                overlapped.update(
                    name for name, worked in under_way.items() if worked and f"%{name}" in instruction.text
                )
            elif started := carried(program, instruction, START):
                under_way[instruction.name] = False
                channels[_channel(started)] = instruction.name
            elif ended := carried(program, instruction, DONE):
                name = channels.get(_channel(ended), "")
                overlapped.update({name} if under_way.get(name) else ())
            elif instruction.cycles and instruction.opcode in ("fusion", "convolution", "custom-call"):
                under_way = dict.fromkeys(under_way, True)
    return overlapped


def _channel(instruction: Instruction) -> str:
    found = _CHANNEL.search(instruction.text)
    return found[1] if found else ""
