"""The trials of one fine-tuning, one for each seed and learning rate, and their configurations."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.config import FinetuneConfig
from bert_jax.config.training import SEEDS
from bert_jax.storage.location import Location
from bert_jax.tasks.kinds.tagging import TaggingTask
from bert_jax.tasks.task import Task
from bert_jax.train import rules
from bert_jax.train.held_out import PREFIX

# Fine-tuning with run_classifier.py of google-research/bert warms up over a tenth of the steps (--warmup_proportion).
WARMUP_SHARE = 0.1
MOST_SEEDS = 100  # a larger number of seeds is more likely meant as a seed
CRF_PATH = "^crf/"
_WHERE = ("config.json", "seed-*/config.json", "rate-*/seed-*/config.json", "sweep-*")


@dataclass(frozen=True)
class Trial:
    """One run: its seed, its peak learning rate, and its folder in the workdir (empty: the workdir itself)."""

    seed: int
    learning_rate: float
    folder: str = ""


def trials_of(config: FinetuneConfig) -> list[Trial]:
    """The trials of a configuration, grouped by learning rate. Raises UserError for invalid or repeated values."""
    seeds, rates = seeds_of(config), rates_of(config)
    if not rates:
        rate = config.optimizer.learning_rate
        return [Trial(seed, rate, f"seed-{seed}" if len(seeds) > 1 else "") for seed in seeds]
    return [Trial(seed, rate, f"rate-{rate:g}/seed-{seed}") for rate in rates for seed in seeds]


def seeds_of(config: FinetuneConfig) -> tuple[int, ...]:
    """The seeds of a configuration: config.seeds, or as many seeds from config.seed as its single number (0: one)."""
    given = config.seeds
    if not given or len(set(given)) < len(given) or not all(0 <= seed < SEEDS for seed in given):
        raise UserError(
            f"seeds is {given}; give the number of seeds, such as --config.seeds=5, or several different seeds from 0 "
            f"to {SEEDS - 1}, such as --config.seeds=0,1,2"
        )
    if len(given) > 1:
        return given
    if given[0] > MOST_SEEDS:
        raise UserError(
            f"seeds is {given[0]}, but the number of seeds is at most {MOST_SEEDS}; "
            f"to train with this seed, use --config.seed={given[0]}"
        )
    return tuple(range(config.seed, config.seed + max(given[0], 1)))


def rates_of(config: FinetuneConfig) -> tuple[float, ...]:
    """The peak learning rates of a sweep; empty if only optimizer.learning_rate is used."""
    if not config.learning_rates:
        return ()
    try:
        rates = tuple(float(rate) for rate in config.learning_rates.split(","))
    except ValueError:
        rates = ()
    if not rates or len(set(rates)) < len(rates) or not all(0 < rate < math.inf for rate in rates):
        raise UserError(
            f"learning_rates is {config.learning_rates!r}; give different numbers above 0, such as "
            '--config.learning_rates="2e-5,3e-5,5e-5"'
        )
    return rates


def check(config: FinetuneConfig, workdir: Location) -> None:
    """Raises UserError for keys out of range, and for a workdir that holds another kind of trials."""
    found = [] if config.sweep else trials_of(config)
    if config.early_stop < 0:
        raise UserError(f"early_stop is {config.early_stop}; use a number of evaluations, 0 to train to the end")
    kinds = ("a run of one seed", "runs of several seeds", "runs of several learning rates", "a sweep")
    wanted = len(Path(found[0].folder).parts) if found else 3
    # The last kind that is there decides, because WORKDIR/config.json may also be that of the best of several runs.
    present = next((kind for kind in (3, 2, 1, 0) if any(workdir.glob(_WHERE[kind]))), wanted)
    if present != wanted:
        others = ("", ", or give all of their seeds", ", or give all of their learning_rates", ", or give the sweep")[
            present
        ]
        raise UserError(f"{workdir} holds {kinds[present]}. Name another --workdir for {kinds[wanted]}{others}")


def chosen_by(config: FinetuneConfig, task: Task) -> str:
    """The dev metric that selects seed and rate: checkpoint.best, or the task's first.

    With early_stop it also selects the step of a run, which otherwise is the last one.
    """
    return config.checkpoint.best.removeprefix(PREFIX) or task.metrics[0]


def settings(config: FinetuneConfig, trial: Trial, task: Task, rows: int, measured: bool) -> FinetuneConfig:
    """The configuration of a trial, as if it were run alone, with its length, warmup and evaluation given in steps.

    rows is the number of rows of the training file; measured is whether there is a dev file. Raises UserError for
    early_stop or several learning rates without a dev file.
    """
    if config.early_stop:
        check_measured("early_stop", config.early_stop, measured)
    if len(rates_of(config)) > 1:
        check_measured("learning_rates", config.learning_rates, measured)
    epoch = math.ceil(rows / config.batch_size)
    length = config.steps or math.ceil(rows * config.epochs / config.batch_size)
    warmup, share = config.optimizer.warmup_steps, config.optimizer.warmup_share
    if warmup < 0:
        if share <= 0 and config.budget_minutes > 0:  # the number of steps is not known in advance
            share = WARMUP_SHARE
        warmup = 0 if share > 0 else math.ceil(WARMUP_SHARE * length)
    best = config.checkpoint.best or (PREFIX + chosen_by(config, task) if config.early_stop else "")
    return dataclasses.replace(
        config,
        seed=trial.seed,
        seeds=(0,),
        learning_rates="",
        steps=config.steps if config.budget_minutes > 0 else length,
        optimizer=dataclasses.replace(
            config.optimizer,
            warmup_steps=warmup,
            warmup_share=share,
            learning_rate=trial.learning_rate,
            rates=_rates(config.optimizer.rates, task),
        ),
        eval=dataclasses.replace(config.eval, every_steps=config.eval.every_steps or epoch),
        checkpoint=dataclasses.replace(config.checkpoint, best=best),
    )


def check_measured(key: str, value: Any, measured: bool) -> None:
    """Raises UserError for a key that compares evaluations, without a dev file."""
    if not measured:
        raise UserError(
            f"{key}={value}, but there is no dev file to evaluate. Name one with --config.task.dev, or omit {key}"
        )


def _rates(given: str, task: Task) -> str:
    """optimizer.rates with the rate of a CRF (task.crf_rate), unless it has one already."""
    rule = f"{CRF_PATH}={task.crf_rate:g}" if isinstance(task, TaggingTask) and task.crf else ""
    return ";".join(filter(None, (given, rule if CRF_PATH not in given else "")))


def unfreeze_every(config: FinetuneConfig, rows: int) -> int:
    """The number of steps between unfreezing one layer and the next with train_layers=gradual; otherwise 0."""
    epochs = rules.gradual_epochs(config.train_layers)
    return 0 if epochs is None else max(1, round(epochs * rows / config.batch_size))


def never_unfrozen(config: FinetuneConfig, rows: int, steps: int, layers: int) -> str:
    """A line about what train_layers=gradual never trains in a run of at most so many steps, with a value that fits.

    It is empty if everything trains, and if the number of steps is not known (0).
    """
    every = unfreeze_every(config, rows)
    stages = (steps - 1) // every if every and steps else layers + 1  # a stage for each layer, and for the embeddings
    if stages > layers:
        return ""
    left = f"{layers - stages} of {layers} layers and " if stages < layers else ""
    line = f"train_layers={config.train_layers} leaves {left}the embeddings as they are in {steps} steps"
    if not (fitting := (steps - 1) // (layers + 1)):
        return f"{line}; use more steps"
    epochs = fitting * config.batch_size / rows
    unit = 10.0 ** (math.floor(math.log10(epochs)) - 1)  # two digits, rounded down
    return f"{line}; --config.train_layers=gradual:{math.floor(epochs / unit) * unit:.2g} trains all"
