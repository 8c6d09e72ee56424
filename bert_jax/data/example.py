"""Rows as stored, and the Batch the model sees. Pure numpy: data preparation imports this without jax."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt, UInt64


class Rows(NamedTuple):
    """Stored rows, R of them: the columns of a shard (docs/data_format.md), before masking.

    Sequence s of a row fills the slots after those of the sequences before it; absent sequences have length 0.
    """

    input_ids: UInt[np.ndarray, "R T"]  # uint16 when V <= 65536, else uint32; pad id after the last sequence
    sequence_lengths: UInt[np.ndarray, "R S"]  # uint16; slots of each sequence, [CLS] and [SEP]s counted
    first_segment_lengths: UInt[np.ndarray, "R S"]  # uint16; of those, slots of segment A with [CLS] and its [SEP]
    next_sentence_labels: Int[np.ndarray, "R S"]  # int8; 0 is next, 1 random, -1 no label
    sequence_keys: UInt64[np.ndarray, "R S"]  # (work unit << 32) | ordinal: the 64-bit sequence id of law 2
    # Only with static masking (input_ids are then the ids after masking):
    masked_positions: UInt[np.ndarray, "R M"] | None = None  # uint16; ascending; filler slots hold 0
    masked_ids: UInt[np.ndarray, "R M"] | None = None  # the dtype of input_ids; the truth
    masked_counts: UInt[np.ndarray, "R"] | None = None  # uint16; how many of the M slots are predictions


class Batch(NamedTuple):
    """A pretraining batch (numpy or jax arrays). Unpacked rows have S = 1; row-local positions throughout.

    | field | dtype, shape | |
    |---|---|---|
    | input_ids, segment_ids | i32[B,T] | ids after masking; token types 0 and 1 |
    | sequence_ids, positions | i32[B,T] | 0 padding, 1..S; positions restart in each sequence |
    | masked_positions, masked_ids, masked_weights | i32, i32, f32 [B,M] | where, the truth, 0 for a filler |
    | cls_positions, next_sentence_label, next_sentence_weight | i32, i32, f32 [B,S] | 0: is next, 1: random |
    """

    input_ids: Any
    segment_ids: Any
    sequence_ids: Any
    positions: Any
    masked_positions: Any
    masked_ids: Any
    masked_weights: Any
    cls_positions: Any
    next_sentence_label: Any
    next_sentence_weight: Any


def max_predictions(seq_len: int, pack: int, mask_rate: float) -> int:
    """M: the most predictions a row can hold, so that packing never truncates one (law 2).

    A sequence of n slots predicts max(1, round(mask_rate * n)) of them (google-research/bert,
    create_pretraining_data.py), which is at most mask_rate * n + 1/2 for n >= 1 / (2 * mask_rate): sequences that are
    packed together must have so many slots (4 at a rate of 0.15). The millionth covers rounding of the product.
    """
    return max(1, int(mask_rate * seq_len + 0.5 * pack + 1e-6))
