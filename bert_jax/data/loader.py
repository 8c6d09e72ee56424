"""Makes batches from shards. A batch is a function of (dataset, configuration, seed, step), without state (law 1).

Three loaders build on one another: `PhasedLoader` (data/phases.py) picks a step's phase, `MixtureLoader`
(data/mixture.py) picks the source of every row, and `DatasetLoader` makes the rows of one data set. Then come helpers
for evaluation, and `Prefetched`, which makes batches ahead in a thread.

Eight indices lead from a step of training to a stored row:

| index   | counts |
|---------|---|
| step    | steps of the run |
| row     | rows of the step's global batch; a process loads the rows `picked` |
| number  | all rows of the phase, in the order in which its steps read them |
| lane    | number % lanes; one process reads a whole lane, and without streaming there is one lane |
| source  | data sets of the mixture, largest share first |
| ordinal | rows read from one data set, over all epochs |
| place   | rows of one epoch: ordinal % dataset.rows |
| index   | rows of the data set in shard order: the permuted place |

If rows are streamed, data/order.py permutes places to numbers in which blocks come first, and Dataset.rows_in_blocks
turns these into indices.
"""

import hashlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bert_jax.array_types import Bool, Float64, Int32, Int64
from bert_jax.config import MaskingConfig
from bert_jax.data import order
from bert_jax.data.example import Batch, Rows, max_predictions, unmasked_ids
from bert_jax.data.masking.choices import MASKINGS
from bert_jax.data.masking.masker import Masked, Masker, token_kinds
from bert_jax.data.masking.rule import SPECIAL, MaskingRule, cut, find_words
from bert_jax.data.masking.selection import span_targets
from bert_jax.data.schedules import StepSchedule, check_batch_size
from bert_jax.data.shards import Dataset
from bert_jax.errors import UserError
from bert_jax.storage.remote import as_address
from bert_jax.tokenization.vocabulary import Vocabulary

# Held-out masks have a fixed seed, so that metrics of all runs and steps are comparable.
EVALUATION_SEED = 0
ROWS_AT_ONCE = 4096  # if rows are counted, not batched

ReadRows = Callable[[Int64[np.ndarray, "R"], bool], Rows]


def check_tokenizer(dataset: Dataset, tokenizer: Vocabulary) -> None:
    """Raises UserError if another tokenizer encoded the rows."""
    if tokenizer.content_hash != dataset.tokenizer_hash:
        raise UserError(
            f"the tokenizer (hash {tokenizer.content_hash[:12]}) differs from the tokenizer of the shards in "
            f"{as_address(dataset.directory)} (hash {dataset.tokenizer_hash[:12]}). Use "
            f"{as_address(dataset.directory / 'tokenizer')}, or build the examples again with this tokenizer"
        )


def batch_predictions(dataset: Dataset, rates: StepSchedule[float] | None) -> int:
    """Returns M for training batches: enough for the highest rate, or M of the shards without `rates`."""
    # M is the same at all steps, so that the step is compiled once.
    if rates is None:
        return dataset.max_predictions
    return max_predictions(dataset.seq_len, dataset.pack, max(rates.values), dataset.masking.reorder_rate)


