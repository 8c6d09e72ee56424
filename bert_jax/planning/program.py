"""Reads a compiled step's text: how often instructions run, their cycles and bytes, and collectives; counts FLOPs.

Read `parse` and `Program.runs` first. XLA's own analyses count a loop body once; here it counts once per iteration.
`collectives` pairs the starts and ends of transfers to find the work between them. `count_flops` reads the traced
function, because the compiled text has no FLOPs for library calls and Pallas kernels.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"constant\((\d+)\)")
_CALLED = re.compile(r"\b(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Instructions that launch no work, and copies between memories, which run at the same time as other work.
FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all", "partition-id")
    + ("replica-id", "broadcast", "reshape", "copy-start", "copy-done", "slice-start", "slice-done")
    + ("async-start", "async-update", "async-done", "domain", "opt-barrier", "add-dependency")
    + ("send", "send-done", "recv", "recv-done")
)


@dataclass(frozen=True)
class Instruction:
    """A line in a computation."""

    name: str
    opcode: str
    shape: str  # of the result
    text: str
    called: tuple[str, ...]  # names of the computations that it runs
    operands: tuple["Instruction", ...] = field(default=(), compare=False, repr=False)

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate of cycles, or None."""
        match = _CYCLES.search(self.text)
        return int(match[1]) if match else None

    @property
    def bytes(self) -> int:
        """Bytes of the result, without padding. A tuple's parts are added up."""
        total = 0
        for kind, sizes in _ARRAY.findall(self.shape):
            # A pred takes a byte. Types without a size in their names, such as token, hold no data.
            bits = re.search(r"\d+", kind.replace("pred", "s8"))
            total += math.prod(map(int, filter(None, sizes.split(",")))) * (max(int(bits[0]) // 8, 1) if bits else 0)
        return total

    @property
    def target(self) -> str:
        """The target of a custom call, or an empty string."""
        match = _TARGET.search(self.text) if self.opcode == "custom-call" else None
        return match[1] if match else ""


@dataclass(frozen=True)
class Program:
    """Computations by name, and the name of the entry computation."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]

    def called_by(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions in the computations that an instruction runs."""
        return [inner for name in instruction.called for inner in self.computations.get(name, ())]

    def runs(self, computation: str = "", times: float = 1.0) -> Iterator[tuple[Instruction, float]]:
        """Yields every instruction that executes on its own, and how often it runs. A fusion is one instruction.

        Args:
            computation: The computation to begin with; empty: the entry.
            times: How often that computation runs.
        """
        for instruction in self.computations.get(computation or self.entry, ()):
            opcode = instruction.opcode
            if opcode not in ("while", "conditional", "call", "async-start"):
                yield instruction, times
                continue
            # These instructions run other computations. Unknown trip counts count as 1. The text does not say how often
            # a branch is taken, so all branches of a conditional get an equal share of its runs.
            inner = times * (self.trips(instruction) or 1) if opcode == "while" else times
            for called in instruction.called:
                yield from self.runs(called, inner / len(instruction.called) if opcode == "conditional" else inner)

    def trips(self, loop: Instruction) -> int | None:
        """Returns how often a loop's body runs, or None if only the running program knows."""
        # The compiler annotates it, or the loop's condition is `count < N`, as in a scan from 0.
        if annotated := _TRIPS.search(loop.text):
            return int(annotated[1])
        condition = _CONDITION.search(loop.text)
        body = self.computations.get(condition[1], ()) if condition else ()
        compared = [line.text for line in body if line.opcode == "compare" and "direction=LT" in line.text][:1]
        constants = {line.name: match for line in body if (match := _CONSTANT.match(line.text.strip()))}
        # N is the constant that the comparison names.
        bounds = [int(match[1]) for name, match in constants.items() for text in compared if f"%{name})" in text]
        return bounds[0] if bounds else None

    def loops_without_trip_count(self) -> int:
        """Counts the loops with an unknown trip count."""
        lines = [line for body in self.computations.values() for line in body]
        return sum(line.opcode == "while" and self.trips(line) is None for line in lines)


def parse(text: str) -> Program:
    """Parses HLO text as returned by `compiled.as_text()`. Raises ValueError for text without an ENTRY."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name = "", ""
    body: dict[str, Instruction] = {}
    for line in text.splitlines():
        if not line.startswith(" ") and (header := _COMPUTATION.match(line)):
            name, body = header[2], {}
            entry = name if header[1] else entry
            continue
        if line.startswith("}") and not line.startswith("}}"):  # }} ends a kernel's metadata
            computations[name] = tuple(body.values())
            continue
        # NAME = SHAPE OPCODE(OPERANDS), ATTRIBUTES. A tuple's shape is in brackets and contains spaces.
        match = _INSTRUCTION.match(line) if name else None
        if match is None:
            continue
        shape = _in_brackets(match[2], 0) if match[2].startswith("(") else match[2].partition(" ")[0]
        rest = match[2][len(shape) :].lstrip()
        opcode = _OPCODE.match(rest)
        if opcode is None:
            continue
        called = tuple(_CALLED.findall(rest))
        if branches := _BRANCHES.search(rest):
            called += tuple(part.strip().lstrip("%") for part in branches[1].split(","))
        named = _NAME.findall(_in_brackets(rest, opcode.end() - 1)) if "%" in rest else ()
        # Instructions stand after their operands in the text, so `body` has these already.
        operands = tuple(body[operand] for operand in named if operand in body)
        body[match[1]] = Instruction(match[1], opcode[1], shape, rest, called, operands)
    if not entry:
        raise ValueError("no ENTRY computation in the text of the program")
    return Program(entry, computations)


def _in_brackets(text: str, start: int) -> str:
    """Returns the text from an opening bracket to the matching closing bracket."""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == "(") - (text[end] == ")")
        if not depth:
            return text[start : end + 1]
    return text[start:]


# Memory traffic

_PARAMETER = re.compile(r"parameter\((\d+)\)")
_WORKSPACE = re.compile(r"\b[su]8\[(\d+)\]")
_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that replaces part of operand 0
_SAME = ("bitcast", "reshape", "convert", "copy")


def bytes_moved(program: Program, instruction: Instruction) -> int:
    """Returns the bytes that an instruction reads and writes, ignoring caches. A slice or update counts by its part.

    Collectives, and instructions that launch no work, count 0.
    """
    if instruction.opcode in FREE or instruction.opcode.endswith("-done") or is_collective(program, instruction):
        return 0
    body = program.computations.get(instruction.called[0], ()) if instruction.opcode == "fusion" else ()
    if not body:  # a single instruction is like a fusion of one
        read = sum(_read(operand, [(instruction, index)]) for index, operand in enumerate(instruction.operands))
        return read + _written(instruction)
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for user in body:
        for index, operand in enumerate(user.operands):
            users.setdefault(operand.name, []).append((user, index))

    def uses(name: str) -> list[tuple[Instruction, int]]:
        """Returns a value's uses, looking through instructions that only rename or convert it."""
        direct = users.get(name, [])
        return [use for user in direct for use in (uses(user[0].name) if user[0].opcode in _SAME else [user])] or direct

    # A fusion reads its parameters and writes its results. Values in between never reach memory.
    parameters = [line for line in body if _PARAMETER.match(line.text)]
    results = body[-1].operands if body[-1].opcode == "tuple" else (body[-1],)
    return sum(_read(line, uses(line.name)) for line in parameters) + sum(map(_written, results))


def _read(array: Instruction, uses: list[tuple[Instruction, int]]) -> int:
    # A use reads the whole array, unless it slices the array or updates it in place (as operand 0).
    whole = any(index or user.opcode not in (*_SLICES, *_UPDATES) for user, index in uses)
    parts = sum(user.bytes for user, _ in uses if user.opcode in _SLICES)
    return array.bytes if whole else min(parts, array.bytes)


def _written(result: Instruction) -> int:
    while result.opcode in _SAME and result.operands:
        result = result.operands[0]
    if result.opcode in _UPDATES:
        return result.operands[_UPDATES[result.opcode]].bytes
    # A library call's result includes its workspace, which it may not touch.
    workspace = sum(map(int, _WORKSPACE.findall(result.shape))) if result.opcode == "custom-call" else 0
    return result.bytes - workspace


# Collectives

_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"  # targets of custom calls inside fusions
_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_RANGE_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?[^{]*\{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
# libtpu writes a transfer between slices as a send to the host and a receive from it, with one name in both.
_BETWEEN_SLICES = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over groups of one size, in one step."""

    kind: str
    group: int  # devices
    count: float
    bytes: float  # of a device's whole arrays
    overlapped_bytes: float = 0.0  # the part of `bytes` that moves while the device computes
    slices: int = 1  # TPU slices, or hosts of GPUs, in a group

    def ring_seconds(self, bandwidth: float) -> float:
        """Returns the time in a ring in which every device sends `bandwidth` bytes per second."""
        # n - 1 of n shards pass every link. An all-reduce is a reduce-scatter and an all-gather, so they pass twice.
        passes = 2.0 if self.kind == "all-reduce" else 1.0
        return passes * self.bytes * (self.group - 1) / self.group / bandwidth


def collectives(
    program: Program,
    devices: int,
    slices: int,
    transfer_seconds: Callable[[Collective], float],
    work_seconds: Callable[[Instruction], float],
) -> list[Collective]:
    """Returns a program's collectives, largest first.

    Args:
        devices: Devices that the program runs on.
        slices: TPU slices, or hosts of GPUs, that the devices are in.
        transfer_seconds: Returns a collective's time.
        work_seconds: Returns an instruction's time.
    """
    groups: dict[tuple[str, int, int], Collective] = {}
    between = _between(program)
    for instruction, times in program.runs():
        collective = _collective(program, instruction, devices, slices)
        if collective is None:
            continue
        # A collective is hidden for as long as the work between its start and end lasts.
        work = sum(share * work_seconds(other) for other, share in between.get(instruction.name, ()))
        needed = transfer_seconds(collective)
        hidden = min(1.0, work / needed) if needed else 0.0
        key = (collective.kind, collective.group, collective.slices)
        total = groups.get(key, dataclasses.replace(collective, count=0.0, bytes=0.0))
        groups[key] = dataclasses.replace(
            total,
            count=total.count + times,
            bytes=total.bytes + times * collective.bytes,
            overlapped_bytes=total.overlapped_bytes + times * hidden * collective.bytes,
        )
    return sorted(groups.values(), key=lambda collective: -collective.bytes)


def is_collective(program: Program, instruction: Instruction) -> bool:
    """Returns whether an instruction is a collective, or starts or ends one."""
    opcode = instruction.opcode.removesuffix("-start").removesuffix("-done")
    return opcode in COLLECTIVES or any(_fused(program, instruction, target) for target in (_START, _DONE))


def _collective(program: Program, instruction: Instruction, devices: int, slices: int) -> Collective | None:
    """Returns the collective that an instruction runs or starts, or None. Ends (`-done`) do not count."""
    if instruction.opcode == "send" and _BETWEEN_SLICES in instruction.text:
        kind = _first(_TRANSFER, instruction).lower().replace("_", "-") or "send"
        size = instruction.operands[0].bytes * (slices if kind == "all-gather" else 1)
        return Collective(kind, slices, 1.0, float(size), slices=slices)
    sent = _fused(program, instruction, _START) or instruction
    kind = sent.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    group = group_devices(sent.text, devices)
    if len(group) < 2:
        return None
    # The larger side counts: the result of an all-gather, the operand of a reduce-scatter.
    size = sent.bytes
    if sent.opcode.endswith("-start") and sent.shape.startswith("(") and kind != "all-reduce":
        # The shape of a start holds operand and result. A permute's context words are too small to matter.
        both = kind in ("all-gather", "reduce-scatter")
        size = size * len(group) // (len(group) + 1) if both else size // 2
    elif kind == "reduce-scatter":
        size *= len(group)
    spanned = len({device * slices // devices for device in group})
    return Collective(kind, len(group), 1.0, float(size), slices=spanned)


def _fused(program: Program, instruction: Instruction, target: str) -> Instruction | None:
    """Returns the collective that a fusion starts or ends (target: _START or _DONE), or None."""
    # libtpu spreads a collective over several fusions in this way. The fusions in between contain the collective, too,
    # but send nothing themselves.
    body = program.called_by(instruction) if instruction.opcode == "fusion" else []
    if not any(line.target == target for line in body):
        return None
    return next((line for line in body if line.opcode in COLLECTIVES), None)


def group_devices(text: str, devices: int) -> tuple[int, ...]:
    """Returns the places in the mesh of the devices in a collective's first group; all if it names no group."""
    # Listed: {{0,2},{1,3}}.
    if match := _GROUPS.search(text):
        return tuple(int(device) for device in match[1].split(","))
    # A transposed range: [2,2]<=[2,2]T(1,0).
    if match := _RANGE_GROUPS.search(text):
        groups = _range(match[2], match[3]).reshape(_integers(match[1]))
        return tuple(groups.reshape(-1, groups.shape[-1])[0].tolist())
    # Axes of a mesh: mesh['axis_0'=2,'axis_1'=8] {'axis_1'}. {'axis_1':(2)4} is the second axis of axis_1 seen as 2 x
    # 4. device_ids may give the devices.
    if match := _MESH_GROUPS.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        ids = _range(match[2], match[3]) if match[2] else np.arange(math.prod(sizes.values()))
        split: list[int] = []  # three axes for every axis of the mesh: before the used part, the part, and after it
        used = []
        parts = {name: (int(before or 1), int(part or 0)) for name, before, part in _AXIS.findall(match[4])}
        for name, size in sizes.items():
            before, part = parts.get(name, (1, 1))
            part = part or size
            used += [len(split) + 1] if name in parts else []
            split += [before, part, size // (before * part)]
        grid = np.moveaxis(ids.reshape(split), used, range(-len(used), 0))
        return tuple(grid.reshape(-1, math.prod(grid.shape[len(split) - len(used) :]))[0].tolist())
    # All senders and receivers of a collective-permute are one group.
    if match := _PAIRS.search(text):
        return tuple(sorted({int(device) for device in re.findall(r"\d+", match[1])}))
    return tuple(range(devices))


def _range(dimensions: str, order: str | None) -> np.ndarray:
    """Returns 0, 1, 2, ... in these dimensions, transposed to `order` if it is given."""
    numbers = np.arange(math.prod(_integers(dimensions))).reshape(_integers(dimensions))
    return numbers.transpose(_integers(order)) if order else numbers


def _integers(listed: str) -> tuple[int, ...]:
    return tuple(int(number) for number in listed.split(","))


Between = list[tuple[Instruction, float]]  # instructions, and the share of their time that hides one collective


def _between(program: Program) -> dict[str, Between]:
    """Returns the instructions between the start and the end of every collective, by the start's name."""
    between: dict[str, Between] = {}
    for body in program.computations.values():
        # The collectives under way, by a key that is the same at start and end: the start's name, a channel, or a
        # rendezvous.
        under_way: dict[str, tuple[str, Between]] = {}
        for instruction in body:
            opcode, start, ends = instruction.opcode, None, []
            if opcode == "send" and _BETWEEN_SLICES in instruction.text:
                start = _first(_RENDEZVOUS, instruction), instruction.name
            elif opcode == "recv-done" and instruction.operands:
                ends = [_first(_RENDEZVOUS, instruction.operands[0])]
            elif opcode.endswith("-start"):
                # An async-start calls a computation that contains the collective under another name. Copies have
                # starts, too, but are no collectives.
                lines = (instruction, *program.called_by(instruction))
                names = [line.name for line in lines if line.opcode.removesuffix("-start") in COLLECTIVES]
                start = (instruction.name, names[0]) if names else None
            elif opcode.endswith("-done"):
                ends = [operand.name for operand in instruction.operands]
            elif sent := _fused(program, instruction, _START):
                start = _first(_CHANNEL, sent), instruction.name
            elif received := _fused(program, instruction, _DONE):
                ends = [_first(_CHANNEL, received)]
            else:  # simultaneous collectives share the work that hides them, as they share the links
                for _, instructions in under_way.values():
                    instructions.append((instruction, 1 / len(under_way)))
            if start:
                under_way[start[0]] = start[1], []
            between |= dict(under_way.pop(key) for key in ends if key in under_way)
    return between


def _first(pattern: re.Pattern[str], instruction: Instruction) -> str:
    match = pattern.search(instruction.text)
    return match[1] if match else ""


# FLOPs


@dataclass(frozen=True)
class Flops:
    """FLOPs of matmuls on all devices together, two per multiply-add."""

    xla: float = 0.0  # in the compiler's own operations, and in cuDNN's attention
    pallas: float = 0.0  # in Pallas kernels, over all blocks of their grids

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.xla + other.xla, self.pallas + other.pallas)

    def __mul__(self, times: float) -> "Flops":
        return Flops(self.xla * times, self.pallas * times)

    @property
    def total(self) -> float:
        return self.xla + self.pallas


def count_flops(jaxpr: Any, in_kernel: bool = False) -> Flops:
    """Counts the FLOPs of a (closed) jaxpr's matmuls, recomputation included. A scan counts all its iterations.

    A while loop counts one iteration, because the jaxpr does not say how many there are.
    """
    total = Flops()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            (contracted, _), _ = parameters["dimension_numbers"]
            total += Flops(xla=2.0 * math.prod(left[axis] for axis in contracted) * math.prod(result))
        elif name.startswith("dot_product_attention"):
            # cuDNN's attention on [B, T, N, H]: two matmuls in the forward pass, five in the backward pass.
            batch, queries, heads, width = equation.invars[0].aval.shape
            keys = equation.invars[1].aval.shape[1]
            total += Flops(xla=2.0 * (5 if "bwd" in name else 2) * batch * heads * queries * keys * width)
        elif name == "pallas_call":
            inner = count_flops(parameters["jaxpr"], in_kernel=True).total
            total += Flops(pallas=inner * math.prod(int(size) for size in parameters["grid_mapping"].grid))
        elif name == "cond":
            # The jaxpr does not say which branch is taken, so their mean counts. In a Pallas kernel (pl.when), the
            # larger branch counts: the other one skips a block of the grid.
            branches = [count_flops(branch, in_kernel) for branch in parameters["branches"]]
            mean = sum(branches, Flops()) * (1 / len(branches))
            total += max(branches, key=lambda branch: branch.total) if in_kernel else mean
        else:
            times = float(parameters["length"]) if name == "scan" else 1.0
            if name == "shard_map":  # inside, shapes are those of one device
                times = float(math.prod(parameters["mesh"].shape[axis] for axis in parameters["newly_manual_axes"]))
            for value in parameters.values():
                for inner in value if isinstance(value, tuple | list) else (value,):
                    if hasattr(inner, "eqns") or hasattr(getattr(inner, "jaxpr", None), "eqns"):
                        total += count_flops(inner, in_kernel) * times
    return total
