"""Encodes texts and pairs of texts as rows: [CLS] a [SEP], or [CLS] a [SEP] b [SEP] with b in segment 1.

The number of [SEP] between a and b depends on the vocabulary (Tokenizer.pair_separators). For a vocabulary that adds
no special tokens (a published GPT-2, Tokenizer.adds_special_tokens), rows are a, or a b, as transformers encodes them;
a row without any piece is then one [SEP] (<|endoftext|>), because a row has at least one token.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer, UInt

from bert_jax.tasks.example import spans
from bert_jax.tokenizer import Tokenizer

# The pieces of texts: ids and offsets, as Tokenizer.encode_many returns them.
Pieces: TypeAlias = tuple[UInt[np.ndarray, "..."], Int64[np.ndarray, "..."]]


class Texts(NamedTuple):
    """A text of each of R rows: row r has pieces[starts[r]:starts[r] + sizes[r]]."""

    pieces: Integer[np.ndarray, "K"]
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
    first = tokenizer.of_tasks.encode_many(texts)
    second = tokenizer.of_tasks.encode_many([""] * len(texts) if seconds is None else seconds)
    encoded, cut, _ = encode_pieces(first, second, np.full(len(texts), seconds is not None), tokenizer, max_length)
    return encoded, cut


def encode_pieces(
    first: Pieces, second: Pieces, paired: Bool[np.ndarray, "R"], tokenizer: Tokenizer, max_length: int
) -> tuple[EncodedPairs, Bool[np.ndarray, "R"], Int64[np.ndarray, "N"]]:
    """encode_pairs for texts that are already split into pieces, and the places of join_pairs."""
    (first_ids, first_offsets), (second_ids, second_offsets) = first, second
    lengths = np.diff(first_offsets), np.diff(second_offsets)
    room = max_length - tokenizer.begin - tokenizer.end - np.where(paired, tokenizer.between, 0)
    kept = truncated_lengths(*lengths, room)
    encoded, places = join_pairs(
        Texts(first_ids, first_offsets[:-1], kept[0]),
        Texts(second_ids, second_offsets[:-1], kept[1]),
        tokenizer,
        paired,
    )
    return encoded, (kept[0] < lengths[0]) | (kept[1] < lengths[1]), places


def join_pairs(
    first: Texts, second: Texts, tokenizer: Tokenizer, paired: Bool[np.ndarray, "R"] | bool = True
) -> tuple[EncodedPairs, Int64[np.ndarray, "N"]]:
    """Rows of pairs of texts, with the tokens between and after them, and the places of their tokens.

    The place of a token is its index in the pieces of the first texts followed by those of the second texts; -1 if it
    is not a piece. Rows that are not paired have no second text.
    """
    begin = tokenizer.begin
    end = np.full(len(first.sizes), tokenizer.end)
    if not tokenizer.adds_special_tokens:
        end[first.sizes + np.where(paired, second.sizes, 0) == 0] = 1
    first_lengths = first.sizes + begin + np.where(paired, tokenizer.between, end)
    offsets = np.concatenate([[0], np.cumsum(first_lengths + np.where(paired, second.sizes + end, 0))])
    places = np.full(offsets[-1], -1)
    places[spans(offsets[:-1] + begin, first.sizes)] = spans(first.starts, first.sizes)
    second_places = len(first.pieces) + spans(second.starts, second.sizes)
    places[spans(offsets[:-1] + first_lengths, second.sizes)] = second_places
    # Positions that hold neither [CLS] nor a piece are [SEP]: their -1 selects the last element.
    input_ids = np.concatenate([first.pieces, second.pieces, [tokenizer.sep_id]])[places].astype(np.int32)
    if begin:
        input_ids[offsets[:-1]] = tokenizer.cls_id
    return EncodedPairs(input_ids, offsets, first_lengths.astype(np.int32)), places


def truncated_lengths(
    first: Int64[np.ndarray, "R"], second: Int64[np.ndarray, "R"], room: int | Int64[np.ndarray, "R"]
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
