"""Near-duplicates by MinHash (Broder 1997) and locality-sensitive hashing, with the numbers of FineWeb.

A document is a set of shingles, 5 consecutive words. Of each of 112 hash functions, the smallest hash over the set is
kept; two documents share one with the probability of their Jaccard similarity J. Documents are near-duplicates if
all 8 hashes of one of 14 bands are equal, which has the probability 1 - (1 - J^8)^14: 5% at J = 0.5, 56% at 0.7, 92% at
0.8, 99.96% at 0.9 (Penedo et al. 2024, section 3.4).
"""

import functools
import re
import zlib
from collections.abc import Iterator

import numpy as np

from bert_jax.array_types import UInt64
from data_prep.cleaning.marks import combining_marks, has_wide_marks
from data_prep.dedup import Seen

BANDS, ROWS, SHINGLE = 14, 8, 5
_HASHES_AT_ONCE = 1 << 12  # shingles, whose hashes by all functions take 3.7 MB
_UNSPACED = "\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@functools.cache
def _word(wide: bool) -> re.Pattern[str]:
    """Words of letters, with their marks, and digits; of scripts without spaces, each character is a word."""
    letter, mark = rf"[^\W_{_UNSPACED}]", f"[{combining_marks(wide)}]"
    return re.compile(rf"[{_UNSPACED}]|{letter}++(?:{mark}++{letter}*+)*+")


def _mixed(values: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """Hashes of 64-bit numbers: the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# Odd, so that each function permutes the numbers below 2**64; the order of the products is close to random.
_FACTORS = _mixed(np.arange(1, BANDS * ROWS + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)
_POWERS = np.cumprod(np.full(SHINGLE, 0xD1342543DE82EF95, np.uint64))
_BAND_FACTORS = _mixed(np.arange(1, ROWS + 1, dtype=np.uint64)) | np.uint64(1)


def shingles(text: str) -> UInt64[np.ndarray, " n"]:
    """The hashes of the distinct runs of 5 words of a text, lower-cased; of all of its words, if there are fewer."""
    words = _word(has_wide_marks(text)).findall(text.lower())
    codes = np.fromiter((zlib.crc32(word.encode()) for word in words), np.uint64)
    size = min(SHINGLE, len(codes))
    if not size:
        return np.zeros(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(codes, size)
    return np.unique(_mixed((windows * _POWERS[:size]).sum(axis=1, dtype=np.uint64)))


def minhash(hashes: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " h"]:
    """The smallest hash of a set of shingles by each function."""
    smallest = np.full(len(_FACTORS), np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(hashes), _HASHES_AT_ONCE):
        products = hashes[start : start + _HASHES_AT_ONCE, None] * _FACTORS
        np.minimum(smallest, products.min(axis=0), out=smallest)
    return smallest


def bands(text: str) -> UInt64[np.ndarray, " b"]:
    """A hash of each band of a text's MinHash: two texts with an equal one are near-duplicates.

    A text without words has the hash of the whole text as its only shingle.
    """
    hashes = shingles(text)
    if not len(hashes):
        hashes = _mixed(np.array([zlib.crc32(text.encode())], np.uint64))
    rows = minhash(hashes).reshape(BANDS, ROWS)
    return _mixed((_mixed(rows) * _BAND_FACTORS).sum(axis=1, dtype=np.uint64) + np.arange(BANDS, dtype=np.uint64))


class Index:
    """The bands of documents, in 170 to 340 bytes for each document."""

    def __init__(self) -> None:
        self._seen = Seen()

    def add(self, signature: UInt64[np.ndarray, " b"]) -> bool:
        """Adds a document unless it is a near-duplicate of one before it. Returns whether it was added."""
        if any(digest in self._seen for digest in _digests(signature)):
            return False
        self.insert(signature)
        return True

    def insert(self, signature: UInt64[np.ndarray, " b"]) -> None:
        """Adds a document, also one that is a near-duplicate of another."""
        for digest in _digests(signature):
            self._seen.add(digest)


def _digests(signature: UInt64[np.ndarray, " b"]) -> Iterator[bytes]:
    content = signature.astype("<u8").tobytes()
    return (content[start : start + 8] for start in range(0, len(content), 8))
