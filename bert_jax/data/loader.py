"""From shards to batches: a batch is a function of (dataset, configuration, seed, step), with no state (law 1).

Step s reads global rows s*B to s*B + B of the epochs laid end to end, each epoch a permutation of all rows keyed by
(seed, epoch, dataset). No tail is dropped: a batch may straddle two epochs, and each row wears its own epoch's masks.
"""

import hashlib
import itertools
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Int32, Int64

from bert_jax.command import UserError
from bert_jax.data import hashing, permutation
from bert_jax.data.example import Batch, Rows
from bert_jax.data.masking import Masked, Masker, TokenFacts

# Held-out masks depend on nothing but the sequence, so that figures compare between runs, steps and seeds.
EVALUATION_SEED = 0

_CLOSE_SECONDS = 10.0  # how long closing waits for an element that is being made

Element = TypeVar("Element")


@runtime_checkable
class RowTable(Protocol):
    """What the loader reads (bert_jax.data.shards.Dataset): rows by number, and how they are to be masked."""

    rows: int
    max_predictions: int
    static: bool
    mask_unit: str
    mask_rate: float
    tokenizer_hash: str
    fingerprint: str
    directory: Path

    def gather(self, indices: Int64[np.ndarray, "R"]) -> Rows: ...


@runtime_checkable
class HashedTokenizer(TokenFacts, Protocol):
    """What the loader asks of a tokenizer (bert_jax.tokenizer.Tokenizer)."""

    @property
    def content_hash(self) -> str: ...


class PretrainingLoader:
    """Batches for pretraining and held-out evaluation, `batch_size` rows each (the global batch).

    Rows with static masking are passed on as stored, others masked here with the dataset's unit and rate. Raises
    UserError for a batch size below 1, or a tokenizer that is not the one the rows were made with.
    """

    def __init__(self, dataset: RowTable, tokenizer: HashedTokenizer, *, batch_size: int, seed: int) -> None:
        _check_batch_size(batch_size)
        if tokenizer.content_hash != dataset.tokenizer_hash:
            raise UserError(
                f"the tokenizer given (hash {tokenizer.content_hash[:12]}) is not the one of the shards in "
                f"{dataset.directory} (hash {dataset.tokenizer_hash[:12]}); use {dataset.directory / 'tokenizer'}, "
                "or build the examples again with the one given"
            )
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self._tokenizer = tokenizer
        self._masker = self._make_masker(seed)
        self._dataset_word = hashing.text_word(dataset.fingerprint)

    @property
    def fingerprint(self) -> str:
        """Equal fingerprints mean equal batches at every step: a hash of all that a batch depends on but the step."""
        dataset = self.dataset
        facts = [dataset.fingerprint, dataset.tokenizer_hash, dataset.mask_unit, dataset.mask_rate]
        return hashlib.sha256(json.dumps([*facts, self.batch_size, self.seed]).encode()).hexdigest()

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """The global batch of a step, or those of its rows that a slice picks, which alone are then loaded.

        Raises ValueError for a negative step.
        """
        if step < 0:
            raise ValueError(f"step {step}: it must be 0 or more")
        picked = np.arange(self.batch_size, dtype=np.int64)[slice(None) if rows is None else rows]
        epochs, ordinals = np.divmod(picked + step * self.batch_size, self.dataset.rows)
        keys = hashing.combine(self._dataset_word, self.seed, epochs)
        gathered = self.dataset.gather(permutation.permute(ordinals, self.dataset.rows, keys))
        return _batch(gathered, self._masked(gathered, epochs, self._masker))

    def evaluation_batches(self, batch_size: int, max_rows: int = 0) -> Iterator[Batch]:
        """Each row once, in order (the first max_rows of them; 0: all), with masks that depend on no seed or epoch.

        The last batch is filled up with rows of zeros, which weigh 0. Raises UserError for a batch size below 1.
        """
        _check_batch_size(batch_size)
        rows = min(self.dataset.rows, max_rows) if max_rows > 0 else self.dataset.rows
        masker = self._make_masker(EVALUATION_SEED)
        for start in range(0, rows, batch_size):
            indices = np.arange(start, min(start + batch_size, rows), dtype=np.int64)
            gathered = self.dataset.gather(indices)
            real = _batch(gathered, self._masked(gathered, np.zeros_like(indices), masker))
            yield Batch(*(_fill_up(field, batch_size) for field in real))

    def _make_masker(self, seed: int) -> Masker | None:
        dataset = self.dataset
        return None if dataset.static else Masker(self._tokenizer, dataset.mask_unit, dataset.mask_rate, seed)

    def _masked(self, rows: Rows, epochs: Int64[np.ndarray, "R"], masker: Masker | None) -> Masked:
        if masker is not None:
            return masker.apply(rows, epochs, self.dataset.max_predictions)
        assert rows.masked_positions is not None and rows.masked_ids is not None and rows.masked_counts is not None
        stored = (rows.input_ids, rows.masked_positions, rows.masked_ids, rows.masked_counts)
        return Masked(*(column.astype(np.int32) for column in stored))


