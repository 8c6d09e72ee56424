"""Counts the collectives between TPU slices, which libtpu writes as a send to the host and a receive from it.

The hosts exchange and reduce what is sent over the data-center network, while a device computes. How long a device
waits follows from the order of the program: the network carries one transfer after another, as they are sent, and the
end of a receive waits until its own has arrived. Only instructions with estimated cycles shorten that. The way between
a device and its host counts as free.
"""

import dataclasses
import re
from collections.abc import Callable

from bert_jax.planning.collectives import Collective
from bert_jax.planning.hlo import Instruction, Program

_RUNTIME = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_TYPE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')


def slice_transfers(
    program: Program, slices: int, seconds: Callable[[Collective, float], float], cycle_seconds: float
) -> list[Collective]:
    """Returns the collectives between so many slices, one of each kind; `seconds` is the time of a number of bytes."""
    now = free = 0.0  # of the step: where the device is, and when the network has carried all that was sent before
    carried: dict[str, tuple[Collective, float, float]] = {}  # by rendezvous, with beginning and end
    waits: list[tuple[float, float]] = []
    for instruction, times in program.runs():
        if instruction.opcode == "send" and _RUNTIME in instruction.text:
            one = _collective(instruction, times, slices)
            begin = max(now, free)
            free = begin + seconds(one, one.bytes)
            carried[_rendezvous(instruction)] = one, begin, free
        elif instruction.opcode == "recv-done" and _rendezvous(instruction.operands[0]) in carried:
            arrived = carried[_rendezvous(instruction.operands[0])][2]
            if arrived > now:
                waits.append((now, arrived))
                now = arrived
        else:
            now += times * (instruction.cycles or 0) * cycle_seconds
    found: dict[str, Collective] = {}
    for one, begin, end in carried.values():
        waited = sum(max(min(end, until) - max(begin, since), 0.0) for since, until in waits)
        hidden = one.bytes * (1 - waited / (end - begin)) if end > begin else one.bytes
        total = found.get(one.kind, dataclasses.replace(one, count=0.0, bytes=0.0))
        found[one.kind] = dataclasses.replace(
            total,
            count=total.count + one.count,
            bytes=total.bytes + one.bytes,
            overlapped_bytes=total.overlapped_bytes + hidden,
        )
    return list(found.values())


def _collective(sent: Instruction, times: float, slices: int) -> Collective:
    """Returns the collective that a send begins, with the bytes of its whole array."""
    found = _TYPE.search(sent.text)
    kind = found[1].lower().replace("_", "-") if found else "send"
    whole = sent.operands[0].bytes * (slices if kind == "all-gather" else 1)
    return Collective(kind, slices, times, times * whole, 0.0, slices)


def _rendezvous(instruction: Instruction) -> str:
    """Returns the name that the send and the receive of a transfer share."""
    found = _RENDEZVOUS.search(instruction.text)
    return found[1] if found else ""
