"""Parses the HLO text of a compiled program: its computations and how often each runs.

XLA's own analyses count a loop body once. Here a computation runs once per iteration of the loops
around it. The trip count is the one that the compiler annotates, or the bound in the loop's
condition, which for a scan is `count < N`, starting at 0.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"constant\((\d+)\)")
_CALLED = re.compile(r"\b(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_BITS = re.compile(r"\d+")

# Instructions that cost nothing or run concurrently; the compiler starts copies between memories early.
FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all", "partition-id")
    + ("replica-id", "broadcast", "reshape", "copy-start", "copy-done", "slice-start", "slice-done")
    + ("async-start", "async-update", "async-done", "domain", "opt-barrier", "add-dependency")
)
COLLECTIVE_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COLLECTIVES = frozenset((*COLLECTIVE_KINDS, "send", "recv"))
PALLAS = 'custom_call_target="tpu_custom_call"'


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    shape       of the result, as written
    called      names of the computations that the instruction runs
    operands    the instructions of the same computation whose results it takes
    """

    name: str
    opcode: str
    shape: str
    text: str
    called: tuple[str, ...]
    operands: tuple["Instruction", ...] = field(default=(), compare=False, repr=False)

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate of cycles, if it gives one."""
        match = _CYCLES.search(self.text)
        return int(match[1]) if match else None

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return shape_bytes(self.shape)


@dataclass(frozen=True)
class Program:
    """The computations of a program by name, and the name of the entry computation."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]

    def runs(self) -> Iterator[tuple[Instruction, float]]:
        """Yields every instruction that executes on its own, with the number of times it runs.

        Instructions inside a fusion are part of the fusion. Each branch of a conditional counts an equal
        share of a run, since the text does not say how often each is taken.
        """
        yield from self._runs(self.entry, 1.0)

    def _runs(self, name: str, times: float) -> Iterator[tuple[Instruction, float]]:
        for instruction in self.computations.get(name, ()):
            if instruction.opcode == "while":
                for called in instruction.called:
                    yield from self._runs(called, times * (self.trips(instruction) or 1))
            elif instruction.opcode == "conditional":
                for called in instruction.called:
                    yield from self._runs(called, times / len(instruction.called))
            elif instruction.opcode in ("call", "async-start"):
                for called in instruction.called:
                    yield from self._runs(called, times)
            else:
                yield instruction, times

    def trips(self, loop: Instruction) -> int | None:
        """Returns how often a loop's body runs; None if that is not known before the program runs."""
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
        """Returns the number of loops that are counted as one iteration because their trip count is unknown."""
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


def _instruction(line: str, before: Mapping[str, Instruction]) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if not match:
        return None
    shape, rest = _split_shape(match[2])
    opcode = _OPCODE.match(rest)
    if not opcode:
        return None
    called = tuple(_CALLED.findall(rest))
    if branches := _BRANCHES.search(rest):
        called += tuple(part.strip().lstrip("%") for part in branches[1].split(","))
    named = _NAME.findall(_in_brackets(rest, opcode.end() - 1)) if "%" in rest else ()
    operands = tuple(before[name] for name in named if name in before)
    return Instruction(match[1], opcode[1], shape, rest.lstrip(), called, operands)


def _in_brackets(text: str, start: int) -> str:
    """Returns the text from an opening bracket to the one that closes it."""
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == "(") - (text[end] == ")")
        if not depth:
            return text[start : end + 1]
    return text[start:]


def _split_shape(text: str) -> tuple[str, str]:
    """Splits a definition into the shape that it begins with and the rest."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    shape = _in_brackets(text, 0)
    return shape, text[len(shape) :]


def shape_bytes(shape: str) -> int:
    """Returns the bytes of a shape in HLO syntax, summed over the parts of a tuple, without padding of layouts."""
    return sum(size for size, _ in arrays_of(shape))


def dimensions(shape: str) -> tuple[int, ...]:
    """Returns the dimensions of a shape, or of the first array of a tuple. Raises ValueError for a shape without."""
    return tuple(int(size) for size in _first_array(shape)[2].split(",") if size)


def element_type(shape: str) -> str:
    """Returns the type of a shape's elements, bf16 or f32, or of the first array of a tuple. Raises like dimensions."""
    return _first_array(shape)[1]


def _first_array(shape: str) -> re.Match[str]:
    if found := _ARRAY.search(shape):
        return found
    raise ValueError(f"{shape!r} holds no array")


def memory_bytes(shape: str) -> int:
    """Returns the bytes of the parts of a shape in device memory, whose layout has no other memory space S(n)."""
    return sum(size for size, in_memory in arrays_of(shape) if in_memory)


def arrays_of(shape: str) -> list[tuple[int, bool]]:
    """Returns the bytes of each array of a shape and whether it lies in device memory."""
    arrays = []
    for kind, sizes, layout in _ARRAY.findall(shape):
        bits = _BITS.search(kind.replace("pred", "s8"))
        elements = math.prod(map(int, filter(None, sizes.split(","))))
        arrays.append((elements * (max(int(bits[0]) // 8, 1) if bits else 0), "S(" not in layout))
    return arrays
