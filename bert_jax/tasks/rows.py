"""A task file's items, the rows that encode them, and the batch that the model sees. Pure numpy.

In order: items (`Example`, `Sentence`, ...) and `Split`; `TokenRows`, which makes a `TaskBatch`; then rows for texts
and pairs, and for several sequences side by side. word_rows.py has those for words.
"""

import abc
import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Int64, Integer, Shaped, UInt

from bert_jax.tokenization.tokenizer import Tokenizer


class Example(NamedTuple):
    """A text or a pair, with its label as the file writes it (None if it has none)."""

    text: str
    text_pair: str | None
    label: str | None
    line: int  # in the file, from 1


class LabelSet(NamedTuple):
    """A text or a pair, with its labels as the file writes them (None if it has none)."""

    text: str
    text_pair: str | None
    labels: tuple[str, ...] | None
    line: int  # in the file, from 1


# A label that stands for none, as in data of Hugging Face. PyTorch's cross-entropy leaves it out of losses, and the
# scripts of transformers leave it out of metrics.
IGNORED = "-100"


class Sentence(NamedTuple):
    """A sentence's words and their tags as the file writes them (None if it has none, IGNORED for a word without)."""

    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    lines: tuple[int, ...]  # of each word in the file, from 1
    # For a raw text that was split into words:
    text: str | None = None
    offsets: tuple[tuple[int, int], ...] | None = None  # of each word, the characters [start, end) of the text
    raw: bool = False  # whether the words are the text, split


class Span(NamedTuple):
    """The words first to end - 1 of a sentence, with a type."""

    label: str
    first: int
    end: int


class Relation(NamedTuple):
    """A relation between two spans, which are given by their indices in the sentence."""

    label: str
    head: int
    tail: int


class SpannedSentence(NamedTuple):
    """A sentence's words, its spans, which may overlap, and their relations; the last two are empty if unknown."""

    words: tuple[str, ...]
    spans: tuple[Span, ...]
    relations: tuple[Relation, ...]
    line: int  # in the file, from 1
    # For a raw text that was split into words:
    text: str | None = None
    offsets: tuple[tuple[int, int], ...] | None = None  # of each word, the characters [start, end) of the text
    raw: bool = False  # whether the words are the text, split


Item = TypeVar("Item", covariant=True)


@dataclass(frozen=True)
class Split(Generic[Item]):
    """The content of one file: at least one item. Either all items are labelled or none."""

    path: Path
    items: tuple[Item, ...]
    labelled: bool
    left_out: int = 0  # unreadable lines, for tasks whose published files have some
    class_names: tuple[str, ...] = ()  # by number, if the file names its classes
    remarks: tuple[str, ...] = ()  # how the file was read, if that may surprise, without its name


