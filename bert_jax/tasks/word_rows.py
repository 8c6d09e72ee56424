"""Sentences of words as rows: [CLS] pieces [SEP], cut between words, with the position of every word. Pure numpy.

For a vocabulary that adds no special tokens (Tokenizer.adds_special_tokens), a row has the pieces alone.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Shaped

from bert_jax.tasks.rows import (
    NO_SCALE,
    Item,
    Sentence,
    SpannedSentence,
    Split,
    Taken,
    TaskRows,
    spans,
    standardized,
)
from bert_jax.tasks.windows import cut_word_windows
from bert_jax.tokenization.tokenizer import Tokenizer

WordsItem = TypeVar("WordsItem", bound=Sentence | SpannedSentence)


@dataclass(frozen=True, eq=False, kw_only=True)
class WordRows(TaskRows[Item]):
    """Rows with the W words of K - 1 sentences. Kinds of tasks add their labels.

    Rows may overlap. A word is trained and predicted in one of them, and only context in the others.
    """

    cut_part: ClassVar[str] = "words"

    word_rows: Int64[np.ndarray, "W"]  # the row that answers for each word; ascending, and every row answers for one
    word_slots: Int64[np.ndarray, "W"]  # position of the first piece of each word in that row
    word_sizes: Int64[np.ndarray, "W"]  # pieces of each word, 1 or more
    token_words: Int32[np.ndarray, "N"]  # the token's word, as a number in its row from 1; 0: no word
    sentence_offsets: Int64[np.ndarray, "K"]  # in the words

    @property
    def word_starts(self) -> Int64[np.ndarray, "W"]:
        """The words' first pieces: indices among the N tokens."""
        return self.offsets[self.word_rows] + self.word_slots

    def items(self) -> Int64[np.ndarray, "R"]:
        """Returns the rows' sentences."""
        sentences = np.repeat(np.arange(len(self.sentence_offsets) - 1), np.diff(self.sentence_offsets))
        # By the first word that the row answers for.
        return sentences[np.searchsorted(self.word_rows, np.arange(self.count))]

    @functools.cached_property
    def whole(self) -> Bool[np.ndarray, "R 2"]:
        """Whether each row answers for the first word of its sentence, and for the last one."""
        # It does if the row before, or after it, belongs to another sentence.
        sentences = self.items()
        return np.stack([np.diff(sentences, prepend=-1), np.diff(sentences, append=-1)], axis=1) != 0

    def at_words(self, values: Sequence[Shaped[np.ndarray, "..."]]) -> Shaped[np.ndarray, "W ..."]:
        """Selects the values at the words' first pieces from the values at all positions, by row."""
        return np.array([values[row][slot] for row, slot in zip(self.word_rows, self.word_slots, strict=True)])

    def by_sentence(self, values: Sequence[Any]) -> list[Sequence[Any]]:
        """Splits the values of all words by sentence."""
        return [values[start:end] for start, end in pairwise(self.sentence_offsets)]

    def window_remarks(self, max_length: int) -> list[str]:
        """Counts the sentences that have several rows, in one line; none if there are none."""
        rows = np.bincount(self.items(), minlength=len(self.split.items))
        if not (long := int((rows > 1).sum())):
            return []
        return [
            f"{self.split.path}: {long} of {len(rows)} sentences are longer than task.max_length={max_length} tokens, "
            f"and are read in {int(rows[rows > 1].sum())} windows"
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledWordRows(WordRows[Sentence]):
    """Rows of words with one label per word, at one or more of its pieces."""

    labels: Shaped[np.ndarray, "N"]  # i32, or f64 for numbers
    label_weights: Float32[np.ndarray, "N"]  # 0: a position that is not trained
    scale: tuple[float, float] = NO_SCALE  # see standardized

    def targets(self, taken: Taken) -> tuple[Any, Float32[np.ndarray, "B T"]]:
        targets = standardized(self.labels, self.scale)
        labels, weights = (np.where(taken.real, flat[taken.tokens], 0) for flat in (targets, self.label_weights))
        return labels.astype(targets.dtype), weights.astype(np.float32)


def encode_words(
    split: Split[WordsItem], tokenizer: Tokenizer, max_length: int, stride: int | None = None
) -> WordRows[WordsItem]:
    """Encodes sentences as [CLS] pieces [SEP]; a sentence over max_length has several rows.

    They are windows that begin and end between words (cut_word_windows). A word without pieces becomes [UNK]; only a
    word that is longer than a row is itself cut.

    Args:
        stride: The pieces between the starts of windows, at most; 0: half of a row; None: windows do not overlap.
    """
    sentences = [item.words for item in split.items]
    special = tokenizer.begin + tokenizer.end
    room = max_length - special
    # In byte-level BPE, pieces include the space before a word, so a word within a sentence may have other pieces than
    # alone.
    words_in_text = [word for words in sentences for word in tokenizer.as_in_text(words)]
    flat, piece_offsets = tokenizer.of_tasks.encode_many(words_in_text)
    # A word takes at least one position, for [UNK], and at most a row.
    sizes = np.clip(np.diff(piece_offsets), 1, room)
    sentence_offsets = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
    step = room if stride is None else stride or -(-room // 2)
    windows = _windows(sizes, sentence_offsets, room, step)
    firsts, ends = windows[:, 0], windows[:, 1]
    word_rows = np.repeat(np.arange(len(windows)), windows[:, 3] - windows[:, 2])

    before = np.concatenate([[0], np.cumsum(sizes)])  # pieces of all words before each word
    row_pieces = before[ends] - before[firsts]
    lengths = row_pieces + special
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    # All words' pieces; words without any keep [UNK].
    pieces = np.full(before[-1], tokenizer.unk_id, np.int32)
    known = np.diff(piece_offsets) > 0
    pieces[spans(before[:-1][known], sizes[known])] = flat[spans(piece_offsets[:-1][known], sizes[known])]
    # The first piece of a row follows [CLS]; all positions without a piece are [CLS] or [SEP].
    input_ids = np.full(offsets[-1], tokenizer.sep_id, np.int32)
    if tokenizer.begin:
        input_ids[offsets[:-1]] = tokenizer.cls_id
    positions = spans(offsets[:-1] + tokenizer.begin, row_pieces)
    sources = spans(before[firsts], row_pieces)
    input_ids[positions] = pieces[sources]
    token_words = np.zeros(offsets[-1], np.int32)
    token_words[positions] = np.repeat(np.arange(len(sizes)), sizes)[sources] - np.repeat(firsts, row_pieces) + 1
    return WordRows(
        input_ids=input_ids,
        offsets=offsets,
        first_lengths=lengths.astype(np.int32),
        pad_id=tokenizer.pad_id,
        truncated=int((np.diff(piece_offsets) > room).sum()),
        split=split,
        word_rows=word_rows,
        word_slots=tokenizer.begin + before[:-1] - before[firsts][word_rows],
        word_sizes=sizes,
        token_words=token_words,
        sentence_offsets=sentence_offsets,
    )


def _windows(
    sizes: Int64[np.ndarray, "W"], sentence_offsets: Int64[np.ndarray, "K"], room: int, stride: int
) -> Int64[np.ndarray, "R 4"]:
    """The windows of all sentences in order, by indices of words; a sentence that fits a row is one window."""
    firsts, ends = sentence_offsets[:-1], sentence_offsets[1:]
    pieces = np.concatenate([[0], np.cumsum(sizes)])
    long = np.flatnonzero(pieces[ends] - pieces[firsts] > room)
    cut = [cut_word_windows(sizes[firsts[item] : ends[item]], room, stride) + firsts[item] for item in long]
    # A sentence without words has no row.
    counts = (ends > firsts).astype(np.int64)
    counts[long] = list(map(len, cut))
    windows = np.repeat(np.stack([firsts, ends, firsts, ends], axis=1), counts, axis=0)
    if cut:
        windows[np.repeat(counts > 1, counts)] = np.concatenate(cut)
    return windows