class DatasetLoader:
    """Makes masked rows from one data set, for training and for held-out evaluation.

    Rows with static masks keep them. The data set's rule masks all other rows.

    Args:
        rates: Replace the rule's rate in training. Evaluation keeps the rule's rate.
        masking: The options of an extension that chooses the tokens in training (masking/choices.py). Evaluation keeps
            the rule's choice.
        read: Reads training rows by ordinal in an order of its own (WindowCache.read). None: the whole data set is
            permuted in every epoch.

    Raises:
        UserError: Another tokenizer encoded the rows, or `rates` or `masking` are given for static masks, or `masking`
            for infilling.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Vocabulary,
        *,
        seed: int,
        rates: StepSchedule[float] | None = None,
        masking: MaskingConfig | None = None,
        read: ReadRows | None = None,
    ) -> None:
        check_tokenizer(dataset, tokenizer)
        if rates is not None and dataset.static:
            raise UserError(
                f"the masks of {as_address(dataset.directory)} are static, with the rate of build_examples. Leave out "
                "data.mask_rate and data.mask_schedule (--config.data.mask_rate=none unsets a recipe's rate), or build "
                "the examples with --masking dynamic"
            )
        self._dataset, self._tokenizer, self._seed, self._read = dataset, tokenizer, seed, read
        self._rates = StepSchedule.constant(dataset.masking.rate) if rates is None else rates
        self._predictions = batch_predictions(dataset, rates)
        # Static masks already hold their random tokens, so only dynamic masking needs the counts.
        by_count = dataset.masking.random == "unigram" and not dataset.static
        self._unigram_counts = dataset.unigram_counts() if by_count else None
        self._masker = self._make_masker(seed, masking)
        # Part of every permutation's key, so that data sets of one size are not all read in the same order.
        self._dataset_word = order.hash_text(dataset.fingerprint)

    @property
    def fingerprint(self) -> str:
        """Identifies the rows and their masking. Together with the configuration, it determines all batches."""
        # Checkpoints record this hash, and a resumed run compares it, so these facts must keep their order and form.
        dataset, default = self._dataset, MaskingRule().to_manifest()
        rule = dataset.masking.to_manifest()
        facts: list[Any] = [dataset.fingerprint, dataset.tokenizer_hash, rule["unit"], rule["rate"]]
        # Only settings that differ from their defaults count. So a new setting does not change old fingerprints.
        others = {name: rule[name] for name in rule if name not in ("unit", "rate") and rule[name] != default.get(name)}
        if self._unigram_counts is not None:
            others["unigram_counts"] = hashlib.sha256(self._unigram_counts.tobytes()).hexdigest()
        facts += [others] if others else []
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def rows(
        self, ordinals: Int64[np.ndarray, "R"], steps: Int64[np.ndarray, "R"] | None = None, ahead: bool = True
    ) -> Batch:
        """Makes training rows.

        Args:
            ordinals: The rows to make, counted over all epochs.
            steps: The steps of the rows, which set their mask rates; None: step 0.
            ahead: Whether streaming may load the rows after them.
        """
        # ordinal -> epoch and place in it -> index in the data set. Each epoch permutes the data set by its own key. A
        # batch may span two epochs, so every row has its own epoch here and below.
        epochs, places = np.divmod(ordinals, self._dataset.rows)
        if self._read is None:
            keys = order.combine(self._dataset_word, self._seed, epochs)
            stored = self._dataset.gather(order.permute(places, self._dataset.rows, keys))
        else:  # the streamed order does the same by windows (data/order.py)
            stored = self._read(ordinals, ahead)
        # Several steps are made together, but few of them are distinct: one look-up per step, not per row.
        distinct, inverse = np.unique(np.zeros_like(ordinals) if steps is None else steps, return_inverse=True)
        rates = np.array([self._rates.at(step) for step in distinct.tolist()], np.float64)[inverse]
        return self._batch(stored, self._masker, epochs, self._predictions, rates)

    def evaluation_batches(
        self, batch_size: int, max_rows: int = 0, rows: slice | np.ndarray | None = None
    ) -> Iterator[Batch]:
        """Yields every row once, in shard order, with masks that do not depend on seed or epoch.

        Rows of zeros, which have weight 0, fill up the last batch.

        Args:
            max_rows: Stops after this many rows; 0: yields all.
            rows: Selects the rows to make in each batch.

        Raises:
            UserError: The batch size is below 1.
        """
        check_batch_size(batch_size)
        masker = self._make_masker(EVALUATION_SEED)

        def make(indices: Int64[np.ndarray, "K"]) -> Batch:
            stored = self._dataset.gather(indices)
            return self._batch(stored, masker, np.zeros_like(indices), self._dataset.max_predictions)

        yield from _in_order(_count(self._dataset, max_rows), batch_size, rows, make)

    def _make_masker(self, seed: int, masking: MaskingConfig | None = None) -> Masker | None:
        dataset, choose = self._dataset, None
        if masking is not None and masking.kind in MASKINGS:
            if dataset.static or dataset.masking.unit == "infill":
                fixed = "are static" if dataset.static else "infill spans"
                raise UserError(
                    f"config.data.masking is {masking.kind}, but the masks of {as_address(dataset.directory)} {fixed}. "
                    "Build the examples with --masking dynamic and another --mask_unit, or omit data.masking"
                )
            choose = MASKINGS[masking.kind](masking, dataset, self._tokenizer), masking.kind
        return None if dataset.static else Masker(self._tokenizer, dataset.masking, seed, self._unigram_counts, choose)

    def _batch(
        self,
        rows: Rows,
        masker: Masker | None,
        epochs: Int64[np.ndarray, "R"],
        most: int,
        rates: Float64[np.ndarray, "R"] | None = None,
    ) -> Batch:
        """Masks rows as in their epochs, or keeps their static masks. A row has room for `most` predictions."""
        if masker is None:
            # Static rows have the shards' M columns. `most` is the same M, because static masks refuse rates that could
            # raise it.
            stored = (rows.input_ids, rows.masked_positions, rows.masked_ids, rows.masked_counts)
            ids, positions, labels, counts = (np.asarray(column, np.int32) for column in stored)
            masked = Masked(ids, positions, labels, counts, rows.sequence_lengths, rows.first_segment_lengths)
        else:
            masked = masker.apply(rows, epochs, most, rates)
            # Infilling shortens sequences, so the layout has to follow from the lengths after masking.
            rows = rows._replace(
                sequence_lengths=masked.sequence_lengths, first_segment_lengths=masked.first_segment_lengths
            )
        layout = token_layout(rows)
        # A sequence without a label (-1) gets class 0 and weight 0, because the loss gathers log-probabilities by
        # label.
        labelled = rows.next_sentence_labels >= 0
        spans = {}
        if self._dataset.masking.unit == "span":
            spans = span_targets(masked.positions, masked.counts, layout.sequence_ids)._asdict()
        return Batch(
            input_ids=masked.input_ids,
            masked_positions=masked.positions,
            masked_ids=masked.ids,
            masked_weights=(np.arange(masked.ids.shape[1]) < masked.counts[:, None]).astype(np.float32),
            next_sentence_label=np.where(labelled, rows.next_sentence_labels, 0).astype(np.int32),
            next_sentence_weight=(labelled & (rows.sequence_lengths > 0)).astype(np.float32),
            **layout._asdict(),
            **spans,
        )


class TokenLayout(NamedTuple):
    """The Batch fields that locate sequences and segments."""

    sequence_ids: Int32[np.ndarray, "R T"]
    segment_ids: Int32[np.ndarray, "R T"]
    positions: Int32[np.ndarray, "R T"]
    cls_positions: Int32[np.ndarray, "R S"]


def token_layout(rows: Rows) -> TokenLayout:
    """Expands the stored lengths to one value per position."""
    (row_count, width), pack = rows.input_ids.shape, rows.sequence_lengths.shape[1]
    lengths = rows.sequence_lengths.astype(np.int32)
    columns = np.arange(width, dtype=np.int32)
    if pack == 1:  # the general way gives the same result, but takes four times as long
        filled = columns < lengths
        sequence_ids = filled.astype(np.int32)
        segment_ids = (filled & (columns >= rows.first_segment_lengths)).astype(np.int32)
        return TokenLayout(sequence_ids, segment_ids, columns * sequence_ids, np.zeros_like(lengths))
    # In a row, sequences follow one another without gaps, so each one starts where the lengths before it end.
    starts = np.cumsum(lengths, axis=1, dtype=np.int32) - lengths
    # A row consists of 2S + 1 runs of positions: segments A and B of every sequence in turn, and the padding. So runs
    # 2s and 2s + 1 belong to sequence s. A run may be empty.
    runs = np.empty((row_count, 2 * pack + 1), np.int32)
    runs[:, 0:-1:2] = rows.first_segment_lengths
    runs[:, 1:-1:2] = lengths - rows.first_segment_lengths
    runs[:, -1] = width - lengths.sum(axis=1)

    def expand(values: Int32[np.ndarray, "*runs"]) -> Int32[np.ndarray, "R T"]:
        """Repeats a run's value over its positions."""
        repeated = np.repeat(np.broadcast_to(values, runs.shape).reshape(-1), runs.reshape(-1))
        return repeated.reshape(row_count, width)

    # Padding keeps start 0; its positions are set to 0 below in any case.
    start_of_run = np.zeros_like(runs)
    start_of_run[:, :-1] = np.repeat(starts, 2, axis=1)
    sequence_ids = expand(np.append(np.repeat(np.arange(1, pack + 1, dtype=np.int32), 2), np.int32(0)))
    segment_ids = expand(np.append(np.tile(np.array([0, 1], np.int32), pack), np.int32(0)))
    positions = (columns - expand(start_of_run)) * (sequence_ids > 0)
    return TokenLayout(sequence_ids, segment_ids, positions, starts * (lengths > 0))


