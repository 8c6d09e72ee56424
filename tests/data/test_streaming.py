"""Rows read by ranges and in windows: the same batches for any number of processes and after any restart."""

import contextlib
import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Semaphore
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from streamed_outputs import (
    EmulatedStore,
    assert_equal_after_kills,
    assert_rows_equal,
    edited,
    many_rows,
    picked,
    served,
    texts,
)
from tiny_runs import RECIPE, TINY

from bert_jax.commands import build_examples, pretrain
from bert_jax.config import PretrainConfig, PretrainDataConfig
from bert_jax.data import order, streaming
from bert_jax.data.example import Rows
from bert_jax.data.phases import PhasedLoader, open_held_out, open_phases
from bert_jax.data.schedules import batch_schedule
from bert_jax.data.shards import Dataset, open_dataset
from bert_jax.data.streaming import Piece, RangeFiles, StreamedDataset, WindowCache, open_streamed
from bert_jax.errors import RunAgain, UserError
from tests.helpers import shard_tables

SEED = 3


@pytest.fixture(scope="module")
def output(shards_dir, tmp_path_factory) -> Path:
    return many_rows(shards_dir, tmp_path_factory.mktemp("stream") / "books")


@pytest.fixture(scope="module")
def other_output(shards_dir, tmp_path_factory) -> Path:
    return many_rows(shards_dir, tmp_path_factory.mktemp("stream") / "news", shards=3, rows=500, first=5000)


@pytest.fixture
def store(output, monkeypatch) -> EmulatedStore:
    return served(output, monkeypatch)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch) -> None:
    """Windows of a few rows, so that the lanes of a small data set have several."""
    monkeypatch.setattr(order, "LEAST_BLOCK_ROWS", 1)
    monkeypatch.setattr(order, "LEAST_BLOCKS", 4)


DEFAULT = {0: 48}


@contextlib.contextmanager
def loader_of(
    train: str | Path = "", schedule: dict[int, int] = DEFAULT, cache_bytes: float = 3e5, **keys: Any
) -> Iterator[PhasedLoader]:
    opened = open_phases(PretrainDataConfig(train=str(train), cache_bytes=cache_bytes, **keys))
    vocabulary = opened[0].mixture.dataset.vocabulary()
    with contextlib.closing(PhasedLoader(opened, vocabulary, batches=batch_schedule(schedule, 0), seed=SEED)) as loader:
        yield loader


def texts_of(dataset: Dataset) -> set[bytes]:
    found = {row.astype(np.int32).tobytes() for row in dataset.gather(np.arange(dataset.rows)).input_ids}
    assert len(found) == dataset.rows, "two rows have the same text"
    return found


