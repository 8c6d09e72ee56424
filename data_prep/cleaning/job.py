"""Removes duplicates across a cleaning job's units, and reports kept and dropped documents."""

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
from data_prep.cleaning.unit import BANDS, VERSION, CleanedUnit, Index, Steps, drop, stem, write_texts
from data_prep.summary import REPORT
from data_prep.units import Seen

SIGNATURES = "signatures.npy"  # the bands of all documents of an output, [n, bands] uint64


@dataclass
class Merging:
    """Merges cleaned units in the order of the text, so that the first of several duplicates stays."""

    steps: Steps
    index: Index = field(default_factory=Index)
    dropped: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[str]] = field(default_factory=dict)
    removed_lines: int = 0
    documents: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        self._digests, self._lines = Seen(), Seen()
        self._kept: dict[int, np.ndarray] = {}  # by unit, the indices of kept documents, if they have bands

    def add_others(self, folder: Path) -> None:
        """Counts another output's documents as seen (--against), with near-duplicates among them.

        Raises:
            UserError: The file with signatures is damaged.
        """
        for signature in read_signatures(folder):
            self.index.insert(signature)

    def merge(self, directory: Path, record: CleanedUnit, target: Path) -> None:
        """Writes a unit's documents to `target`, if any is left, without those that repeat earlier ones."""
        path = stem(directory, record.number)
        content = b"".join(read_blocks(str(path.with_suffix(".jsonl.zst"))))
        with np.load(path.with_suffix(".npz")) as file:
            arrays = {name: file[name] for name in file.files}
        # One array has the hashes of all documents' lines.
        lines = np.split(arrays["lines"], np.cumsum(arrays["line_counts"])[:-1]) if self.steps.duplicate_lines else []
        texts, indices = [], []
        for index, line in enumerate(content.splitlines()):
            original = text = json.loads(line)["text"]
            reason = ""
            # Cheap steps come first. A document that one of them drops does not enter the sets of the later ones.
            if not self._digests.add(arrays["digests"][index].tobytes()):
                reason = "duplicate"
            elif self.steps.near_duplicates and not self.index.add(arrays["bands"][index]):
                reason = "near_duplicate"
            elif self.steps.duplicate_lines:
                # Removes lines that occurred before, in any document. Lines without a letter or digit (0) stay.
                hashed = list(zip(text.splitlines(), lines[index], strict=True))
                unique = [line for line, code in hashed if not code or self._lines.add(code.tobytes())]
                self.removed_lines += len(hashed) - len(unique)
                text = "\n".join(unique).strip()
                reason = "" if text else "duplicate_lines"
            if reason:
                drop(self.dropped, self.samples, reason, original)
            else:
                texts.append(text)
                indices.append(index)
        if self.steps.near_duplicates:
            self._kept[record.number] = np.array(indices, np.int32)
        if texts:
            write_texts(target, texts)
        else:
            target.unlink(missing_ok=True)  # an earlier run may have written it, with another text in --against
        self.documents += len(texts)
        self.bytes += sum(len(text.encode()) for text in texts)

    def write_signatures(self, directory: Path) -> None:
        """Writes the kept documents' bands, from their units' files."""
        shape = self.documents, BANDS
        signatures = np.lib.format.open_memmap(directory / SIGNATURES, "w+", np.uint64, shape)
        end = 0
        for number, kept in self._kept.items():
            start, end = end, end + len(kept)
            with np.load(stem(directory, number).with_suffix(".npz")) as arrays:
                signatures[start:end] = arrays["bands"][kept]
        signatures.flush()


def read_signatures(folder: Path) -> np.ndarray:
    """Maps an output's bands, [n, bands], into memory.

    Raises:
        UserError: The file is damaged.
    """
    try:
        signatures = np.load(folder / SIGNATURES, mmap_mode="r")
        if signatures.dtype != np.uint64 or signatures.shape[1:] != (BANDS,):
            raise ValueError(f"expected uint64[n, {BANDS}], got {signatures.dtype}{list(signatures.shape)}")
    except (ValueError, EOFError) as error:
        raise UserError(f"{folder / SIGNATURES} is damaged ({first_line(error)}). Copy or make it again") from error
    return signatures


PAGE = "index.html"
_SAMPLES = 10  # of each reason


def report(
    records: Sequence[CleanedUnit], merging: Merging, refused: Mapping[str, int], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the content of report.json: documents by reason, MB/s by step, and samples.

    Args:
        refused: Counts of unusable input.
    """
    dropped: Counter[str] = Counter()
    seconds: Counter[str] = Counter()  # a Counter adds floats too
    sizes: Counter[str] = Counter()  # bytes of text that reached a step
    samples: dict[str, list[str]] = {}
    for record in records:
        dropped.update(record.dropped)
        sizes.update(record.step_bytes)
        seconds.update(record.seconds)
    dropped.update(merging.dropped)
    for group in [*(record.samples for record in records), merging.samples]:
        for reason, texts in group.items():
            chosen = samples.setdefault(reason, [])
            chosen += texts[: _SAMPLES - len(chosen)]
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


def write(report: Mapping[str, Any], directory: Path, name: str) -> None:
    """Writes report.json, and a page that shows samples of every reason."""
    write_json(directory / REPORT, report)
    documents, size = report["documents"], report["bytes"]
    read = max(documents["read"], 1)
    rows = [
        [reason, f"{count:,}", f"{count / read:.2%}"]
        for reason, count in (report["dropped"] | {"kept": documents["kept"]}).items()
    ]
    excerpts = [
        Excerpt(reason, "", "", {"": [Fragment(text, "plain", "", False)]})
        for reason, texts in report["samples"].items()
        for text in texts
    ]
    speeds = [[step, f"{speed:,}"] for step, speed in report["mb_a_second"].items()]
    speed_note = "On one core, of the text that reaches a step."
    document = Document(
        title=name,
        source=name,
        program="bert-jax clean",
        lines=[f"{documents['kept']:,} of {documents['read']:,} documents are kept."],
        tiles=[
            Tile(f"{documents['kept'] / read:.1%}", "documents kept", f"of {documents['read']:,}"),
            Tile(f"{size['kept'] / max(size['read'], 1):.1%}", "bytes kept", f"of {size['read'] / 1e6:,.1f} MB"),
            Tile(f"{report['removed_lines']:,}", "repeated lines removed"),
        ],
        sections=[
            Section("Documents", [Table(["", "documents", "of those read"], [rows])]),
            Section("Speed", [Table(["step", "MB/s"], [speeds])] if speeds else [], speed_note),
            Section("What was dropped", [Excerpts(excerpts)], "The beginnings of some documents."),
            Section("How it was made", [Settings({"": report["settings"]})]),
        ],
    )
    write_atomic(directory / PAGE, page.render(document).encode())
