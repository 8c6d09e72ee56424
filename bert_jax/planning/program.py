"""Reads a compiled step: how often each instruction runs, its cycles, its bytes, its collectives; and counts FLOPs.

Read `parse` and `Program.runs` first: XLA's own analyses count a loop body once, here it counts once per iteration.
`collectives` pairs the start of each transfer with its end, to see what work stands in between. `count_flops` reads
the traced function instead of the compiled text, in which library calls and Pallas kernels have no FLOPs.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
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
# Instructions that launch no work of their own, and copies between memories, which run concurrently.
FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all", "partition-id")
    + ("replica-id", "broadcast", "reshape", "copy-start", "copy-done", "slice-start", "slice-done")
    + ("async-start", "async-update", "async-done", "domain", "opt-barrier", "add-dependency")
    + ("send", "send-done", "recv", "recv-done")
)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. `shape` is that of the result; `called` names the computations that it runs."""

    name: str
    opcode: str
    shape: str
    text: str
    called: tuple[str, ...]
    operands: tuple["Instruction", ...] = field(default=(), compare=False, repr=False)

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate of cycles; None if it gives none."""
        match = _CYCLES.search(self.text)
        return int(match[1]) if match else None

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return shape_bytes(self.shape)

    @property
    def target(self) -> str:
        """The target of a custom call; empty for other instructions."""
        match = _TARGET.search(self.text) if self.opcode == "custom-call" else None
        return match[1] if match else ""


@dataclass(frozen=True)
class Program:
    """The computations of a program by name, and the name of the entry computation."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]

    def runs(self) -> Iterator[tuple[Instruction, float]]:
        """Yields every instruction that executes on its own, with the number of times it runs.

        Instructions inside a fusion are part of the fusion. Each branch of a conditional counts an equal share of a
        run, since the text does not say how often each is taken.
        """
        yield from self._runs(self.entry, 1.0)

    def _runs(self, name: str, times: float) -> Iterator[tuple[Instruction, float]]:
        for instruction in self.computations.get(name, ()):
            opcode = instruction.opcode
            if opcode not in ("while", "conditional", "call", "async-start"):
                yield instruction, times
                continue
            inner = times * (self.trips(instruction) or 1) if opcode == "while" else times
            for called in instruction.called:
                yield from self._runs(called, inner / len(instruction.called) if opcode == "conditional" else inner)

    def trips(self, loop: Instruction) -> int | None:
        """Returns how often a loop's body runs; None if that is not known before the program runs.

        The compiler annotates it, or the loop's condition is `count < N`, as a scan from 0 has it.
        """
        if annotated := _TRIPS.search(loop.text):
            return int(annotated[1])
        match = _CONDITION.search(loop.text)
        body = self.computations.get(match[1], ()) if match else ()
        compared = next((one for one in body if one.opcode == "compare" and "direction=LT" in one.text), None)
        bounds = [
            int(found[1])
            for one in body
            if (found := _CONSTANT.match(one.text.strip())) and compared and f"%{one.name})" in compared.text
        ]
        return bounds[0] if bounds else None

    def loops_without_trip_count(self) -> int:
        """Returns the number of loops that count as one iteration because their trip count is unknown."""
        loops = (one for part in self.computations.values() for one in part if one.opcode == "while")
        return sum(self.trips(loop) is None for loop in loops)


