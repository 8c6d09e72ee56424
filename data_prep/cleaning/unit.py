"""The work of one unit of documents: rules, the language, and the signatures that find near-duplicates (MinHash)."""

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
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from bert_jax.array_types import UInt64
from bert_jax.storage.files import write_atomic
from data_prep.cleaning import rules
from data_prep.cleaning.rules import RULES, combining_marks, has_wide_marks
from data_prep.job import unit_folder
from data_prep.units import Seen, Unit

# Near-duplicates by MinHash (Broder 1997) and locality-sensitive hashing, with the numbers of FineWeb.
#
# A document is a set of shingles, 5 consecutive words. Of each of 112 hash functions, the smallest hash over the set is
# kept; two documents share one with the probability of their Jaccard similarity J. Documents are near-duplicates if all
# 8 hashes of one of 14 bands are equal, which has the probability 1 - (1 - J^8)^14: 5% at J = 0.5, 56% at 0.7, 92% at
# 0.8, 99.96% at 0.9 (Penedo et al. 2024, section 3.4).


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
        if any(digest in self._seen for digest in _shingle_digests(signature)):
            return False
        self.insert(signature)
        return True

    def insert(self, signature: UInt64[np.ndarray, " b"]) -> None:
        """Adds a document, also one that is a near-duplicate of another."""
        for digest in _shingle_digests(signature):
            self._seen.add(digest)


def _shingle_digests(signature: UInt64[np.ndarray, " b"]) -> Iterator[bytes]:
    content = signature.astype("<u8").tobytes()
    return (content[start : start + 8] for start in range(0, len(content), 8))


# The work of one unit of documents: the rules, the language, and what finding duplicates needs of each document.
#
# DIR.incomplete/job/units/00012.jsonl.zst   the documents that the rules keep, {"text": ...} a line
# DIR.incomplete/job/units/00012.npz         of each of them: a digest, its bands, and the hashes of its lines
# DIR.incomplete/job/units/00012.json        the record, which is written last


VERSION = 2  # of the rules and of what finds duplicates; raise it where either changes
SAMPLES = 3  # documents of each reason that a unit keeps for the page
EXCERPT = 400  # characters of a sample
_DIGITS = re.compile(r"\d")
_LETTER = re.compile(r"[^\W_]")  # or a digit


@dataclass(frozen=True)
class Steps:
    """What happens to each document, in this order. languages: those to keep, none for all."""

    rules: tuple[str, ...]
    languages: tuple[str, ...]
    language_score: float
    near_duplicates: bool
    duplicate_lines: bool


class CleanedUnit(NamedTuple):
    """The results of a finished unit."""

    number: int
    text_hash: str
    documents: int  # read
    bytes: int  # of their text
    kept: int  # documents, by the rules and the language
    dropped: dict[str, int]  # documents, by reason
    seconds: dict[str, float]  # of one core, by step
    samples: dict[str, list[str]]  # beginnings of dropped documents, by reason
    step_bytes: dict[str, int]  # of the text that reached each step


@dataclass
class _Counts:
    dropped: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[str]] = field(default_factory=dict)

    def time(self, step: str, start: float, size: int) -> float:
        """Counts the time since `start` for a step that read so many bytes of text. Returns the time now."""
        now = time.process_time()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - start
        self.bytes[step] += size
        return now

    def drop(self, reason: str, text: str) -> None:
        self.dropped[reason] += 1
        kept = self.samples.setdefault(reason, [])
        if len(kept) < SAMPLES:
            kept.append(text[:EXCERPT])


def stem(directory: Path, number: int) -> Path:
    """The path of a unit's files without their suffixes."""
    return unit_folder(directory) / f"{number:05d}"


def clean_unit(steps: Steps, directory: Path, unit: Unit) -> CleanedUnit:
    """Writes a unit's files. A function of its text and the steps, which any process may compute."""
    counts = _Counts()
    texts = [text for document in unit.documents if (text := _kept(steps, document, counts)) is not None]
    path = stem(directory, unit.number)
    write_texts(path.with_suffix(".jsonl.zst"), texts)
    arrays: dict[str, Any] = {"digests": np.array([_hash(text) for text in texts], np.uint64)}
    size = sum(len(text.encode()) for text in texts)
    start = time.process_time()
    if steps.near_duplicates:
        arrays["bands"] = np.array([bands(text) for text in texts], np.uint64).reshape(-1, BANDS)
        start = counts.time("near_duplicates", start, size)
    if steps.duplicate_lines:
        hashes = [_line_hashes(text) for text in texts]
        arrays["lines"] = np.concatenate([np.zeros(0, np.uint64), *hashes])
        arrays["line_counts"] = np.array(list(map(len, hashes)), np.int64)
        counts.time("duplicate_lines", start, size)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomic(path.with_suffix(".npz"), buffer.getvalue())
    record = CleanedUnit(
        number=unit.number,
        text_hash=unit.text_hash,
        documents=len(unit.documents),
        bytes=sum(map(len, unit.documents)),
        kept=len(texts),
        dropped=dict(counts.dropped),
        seconds={name: round(seconds, 4) for name, seconds in counts.seconds.items()},
        samples=counts.samples,
        step_bytes=dict(counts.bytes),
    )
    write_atomic(path.with_suffix(".json"), json.dumps(record._asdict()).encode())
    return record


def read_record(directory: Path, unit: Unit) -> CleanedUnit | None:
    """The record of a unit that an earlier run finished on the same text, or None."""
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


def _kept(steps: Steps, document: bytes, counts: _Counts) -> str | None:
    """The document after all rules, or None if one drops it."""
    original = text = document.decode()
    size = len(document)
    for name in steps.rules:
        start = time.process_time()
        kept, reason = RULES[name](text)
        counts.time(name, start, size)
        if reason:
            counts.drop(reason, original)
            return None
        if kept != text:
            text, size = kept, len(kept.encode())
    if steps.languages:
        start = time.process_time()
        language, score = rules.identify(text)
        counts.time("languages", start, size)
        if language not in steps.languages:
            counts.drop(f"language_{language}", original)
            return None
        if score < steps.language_score:
            counts.drop("language_score", original)
            return None
    return text


def _line_hashes(text: str) -> np.ndarray:
    """A hash of each line, 0 for a line without letters or digits.

    Lines are compared as in CCNet (Wenzek et al. 2020, section 3.1): in lower case, with every digit as 0, and without
    punctuation.
    """
    lines = _DIGITS.sub("0", text.lower().replace("_", " ")).splitlines()
    no_word = _no_word(has_wide_marks(text))
    normal = (no_word.sub(" ", line).strip() for line in lines)
    return np.array([_hash(line) if _LETTER.search(line) else 0 for line in normal], np.uint64)


@functools.cache
def _no_word(wide: bool) -> re.Pattern[str]:
    """Runs of characters that are neither letters, with their marks, nor digits nor _."""
    return re.compile(rf"[^\w{combining_marks(wide)}]+")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1
