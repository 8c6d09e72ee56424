"""Killed and resumed runs equal uninterrupted ones (law 4): shorter forms of benchmarks/resume.py."""

import json
import random
import subprocess

import numpy as np
import pytest
from tiny_runs import TINY

from benchmarks import killed_lives, resume
from bert_jax.errors import UserError
from bert_jax.train import checkpoint


@pytest.mark.slow
def test_a_run_killed_at_random_instants_ends_bit_for_bit_the_same(shards_dir, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # compiled as for users: optimized programs must be deterministic, too
    figures = resume.kills(shards_dir, tmp_path, count=2, steps=80, seed=1, more=TINY)
    assert sum(figures["kills"].values()) == 2 and figures["differing"] == []


@pytest.mark.slow
def test_on_other_devices_and_processes_batches_are_equal_and_losses_within_1e_6(shards_dir, tmp_path):
    shapes = ((2, 2), (1, 1))
    figures = resume.elastic(shards_dir, tmp_path, count=1, steps=80, seed=1, more=TINY, shapes=shapes)
    assert figures["differing"] == []
    assert figures["rows_compared"] >= 80 * resume.ROWS
    assert sum(figures["kills"].values()) == 1


def finished(workdir, value: float) -> None:
    """Writes the workdir of a run of one tensor and one step."""
    with checkpoint.Checkpoints(workdir / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, {"kernel": np.full(3, value, np.float32)}, {"mu": np.zeros(3, np.float32)}, {})
    (workdir / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": random.random(), "loss": 1.0}) + "\n")
    (workdir / "result.json").write_text(json.dumps({"step": 1, "seconds": random.random()}))


def test_a_difference_of_one_bit_is_reported(tmp_path):
    for name, value in (("one", 1.0), ("same", 1.0), ("other", np.nextafter(np.float32(1), np.float32(2)))):
        finished(tmp_path / name, value)
    assert resume.compare(tmp_path / "one", tmp_path / "same") == []
    assert resume.compare(tmp_path / "one", tmp_path / "other") == ["params/kernel"]


def test_a_run_that_ends_before_its_kills_is_an_error(tmp_path):
    def start(life: int) -> list[subprocess.Popen[bytes]]:
        return [subprocess.Popen(["true"])]

    with pytest.raises(UserError, match=r"ended with code 0.*increase --steps"):
        killed_lives.killed_until(start, tmp_path, steps=10, kills=3, seed=0)


@pytest.mark.slow
def test_two_processes_on_one_workdir_leave_the_files_of_one_run(shards_dir, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    figures = resume.starts(shards_dir, tmp_path, count=3, steps=20, seed=1, more=TINY)
    assert figures["differing"] == [] and sum(figures["ends"].values()) == 3
