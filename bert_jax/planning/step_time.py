"""The estimated time of a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on each device, by kind of instruction."""

    by_kind: dict[str, float]
    pallas: float  # of Pallas kernels, which compilers cannot estimate
    exposed_collectives: float  # waiting for communication
    unpriced: int  # number of instructions that the compiler should have an estimate for and has not

    @property
    def without_pallas(self) -> float:
        return sum(self.by_kind.values()) + self.exposed_collectives

    @property
    def total(self) -> float:
        return self.without_pallas + self.pallas
