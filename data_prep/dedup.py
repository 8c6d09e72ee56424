"""A set of the documents seen so far, in 12 to 24 bytes for each."""

import numpy as np

from bert_jax.array_types import UInt64

_FIRST_SLOTS = 1 << 12
_SPARE_SLOTS = 1 << 10  # after the last one, for entries that do not fit before it
_MOST_FULL = 2 / 3


class Seen:
    """64-bit hashes in an open-addressing table with linear probing, ordered by their highest bits.

    A slot has 8 bytes, and a third to two thirds of them are full: 12 to 24 bytes for each document. 10 million
    documents take 134 MB, and 225 MB for a moment while the table grows. The probability that two different documents
    are taken for equal is n^2 / 2^65: 3e-6 for 10 million.
    """

    def __init__(self) -> None:
        self._bits = _FIRST_SLOTS.bit_length() - 1
        self._count = 0
        self._lay(np.zeros(0, np.uint64))

    def add(self, digest: bytes) -> bool:
        """Adds a digest, of which the last 8 bytes count. Returns whether it is new.

        The bytes are read in little-endian order: a corpus weight below 1 keeps documents whose bytes form a small
        big-endian number, and those would crowd into the first slots.
        """
        value, slot = self._find(digest)
        slots = self._slots
        if slots[slot]:
            return False
        slots[slot] = value
        self._count += 1
        if self._count > _MOST_FULL * (1 << self._bits) or slot == len(slots) - 2:
            del slots  # which keeps the table in memory
            self._grow()
        return True

    def __contains__(self, digest: bytes) -> bool:
        """Whether a digest was added."""
        return bool(self._slots[self._find(digest)[1]])

    def _find(self, digest: bytes) -> tuple[int, int]:
        """The value of a digest, and the slot that holds it, or the free one where it belongs."""
        value = int.from_bytes(digest[-8:], "little") or 1  # 0 is an empty slot
        slots = self._slots
        slot = value >> (64 - self._bits)
        while (there := slots[slot]) and there != value:
            slot += 1
        return value, slot

    def __len__(self) -> int:
        return self._count

    def _grow(self) -> None:
        values = self._table[self._table != 0]
        del self._slots, self._table
        self._bits += 1
        values.sort()
        self._lay(values)

    def _lay(self, values: UInt64[np.ndarray, "n"]) -> None:
        """Puts sorted values into a new table, each in its slot or, if that is taken, in the next free one."""
        order = np.arange(len(values))
        slots = (values >> np.uint64(64 - self._bits)).astype(np.int64)
        slots -= order
        np.maximum.accumulate(slots, out=slots)
        slots += order
        del order
        self._table = np.zeros((1 << self._bits) + _SPARE_SLOTS, np.uint64)
        self._table[slots] = values
        self._slots = self._table.data  # reading one element of it is four times as fast as by numpy