class TaskBatch(NamedTuple):
    """A fine-tuning batch (numpy or jax arrays) with one sequence in each row. Padding has sequence id 0.

    | field | dtype, shape | |
    |---|---|---|
    | input_ids, segment_ids, sequence_ids, positions | i32[B,T] | as in the pretraining Batch |
    | labels | [B, ...], or a tree of arrays | the task's targets: a class, a score, tags by position ... |
    | label_weights | f32[B, ...] | 0 for a filler row, and for a position without a label |
    """

    input_ids: Any
    segment_ids: Any
    sequence_ids: Any
    positions: Any
    labels: Any
    label_weights: Any

    @property
    def unpacked(self) -> bool:
        """Whether each row holds at most one sequence. Attention uses it (model/embeddings.py)."""
        return True


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenRows:
    """R encoded rows, whose N tokens are concatenated without padding."""

    input_ids: Int32[np.ndarray, "N"]
    first_lengths: Int32[np.ndarray, "R"]  # tokens of segment A, with [CLS] and its [SEP]
    offsets: Int64[np.ndarray, "R+1"]  # row r holds the tokens offsets[r]:offsets[r + 1]
    pad_id: int
    truncated: int  # items, or their parts (TaskRows.cut_part), that lost tokens

    @property
    def count(self) -> int:
        """R."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64[np.ndarray, "R"]:
        return np.diff(self.offsets)

    def batch(self, indices: Integer[np.ndarray, "B"], length: int) -> TaskBatch:
        """Pads the rows with these indices to a length. Index -1 gives a filler row of weight 0."""
        taken = self.take(indices, length)
        labels, weights = self.targets(taken)
        # Padding gets segment, sequence and position 0, whichever token it points to.
        segments = taken.real & (np.arange(length) >= self.first_lengths[taken.rows][:, None])
        return TaskBatch(
            input_ids=np.where(taken.real, self.input_ids[taken.tokens], self.pad_id).astype(np.int32),
            segment_ids=segments.astype(np.int32),
            sequence_ids=taken.real.astype(np.int32),
            positions=np.where(taken.real, np.arange(length), 0).astype(np.int32),
            labels=labels,
            label_weights=weights,
        )

    def take(self, indices: Integer[np.ndarray, "B"], length: int) -> "Taken":
        # Fillers read row 0, and padding reads token 0, so that all indices are valid.
        filler = indices < 0
        rows = np.where(filler, 0, indices)
        lengths = np.where(filler, 0, self.lengths[rows])
        real = np.arange(length) < lengths[:, None]
        tokens = np.where(real, self.offsets[rows][:, None] + np.arange(length), 0)
        return Taken(rows, filler, real, tokens)

    def targets(self, taken: "Taken") -> tuple[Any, Float32[np.ndarray, "..."]]:
        """Returns labels (arrays [B, ...]) and label_weights of a batch: none, unless a subclass has labels."""
        nothing = np.zeros(len(taken.rows), np.float32)
        return nothing, nothing

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns all arrays by field name. Their names and values are the data set's fingerprint."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


@dataclass(frozen=True, eq=False, kw_only=True)
class TaskRows(TokenRows, Generic[Item]):
    """A split's rows. Kinds of tasks add their labels in subclasses."""

    cut_part: ClassVar[str] = ""  # the parts of items that `truncated` counts; empty: items
    cut_option: ClassVar[str] = "max_length"  # the task option that limits the tokens

    split: Split[Item]  # what was encoded

    def items(self) -> Int64[np.ndarray, "R"]:
        """Returns the rows' items, as indices in the split: one row per item, unless a kind needs several."""
        return np.arange(self.count)


class Taken(NamedTuple):
    """A batch's rows, and the indices of their tokens."""

    rows: Int64[np.ndarray, "B"]  # 0 for a filler
    filler: Bool[np.ndarray, "B"]
    real: Bool[np.ndarray, "B T"]  # positions that hold a token
    tokens: Int64[np.ndarray, "B T"]  # index among the N tokens; 0 elsewhere


NO_SCALE = (0.0, 1.0)


def standardized(labels: Shaped[np.ndarray, "..."], scale: tuple[float, float]) -> Shaped[np.ndarray, "..."]:
    """The targets of training: classes as they are, and numbers in float32 less the mean and divided by the deviation.

    The scale is applied in float64, because float32 does not tell large numbers with a small deviation apart.
    """
    if labels.dtype != np.float64:
        return labels
    mean, deviation = scale
    return ((labels - mean) / deviation).astype(np.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledRows(TaskRows[Example]):
    """Rows with one class, one score or a set of classes."""

    labels: Shaped[np.ndarray, "R *shape"]  # i32, or f64 for scores; a set of C classes is [C] of 0 and 1
    label_weights: Float32[np.ndarray, "R"]
    scale: tuple[float, float] = NO_SCALE  # see standardized
    row_items: tuple[int, ...] | None = None  # the items of rows that are windows of long texts; None: one row each

    def items(self) -> Int64[np.ndarray, "R"]:
        return super().items() if self.row_items is None else np.array(self.row_items)

    @property
    def first_rows(self) -> Int64[np.ndarray, "K"]:
        """The first row of each item."""
        return np.flatnonzero(np.diff(self.items(), prepend=-1))

    @property
    def item_labels(self) -> Shaped[np.ndarray, "K *shape"]:
        """The labels by item."""
        return self.labels[self.first_rows]

    def targets(self, taken: Taken) -> tuple[Any, Float32[np.ndarray, "B"]]:
        weights = np.where(taken.filler, 0, self.label_weights[taken.rows])
        return standardized(self.labels[taken.rows], self.scale), weights.astype(np.float32)


def spans(starts: Integer[np.ndarray, "K"], sizes: Integer[np.ndarray, "K"]) -> Int64[np.ndarray, "N"]:
    """Concatenates the ranges start, start + 1, ..., start + size - 1."""
    before = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) + np.repeat(starts - before, sizes)


