"""The rows that attention_triton_kernels.py takes: their padded length, their blocks, and the widths of heads."""

import math
from dataclasses import dataclass

import jax

LEAST_BLOCK = 16  # the smallest tile of a matmul in Triton
WHOLE_ROW = 128  # rows of up to this many positions are one block
BLOCK = 64  # positions of a block of longer rows
HEAD_WIDTHS = (16, 32, 64, 128)
HOPPER, TIMED_WIDTH = "9.0", 64  # the compute capability and the head width for which the kernels were timed


@dataclass(frozen=True)
class Grid:
    """The shape of a row for the kernels, whose grid has a cell for each row, head and block of positions."""

    width: int
    length: int  # a multiple of the block
    window: int = 0
    causal: bool = False
    dropout_rate: float = 0.0
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT
    interpret: bool = False

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return 1.0 / math.sqrt(self.width)

    @property
    def block(self) -> int:
        return self.length if self.length <= WHOLE_ROW else BLOCK

    @property
    def blocks(self) -> int:
        return self.length // self.block


def padded_length(length: int) -> int:
    """Returns the positions of a row for the kernels: Triton takes powers of two."""
    if length <= WHOLE_ROW:
        return max(LEAST_BLOCK, 2 ** (length - 1).bit_length())
    return -(-length // BLOCK) * BLOCK
