"""Seeds, learning rates and settings: what is refused, their results, and that killed runs resume bit for bit."""

import dataclasses
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_finetuning
from tiny_finetuning import config_of, write_nli
from tiny_runs import ROOT

from bert_jax import config as config_lib
from bert_jax.config import (
    AutoTaskConfig,
    CheckpointConfig,
    DistillConfig,
    EvalConfig,
    FinetuneConfig,
    LoraConfig,
    ModelOptions,
)
from bert_jax.errors import Stopped, UserError
from bert_jax.interop import initial
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.tasks import finetuning, measurement, named, registry, runs, trials
from bert_jax.tasks.batches import TaskSource
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.rows import Split
from bert_jax.tasks.runs import prepare
from bert_jax.tasks.task import Task
from bert_jax.tasks.trials import Trial
from bert_jax.train import loop, metrics
from bert_jax.train.checkpoint import Checkpoints
from bert_jax.train.evaluation import Best, EarlyStop
from bert_jax.train.run import Result, Run
from bert_jax.train.workdir import read_params, saved_steps, selected_step

start, reviews = tiny_finetuning.start, tiny_finetuning.reviews  # fixtures


@pytest.mark.parametrize(
    ("given", "seed", "found"),
    [(1, 0, (0,)), (5, 0, (0, 1, 2, 3, 4)), ((0, 1, 2), 0, (0, 1, 2)), ((7, 3), 5, (7, 3)), ((7,), 0, (7,))]
    + [(1, 42, (42,)), (2, 42, (42, 43))],
)
def test_one_number_is_the_count_of_seeds_and_a_tuple_has_the_seeds(given, seed, found):
    config = FinetuneConfig(seeds=given, seed=seed)
    assert tuple(trial.seed for trial in trials.list_trials(config)) == found


def test_flags_set_the_seeds():
    recipe = str(ROOT / "configs" / "glue.py:task=rte")
    for flag, seeds in (("5", (0, 1, 2, 3, 4)), ("0,1,2", (0, 1, 2)), ("(3,4)", (3, 4))):
        config = config_lib.from_flags(FinetuneConfig, recipe, [f"--config.seeds={flag}"])
        assert tuple(trial.seed for trial in trials.list_trials(config)) == seeds


def test_config_json_of_a_trial_is_that_of_the_same_run_alone():
    config = FinetuneConfig(seeds=2)
    assert trials.list_trials(config) == [Trial(0, "seed-0"), Trial(1, "seed-1")]
    one = trials.settings(config, trials.list_trials(config)[1], named.TASKS["rte"].task, 96, measured=True)
    assert trials.list_trials(one) == [Trial(1)]


def test_the_best_run_has_the_best_value():
    by_trial = {Trial(seed, f"seed-{seed}"): {"f1": value} for seed, value in enumerate((0.6, 0.7, np.nan))}
    found = trials.result("mrpc", "f1", by_trial, dict.fromkeys(by_trial, 3), {"train": {"rows": 1}})
    assert found["best"] == {"seed": 1, "run": "seed-1", "metric": "f1", "value": 0.7}
    assert (found["seeds"], found["steps"], found["metrics"]["f1"]["mean"]) == ([0, 1, 2], [3, 3, 3], None)
    known = dict(list(by_trial.items())[:2])
    statistics = trials.result("mrpc", "f1", known, dict.fromkeys(known, 3), {})["metrics"]["f1"]
    assert statistics["mean"] == pytest.approx(0.65) and statistics["std"] == pytest.approx(np.std([0.6, 0.7], ddof=1))
    shown = trials.table(found)
    assert shown.caption == f"another model: published figures of {registry.FIGURES['mrpc'].source}"
    assert [list(column.cells) for column in shown.columns][-1] == ["0.8900"]


def test_published_scores_have_known_tasks_and_metrics():
    for name, figures in registry.FIGURES.items():
        metrics = {metric.removeprefix("test_") for metric in figures.metrics}
        assert metrics <= set(named.TASKS[name].task.metrics), name


def test_published_scores_are_shown_of_the_task_that_was_measured_alone():
    """A user's own file, other training questions or another split have none."""
    trial = Trial(0, "run")
    for name, cells in (("conll2003", ["0.9640", "0.9240"]), ("own", None), ("new_wiki", None)):
        shown = trials.table(trials.result(name, "f1", {trial: {"f1": 0.9, "test_f1": 0.8}}, {trial: 3}, {}))
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
        trials.settings(config, Trial(0), task, 96, measured=False)
    assert trials.settings(config, Trial(0), task, 96, measured=True).checkpoint.best == "eval_matthews_correlation"


