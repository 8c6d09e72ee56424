"""Checks of rows against the guarantees of the format (docs/data_format.md)."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data.example import Rows
from bert_jax.data.manifest import PAIRS
from bert_jax.tokenizer import Tokenizer
from data_prep.inspection.statistics import unmasked_ids


def row_problems(rows: Rows, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """The guarantees that rows of the right layout violate, each with the first row that violates it."""
    ends = np.cumsum(rows.sequence_lengths.astype(np.int64), axis=1)
    checks = _sequence_checks(rows, manifest, tokenizer, ends) | _segment_checks(rows, manifest, tokenizer, ends)
    if rows.masked_positions is not None:
        never = tokenizer.special_ids
        if manifest["imported"]:  # the original scripts may predict [UNK]
            never = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
        checks |= _mask_checks(rows, tokenizer.vocab_size, never, ends[:, -1])
    for problem, violated in checks.items():
        if violated.any():
            yield problem, int(np.flatnonzero(violated)[0])


def _sequence_checks(
    rows: Rows, manifest: Mapping[str, Any], tokenizer: Tokenizer, ends: Int64[np.ndarray, "R S"]
) -> dict[str, np.ndarray]:
    """Each problem with whether a row has it."""
    ids, width = rows.input_ids, rows.input_ids.shape[1]
    present = rows.sequence_lengths > 0
    row = np.arange(len(ids))[:, None]
    starts = np.clip(ends - rows.sequence_lengths.astype(np.int64), 0, width - 1)
    filled = np.arange(width) < ends[:, -1:]
    # The original scripts may put any id in the place of a token, also the padding id: look below the masks.
    original = unmasked_ids(rows) if manifest["imported"] else ids
    # In GPT-2's vocabulary one token pads, and begins and ends sequences.
    own_padding = tokenizer.pad_id not in (tokenizer.cls_id, tokenizer.sep_id)
    last = ids[row, np.clip(ends - 1, 0, width - 1)]
    return {
        "an id outside of the vocabulary": (ids >= tokenizer.vocab_size).any(axis=1),
        "sequences longer than the row": ends[:, -1] > width,
        "no sequence": ~present[:, 0],
        "a sequence that does not begin with [CLS]": (present & (ids[row, starts] != tokenizer.cls_id)).any(axis=1),
        "a sequence that does not end with [SEP]": (present & (last != tokenizer.sep_id)).any(axis=1),
        "padding before the end of a sequence": ((original == tokenizer.pad_id) & filled & own_padding).any(axis=1),
        "ids after the last sequence": ((ids != tokenizer.pad_id) & ~filled).any(axis=1),
    }


def _segment_checks(
    rows: Rows, manifest: Mapping[str, Any], tokenizer: Tokenizer, ends: Int64[np.ndarray, "R S"]
) -> dict[str, np.ndarray]:
    lengths, firsts = rows.sequence_lengths.astype(np.int64), rows.first_segment_lengths.astype(np.int64)
    labels, present, pairs = rows.next_sentence_labels, lengths > 0, manifest["objective"] in PAIRS
    row = np.arange(len(lengths))[:, None]
    last_of_a = rows.input_ids[row, np.clip(ends - lengths + firsts - 1, 0, rows.input_ids.shape[1] - 1)]
    wrong_length = (firsts < 3) | (firsts > lengths - 2 if pairs else firsts != lengths)
    wrong_label = (labels != 0) & (labels != 1) if pairs else labels != -1
    return {
        "a segment A that does not end with [SEP]": (present & (last_of_a != tokenizer.sep_id)).any(axis=1),
        "segment lengths that do not fit": (present & wrong_length).any(axis=1),
        "an invalid next-sentence label": (present & wrong_label).any(axis=1),
    }


def _mask_checks(
    rows: Rows, vocab_size: int, never: tuple[int, ...], ends: Int64[np.ndarray, "R"]
) -> dict[str, np.ndarray]:
    """`never` are the ids that must not be predicted, `ends` where the last sequence of each row ends."""
    assert rows.masked_positions is not None and rows.masked_ids is not None and rows.masked_counts is not None
    positions, counts = rows.masked_positions.astype(np.int64), rows.masked_counts.astype(np.int64)
    real = np.arange(positions.shape[1]) < counts[:, None]
    special = np.isin(rows.masked_ids, never)
    return {
        "a masked position outside of the sequences": (real & (positions >= ends[:, None])).any(axis=1),
        "masked positions that do not ascend": (real[:, 1:] & (np.diff(positions, axis=1) <= 0)).any(axis=1),
        "more predictions than fit": counts > positions.shape[1],
        "a special token that is predicted": (real & special).any(axis=1),
        "a masked id outside of the vocabulary": (rows.masked_ids >= vocab_size).any(axis=1),
        "a filler that is not 0": (~real & ((positions != 0) | (rows.masked_ids != 0))).any(axis=1),
    }
