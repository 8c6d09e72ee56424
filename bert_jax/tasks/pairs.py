"""Encodes texts and pairs of texts as rows: [CLS] a [SEP], or [CLS] a [SEP] b [SEP] with b in segment 1.

The number of [SEP] between a and b depends on the vocabulary (Tokenizer.pair_separators).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from bert_jax.tasks.example import spans
from bert_jax.tokenizer import Tokenizer


class Texts(NamedTuple):
    """A text of each of R rows: row r has pieces[starts[r]:starts[r] + sizes[r]]."""

    pieces: Int32[np.ndarray, "K"]
    starts: Int64[np.ndarray, "R"]
    sizes: Int64[np.ndarray, "R"]


class EncodedPairs(NamedTuple):
    """R rows, whose N tokens are concatenated as in TaskRows."""

    input_ids: Int32[np.ndarray, "N"]
    offsets: Int64[np.ndarray, "R+1"]
    first_lengths: Int32[np.ndarray, "R"]


def encode_pairs(
    texts: Sequence[str], seconds: Sequence[str] | None, tokenizer: Tokenizer, max_length: int
) -> tuple[EncodedPairs, Bool[np.ndarray, "R"]]:
    """Rows of texts or of pairs of texts, and which rows lost tokens.

    A row over max_length loses tokens from the end of its longer text.
    """
    first, first_offsets = tokenizer.encode_many(texts)
    second, second_offsets = tokenizer.encode_many([""] * len(texts) if seconds is None else seconds)
    lengths = np.diff(first_offsets), np.diff(second_offsets)
    special = 2 if seconds is None else 2 + tokenizer.pair_separators
    kept = truncated_lengths(*lengths, max_length - special)
    encoded = join_pairs(
        Texts(first, first_offsets[:-1], kept[0]),
        None if seconds is None else Texts(second, second_offsets[:-1], kept[1]),
        tokenizer,
    )
    return encoded, (kept[0] < lengths[0]) | (kept[1] < lengths[1])


def join_pairs(first: Texts, second: Texts | None, tokenizer: Tokenizer) -> EncodedPairs:
    """Rows of texts, or of pairs of texts, with the tokens between and after them."""
    lengths = first_lengths = first.sizes + 1 + (1 if second is None else tokenizer.pair_separators)
    if second is not None:
        lengths = first_lengths + second.sizes + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    # Positions that hold neither [CLS] nor a piece remain [SEP].
    input_ids = np.full(offsets[-1], tokenizer.sep_id, np.int32)
    input_ids[offsets[:-1]] = tokenizer.cls_id
    input_ids[spans(offsets[:-1] + 1, first.sizes)] = first.pieces[spans(first.starts, first.sizes)]
    if second is not None:
        starts = offsets[:-1] + first_lengths
        input_ids[spans(starts, second.sizes)] = second.pieces[spans(second.starts, second.sizes)]
    return EncodedPairs(input_ids, offsets, first_lengths.astype(np.int32))


def truncated_lengths(
    first: Int64[np.ndarray, "R"], second: Int64[np.ndarray, "R"], room: int
) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
    """The number of pieces that each text keeps within `room` pieces, if the longer text always loses the next one.

    If both texts lose pieces, each keeps half. An odd piece goes to the text that was longer, or to the second of two
    equally long ones, as in the strategy `longest_first` of Hugging Face tokenizers.
    """
    shorter, longer = np.minimum(first, second), np.maximum(first, second)
    kept_shorter = np.minimum(shorter, np.maximum(room // 2, room - longer))
    kept_longer = np.minimum(longer, room - kept_shorter)
    first_is_longer = first > second
    return (
        np.where(first_is_longer, kept_longer, kept_shorter),
        np.where(first_is_longer, kept_shorter, kept_longer),
    )