class Killed(Exception):
    """Simulates the end of the process."""


def log(workdir: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in metrics.TIMED} for line in metrics.read_metrics(workdir)]


def assert_equal(one: Path, other: Path) -> None:
    first, second = read_params(one), read_params(other)
    for path, value in first.items():
        np.testing.assert_array_equal(value, second[path], err_msg=path)


@pytest.fixture
def config(start, reviews):
    """Two seeds of eleven steps, with dropout of every kind, evaluated and saved often."""
    task = AutoTaskConfig(train=reviews["train"], dev=reviews["dev"], text="review", text_pair="pair", label="stars")
    return config_of(
        start,
        task,
        seeds=2,
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
    sweep = {"optimizer.learning_rate": (1e-3, 2e-2)}
    # With this schedule one of the two runs stops later than the other.
    optimizer = dataclasses.replace(
        config.optimizer, schedule=dataclasses.replace(config.optimizer.schedule, from_start=True)
    )
    config = dataclasses.replace(
        config, early_stop=3, steps=24, eval=EvalConfig(every_steps=2), sweep=sweep, optimizer=optimizer
    )
    both = tmp_path / "both"
    result = finetune(config, both)
    assert finetune(config, both) == result
    stopped = set()
    for setting in finetuning.sweep_settings(config):
        folder = both / setting.folder
        measured = {line["step"]: line["eval_accuracy"] for line in log(folder) if "eval_accuracy" in line}
        steps = sorted(measured)
        best = max(steps, key=lambda step: (measured[step], -step))
        assert selected_step(folder) == best
        assert steps[-1] == 24 or (steps[-4] == best and all(measured[step] <= measured[best] for step in steps[-3:]))
        stopped.add(steps[-1])
        found = measurement.evaluate(open_checkpoint(folder), reviews["dev"]).metrics
        assert found["accuracy"] == pytest.approx(measured[best])
    assert len(stopped) > 1
    assert open_checkpoint(both).step == selected_step(both / result["best"]["run"])


def test_a_flag_gives_every_combination_of_typed_values():
    recipe = str(ROOT / "configs" / "glue.py:task=rte")
    flag = "--config.sweep={optimizer.learning_rate: (1e-5, 3e-5), batch_size: (16, 32), task.layer_mix: true}"
    config = config_lib.from_flags(FinetuneConfig, recipe, [flag])
    found = finetuning.sweep_settings(config)
    wanted = [(1e-5, 16), (1e-5, 32), (3e-5, 16), (3e-5, 32)]
    assert [(one.config.optimizer.learning_rate, one.config.batch_size) for one in found] == wanted
    assert all(one.config.task.layer_mix is True and one.config.sweep == {} for one in found)
    assert found[1].folder == "sweep-optimizer.learning_rate=1e-05,batch_size=32,task.layer_mix=True"
    same = dataclasses.replace(found[1].config, optimizer=config.optimizer, batch_size=config.batch_size)
    assert dataclasses.replace(same, task=config.task) == dataclasses.replace(config, sweep={})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": (16, 16)}, r"the settings .* and .*, which are equal\. Omit one"),
        ({"batch_size": ()}, "config.sweep has no value for batch_size"),
        ({"batch_sise": (16, 32)}, "unknown key config.batch_sise; did you mean config.batch_size"),
        ({"mesh": (16, 32)}, "config.mesh is 16, but has keys of its own"),
        ({"batch_size.x": (16,)}, "unknown key config.batch_size.x; config.batch_size is a single value"),
        ({"init_layers": ((0, "x"),)}, r"config\.init_layers is \(0, 'x'\)\. Give a value of type tuple"),
        ({"batch_size": (16, "many")}, "config.batch_size is 'many'. Give a value of type int"),
        ({"task.layer_mix": ("maybe",)}, "config.task.layer_mix is 'maybe'. Give a value of type bool"),
        ({"seeds": (1, 2)}, "a sweep cannot have: every setting has the same seeds"),
        ({"task.metrics": ("f1", "accuracy")}, "the settings are compared by one metric"),
        ({"init_from": ("a/b", "a_b")}, "have the same folder. Rename one"),
    ],
)
def test_what_is_no_sweep_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        finetuning.sweep_settings(FinetuneConfig(sweep=given))