class Layout(NamedTuple):
    """Where the sequences of some rows lie, slot by slot: the fields of Batch by the same names."""

    sequence_ids: Int32[np.ndarray, "R T"]
    segment_ids: Int32[np.ndarray, "R T"]
    positions: Int32[np.ndarray, "R T"]
    cls_positions: Int32[np.ndarray, "R S"]


def layout(rows: Rows) -> Layout:
    """Spells out the lengths stored in rows: sequences lie one after the other from slot 0, then padding."""
    (row_count, width), pack = rows.input_ids.shape, rows.sequence_lengths.shape[1]
    lengths = rows.sequence_lengths.astype(np.int32)
    if pack == 1:  # the same in a quarter of the time
        slots = np.arange(width, dtype=np.int32)
        filled = slots < lengths
        sequence_ids = filled.astype(np.int32)
        segment_ids = (filled & (slots >= rows.first_segment_lengths)).astype(np.int32)
        return Layout(sequence_ids, segment_ids, slots * sequence_ids, np.zeros_like(lengths))
    starts = np.cumsum(lengths, axis=1, dtype=np.int32) - lengths
    # A row is 2S + 1 runs of slots: two segments of each sequence, and the padding.
    runs = np.empty((row_count, 2 * pack + 1), np.int32)
    runs[:, 0:-1:2] = rows.first_segment_lengths
    runs[:, 1:-1:2] = lengths - rows.first_segment_lengths
    runs[:, -1] = width - lengths.sum(axis=1)

    sequence_of_run = np.append(np.repeat(np.arange(1, pack + 1, dtype=np.int32), 2), np.int32(0))
    segment_of_run = np.append(np.tile(np.array([0, 1], np.int32), pack), np.int32(0))
    start_of_run = np.zeros_like(runs)
    start_of_run[:, :-1] = np.repeat(starts, 2, axis=1)
    sequence_ids = _spell_out(sequence_of_run, runs, width)
    positions = np.arange(width, dtype=np.int32) - _spell_out(start_of_run, runs, width)
    positions *= sequence_ids > 0
    return Layout(sequence_ids, _spell_out(segment_of_run, runs, width), positions, starts * (lengths > 0))


def _spell_out(
    values: Int32[np.ndarray, "*runs"], runs: Int32[np.ndarray, "R K"], width: int
) -> Int32[np.ndarray, "R T"]:
    """The value of its run at every slot, from the lengths of the runs."""
    slots = np.repeat(np.broadcast_to(values, runs.shape).reshape(-1), runs.reshape(-1))
    return slots.reshape(len(runs), width)


