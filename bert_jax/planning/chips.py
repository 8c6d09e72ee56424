"""Kinds of TPU, and what one device of each can do.

Peak FLOP/s, memory and memory bandwidth: cloud.google.com/tpu/docs, the page of each version. Links: bytes a second in
one direction of one link, Austin et al. 2025, "How to Scale Your Model", part 2 (jax-ml.github.io/scaling-book). The
clock follows from the peak and the matrix units: a unit of n x n multiplies and adds n * n times a cycle.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device as libtpu compiles for it: a chip, or on tpu7x one of its two cores, with half of what it has."""

    name: str  # as in v5e:16x16
    peak_flops: float  # bfloat16, a second
    unit: int  # width of a matrix unit
    units: int
    memory_bytes: float  # that a program can have, by the compiler's own messages
    memory_bandwidth: float  # bytes a second
    link_bandwidth: float  # bytes a second, one way
    joined_from: int  # chips on an axis from which on its ends are joined, or a multiple of them
    dimensions: int  # of its topologies
    largest: int  # chips of the largest slice
    cores: int = 1  # devices of a chip

    @property
    def clock(self) -> float:
        """Cycles a second."""
        return self.peak_flops / (2 * self.unit**2 * self.units)

    def joined(self, sides: tuple[int, ...]) -> tuple[bool, ...]:
        """Of each axis of a slice whether its ends are joined: a ring, where others are lines.

        v5e, v6e: of 16 chips. Those of three axes: where each is a multiple of 4 (cloud.google.com/tpu/docs, v4).
        """
        if self.dimensions == 3:
            return (all(side % self.joined_from == 0 for side in sides),) * len(sides)
        return tuple(side == self.joined_from for side in sides)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, 128, 8, 30.75 * GIB, 1228e9, 4.5e10, 4, 3, 4096),
        Chip("v5e", 197e12, 128, 4, 15.75 * GIB, 819e9, 4.5e10, 16, 2, 256),
        Chip("v5p", 459e12, 128, 8, 95.74 * GIB, 2765e9, 9e10, 4, 3, 6144),
        Chip("v6e", 918e12, 256, 4, 31.25 * GIB, 1638e9, 9e10, 16, 2, 256),
        Chip("tpu7x", 2307e12 / 2, 256, 4, 94.75 * GIB, 7380e9 / 2, 9e10, 4, 3, 9216, cores=2),
    )
}
