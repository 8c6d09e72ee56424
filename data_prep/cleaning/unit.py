"""The work of one unit of documents: the rules, the language, and what finding duplicates needs of each document.

DIR.incomplete/job/units/00012.jsonl.zst   the documents that the rules keep, {"text": ...} a line
DIR.incomplete/job/units/00012.npz         of each of them: a digest, its bands, and the hashes of its lines
DIR.incomplete/job/units/00012.json        the record, which is written last
"""

import functools
import hashlib
import io
import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from bert_jax.storage.local import write_atomic
from data_prep.cleaning import languages, near_duplicates
from data_prep.cleaning.marks import combining_marks, has_wide_marks
from data_prep.cleaning.rules import RULES
from data_prep.resumable import unit_folder
from data_prep.units import Unit

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
    arrays: dict[str, Any] = {"digests": _digests(texts)}
    size = sum(len(text.encode()) for text in texts)
    start = time.process_time()
    if steps.near_duplicates:
        arrays["bands"] = np.array([near_duplicates.bands(text) for text in texts], np.uint64).reshape(
            -1, near_duplicates.BANDS
        )
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
        language, score = languages.identify(text)
        counts.time("languages", start, size)
        if language not in steps.languages:
            counts.drop(f"language_{language}", original)
            return None
        if score < steps.language_score:
            counts.drop("language_score", original)
            return None
    return text


def _digests(texts: list[str]) -> np.ndarray:
    """64-bit hashes of whole documents, [n]."""
    return np.array([_hash(text) for text in texts], np.uint64)


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
