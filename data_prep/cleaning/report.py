"""What cleaning kept and dropped: report.json, and a page that shows samples of every reason."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.reporting import page
from bert_jax.reporting.document import Document, Excerpt, Excerpts, Fragment, Section, Settings, Table, Tile
from bert_jax.storage.local import write_atomic, write_json
from data_prep.cleaning.lineage import REPORT
from data_prep.cleaning.merging import Merging
from data_prep.cleaning.unit import VERSION, CleanedUnit

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
                [Excerpts([_excerpt(reason, text) for reason, texts in found["samples"].items() for text in texts])],
                "The beginnings of some documents.",
                page_only=True,
            ),
            Section("How it was made", [Settings({"": found["settings"]})]),
        ],
    )


def _excerpt(reason: str, text: str) -> Excerpt:
    return Excerpt(reason, "", "", {"": [Fragment(text, "plain", "", False)]})