def parse(text: str) -> Program:
    """Parses HLO text as returned by `compiled.as_text()`. Raises ValueError for text without an ENTRY."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name = "", ""
    body: dict[str, Instruction] = {}
    for line in text.splitlines():
        if not line.startswith(" ") and (match := _COMPUTATION.match(line)):
            name, body = match[2], {}
            entry = name if match[1] else entry
        elif line.startswith("}") and not line.startswith("}}"):  # }} ends a kernel's metadata
            computations[name] = tuple(body.values())
        elif name and (instruction := _instruction(line, body)):
            body[instruction.name] = instruction
    if not entry:
        raise ValueError("no ENTRY computation in the text of the program")
    return Program(entry, computations)


def _instruction(line: str, before: dict[str, Instruction]) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if not match:
        return None
    shape = _in_brackets(match[2], 0) if match[2].startswith("(") else match[2].partition(" ")[0]
    rest = match[2][len(shape) :].lstrip()
    opcode = _OPCODE.match(rest)
    if not opcode:
        return None
    called = tuple(_CALLED.findall(rest))
    if branches := _BRANCHES.search(rest):
        called += tuple(part.strip().lstrip("%") for part in branches[1].split(","))
    named = _NAME.findall(_in_brackets(rest, opcode.end() - 1)) if "%" in rest else ()
    operands = tuple(before[name] for name in named if name in before)
    return Instruction(match[1], opcode[1], shape, rest, called, operands)


def _in_brackets(text: str, start: int) -> str:
    """Returns the text from an opening bracket to the one that closes it."""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == "(") - (text[end] == ")")
        if not depth:
            return text[start : end + 1]
    return text[start:]


def shape_bytes(shape: str) -> int:
    """Returns the bytes of a shape in HLO syntax, summed over the parts of a tuple, without padding of layouts."""
    total = 0
    for kind, sizes in _ARRAY.findall(shape):
        bits = re.search(r"\d+", kind.replace("pred", "s8"))
        total += math.prod(map(int, filter(None, sizes.split(",")))) * (max(int(bits[0]) // 8, 1) if bits else 0)
    return total


# Memory traffic

_PARAMETER = re.compile(r"parameter\((\d+)\)")
_WORKSPACE = re.compile(r"\b[su]8\[(\d+)\]")
_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand that replaces part of operand 0
_SAME = ("bitcast", "reshape", "convert", "copy")


def memory_traffic(program: Program) -> float:
    """Returns the bytes that a program reads and writes on one device, as if no cache held any of them."""
    return sum(times * bytes_moved(program, one) for one, times in program.runs())


def bytes_moved(program: Program, instruction: Instruction) -> int:
    """Returns the bytes of operands and results; 0 for collectives and for what launches no work.

    Of an array that is only sliced or updated, the part counts.
    """
    if instruction.opcode in FREE or instruction.opcode.endswith("-done") or is_collective(program, instruction):
        return 0
    body = program.computations.get(instruction.called[0], ()) if instruction.opcode == "fusion" else ()
    if not body:  # an instruction of its own is a fusion of one
        read = sum(_read(operand, [(instruction, index)]) for index, operand in enumerate(instruction.operands))
        return read + _written(instruction)
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for user in body:
        for index, operand in enumerate(user.operands):
            users.setdefault(operand.name, []).append((user, index))

    def used(name: str) -> list[tuple[Instruction, int]]:
        direct = users.get(name, [])
        return [use for one in direct for use in (used(one[0].name) if one[0].opcode in _SAME else [one])] or direct

    parameters = [one for one in body if _PARAMETER.match(one.text)]
    results = body[-1].operands if body[-1].opcode == "tuple" else (body[-1],)
    return sum(_read(one, used(one.name)) for one in parameters) + sum(map(_written, results))


def _read(array: Instruction, uses: list[tuple[Instruction, int]]) -> int:
    whole = any(index or user.opcode not in (*_SLICES, *_UPDATES) for user, index in uses)
    parts = sum(user.bytes for user, _ in uses if user.opcode in _SLICES)
    return array.bytes if whole else min(parts, array.bytes)


def _written(result: Instruction) -> int:
    while result.opcode in _SAME and result.operands:
        result = result.operands[0]
    if result.opcode in _UPDATES:
        return result.operands[_UPDATES[result.opcode]].bytes
    # A library call returns its workspace, whose bytes it need not touch.
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
# libtpu writes what slices exchange as a send to the host and a receive from it, with one name for both.
_BETWEEN_SLICES = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind over groups of one size; `bytes` counts a device's whole arrays in one step.

    overlapped_bytes   the part of `bytes` that moves while the device computes
    slices             how many slices, or hosts of GPUs, a group spans
    """

    kind: str
    group: int
    count: float
    bytes: float
    overlapped_bytes: float = 0.0
    slices: int = 1

    def ring_seconds(self, sent: float, bandwidth: float) -> float:
        """Returns the time of `sent` of the bytes by a ring of devices that each send `bandwidth` bytes a second.

        n - 1 of n shards pass each link, twice in an all-reduce.
        """
        passes = 2.0 if self.kind == "all-reduce" else 1.0
        return passes * sent * (self.group - 1) / self.group / bandwidth


