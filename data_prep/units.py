"""Splits a stream of documents into the train and eval parts, and these into work units with whole documents.

Units depend on the text alone, not on seed, engine or workers. So the same text and options give the same shards byte
for byte, and a job that is run again recognizes its finished units. `Seen` is a set of documents, and `summarise`
computes statistics of sequence lengths.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bert_jax.array_types import Int64, UInt64
from bert_jax.data.manifest import PARTS, Part
from bert_jax.errors import UserError

# In a sequence key, the highest bit of the unit's number tells the part (docs/data_format.md).
EVAL_KEY_BIT = 1 << 31
_DIGEST_BYTES = 16


class Listed(NamedTuple):
    """A document whose text is elsewhere."""

    digest: bytes
    size: int  # UTF-8 bytes
    spaced_digest: bytes  # of the text with single spaces; empty unless duplicates are skipped
    place: Any  # where the text is, for `Unit.documents`


# Bytes are UTF-8; None marks the end of a pass over the corpus.
Document = str | bytes | Listed | None


class UnusableCorpus(UserError):
    """The text gives no output with these options, so a later run has nothing to resume."""


class Unit(NamedTuple):
    """Some whole documents, in corpus order, which one task turns into shards."""

    part: Part
    number: int  # 0, 1, 2, ... within the part
    documents: tuple[Any, ...]  # UTF-8, or the places of listed documents
    text_hash: str  # over the documents

    @property
    def name(self) -> str:
        return f"{self.part}-{self.number:05d}"

    @property
    def key(self) -> int:
        """The high 32 bits of its sequence keys."""
        return self.number | (EVAL_KEY_BIT if self.part == "eval" else 0)


TOO_FEW_FOR_EVAL = "too_few_for_eval"  # a reason for skipped documents
NEEDS_ANOTHER = (
    "and --objective nsp takes random segments from another one. Separate documents by blank lines, name the line that "
    "separates them (--document_separator), or use --objective full_sentences"
)


@dataclass
class UnitSplitter:
    """Splits a stream of documents into units, and counts skipped and moved documents.

    A unit ends with the document that fills it, and holds at least two: a last document on its own joins the unit
    before it. If a part has fewer than `min_documents`, its documents move to the other part. In a share of a divided
    corpus, documents chosen for eval are skipped instead, because another share may hold out the same text.
    """

    unit_bytes: int  # UTF-8 bytes that complete a unit
    eval_fraction: float
    min_documents: int  # in a part: 2 for next-sentence pairs, which need another document; else 1
    dedup: bool = False  # skips documents equal to an earlier one of the same pass, apart from white space
    first_number: int = 0  # of a part's units (data_prep/build_options.py)
    divided: bool = False  # whether the stream is a share of a corpus
    documents: int = 0  # in units
    bytes: int = 0
    moved_to_train: int = 0  # documents chosen for eval, but too few for a part
    skipped: Counter[str] = field(default_factory=Counter)  # documents in no unit, by reason

    def split(self, stream: Iterable[Document]) -> Iterator[Unit]:
        """Yields units as soon as their documents are final. Holds about two units per part in memory.

        Args:
            stream: Documents, and None between two passes over the corpus. Later passes hold copies, so no unit spans
                two passes, unless a pass ends with a single document.

        Raises:
            UnusableCorpus: The stream has too few documents for any part.
        """
        train, held_out = (_Gathering(part, self.unit_bytes, self.first_number) for part in PARTS)
        joins: bool | None = None  # whether a part is too small. The first pass decides, because later ones hold copies
        seen = Seen()
        for document in stream:
            if document is None:
                joins = self._join(train, held_out, joins)
                yield from train.end_pass()
                yield from held_out.end_pass()
                seen = Seen()
                continue
            if not isinstance(document, Listed):
                text = document if isinstance(document, bytes) else document.encode()
                document = list_document(text, self.dedup, text)
            if self.dedup and not seen.add(document.spaced_digest):
                self.skipped["duplicate"] += 1
                continue
            self.documents += 1
            self.bytes += document.size
            part = held_out if is_held_out(document.digest, self.eval_fraction) else train
            if unit := part.add(document):
                yield unit
        self._join(train, held_out, joins)
        yield from train.rest()
        yield from held_out.rest()

    def _join(self, train: "_Gathering", held_out: "_Gathering", joins: bool | None) -> bool:
        """Moves the documents chosen for eval to train if either part is too small, and returns whether it did.

        `joins` is the first pass's decision, which later passes repeat.
        """
        if joins is None:
            joins = held_out.total < self.min_documents or train.total < self.min_documents
        if not joins:
            return False
        if train.total + held_out.total == 0:
            raise UnusableCorpus(
                "no document in --input: the files are empty or hold only white space. "
                "Use text with a blank line between documents, or with another line (--document_separator)"
            )
        if train.total + held_out.total < self.min_documents:
            raise UnusableCorpus(f"--input holds one document, {NEEDS_ANOTHER}")
        if held_out.closed:
            raise UnusableCorpus(
                f"too few documents for train ({train.total}), with {held_out.total} for eval; lower --eval_fraction"
            )
        if self.divided and train.total >= self.min_documents:
            left_out = held_out.take()
            self.skipped[TOO_FEW_FOR_EVAL] += len(left_out)
            self.documents -= len(left_out)
            self.bytes -= sum(document.size for document in left_out)
            return True
        self.moved_to_train += held_out.total
        for document in held_out.take():
            # add() could complete a unit too early; rest() makes the last units of all held documents.
            train.add_held(document)
        return True


class _Gathering:
    """A part's documents that are in no finished unit yet.

    A full unit is held back while the next one is filled, in case that one gets only a single document.
    """

    def __init__(self, part: Part, unit_bytes: int, first_number: int) -> None:
        self.part, self.unit_bytes, self.first_number = part, unit_bytes, first_number
        self.total = 0
        self.closed = 0  # units that were returned
        self._held: list[Listed] = []
        self._filling: list[Listed] = []
        self._bytes = 0

    def add(self, document: Listed) -> Unit | None:
        """Adds a document. Returns the full unit held back if the next one is full now."""
        self.add_held(document)
        if self._bytes < self.unit_bytes or len(self._filling) < 2:
            return None
        complete, self._held, self._filling, self._bytes = self._held, self._filling, [], 0
        return self._unit(complete) if complete else None

    def add_held(self, document: Listed) -> None:
        """Adds a document to the unit being filled, even if that is full."""
        self.total += 1
        self._bytes += document.size
        self._filling.append(document)

    def take(self) -> list[Listed]:
        """Removes and returns every document that is in no finished unit yet."""
        documents, self._held, self._filling, self._bytes = self._held + self._filling, [], [], 0
        self.total -= len(documents)
        return documents

    def end_pass(self) -> Iterator[Unit]:
        """Ends the units at the border of two passes, unless a single document is left."""
        if len(self._held) + len(self._filling) > 1:
            yield from self.rest()

    def rest(self) -> Iterator[Unit]:
        """Yields the last units; a unit with one document is joined to the one before it."""
        units = [self._held + self._filling] if len(self._filling) == 1 else [self._held, self._filling]
        yield from (self._unit(documents) for documents in units if documents)
        self._held, self._filling, self._bytes = [], [], 0

    def _unit(self, documents: list[Listed]) -> Unit:
        whole = hashlib.blake2b(b"".join(document.digest for document in documents), digest_size=_DIGEST_BYTES)
        number = self.first_number + self.closed
        self.closed += 1
        return Unit(self.part, number, tuple(document.place for document in documents), whole.hexdigest())


def list_document(text: bytes, dedup: bool, place: Any) -> Listed:
    """Describes a document. With `dedup`, its duplicates can be found."""
    return Listed(_digest(text), len(text), _digest(_single_spaced(text)) if dedup else b"", place)


def is_held_out(digest: bytes, eval_fraction: float) -> bool:
    """Whether a document is for eval."""
    # The hash decides, so a text is in the same part in every job. The first 8 bytes of the digest choose the part, and
    # the last 8 identify the document in `Seen`.
    return int.from_bytes(digest[:8]) < int(eval_fraction * (1 << 64))


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()


def _single_spaced(text: bytes) -> bytes:
    """Replaces each run of Unicode white space by a space, and removes it from both ends."""
    return " ".join(text.decode().split()).encode()


_FIRST_SLOTS = 1 << 12
_SPARE_SLOTS = 1 << 10  # after the last one, for entries that do not fit before it
_MOST_FULL = 2 / 3


class Seen:
    """A set of 64-bit hashes: an open-addressing table with linear probing, ordered by the hashes' highest bits.

    A slot takes 8 bytes, and a third to two thirds are full: 10 million documents take 134 MB, and 225 MB briefly while
    the table grows. Two different documents are taken for equal with probability n^2 / 2^65, 3e-6 for 10 million.
    """

    def __init__(self) -> None:
        self._bits = _FIRST_SLOTS.bit_length() - 1
        self._count = 0
        self._lay(np.zeros(0, np.uint64))

    def add(self, digest: bytes) -> bool:
        """Adds the last 8 bytes of a digest, and returns whether they are new."""
        value, slot = self._find(digest)
        slots = self._slots
        if slots[slot]:
            return False
        slots[slot] = value
        self._count += 1
        if self._count > _MOST_FULL * (1 << self._bits) or slot == len(slots) - 2:
            values = self._table[self._table != 0]
            del slots, self._slots, self._table  # frees the old table before the new one is made
            self._bits += 1
            values.sort()
            self._lay(values)
        return True

    def __contains__(self, digest: bytes) -> bool:
        return bool(self._slots[self._find(digest)[1]])

    def _find(self, digest: bytes) -> tuple[int, int]:
        """A digest's value, and its slot or the free slot for it."""
        # Little-endian: a corpus weight below 1 keeps only documents whose bytes form a small big-endian number, and
        # these would crowd into the first slots.
        value = int.from_bytes(digest[-8:], "little") or 1  # 0 is an empty slot
        slots = self._slots
        slot = value >> (64 - self._bits)
        while (there := slots[slot]) and there != value:
            slot += 1
        return value, slot

    def __len__(self) -> int:
        return self._count

    def _lay(self, values: UInt64[np.ndarray, "n"]) -> None:
        """Puts sorted values into a new table, in their own or the next free slots."""
        # Value i goes to the slot max over j <= i of (own slot of j) + i - j: a running maximum of own slot - index.
        order = np.arange(len(values))
        slots = (values >> np.uint64(64 - self._bits)).astype(np.int64)
        slots -= order
        np.maximum.accumulate(slots, out=slots)
        slots += order
        del order
        self._table = np.zeros((1 << self._bits) + _SPARE_SLOTS, np.uint64)
        self._table[slots] = values
        self._slots = self._table.data  # a memoryview reads one element four times as fast as numpy


_BINS = 32


def summarise(counts: Int64[np.ndarray, "n"]) -> dict[str, Any]:
    """Computes min, mean, median, p95, max, and a histogram [[upper, sequences], ...] with at most 32 equal bins.

    Args:
        counts: How many sequences have 0, 1, ... tokens. If there are none, all figures are 0.
    """
    total = int(counts.sum())
    if not total:
        return {"min": 0, "mean": 0.0, "median": 0, "p95": 0, "max": 0, "histogram": []}
    present = np.flatnonzero(counts)
    below = np.cumsum(counts)
    width = -(-(len(counts) - 1) // _BINS)
    uppers = np.minimum(np.arange(width, len(counts) - 1 + width, width), len(counts) - 1)
    histogram = np.diff(below[uppers], prepend=counts[0])
    return {
        "min": int(present[0]),
        "mean": round(float(counts @ np.arange(len(counts))) / total, 3),
        "median": int(np.searchsorted(below, 0.5 * total)),
        "p95": int(np.searchsorted(below, 0.95 * total)),
        "max": int(present[-1]),
        "histogram": [[upper, count] for upper, count in zip(uppers.tolist(), histogram.tolist(), strict=True)],
    }
