"""Makes batches from shards: a batch is a function of (dataset, configuration, seed, step), without state (law 1).

Step s reads the B(s) rows that follow the rows of all earlier steps in the concatenated epochs. Each epoch is a
permutation of all rows, keyed by (seed, epoch, dataset); data/order.py has that of streamed rows. No tail is dropped: a
batch may span two epochs, and each row has the masks of its own epoch.

Read `StepBatches` first: it turns a step into numbers of rows. `PretrainingLoader` turns the numbers into a batch.
data/mixture.py does so for several data sets, data/phases.py chooses by the step. Two helpers of evaluation come last:
word counts for likelihoods per word, and rows in which each token is masked in turn.

An index on the way from a step to a stored row is one of these:

step      of training
row       of a global batch; `picked` are those that a process loads
number    of a row among all rows that the steps of a phase read, in the order in which they read them
lane      number % lanes: rows of one lane are read by one process; without streaming there is one lane
ordinal   of a row among those that are read from one data set: epoch * dataset.rows + place in the epoch
index     of a row of the data set, in the order of its shards: the permuted place in the epoch
"""

import abc
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from bert_jax.array_types import Bool, Float64, Int32, Int64
from bert_jax.data import order
from bert_jax.data.example import Batch, Rows, max_predictions, unmasked_ids
from bert_jax.data.masking.masker import Masked, Masker, MaskingTokenizer, token_kinds
from bert_jax.data.masking.rule import SPECIAL, MaskingRule, cut, find_words
from bert_jax.data.masking.selection import span_targets
from bert_jax.data.schedules import BatchSegment, StepSchedule, check_batch_size
from bert_jax.errors import UserError
from bert_jax.storage.remote import address_of

# Positions that are made together if steps are requested in order: numpy's calls then cost little even for batches of
# a few rows. The number changes no batch.
_BLOCK_POSITIONS = 1 << 18
# Held-out masks depend on the sequence alone, so that metrics compare between runs, steps and seeds.
EVALUATION_SEED = 0
ROWS_AT_ONCE = 4096  # of those that are counted, not batched


class _Block(NamedTuple):
    """The most recently made batches: those of some consecutive steps, concatenated."""

    first: int
    steps: int
    picked: Int64[np.ndarray, "K"]
    batches: Batch


