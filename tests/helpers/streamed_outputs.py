"""Outputs with many rows or edited manifests, slow and failing stores, a loader that ends its run, and comparisons."""

import io
import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from pyarrow import fs

from bert_jax import pretraining
from bert_jax.commands import copy_examples
from bert_jax.data.example import Batch
from bert_jax.data.phases import PhasedLoader
from bert_jax.data.shards import open_dataset, write_shard
from bert_jax.data.streaming import open_streamed
from bert_jax.storage import remote
from bert_jax.train.workdir import read_params
from tests.helpers import shard_tables


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
    held_out = shard_tables.entries(copy, "eval/")
    for unused in {path.name for path in (copy / "train").iterdir()} - {Path(e["name"]).name for e in entries}:
        (copy / "train" / unused).unlink()
    manifest["parts"]["train"] |= {"rows": number - first, "tokens": (number - first) * 60}
    shard_tables.replace(copy, entries + held_out, manifest)
    return copy


class EmulatedStore(AbstractFileSystem):
    """A folder that answers like an object store, for reading; it counts requests. All threads share one link.

    latency           seconds until a request is answered
    bytes_per_second  of the link; 0: unlimited
    """

    cachable = False

    def __init__(self, folder: Path, latency: float = 0.0, bytes_per_second: float = 0.0) -> None:
        super().__init__()
        self.latency, self.bytes_per_second = latency, bytes_per_second
        self.requests, self.bytes_read = 0, 0
        self.failures = 0  # requests to refuse from now on
        self._files = fsspec.filesystem("dir", path=str(folder), target_protocol="file")
        self._lock = threading.Lock()
        self._link_free = 0.0

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        return self._files.ls(path, detail)

    def info(self, path: str, **_: Any) -> Any:
        return self._files.info(path)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> "EmulatedFile":
        return EmulatedFile(self, path, mode, **{name: options[name] for name in ("cache_type",) if name in options})

    def fetch(self, path: str, start: int, end: int) -> bytes:
        """Answers one request for a range of bytes. Raises ConnectionError as long as `failures` is above 0."""
        with self._lock:
            self.requests += 1
            failed, self.failures = self.failures > 0, max(self.failures - 1, 0)
            self.bytes_read += end - start
            begins = max(time.monotonic() + self.latency, self._link_free)
            self._link_free = begins + ((end - start) / self.bytes_per_second if self.bytes_per_second else 0)
            answered = self._link_free
        if failed:
            raise ConnectionError("the connection was reset")
        time.sleep(max(answered - time.monotonic(), 0))
        content: bytes = self._files.cat_file(path, start=start, end=end)
        return content


class EmulatedFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.fetch(self.path, start, end)


def served(output: Path, monkeypatch: pytest.MonkeyPatch) -> EmulatedStore:
    """A store in place of all buckets, in which gs://bucket is the folder of an output."""
    emulated = EmulatedStore(output.parent)
    pretended = fs.PyFileSystem(fs.FSSpecHandler(emulated))
    monkeypatch.setattr(remote, "open_store", lambda address: (pretended, address[5:].partition("/")[2]))
    return emulated


class _Interrupted(io.BytesIO):
    """A file of a store. Reads that begin in `lost` raise an error without a number, as those of pyarrow do."""

    def __init__(self, content: bytes, lost: range) -> None:
        super().__init__(content)
        self._lost = lost

    def read(self, size: int | None = -1, /) -> bytes:
        position = self.tell()
        if position in self._lost:
            raise OSError("AWS Error NETWORK_CONNECTION during GetObject operation: the connection was reset")
        if position < self._lost.start and self._lost:
            size = min(size if size and size > 0 else self._lost.start, self._lost.start - position)
        return super().read(size)


def interrupted(content: bytes, lost: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in place of all buckets, in which every address is this file; reads that begin in `lost` fail."""
    store = SimpleNamespace(open_input_file=lambda path: pa.PythonFile(_Interrupted(content, lost), mode="r"))
    monkeypatch.setattr(remote, "open_store", lambda address: (store, address[5:]))


def check_streaming(output: Path, address: str, cache: Path) -> None:
    """Copies an output to a store, streams rows from there, and compares them with those on disk."""
    copy_examples.copy(str(output), address)
    dataset, streamed = open_dataset(output, "train"), open_streamed(address, 1e6, str(cache), True, print)
    assert (streamed.fingerprint, streamed.rows) == (dataset.fingerprint, dataset.rows)
    numbers = np.array([dataset.rows - 1, 0, 7])
    for ours, theirs in zip(streamed.gather(numbers), dataset.gather(numbers), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert open_dataset(streamed.directory, "eval").rows == open_dataset(output, "eval").rows


def edited(shards: Path, copy: Path, **changes: object) -> Path:
    """Copies shards and changes their manifest."""
    shutil.copytree(shards, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    for key, value in changes.items():
        manifest[key] = manifest[key] | value if isinstance(value, dict) else value
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return copy


def assert_rows_equal(left: Batch, right: Batch) -> None:
    for name, a, b in zip(Batch._fields, left, right, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def originals(batch: Batch) -> np.ndarray:
    """The ids of a batch before masking."""
    ids = batch.input_ids.copy()
    row, column = np.nonzero(batch.masked_weights)
    ids[row, batch.masked_positions[row, column]] = batch.masked_ids[row, column]
    return ids


def texts(batch: Batch) -> list[bytes]:
    """The ids of each row before masking, which identify it."""
    return [ids.tobytes() for ids in originals(batch)]


def joined(batches: Sequence[Batch]) -> Batch:
    return Batch(*(None if fields[0] is None else np.concatenate(fields) for fields in zip(*batches, strict=True)))


def picked(batch: Batch, rows: slice | list[int] | np.ndarray) -> Batch:
    return Batch(*(None if field is None else field[rows] for field in batch))


def assert_same_parameters(one: Path, other: Path) -> None:
    first, second = read_params(one), read_params(other)
    assert first.keys() == second.keys()
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=path)


class Killed(Exception):
    """Simulates the end of the process."""


class DyingLoader(PhasedLoader):
    """Raises Killed where the batch of step `end` is loaded. Set it for PhasedLoader in bert_jax.pretraining."""

    end = -1

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Batch:
        one_row = isinstance(rows, slice) and rows == slice(0, 1)
        if step == self.end and not one_row:  # start-up reads one row for the shapes of later batches
            raise Killed
        return super().batch(step, rows)


def assert_equal_after_kills(
    train: Callable[[str], dict], ends: Sequence[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict:
    """Trains whole, then killed at the steps `ends`: equal in bits. Returns the result of the whole run.

    `train` pretrains in a workdir of this name in `folder`, and returns its result.
    """
    monkeypatch.setattr(pretraining, "PhasedLoader", DyingLoader)
    whole = train("whole")
    for end in ends:
        monkeypatch.setattr(DyingLoader, "end", end)
        with pytest.raises(Killed):
            train("killed")
    monkeypatch.setattr(DyingLoader, "end", -1)
    assert {**train("killed"), "seconds": 0} == {**whole, "seconds": 0}
    assert_same_parameters(folder / "whole", folder / "killed")
    return whole
