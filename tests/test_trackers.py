"""The programs of docs/trackers.md forward the lines of a run, here to a stand-in for each tracker."""

import contextlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from website.code_blocks import code_blocks

PAGE = Path(__file__).parent.parent / "docs" / "trackers.md"
FOLLOW, WANDB, MLFLOW = (block.code for block in code_blocks(PAGE.read_text(encoding="utf-8")))


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has logged two steps and a part of a third, and continues while the program waits."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"seed": 3}')
    begun = [json.dumps({"step": step, "loss": 8.0 - step, "mfu": None}) for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(begun)[:-5])

    def run_on(seconds: float) -> None:
        """The run stops, resumes after step 1, and ends."""
        if not (folder / "result.json").exists():
            assert seconds > 0
            resumed = [json.dumps({"step": step, "loss": 8.0 - step, "eval_loss": 9.0}) for step in (2, 3, 4)]
            (folder / "metrics.jsonl").write_text("\n".join([begun[0], *resumed]) + "\n")
            (folder / "result.json").write_text("{}")

    monkeypatch.setattr(time, "sleep", run_on)
    follow = ModuleType("follow")
    exec(compile(FOLLOW, str(PAGE), "exec"), vars(follow))
    monkeypatch.setitem(sys.modules, "follow", follow)
    monkeypatch.setattr(sys, "argv", ["forward.py", str(folder)])
    return folder


EXPECTED = [
    (1, {"loss": 7.0}),
    (2, {"loss": 6.0}),
    (3, {"loss": 5.0, "eval_loss": 9.0}),
    (4, {"loss": 4.0, "eval_loss": 9.0}),
]


def test_each_step_of_a_resumed_run_is_sent_to_wandb_once(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    run = SimpleNamespace(log=lambda values, step: sent.append((step, values)))
    fake = SimpleNamespace(init=lambda **given: (sent.append(given), contextlib.nullcontext(run))[1])
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    exec(compile(WANDB, str(PAGE), "exec"), {})
    assert sent == [{"project": "bert_jax", "name": "base", "config": {"seed": 3}}, *EXPECTED]


def test_each_step_of_a_resumed_run_is_sent_to_mlflow_once(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    fake = SimpleNamespace(
        set_experiment=sent.append,
        start_run=lambda run_name: contextlib.nullcontext(sent.append(run_name)),
        log_artifact=sent.append,
        log_metrics=lambda values, step: sent.append((step, values)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # type: ignore[arg-type]
    exec(compile(MLFLOW, str(PAGE), "exec"), {})
    assert sent == ["bert_jax", "base", str(workdir / "config.json"), *EXPECTED]