class StepBatches(abc.ABC):
    """The batches of the steps of some segments. A subclass makes their rows by number.

    seq_len   the positions of a row
    source    the data, for messages
    lanes     divides the number of rows of all batches. The rows of a batch whose numbers are equal modulo this follow
              one another in it, so that a process, which loads consecutive rows, reads few lanes
    """

    def __init__(self, segments: Sequence[BatchSegment], seq_len: int, source: str, lanes: int = 1) -> None:
        self.segments, self._lanes = tuple(segments), lanes
        self._seq_len, self._source = seq_len, source
        self._block: _Block | None = None

    @abc.abstractmethod
    def rows(self, numbers: Int64[np.ndarray, "R"], steps: Int64[np.ndarray, "R"], ahead: bool = True) -> Batch:
        """The rows with these numbers, from 0, each as its step reads it.

        ahead   whether what follows these rows may be loaded, too
        """

    @property
    def changes(self) -> tuple[int, ...]:
        """The first step of each segment: from it on, batches may have another number of rows."""
        return tuple(segment.first for segment in self.segments)

    def rows_at(self, step: int) -> int:
        """The number of rows of a step's global batch. Raises ValueError for a step outside the segments."""
        return self._segment(step).rows

    def rows_before(self, step: int) -> int:
        """The number of rows that the steps of the segments before this one read."""
        return sum(segment.rows * segment.steps_before(step) for segment in self.segments)

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Batch:
        """The global batch of a step, or only the selected `rows` of it, which alone are then made.

        The arrays are read-only. Raises ValueError for a step outside the segments, such as a negative one.
        """
        segment = self._segment(step)
        picked = np.arange(segment.rows, dtype=np.int64)[slice(None) if rows is None else rows]
        block = self._block
        same = block is not None and np.array_equal(block.picked, picked)
        if block is None or not same or not block.first <= step < block.first + block.steps:
            # If steps are requested in order, several steps are made together.
            in_order = block is not None and same and step == block.first + block.steps
            steps = max(1, _BLOCK_POSITIONS // max(1, self._seq_len * picked.size)) if in_order else 1
            if segment.end is not None:  # a block does not cross segments
                steps = min(steps, segment.end - step)
            block = self._block = _Block(step, steps, picked, self._batches(segment, step, steps, picked))
        begin = (step - block.first) * picked.size
        return Batch(*(field if field is None else field[begin : begin + picked.size] for field in block.batches))

    def _segment(self, step: int) -> BatchSegment:
        for segment in self.segments:
            if segment.contains(step):
                return segment
        raise ValueError(f"no batch of {self._source} is assigned to step {step}")

    def _batches(self, segment: BatchSegment, first: int, count: int, picked: Int64[np.ndarray, "K"]) -> Batch:
        """The picked rows of `count` consecutive steps of a segment, concatenated."""
        steps = np.arange(first, first + count)
        # Rows are grouped by lane in a batch, but dealt to the lanes in turn by number.
        lane, place = np.divmod(picked, segment.rows // self._lanes)
        within = place * self._lanes + lane  # `picked` itself with one lane
        numbers = segment.before + (steps[:, None] - segment.first) * segment.rows + within
        # In a run this is MixtureLoader.rows (data/mixture.py), also for one source.
        made = self.rows(numbers.reshape(-1), np.repeat(steps, picked.size))
        for field in made:
            if field is not None:
                field.flags.writeable = False
        return made


@runtime_checkable
class RowTable(Protocol):
    """The dataset that the loader reads (bert_jax.data.shards.Dataset): rows by number, and their masking rule."""

    rows: int
    seq_len: int
    pack: int
    max_predictions: int
    static: bool
    masking: MaskingRule
    tokenizer_hash: str
    fingerprint: str
    directory: Path

    def gather(self, indices: Int64[np.ndarray, "R"]) -> Rows: ...

    def unigram_counts(self) -> Int64[np.ndarray, "V"]: ...


@runtime_checkable
class RowReader(Protocol):
    """Reads rows by their numbers in the concatenated epochs, in its own order (WindowCache in data/streaming.py)."""

    def read(self, numbers: Int64[np.ndarray, "R"], ahead: bool = True) -> Rows: ...


@runtime_checkable
class LoaderTokenizer(MaskingTokenizer, Protocol):
    """The attributes of a vocabulary (bert_jax.tokenization.vocabulary.Vocabulary) that the loader uses."""

    @property
    def content_hash(self) -> str: ...


def check_tokenizer(dataset: RowTable, tokenizer: LoaderTokenizer) -> None:
    """Raises UserError for a tokenizer other than that of the rows."""
    if tokenizer.content_hash != dataset.tokenizer_hash:
        raise UserError(
            f"the tokenizer (hash {tokenizer.content_hash[:12]}) differs from that of the shards in "
            f"{address_of(dataset.directory)} (hash {dataset.tokenizer_hash[:12]}). Use "
            f"{address_of(dataset.directory / 'tokenizer')}, or build the examples again with this tokenizer"
        )


def batch_predictions(dataset: RowTable, rates: StepSchedule[float] | None) -> int:
    """M of all training batches: the room for the highest of these mask rates; without rates, that of the shards.

    It is the same at all steps, so that the step is compiled once.
    """
    if rates is None:
        return dataset.max_predictions
    return max_predictions(dataset.seq_len, dataset.pack, max(rates.values), dataset.masking.reorder_rate)


class PretrainingLoader(StepBatches):
    """Batches of one data set for pretraining and held-out evaluation, `batch_size` rows each (the global batch).

    Rows with static masks keep them; others are masked here by the dataset's rule. `rates` replace the rule's rate in
    training batches, not in held-out batches. `reader` reads training rows in another order than that of the full
    permutation. Raises UserError for a batch size below 1, a tokenizer other than that of the rows, or rates for static
    masks.
    """

    def __init__(
        self,
        dataset: RowTable,
        tokenizer: LoaderTokenizer,
        *,
        batch_size: int,
        seed: int,
        rates: StepSchedule[float] | None = None,
        reader: RowReader | None = None,
    ) -> None:
        check_batch_size(batch_size)
        super().__init__((BatchSegment(0, None, batch_size, 0),), dataset.seq_len, str(dataset.directory))
        check_tokenizer(dataset, tokenizer)
        if rates is not None and dataset.static:
            raise UserError(
                f"the masks of {address_of(dataset.directory)} are static, with the rate of build_examples. Leave out "
                "data.mask_rate and data.mask_schedule (--config.data.mask_rate=none unsets that of a recipe), or "
                "build the examples with --masking dynamic"
            )
        self.dataset, self.seed, self._reader = dataset, seed, reader
        self.rates = StepSchedule.constant(dataset.masking.rate) if rates is None else rates
        self.max_predictions = batch_predictions(dataset, rates)
        by_count = dataset.masking.random == "unigram" and not dataset.static
        self._unigram_counts = dataset.unigram_counts() if by_count else None
        self._tokenizer = tokenizer
        self._masker = self._make_masker(seed)
        self._dataset_word = order.hash_text(dataset.fingerprint)

    @property
    def fingerprint(self) -> str:
        """Identifies the rows and their masking. Batches are a function of it, the configuration and the step."""
        dataset, default = self.dataset, MaskingRule().to_manifest()
        rule = dataset.masking.to_manifest()
        facts: list[Any] = [dataset.fingerprint, dataset.tokenizer_hash, rule["unit"], rule["rate"]]
        # Only settings that differ from the defaults count, so that fingerprints from before a setting existed stay
        # valid.
        others = {name: rule[name] for name in rule if name not in ("unit", "rate") and rule[name] != default.get(name)}
        if self._unigram_counts is not None:
            others["unigram_counts"] = hashlib.sha256(self._unigram_counts.tobytes()).hexdigest()
        facts += [others] if others else []
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """The fingerprint by the configuration key that names the rows."""
        return {"data.train": self.fingerprint}

    def rows(self, numbers: Int64[np.ndarray, "R"], steps: Int64[np.ndarray, "R"], ahead: bool = True) -> Batch:
        """The rows with these numbers in the concatenated epochs, with masks at the rates of these steps."""
        epochs, places = np.divmod(numbers, self.dataset.rows)
        if self._reader is None:
            keys = order.combine(self._dataset_word, self.seed, epochs)
            gathered = self.dataset.gather(order.permute(places, self.dataset.rows, keys))
        else:
            gathered = self._reader.read(numbers, ahead)
        distinct, which = np.unique(steps, return_inverse=True)
        rates = np.array([self.rates.at(step) for step in distinct.tolist()], np.float64)[which]
        return self._batch(gathered, self._masker, epochs, self.max_predictions, rates)

    def evaluation_batches(
        self, batch_size: int, max_rows: int = 0, rows: slice | np.ndarray | None = None
    ) -> Iterator[Batch]:
        """Each row once, in order, with masks that depend on no seed or epoch.

        max_rows limits the number of rows; 0 means all. The last batch is filled up with rows of zeros, which have
        weight 0. `rows` selects the rows of each batch that are loaded. Raises UserError for a batch size below 1.
        """
        check_batch_size(batch_size)
        count = min(self.dataset.rows, max_rows) if max_rows > 0 else self.dataset.rows
        picked = np.arange(batch_size, dtype=np.int64)[slice(None) if rows is None else rows]
        masker = self._make_masker(EVALUATION_SEED)
        for start in range(0, count, batch_size):
            indices = start + picked
            indices = indices[indices < count]
            gathered = self.dataset.gather(indices)
            batch = self._batch(gathered, masker, np.zeros_like(indices), self.dataset.max_predictions)
            yield fill_up(batch, picked.size)

    def _make_masker(self, seed: int) -> Masker | None:
        if self.dataset.static:
            return None
        return Masker(self._tokenizer, self.dataset.masking, seed, self._unigram_counts)

    def _batch(
        self,
        rows: Rows,
        masker: Masker | None,
        epochs: Int64[np.ndarray, "R"],
        most: int,
        rates: Float64[np.ndarray, "R"] | None = None,
    ) -> Batch:
        """The rows as a batch with at most `most` predictions each: stored ones (masker None), or those of an epoch."""
        masked = _stored(rows) if masker is None else masker.apply(rows, epochs, most, rates)
        rows = rows._replace(
            sequence_lengths=masked.sequence_lengths, first_segment_lengths=masked.first_segment_lengths
        )
        where = token_layout(rows)
        labelled = rows.next_sentence_labels >= 0
        spans: tuple[np.ndarray, ...] = ()
        if self.dataset.masking.unit == "span":
            spans = span_targets(masked.positions, masked.counts, where.sequence_ids)
        return Batch(
            masked.input_ids,
            where.segment_ids,
            where.sequence_ids,
            where.positions,
            masked.positions,
            masked.ids,
            (np.arange(masked.ids.shape[1]) < masked.counts[:, None]).astype(np.float32),
            where.cls_positions,
            np.where(labelled, rows.next_sentence_labels, 0).astype(np.int32),
            (labelled & (rows.sequence_lengths > 0)).astype(np.float32),
            *spans,
        )


def _stored(rows: Rows) -> Masked:
    """The stored static masks."""
    assert rows.masked_positions is not None and rows.masked_ids is not None and rows.masked_counts is not None
    stored = (rows.input_ids, rows.masked_positions, rows.masked_ids, rows.masked_counts)
    ids, positions, labels, counts = (column.astype(np.int32) for column in stored)
    return Masked(ids, positions, labels, counts, rows.sequence_lengths, rows.first_segment_lengths)


class TokenLayout(NamedTuple):
    """The layout of some rows, position by position: the fields of Batch with the same names."""

    sequence_ids: Int32[np.ndarray, "R T"]
    segment_ids: Int32[np.ndarray, "R T"]
    positions: Int32[np.ndarray, "R T"]
    cls_positions: Int32[np.ndarray, "R S"]


def token_layout(rows: Rows) -> TokenLayout:
    """Expands the lengths stored in rows. Sequences follow one another from position 0; padding comes last."""
    (row_count, width), pack = rows.input_ids.shape, rows.sequence_lengths.shape[1]
    lengths = rows.sequence_lengths.astype(np.int32)
    if pack == 1:  # the same result in a quarter of the time
        columns = np.arange(width, dtype=np.int32)
        filled = columns < lengths
        sequence_ids = filled.astype(np.int32)
        segment_ids = (filled & (columns >= rows.first_segment_lengths)).astype(np.int32)
        return TokenLayout(sequence_ids, segment_ids, columns * sequence_ids, np.zeros_like(lengths))
    starts = np.cumsum(lengths, axis=1, dtype=np.int32) - lengths
    # A row is 2S + 1 runs of positions: two segments of each sequence, and the padding.
    runs = np.empty((row_count, 2 * pack + 1), np.int32)
    runs[:, 0:-1:2] = rows.first_segment_lengths
    runs[:, 1:-1:2] = lengths - rows.first_segment_lengths
    runs[:, -1] = width - lengths.sum(axis=1)

    sequence_of_run = np.append(np.repeat(np.arange(1, pack + 1, dtype=np.int32), 2), np.int32(0))
    segment_of_run = np.append(np.tile(np.array([0, 1], np.int32), pack), np.int32(0))
    start_of_run = np.zeros_like(runs)
    start_of_run[:, :-1] = np.repeat(starts, 2, axis=1)
    sequence_ids = _expand(sequence_of_run, runs, width)
    positions = np.arange(width, dtype=np.int32) - _expand(start_of_run, runs, width)
    positions *= sequence_ids > 0
    return TokenLayout(sequence_ids, _expand(segment_of_run, runs, width), positions, starts * (lengths > 0))


def _expand(values: Int32[np.ndarray, "*runs"], runs: Int32[np.ndarray, "R K"], width: int) -> Int32[np.ndarray, "R T"]:
    """The value of each position, from the values and the lengths of runs."""
    columns = np.repeat(np.broadcast_to(values, runs.shape).reshape(-1), runs.reshape(-1))
    return columns.reshape(len(runs), width)


def fill_up(batch: Batch, rows: int) -> Batch:
    """The rows of a batch followed by rows of zeros, which have weight 0."""
    added = rows - len(batch.input_ids)
    return Batch(
        *(None if field is None else np.pad(field, [(0, added)] + [(0, 0)] * (field.ndim - 1)) for field in batch)
    )


# What evaluation divides a log-likelihood by, and the rows of a pseudo-log-likelihood.


class WordCounts(NamedTuple):
    """The tokens of some rows, without padding and without the first token of each sequence ([CLS])."""

    ordinary: int  # tokens that are not special
    words: int  # ordinary tokens that begin a word
    special: int  # special tokens: each [SEP], and the token of unknown text


def count_words(dataset: RowTable, tokenizer: MaskingTokenizer, max_rows: int = 0) -> WordCounts:
    """Counts the first max_rows rows; 0 means all.

    A word is what whole-word masking masks together, by the rule of the rows: a token with the continuation tokens
    after it. A continuation token after a special token begins a word.
    """
    kinds = token_kinds(tokenizer, dataset.masking.words)
    total = np.zeros(3, np.int64)
    for rows in _first_rows(dataset, max_rows):
        sequences = cut(rows, kinds.take(unmasked_ids(rows)))
        ordinary = int((sequences.kinds[:, 1:] != SPECIAL).sum())
        after_first = int(np.maximum(sequences.lengths - 1, 0).sum())
        total += (ordinary, int(find_words(sequences).starts[:, 1:].sum()), after_first - ordinary)
    return WordCounts(*total.tolist())


def _first_rows(dataset: RowTable, max_rows: int) -> Iterator[Rows]:
    count = min(dataset.rows, max_rows) if max_rows > 0 else dataset.rows
    for start in range(0, count, ROWS_AT_ONCE):
        yield dataset.gather(np.arange(start, min(start + ROWS_AT_ONCE, count)))


class SingleMasks:
    """Held-out rows in which each token is masked in turn: copies of the first max_rows rows (0: of all).

    Every ordinary token is the mask of one copy. Copy k of a row has a mask at the k-th ordinary token of each of its
    sequences. Sequences of a row do not see each other, so each token is predicted from all other tokens of its own
    sequence. The masks of the shards are undone. Special tokens are never masked.
    """

    def __init__(self, dataset: RowTable, tokenizer: MaskingTokenizer, max_rows: int = 0) -> None:
        self._dataset, self._mask_id = dataset, tokenizer.mask_id
        self._ordinary = np.ones(tokenizer.vocab_size, bool)
        self._ordinary[list(tokenizer.special_ids)] = False
        copies = [self._numbers(rows)[0].max(axis=1) + 1 for rows in _first_rows(dataset, max_rows)]
        self._ends = np.cumsum(np.concatenate(copies) if copies else np.zeros(0, np.int64))

    @property
    def count(self) -> int:
        """The number of copies: for each row, the ordinary tokens of the sequence that has most of them."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def batches(self, batch_size: int, rows: slice | np.ndarray | None = None) -> Iterator[Batch]:
        """All copies in order, batch_size at a time, without labels of next sentences.

        The last batch is filled up with rows of zeros, which have weight 0. `rows` selects the rows of each batch that
        are made.
        """
        picked = np.arange(batch_size, dtype=np.int64)[slice(None) if rows is None else rows]
        for start in range(0, self.count, batch_size):
            copies = start + picked
            copies = copies[copies < self.count]
            yield fill_up(self._batch(copies), picked.size)

    def _batch(self, copies: Int64[np.ndarray, "K"]) -> Batch:
        row = np.searchsorted(self._ends, copies, side="right")
        number = copies - np.where(row > 0, self._ends[row - 1], 0)
        rows = self._dataset.gather(row)
        numbers, ids = self._numbers(rows)
        where = token_layout(rows)
        copy, position = np.nonzero(numbers == number[:, None])
        sequence = where.sequence_ids[copy, position] - 1
        positions, original = np.zeros((2, *where.cls_positions.shape), np.int32)
        weights = np.zeros(where.cls_positions.shape, np.float32)
        positions[copy, sequence] = position
        original[copy, sequence] = ids[copy, position]
        weights[copy, sequence] = 1
        ids[copy, position] = self._mask_id
        none = np.zeros_like(where.cls_positions)
        layout = (where.segment_ids, where.sequence_ids, where.positions)
        return Batch(ids, *layout, positions, original, weights, where.cls_positions, none, none.astype(np.float32))

    def _numbers(self, rows: Rows) -> tuple[Int64[np.ndarray, "R T"], Int32[np.ndarray, "R T"]]:
        """The number of each ordinary token in its sequence from 0 (-1 at other positions), and the unmasked ids."""
        ids = unmasked_ids(rows).astype(np.int32)
        where = token_layout(rows)
        ordinary: Bool[np.ndarray, "R T"] = self._ordinary[ids] & (where.sequence_ids > 0)
        before = np.cumsum(ordinary, axis=1) - ordinary
        first = np.arange(ids.shape[1]) - where.positions  # the position at which the token's sequence begins
        return np.where(ordinary, before - np.take_along_axis(before, first, axis=1), -1), ids