def test_values_may_be_of_any_type():
    sweep = {"init_layers": ((0, 2, 4), (1, 3)), "optimizer.rates": ({"encoder": 0.5, "head": 2}, {})}
    found = finetuning.sweep_settings(FinetuneConfig(init_from="base", sweep=sweep))
    assert [one.config.init_layers for one in found] == [(0, 2, 4), (0, 2, 4), (1, 3), (1, 3)]
    assert [one.config.optimizer.rates for one in found[:2]] == [{"encoder": 0.5, "head": 2.0}, {}]
    assert found[0].folder == "sweep-init_layers=_0_2_4_,optimizer.rates=__encoder__0.5__head__2_"


@pytest.mark.parametrize(
    ("base", "given"), [({"targets": "query"}, {"lora.rank": (4, 8)}), ({"rank": 8}, {"init_from": ("a", "b")})]
)
def test_a_sweep_may_set_what_other_keys_of_adapters_need(base, given):
    config = FinetuneConfig(init_from="" if "rank" in base else "start", lora=LoraConfig(**base), sweep=given)
    assert len(finetuning.sweep_settings(config)) == 2
    with pytest.raises(UserError, match=r"lora\.rank is 0|init_from is not set"):
        dataclasses.replace(config, sweep={})


@pytest.mark.parametrize(
    ("base", "given"),
    [
        ({"layers": "uniform", "hidden_loss": "mse"}, {"distill.hidden_weight": (1, 2)}),
        ({"soft_weight": 0.0}, {"distill.hidden_weight": (1, 2)}),
        ({"hidden_weight": 1.0, "soft_weight": 0.0, "temperature": 3.0}, {"distill.soft_weight": (0.5, 1)}),
    ],
)
def test_a_sweep_may_set_the_weight_that_other_keys_of_distillation_need(base, given):
    config = FinetuneConfig(distill=DistillConfig(teacher="T", **base), sweep=given)
    found = finetuning.sweep_settings(config)
    assert len(found) == 2
    for setting in found:
        setting.config.distill.check_unused()
    with pytest.raises(UserError, match=r"no effect|nothing is learned"):
        config.distill.check_unused()


def test_a_workdir_of_other_runs_is_refused(tmp_path):
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds runs of several seeds\. Name another --workdir for a sweep"):
        trials.check_workdir(FinetuneConfig(sweep={"batch_size": (16,)}), tmp_path)
    (tmp_path / "sweep-batch_size=16").mkdir()
    with pytest.raises(UserError, match=r"holds a sweep\. Name another --workdir for runs of several seeds"):
        trials.check_workdir(FinetuneConfig(seeds=2), tmp_path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"task.pooling": ("cls", "maen")}, "unknown task.pooling 'maen'"),
        ({"task.max_length": (32, 4)}, "task.max_length is 4"),
        ({"task.label_smoothing": (0.1, 1.5)}, "task.label_smoothing is 1.5"),
        ({"task.class_weights": ("balanced", "y3")}, "task.class_weights is 'y3'; use balanced"),
        ({"init_from": ("{start}", "missing")}, "no checkpoint at missing"),
        ({"train_layers": ("all", "lst:2")}, "train_layers is 'lst:2'"),
        ({"optimizer": ("adamw", "adamx")}, "adamx"),
        ({"checkpoint.keep": (2, -1)}, "checkpoint.keep is -1"),
    ],
)
def test_a_mistake_in_a_later_setting_is_found_before_the_first_one_trains(
    start, reviews, tmp_path, monkeypatch, given, said
):
    monkeypatch.setattr(trials, "train", lambda *arguments: pytest.fail("a setting was trained"))
    columns = {"text": "review", "text_pair": "pair", "label": "stars", "max_length": 32}
    task = AutoTaskConfig(train=reviews["train"], dev=reviews["dev"], **columns)
    config = config_of(
        start,
        task,
        seeds=2,
        sweep={
            key: tuple(str(start) if value == "{start}" else value for value in values) for key, values in given.items()
        },
    )
    with pytest.raises(UserError, match=said):
        finetune(config, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("given", "reads", "opens"),
    [
        ({"optimizer.learning_rate": (1e-5, 2e-5, 3e-5)}, 2, 1),
        pytest.param({"task.max_length": (16, 32)}, 8, 1, marks=pytest.mark.slow),
        ({"init_average": ("last:2", "ema")}, 2, 4),
    ],
)
def test_settings_share_files_and_checkpoint_and_only_those_of_one_are_in_memory(
    start, reviews, tmp_path, monkeypatch, capsys, given, reads, opens
):
    read, open_initial = registry.read, initial.open_initial
    splits: list[weakref.ref[Split]] = []
    opened: list[str] = []

    def read_alone(task: Task, path: Path, label_required: bool = True) -> Split:
        gc.collect()
        assert path.name != Path(reviews["train"]).name or not any(split() for split in splits)
        found = read(task, path, label_required)
        splits.append(weakref.ref(found))
        return found

    def open_counted(config: FinetuneConfig) -> LoadedModel | None:
        opened.append(config.init_from)
        return open_initial(dataclasses.replace(config, init_average=""))

    def train(task: Task, rows: dict, runs: dict) -> tuple[dict, dict, bool]:
        return {trial: {"accuracy": 0.5} for trial in runs}, dict.fromkeys(runs, 1), ""

    monkeypatch.setattr(registry, "read", read_alone)
    monkeypatch.setattr(runs, "open_initial", open_counted)
    monkeypatch.setattr(trials, "train", train)
    monkeypatch.setattr(trials, "keep_best", lambda *arguments, **options: None)
    task = AutoTaskConfig(train=reviews["train"], dev=reviews["dev"], text="review", text_pair="pair", label="stars")
    config = config_of(start, task, sweep=given)
    settings = len(finetune(config, tmp_path / "sweep")["sweep"])
    assert (len(splits), len(opened)) == (reads, opens)
    assert capsys.readouterr().err.count("initialized randomly") == settings  # each reports it as it trains