# Encodes texts and pairs of texts as rows: [CLS] a [SEP], or [CLS] a [SEP] b [SEP] with b in segment 1.
#
# The number of [SEP] between a and b depends on the vocabulary (Tokenizer.pair_separators). For a vocabulary that adds
# no special tokens (a published GPT-2, Tokenizer.adds_special_tokens), rows are a, or a b, as in transformers; a row
# without any piece is then one [SEP] (<|endoftext|>), because a row has at least one token.


# The pieces of texts: ids and offsets, as Tokenizer.encode_many returns them.
Pieces: TypeAlias = tuple[UInt[np.ndarray, "..."], Int64[np.ndarray, "..."]]


# What a text that is too long loses.
RIGHT, LEFT, MIDDLE = "right", "left", "middle"
OVERLAP = 4  # neighboring windows share one part in this many


class Texts(NamedTuple):
    """One text per row: row r has pieces[starts[r]:starts[r] + sizes[r]]."""

    pieces: Integer[np.ndarray, "K"]
    starts: Int64[np.ndarray, "R"]
    sizes: Int64[np.ndarray, "R"]


class EncodedPairs(NamedTuple):
    """R rows, whose N tokens are concatenated as in TaskRows."""

    input_ids: Int32[np.ndarray, "N"]
    offsets: Int64[np.ndarray, "R+1"]
    first_lengths: Int32[np.ndarray, "R"]


def encode_pairs(
    texts: Sequence[str], seconds: Sequence[str] | None, tokenizer: Tokenizer, max_length: int, side: str = RIGHT
) -> tuple[EncodedPairs, Bool[np.ndarray, "R"]]:
    """Encodes texts or pairs as rows with at most max_length tokens.

    Longer texts lose tokens first: their ends or, with another side, their beginnings (LEFT) or middles (MIDDLE).

    Returns:
        The rows, and whether each row lost tokens.
    """
    first = tokenizer.of_tasks.encode_many(texts)
    second = tokenizer.of_tasks.encode_many([""] * len(texts) if seconds is None else seconds)
    return encode_pieces(first, second, np.full(len(texts), seconds is not None), tokenizer, max_length, side)[:2]


def encode_pieces(
    first: Pieces,
    second: Pieces,
    paired: Bool[np.ndarray, "R"],
    tokenizer: Tokenizer,
    max_length: int,
    side: str = RIGHT,
) -> tuple[EncodedPairs, Bool[np.ndarray, "R"], Int64[np.ndarray, "N"]]:
    """Encodes texts that are already split into pieces, as encode_pairs; also returns join_pairs' places.

    With another side than RIGHT, places count the pieces that are kept.
    """
    lengths = np.diff(first[1]), np.diff(second[1])
    sizes = _kept_sizes(*lengths, paired, tokenizer, max_length)
    encoded, places = join_pairs(_cut(first, sizes[0], side), _cut(second, sizes[1], side), tokenizer, paired)
    return encoded, (sizes[0] < lengths[0]) | (sizes[1] < lengths[1]), places


def _kept_sizes(
    first: Int64[np.ndarray, "R"],
    second: Int64[np.ndarray, "R"],
    paired: Bool[np.ndarray, "R"],
    tokenizer: Tokenizer,
    max_length: int,
) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
    # Special tokens are never cut.
    room = max_length - tokenizer.begin - tokenizer.end - np.where(paired, tokenizer.between, 0)
    return truncated_lengths(first, second, room)


def _cut(pieces: Pieces, sizes: Int64[np.ndarray, "R"], side: str) -> Texts:
    """Cuts texts to these sizes."""
    ids, offsets = pieces
    if side != MIDDLE:
        # A text that loses its right side keeps its first pieces, one that loses its left side the last ones.
        return Texts(ids, offsets[:-1] if side == RIGHT else offsets[1:] - sizes, sizes)
    # The beginning keeps the odd piece.
    heads, tails = (sizes + 1) // 2, sizes // 2
    # The head and the tail of each text alternate, so that they are adjacent in the result.
    starts = np.stack([offsets[:-1], offsets[1:] - tails], axis=1).ravel()
    remaining = ids[spans(starts, np.stack([heads, tails], axis=1).ravel())]
    return Texts(remaining, np.cumsum(sizes) - sizes, sizes)


