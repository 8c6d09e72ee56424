"""Checks of rows against the guarantees of the format (docs/data_format.md)."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data.example import Rows
from bert_jax.data.manifest import PAIRS
from bert_jax.tokenizer import Tokenizer


def row_problems(rows: Rows, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """The guarantees that rows of the right layout violate, each with the first row that violates it."""
    ends = np.cumsum(rows.sequence_lengths.astype(np.int64), axis=1)
    checks = _sequence_checks(rows, manifest, tokenizer, ends)
    if rows.masked_positions is not None:
        checks |= _mask_checks(rows, tokenizer, ends[:, -1])
    for problem, violated in checks.items():
        if violated.any():
            yield problem, int(np.nonzero(violated)[0][0])


def _sequence_checks(
    rows: Rows, manifest: Mapping[str, Any], tokenizer: Tokenizer, ends: Int64[np.ndarray, "R S"]
) -> dict[str, np.ndarray]:
    """Each problem with whether a row, or a part of it, has it."""
    ids, labels, width = rows.input_ids, rows.next_sentence_labels, rows.input_ids.shape[1]
    lengths, firsts = rows.sequence_lengths.astype(np.int64), rows.first_segment_lengths.astype(np.int64)
    present, filled = lengths > 0, np.arange(width) < ends[:, -1:]
    starts = ends - lengths
    row = np.arange(len(ids))[:, None]

    def differs(positions: Int64[np.ndarray, "R S"], token: int) -> np.ndarray:
        return present & (ids[row, np.clip(positions, 0, width - 1)] != token)

    # In GPT-2's vocabulary one token pads, and begins and ends sequences.
    own_padding = tokenizer.pad_id not in (tokenizer.cls_id, tokenizer.sep_id)
    pairs = manifest["objective"] in PAIRS
    wrong_length = (firsts < 3) | (firsts > lengths - 2 if pairs else firsts != lengths)
    wrong_label = (labels != 0) & (labels != 1) if pairs else labels != -1
    return {
        "an id outside of the vocabulary": ids >= tokenizer.vocab_size,
        "sequences longer than the row": ends[:, -1] > width,
        "no sequence": ~present[:, 0],
        "a sequence that does not begin with [CLS]": differs(starts, tokenizer.cls_id),
        "a sequence that does not end with [SEP]": differs(ends - 1, tokenizer.sep_id),
        "padding before the end of a sequence": (ids == tokenizer.pad_id) & filled & own_padding,
        "ids after the last sequence": (ids != tokenizer.pad_id) & ~filled,
        "a segment A that does not end with [SEP]": differs(starts + firsts - 1, tokenizer.sep_id),
        "segment lengths that do not fit": present & wrong_length,
        "an invalid next-sentence label": present & wrong_label,
    }


def _mask_checks(rows: Rows, tokenizer: Tokenizer, ends: Int64[np.ndarray, "R"]) -> dict[str, np.ndarray]:
    """`ends` is where the last sequence of each row ends."""
    assert rows.masked_positions is not None and rows.masked_ids is not None and rows.masked_counts is not None
    positions, counts = rows.masked_positions.astype(np.int64), rows.masked_counts.astype(np.int64)
    real = np.arange(positions.shape[1]) < counts[:, None]
    return {
        "a masked position outside of the sequences": real & (positions >= ends[:, None]),
        "masked positions that do not ascend": real[:, 1:] & (np.diff(positions, axis=1) <= 0),
        "more predictions than fit": counts > positions.shape[1],
        "a special token that is predicted": real & np.isin(rows.masked_ids, tokenizer.special_ids),
        "a masked id outside of the vocabulary": rows.masked_ids >= tokenizer.vocab_size,
        "a filler that is not 0": ~real & ((positions != 0) | (rows.masked_ids != 0)),
    }
