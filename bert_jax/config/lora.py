"""The configuration of LoRA: low-rank adapters of matrices that stay as they are (Hu et al. 2021)."""

import math
import re
from dataclasses import dataclass, fields

from bert_jax.command import UserError

# The matrices of a layer that may have an adapter, by the path that `targets` matches.
MATRICES = (
    *(f"encoder/layers/attention/{name}" for name in ("query", "key", "value", "output")),
    *(f"encoder/layers/feed_forward/{name}" for name in ("input", "output")),
)

# Those that cannot have one. Heads are trained in full; embeddings, also a table that is the output too, and the pooler
# stay as they are.
WITHOUT = (
    *(f"embeddings/{name}" for name in ("token", "position", "segment", "projection")),
    *("pooler/dense", "mlm_head/transform", "classifier/dense", "tagger/dense", "question_head/dense"),
)


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of rank `rank`: a matrix W computes x W + s dropout(x) A B, and only A and B are trained.

    The scale s is alpha / rank, or alpha / sqrt(rank) with rank_stabilized (Kalajdzievski 2023). Raises UserError for
    values out of range, and for targets that match no matrix, or that name one that cannot have an adapter.
    """

    rank: int = 0  # columns of A; 0: no adapters
    alpha: float = 16.0  # the scale of the adapters times their rank
    dropout: float = 0.0  # of the adapters' inputs
    targets: str = ".*"  # a regex over the paths of matrices; fewer may learn late (docs/adapting.md)
    rank_stabilized: bool = False  # the scale is alpha / sqrt(rank)

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise UserError(f"lora.rank is {self.rank}. Use 1 or more, such as 8, or 0 for no adapters")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"lora.alpha is {self.alpha}. Use a number above 0, such as {max(2 * self.rank, 16)}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"lora.dropout is {self.dropout}. Use a rate from 0 to below 1, such as 0.1")
        try:
            matched = self.matrices
        except re.error as error:
            raise UserError(f"lora.targets is {self.targets!r}, which is not a regular expression: {error}") from None
        if not matched:
            raise UserError(
                f"lora.targets is {self.targets!r}, which matches no matrix; they are {', '.join(MATRICES)}"
            )
        named = [path for path in WITHOUT if re.search(self.targets, path)]
        if named and matched != MATRICES:  # a pattern for everything, such as .*, names none of them
            raise UserError(
                f"lora.targets is {self.targets!r}, which also matches {named[0]}, but only matrices of encoder layers "
                f"have adapters: {', '.join(MATRICES)}. Heads train in full; leave the others out"
            )

    def check_unused(self) -> None:
        """Raises UserError for keys that have no effect without adapters.

        This is a check of the configuration that is trained: a sweep may set the rank.
        """
        changed = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        if self.rank == 0 and changed:
            raise UserError(
                f"lora.{changed[0]} is {getattr(self, changed[0])}, but lora.rank is 0, which means no adapters. "
                "Set --config.lora.rank, such as 8"
            )

    @property
    def matrices(self) -> tuple[str, ...]:
        """The paths of the matrices that have adapters."""
        return tuple(path for path in MATRICES if re.search(self.targets, path))

    @property
    def scale(self) -> float:
        """The factor s of the adapters' outputs."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
