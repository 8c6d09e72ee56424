"""A run that stands still ends, and names the process that is behind."""

import queue
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_hosts import Started, recipe
from tiny_runs import ROOT, environment

from bert_jax.command_line import EXIT_LOST
from bert_jax.train import watchdog
from bert_jax.train.watchdog import Activity, Watchdog, describe_behind

# Runs the command with a source that stands still before a step, as one on a hung file server does.
STALLING = """
import sys, threading
from bert_jax.data.phases import PhasedLoader

batch, stalled = PhasedLoader.batch, int(sys.argv[1])

def stall(loader, step, rows=None):
    if step == stalled and rows != slice(0, 1):
        threading.Event().wait()
    return batch(loader, step, rows)

PhasedLoader.batch = stall
sys.argv = ["bert-jax", *sys.argv[2:]]
from bert_jax import command_line
from bert_jax.commands import pretrain
command_line.run(lambda arguments: pretrain.main(arguments[1:]))
"""


def test_the_limit_is_the_timeout_or_twenty_median_steps_and_longer_work_has_its_own(monkeypatch):
    clock = iter(range(0, 10_000, 50))  # each look at the clock is 50 s after the one before
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: float(next(clock)))
    activity = Activity()
    activity.begin_step(0)
    assert activity.limit(600.0) == 600
    for step in (1, 2, 3):
        activity.begin_step(step)
    assert activity.limit(600.0) == 20 * 50
    with activity.during(watchdog.SAVING):
        assert activity.limit(600.0) == 3 * 600
    assert activity.doing == watchdog.TRAINING
    activity.begin_step(4)  # a save is no part of a step
    assert activity.limit(600.0) == 20 * 50


def test_only_a_run_is_watched_and_one_that_stands_still_ends(capfd, monkeypatch):
    activity, ended = Activity(), queue.Queue()
    monkeypatch.setattr(watchdog, "activity", activity)
    with Watchdog(1.0, lambda code, why: ended.put((code, why))):
        time.sleep(1.5)
        assert ended.empty()
        with activity.run():
            activity.begin_step(7)
            for _ in range(4):
                time.sleep(0.1)
                activity.begin_step(8)
            assert ended.empty()
            code, why = ended.get(timeout=60)
    assert code == EXIT_LOST and "the run stands still: training at step 8 has lasted" in why
    assert "test_watchdog.py" in capfd.readouterr().err  # the stacks


@pytest.mark.parametrize(
    ("activities", "behind"),
    [
        ({0: (8, "training"), 1: (7, "waiting for data")}, "behind at step 7: process 1 (waiting for data)"),
        ({0: (7, "training"), 1: (7, "saving")}, "behind at step 7: process 1 (saving)"),
        ({0: (7, "training"), 1: (7, "training")}, "all processes are at step 7, training"),
        ({1: (7, "training")}, "processes 0 report nothing"),
    ],
)
def test_the_process_that_others_wait_for_is_named(activities, behind):
    published = {process: {"step": step, "doing": doing} for process, (step, doing) in activities.items()}
    assert describe_behind(published, 2) == behind


@pytest.mark.slow
def test_a_stalled_source_ends_a_run_with_its_stacks(shards_dir, tmp_path):
    arguments = recipe(shards_dir, tmp_path / "run", "--stall_timeout=4")
    program = [sys.executable, "-c", STALLING, "6", "pretrain", *arguments]
    began = time.monotonic()
    ended = subprocess.run(program, cwd=ROOT, env=environment(1), capture_output=True, text=True, timeout=240)
    assert ended.returncode == EXIT_LOST and time.monotonic() - began < 120
    *stacks, last = ended.stderr.splitlines()
    assert re.match(r"error: the run stands still: waiting for data at step 6 has lasted \d+ s", last)
    assert any("in stall" in line for line in stacks)


@pytest.mark.slow
def test_of_two_processes_the_one_that_stalls_is_named(shards_dir, tmp_path: Path):
    several = recipe(shards_dir, tmp_path / "run", "--stall_timeout=4")
    programs = [[sys.executable, "-c", STALLING, step, "pretrain"] for step in ("-1", "6")]
    started = Started("pretrain", several, 2, 1, tmp_path, programs=programs)
    assert started.codes() == [EXIT_LOST, EXIT_LOST]
    for process in (0, 1):
        last = started.errors(process).splitlines()[-1]
        assert "the run stands still" in last and "behind at step 6: process 1 (waiting for data)" in last
    assert "in stall" in started.errors(1)
