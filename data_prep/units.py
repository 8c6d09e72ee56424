"""Cuts a stream of documents into the train and eval parts, and each part into work units at document borders.

The units depend on the text and on nothing else: not on the seed, the engine or the number of workers. So the same
text and options give the same shards byte for byte, and a job that was stopped finds its finished units again.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from bert_jax.command import UserError
from bert_jax.data.manifest import Part
from data_prep.dedup import Seen

# The highest bit of a unit's number in a sequence key tells the parts apart (docs/data_format.md).
EVAL_KEY_BIT = 1 << 31
_DIGEST_BYTES = 16

Document = str | bytes | None  # bytes: UTF-8; None: a pass over the corpus has ended


class UnusableCorpus(UserError):
    """The text gives no output with the options given, however often it is tried."""


class Unit(NamedTuple):
    """What one task of data preparation reads: some whole documents, in the order of the corpus."""

    part: Part
    number: int  # 0, 1, 2, ... within the part
    documents: tuple[bytes, ...]  # UTF-8
    text_hash: str  # over the documents

    @property
    def name(self) -> str:
        return f"{self.part}-{self.number:05d}"

    @property
    def key(self) -> int:
        """The high 32 bits of the keys of its sequences."""
        return self.number | (EVAL_KEY_BIT if self.part == "eval" else 0)


class Cut(NamedTuple):
    """How to cut: unit_bytes of UTF-8 text a unit, and at least fewest documents in each part that has any."""

    unit_bytes: int
    eval_fraction: float
    fewest: int  # 2 for next-sentence pairs, which need another document; else 1


@dataclass
class UnitSplitter:
    """Iterates over the units of a stream of documents; after that, `moved_to_train` says what was not as asked.

    A unit ends with the document that fills it, and holds two documents at least: a last one of a single document
    joins the one before. A part too small to be one (see Cut.fewest) goes to the other whole. With dedup a document
    that was there before, byte for byte, is skipped.
    """

    cut: Cut
    dedup: bool = False
    documents: int = 0  # in units
    bytes: int = 0
    moved_to_train: int = 0  # documents chosen for eval that were too few to be a part
    skipped: Counter[str] = field(default_factory=Counter)  # documents that are in no unit, by reason

    def split(self, stream: Iterable[Document]) -> Iterator[Unit]:
        """The units, each as soon as it is sure. Holds about two units of each part in memory.

        stream   documents, as UTF-8 when they are bytes; None ends a pass over the corpus: what follows may be copies
                 of what came before, so no unit goes over it, where a unit would not be left with a single document

        Raises UnusableCorpus at the end of a stream with too few documents for any part, saying how many there were.
        """
        train, held_out = _Gathering("train", self.cut.unit_bytes), _Gathering("eval", self.cut.unit_bytes)
        threshold = int(self.cut.eval_fraction * (1 << 64))
        seen = Seen()
        for document in stream:
            if document is None:
                yield from train.end_pass()
                yield from held_out.end_pass()
                seen = Seen()
                continue
            text = document if isinstance(document, bytes) else document.encode()
            digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
            if self.dedup and not seen.add(digest):
                self.skipped["duplicate"] += 1
                continue
            self.documents += 1
            self.bytes += len(text)
            part = held_out if int.from_bytes(digest[:8]) < threshold else train
            if unit := part.add(text, digest):
                yield unit
        if held_out.total < self.cut.fewest or train.total < self.cut.fewest:
            self._join(train, held_out)
        yield from train.rest()
        yield from held_out.rest()

    def _join(self, train: "_Gathering", held_out: "_Gathering") -> None:
        """Moves what was chosen for eval to train, when either would hold too few documents."""
        if train.total + held_out.total < self.cut.fewest:
            raise UnusableCorpus(_too_few(train.total + held_out.total))
        if held_out.closed:
            raise UnusableCorpus(
                f"too few documents for train ({train.total}) beside those for eval ({held_out.total}); "
                "lower --eval_fraction"
            )
        self.moved_to_train = held_out.total
        for text, digest in held_out.take():
            # Never closes a unit too many: rest() joins what is over.
            train.add_held(text, digest)


def _too_few(documents: int) -> str:
    if not documents:
        return (
            "no document in --input: the files are empty or hold white space only. "
            "Give text, with a blank line between documents"
        )
    return (
        "--input holds one document, and --objective nsp takes random segments from another one. "
        "Part the documents by blank lines, or give --objective full_sentences"
    )


class _Gathering:
    """The documents of one part that are in no finished unit yet: a full unit held back, and one being filled."""

    def __init__(self, part: Part, unit_bytes: int) -> None:
        self.part = part
        self.unit_bytes = unit_bytes
        self.total = 0
        self.closed = 0  # units that have gone out
        self._held: list[tuple[bytes, bytes]] = []
        self._filling: list[tuple[bytes, bytes]] = []
        self._bytes = 0

    def add(self, text: bytes, digest: bytes) -> Unit | None:
        """Takes a document in; the unit held back goes out when the next one is full."""
        self.add_held(text, digest)
        if self._bytes < self.unit_bytes or len(self._filling) < 2:
            return None
        sure, self._held, self._filling, self._bytes = self._held, self._filling, [], 0
        return self._unit(sure) if sure else None

    def add_held(self, text: bytes, digest: bytes) -> None:
        """Takes a document into the unit being filled, full or not."""
        self.total += 1
        self._bytes += len(text)
        self._filling.append((text, digest))

    def take(self) -> list[tuple[bytes, bytes]]:
        """Gives up every document not yet in a finished unit."""
        documents, self._held, self._filling = self._held + self._filling, [], []
        self.total -= len(documents)
        return documents

    def end_pass(self) -> Iterator[Unit]:
        """What is there as units, unless it is a single document."""
        if len(self._held) + len(self._filling) > 1:
            yield from self.rest()

    def rest(self) -> Iterator[Unit]:
        """The last units; one of a single document joins the one before it."""
        if len(self._filling) == 1 and self._held:
            yield self._unit(self._held + self._filling)
        else:
            yield from (self._unit(documents) for documents in (self._held, self._filling) if documents)
        self._held, self._filling, self._bytes = [], [], 0

    def _unit(self, documents: list[tuple[bytes, bytes]]) -> Unit:
        whole = hashlib.blake2b(b"".join(digest for _, digest in documents), digest_size=_DIGEST_BYTES)
        number = self.closed
        self.closed += 1
        return Unit(self.part, number, tuple(text for text, _ in documents), whole.hexdigest())
