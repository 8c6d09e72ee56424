"""What cleaning dropped before a job: the reports of bert-jax clean, which are next to the text that it wrote.

The manifest of shards that are made from such text lists each report once, `cleaning: [{report, sha256, documents,
bytes, dropped, removed_lines, refused}]`, so that every document that was read has a reason for where it went.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from bert_jax.storage.compression import read_blocks
from bert_jax.storage.listing import find_files
from data_prep.readers import Source

REPORT = "report.json"
PART = "part-{:05d}.jsonl.zst"
_IS_PART = re.compile(r"part-\d{5,}\.jsonl\.zst")
_COUNTS = ("documents", "bytes", "dropped", "refused")  # objects of counts
_LINES = "removed_lines"


def reports_of(sources: Iterable[Source]) -> list[dict[str, Any]]:
    """The digest and the counts of each report, in the order of the sources, local or in an object store.

    A file of the same name without these counts is no report. Raises OSError for one that cannot be read.
    """
    folders = dict.fromkeys(
        folder for source in sources for folder, _, name in [source.path.rpartition("/")] if _IS_PART.fullmatch(name)
    )
    found = [report for folder in folders if (report := _report(f"{folder}/{REPORT}" if folder else REPORT))]
    return merged([found])


def merged(lists: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The reports of several manifests, each once."""
    found: dict[str, dict[str, Any]] = {}
    for report in itertools.chain.from_iterable(lists):
        found.setdefault(report["sha256"], report)
    return list(found.values())


def _report(path: str) -> dict[str, Any] | None:
    if not find_files(path):
        return None
    content = b"".join(read_blocks(path))
    try:
        report = json.loads(content)
    except ValueError:
        return None
    if not _is_report(report):
        return None
    digest = hashlib.sha256(content).hexdigest()
    return {"report": path, "sha256": digest, **{name: report[name] for name in (*_COUNTS, _LINES)}}


def _is_report(content: Any) -> bool:
    def are_counts(value: Any) -> bool:
        return isinstance(value, dict) and all(type(count) is int and count >= 0 for count in value.values())

    return (
        isinstance(content, dict)
        and all(are_counts(content.get(name)) for name in _COUNTS)
        and are_counts({_LINES: content.get(_LINES)})
        and all({"read", "kept"} <= content[name].keys() for name in ("documents", "bytes"))
    )
