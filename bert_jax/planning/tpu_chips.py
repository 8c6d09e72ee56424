"""The kinds of TPU and the peak figures of one device of each.

Memory and memory bandwidth are from cloud.google.com/tpu/docs, the page of each version. Link
bandwidths are bytes per second in one direction of one link, from Austin et al. 2025, "How to Scale
Your Model", part 2 (jax-ml.github.io/scaling-book), and so is what a chip sends over the network
between slices. There is no such figure for tpu7x: that of v6e is assumed, half of it for a core. The
clock follows from the peak and the matrix units: a unit of n x n performs n * n multiply-adds per
cycle.
"""

from dataclasses import dataclass

from bert_jax.planning.memory import GIB
from bert_jax.train.metrics import PEAK_FLOPS


@dataclass(frozen=True)
class Chip:
    """One device as libtpu compiles for it: a chip, or one of the two cores of a tpu7x chip with half its resources."""

    name: str  # the kind in a topology's name, such as v5e in v5e:16x16
    peak_flops: float  # bfloat16 FLOPs per second
    unit: int  # rows and columns of a matrix unit
    units: int  # matrix units
    memory_bytes: float  # available to a program, according to the compiler's messages
    memory_bandwidth: float  # bytes per second
    link_bandwidth: float  # bytes per second in one direction
    network_bandwidth: float  # bytes per second that the device sends to other slices
    wraparound_from: int  # chips along an axis whose ends are linked; see wraps_around
    dimensions: int  # axes of a slice
    largest: int  # chips in the largest slice
    cores: int = 1  # devices per chip

    @property
    def clock(self) -> float:
        """Cycles per second."""
        return self.peak_flops / (2 * self.unit**2 * self.units)

    def wraps_around(self, sides: tuple[int, ...]) -> tuple[bool, ...]:
        """Returns for each axis of a slice whether its ends are linked, which makes it a ring instead of a line.

        An axis of v5e and v6e wraps around when it is 16 chips long. All axes of the other kinds wrap
        around when each is a multiple of 4 (cloud.google.com/tpu/docs, v4).
        """
        if self.dimensions == 3:
            return (all(side % self.wraparound_from == 0 for side in sides),) * len(sides)
        return tuple(side == self.wraparound_from for side in sides)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", PEAK_FLOPS["TPU v4"], 128, 8, 30.75 * GIB, 1228e9, 4.5e10, 6.25e9, 4, 3, 4096),
        Chip("v5e", PEAK_FLOPS["TPU v5 lite"], 128, 4, 15.75 * GIB, 819e9, 4.5e10, 3.125e9, 16, 2, 256),
        Chip("v5p", PEAK_FLOPS["TPU v5"], 128, 8, 95.74 * GIB, 2765e9, 9e10, 6.25e9, 4, 3, 6144),
        Chip("v6e", PEAK_FLOPS["TPU v6 lite"], 256, 4, 31.25 * GIB, 1638e9, 9e10, 12.5e9, 16, 2, 256),
        Chip("tpu7x", PEAK_FLOPS["TPU7x"], 256, 4, 94.75 * GIB, 7380e9 / 2, 9e10, 12.5e9 / 2, 4, 3, 9216, cores=2),
    )
}
ASSUMED_NETWORK = ("tpu7x",)  # kinds whose network_bandwidth has no source