def _batch(rows: Rows, masked: Masked) -> Batch:
    where = layout(rows)
    labelled = rows.next_sentence_labels >= 0
    return Batch(
        input_ids=masked.input_ids,
        segment_ids=where.segment_ids,
        sequence_ids=where.sequence_ids,
        positions=where.positions,
        masked_positions=masked.positions,
        masked_ids=masked.ids,
        masked_weights=(np.arange(masked.ids.shape[1]) < masked.counts[:, None]).astype(np.float32),
        cls_positions=where.cls_positions,
        next_sentence_label=np.where(labelled, rows.next_sentence_labels, 0).astype(np.int32),
        next_sentence_weight=(labelled & (rows.sequence_lengths > 0)).astype(np.float32),
    )


def _fill_up(field: np.ndarray, batch_size: int) -> np.ndarray:
    return np.pad(field, [(0, batch_size - len(field))] + [(0, 0)] * (field.ndim - 1))


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise UserError(f"batch_size {batch_size}: a batch has at least one row; give --config.batch_size=N, N >= 1")


class Prefetched(Iterator[Element]):
    """What `prefetch` returns: an iterator, a context manager, and a clock of the time spent waiting.

    close(), leaving the context, dropping the last reference and the interpreter's exit all stop the thread, which
    first finishes the element in hand.
    """

    def __init__(self, make: Callable[[int], Element], start: int, stop: int | None, depth: int) -> None:
        if depth < 1:
            raise UserError(f"prefetch depth {depth}: at least one batch is made ahead; give --config.data.prefetch=4")
        self.waited_seconds = 0.0  # summed over all next() so far
        self._channel: _Channel[Element] = _Channel(depth)
        thread = threading.Thread(
            target=_produce, args=(self._channel, make, start, stop), name="prefetch", daemon=True
        )
        # The thread knows the channel but not this object, so that dropping it is noticed.
        self._finalizer = weakref.finalize(self, _shut, self._channel, thread)
        thread.start()

    def __next__(self) -> Element:
        began = time.perf_counter()
        try:
            return self._channel.take()
        finally:
            self.waited_seconds += time.perf_counter() - began

    def close(self) -> None:
        """Stops the thread and drops what was made ahead; next() then raises StopIteration. May be called again."""
        self._finalizer()

    def __enter__(self) -> "Prefetched[Element]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def prefetch(make: Callable[[int], Element], start: int, stop: int | None, depth: int) -> Prefetched[Element]:
    """make(start), make(start + 1) and so on, up to make(stop - 1) or without end, `depth` made ahead in a thread.

    What `make` raises is raised from next(), after the elements before it. Raises UserError for a depth below 1.
    """
    return Prefetched(make, start, stop, depth)


class _Channel(Generic[Element]):
    """A bounded queue with an end: closed by either side, or by an exception that the taker gets."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._elements: deque[Element] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, element: Element) -> bool:
        """Waits for room; False when the channel was closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._elements) < self._depth)
            if not self._closed:
                self._elements.append(element)
                self._changed.notify_all()
            return not self._closed

    def take(self) -> Element:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._elements)
            if self._elements:
                self._changed.notify_all()
                return self._elements.popleft()
            if (error := self._error) is not None:
                self._error = None
                raise error
            raise StopIteration

    def close(self, error: BaseException | None = None, drop: bool = False) -> None:
        with self._changed:
            self._closed, self._error = True, error
            if drop:
                self._elements.clear()
            self._changed.notify_all()


def _produce(channel: _Channel[Element], make: Callable[[int], Element], start: int, stop: int | None) -> None:
    try:
        for step in itertools.count(start) if stop is None else range(start, stop):
            if not channel.put(make(step)):
                return
    except BaseException as error:  # whatever it is, the consumer is told
        channel.close(error)
    else:
        channel.close()


def _shut(channel: _Channel[Element], thread: threading.Thread) -> None:
    channel.close(drop=True)
    if thread is not threading.current_thread():  # garbage may be collected in any thread
        thread.join(_CLOSE_SECONDS)
