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
from bert_jax.tasks import leaderboards, trials
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.rows import Split
from bert_jax.tasks.runs import Kept, prepare
from bert_jax.tasks.trials import Trial
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train import distributed
from bert_jax.train.checkpoint import held_workdir
from bert_jax.train.prepare import check as check_run
from bert_jax.train.run import RESULT_FILE

# A sweep over any configuration keys: its settings, their runs, and the result over all of them.
#
# Each setting is a fine-tuning of its own, with all seeds, in a folder of the sweep's workdir. An interrupted sweep
# therefore resumes like any fine-tuning, setting by setting.


# Keys whose values make results that do not compare, or that a fine-tuning crosses itself.
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

_NOT_IN_NAMES = re.compile(r"[^\w.+-]")  # characters of values that names of folders do not have

Values = dict[str, Any]  # by key


class Setting(NamedTuple):
    """One setting of a sweep: its values, its folder in the workdir, and the configuration of its fine-tuning."""

    values: Values
    folder: str
    config: FinetuneConfig


def settings_of(config: FinetuneConfig) -> list[Setting]:
    """The settings of config.sweep, the first key varying slowest.

    Raises UserError for an unknown key, one that a sweep cannot have, a value of another type, and two settings that
    are equal or have the same folder.
    """
    for key, choices in config.sweep.items():
        if key in REFUSED:
            raise UserError(f"config.sweep has the key {key}, which a sweep cannot have: {REFUSED[key]}")
        if not choices:
            raise UserError(f"config.sweep has no value for {key}. Give at least one")
    settings = []
    for combination in itertools.product(*config.sweep.values()):
        values = dict(zip(config.sweep, combination, strict=True))
        written = (f"{key}={_NOT_IN_NAMES.sub('_', _short(value))}" for key, value in values.items())
        setting = config_lib.change(config, {**values, "sweep": {}})
        settings.append(Setting(values, "sweep-" + ",".join(written), setting))
    for first, second in itertools.combinations(settings, 2):
        if first.config == second.config:
            raise UserError(
                f"config.sweep has the settings {first.values} and {second.values}, which are equal. Omit one"
            )
    if len({setting.folder for setting in settings}) < len(settings):
        raise UserError(f"config.sweep is {config.sweep}, whose values give two settings the same folder. Rename one")
    return settings


def _short(value: Any) -> str:
    """A value as the name of a folder has it."""
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")


def check(
    config: FinetuneConfig,
    settings: Sequence[Setting],
    workdir: Location,
    tokenizer: Tokenizer | None = None,
    kept: Kept | None = None,
) -> None:
    """Raises UserError for a setting that cannot be trained, and for several settings without a dev file.

    Each setting is prepared as it will be again, since what is wrong may depend on its files and its checkpoint; what
    settings share is `kept`.
    """
    trials.check_seeds(config, workdir)
    kept = kept or Kept()
    for setting in settings:
        start, data, runs = prepare(setting.config, workdir / setting.folder, tokenizer, lambda line: None, kept)
        check_run(next(iter(runs.values())))  # the trials of a setting differ only in seed, rate and workdir
        if len(settings) > 1:
            trials.check_measured("sweep", repr(config.sweep), "dev" in data.rows)
        del start, data, runs  # else they would be in memory while the next setting is prepared


def run_sweep(
    settings: Sequence[Setting],
    workdir: Location,
    one: Callable[[FinetuneConfig, Location], tuple[dict[str, Any], str, bool]],
) -> dict[str, Any]:
    """Runs all settings, copies the best to the workdir, and returns the content of its result.json.

    one(config, folder) is a fine-tuning: its result, the metric that selects, and whether SIGTERM arrived at the end.
    The result is that of the setting with the best mean over its seeds, with `best` and with the figures of every
    setting under `sweep`. Raises Stopped after SIGTERM, if other settings would follow.
    """
    by_setting: list[dict[str, Any]] = []
    chosen_by = ""
    for setting in settings:
        found, chosen_by, stop = one(setting.config, workdir / setting.folder)
        by_setting.append(found)
        if stop and setting is not settings[-1]:
            raise Stopped(f"SIGTERM: {setting.folder} is complete, later ones are not; run the same command to resume")
    scores = [trials.score(_mean(found, chosen_by), chosen_by) for found in by_setting]
    place = max(range(len(scores)), key=scores.__getitem__)
    best, found = settings[place], by_setting[place]
    trials.keep_best(workdir, Trial(0, best.folder), averaged=best.config.optimizer.ema_decay > 0)
    mean = _mean(found, chosen_by)
    result = found | {
        "best": {"run": best.folder, "values": best.values, "metric": chosen_by, "value": mean},
        "sweep": [
            {"run": setting.folder, "values": setting.values, "metrics": each["metrics"], "steps": each["steps"]}
            for setting, each in zip(settings, by_setting, strict=True)
        ],
    }
    if distributed.is_primary():
        write_json(workdir / RESULT_FILE, result)
    return result