def test_several_settings_need_a_dev_file(start, reviews, tmp_path):
    task = AutoTaskConfig(train=reviews["train"], text="review", text_pair="pair", label="stars", dev_share=0.0)
    config = config_of(start, task, sweep={"batch_size": (16, 32)})
    with pytest.raises(UserError, match=r"sweep=\{'batch_size': \(16, 32\)\}, but there is no dev file to evaluate"):
        finetune(config, tmp_path / "sweep")


def test_the_best_setting_has_the_best_mean_of_the_selecting_metric(tmp_path, monkeypatch):
    kept: list[str] = []
    monkeypatch.setattr(trials, "keep_best", lambda workdir, trial, averaged: kept.append(trial.folder))
    values = {16: [0.5, 0.9], 32: [0.8, 0.8], 64: [1.0, float("nan")]}

    stops_after = 0

    def one(config: FinetuneConfig, folder: Path) -> tuple[dict[str, Any], str, bool]:
        metrics = trials.summary([{"f1": value} for value in values[config.batch_size]])
        found = {"task": "own", "seeds": [0, 1], "metrics": metrics, "steps": [1, 1], "counts": {}}
        return found, "f1", "SIGTERM" if config.batch_size == stops_after else ""

    settings = finetuning.sweep_settings(FinetuneConfig(sweep={"batch_size": (16, 32, 64)}))
    found = finetuning.run_sweep(settings, tmp_path, one)
    assert kept == ["sweep-batch_size=32"] and found == json.loads((tmp_path / "result.json").read_text())
    best = {"run": "sweep-batch_size=32", "values": {"batch_size": 32}, "metric": "f1", "value": pytest.approx(0.8)}
    assert found["best"] == best
    assert found["metrics"]["f1"]["values"] == [0.8, 0.8] and len(found["sweep"]) == 3
    columns = [list(column.cells) for column in trials.comparison(found).columns]
    assert columns[:2] == [["16", "32", "64"], ["0.7000", "0.8000", "-"]]
    stops_after = 64  # SIGTERM at the end of the last setting
    assert finetuning.run_sweep(settings, tmp_path, one) == found
    stops_after = 32
    with pytest.raises(Stopped, match="sweep-batch_size=32 is complete, later ones are not; run the same command"):
        finetuning.run_sweep(settings, tmp_path, one)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_an_interrupted_sweep_resumes_and_opens_as_its_best_setting(start, reviews, tmp_path, monkeypatch):
    task = AutoTaskConfig(train=reviews["train"], dev=reviews["dev"], text="review", text_pair="pair", label="stars")
    given = {"optimizer.learning_rate": (1e-6, 5e-3), "task.pooling": ("mean",)}
    best = CheckpointConfig(best="eval_task_loss")  # of a few steps, the loss distinguishes the rates
    config = config_of(start, task, sweep=given, checkpoint=best)
    fits, original = [], loop.fit

    def fit(run: Run) -> Result:
        fits.append(run.workdir.name)
        if len(fits) == 2:
            raise KeyboardInterrupt
        return original(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "fit", fit)
        with pytest.raises(KeyboardInterrupt):
            finetune(config, tmp_path / "sweep")
    assert not (tmp_path / "sweep" / "result.json").exists()
    result = finetune(config, tmp_path / "sweep")
    alone = dataclasses.replace(config, sweep={}, task=dataclasses.replace(task, pooling="mean", max_length=32))
    same = finetune(alone, tmp_path / "alone")
    assert result["best"]["values"] == {"optimizer.learning_rate": 5e-3, "task.pooling": "mean"}
    assert result["metrics"] == same["metrics"] == result["sweep"][1]["metrics"]
    for path, value in read_params(tmp_path / "alone").items():
        np.testing.assert_array_equal(value, read_params(tmp_path / "sweep")[path])
    found = measurement.evaluate(open_checkpoint(tmp_path / "sweep"), reviews["dev"]).metrics
    assert found["accuracy"] == pytest.approx(result["metrics"]["accuracy"]["mean"])


