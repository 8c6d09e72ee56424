"""Fine-tunes a checkpoint on a task, once for each seed, or for each setting of a sweep.

`finetune` prepares the runs (tasks/runs.py), trains and measures them (tasks/trials.py), and keeps the best.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import ml_collections

from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig
from bert_jax.errors import Stopped, UserError
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.storage.location import Location, location, write_json
from bert_jax.tasks import leaderboards, measurement, trials
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.rows import Split
from bert_jax.tasks.runs import Kept, prepare
from bert_jax.tasks.trials import Trial
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import distributed
from bert_jax.train.checkpoint import held_workdir
from bert_jax.train.prepare import check as check_run
from bert_jax.train.run import RESULT_FILE

# A sweep runs a fine-tuning for every setting, with all seeds, in a folder of its workdir. An interrupted sweep
# therefore resumes like any fine-tuning, setting by setting.

# Keys that a sweep cannot have, with the reason: their results do not compare, or a fine-tuning varies them itself.
REFUSED = {
    "sweep": "it is the sweep itself",
    "seed": "every setting has the same seeds; use config.seeds",
    "seeds": "every setting has the same seeds; use config.seeds",
    "checkpoint.best": "the settings are compared by one metric",
    **{
        f"task.{key}": "the settings are compared by one metric of one dev file"
        for key in ("name", "kind", "train", "dev", "test", "data_dir", "metrics", "positive", "submission")
    },
}

_NOT_IN_NAMES = re.compile(r"[^\w.+-]")  # characters that folder names do not have


class Setting(NamedTuple):
    """One setting in a sweep."""

    values: dict[str, Any]  # by key
    folder: str  # in the workdir
    config: FinetuneConfig


def sweep_settings(config: FinetuneConfig) -> list[Setting]:
    """Returns the settings of config.sweep, the first key varying slowest.

    Raises:
        UserError: A key is unknown or cannot be swept, a value has another type, or two settings are equal or have the
            same folder.
    """
    for key, choices in config.sweep.items():
        if key in REFUSED:
            raise UserError(f"config.sweep has the key {key}, which a sweep cannot have: {REFUSED[key]}")
        if not choices:
            raise UserError(f"config.sweep has no value for {key}. Give at least one")
    settings = []
    for combination in itertools.product(*config.sweep.values()):
        # The folder names the values, so that the same sweep finds its runs again.
        values = dict(zip(config.sweep, combination, strict=True))
        texts = (f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "") for value in combination)
        names = (f"{key}={_NOT_IN_NAMES.sub('_', text)}" for key, text in zip(values, texts, strict=True))
        setting = config_lib.change(config, {**values, "sweep": {}})
        settings.append(Setting(values, "sweep-" + ",".join(names), setting))
    for first, second in itertools.combinations(settings, 2):
        if first.config == second.config or first.folder == second.folder:
            same = "are equal. Omit one" if first.config == second.config else "have the same folder. Rename one"
            raise UserError(f"config.sweep has the settings {first.values} and {second.values}, which {same}")
    return settings


def check(
    config: FinetuneConfig,
    settings: Sequence[Setting],
    workdir: Location,
    tokenizer: Tokenizer | None = None,
    kept: Kept | None = None,
) -> None:
    """Checks all settings by preparing them as they will be prepared again; `kept` holds the data that they share.

    Raises:
        UserError: A setting cannot be trained, or there are several settings and no dev file.
    """
    trials.check_workdir(config, workdir)
    kept = kept or Kept()
    for setting in settings:
        start, data, runs = prepare(setting.config, workdir / setting.folder, tokenizer, lambda line: None, kept)
        # The trials of a setting differ only in seed and workdir, so the first one stands for all.
        check_run(next(iter(runs.values())))
        if len(settings) > 1:
            trials.check_measured("sweep", repr(config.sweep), "dev" in data.rows)
        # Otherwise they would be in memory while the next setting is prepared.
        del start, data, runs


def run_sweep(
    settings: Sequence[Setting],
    workdir: Location,
    run: Callable[[FinetuneConfig, Location], tuple[dict[str, Any], str, str]],
) -> dict[str, Any]:
    """Runs all settings, copies the best one to the workdir, and returns its result.json.

    Args:
        run: Fine-tunes a configuration in a folder; returns the result, the metric that selects, and the signal that
            arrived at the end.

    Returns:
        The result with the best mean over its seeds, with `best`, and all settings' figures under `sweep`.

    Raises:
        Stopped: SIGTERM arrived before the last setting.
    """
    results: list[dict[str, Any]] = []
    chosen_by = ""
    for setting in settings:
        result, chosen_by, stop = run(setting.config, workdir / setting.folder)
        results.append(result)
        if stop and setting is not settings[-1]:
            raise Stopped(f"{setting.folder} is complete, later ones are not; run the same command to resume", stop)
    means = [result["metrics"].get(chosen_by, {}).get("mean") for result in results]
    index = max(range(len(means)), key=lambda index: trials.score(means[index], chosen_by))
    best = settings[index]
    # The folder of a setting already holds the best of its seeds, so the seed of this trial does not matter.
    trials.keep_best(workdir, Trial(0, best.folder), averaged=best.config.optimizer.ema_decay > 0)
    result = results[index] | {
        "best": {"run": best.folder, "values": best.values, "metric": chosen_by, "value": means[index]},
        "sweep": [
            {"run": setting.folder, "values": setting.values, "metrics": result["metrics"], "steps": result["steps"]}
            for setting, result in zip(settings, results, strict=True)
        ],
    }
    if distributed.is_primary():
        write_json(workdir / RESULT_FILE, result)
    return result


def finetune(
    config: FinetuneConfig | ml_collections.ConfigDict,
    workdir: str | PurePath,
    tokenizer: Tokenizer | None = None,
    *,
    verbose: bool = False,
    recipe: str = "",
) -> dict[str, Any]:
    """Trains once for every seed, and for every setting of a sweep, and returns result.json.

    With one seed, WORKDIR is the run. With several seeds, the runs are in WORKDIR/seed-K, and WORKDIR also holds the
    best one by the dev metric trials.chosen_by (without a dev file, the first one). With config.sweep, the settings
    have such workdirs in WORKDIR/sweep-SETTING, and WORKDIR holds the best one; all settings are checked before the
    first one trains.

    Args:
        tokenizer: Required if init_from is empty, which trains config.model from scratch.
        verbose: Whether runs print their parameters.
        recipe: The recipe behind the configuration, for run.json.

    Returns:
        task: The task's name.
        start: {path, task} of the initial checkpoint; task is the one it was fine-tuned for, if any. None if training
            starts from scratch.
        seeds: The seeds.
        metrics: {name: {mean, std, values}}. Dev metrics have no prefix, others their split's name, such as `test_`.
            std is the sample standard deviation, None for one seed.
        steps: By seed, the step whose parameters are kept.
        counts: By split.
        baseline: {name, metrics}: the majority class, or the mean of numbers; None for other kinds.
        best: The best run, if there are several.
        sweep: All settings' figures, if there are several.

    Raises:
        UserError: The configuration, the files or the checkpoint have a mistake.
        Stopped: SIGTERM arrived.
    """
    config = config_lib.load(FinetuneConfig, config) if isinstance(config, ml_collections.ConfigDict) else config
    workdir = location(workdir)
    if not config.sweep:
        tuned = _finetune(config, workdir, tokenizer, verbose, recipe)
        _submit(config, workdir, tuned.splits)
        return tuned.result
    settings = sweep_settings(config)
    kept = Kept()
    # Before anything is trained.
    check(config, settings, workdir, tokenizer, kept)
    by_folder: dict[Location, dict[str, Split]] = {}

    def run(setting: FinetuneConfig, folder: Location) -> tuple[dict[str, Any], str, str]:
        tuned = _finetune(setting, folder, tokenizer, verbose, recipe, kept)
        # Splits take memory, and only a submission needs them.
        if config.task.submission:
            by_folder[folder] = tuned.splits
        return tuned.result, tuned.chosen_by, tuned.stop

    with held_workdir(workdir):
        result = run_sweep(settings, workdir, run)
        _submit(config, workdir, by_folder.get(workdir / result["best"]["run"], {}))
        return result


class _Tuned(NamedTuple):
    """A finished fine-tuning."""

    result: dict[str, Any]  # the content of result.json
    chosen_by: str  # the metric that selects
    stop: str  # the signal that arrived at the end, if any
    splits: dict[str, Split]


def _finetune(
    config: FinetuneConfig,
    workdir: Location,
    tokenizer: Tokenizer | None,
    verbose: bool,
    recipe: str,
    kept: Kept | None = None,
) -> _Tuned:
    start, data, runs = prepare(config, workdir, tokenizer, kept=kept)
    changes: dict[str, Any] = {"verbose": verbose, "recipe": recipe, "requested": config}
    runs = {trial: dataclasses.replace(run, **changes) for trial, run in runs.items()}
    # Held against other commands until the result is written.
    with held_workdir(workdir) as check_held:
        by_trial, steps, stop = trials.train(data.task, data.rows, runs)
        chosen_by = trials.chosen_by(config, data.task)
        origin = {"start": start.summary(), "baseline": measurement.baseline(data.task, data.rows)}
        result = trials.result(data.task.name, chosen_by, by_trial, steps, data.counts) | origin
        best = trials.best(by_trial, chosen_by)
        # Another process may have taken the workdir in the meantime.
        check_held()
        if best.folder:
            trials.keep_best(workdir, best, averaged=config.optimizer.ema_decay > 0)
        if distributed.is_primary():
            # Every trial gets the result that the same run alone would have.
            for trial, metrics in by_trial.items():
                own = trials.result(data.task.name, chosen_by, {trial: metrics}, steps, data.counts)
                write_json(workdir / trial.folder / RESULT_FILE, own | origin)
            write_json(workdir / RESULT_FILE, result)
    return _Tuned(result, chosen_by, stop, data.splits)


def _submit(config: FinetuneConfig, workdir: Location, splits: Mapping[str, Split]) -> None:
    """Writes the files of task.submission, if it is set, from the best run."""
    if config.task.submission:
        model = FineTuned(open_checkpoint(workdir), batch_size=config.batch_size)
        for path in leaderboards.submit(model, splits, config.task.submission):
            distributed.note(f"wrote the leaderboard submission {path}")
