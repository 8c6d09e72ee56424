"""Sentences of words as rows: [CLS] pieces [SEP], split between words, with the position of every word."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64, Integer

from bert_jax.tasks.example import Item, TaskRows, spans
from bert_jax.tokenizer import Tokenizer


class EncodedWords(NamedTuple):
    """R rows of N tokens, as in TaskRows; the positions of W words; K - 1 sentences."""

    input_ids: Int32[np.ndarray, "N"]
    offsets: Int64[np.ndarray, "R+1"]
    first_lengths: Int32[np.ndarray, "R"]
    truncated: int  # words that lost pieces
    word_rows: Int64[np.ndarray, "W"]
    word_slots: Int64[np.ndarray, "W"]  # position of the first piece of each word in its row
    word_sizes: Int64[np.ndarray, "W"]  # pieces of each word, 1 or more
    sentence_offsets: Int64[np.ndarray, "K"]  # in the words

    @property
    def starts(self) -> Int64[np.ndarray, "W"]:
        """Where each word starts in the N tokens."""
        return self.offsets[self.word_rows] + self.word_slots


@dataclass(frozen=True, eq=False, kw_only=True)
class WordRows(TaskRows[Item]):
    """Rows of words. A kind of task adds their labels."""

    cut_part: ClassVar[str] = "words"

    word_rows: Int64[np.ndarray, "W"]
    word_slots: Int64[np.ndarray, "W"]
    word_sizes: Int64[np.ndarray, "W"]
    sentence_offsets: Int64[np.ndarray, "K"]

    @property
    def word_starts(self) -> Int64[np.ndarray, "W"]:
        """Where each word starts in the N tokens."""
        return self.offsets[self.word_rows] + self.word_slots

    def items(self) -> Int64[np.ndarray, "R"]:
        """The sentence of each row."""
        sentences = np.repeat(np.arange(len(self.sentence_offsets) - 1), np.diff(self.sentence_offsets))
        return sentences[np.searchsorted(self.word_rows, np.arange(self.count))]  # by the first word of the row


def encode_words(sentences: Sequence[Sequence[str]], tokenizer: Tokenizer, max_length: int) -> EncodedWords:
    """One row for each sentence, [CLS] pieces [SEP].

    A sentence over max_length continues in further rows. It is split between words, so that every word is in exactly
    one row. A word without pieces becomes [UNK]; only a word that is longer than a row is itself cut.
    """
    room = max_length - 2
    flat, piece_offsets = tokenizer.encode_many([word for words in sentences for word in tokenizer.as_in_text(words)])
    sizes = np.clip(np.diff(piece_offsets), 1, room)
    sentence_offsets = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
    first_words = _row_starts(sizes, sentence_offsets, room)
    word_rows = np.repeat(np.arange(len(first_words)), np.diff([*first_words, len(sizes)]))
    lengths = np.bincount(word_rows, sizes).astype(np.int64) + 2
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    before = np.concatenate([[0], np.cumsum(sizes)])  # pieces of all words before each word
    word_slots = 1 + before[:-1] - before[first_words][word_rows]

    input_ids = np.full(offsets[-1], tokenizer.unk_id, np.int32)
    input_ids[offsets[:-1]] = tokenizer.cls_id
    input_ids[offsets[1:] - 1] = tokenizer.sep_id
    known = np.diff(piece_offsets) > 0  # words with pieces
    starts = offsets[word_rows] + word_slots
    input_ids[spans(starts[known], sizes[known])] = flat[spans(piece_offsets[:-1][known], sizes[known])]
    return EncodedWords(
        input_ids=input_ids,
        offsets=offsets,
        first_lengths=lengths.astype(np.int32),
        truncated=int((np.diff(piece_offsets) > room).sum()),
        word_rows=word_rows,
        word_slots=word_slots,
        word_sizes=sizes,
        sentence_offsets=sentence_offsets,
    )


def _row_starts(sizes: Integer[np.ndarray, "W"], sentence_offsets: Integer[np.ndarray, "K"], room: int) -> list[int]:
    """The first word of each row. A row holds as many words of a sentence as fit into `room` pieces."""
    starts = []
    for first, last in pairwise(sentence_offsets):
        used = room
        for word in range(first, last):
            if word == first or used + sizes[word] > room:
                starts.append(word)
                used = 0
            used += sizes[word]
    return starts