@pytest.mark.slow
def test_the_last_layers_and_the_pooler_begin_as_in_a_run_from_scratch(start, reviews, tmp_path):
    task = AutoTaskConfig(train=reviews["train"], text="review", text_pair="pair", label="stars")
    config = config_of(start, task, seeds=2, reinit_layers=1)
    loaded, (_, _, runs) = open_checkpoint(start).params, prepare(config, tmp_path)
    tops = []
    for trial, run in runs.items():
        scratch = layers.flatten(run.objective.init(run.model, jax.random.key(trial.seed)))
        assert not any(path.startswith("pooler/") for path in run.initial_params)
        for path, value in run.initial_params.items():
            if path.startswith("encoder/layers/"):
                np.testing.assert_array_equal(value[:-1], loaded[path][:-1])
                np.testing.assert_allclose(value[-1:], scratch[path][-1:], atol=1e-7)
            else:
                np.testing.assert_array_equal(value, loaded[path])
        tops.append(run.initial_params["encoder/layers/attention/qkv/kernel"][-1])
    assert (tops[0] != tops[1]).any()  # each seed has its own


def test_labels_of_dev_are_those_of_train_in_another_case(start, tmp_path):
    for name, labels in (("train", ("Yes", "No")), ("dev", ("no", "YES"))):
        (tmp_path / f"{name}.tsv").write_text("text\tlabel\n" + "".join(f"fine\t{label}\n" for label in labels))
    files = {name: str(tmp_path / f"{name}.tsv") for name in ("train", "dev")}
    task = AutoTaskConfig(**files, text="text", label="label")
    _, data, _ = prepare(config_of(start, task), tmp_path / "run")
    assert data.task.labels == ("No", "Yes")
    assert [item.label for item in data.splits["dev"].items] == ["No", "Yes"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reinit_layers": 9}, r"reinit_layers is 9, but the model has 2 layers\. Use 1 to 1"),
        ({"reinit_layers": -1}, r"reinit_layers is -1, but the model has 2 layers\. Use 1 to 1"),
        ({"reinit_layers": 1, "train_layers": "head"}, "train_layers=head does not train all of these layers"),
        ({"reinit_layers": 1, "train_layers": "gradual"}, "train_layers=gradual does not train all of these layers"),
    ],
)
def test_layers_that_cannot_be_initialized_are_refused(start, reviews, tmp_path, changes, said):
    task = AutoTaskConfig(train=reviews["train"], text="review", text_pair="pair", label="stars")
    with pytest.raises(UserError, match=said):
        prepare(config_of(start, task, **changes), tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_sweep_submits_once_by_its_best_setting(start, tmp_path, monkeypatch):
    write_nli(tmp_path / "glue")
    task = AutoTaskConfig(name="mnli", data_dir=str(tmp_path), submission=str(tmp_path / "leaderboard"))
    config = config_of(start, task, steps=1, sweep={"optimizer.learning_rate": (1e-3, 1e-9)})
    opened = []

    def open_best(folder: Path) -> LoadedModel:
        opened.append(folder)
        return open_checkpoint(folder)

    monkeypatch.setattr("bert_jax.tasks.finetuning.open_checkpoint", open_best)
    finetune(config, tmp_path / "sweep")
    assert opened == [tmp_path / "sweep"]
    assert {path.name for path in (tmp_path / "leaderboard").iterdir()} == {"MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"}
