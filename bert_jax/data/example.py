"""The stored rows, and the batch that the model receives. Pure numpy: data preparation imports this without jax."""

from typing import Any, NamedTuple

import numpy as np

from bert_jax.array_types import Int, UInt, UInt64


class Rows(NamedTuple):
    """R stored rows: the columns of a shard (docs/data_format.md), before masking.

    The sequences of a row follow one another from position 0. Absent sequences have length 0.
    """

    input_ids: UInt[np.ndarray, "R T"]  # uint16 if V <= 65536, else uint32; pad id after the last sequence
    sequence_lengths: UInt[np.ndarray, "R S"]  # uint16; including [CLS] and [SEP]
    first_segment_lengths: UInt[np.ndarray, "R S"]  # uint16; of segment A with [CLS] and its [SEP]
    next_sentence_labels: Int[np.ndarray, "R S"]  # int8; 0 is next, 1 random, -1 no label
    sequence_keys: UInt64[np.ndarray, "R S"]  # (work unit << 32) | ordinal: the 64-bit sequence id of law 2
    # Only with static masking; input_ids are then the ids after masking.
    masked_positions: UInt[np.ndarray, "R M"] | None = None  # uint16; ascending; 0 in fillers
    masked_ids: UInt[np.ndarray, "R M"] | None = None  # the original ids; dtype of input_ids
    masked_counts: UInt[np.ndarray, "R"] | None = None  # uint16; the number of predictions among the M


def unmasked_ids(rows: Rows) -> UInt[np.ndarray, "R T"]:
    """Undoes static masking in input_ids."""
    if rows.masked_positions is None or rows.masked_ids is None or rows.masked_counts is None:
        return rows.input_ids
    # Rows may be views of a read-only memory map (Dataset.shard_rows).
    ids = rows.input_ids.copy()
    real = np.arange(rows.masked_positions.shape[1]) < rows.masked_counts[:, None]
    # Damaged rows may have positions beyond their end. Only bert-jax inspect-shards --verify looks for them.
    real &= rows.masked_positions < ids.shape[1]
    row, column = np.nonzero(real)
    ids[row, rows.masked_positions[row, column]] = rows.masked_ids[row, column]
    return ids


class Batch(NamedTuple):
    """A pretraining batch (numpy or jax arrays). Unpacked rows have S = 1. All positions but `positions` count within
    the row.

    | field | dtype, shape | |
    |---|---|---|
    | input_ids, segment_ids | i32[B,T] | ids after masking; token types 0 and 1 |
    | sequence_ids, positions | i32[B,T] | 0 padding, 1..S; positions restart in each sequence |
    | masked_positions, masked_ids, masked_weights | i32, i32, f32 [B,M] | positions, original ids, 0 for fillers |
    | cls_positions, next_sentence_label, next_sentence_weight | i32, i32, f32 [B,S] | 0: is next, 1: random |
    | span_left, span_right, span_offsets | i32[B,M] | only with span masks, otherwise None: the positions before and
    after a prediction's span, and its position in the span from 1; 0 for fillers |
    """

    # Typed Any, because the arrays are numpy's or jax's, and this module must not import jax.
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
    span_left: Any = None
    span_right: Any = None
    span_offsets: Any = None

    @property
    def unpacked(self) -> bool:
        """Whether every row holds one sequence at most. Attention needs it (model/embeddings.py)."""
        return one_in_each_row(self.cls_positions)


def one_in_each_row(cls_positions: Any) -> bool:
    """Whether S is 1 in cls_positions [B, S]: every row holds one sequence at most."""
    return np.shape(cls_positions)[-1:] == (1,)


# [CLS], one token to predict, and [SEP]. A shorter sequence has no prediction.
SHORTEST_SEQUENCE = 3


def max_predictions(seq_len: int, pack: int, mask_rate: float, reorder_rate: float = 0.0) -> int:
    """Returns M, the most predictions that a row can have (law 2).

    Args:
        seq_len: Positions in a row.
        pack: The most sequences in a row.
        mask_rate: The share of a sequence's positions to predict.
        reorder_rate: The share of positions in shuffled trigrams, which are predicted, too.
    """

    # A sequence of n positions has max(1, round(mask_rate * n)) predictions, and round(reorder_rate * n / 3) trigrams
    # of three tokens. This bound on both is convex in n.
    def most(length: int) -> float:
        return max(1.0, mask_rate * length + 0.5) + (reorder_rate * length + 1.5 if reorder_rate else 0.0)

    # So the total is greatest for as many sequences as possible, all but one of them as short as possible.
    others = max(0, min(pack, seq_len // SHORTEST_SEQUENCE) - 1)
    bound = others * most(SHORTEST_SEQUENCE) + most(seq_len - others * SHORTEST_SEQUENCE)
    return min(seq_len, int(bound + 1e-6))  # the millionth covers rounding errors of the products