@pytest.mark.slow
def test_every_epoch_reads_each_row_once_and_differs(output):
    dataset = open_dataset(output, "train")
    known = texts_of(dataset)
    with loader_of(output) as loader:
        read = [text for step in range(2 * dataset.rows // 48 + 1) for text in texts(loader.batch(step))]
    first, second = read[: dataset.rows], read[dataset.rows : 2 * dataset.rows]
    assert set(first) == set(second) == known and first != second


@pytest.mark.slow
def test_masks_are_those_of_the_row_and_its_epoch(output):
    """The masks of a row do not depend on the order in which rows are read."""
    with loader_of(output) as streamed, loader_of(output, cache_bytes=0.0) as permuted:
        steps = range(open_dataset(output, "train").rows // 48)
        ours, theirs = ({}, {})
        for loader, found in ((streamed, ours), (permuted, theirs)):
            for step in steps:
                batch = loader.batch(step)
                found |= {text: batch.input_ids[row].tobytes() for row, text in enumerate(texts(batch))}
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 1000 and all(ours[text] == theirs[text] for text in shared)


@pytest.mark.slow
def test_processes_read_their_parts_of_the_same_batches_and_of_the_bytes(output, monkeypatch):
    """In an epoch every process reads its share of all bytes, 5% more at most, counted where they are read."""
    read = [0]

    def counted(self: RangeFiles, name: str, offset: int, length: int) -> memoryview:
        read[0] += length
        return original(self, name, offset, length)

    original = RangeFiles.read
    monkeypatch.setattr(RangeFiles, "read", counted)
    shards = open_dataset(output, "train").shards
    steps = int(shards.rows.sum()) // 8
    arguments = {"schedule": {0: 8, steps: 16}, "cache_bytes": 2e4}  # batches of 8 are not made beyond these steps
    with loader_of(output, **arguments) as loader:
        whole = [loader.batch(step) for step in range(steps)]
    for processes, some in ((2, (0, 1)), (8, (0, 3, 7))):
        for process in some:
            rows = slice(process * 8 // processes, (process + 1) * 8 // processes)
            with loader_of(output, **arguments) as loader:
                loader.batch(0, slice(0, 1))  # as a run does before it starts, to learn the shapes
                read[0] = 0
                for step in range(steps):
                    assert_rows_equal(loader.batch(step, rows), picked(whole[step], rows))
            assert read[0] <= 1.05 * int(shards.bytes.sum()) / processes


RAMP = {0: 12, 4: 48, 11: 24}


def phases_of(books: Path, news: Path) -> dict[int, Any]:
    return {6: str(news), 13: str(books), 19: {"a": (str(books), 0.5), "b": (str(news), 0.5)}}


@pytest.mark.slow
def test_a_restart_at_any_step_of_ramps_and_phases_reads_the_same_rows(output, other_output):
    keys = {"schedule": RAMP, "phases": phases_of(output, other_output)}
    with loader_of(output, **keys) as loader:
        batches = [loader.batch(step) for step in range(26)]
        assert [len(batch.input_ids) for batch in batches] == [loader.rows_at(step) for step in range(26)]
        backwards = [loader.batch(step) for step in (20, 3)]
        assert len(loader.batch(5, slice(0, 0)).input_ids) == 0
    assert_rows_equal(backwards[0], batches[20])
    assert_rows_equal(backwards[1], batches[3])
    for start in (3, 5, 12, 18, 25):
        with loader_of(output, **keys) as again:
            for step in range(start, min(start + 4, 26)):
                assert_rows_equal(again.batch(step), batches[step])
                assert_rows_equal(again.batch(step, slice(1, 3)), picked(batches[step], slice(1, 3)))


@pytest.mark.slow
def test_phases_lose_and_repeat_no_row(output, other_output):
    """Both sources alone, then in a mixture, until some epochs have ended. Lanes end them a row or two apart."""
    phases, lanes, steps = phases_of(output, other_output), 12, 300
    datasets = {name: open_dataset(folder, "train") for name, folder in (("a", output), ("b", other_output))}
    often = {text: 0 for dataset in datasets.values() for text in texts_of(dataset)}
    assert len(often) == sum(dataset.rows for dataset in datasets.values())
    with loader_of(output, RAMP, phases=phases) as loader:
        for step in range(steps):
            for text in texts(loader.batch(step)):
                often[text] += 1
        epochs = loader.epochs_before(steps)
    for name, dataset in datasets.items():
        counts = np.array([often[text] for text in texts_of(dataset)])
        assert counts.sum() == pytest.approx(epochs[name] * dataset.rows)
        whole = int(epochs[name])
        assert whole >= 1, "no epoch ends within the test"
        assert (counts < whole).sum() <= 2 * lanes and (counts > whole + 1).sum() <= 2 * lanes


@pytest.mark.slow
def test_a_mixture_has_its_shares_in_every_batch(output, other_output):
    books = texts_of(open_dataset(output, "train"))
    with loader_of(mixture={"one": (str(output), 0.7), "two": (str(other_output), 0.3)}, cache_bytes=1e6) as loader:
        for step in range(40):
            assert abs(sum(text in books for text in texts(loader.batch(step))) - 0.7 * 48) <= 1
        epochs = loader.epochs_before(40)
    assert epochs["one"] * len(books) == pytest.approx(0.7 * 40 * 48, abs=2)


def test_a_single_row_is_read_without_its_window(output):
    dataset = open_streamed(str(output), 3e5, "", True, print)
    order = dataset.order(24, SEED)
    with contextlib.closing(WindowCache(order, dataset)) as cache:
        row = cache.read(np.array([500]), ahead=False)
        assert cache.held_bytes == 0
        for ours, theirs in zip(row, cache.read(np.array([500])), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert cache.held_bytes > 0


def test_windows_are_read_before_their_rows_are_needed(output, monkeypatch):
    """While the store answers nothing, batches come from the windows in use and from the ones after them."""
    dataset = open_streamed(str(output), 3e5, "", True, print)
    order, answers = dataset.order(48, SEED), True
    read, came = dataset.read, Semaphore(0)

    def answer(piece: Piece, into: Rows) -> None:
        if not answers:
            raise UserError("the store does not answer")
        read(piece, into)
        came.release()

    monkeypatch.setattr(dataset, "read", answer)
    batches = np.arange(dataset.rows // 48 * 48).reshape(-1, 48)
    with contextlib.closing(WindowCache(order, dataset)) as cache:
        cache.read(batches[0])
        firsts = set(order.locate(batches[0])[0].tolist())
        held = firsts | {order.window(first).next for first in firsts}
        windows = [order.window(first) for first in held]
        begins = np.concatenate([window.begins for window in windows]).tolist()
        counts = np.concatenate([window.counts for window in windows]).tolist()
        for _ in (piece for begin, count in zip(begins, counts, strict=True) for piece in dataset.pieces(begin, count)):
            assert came.acquire(timeout=60)
        answers = False
        ready = [held.issuperset(order.locate(batch)[0].tolist()) for batch in batches].index(False)
        for batch in batches[:ready]:
            cache.read(batch)
        assert firsts.isdisjoint(order.locate(batches[ready - 1])[0].tolist())  # all lanes are in the second window
        with pytest.raises(UserError, match="the store does not answer"):
            cache.read(batches[ready])


def test_memory_stays_within_cache_bytes(output):
    """The windows of all lanes together, also where each window has fewer rows than a lane reads at one time."""
    dataset = open_streamed(str(output), 3e5, "", True, print)
    with contextlib.closing(WindowCache(dataset.order(48, SEED), dataset)) as cache:
        for first in range(0, 2 * dataset.rows, 960):
            cache.read(np.arange(first, first + 960))
            assert 0 < cache.held_bytes <= cache.peak_bytes <= 3e5
        cache.release()
        assert cache.held_bytes == 0
    assert cache.peak_bytes > 2e5


def test_a_store_is_streamed_and_only_small_files_are_copied(output, store, tmp_path):
    data = PretrainDataConfig(train="gs://bucket/books/train", cache_bytes=3e5, cache_dir=str(tmp_path / "cache"))
    [phase] = open_phases(data)
    dataset = phase.mixture.dataset
    assert isinstance(dataset, StreamedDataset) and dataset.directory.parent == tmp_path / "cache"
    assert not (dataset.directory / "train").exists() and (dataset.directory / "eval").exists()
    [[held_out]] = open_held_out(PretrainConfig(data=data), [phase])
    assert held_out.dataset.rows == open_dataset(output, "eval").rows
    assert not isinstance(held_out.dataset, StreamedDataset)
    for key in ("train", "eval"):  # of a cache without the held-out rows
        other = PretrainDataConfig(
            train=f"gs://bucket/books/{key}",
            eval=str(output),
            any_part=key == "eval",
            cache_bytes=3e5,
            cache_dir=str(tmp_path / "other"),
        )
        if other.any_part:
            with pytest.raises(UserError, match=r"data\.train is gs://bucket/books/eval, whose rows are held out"):
                open_phases(dataclasses.replace(other, any_part=False))
        [phase] = open_phases(other)
        assert phase.mixture.dataset.fingerprint == open_dataset(output, key).fingerprint
    assert not list((tmp_path / "other").rglob("shard-*"))


def test_what_cannot_be_streamed_is_refused_in_one_line(output, other_output, shards_dir, store, tmp_path):
    mixed = {"one": (str(output), 0.999), "two": (str(other_output), 0.001)}
    cases: list[tuple[str, dict, dict]] = [
        (
            r"gs://bucket/books is in an object store\. Its training rows are str",
            DEFAULT,
            {"train": "gs://bucket/books"},
        ),
        (r"data\.cache_bytes=1000 is too small to shuffle .*books", DEFAULT, {"train": output, "cache_bytes": 1000.0}),
        (r"data\.cache_bytes is -1\.0\. Use a number of bytes", DEFAULT, {"train": output, "cache_bytes": -1.0}),
        (r"data\.cache_bytes is inf\. Use a number of bytes", DEFAULT, {"train": output, "cache_bytes": float("inf")}),
        (r"data\.cache_bytes=300000 is too small to shuffle .*news", DEFAULT, {"mixture": mixed}),
        (
            r"has \d+ rows, but batches of this size are streamed in 251 lanes",
            {0: 251},
            {"train": shards_dir / "eval", "any_part": True, "cache_bytes": 1e9},
        ),
        (r"no manifest\.json in", DEFAULT, {"train": tmp_path}),
        (
            "nowhere/manifest.json does not exist",
            DEFAULT,
            {"train": "gs://b/nowhere", "cache_dir": str(tmp_path / "cache")},
        ),
        ("training reads Arrow shards", DEFAULT, {"train": edited(output, tmp_path / "tfds", format="tfds")}),
    ]
    for message, schedule, keys in cases:
        with pytest.raises(UserError, match=message) as caught, loader_of(schedule=schedule, **keys):
            pass
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_on_streamed_rows_ends_bit_equal_after_kills(output, store, tmp_path, monkeypatch):
    def train(name: str, *more: str) -> dict:
        pace = (
            "steps=12",
            "log_every=1",
            "checkpoint.every_steps=3",
            "batch_schedule={0: 16, 7: 32}",
            "eval.max_rows=16",
        )
        data = ("data.train=gs://bucket/books", "data.cache_bytes=3e5", f"data.cache_dir={tmp_path / 'cache'}")
        flags = [f"--config.{each}" for each in (*pace, *data, *more)]
        pretrain.main([f"--config={RECIPE}", f"--workdir={tmp_path / name}", *TINY, *flags])
        return json.loads((tmp_path / name / "result.json").read_text())

    assert_equal_after_kills(train, (5, 10), tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r"data\.cache_bytes: 300000\.0 -> 400000\.0"):
        train("whole", "data.cache_bytes=4e5", "steps=14")


def test_a_window_larger_than_the_data_set_holds_all_of_it(output):
    dataset = open_streamed(str(output), 1e300, "", True, print)
    order = dataset.order(48, SEED)
    assert order.sizes.window_rows == -(-dataset.rows // 48)
    with contextlib.closing(WindowCache(order, dataset)) as cache:
        read = cache.read(np.arange(dataset.rows))
    expected = dataset.gather(order.row_numbers(np.arange(20)))
    for ours, theirs in zip(read, expected, strict=True):
        np.testing.assert_array_equal(None if ours is None else ours[:20], theirs)


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
    across = list(streamed.pieces(390, 500))  # of 400, 417, ... rows
    assert across == [Piece(0, 390, 10), Piece(1, 0, 417), Piece(2, 0, 73)]
    rows = streamed.allocate(417)
    streamed.read(across[1], rows)
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
    shards = shard_tables.entries(copy)
    shards[2]["bytes"] = (copy / name).stat().st_size
    shard_tables.replace(copy, shards)
    ours, theirs = open_streamed(str(copy), 1e6, "", True, print), open_dataset(output, "train")
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
    def read_all() -> None:
        dataset = open_streamed(str(copy), 1e6, "", True, print)
        dataset.gather(np.arange(0, dataset.rows, 50))

    copy = shutil.copytree(output, tmp_path / "copy")
    shard = copy / "train/shard-00001.arrow"
    content = bytearray(shard.read_bytes())
    content[2000] = content[2001] = 255  # an id outside of the vocabulary
    shard.write_bytes(content)
    dataset = open_streamed(str(copy), 1e6, "", True, print)
    with (
        contextlib.closing(WindowCache(dataset.order(48, 0), dataset)) as cache,
        pytest.raises(UserError, match=r"damaged shard .*train/shard-00001\.arrow: an id outside of the vocabulary"),
    ):
        cache.read(np.arange(dataset.rows))
    shard.write_bytes(content[:-8])
    with pytest.raises(UserError, match=r"truncated or changed shard .*shard-00001\.arrow: it has \d+ bytes instead"):
        read_all()
    shard.unlink()
    with pytest.raises(UserError, match=r"missing shard .*shard-00001\.arrow"):
        read_all()
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