def encode_windows(
    texts: Sequence[str], seconds: Sequence[str] | None, tokenizer: Tokenizer, max_length: int
) -> tuple[EncodedPairs, Bool[np.ndarray, "K"], Int64[np.ndarray, "R"]]:
    """Encodes texts or pairs as encode_pairs, but with a row for each window over a text that is too long.

    Windows have equal lengths and distances, and neighbors share at least a quarter (OVERLAP). In a pair, the longer
    text has windows; the shorter one is whole in each row, or cut at its end if it exceeds half of the row.

    Returns:
        The rows, whether each item lost tokens, and each row's item.
    """
    first = tokenizer.of_tasks.encode_many(texts)
    second = tokenizer.of_tasks.encode_many([""] * len(texts) if seconds is None else seconds)
    paired = np.full(len(texts), seconds is not None)
    lengths = np.diff(first[1]), np.diff(second[1])
    sizes = _kept_sizes(*lengths, paired, tokenizer, max_length)
    slides = lengths[0] > lengths[1]  # whether the first text has windows, else the second one
    length, size = np.where(slides, *lengths), np.where(slides, *sizes)
    further = np.maximum(length - size, 0)  # pieces after the first window
    # The fewest windows in which neighbors share enough.
    counts = 1 + -(-further // np.maximum(size - size // OVERLAP, 1))
    items = np.repeat(np.arange(len(texts)), counts)
    numbers = np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)
    # The windows of a text are spread evenly: the first begins with the text, and the last ends with it.
    shifts = numbers * further[items] // np.maximum(counts - 1, 1)[items]
    sliding = slides[items]
    encoded, _ = join_pairs(
        Texts(first[0], first[1][items] + np.where(sliding, shifts, 0), sizes[0][items]),
        Texts(second[0], second[1][items] + np.where(sliding, 0, shifts), sizes[1][items]),
        tokenizer,
        paired[items],
    )
    return encoded, np.where(slides, sizes[1] < lengths[1], sizes[0] < lengths[0]), items