def _count(dataset: Dataset, max_rows: int) -> int:
    return min(dataset.rows, max_rows) if max_rows > 0 else dataset.rows


def _in_order(
    count: int,
    batch_size: int,
    rows: slice | np.ndarray | None,
    make: Callable[[Int64[np.ndarray, "K"]], Batch],
) -> Iterator[Batch]:
    """Makes the rows 0 to count - 1 in batches, or only the selected `rows` of every batch."""
    picked = np.arange(batch_size, dtype=np.int64)[slice(None) if rows is None else rows]
    for start in range(0, count, batch_size):
        indices = start + picked
        indices = indices[indices < count]
        # The last batch keeps the others' shape, so that the step is not compiled again. With `rows`, every process
        # pads to the rows that it picked, even if none of them is left.
        added = picked.size - indices.size
        fields = (
            None if field is None else np.pad(field, [(0, added)] + [(0, 0)] * (field.ndim - 1))
            for field in make(indices)
        )
        yield Batch(*fields)


class WordCounts(NamedTuple):
    """Token counts, excluding padding and every sequence's first token ([CLS])."""

    ordinary: int  # not special
    words: int  # ordinary, and begin a word
    special: int  # such as [SEP] and the token for unknown text


def count_words(dataset: Dataset, tokenizer: Vocabulary, max_rows: int = 0) -> WordCounts:
    """Counts the tokens and words in the first max_rows rows; 0 means all.

    Words are the units of whole-word masking (masking.rule.find_words).
    """
    kinds = token_kinds(tokenizer, dataset.masking.words)
    total = np.zeros(3, np.int64)
    for rows in _first_rows(dataset, max_rows):
        # Column 0 of a sequence is its first token, usually [CLS], which no count includes.
        sequences = cut(rows, kinds.take(unmasked_ids(rows)))
        ordinary = int((sequences.kinds[:, 1:] != SPECIAL).sum())
        after_first = int(np.maximum(sequences.lengths - 1, 0).sum())
        total += (ordinary, int(find_words(sequences).starts[:, 1:].sum()), after_first - ordinary)
    return WordCounts(*total.tolist())


