"""Tests how the rows of units are joined into shards, and that a job that stops there resumes."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.data.example import Rows
from bert_jax.data.shard_file import read_shard, write_shard
from bert_jax.data.shards import open_dataset
from bert_jax.errors import RunAgain
from data_prep import joining
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.inspection import verify
from data_prep.job import UnitRecord
from tests.helpers import shard_tables
from tests.helpers.built_units import built_units

TARGET = 30_000  # a few units of the sample


@pytest.fixture
def arguments(sample_text: Path, vocab_dir: Path, tmp_path: Path) -> dict[str, Any]:
    options = {"seq_len": 64, "eval_fraction": 0.2, "unit_mb": 0.01, "workers": 1, "dupe_factor": 2}
    return {"input": str(sample_text), "tokenizer": vocab_dir, "output": tmp_path / "out"} | options


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def all_rows(folder: Path) -> Rows:
    dataset = open_dataset(folder, "train")
    return dataset.gather(np.arange(dataset.rows))


@given(st.lists(st.tuples(st.sampled_from(["train", "eval"]), st.lists(st.integers(0, 300), max_size=3)), max_size=30))
def test_groups_hold_every_file_once_in_order_and_are_as_large_as_wanted(units: list[tuple[str, list[int]]]) -> None:
    units.sort(key=lambda unit: ("train", "eval").index(unit[0]))
    records = [
        UnitRecord(
            f"{part}-{number:05d}",
            "",
            {},
            {},
            [{"name": f"{number}-{k}", "bytes": size} for k, size in enumerate(sizes)],
        )
        for number, (part, sizes) in enumerate(units)
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(joining, "TARGET_BYTES", 400)
        groups = joining.plan(records, 3)
    assert [file for group in groups for file in group.inputs] == [file for record in records for file in record.shards]
    assert len({group.stem for group in groups}) == len(groups)
    sizes = [[file["bytes"] for file in group.inputs] for group in groups]
    parts = [group.stem.split("/")[0] for group in groups]
    for part, following, group in zip(parts, [*parts, ""][1:], sizes, strict=False):
        assert sum(group[:-1]) < 400  # a file fewer would be too small
        assert sum(group) >= 400 or part != following
    for part in ("train", "eval"):  # in order of their names, too
        stems = [group.stem for group in groups if group.stem.startswith(part)]
        assert stems == sorted(stems)


def test_joined_rows_are_those_of_the_units_in_order(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(joining, "TARGET_BYTES", 1)
    build(BuildOptions(**arguments))  # a file for each unit and pairing
    units = shard_tables.entries(tmp_path / "out", "train/")
    assert len(units) >= 8
    for name, target in (("some", TARGET), ("one", 1 << 40)):
        monkeypatch.setattr(joining, "TARGET_BYTES", target)
        build(BuildOptions(**arguments | {"output": tmp_path / name}))
        verify(tmp_path / name)
        for ours, theirs in zip(all_rows(tmp_path / name), all_rows(tmp_path / "out"), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert len(shard_tables.entries(tmp_path / "one", "train/")) == 1
    some = shard_tables.entries(tmp_path / "some", "train/")
    assert 2 < len(some) < len(units) and all(TARGET <= shard["bytes"] < 2 * TARGET for shard in some[:-1])
    # A joined shard has the bytes of a shard that was written at once.
    shard = tmp_path / "some" / some[1]["name"]
    write_shard(tmp_path / "again.arrow", read_shard(shard))
    assert (tmp_path / "again.arrow").read_bytes() == shard.read_bytes()
    assert hashlib.sha256(shard.read_bytes()).hexdigest() == some[1]["sha256"]


def fail_at(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """Wraps a function: its calls from `call` on raise OSError, as on a machine that is gone."""
    calls = 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise OSError("the machine is gone")
        return function(*arguments, **options)

    return failing


@pytest.mark.parametrize("place", ["output_files.join", "write_atomic", "Path.unlink"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_job_that_stops_while_it_joins_resumes_there(arguments, tmp_path, monkeypatch, place, call):
    monkeypatch.setattr(joining, "TARGET_BYTES", TARGET)
    build(BuildOptions(**arguments | {"output": tmp_path / "whole"}))
    first, _, last = place.partition(".")
    owner = getattr(joining, first) if last else joining
    with monkeypatch.context() as patched:
        patched.setattr(owner, last or first, fail_at(getattr(owner, last or first), call))
        with pytest.raises(OSError, match="gone"):
            build(BuildOptions(**arguments))
    again = built_units(monkeypatch)
    build(BuildOptions(**arguments))
    assert again == []
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_damaged_shard_of_an_earlier_run_is_built_again(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(joining, "TARGET_BYTES", TARGET)
    build(BuildOptions(**arguments | {"output": tmp_path / "whole"}))
    with monkeypatch.context() as patched:
        patched.setattr(joining.output_files, "join", fail_at(joining.output_files.join, 3))
        with pytest.raises(OSError, match="gone"):
            build(BuildOptions(**arguments))
    shard = tmp_path / "out.incomplete" / "train" / "shard-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    again = built_units(monkeypatch)
    build(BuildOptions(**arguments))
    assert again and all(name.startswith("train-0000") for name in again) and again[0] == "train-00000"
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_text_that_changed_while_shards_were_joined_is_built_by_the_next_run(arguments, tmp_path, monkeypatch):
    """The text has the same size, so it passes for the same source, but the units before it have other neighbours."""
    monkeypatch.setattr(joining, "TARGET_BYTES", TARGET)
    text = tmp_path / "text.txt"
    text.write_bytes(Path(arguments["input"]).read_bytes())
    arguments |= {"input": str(text)}
    with monkeypatch.context() as patched:
        patched.setattr(joining.output_files, "join", fail_at(joining.output_files.join, 2))
        with pytest.raises(OSError, match="gone"):
            build(BuildOptions(**arguments))
    content = text.read_bytes()
    text.write_bytes(content[:2000].replace(b"e", b"a") + content[2000:])
    with pytest.raises(RunAgain, match="--input has changed"):
        build(BuildOptions(**arguments))
    build(BuildOptions(**arguments))
    build(BuildOptions(**arguments | {"output": tmp_path / "fresh"}))
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