def join_pairs(
    first: Texts, second: Texts, tokenizer: Tokenizer, paired: Bool[np.ndarray, "R"] | bool = True
) -> tuple[EncodedPairs, Int64[np.ndarray, "N"]]:
    """Joins texts in pairs to rows; rows that are not paired have no second text.

    Returns:
        The rows, and each token's place: its index in the pieces of all first texts followed by all second texts; -1
            for tokens that are no pieces.
    """
    begin = tokenizer.begin
    end = np.full(len(first.sizes), tokenizer.end)
    # A row has at least one token.
    if not tokenizer.adds_special_tokens:
        end[first.sizes + np.where(paired, second.sizes, 0) == 0] = 1
    first_lengths = first.sizes + begin + np.where(paired, tokenizer.between, end)
    offsets = np.concatenate([[0], np.cumsum(first_lengths + np.where(paired, second.sizes + end, 0))])
    # First segments begin after [CLS], second ones after the separators of the first.
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
    """Returns how many pieces the first and second texts keep: the longer one always loses the next piece.

    If both lose pieces, each keeps half. An odd piece goes to the longer text, or to the second of two equally long
    ones, as in the strategy `longest_first` of Hugging Face tokenizers.
    """
    # The shorter text is cut only if both exceed half of the room.
    shorter, longer = np.minimum(first, second), np.maximum(first, second)
    kept_shorter = np.minimum(shorter, np.maximum(room // 2, room - longer))
    kept_longer = np.minimum(longer, room - kept_shorter)
    first_is_longer = first > second
    return (
        np.where(first_is_longer, kept_longer, kept_shorter),
        np.where(first_is_longer, kept_shorter, kept_longer),
    )


class SideBySideBatch(TaskBatch):
    """A batch [B, S * T] whose rows hold S sequences of up to T tokens, numbered from 1 in sequence_ids.

    The encoder reads them as rows of their own (separated).
    """

    @property
    def unpacked(self) -> bool:
        return False


@dataclass(frozen=True, eq=False, kw_only=True)
class SideBySideRows(TaskRows[Item]):
    """Rows with S sequences, one after another; an absent sequence has no tokens."""

    first_lengths: Int32[np.ndarray, "R S"]  # tokens of segment A of each sequence
    part_lengths: Int64[np.ndarray, "R S"]  # tokens of each sequence

    @abc.abstractmethod
    def select_targets(
        self, rows: Int64[np.ndarray, "B"], present: Bool[np.ndarray, "B S"]
    ) -> tuple[Any, Float32[np.ndarray, "B"]]:
        """Returns labels and label_weights of these rows. A filler is row 0 without sequences."""

    @property
    def lengths(self) -> Int64[np.ndarray, "R"]:
        """The tokens of the rows' longest sequences, to which batches are padded."""
        return self.part_lengths.max(axis=1)

    def batch(self, indices: Integer[np.ndarray, "B"], length: int) -> TaskBatch:
        """Pads the sequences of the rows with these indices to a length: [B, S * length]."""
        count, filler = self.part_lengths.shape[1], indices < 0
        rows, parts = np.where(filler, 0, indices), np.arange(count)
        # First as rows of one sequence each; absent sequences have no tokens.
        flat = self.by_part.batch(np.where(filler[:, None], -1, rows[:, None] * count + parts).ravel(), length)
        # Sequences are numbered from 1 in their row, so that attention keeps them apart.
        numbers = np.tile(parts + 1, len(rows))[:, None].astype(np.int32)
        shape = len(rows), -1
        labels, weights = self.select_targets(rows, ~filler[:, None] & (self.part_lengths[rows] > 0))
        return SideBySideBatch(
            input_ids=flat.input_ids.reshape(shape),
            segment_ids=flat.segment_ids.reshape(shape),
            sequence_ids=(flat.sequence_ids * numbers).reshape(shape),
            positions=flat.positions.reshape(shape),
            labels=labels,
            label_weights=np.where(filler, 0, weights).astype(np.float32),
        )

    @functools.cached_property
    def by_part(self) -> TokenRows:
        return TokenRows(
            input_ids=self.input_ids,
            first_lengths=self.first_lengths.ravel(),
            offsets=np.concatenate([[0], np.cumsum(self.part_lengths)]),
            pad_id=self.pad_id,
            truncated=0,
        )


def encode_side_by_side(
    items: Sequence[Sequence[tuple[str, ...] | None]], tokenizer: Tokenizer, max_length: int
) -> dict[str, Any]:
    """Returns the fields of SideBySideRows for items of texts (a,) or pairs (a, b), None if one is absent.

    Sequences are cut separately to max_length tokens; `truncated` counts items.
    """
    # The sequences that exist are encoded together, and then counted by row and place.
    places = [(row, place) for row, item in enumerate(items) for place, texts in enumerate(item) if texts]
    firsts, *seconds = zip(*(items[row][place] or () for row, place in places), strict=True)
    encoded, cut = encode_pairs(firsts, seconds[0] if seconds else None, tokenizer, max_length)
    shape = len(items), max(map(len, items))
    lengths, first_lengths = np.zeros(shape, np.int64), np.zeros(shape, np.int32)
    index = tuple(np.array(places).T)
    lengths[index], first_lengths[index] = np.diff(encoded.offsets), encoded.first_lengths
    return {
        "input_ids": encoded.input_ids,
        "offsets": np.concatenate([[0], np.cumsum(lengths.sum(axis=1))]),
        "first_lengths": first_lengths,
        "part_lengths": lengths,
        "pad_id": tokenizer.pad_id,
        "truncated": len({row for (row, _), lost in zip(places, cut, strict=True) if lost}),
    }


def separated(batch: TaskBatch, present: Bool[Array, "B S"]) -> TaskBatch:
    """Splits a batch into B * S rows, one per sequence. Rows stay the outer axis, so that a device keeps its own."""
    rows, count = present.shape
    ids, segments, numbers, positions = (leaf.reshape(rows * count, -1) for leaf in batch[:4])
    return TaskBatch(ids, segments, (numbers > 0).astype(jnp.int32), positions, None, None)
