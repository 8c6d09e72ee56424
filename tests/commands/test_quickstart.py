"""The quickstart: the commands it runs, what it records and what it refuses. CI runs it whole (make quickstart)."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from bert_jax.commands import quickstart
from bert_jax.commands.quickstart import RECORD, Plan, Stages
from bert_jax.errors import Stopped, UserError
from bert_jax.tasks.registry import resolve


def test_a_stage_is_recorded_when_it_succeeds_and_its_seconds_add_up(tmp_path: Path) -> None:
    stages = Stages(tmp_path / "out")
    for _ in range(2):
        with stages.stage("Sleep", "sleeps") as entry:
            time.sleep(0.06)
            entry["figures"] = "slept"
    with pytest.raises(UserError), stages.stage("Fail", "fails"):
        raise UserError("no")
    record = json.loads((tmp_path / "out" / RECORD).read_text(encoding="utf-8"))
    assert list(record["stages"]) == ["Sleep"]
    assert record["stages"]["Sleep"]["figures"] == "slept"
    assert record["stages"]["Sleep"]["seconds"] >= 0.1
    assert Stages(tmp_path / "out").record == record


def test_a_finished_output_and_any_other_folder_are_refused(tmp_path: Path) -> None:
    stages = Stages(tmp_path / "out")
    stages.record["finished"] = True
    stages.save()
    with pytest.raises(UserError, match=r"holds a finished quickstart .*rm -r"):
        quickstart.quickstart(tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(UserError, match="is not the output of a quickstart"):
        Stages(tmp_path / "mine")
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_command_is_printed_before_it_runs_and_its_failure_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stages = Stages(tmp_path / "out")
    stages.run("recipes", "bert_tiny")
    printed = capfd.readouterr().out
    assert printed.index("$ bert-jax recipes bert_tiny") < printed.index("--config bert_tiny --workdir")
    with pytest.raises(UserError, match=r"exit code 2 from: bert-jax recipes --nonsense"):
        stages.run("recipes", "--nonsense")


@pytest.fixture
def commands_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process that Python starts sleeps before it does anything."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(60)", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("commands_hang")
def test_a_command_is_killed_in_time(tmp_path: Path) -> None:
    stages = Stages(tmp_path / "out")
    started = time.monotonic()
    stages.run_and_kill("--version", when=lambda: time.monotonic() > started + 0.5)
    assert time.monotonic() < started + 30


def test_a_command_that_ends_before_it_is_killed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exit code 0 before it could be killed, from: bert-jax --version"):
        Stages(tmp_path / "out").run_and_kill("--version", when=lambda: False)


@pytest.mark.usefixtures("commands_hang")
def test_sigterm_stops_the_running_command(tmp_path: Path) -> None:
    stages, started = Stages(tmp_path / "out"), time.monotonic()
    earlier = signal.getsignal(signal.SIGTERM)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(Stopped, match="run the same command again"):
        stages.run("--version")
    assert time.monotonic() < started + 30
    assert signal.getsignal(signal.SIGTERM) is earlier


@pytest.mark.parametrize(
    ("log", "resumed"),
    [
        ([(10, 1.0), (20, 2.0), (30, 6.0), (40, 7.0)], True),
        ([(10, 6.0), (20, 7.0), (30, 8.0)], False),  # started from step 0
        ([(10, 1.0), (20, 2.0), (30, 3.0), (40, 7.0)], False),  # a step after the checkpoint was not trained again
        ([(10, 1.0), (20, 2.0)], False),  # no step after the checkpoint
    ],
)
def test_the_log_shows_whether_the_run_resumed_from_its_checkpoint(
    tmp_path: Path, log: list[tuple[int, float]], resumed: bool
) -> None:
    stages = Stages(tmp_path / "out")
    assert quickstart.check_resumed(stages) == "not killed"
    stages.record["killed"] = {"step": 30, "checkpoint": 20, "time": 5.0}
    workdir = tmp_path / "out" / "pretrained"
    workdir.mkdir()
    lines = [json.dumps({"step": step, "time": when}) for step, when in log]
    (workdir / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if resumed:
        assert quickstart.check_resumed(stages) == "killed at step 30, resumed from step 20"
    else:
        with pytest.raises(UserError, match="did not resume from its checkpoint at step 20"):
            quickstart.check_resumed(stages)


def test_a_model_no_better_than_frequencies_fails_the_quickstart(tmp_path: Path, shards_dir: Path) -> None:
    stages = Stages(tmp_path / "out")
    (tmp_path / "out" / "shards").symlink_to(shards_dir)
    (tmp_path / "out" / "pretrained").mkdir()
    result = {"eval_mlm_accuracy": 0.001, "eval_mlm_loss": 9.0, "eval_nsp_accuracy": 0.5}
    (tmp_path / "out" / "pretrained" / "result.json").write_text(json.dumps(result), encoding="utf-8")
    with pytest.raises(UserError, match=r"the model has learnt nothing: 0\.1% of the masked tokens correct"):
        quickstart.held_out(stages)


def test_the_task_that_scores_the_tagger_is_the_one_that_it_is_trained_on() -> None:
    task, files = resolve(quickstart.TAGS)
    assert (task.name, task.kind) == ("ewt", "tagging")
    assert {"train", "test"} <= files.keys()


def test_no_time_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--minutes is 0"):
        quickstart.main(["--output", str(tmp_path / "out"), "--budget_minutes", "0"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_stages_run_their_commands_with_a_kill_and_are_skipped_when_done(
    tmp_path: Path, sample_text: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("XLA_FLAGS")  # one device, as a user has it
    plan = Plan(text=str(sample_text), minutes=0.5, vocabulary=500, held_out=0.25, pairings=1)
    stages = Stages(tmp_path / "out")

    def run_all() -> None:
        quickstart.vocabulary(stages, plan)
        quickstart.shards(stages, plan)
        quickstart.pretraining(stages, plan)
        quickstart.exporting(stages)
        quickstart.filling(stages)

    run_all()
    assert "killed at step" in stages.record["stages"]["Pretraining"]["figures"]
    assert stages.record["killed"]["step"] > stages.record["killed"]["checkpoint"] > 0
    printed = capfd.readouterr().out
    assert printed.count("$ bert-jax pretrain") == 2 and "%" in printed.rpartition("tears in her")[2]
    run_all()
    printed = capfd.readouterr().out
    assert printed.count("already exists: ") == 4 and "$ bert-jax pretrain" not in printed
