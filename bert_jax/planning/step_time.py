"""The estimated time of a step, and of its kernels where it is estimated kernel by kernel."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

PALLAS = "Pallas kernels"  # a kind, whose time is that of StepTime.pallas


@dataclass(frozen=True)
class Kernel:
    """What runs on a device as one piece, with its cost per run."""

    kind: str
    name: str
    operation: str  # the operation of the traced function that it computes; empty if it is unknown
    shape: str  # of the result
    times: float  # runs in a step
    bytes: float  # to and from memory
    flops: float  # of matmuls
    seconds: float
    launch: float  # seconds of the launch, in addition
    bound: str  # what takes these seconds: memory or arithmetic
    compiler_seconds: float | None  # by the compiler's own cost model, if that has a figure


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on each device, by kind of instruction."""

    by_kind: dict[str, float]
    pallas: float  # of Pallas kernels, which compilers cannot estimate
    exposed_collectives: float  # waiting for communication
    unpriced: int  # number of instructions that the compiler should have an estimate for and has not
    kernels: tuple[Kernel, ...] = ()  # the longest first; empty if the time is not estimated kernel by kernel

    @property
    def by_bound(self) -> dict[str, float]:
        """Seconds by what limits the speed; they sum to the total if the time is estimated kernel by kernel."""
        timed = [kernel for kernel in self.kernels if kernel.kind != PALLAS]
        parts = {
            bound: sum(kernel.times * kernel.seconds for kernel in timed if kernel.bound == bound)
            for bound in sorted({kernel.bound for kernel in timed})
        }
        parts |= {PALLAS: self.pallas} if self.pallas else {}
        launches = sum(kernel.times * kernel.launch for kernel in self.kernels)
        return parts | {"launches": launches, "communication": self.exposed_collectives}

    @property
    def without_pallas(self) -> float:
        return sum(self.by_kind.values()) + self.exposed_collectives

    @property
    def total(self) -> float:
        return self.without_pallas + self.pallas


def grouped(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Returns kernels with those that compute the same in each layer as one, which runs as often, the longest first."""
    found: dict[tuple[object, ...], Kernel] = {}
    for kernel in kernels:
        same = (kernel.kind, kernel.operation or kernel.name, kernel.shape, kernel.bytes, kernel.flops)
        total = kernel.times + (found[same].times if same in found else 0.0)
        found[same] = dataclasses.replace(found.get(same, kernel), times=total)
    return sorted(found.values(), key=lambda kernel: -kernel.times * kernel.seconds)
