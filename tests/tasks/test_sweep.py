"""The runs of a fine-tuning (seeds and rates), their results, and that killed ones resume bit for bit."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import test_finetune

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, EvalConfig, FinetuneConfig, ModelOptions, TaskConfig
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.tasks import measurement, named, registry, trials
from bert_jax.tasks.batches import TaskSource
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.trials import Trial
from bert_jax.train import metrics
from bert_jax.train.checkpoint import Checkpoints
from bert_jax.train.evaluation import Best, EarlyStop
from bert_jax.train.workdir import read_params, saved_steps, selected_step

start, reviews = test_finetune.start, test_finetune.reviews  # fixtures
TIMES = ("time", "tokens_per_second", "data_wait_share", "mfu", "peak_memory_gb")


@pytest.mark.parametrize(
    ("given", "seed", "found"),
    [((0,), 0, (0,)), ((1,), 0, (0,)), ((5,), 0, (0, 1, 2, 3, 4)), ((0, 1, 2), 0, (0, 1, 2)), ((7, 3), 5, (7, 3))]
    + [((0,), 42, (42,)), ((2,), 42, (42, 43))],
)
def test_one_number_is_the_count_of_seeds_and_several_are_the_seeds(given, seed, found):
    assert trials.seeds_of(FinetuneConfig(seeds=given, seed=seed)) == found


def test_flags_set_the_seeds_and_rates():
    recipe = str(test_finetune.ROOT / "configs" / "glue.py:task=rte")
    for flag, seeds in (("5", (0, 1, 2, 3, 4)), ("0,1,2", (0, 1, 2)), ("(3,4)", (3, 4))):
        given = [f"--config.seeds={flag}", "--config.learning_rates=2e-5,3e-5,5e-5"]
        config = config_lib.load(FinetuneConfig, config_lib.read_flags(recipe, given))
        assert trials.seeds_of(config) == seeds and trials.rates_of(config) == (2e-5, 3e-5, 5e-5)
        assert len(trials.trials_of(config)) == 3 * len(seeds)


def test_a_sweep_crosses_rates_and_seeds():
    config = FinetuneConfig(seeds=(2,), learning_rates="2e-5, 1e-4")
    assert trials.trials_of(config) == [
        Trial(0, 2e-5, "rate-2e-05/seed-0"),
        Trial(1, 2e-5, "rate-2e-05/seed-1"),
        Trial(0, 1e-4, "rate-0.0001/seed-0"),
        Trial(1, 1e-4, "rate-0.0001/seed-1"),
    ]
    assert trials.trials_of(FinetuneConfig(seeds=(2,)))[1] == Trial(1, 3e-5, "seed-1")
    one = trials.settings(config, trials.trials_of(config)[3], named.TASKS["rte"].task, 96, measured=True)
    assert (one.seed, one.optimizer.learning_rate, one.learning_rates) == (1, 1e-4, "")
    assert trials.trials_of(one) == [Trial(1, 1e-4)]  # config.json of a trial is that of the same run alone


def test_the_best_run_has_the_rate_with_the_best_mean():
    scores = {(0, 1.0): 0.9, (1, 1.0): 0.1, (0, 2.0): 0.6, (1, 2.0): 0.7, (0, 3.0): np.nan, (1, 3.0): 1.0}
    by_trial = {Trial(seed, rate, f"{rate}/{seed}"): {"f1": value} for (seed, rate), value in scores.items()}
    found = trials.result("mrpc", "f1", by_trial, dict.fromkeys(by_trial, 3), {"train": {"rows": 1}})
    assert found["best"] == {"seed": 1, "learning_rate": 2.0, "run": "2.0/1", "metric": "f1", "value": 0.7}
    assert (found["seeds"], found["steps"]) == ([0, 1], [3, 3])
    assert found["metrics"]["f1"]["mean"] == pytest.approx(0.65)
    assert found["metrics"]["f1"]["std"] == pytest.approx(np.std([0.6, 0.7], ddof=1))
    assert [each["metrics"]["f1"]["mean"] for each in found["learning_rates"]] == [0.5, pytest.approx(0.65), None]
    sweep, shown = trials.tables(found)
    assert shown.caption == f"another model: published figures of {registry.FIGURES['mrpc'].source}"
    assert [list(column.cells) for column in shown.columns][-1] == ["0.8900"]
    assert list(sweep.columns[1].cells) == ["0.5000", "0.6500", "-"]


def test_published_scores_have_known_tasks_and_metrics():
    for name, figures in registry.FIGURES.items():
        metrics = {metric.removeprefix("test_") for metric in figures.metrics}
        assert metrics <= set(named.TASKS[name].task.metrics), name


def test_published_scores_are_shown_of_the_task_that_was_measured_alone():
    """A user's own file, other training questions or another split have none."""
    trial = Trial(0, 1.0, "run")
    for name, cells in (("conll2003", ["0.9640", "0.9240"]), ("own", None), ("new_wiki", None)):
        (shown,) = trials.tables(trials.result(name, "f1", {trial: {"f1": 0.9, "test_f1": 0.8}}, {trial: 3}, {}))
        others = [list(column.cells) for column in shown.columns if column.header == "another model"]
        assert others == ([cells] if cells else []), name
        assert (shown.caption is None) == (cells is None)


