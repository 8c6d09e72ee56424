"""The records of finished units in the folder of a job.

DIR.incomplete/job/units/NAME.json   the record, written after the shards of the unit and NAME.npy
DIR.incomplete/job/units/NAME.npy    counts of ids and of sequence lengths
"""

import hashlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data.manifest import Part
from bert_jax.storage.local import write_atomic
from data_prep import checksums
from data_prep.resumable import unit_folder
from data_prep.units import Unit


class UnitRecord(NamedTuple):
    """The results of a finished unit. Its part and number are in its name and in the names of its shards."""

    name: str  # "train-00000"
    text_hash: str
    counts: dict[str, int]  # COUNTED
    skipped: dict[str, int]  # documents, by reason
    shards: list[dict[str, Any]]  # name, rows, bytes, sha256: as in the manifest
    counted: str = ""  # sha256 of NAME.npy, once that is written

    @property
    def part(self) -> Part:
        return "eval" if self.name.startswith("eval-") else "train"

    @property
    def number(self) -> int:
        return int(self.name.rpartition("-")[2])


def write_record(
    directory: Path, record: UnitRecord, unigrams: Int64[np.ndarray, "V"], lengths: Int64[np.ndarray, "n"]
) -> UnitRecord:
    """Marks a unit as finished, after its shards are on disk. Returns the record as it was written.

    unigrams, lengths   how often each id occurs in its rows, and how many of its sequences have 0, 1, ..., T tokens
    """
    buffer = io.BytesIO()
    np.save(buffer, np.concatenate([unigrams, lengths]))
    counted = buffer.getvalue()
    write_atomic(unit_folder(directory) / f"{record.name}.npy", counted)
    record = record._replace(counted=hashlib.sha256(counted).hexdigest())
    write_atomic(unit_folder(directory) / f"{record.name}.json", json.dumps(record._asdict()).encode())
    return record


def read_record(directory: Path, unit: Unit) -> UnitRecord | None:
    """The record of a unit if an earlier run finished it on the same text and all of its files are intact."""
    path = unit_folder(directory) / f"{unit.name}.json"
    try:
        record = UnitRecord(**json.loads(path.read_text(encoding="utf-8")))
        wanted = {directory / shard["name"]: shard["sha256"] for shard in record.shards}
        wanted[path.with_suffix(".npy")] = record.counted
        # Names and sizes are not enough: after a power failure they may be right and the content lost.
        intact = record.text_hash == unit.text_hash and all(
            checksums.sha256(path) == digest for path, digest in wanted.items()
        )
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None  # missing or damaged: the unit is built again
    return record if intact else None
