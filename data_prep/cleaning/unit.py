"""Cleans one unit: rules, language, and signatures for near-duplicates (MinHash)."""

import contextlib
import functools
import hashlib
import io
import json
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bert_jax.array_types import UInt64
from bert_jax.storage.files import write_atomic
from data_prep.cleaning import rules
from data_prep.cleaning.rules import RULES, marks_in
from data_prep.job import unit_folder
from data_prep.units import Seen, Unit

# Near-duplicates by MinHash (Broder 1997) and locality-sensitive hashing, with FineWeb's numbers.
#
# A document is a set of shingles, 5 consecutive words. For 112 hash functions, the smallest hash over the set is taken;
# two documents share one with a probability equal to their Jaccard similarity J. Documents are near-duplicates if all 8
# hashes of one of 14 bands are equal, which has the probability 1 - (1 - J^8)^14: 5% at J = 0.5, 56% at 0.7, 92% at
# 0.8, 99.96% at 0.9 (Penedo et al. 2024, section 3.4).

BANDS, ROWS, SHINGLE = 14, 8, 5
_HASHES_AT_ONCE = 1 << 12  # shingles, whose hashes by all functions take 3.7 MB
_UNSPACED = "\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """Hashes 64-bit numbers by SplitMix64's finalizer (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# Odd factors permute the numbers below 2**64, and the products are in an order close to random.
_FACTORS = _mixed(np.arange(1, BANDS * ROWS + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)
_POWERS = np.cumprod(np.full(SHINGLE, 0xD1342543DE82EF95, np.uint64))
_BAND_FACTORS = _mixed(np.arange(1, ROWS + 1, dtype=np.uint64)) | np.uint64(1)


@functools.cache
def _word(marks: str) -> re.Pattern[str]:
    """Matches words: letters, with their marks, and digits; in scripts without spaces, single characters."""
    letter = rf"[^\W_{_UNSPACED}]"
    return re.compile(rf"[{_UNSPACED}]|{letter}++(?:[{marks}]++{letter}*+)*+")


def shingles(text: str) -> UInt64[np.ndarray, " n"]:
    """Hashes a text's distinct 5-word runs, lower-cased; with fewer words, all of them."""
    words = _word(marks_in(text)).findall(text.lower())
    codes = np.fromiter((zlib.crc32(word.encode()) for word in words), np.uint64)
    size = min(SHINGLE, len(codes))
    if not size:
        return np.zeros(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(codes, size)
    return np.unique(_mixed((windows * _POWERS[:size]).sum(axis=1, dtype=np.uint64)))


def minhash(hashes: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " h"]:
    """Returns, by hash function, the smallest hash over a set of shingles."""
    smallest = np.full(len(_FACTORS), np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(hashes), _HASHES_AT_ONCE):
        products = hashes[start : start + _HASHES_AT_ONCE, None] * _FACTORS
        np.minimum(smallest, products.min(axis=0), out=smallest)
    return smallest


def bands(text: str) -> UInt64[np.ndarray, " b"]:
    """Hashes the bands of a text's MinHash: two texts with an equal one are near-duplicates."""
    hashes = shingles(text)
    if not len(hashes):  # a text without words is its own only shingle
        hashes = _mixed(np.array([zlib.crc32(text.encode())], np.uint64))
    rows = minhash(hashes).reshape(BANDS, ROWS)
    return _mixed((_mixed(rows) * _BAND_FACTORS).sum(axis=1, dtype=np.uint64) + np.arange(BANDS, dtype=np.uint64))


class Index:
    """Finds near-duplicates by equal bands, in 170 to 340 bytes per document."""

    def __init__(self) -> None:
        self._seen = Seen()

    def add(self, signature: UInt64[np.ndarray, " b"]) -> bool:
        """Adds a document unless it nearly repeats an earlier one, and returns whether it was added."""
        if any(band.tobytes() in self._seen for band in signature.astype("<u8")):
            return False
        self.insert(signature)
        return True

    def insert(self, signature: UInt64[np.ndarray, " b"]) -> None:
        """Adds a document, even a near-duplicate."""
        for band in signature.astype("<u8"):
            self._seen.add(band.tobytes())


# One unit: the rules, the language, and the hashes that find duplicates.
#
# DIR.incomplete/job/units/00012.jsonl.zst   the documents that the rules keep, {"text": ...} a line
# DIR.incomplete/job/units/00012.npz         by document, a digest, the bands and the line hashes
# DIR.incomplete/job/units/00012.json        the record, which is written last

VERSION = 2  # of the rules and of the duplicate search; raise it if either changes
SAMPLES = 3  # documents per reason that a unit keeps for the page
EXCERPT = 400  # characters of a sample
_DIGITS = re.compile(r"\d")
_LETTER = re.compile(r"[^\W_]")  # or a digit


@dataclass(frozen=True)
class Steps:
    """The cleaning steps, in their order."""

    rules: tuple[str, ...]
    languages: tuple[str, ...]  # to keep; empty: all
    language_score: float
    near_duplicates: bool
    duplicate_lines: bool


@dataclass
class CleanedUnit:
    """A unit's results. A record that was read from disk has plain dictionaries instead of counters."""

    number: int
    text_hash: str
    documents: int  # read
    bytes: int  # of text read
    kept: int = 0  # documents that pass the rules and have the language
    dropped: dict[str, int] = field(default_factory=Counter)  # documents, by reason
    seconds: dict[str, float] = field(default_factory=dict)  # on one core, by step
    samples: dict[str, list[str]] = field(default_factory=dict)  # beginnings of dropped documents, by reason
    step_bytes: dict[str, int] = field(default_factory=Counter)  # of text that reached a step

    @contextlib.contextmanager
    def step(self, name: str, size: int) -> Iterator[None]:
        """Measures a step that reads `size` bytes of text."""
        start = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start
        self.step_bytes[name] += size


def drop(dropped: dict[str, int], samples: dict[str, list[str]], reason: str, text: str) -> None:
    """Counts a dropped document, and samples the first ones."""
    dropped[reason] += 1
    if dropped[reason] <= SAMPLES:
        samples.setdefault(reason, []).append(text[:EXCERPT])


def stem(directory: Path, number: int) -> Path:
    """Returns the path of a unit's files, without suffix."""
    return unit_folder(directory) / f"{number:05d}"


def clean_unit(steps: Steps, directory: Path, unit: Unit) -> CleanedUnit:
    """Cleans a unit and writes its files. They depend only on its text and the steps, so any process may do it."""
    record = CleanedUnit(unit.number, unit.text_hash, len(unit.documents), sum(map(len, unit.documents)))
    texts = [text for document in unit.documents if (text := _cleaned(steps, document, record)) is not None]
    record.kept = len(texts)
    path = stem(directory, unit.number)
    write_texts(path.with_suffix(".jsonl.zst"), texts)
    arrays: dict[str, Any] = {"digests": np.array([_hash(text) for text in texts], np.uint64)}
    size = sum(len(text.encode()) for text in texts)
    if steps.near_duplicates:
        with record.step("near_duplicates", size):
            arrays["bands"] = np.array([bands(text) for text in texts], np.uint64).reshape(-1, BANDS)
    if steps.duplicate_lines:
        with record.step("duplicate_lines", size):
            hashes = [_line_hashes(text) for text in texts]
            arrays["lines"] = np.concatenate([np.zeros(0, np.uint64), *hashes])
            arrays["line_counts"] = np.array(list(map(len, hashes)), np.int64)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomic(path.with_suffix(".npz"), buffer.getvalue())
    record.seconds = {name: round(seconds, 4) for name, seconds in record.seconds.items()}
    # The record comes last: if it exists, so do the unit's other files.
    write_atomic(path.with_suffix(".json"), json.dumps(vars(record)).encode())
    return record


def read_record(directory: Path, unit: Unit) -> CleanedUnit | None:
    """Returns the record of a unit that an earlier run finished with the same text, or None."""
    try:
        content = json.loads(stem(directory, unit.number).with_suffix(".json").read_text("utf-8"))
        record = CleanedUnit(**content)
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return record if record.text_hash == unit.text_hash else None


def write_texts(path: Path, texts: list[str]) -> None:
    """Writes documents as compressed JSON lines."""
    content = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as compressed:
        compressed.write(content.encode())
    write_atomic(path, memoryview(sink.getvalue()))


def _cleaned(steps: Steps, document: bytes, record: CleanedUnit) -> str | None:
    """Returns the document after all rules, or None if one drops it."""
    original = text = document.decode()
    size, reason = len(document), ""
    for name in steps.rules:
        with record.step(name, size):
            shortened, reason = RULES[name](text)
        if reason:
            break
        if shortened != text:
            text, size = shortened, len(shortened.encode())
    if steps.languages and not reason:
        with record.step("languages", size):
            language, score = rules.identify(text)
        if language not in steps.languages:
            reason = f"language_{language}"
        elif score < steps.language_score:
            reason = "language_score"
    if reason:
        drop(record.dropped, record.samples, reason, original)
        return None
    return text


def _line_hashes(text: str) -> np.ndarray:
    """Hashes the lines as CCNet compares them (Wenzek et al. 2020, section 3.1); without letters or digits: 0."""
    # In lower case, with 0 for every digit, and without punctuation.
    lines = _DIGITS.sub("0", text.lower().replace("_", " ")).splitlines()
    no_word = _no_word(marks_in(text))
    normal = (no_word.sub(" ", line).strip() for line in lines)
    return np.array([_hash(line) if _LETTER.search(line) else 0 for line in normal], np.uint64)


@functools.cache
def _no_word(marks: str) -> re.Pattern[str]:
    """Matches runs of characters other than letters, with their marks, digits and _."""
    return re.compile(rf"[^\w{marks}]+")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1
