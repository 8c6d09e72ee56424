"""Divides the rows of a mixture among its sources, in given shares, without state and without random draws (law 1)."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.command import UserError

DIGITS = 7  # of a share, so that 0.3 is exact
WHOLE = 10**DIGITS

Number = TypeVar("Number", int, np.ndarray)


@dataclass(frozen=True)
class RowShares:
    """Which source each row of an endless sequence belongs to, and its number among the rows of that source.

    Of the first n rows, the first source has n times its share, rounded. The other rows are divided among the other
    sources in the same way. Of any n consecutive rows, each of K sources therefore has n times its share within K - 1
    rows, and within (K - 1) / 2 if they are the first n; random draws would be off by about sqrt(n). Both questions
    take K integer operations for any n, so that a run can begin at any step.
    """

    weights: tuple[int, ...]  # positive; a share is a weight divided by their sum

    @classmethod
    def of(cls, weights: Sequence[float], names: Sequence[str], key: str) -> "RowShares":
        """The shares of positive, finite weights. Raises UserError, with the name, for one that is too small.

        key   the configuration key of the weights, for messages
        """
        largest = max(weights)  # the sum of finite weights may be infinite
        total = sum(weight / largest for weight in weights)
        whole = tuple(round(weight / largest / total * WHOLE) for weight in weights)
        if 0 in whole:
            raise UserError(
                f"the share of {names[whole.index(0)]} in {key} is less than {1 / WHOLE:g} of the rows. Raise its "
                "weight, or leave it out"
            )
        return cls(whole)

    @property
    def fractions(self) -> tuple[float, ...]:
        """The share of each source in the rows; they sum to 1."""
        return tuple(weight / sum(self.weights) for weight in self.weights)

    def counts(self, rows: int) -> tuple[int, ...]:
        """How many of the first `rows` rows belong to each source."""
        found: list[int] = []
        rest, total = rows, sum(self.weights)
        for weight in self.weights:
            count = _rounded_share(rest, weight, total)
            found.append(count)
            rest, total = rest - count, total - weight
        return tuple(found)

    def assign(self, numbers: Int64[np.ndarray, "R"]) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
        """The source of each row, and its number among the rows of that source. `numbers` are from 0."""
        sources, ordinals = np.zeros((2, *numbers.shape), np.int64)
        left, rest, total = np.arange(len(numbers)), numbers, sum(self.weights)
        for source, weight in enumerate(self.weights):
            before = _rounded_share(rest, weight, total)
            taken = _rounded_share(rest + 1, weight, total) > before
            sources[left[taken]], ordinals[left[taken]] = source, before[taken]
            left, rest, total = left[~taken], (rest - before)[~taken], total - weight
        return sources, ordinals


@dataclass(frozen=True)
class LaneShares:
    """Which source each row belongs to if rows are dealt to lanes in turn, and every lane reads its own part of each.

    Row number n is row n // lanes of lane n mod lanes. Each lane has the shares, beginning at another place of their
    sequence, `spacing` rows after the lane before it: with as many rows of each lane in a batch, the rows of a batch
    are consecutive in the sequence, and so have the shares as closely as without lanes. One lane is RowShares.
    """

    shares: RowShares
    lanes: int = 1
    spacing: int = 1

    def counts(self, rows: int) -> Int64[np.ndarray, "K L"]:
        """How many of the first `rows` rows, a multiple of `lanes`, belong to each source, by lane."""
        ends = (lane * self.spacing + rows // self.lanes for lane in range(self.lanes))
        return (np.array([self.shares.counts(end) for end in ends], np.int64) - self._before).T

    def assign(self, numbers: Int64[np.ndarray, "R"]) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
        """The source of each row, and how many rows of that source the lane of the row has before it."""
        index, lane = np.divmod(numbers, self.lanes)
        sources, ordinals = self.shares.assign(index + lane * self.spacing)
        return sources, ordinals - self._before[lane, sources]

    @functools.cached_property
    def _before(self) -> Int64[np.ndarray, "L K"]:
        """How many rows of each source come before the rows of each lane in the sequence of the shares."""
        return np.array([self.shares.counts(lane * self.spacing) for lane in range(self.lanes)], np.int64)


def _rounded_share(rows: Number, weight: int, total: int) -> Number:
    """rows * weight / total, rounded to the nearest integer and half up, without a product that exceeds 64 bits."""
    wholes, rest = rows // total, rows % total
    return wholes * weight + (2 * rest * weight + total) // (2 * total)
