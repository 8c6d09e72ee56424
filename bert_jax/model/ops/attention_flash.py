"""How attention_flash_kernels.py divides the attention of a device: the blocks of a row and the cells of the grid.

Nobody has run the kernels on a TPU, so that they only run where they are requested. They are tested in interpret mode
on a CPU, and libtpu compiled them for TPU v4, v5e, v5p, v6e and tpu7x.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

LANES = 128  # the kernels take multiples of this number of positions
LARGEST_BLOCK = 512
# Scores of the heads of a cell. They are 1 MiB in float32, and the backward kernel has several arrays of their size.
SCORES_PER_CELL = LARGEST_BLOCK**2
# Elements of the query gradient of a cell's heads, over the whole row. With T=8,192 and H=64 there is one such head.
GRADIENT_PER_CELL = 8192 * 64
# Rows are limited since the backward kernel has the query gradient of a whole row in on-chip memory.
LARGEST_ROW = 2 * GRADIENT_PER_CELL


@dataclass(frozen=True)
class Grid:
    """How the attention of one device is divided into the cells of a kernel's grid.

    A cell is one row, some heads, a block of queries and a block of keys. `steps` cells share a block, of queries in
    the forward kernel and of keys in the backward kernel, and sums over these cells stay in on-chip memory. Methods
    take and return the numbers of blocks in a row; with `of_queries` the shared block is one of queries.
    """

    heads: int
    width: int
    length: int
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
        """Positions of a block. Blocks are hardly longer than the window, so that more of them can be skipped."""
        sizes = [size for size in range(LANES, LARGEST_BLOCK + 1, LANES) if self.length % size == 0]
        return next((size for size in sizes if 0 < self.window <= size), sizes[-1])

    @property
    def blocks(self) -> int:
        return self.length // self.block

    @property
    def heads_per_cell(self) -> int:
        """Short rows have several heads in a cell, since starting a cell takes time, too."""
        most = min(SCORES_PER_CELL // self.block**2, GRADIENT_PER_CELL // (self.width * self.length))
        return max(part for part in range(1, max(most, 1) + 1) if self.heads % part == 0)

    @property
    def reach(self) -> int:
        """How many blocks away a visible key can be."""
        return math.ceil(self.window / self.block) if self.window else self.blocks

    @property
    def steps(self) -> int:
        return min((1 if self.causal else 2) * self.reach + 1, self.blocks)

    def other(self, shared: Any, step: Any, of_queries: bool) -> Any:
        """Returns the block that a step adds to the shared one. Near the ends of a row it may not exist."""
        if self.steps == self.blocks:
            return step
        return shared + step - (0 if self.causal and not of_queries else self.reach)

    def fetched(self, shared: Any, step: Any, of_queries: bool) -> Any:
        """Returns the block that a step reads: if nothing in `other` is visible, the nearest with something visible."""
        first = shared if self.causal and not of_queries else 0
        last = shared if self.causal and of_queries else self.blocks - 1
        return jnp.clip(self.other(shared, step, of_queries), first, last)

    def visible(self, queries: Any, keys: Any) -> Any:
        """Returns whether any query of a block sees a key of a block, as far as their positions show."""
        if self.blocks == 1:
            return True
        near = (queries >= 0) & (queries < self.blocks) & (keys >= 0) & (keys < self.blocks)
        near &= abs(queries - keys) <= self.reach
        return near & (keys <= queries) if self.causal else near
