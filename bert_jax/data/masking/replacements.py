"""What stands in the place of a chosen token."""

import numpy as np

from bert_jax.array_types import Int32, Int64, Integer, UInt32, UInt64
from bert_jax.command import UserError
from bert_jax.data import hashing
from bert_jax.data.masking.rule import MaskingRule


class Replacer:
    """[MASK], a random token of the ordinary ones, or the truth, in the shares of the rule's split.

    With random tokens by unigram frequency, `counts` says how often each id stands in the text. Raises UserError when
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
        # Of the 2**32 values: below the first a chosen token becomes [MASK], below the second a random one.
        self._mask_below = round(rule.split.mask * 2**32)
        self._random_below = round((rule.split.mask + rule.split.random) * 2**32)
        self._by_count = rule.random == "unigram"
        self._thresholds = None if counts is None else _thresholds(counts[ordinary_ids])

    def replace(
        self, truth: Int32[np.ndarray, "K"], cases: UInt64[np.ndarray, "K"], picks: UInt64[np.ndarray, "K"]
    ) -> Integer[np.ndarray, "K"]:
        """What becomes of each token, by the high half of one 64-bit hash, and which random one by the low half of
        another. Raises ValueError when the rule wants counts and none were given."""
        case = cases >> np.uint64(32)
        random = np.flatnonzero((case >= self._mask_below) & (case < self._random_below))
        replaced = np.where(case < self._mask_below, self._mask_id, truth)
        replaced[random] = self._random(picks[random].astype(np.uint32))
        return replaced

    def _random(self, values: UInt32[np.ndarray, "K"]) -> Int64[np.ndarray, "K"]:
        if not self._by_count:
            return self._ordinary_ids[hashing.bounded(values, self._ordinary_ids.size)]
        if self._thresholds is None:
            raise ValueError("random tokens by unigram frequency need the unigram counts")
        return self._ordinary_ids[np.searchsorted(self._thresholds, values.astype(np.uint64), side="right")]


def _thresholds(counts: Int64[np.ndarray, "K"]) -> UInt64[np.ndarray, "K"]:
    """Where each id's share of the 2**32 values ends: exact, but for less than one value an id."""
    totals = np.cumsum(counts).tolist()
    if not totals or totals[-1] <= 0:
        raise UserError("the unigram counts hold no ordinary token to draw random ones from; build the examples again")
    return np.array([total * 2**32 // totals[-1] for total in totals], np.uint64)
