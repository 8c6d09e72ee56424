"""Rows of random sequences for the tests of the model, packed or each in a row of its own."""

from typing import NamedTuple

import numpy as np

from bert_jax.data.example import Batch


class Sequence(NamedTuple):
    """One sequence before it is laid into a row."""

    ids: np.ndarray
    first_segment: int
    masked: np.ndarray  # positions in the sequence
    truth: np.ndarray
    label: int


def random_sequence(length: int, vocab_size: int, seed: int) -> Sequence:
    rng = np.random.default_rng(seed)
    masked = np.sort(rng.choice(np.arange(1, length), max(1, length // 5), replace=False))
    return Sequence(
        ids=rng.integers(1, vocab_size, length),
        first_segment=int(rng.integers(1, length)),
        masked=masked,
        truth=rng.integers(0, vocab_size, len(masked)),
        label=int(rng.integers(0, 2)),
    )


def lay(rows: list[list[Sequence]], slots: int, predictions: int) -> Batch:
    """A Batch of these rows, each a list of packed sequences, with `slots` positions and `predictions` masks."""
    pack = max(len(row) for row in rows)
    batch = Batch(
        *(np.zeros((len(rows), slots), np.int32) for _ in range(4)),
        *(np.zeros((len(rows), predictions), kind) for kind in (np.int32, np.int32, np.float32)),
        *(np.zeros((len(rows), pack), kind) for kind in (np.int32, np.int32, np.float32)),
    )
    for index, row in enumerate(rows):
        start, filled = 0, 0
        for number, sequence in enumerate(row):
            own = slice(start, start + len(sequence.ids))
            position = np.arange(len(sequence.ids))
            batch.input_ids[index, own] = sequence.ids
            batch.segment_ids[index, own] = position >= sequence.first_segment
            batch.sequence_ids[index, own] = number + 1
            batch.positions[index, own] = position
            taken = slice(filled, filled + len(sequence.masked))
            batch.masked_positions[index, taken] = start + sequence.masked
            batch.masked_ids[index, taken] = sequence.truth
            batch.masked_weights[index, taken] = 1
            batch.cls_positions[index, number] = start
            batch.next_sentence_label[index, number] = sequence.label
            batch.next_sentence_weight[index, number] = 1
            start, filled = own.stop, taken.stop
    return batch
