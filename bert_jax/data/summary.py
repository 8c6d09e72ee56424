"""What config.json of a pretraining run records of its shards: enough to describe them without the shards."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from bert_jax.data.mixture import training_counts
from bert_jax.data.phases import Phase
from bert_jax.data.shards import Dataset

FILES = 20  # names of input files that are recorded of each source


def summarize(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Returns a record of each source of each phase, as JSON values.

    name, from_step and share say when and how often its rows are read. The other keys are those of the manifest
    (docs/data_format.md), with the counts of the training part, and the last part of each path: folders say where
    files were, and not what they held.
    """
    return [
        {"name": source.name or _last_part(source.dataset.directory), "from_step": phase.first, "share": share}
        | _content(source.dataset)
        for phase in phases
        for source, share in zip(phase.mixture.sources, phase.mixture.shares.fractions, strict=True)
    ]


def _content(dataset: Dataset) -> dict[str, Any]:
    manifest, counts = dataset.manifest, training_counts(dataset)
    masking = manifest["masking"]
    files = [_last_part(source["path"]) for source in manifest["sources"]]
    return {
        "documents": counts["documents"],
        "tokens": counts["tokens"],
        "rows": counts["rows"],
        "held_out_documents": manifest["parts"]["eval"]["documents"],
        "seq_len": manifest["seq_len"],
        "objective": manifest["objective"],
        "masking": {name: masking[name] for name in ("kind", "unit", "rate")},
        "input_files": len(files),
        "input": files[:FILES],
        "input_bytes": sum(source["bytes"] for source in manifest["sources"]),
    }


def _last_part(path: object) -> str:
    return PurePath(str(path)).name
