"""Removes duplicates across all units, in the order of the text, so that the first of them stays."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bert_jax.command import UserError
from bert_jax.storage.compression import read_blocks
from bert_jax.storage.remote import first_line
from data_prep.cleaning.near_duplicates import BANDS, Index
from data_prep.cleaning.unit import EXCERPT, SAMPLES, CleanedUnit, Steps, stem, write_texts
from data_prep.dedup import Seen

SIGNATURES = "signatures.npy"  # the bands of all documents of an output, [n, bands] uint64


@dataclass
class Merging:
    """What has been seen in the units so far, and what was dropped."""

    steps: Steps
    index: Index = field(default_factory=Index)
    dropped: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[str]] = field(default_factory=dict)
    removed_lines: int = 0
    documents: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        self._digests, self._lines = Seen(), Seen()
        self._chosen: dict[int, np.ndarray] = {}  # of each unit that has bands, the numbers of the kept documents

    def add_others(self, folder: Path) -> None:
        """Counts all documents of another output as seen (--against), also where one is a near-duplicate of another.

        Raises UserError for a damaged file.
        """
        for signature in read_signatures(folder):
            self.index.insert(signature)

    def merge(self, directory: Path, record: CleanedUnit, target: Path) -> None:
        """Writes the documents of a unit that repeat none before them to `target`, unless none is left."""
        path = stem(directory, record.number)
        texts = list(_read_texts(path.with_suffix(".jsonl.zst")))
        with np.load(path.with_suffix(".npz")) as arrays:
            kept, chosen = self._kept(texts, {name: arrays[name] for name in arrays.files})
        if self.steps.near_duplicates:
            self._chosen[record.number] = np.array(chosen, np.int32)
        if kept:
            write_texts(target, kept)
        else:
            target.unlink(missing_ok=True)  # of an earlier run, which may have had other text in --against
        self.documents += len(kept)
        self.bytes += sum(len(text.encode()) for text in kept)

    def write_signatures(self, directory: Path) -> None:
        """Writes the bands of the documents that were kept, from the files of their units."""
        shape = self.documents, BANDS
        signatures = np.lib.format.open_memmap(directory / SIGNATURES, "w+", np.uint64, shape)
        end = 0
        for number, chosen in self._chosen.items():
            start, end = end, end + len(chosen)
            with np.load(stem(directory, number).with_suffix(".npz")) as arrays:
                signatures[start:end] = arrays["bands"][chosen]
        signatures.flush()

    def _kept(self, texts: Sequence[str], arrays: dict[str, np.ndarray]) -> tuple[list[str], list[int]]:
        """The documents that are kept, shortened or not, and their numbers."""
        kept, chosen = [], []
        ends = np.cumsum(arrays.get("line_counts", []))
        for number, text in enumerate(texts):
            if not self._digests.add(arrays["digests"][number].tobytes()):
                self._drop("duplicate", text)
            elif self.steps.near_duplicates and not self.index.add(arrays["bands"][number]):
                self._drop("near_duplicate", text)
            else:
                if self.steps.duplicate_lines:
                    end = int(ends[number])
                    text = self._without_lines(text, arrays["lines"][end - int(arrays["line_counts"][number]) : end])
                if text:
                    kept.append(text)
                    chosen.append(number)
                else:
                    self._drop("duplicate_lines", texts[number])
        return kept, chosen

    def _without_lines(self, text: str, hashes: np.ndarray) -> str:
        """The text without the lines that occurred before, in this document or in an earlier one."""
        lines = []
        for line, code in zip(text.splitlines(), hashes, strict=True):
            if not code or self._lines.add(code.tobytes()):
                lines.append(line)
            else:
                self.removed_lines += 1
        return "\n".join(lines).strip()

    def _drop(self, reason: str, text: str) -> None:
        self.dropped[reason] += 1
        samples = self.samples.setdefault(reason, [])
        if len(samples) < SAMPLES:
            samples.append(text[:EXCERPT])


def read_signatures(folder: Path) -> np.ndarray:
    """The bands of all documents of an output, [n, bands], mapped into memory. Raises UserError for a damaged file."""
    try:
        found = np.load(folder / SIGNATURES, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise UserError(f"{folder / SIGNATURES} is damaged ({first_line(error)}). Copy or make it again") from error
    if found.dtype != np.uint64 or found.shape[1:] != (BANDS,):
        raise UserError(
            f"{folder / SIGNATURES} has {found.dtype}{list(found.shape)}, not uint64[n, {BANDS}]. Make it again"
        )
    return found


def _read_texts(path: Path) -> Iterator[str]:
    content = b"".join(read_blocks(str(path)))
    return (json.loads(line)["text"] for line in content.splitlines())