def _first_rows(dataset: Dataset, max_rows: int) -> Iterator[Rows]:
    count = _count(dataset, max_rows)
    for start in range(0, count, ROWS_AT_ONCE):
        yield dataset.gather(np.arange(start, min(start + ROWS_AT_ONCE, count)))


class SingleMasks:
    """Copies of the first max_rows rows (0: all), which together mask every ordinary token once.

    Copy k of a row masks the k-th ordinary token of every sequence. Sequences do not see one another, so a token is
    predicted from all other tokens of its own sequence. Special tokens are never masked, and static masks are undone.
    """

    def __init__(self, dataset: Dataset, tokenizer: Vocabulary, max_rows: int = 0) -> None:
        self._dataset, self._mask_id = dataset, tokenizer.mask_id
        self._ordinary = np.ones(tokenizer.vocab_size, bool)
        self._ordinary[list(tokenizer.special_ids)] = False
        # A row has as many copies as its longest sequence has ordinary tokens; without any, it has -1 + 1 = 0.
        # Copies are numbered row by row, and _ends[r] is the number after the last copy of row r.
        copies = [self._numbers(rows)[0].max(axis=1) + 1 for rows in _first_rows(dataset, max_rows)]
        self._ends = np.cumsum(np.concatenate(copies) if copies else np.zeros(0, np.int64))
        self.count = int(self._ends[-1]) if len(self._ends) else 0

    def batches(self, batch_size: int, rows: slice | np.ndarray | None = None) -> Iterator[Batch]:
        """Yields all copies in order, without next-sentence labels.

        Rows of zeros, which have weight 0, fill up the last batch. `rows` selects the rows to make in each batch.
        """
        yield from _in_order(self.count, batch_size, rows, self._batch)

    def _batch(self, copies: Int64[np.ndarray, "K"]) -> Batch:
        row = np.searchsorted(self._ends, copies, side="right")
        number = copies - np.where(row > 0, self._ends[row - 1], 0)  # of this copy of the row, from 0
        rows = self._dataset.gather(row)
        numbers, ids = self._numbers(rows)
        layout = token_layout(rows)
        # Sequences shorter than the longest one run out of tokens, and have no prediction in the later copies.
        copy, position = np.nonzero(numbers == number[:, None])
        # A sequence has one prediction at most, so M is S, and sequence s has its prediction in column s.
        sequence = layout.sequence_ids[copy, position] - 1
        positions, labels, no_label = np.zeros((3, *layout.cls_positions.shape), np.int32)
        weights, no_weight = np.zeros((2, *layout.cls_positions.shape), np.float32)
        positions[copy, sequence] = position
        labels[copy, sequence] = ids[copy, position]
        weights[copy, sequence] = 1
        ids[copy, position] = self._mask_id
        return Batch(
            input_ids=ids,
            masked_positions=positions,
            masked_ids=labels,
            masked_weights=weights,
            next_sentence_label=no_label,
            next_sentence_weight=no_weight,
            **layout._asdict(),
        )

    def _numbers(self, rows: Rows) -> tuple[Int64[np.ndarray, "R T"], Int32[np.ndarray, "R T"]]:
        """Numbers the ordinary tokens of every sequence from 0 (-1 elsewhere), and returns the unmasked ids."""
        ids = unmasked_ids(rows).astype(np.int32)
        layout = token_layout(rows)
        ordinary: Bool[np.ndarray, "R T"] = self._ordinary[ids] & (layout.sequence_ids > 0)
        # Numbers count over the whole row first. The number at the sequence's first column then makes them restart
        # there.
        before = np.cumsum(ordinary, axis=1) - ordinary
        first = np.arange(ids.shape[1]) - layout.positions  # the column at which the position's sequence begins
        return np.where(ordinary, before - np.take_along_axis(before, first, axis=1), -1), ids


