"""Rows read by ranges of bytes: the same as from mapped shards, by exact requests, and damage is reported."""

import contextlib
import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from emulated_store import EmulatedStore
from streamed_outputs import many_rows, served

from bert_jax.commands import build_examples
from bert_jax.data import streaming
from bert_jax.data.shards import open_dataset
from bert_jax.data.streaming import Piece, ShardRanges, WindowCache, open_streamed
from bert_jax.errors import RunAgain, UserError


@pytest.fixture(scope="module")
def output(shards_dir, tmp_path_factory) -> Path:
    return many_rows(shards_dir, tmp_path_factory.mktemp("stream") / "books")


@pytest.fixture
def store(output, monkeypatch) -> EmulatedStore:
    return served(output, monkeypatch)


def test_rows_read_by_ranges_are_those_of_the_mapped_shards(output):
    dataset = open_dataset(output, "train")
    streamed = open_streamed(f"{output}/train", 1e6, "", True, print)
    assert (streamed.fingerprint, streamed.rows, streamed.part) == (dataset.fingerprint, dataset.rows, "train")
    assert streamed.vocabulary().content_hash == dataset.tokenizer_hash
    numbers = np.array([0, 399, 400, 401, dataset.rows - 1, 7])
    for ours, theirs in zip(streamed.gather(numbers), dataset.gather(numbers), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(streamed.shard_rows(2), dataset.shard_rows(2), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    across = list(streamed.ranges.pieces(390, 500))  # of 400, 417, ... rows
    assert across == [Piece(0, 390, 10), Piece(1, 0, 417), Piece(2, 0, 73)]
    rows = streamed.ranges.allocate(417)
    streamed.ranges.read(across[1], rows)
    for ours, theirs in zip(rows, dataset.gather(np.arange(400, 817)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_static_masks_are_read_too(sample_text, vocab_dir, tmp_path):
    options = [f"--input={sample_text}", f"--tokenizer={vocab_dir}", f"--output={tmp_path / 'static'}", "--workers=1"]
    build_examples.main([*options, "--seq_len=48", "--masking=static", "--objective=single", "--pack=2"])
    mapped = open_dataset(tmp_path / "static", "train")
    streamed = open_streamed(str(tmp_path / "static"), 1e6, "", True, print)
    numbers = np.arange(0, mapped.rows, 11)
    for ours, theirs in zip(streamed.gather(numbers), mapped.gather(numbers), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_shards_of_another_writer_are_opened_one_by_one(output, tmp_path):
    """One file has longer metadata than the others, so its columns begin elsewhere."""
    copy = shutil.copytree(output, tmp_path / "copy")
    name = "train/shard-00002.arrow"
    with pa.memory_map(str(output / name)) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
        with pa.ipc.new_file(str(copy / name), batch.schema.with_metadata({"writer": "another" * 30})) as writer:
            writer.write_batch(batch.replace_schema_metadata({"writer": "another" * 30}))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["shards"][2]["bytes"] = (copy / name).stat().st_size
    (copy / "manifest.json").write_text(json.dumps(manifest))
    ours, theirs = ShardRanges(str(copy), "train", manifest), open_dataset(output, "train")
    numbers = np.arange(0, theirs.rows, 50)
    for left, right in zip(ours.gather(numbers), theirs.gather(numbers), strict=True):
        np.testing.assert_array_equal(left, right)


def refuse(path: str, start: int, end: int) -> bytes:
    raise OSError("AWS Error ACCESS_DENIED during GetObject")


def test_requests_are_exact_and_repeated_if_they_fail(output, store, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "RETRY_SECONDS", (0.01, 0.01))
    files = streaming.RangeFiles("gs://bucket/books")
    content = (output / "train/shard-00000.arrow").read_bytes()
    store.requests = store.bytes_read = 0
    assert bytes(files.read("train/shard-00000.arrow", 100, 50)) == content[100:150]
    assert (store.requests, store.bytes_read) == (1, 50)
    store.failures = 2
    assert bytes(files.read("train/shard-00000.arrow", 3, 9)) == content[3:12]
    store.failures = 3
    with pytest.raises(
        RunAgain,
        match=r"^gs://bucket/books/train/shard-00000\.arrow: the connection was reset\. .*run the same",
    ):
        files.read("train/shard-00000.arrow", 3, 9)
    monkeypatch.setattr(store, "fetch", refuse)
    with pytest.raises(UserError, match=r"ACCESS_DENIED during GetObject\. Check the address and the credentials$"):
        files.read("train/shard-00000.arrow", 3, 9)
    monkeypatch.undo()
    with pytest.raises(UserError, match="it ends before byte"):
        files.read("train/shard-00000.arrow", len(content) - 5, 9)
    with pytest.raises(UserError, match=r"nowhere\.arrow does not exist"):
        files.read("train/nowhere.arrow", 0, 9)


def test_damage_is_reported_with_the_name_of_the_shard(output, tmp_path):
    copy = shutil.copytree(output, tmp_path / "copy")
    shard = copy / "train/shard-00001.arrow"
    content = bytearray(shard.read_bytes())
    content[2000] = content[2001] = 255  # an id outside of the vocabulary
    shard.write_bytes(content)
    dataset = open_streamed(str(copy), 1e6, "", True, print)
    with (
        contextlib.closing(WindowCache(dataset.order(48, 0), dataset.ranges)) as cache,
        pytest.raises(UserError, match=r"damaged shard .*train/shard-00001\.arrow: an id outside of the vocabulary"),
    ):
        cache.read(np.arange(dataset.rows))
    shard.write_bytes(content[:-8])
    with pytest.raises(UserError, match=r"truncated or changed shard .*shard-00001\.arrow: it has \d+ bytes instead"):
        open_streamed(str(copy), 1e6, "", True, print)
    shard.unlink()
    with pytest.raises(UserError, match=r"missing shard .*shard-00001\.arrow"):
        open_streamed(str(copy), 1e6, "", True, print)
    first = copy / "train/shard-00000.arrow"
    first.write_bytes(b"\0" * first.stat().st_size)
    shutil.copy(output / "train/shard-00001.arrow", shard)
    with pytest.raises(UserError, match=r"damaged shard .*shard-00000\.arrow: not an Arrow IPC file"):
        open_streamed(str(copy), 1e6, "", True, print).gather(np.array([0]))


def test_closing_interrupts_the_wait_for_another_attempt(output, store, monkeypatch):
    """A run that ends does not wait until its requests are given up."""
    monkeypatch.setattr(streaming, "RETRY_SECONDS", (600.0,))
    files = streaming.RangeFiles("gs://bucket/books")
    store.failures = 10**9
    errors: list[RunAgain] = []

    def read() -> None:
        try:
            files.read("train/shard-00000.arrow", 0, 9)
        except RunAgain as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    while not store.requests:
        time.sleep(0.01)
    files.close()
    thread.join(60)
    assert not thread.is_alive() and "the connection was reset" in str(errors[0])
