"""Sentences of words as rows: [CLS] pieces [SEP], split between words, with the position of every word.

For a vocabulary that adds no special tokens (Tokenizer.adds_special_tokens) a row has the pieces alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Float32, Int64, Integer, Shaped

from bert_jax.tasks.example import Item, Sentence, SpannedSentence, Split, Taken, TaskRows, spans
from bert_jax.tokenizer import Tokenizer

WordsItem = TypeVar("WordsItem", bound=Sentence | SpannedSentence)


@dataclass(frozen=True, eq=False, kw_only=True)
class WordRows(TaskRows[Item]):
    """Rows of the W words of K - 1 sentences. A kind of task adds their labels."""

    cut_part: ClassVar[str] = "words"

    word_rows: Int64[np.ndarray, "W"]
    word_slots: Int64[np.ndarray, "W"]  # position of the first piece of each word in its row
    word_sizes: Int64[np.ndarray, "W"]  # pieces of each word, 1 or more
    sentence_offsets: Int64[np.ndarray, "K"]  # in the words

    @property
    def word_starts(self) -> Int64[np.ndarray, "W"]:
        """Where each word starts in the N tokens."""
        return self.offsets[self.word_rows] + self.word_slots

    def items(self) -> Int64[np.ndarray, "R"]:
        """The sentence of each row."""
        sentences = np.repeat(np.arange(len(self.sentence_offsets) - 1), np.diff(self.sentence_offsets))
        return sentences[np.searchsorted(self.word_rows, np.arange(self.count))]  # by the first word of the row

    def at_words(self, values: Sequence[Shaped[np.ndarray, "..."]]) -> Shaped[np.ndarray, "W"]:
        """The value at the first piece of each word, given the values at the positions of each row."""
        return np.array([values[row][slot] for row, slot in zip(self.word_rows, self.word_slots, strict=True)])

    def by_sentence(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """The values of the words of each sentence, given those of all words."""
        return [values[start:end] for start, end in pairwise(self.sentence_offsets)]


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledWordRows(WordRows[Sentence]):
    """Rows of words with one label each, at one or more of its pieces."""

    labels: Shaped[np.ndarray, "N"]  # i32 or f32
    label_weights: Float32[np.ndarray, "N"]  # 0: a position that is not trained

    def targets(self, taken: Taken) -> tuple[Any, Float32[np.ndarray, "B T"]]:
        labels, weights = (np.where(taken.real, one[taken.tokens], 0) for one in (self.labels, self.label_weights))
        return labels.astype(self.labels.dtype), weights.astype(np.float32)


def encode_words(split: Split[WordsItem], tokenizer: Tokenizer, max_length: int) -> WordRows[WordsItem]:
    """One row for each sentence, [CLS] pieces [SEP].

    A sentence over max_length continues in further rows. It is split between words, so that every word is in exactly
    one row. A word without pieces becomes [UNK]; only a word that is longer than a row is itself cut.
    """
    sentences = [item.words for item in split.items]
    special = tokenizer.begin + tokenizer.end
    room = max_length - special
    words_in_text = [word for words in sentences for word in tokenizer.as_in_text(words)]
    flat, piece_offsets = tokenizer.of_tasks.encode_many(words_in_text)
    sizes = np.clip(np.diff(piece_offsets), 1, room)
    sentence_offsets = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
    first_words = _row_starts(sizes, sentence_offsets, room)
    word_rows = np.repeat(np.arange(len(first_words)), np.diff([*first_words, len(sizes)]))
    lengths = np.bincount(word_rows, sizes).astype(np.int64) + special
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    before = np.concatenate([[0], np.cumsum(sizes)])  # pieces of all words before each word
    word_slots = tokenizer.begin + before[:-1] - before[first_words][word_rows]

    input_ids = np.full(offsets[-1], tokenizer.unk_id, np.int32)
    if special:
        input_ids[offsets[:-1]] = tokenizer.cls_id
        input_ids[offsets[1:] - 1] = tokenizer.sep_id
    known = np.diff(piece_offsets) > 0  # words with pieces
    starts = offsets[word_rows] + word_slots
    input_ids[spans(starts[known], sizes[known])] = flat[spans(piece_offsets[:-1][known], sizes[known])]
    return WordRows(
        input_ids=input_ids,
        offsets=offsets,
        first_lengths=lengths.astype(np.int32),
        pad_id=tokenizer.pad_id,
        truncated=int((np.diff(piece_offsets) > room).sum()),
        split=split,
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