def test_a_run_stops_after_several_evaluations_without_a_better_one():
    values = [0.5, 0.7, 0.7, 0.6, 0.8, float("nan"), 0.8, 0.1]
    stop = EarlyStop(3, Best("eval_f1", {}), {}, first=0)
    for number, value in enumerate(values, 1):
        assert not stop.stopped
        stop.note(10 * number, {"f1": value})
        stop = EarlyStop(3, Best("eval_f1", {}), json.loads(json.dumps(stop.state())), first=10 * number)  # a restart
    assert stop.stopped and (stop.step, stop.value, stop.evaluation) == (50, 0.8, {"f1": 0.8})
    # Up to step 20 the run had no early stopping, or used a metric that should rise.
    measured = {10: {"loss": 2.0}, 20: {"loss": 1.5, "f1": 0.1}, 25: {}, 30: {"loss": 0.1}}
    for before in ({}, {"metric": "eval_f1", "step": 10, "value": 0.9, "evaluation": {"f1": 0.9}, "waited": 1}):
        best = Best("eval_loss", {10: 2.0, 20: 1.5, 30: 0.1})
        lower = EarlyStop(1, best, before, first=25, evaluations=measured)
        assert not lower.stopped and best.values[10] == 2.0
        lower.note(30, {"loss": 1.6})
        assert (lower.step, lower.evaluation, lower.stopped) == (20, measured[20], True)
    error = EarlyStop(1, Best("eval_mse", {10: 9.0, 20: 4.0}), {}, first=20, evaluations={20: {"mse": 4.0}})
    error.note(30, {"mse": 16.0})
    assert (error.step, error.value, error.stopped) == (20, 4.0, True)


def test_early_stopping_needs_a_dev_file_and_follows_its_first_metric():
    config, task = FinetuneConfig(early_stop=2), named.TASKS["cola"].task
    with pytest.raises(UserError, match=r"early_stop=2, but there is no dev file .* --config\.task\.dev"):
        trials.settings(config, Trial(0, 1e-5), task, 96, measured=False)
    several, one = (FinetuneConfig(learning_rates=rates) for rates in ("1e-5,3e-5", "1e-5"))
    with pytest.raises(UserError, match="learning_rates=1e-5,3e-5, but there is no dev file to evaluate"):
        trials.settings(several, Trial(0, 1e-5), task, 96, measured=False)
    assert trials.settings(one, Trial(0, 1e-5), task, 96, measured=False).optimizer.learning_rate == 1e-5
    assert trials.settings(config, Trial(0, 1e-5), task, 96, measured=True).checkpoint.best == (
        "eval_matthews_correlation"
    )


