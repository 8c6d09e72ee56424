"""Computes the roofline of a compiled program (Williams et al. 2009).

The lower bound of its time on a device is its arithmetic at peak FLOP/s or its memory traffic at full
bandwidth, whichever takes longer. Each instruction reads its operands once and writes its result
once; arrays in the on-chip memory (a memory space other than 0 in the layout) cost nothing. If a
fusion needs only a slice of an array, or updates part of it in place, only that part counts. To keep the result
a lower bound, it leaves out the padding of layouts, collectives (also inside fusions), and kernels
whose masks skip blocks, since the program does not say which.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from bert_jax.planning.collectives import DONE, START
from bert_jax.planning.hlo import COLLECTIVES, FREE, PALLAS, Instruction, Program, arrays_of, memory_bytes, shape_bytes

_SLICES = ("slice", "dynamic-slice", "gather")
_SLICED = ("slice-done", "dynamic-slice-done")  # part of an operand of the matching -start instruction
_SAME = ("bitcast", "reshape")
_ELEMENTWISE = frozenset(
    (*_SAME, "transpose", "copy", "convert", "bitcast-convert", "reduce-precision", "select", "compare", "clamp")
    + ("add", "subtract", "multiply", "divide", "remainder", "power", "maximum", "minimum", "negate", "abs", "sign")
    + ("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh", "erf", "sine", "cosine")
    + ("sqrt", "rsqrt", "cbrt", "floor", "ceil", "round-nearest-afz", "round-nearest-even", "is-finite", "and", "or")
    + ("xor", "not", "shift-left", "shift-right-logical", "shift-right-arithmetic", "popcnt")
)
_PARTS = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand that is written into part of operand 0

_ALIASES = re.compile(r'"aliasing_operands":\{"lists":\[((?:\{"indices":\[[^\]]*\]\},?)*)\]')
_INDEX = re.compile(r'"(\d+)"')
_PARAMETER = re.compile(r"parameter\((\d+)\)")


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step on a device by arithmetic alone and by memory alone, and the memory traffic in bytes."""

    arithmetic: float
    memory: float
    traffic: float

    @property
    def lower_bound(self) -> float:
        return max(self.arithmetic, self.memory)


def memory_traffic(program: Program) -> float:
    """Returns the bytes that a program moves to and from device memory on one device."""
    return sum(times * bytes_moved(program, instruction) for instruction, times in program.runs())


def bytes_moved(program: Program, instruction: Instruction) -> int:
    """Returns the bytes that an instruction at least reads from and writes to device memory; 0 for collectives."""
    opcode, operands, written = instruction.opcode, instruction.operands, memory_bytes(instruction.shape)
    if opcode == "copy-start":  # the shape holds source and destination
        return written
    if opcode in _SLICED:
        return written + _part(operands[0].operands[0], instruction)
    if opcode in FREE or opcode.endswith(("-start", "-done")) or _is_collective(instruction):
        return 0
    if opcode == "custom-call" and PALLAS not in instruction.text:
        return 0
    if opcode in _SLICES:
        return written + _part(operands[0], instruction)
    if opcode in _PARTS:
        part = operands[_PARTS[opcode]]
        return memory_bytes(part.shape) + _part(operands[0], part)
    body = _body(program, instruction)
    if not body:
        return written + sum(memory_bytes(one.shape) for one in operands)
    passed_on = _passed_on(body[-1], instruction)
    shares = _parameter_shares(program, body, passed_on)
    read = (
        min(memory_bytes(operand.shape), round(shares.get(index, 1.0) * shape_bytes(operand.shape)))
        for index, operand in enumerate(operands)
        if memory_bytes(operand.shape)
    )
    return _written(body[-1], instruction, passed_on) + sum(read)


def _is_collective(instruction: Instruction) -> bool:
    """Returns whether an instruction is a collective or starts or ends one inside a fusion."""
    target = instruction.text.partition('custom_call_target="')[2].partition('"')[0]
    return instruction.opcode in COLLECTIVES or target in (START, DONE)


def _body(program: Program, instruction: Instruction) -> tuple[Instruction, ...]:
    """Returns the instructions of a fusion; none for other instructions."""
    return program.computations.get(instruction.called[0], ()) if instruction.opcode == "fusion" else ()


def _part(whole: Instruction, part: Instruction) -> int:
    """Returns the bytes of a part of an array, 0 if the array is not in device memory."""
    return min(memory_bytes(whole.shape), shape_bytes(part.shape))


def _passed_on(root: Instruction, fusion: Instruction) -> set[int]:
    """Returns the indices of results that are operands where they are, such as the array of an all-reduce underway."""
    found = _ALIASES.search(fusion.text)
    indices = {int(index) for index in _INDEX.findall(found[1])} if found else set()
    return {
        index
        for index, result in enumerate(_results(root))
        if index + len(fusion.operands) in indices and _source(result).opcode == "parameter"
    }


def _parameter_shares(
    program: Program, body: tuple[Instruction, ...], passed_on: Collection[int] = ()
) -> dict[int, float]:
    """Returns the share of each parameter of a fusion that the fusion reads, by the index of the parameter.

    A fusion computes what its results need. A slice or look-up needs its own size of its operand, and operations on
    single elements need as much of their operands as others need of their result; the target of an in-place update is
    not read; any other operation needs all of its operands. Nobody reads the results that are passed on.
    """
    results = enumerate(_results(body[-1]))
    needed: dict[str, float] = {result.name: 1.0 for index, result in results if index not in passed_on}
    for user in (one for one in reversed(body) if one.opcode != "tuple"):
        share = needed.get(user.name, 0.0)
        nested = _parameter_shares(program, _body(program, user)) if user.opcode == "fusion" and share else {}
        for index, operand in enumerate(user.operands):
            if not share or _is_collective(user):
                continue
            if user.opcode in _SLICES and index == 0:
                part = share * shape_bytes(user.shape) / max(shape_bytes(operand.shape), 1)
            elif user.opcode in _ELEMENTWISE:
                part = share
            elif user.opcode == "fusion":
                part = nested.get(index, 1.0)
            else:
                part = 0.0 if user.opcode in _PARTS and index == 0 else 1.0
            needed[operand.name] = min(1.0, needed.get(operand.name, 0.0) + part)
    parameters = ((_PARAMETER.match(one.text), needed.get(one.name, 0.0)) for one in body)
    return {int(found[1]): share for found, share in parameters if found}


def _results(root: Instruction) -> tuple[Instruction, ...]:
    return root.operands if root.opcode == "tuple" else (root,)


def _source(result: Instruction) -> Instruction:
    """Returns what computes a result, which other instructions may only have shaped or taken out of a tuple."""
    while result.opcode in (*_SAME, "get-tuple-element"):
        result = result.operands[0]
    return result


def _written(root: Instruction, fusion: Instruction, passed_on: Collection[int]) -> int:
    """Returns the bytes that a fusion writes to device memory."""
    if _is_collective(root):
        return 0
    parts = arrays_of(fusion.shape)
    results = _results(root)
    if len(results) != len(parts):
        return memory_bytes(fusion.shape)
    return sum(
        min(size, _changed(result, size))
        for index, (result, (size, in_memory)) in enumerate(zip(results, parts, strict=True))
        if in_memory and index not in passed_on
    )


def _changed(result: Instruction, size: int) -> int:
    """Returns the bytes of a fusion's result that change, which for an in-place update is the updated part."""
    result = _source(result)
    if _is_collective(result):
        return 0
    return shape_bytes(result.operands[_PARTS[result.opcode]].shape) if result.opcode in _PARTS else size
