"""The least time that a compiled program can take on a device, the roofline of Williams et al. 2009: its arithmetic at
the peak, or what it moves to and from memory at the bandwidth, whichever takes longer.

Each instruction reads what it is given once and writes its result once; what lies beside the matrix units (a memory
space other than 0 in the layout) moves for nothing. Of an array that a fusion only slices, or writes a part of in
place, that part counts. Left out, so that it stays the least: padding of layouts, collectives, also where a fusion
holds one, and kernels whose masks leave out blocks, for which ones is not in the program.
"""

from dataclasses import dataclass

from bert_jax.planning.chips import Chip
from bert_jax.planning.collectives import DONE, START
from bert_jax.planning.cycles import COLLECTIVES, FREE, PALLAS
from bert_jax.planning.flops import Flops
from bert_jax.planning.hlo import Instruction, Program, arrays_of, memory_bytes, shape_bytes

_SLICES = ("slice", "dynamic-slice", "gather")
_SLICED = ("slice-done", "dynamic-slice-done")  # of an array that the instruction before was given
_SAME = ("bitcast", "reshape")
_PARTS = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is written into a part of the first


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step on a device by its arithmetic alone and by its memory alone, and that traffic in bytes."""

    arithmetic: float
    memory: float
    traffic: float

    @property
    def least(self) -> float:
        return max(self.arithmetic, self.memory)


def roofline(program: Program, chip: Chip, flops: Flops, devices: int, head_width: int) -> Roofline:
    """Of a step with so many FLOPs on all devices; kernels count at what matrix units can do with heads so wide."""
    unit = min(1.0, head_width / chip.unit)
    work = (flops.xla + flops.pallas / unit) / devices
    traffic = sum(times * moved(program, instruction) for instruction, times in program.runs())
    return Roofline(work / chip.peak_flops, traffic / chip.memory_bandwidth, traffic)


def moved(program: Program, instruction: Instruction) -> int:
    """Bytes that an instruction reads from the device's memory and writes to it, at least; none of a collective."""
    opcode, operands, written = instruction.opcode, instruction.operands, memory_bytes(instruction.shape)
    if opcode == "copy-start":  # a tuple of both ends
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
    read = (
        min(memory_bytes(operand.shape), _read(program, body, place, shape_bytes(operand.shape)))
        for place, operand in enumerate(operands)
        if memory_bytes(operand.shape)
    )
    return _written(body[-1], instruction) + sum(read)


def _is_collective(instruction: Instruction) -> bool:
    """Whether it sends, or starts or ends that within a fusion."""
    target = instruction.text.partition('custom_call_target="')[2].partition('"')[0]
    return instruction.opcode in COLLECTIVES or target in (START, DONE)


def _body(program: Program, instruction: Instruction) -> tuple[Instruction, ...]:
    """The instructions of a fusion, none of any other."""
    return program.computations.get(instruction.called[0], ()) if instruction.opcode == "fusion" else ()


def _part(whole: Instruction, part: Instruction) -> int:
    """The bytes of a part of an array, where that is in memory."""
    return min(memory_bytes(whole.shape), shape_bytes(part.shape))


def _read(program: Program, body: tuple[Instruction, ...], place: int, whole: int) -> int:
    """Bytes of its operand at a place that a fusion with this body reads."""
    parameter = next((one for one in body if one.text.startswith(f"parameter({place})")), None)
    return whole if parameter is None else _used(program, body, parameter, whole)


def _used(program: Program, body: tuple[Instruction, ...], array: Instruction, whole: int) -> int:
    total = 0
    for user in body:
        for place, operand in enumerate(user.operands):
            if operand is not array or _is_collective(user):
                continue
            if user.opcode in _SLICES and place == 0:
                total += shape_bytes(user.shape)
            elif user.opcode in _SAME:
                total += _used(program, body, user, whole)
            elif user.opcode == "fusion":
                total += _read(program, _body(program, user), place, whole)
            elif user.opcode not in _PARTS or place:
                return whole
    return min(total, whole)


def _written(root: Instruction, fusion: Instruction) -> int:
    """Bytes of a fusion's results that it writes to memory."""
    if _is_collective(root):
        return 0
    parts = arrays_of(fusion.shape)
    results = root.operands if root.opcode == "tuple" else (root,)
    if len(results) != len(parts):
        return memory_bytes(fusion.shape)
    return sum(min(size, _changed(result, size)) for result, (size, there) in zip(results, parts, strict=True) if there)


def _changed(result: Instruction, size: int) -> int:
    while result.opcode in (*_SAME, "get-tuple-element"):
        result = result.operands[0]
    if _is_collective(result):
        return 0
    return shape_bytes(result.operands[_PARTS[result.opcode]].shape) if result.opcode in _PARTS else size
