"""Replaces chosen tokens: by [MASK], by a random token, or not at all."""

import numpy as np

from bert_jax.array_types import Int32, Int64, Integer, UInt32, UInt64
from bert_jax.command import UserError
from bert_jax.data import hashing
from bert_jax.data.masking.rule import MaskingRule


class Replacer:
    """Replaces tokens in the shares of the rule: [MASK], a random ordinary token, or the token itself.

    `counts` is the number of occurrences of each id, which random tokens by unigram frequency need. Raises UserError if
    it counts no ordinary token.
    """

    def __init__(
        self,
        rule: MaskingRule,
        mask_id: int,
        ordinary_ids: Int64[np.ndarray, "K"],
        counts: Int64[np.ndarray, "V"] | None,
    ) -> None:
        self._mask_id, self._ordinary_ids = mask_id, ordinary_ids
        # Thresholds for a uniform 32-bit value: [MASK] below the first, a random token below the second.
        self._mask_below = round(rule.split.mask * 2**32)
        self._random_below = round((rule.split.mask + rule.split.random) * 2**32)
        self._by_count = rule.random == "unigram"
        self._thresholds = None if counts is None else _thresholds(counts[ordinary_ids])

    def replace(
        self, original: Int32[np.ndarray, "K"], cases: UInt64[np.ndarray, "K"], picks: UInt64[np.ndarray, "K"]
    ) -> Integer[np.ndarray, "K"]:
        """The replacement of each token.

        cases   64-bit hashes whose high half decides between [MASK], a random token and the token itself
        picks   64-bit hashes whose low half picks the random token
        Raises ValueError if the rule needs unigram counts and none were given.
        """
        case = cases >> np.uint64(32)
        random = np.flatnonzero((case >= self._mask_below) & (case < self._random_below))
        replaced = np.where(case < self._mask_below, self._mask_id, original)
        replaced[random] = self._random(picks[random].astype(np.uint32))
        return replaced

    def _random(self, values: UInt32[np.ndarray, "K"]) -> Int64[np.ndarray, "K"]:
        if not self._by_count:
            return self._ordinary_ids[hashing.bounded(values, self._ordinary_ids.size)]
        if self._thresholds is None:
            raise ValueError("random tokens by unigram frequency need unigram_counts")
        return self._ordinary_ids[np.searchsorted(self._thresholds, values.astype(np.uint64), side="right")]


def _thresholds(counts: Int64[np.ndarray, "K"]) -> UInt64[np.ndarray, "K"]:
    """The end of each id's share of the 2**32 values; each share is exact up to one value."""
    totals = np.cumsum(counts).tolist()
    if not totals or totals[-1] <= 0:
        raise UserError("the unigram counts contain no ordinary token to sample from; build the examples again")
    return np.array([total * 2**32 // totals[-1] for total in totals], np.uint64)
