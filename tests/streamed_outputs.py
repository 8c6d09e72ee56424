"""Outputs of many different rows, and a store that serves them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.emulated_store import EmulatedStore, as_pyarrow
from bert_jax.data.shards import open_dataset, write_shard
from bert_jax.storage import remote


def many_rows(shards_dir: Path, copy: Path, shards: int = 5, rows: int = 400, first: int = 0) -> Path:
    """An output of many different rows: those of the sample, with other keys and, in the ids, numbers from `first`."""
    shutil.copytree(shards_dir, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    sample = open_dataset(shards_dir, "train")
    entries, number = [], first
    for shard in range(shards):
        count = rows + 17 * shard
        some = sample.gather((np.arange(number, number + count) * 7) % sample.rows)
        some.input_ids[:, 1], some.input_ids[:, 2] = np.divmod(number + np.arange(count), 900) + np.array([[5], [5]])
        keys = np.uint64(shard << 32) + np.arange(count, dtype=np.uint64)
        some = some._replace(sequence_keys=keys[:, None])
        name = f"train/shard-{shard:05d}.arrow"
        written = write_shard(copy / name, some)
        entries.append({"name": name, **written._asdict()})
        number += count
    held_out = [entry for entry in manifest["shards"] if entry["name"].startswith("eval/")]
    manifest["shards"] = entries + held_out
    for unused in {path.name for path in (copy / "train").iterdir()} - {Path(e["name"]).name for e in entries}:
        (copy / "train" / unused).unlink()
    manifest["parts"]["train"] |= {"rows": number - first, "tokens": (number - first) * 60}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def served(output: Path, monkeypatch: pytest.MonkeyPatch) -> EmulatedStore:
    """A store in place of all buckets, in which gs://bucket is the folder of an output."""
    emulated = EmulatedStore(output.parent)
    pretended = as_pyarrow(emulated)
    monkeypatch.setattr(remote, "open_store", lambda address: (pretended, address[5:].partition("/")[2]))
    return emulated