Element = TypeVar("Element")


class Prefetched(Iterator[Element]):
    """Iterates over make(start), make(start + 1), ..., while a thread makes `depth` elements ahead.

    If `make` raises an exception, next() raises it in this element's turn, and then StopIteration. Closing this, or
    leaving its context, ends the thread after its current element. With depth 0, there are no elements.
    """

    def __init__(self, make: Callable[[int], Element], start: int, depth: int) -> None:
        self.waited_seconds = 0.0  # in all calls of next()
        self._make, self._numbers = make, itertools.count(start)
        # A single thread makes elements in order, and `make` (a loader with a block of batches) need not be
        # thread-safe.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[Element]] = deque()
        for _ in range(depth):
            self._request()

    def _request(self) -> None:
        self._ahead.append(self._thread.submit(self._make, next(self._numbers)))

    def __next__(self) -> Element:
        if not self._ahead:
            raise StopIteration
        began = time.perf_counter()
        # The next element is requested before this one is awaited, so the thread never idles while the caller waits.
        element = self._ahead.popleft()
        self._request()
        try:
            # exception() waits for the element. After a failure the thread makes no more elements, and next() ends.
            if element.exception() is not None:
                self.close()
            return element.result()
        finally:
            self.waited_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Stops the thread and drops the elements made so far; next() then raises StopIteration."""
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> "Prefetched[Element]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
