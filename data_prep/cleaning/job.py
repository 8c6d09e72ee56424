"""Cleans text: runs the units, removes duplicates across all of them, and reports what was kept and dropped."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.errors import UserError
from bert_jax.reporting import page
from bert_jax.reporting.document import Document, Excerpt, Excerpts, Fragment, Section, Settings, Table, Tile
from bert_jax.storage.files import read_blocks, write_atomic, write_json
from bert_jax.storage.remote import first_line
from data_prep.cleaning.unit import BANDS, EXCERPT, SAMPLES, VERSION, CleanedUnit, Index, Steps, stem, write_texts
from data_prep.summary import REPORT
from data_prep.units import Seen

# Removes duplicates across all units, in the order of the text, so that the first of them stays.


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
        content = b"".join(read_blocks(str(path.with_suffix(".jsonl.zst"))))
        texts = [json.loads(line)["text"] for line in content.splitlines()]
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


# What cleaning kept and dropped: report.json, and a page that shows samples of every reason.


PAGE = "index.html"
_SAMPLES = 10  # of each reason


def report(
    records: Sequence[CleanedUnit], merging: Merging, refused: Mapping[str, int], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Counts of documents by reason, MB/s of each step for the text that reaches it, and samples of what was dropped.

    refused   what the readers could not use
    """
    dropped: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    sizes: Counter[str] = Counter()  # bytes of the text that reached each step
    samples: dict[str, list[str]] = {}
    for record in records:
        dropped.update(record.dropped)
        for name, size in record.step_bytes.items():
            sizes[name] += size
            seconds[name] = seconds.get(name, 0.0) + record.seconds[name]
    dropped.update(merging.dropped)
    for found in [*(record.samples for record in records), merging.samples]:
        for reason, texts in found.items():
            kept = samples.setdefault(reason, [])
            kept += texts[: _SAMPLES - len(kept)]
    return {
        "version": VERSION,
        "settings": dict(settings),
        "documents": {"read": sum(record.documents for record in records), "kept": merging.documents},
        "bytes": {"read": sum(record.bytes for record in records), "kept": merging.bytes},
        "dropped": dict(dropped.most_common()),
        "removed_lines": merging.removed_lines,
        "refused": dict(sorted(refused.items())),
        "mb_a_second": {name: round(sizes[name] / 1e6 / spent, 2) for name, spent in seconds.items() if spent},
        "samples": samples,
    }


def write(found: Mapping[str, Any], directory: Path, name: str) -> None:
    write_json(directory / REPORT, found)
    write_atomic(directory / PAGE, page.render(document(found, name)).encode())


def document(found: Mapping[str, Any], name: str) -> Document:
    documents, size = found["documents"], found["bytes"]
    read = max(documents["read"], 1)
    rows = [
        [reason, f"{count:,}", f"{count / read:.2%}"]
        for reason, count in (found["dropped"] | {"kept": documents["kept"]}).items()
    ]
    excerpts = [
        Excerpt(reason, "", "", {"": [Fragment(text, "plain", "", False)]})
        for reason, texts in found["samples"].items()
        for text in texts
    ]
    speeds = [[step, f"{speed:,}"] for step, speed in found["mb_a_second"].items()]
    return Document(
        title=name,
        source=name,
        program="bert-jax clean",
        lines=[f"{documents['kept']:,} of {documents['read']:,} documents are kept."],
        tiles=[
            Tile(f"{documents['kept'] / read:.1%}", "documents kept", f"of {documents['read']:,}"),
            Tile(f"{size['kept'] / max(size['read'], 1):.1%}", "bytes kept", f"of {size['read'] / 1e6:,.1f} MB"),
            Tile(f"{found['removed_lines']:,}", "repeated lines removed"),
        ],
        sections=[
            Section("Documents", [Table(["", "documents", "of those read"], [rows])]),
            Section(
                "Speed",
                [Table(["step", "MB/s"], [speeds])] if speeds else [],
                "On one core, of the text that reaches a step.",
            ),
            Section(
                "What was dropped",
                [Excerpts(excerpts)],
                "The beginnings of some documents.",
                page_only=True,
            ),
            Section("How it was made", [Settings({"": found["settings"]})]),
        ],
    )
