"""The programs for trackers in docs/pretraining.md forward the lines of a run, here to a stand-in for each tracker."""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from website.code_blocks import code_blocks

PAGE = Path(__file__).parent.parent / "docs" / "pretraining.md"
FOLLOW, WANDB, MLFLOW = (
    block.code for block in code_blocks(PAGE.read_text(encoding="utf-8")) if block.language == "python"
)


def log(workdir: Path, *lines: dict[str, object], torn: int = 0) -> None:
    """Replaces the log of a run; its last line lacks `torn` characters."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (workdir / "metrics.jsonl").write_text(text[: len(text) - torn])


BEGUN = [{"step": step, "loss": 8.0 - step, "mfu": None} for step in (1, 2, 3)]
RESUMED = [{"step": step, "loss": 8.0 - step, "eval_loss": 9.0} for step in (2, 3, 4)]


def begin(workdir: Path) -> None:
    (workdir / "config.json").write_text('{"seed": 3}')


def log_two_steps(workdir: Path) -> None:
    log(workdir, *BEGUN, torn=6)


def resume_after_step_1(workdir: Path) -> None:
    log(workdir, BEGUN[0], *RESUMED)


def end(workdir: Path) -> None:
    (workdir / "result.json").write_text("{}")
    (workdir / "holder.json").unlink(missing_ok=True)


def continue_finished(workdir: Path) -> None:
    """The run is held again; its result is removed before its first step."""
    (workdir / "holder.json").write_text("{}")


def forget_result(workdir: Path) -> None:
    (workdir / "result.json").unlink()


STARTED = (begin, log_two_steps, resume_after_step_1, end)
CONTINUED = (
    *(begin, log_two_steps, end, continue_finished),
    *(forget_result, resume_after_step_1, end),
)


# The program is started at each moment of a run: before it, and, of a finished run, when that continues.
@pytest.fixture(params=[(STARTED, 0), (STARTED, 2), (CONTINUED, 4)], ids=["before", "during", "continued"])
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The workdir of a run that proceeds by one event whenever the program waits."""
    events, done = request.param
    folder = tmp_path / "base"
    folder.mkdir()
    for event in events[:done]:
        event(folder)
    left: list[Callable[[Path], None]] = list(events[done:])

    def run_on(seconds: float) -> None:
        if left:
            assert seconds > 0
            left.pop(0)(folder)

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
        log_dict=lambda values, file: sent.append((file, values)),
        log_metrics=lambda values, step: sent.append((step, values)),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # type: ignore[arg-type]
    exec(compile(MLFLOW, str(PAGE), "exec"), {})
    assert sent == ["bert_jax", "base", ("config.json", {"seed": 3}), *EXPECTED]