def _mean(found: Mapping[str, Any], chosen_by: str) -> float | None:
    return found["metrics"].get(chosen_by, {}).get("mean")


def finetune(
    config: FinetuneConfig | ml_collections.ConfigDict,
    workdir: str | PurePath,
    tokenizer: Tokenizer | None = None,
    *,
    verbose: bool = False,
) -> dict[str, Any]:
    """Trains once for each seed, and returns the content of result.json.

    Its keys:
        task: the name of the task.
        start: {path, task} of the initial checkpoint; task is the one it was fine-tuned for, if any.
            None if training starts from scratch.
        seeds: the seeds.
        metrics: {name: {mean, std, values}}. Metrics of dev have no prefix, those of another
            labelled split have its name, such as `test_`. std is the sample standard deviation,
            None for one seed.
        steps: for each seed, the step of the parameters that are kept.
        counts: by split.
        best: the best run, if there are several.

    With one seed, WORKDIR is the run. With several seeds, each run is in WORKDIR/seed-K, and WORKDIR also holds the
    best run by the dev metric that trials.chosen_by names (the first run without a dev file). With config.sweep, each
    setting has such a workdir in WORKDIR/sweep-SETTING; WORKDIR holds the best one, and the result has the figures of
    all under `sweep`. All settings are checked before the first one trains. A `verbose` run prints its parameters. An
    empty init_from trains config.model from scratch and requires a tokenizer. Raises UserError for a mistake in the
    configuration, the files or the checkpoint, and Stopped after SIGTERM.
    """
    if isinstance(config, ml_collections.ConfigDict):
        config = config_lib.load(FinetuneConfig, config)
    workdir = location(workdir)
    if not config.sweep:
        tuned = _finetune(config, workdir, tokenizer, verbose)
        _submit(config, workdir, tuned.splits)
        return tuned.result
    settings = settings_of(config)
    kept = Kept()
    check(config, settings, workdir, tokenizer, kept)  # before anything is trained
    by_folder: dict[Location, dict[str, Split]] = {}

    def run(setting: FinetuneConfig, folder: Location) -> tuple[dict[str, Any], str, bool]:
        tuned = _finetune(setting, folder, tokenizer, verbose, kept)
        if config.task.submission:
            by_folder[folder] = tuned.splits
        return tuned.result, tuned.chosen_by, tuned.stop

    with held_workdir(workdir):
        result = run_sweep(settings, workdir, run)
        _submit(config, workdir, by_folder.get(workdir / result["best"]["run"], {}))
        return result


class _Tuned(NamedTuple):
    """A finished fine-tuning: the content of result.json, the metric that selects, whether SIGTERM arrived at the end,
    and the splits of its task."""

    result: dict[str, Any]
    chosen_by: str
    stop: bool
    splits: dict[str, Split]


def _finetune(
    config: FinetuneConfig,
    workdir: Location,
    tokenizer: Tokenizer | None,
    verbose: bool,
    kept: Kept | None = None,
) -> _Tuned:
    start, data, runs = prepare(config, workdir, tokenizer, kept=kept)
    runs = {trial: dataclasses.replace(run, verbose=verbose) for trial, run in runs.items()}
    with held_workdir(workdir) as check_held:
        by_trial, steps, stop = trials.train(data.task, data.rows, runs)
        chosen_by, origin = trials.chosen_by(config, data.task), {"start": start.summary()}
        result = trials.result(data.task.name, chosen_by, by_trial, steps, data.counts) | origin
        best = trials.best(by_trial, chosen_by)
        check_held()
        if best.folder:
            trials.keep_best(workdir, best, averaged=config.optimizer.ema_decay > 0)
        if distributed.is_primary():
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
