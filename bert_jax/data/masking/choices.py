"""Rules of extensions for the tokens that training predicts (config.data.masking), which join MASKINGS.

A rule chooses among the candidates of many sequences at once. It is a function of them alone: their random numbers
depend on the seed, the epoch, the sequence and the position only (law 2), so any rule resumes bit for bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Float64, Int32, Int64, UInt64
from bert_jax.data import order as hashing
from bert_jax.data.example import Rows
from bert_jax.data.masking.rule import Sequences, ShuffledWords, WordBoundaries
from bert_jax.data.masking.selection import choose_words
from bert_jax.errors import UserError

_POSITION_BITS = 32


class Candidates(NamedTuple):
    """The tokens of Q sequences of up to W positions. A word is a token with the tokens that continue it."""

    ids: Int32[np.ndarray, "Q W"]  # unspecified where nothing may be chosen
    words: WordBoundaries  # the positions that start and that continue words; no others may be chosen
    budgets: Int64[np.ndarray, "Q"]  # the most positions that may be chosen
    random: Float64[np.ndarray, "Q W"]  # uniform from 0 to below 1


Choose = Callable[[Candidates], Bool[np.ndarray, "Q W"]]

# Each entry returns the rule of the options of its kind, the data set (data/shards.py) and its vocabulary.
MASKINGS: dict[str, Callable[[Any, Any, Any], Choose]] = {}


def highest_words(candidates: Candidates, scores: Float64[np.ndarray, "Q W"]) -> Bool[np.ndarray, "Q W"]:
    """Chooses whole words by descending score of their first token, skipping those that exceed the rest of the budget.

    If no word fits, the first tokens of the highest one are chosen.
    """
    starts = candidates.words.starts
    ranks = np.argsort(np.argsort(-np.where(starts, scores, -np.inf), axis=1, kind="stable"), axis=1)
    positions = np.arange(starts.shape[1])
    absent = 2**64 - 1
    keys = (ranks.astype(np.uint64) << np.uint64(_POSITION_BITS)) | positions.astype(np.uint64)
    keys = np.sort(np.where(starts, keys, np.uint64(absent)), axis=1)
    order = ShuffledWords(keys, 2**_POSITION_BITS - 1, absent)
    return choose_words(candidates.words, order, candidates.budgets)


def choose(
    rule: Choose,
    name: str,
    rows: Rows,
    sequences: Sequences,
    words: WordBoundaries,
    budgets: Int64[np.ndarray, "Q"],
    states: UInt64[np.ndarray, "Q"],
) -> Bool[np.ndarray, "Q W"]:
    """Returns the positions that a rule chooses.

    Raises:
        UserError: The rule returns another shape, chooses a special token or padding, or exceeds a budget.
    """
    columns = np.arange(words.starts.shape[1])
    ids = rows.input_ids.reshape(-1).take(sequences.offsets[:, None] + columns, mode="clip").astype(np.int32)
    hashes = hashing.mix(states[:, None] + columns.astype(np.uint64) * hashing.GAMMA)
    random = (hashes >> np.uint64(11)) * 2.0**-53  # the 53 bits of a float64
    chosen = np.asarray(rule(Candidates(ids, words, budgets, random)))
    problem = ""
    if chosen.shape != words.starts.shape or chosen.dtype != bool:
        problem = f"returned {chosen.dtype}{list(chosen.shape)}, not bool{list(words.starts.shape)}"
    elif (chosen & ~(words.starts | words.inside)).any():
        problem = "chose a special token or padding. Choose among words.starts and words.inside"
    elif (chosen.sum(axis=1) > budgets).any():
        problem = "chose more positions than the budget of a sequence"
    if problem:
        raise UserError(f"the rule of config.data.masking={name} {problem}")
    return chosen