def collectives(
    program: Program,
    devices: int,
    slices: int = 1,
    *,
    transfer_seconds: Callable[[Collective], float] | None = None,
    work_seconds: Callable[[Instruction], float] = lambda _: 0.0,
) -> list[Collective]:
    """Returns the collectives of a program compiled for so many devices in so many slices, the largest first.

    A collective overlaps as far as the work between its start and its end lasts. Several that are under way at a time
    share that work, as they share the links. transfer_seconds is the time of a collective (None: nothing overlaps),
    work_seconds that of an instruction.
    """
    found: dict[tuple[str, int, int], Collective] = {}
    between = _between(program)
    for instruction, times in program.runs():
        one = _collective(program, instruction, devices, slices)
        if one is None:
            continue
        work = sum(share * work_seconds(each) for each, share in between.get(instruction.name, ()))
        needed = 0.0 if transfer_seconds is None else transfer_seconds(one)
        hidden = min(1.0, work / needed) if needed else 0.0
        key = (one.kind, one.group, one.slices)
        total = found.get(key, dataclasses.replace(one, count=0.0, bytes=0.0))
        found[key] = dataclasses.replace(
            total,
            count=total.count + times,
            bytes=total.bytes + times * one.bytes,
            overlapped_bytes=total.overlapped_bytes + times * hidden * one.bytes,
        )
    return sorted(found.values(), key=lambda one: -one.bytes)


def exposed_seconds(found: Iterable[Collective], seconds: Callable[[Collective], float]) -> float:
    """Returns the time in which a device waits for communication that no work overlaps."""
    return sum((seconds(dataclasses.replace(one, bytes=one.bytes - one.overlapped_bytes)) for one in found), 0.0)


def is_collective(program: Program, instruction: Instruction) -> bool:
    """Returns whether an instruction is a collective, or starts or ends one."""
    opcode = instruction.opcode.removesuffix("-start").removesuffix("-done")
    return opcode in COLLECTIVES or any(_fused(program, instruction, target) for target in (_START, _DONE))