def test_layouts_of_seeds_and_of_rates_do_not_share_a_workdir(tmp_path):
    (tmp_path / "rate-0.1" / "seed-0").mkdir(parents=True)
    (tmp_path / "rate-0.1" / "seed-0" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds runs of several learning rates"):
        trials.check_seeds(FinetuneConfig(seeds=(2,)), tmp_path)
    trials.check_seeds(FinetuneConfig(learning_rates="0.1"), tmp_path)


class Killed(Exception):
    """Simulates the end of the process."""


def log(workdir: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in TIMES} for line in metrics.read_metrics(workdir)]


def assert_equal(one: Path, other: Path) -> None:
    first, second = read_params(one), read_params(other)
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=path)


@pytest.fixture
def config(start, reviews):
    """Two seeds of eleven steps, with dropout of every kind, evaluated and saved often."""
    task = TaskConfig(train=reviews["train"], dev=reviews["dev"], text="review", text_pair="pair", label="stars")
    return test_finetune.config_of(
        start,
        task,
        seeds=(2,),
        steps=11,
        model=ModelOptions(dropout=0.1, attention_dropout=0.1),
        eval=EvalConfig(every_steps=3),
        checkpoint=CheckpointConfig(every_steps=4, keep=1),
        length_pool=32,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_seeds_that_are_killed_resume_bit_for_bit(config, tmp_path, monkeypatch):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = finetune(config, whole)
    assert result["seeds"] == [0, 1] and result["steps"] == [11, 11]
    losses = [[line["loss"] for line in log(whole / f"seed-{seed}")] for seed in range(2)]
    assert losses[0] != losses[1]
    assert_equal(whole, whole / result["best"]["run"])
    assert finetune(config, whole) == result

    batch, save = TaskSource.batch, Checkpoints.save

    def killed_before_step_7(self, step, rows=None):
        if step == 7:
            raise Killed
        return batch(self, step, rows)

    def killed_while_the_second_saves_step_8(self, step, *rest):
        if step == 8 and "seed-1" in str(self.directory):
            raise Killed
        return save(self, step, *rest)

    for target, name, patched in (
        (TaskSource, "batch", killed_before_step_7),
        (Checkpoints, "save", killed_while_the_second_saves_step_8),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, patched)
            with pytest.raises(Killed):
                finetune(config, killed)
    assert [max(saved_steps(killed / f"seed-{seed}")) for seed in range(2)] == [11, 4]
    assert finetune(config, killed) == result
    for seed in range(2):
        assert_equal(whole / f"seed-{seed}", killed / f"seed-{seed}")
        assert log(whole / f"seed-{seed}") == log(killed / f"seed-{seed}")


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_early_stopping_keeps_the_best_step_of_each_run(config, reviews, tmp_path):
    config = dataclasses.replace(
        config, early_stop=1, steps=24, eval=EvalConfig(every_steps=2), learning_rates="1e-3,2e-2"
    )
    both = tmp_path / "both"
    result = finetune(config, both)
    assert finetune(config, both) == result
    stopped = set()
    for trial in trials.trials_of(config):
        folder = both / trial.folder
        measured = {line["step"]: line["eval_accuracy"] for line in log(folder) if "eval_accuracy" in line}
        steps = sorted(measured)
        best = max(steps, key=lambda step: (measured[step], -step))
        assert selected_step(folder) == best
        assert steps[-1] == 24 or (steps[-2] == best and measured[steps[-1]] <= measured[best])
        stopped.add(steps[-1])
        found = measurement.evaluate(open_checkpoint(folder), reviews["dev"]).metrics
        assert found["accuracy"] == pytest.approx(measured[best])
    assert len(stopped) > 1
    assert open_checkpoint(both).step == selected_step(both / result["best"]["run"])