def _collective(program: Program, instruction: Instruction, devices: int, slices: int) -> Collective | None:
    """Returns the collective that an instruction begins; None for any other. An end (`-done`) does not count."""
    if instruction.opcode == "send" and _BETWEEN_SLICES in instruction.text:
        named = _TRANSFER.search(instruction.text)
        kind = named[1].lower().replace("_", "-") if named else "send"
        size = instruction.operands[0].bytes * (slices if kind == "all-gather" else 1)
        return Collective(kind, slices, 1.0, float(size), slices=slices)
    sent = _fused(program, instruction, _START) or instruction
    kind = sent.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    group = group_of(sent.text, devices)
    if len(group) < 2:
        return None
    spanned = len({device * slices // devices for device in group})
    return Collective(kind, len(group), 1.0, _whole_bytes(sent, kind, len(group)), slices=spanned)


def _fused(program: Program, instruction: Instruction, target: str) -> Instruction | None:
    """Returns the collective that a fusion starts or ends (target: _START or _DONE); None for any other instruction.

    libtpu writes a collective this way when it spreads it over several fusions. The fusions in between contain the
    collective, too, and send nothing themselves.
    """
    if instruction.opcode != "fusion":
        return None
    body = [one for name in instruction.called for one in program.computations.get(name, ())]
    if not any(one.target == target for one in body):
        return None
    return next((one for one in body if one.opcode in COLLECTIVES), None)


def _whole_bytes(instruction: Instruction, kind: str, group: int) -> float:
    """Returns the bytes of the whole array: the result of an all-gather, the operand of a reduce-scatter."""
    size = instruction.bytes
    if instruction.opcode.endswith("-start") and instruction.shape.startswith("(") and kind != "all-reduce":
        # The shape holds operand and result. A permute's context words are too small to count.
        size = size * group // (group + 1) if kind in ("all-gather", "reduce-scatter") else size // 2
    return float(size * group if kind == "reduce-scatter" else size)


def group_of(text: str, devices: int) -> tuple[int, ...]:
    """Returns the devices of the first group of a collective, by their places in the mesh; of all, if it names none.

    Those of a collective-permute are all that send or receive. Groups are listed, {{0,2},{1,3}}, given as a transposed
    range, [2,2]<=[2,2]T(1,0), or as axes of a mesh of devices: mesh['axis_0'=2,'axis_1'=8] {'axis_1'}. There
    {'axis_1':(2)4} stands for the second axis of an axis of 8 seen as 2 x 4, and device_ids may give the devices.
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


Between = list[tuple[Instruction, float]]  # instructions, and the share of each that hides one collective


def _between(program: Program) -> dict[str, Between]:
    """Returns what runs between the start and the end of each collective, by the name of what starts it."""
    found: dict[str, Between] = {}
    for body in program.computations.values():
        # What is under way, by a key that start and end share: the start's name, a channel, or a rendezvous.
        under_way: dict[str, tuple[str, Between]] = {}

        def end(key: str, under_way: dict[str, tuple[str, Between]] = under_way) -> None:
            if key in under_way:
                name, instructions = under_way.pop(key)
                found[name] = instructions

        for instruction in body:
            opcode = instruction.opcode
            if opcode == "send" and _BETWEEN_SLICES in instruction.text:
                under_way[_first(_RENDEZVOUS, instruction)] = instruction.name, []
            elif opcode == "recv-done" and instruction.operands:
                end(_first(_RENDEZVOUS, instruction.operands[0]))
            elif opcode.endswith("-start"):
                if name := _started(program, instruction):
                    under_way[instruction.name] = name, []
            elif opcode.endswith("-done"):
                for operand in instruction.operands:
                    end(operand.name)
            elif sent := _fused(program, instruction, _START):
                under_way[_first(_CHANNEL, sent)] = instruction.name, []
            elif received := _fused(program, instruction, _DONE):
                end(_first(_CHANNEL, received))
            else:
                for _, instructions in under_way.values():
                    instructions.append((instruction, 1 / len(under_way)))
    return found


def _started(program: Program, instruction: Instruction) -> str | None:
    """Returns the name of the collective that an instruction starts; None if it starts something else, such as a copy.

    An async-start calls a computation that holds the collective.
    """
    if instruction.opcode.removesuffix("-start") in COLLECTIVES:
        return instruction.name
    called = [one for name in instruction.called for one in program.computations.get(name, ())]
    return next((one.name for one in called if one.opcode in COLLECTIVES), None)


def _first(pattern: re.Pattern[str], instruction: Instruction) -> str:
    found = pattern.search(instruction.text)
    return found[1] if found else ""


# FLOPs


@dataclass(frozen=True)
class Flops:
    """FLOPs of matmuls summed over all devices, two for each multiply-add."""

    xla: float = 0.0  # of the compiler's own operations, and of cuDNN's attention
    pallas: float = 0.0  # inside Pallas kernels, with every block of their grids

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.xla + other.xla, self.pallas + other.pallas)

    def __mul__(self, times: float) -> "Flops":
        return Flops(self.xla * times, self.pallas * times)

    @property
    def total(self) -> float:
        return self.xla + self.pallas


def count_flops(jaxpr: Any, in_kernel: bool = False) -> Flops:
    """Returns the matmul FLOPs of a (closed) jaxpr, with loops multiplied out and recomputation included.

    A cond counts the mean of its branches and a while loop one iteration, since the jaxpr does not say more. In a
    Pallas kernel a cond counts its largest branch: the other branch skips a block of the grid (pl.when).
    """
    total = Flops()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        total += _of_equation(equation, in_kernel)
    return total


def _of_equation(equation: Any, in_kernel: bool) -> Flops:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        return Flops(xla=_dot(equation))
    if name.startswith("dot_product_attention"):
        return Flops(xla=_cudnn_attention(equation))
    if name == "pallas_call":
        inner = count_flops(parameters["jaxpr"], in_kernel=True).total
        return Flops(pallas=inner * math.prod(int(size) for size in parameters["grid_mapping"].grid))
    if name == "cond":
        branches = [count_flops(branch, in_kernel) for branch in parameters["branches"]]
        if in_kernel:
            return max(branches, key=lambda branch: branch.total)
        return sum(branches, Flops()) * (1 / len(branches))
    times = float(parameters["length"]) if name == "scan" else 1.0
    if name == "shard_map":  # shapes inside are those of one device
        times = float(math.prod(parameters["mesh"].shape[name] for name in parameters["newly_manual_axes"]))
    return sum((count_flops(inner, in_kernel) for inner in _inner(parameters)), Flops()) * times


def _inner(parameters: dict[str, Any]) -> Iterator[Any]:
    for value in parameters.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns") or hasattr(getattr(one, "jaxpr", None), "eqns"):
                yield one


def _cudnn_attention(equation: Any) -> float:
    """Two matmuls of queries, keys and values [B, T, N, H] in the forward pass; five in the backward pass."""
    batch, queries, heads, width = equation.invars[0].aval.shape
    keys = equation.invars[1].aval.shape[1]
    matmuls = 5 if "bwd" in equation.primitive.name else 2
    return 2.0 * matmuls * batch * heads * queries * keys * width


def _dot(equation: Any) -> float:
    left = equation.invars[0].aval.shape
    (contracted, _), _ = equation.params["dimension_numbers"]
    depth = math.prod(left[axis] for axis in contracted)
    return 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
