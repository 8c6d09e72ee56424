"""The predictions of a fine-tuned run for its dev file, computed from the checkpoint and the file."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from bert_jax import config as config_lib
from bert_jax.array_types import Float64
from bert_jax.command import UserError
from bert_jax.config import TaskConfig
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.storage.location import Location
from bert_jax.tasks import registry
from bert_jax.tasks.example import TaskRows
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.task import Task
from bert_jax.train.workdir import WorkdirConfig

AnyTask = TypeVar("AnyTask", bound=Task)
AnyRows = TypeVar("AnyRows", bound=TaskRows)


@dataclass(frozen=True, eq=False)
class DevPredictions(Generic[AnyTask, AnyRows]):
    """Items of the dev file with the model's predictions and losses."""

    task: AnyTask
    path: Path
    rows: AnyRows
    predictions: Sequence[dict[str, Any]]  # of each item
    losses: Float64[np.ndarray, "K"]  # of each item; NaN for items without a label
    total: int  # number of items in the file; the others here may be a sample of them

    @property
    def items(self) -> Sequence[Any]:
        """The items, in the order of the file."""
        return self.rows.split.items

    @property
    def description(self) -> str:
        """Which examples these are, in words."""
        if len(self.items) == self.total:
            return f"all {self.total:,} examples of {self.path.name}"
        return f"{len(self.items):,} evenly spaced examples of the {self.total:,} of {self.path.name}"

    def worst(self, count: int) -> list[int]:
        """Returns the items with the highest losses, in descending order."""
        known = np.where(np.isnan(self.losses), -np.inf, self.losses)
        return [int(item) for item in np.argsort(-known, kind="stable")[:count] if np.isfinite(known[item])]


def predict_dev(workdir: Location, config: WorkdirConfig, most: int) -> DevPredictions:
    """Returns the predictions for up to `most` items of the dev file that a workdir's configuration names.

    Raises UserError if the file is not named or does not exist, and for a checkpoint that cannot be opened.
    """
    loaded = open_checkpoint(workdir)
    named = config_lib.load(TaskConfig, dict(config.training.get("task") or {}), "task")
    _, files = registry.resolve(named)
    if "dev" not in files:
        raise UserError("the task has no dev file (--config.task.dev)")
    model = FineTuned(loaded)
    split = registry.read(model.task, files["dev"])
    total = len(split.items)
    if total > most:
        kept = np.unique(np.linspace(0, total - 1, most).astype(int))
        split = dataclasses.replace(split, items=tuple(split.items[index] for index in kept))
    rows = model.encode(split)
    answers, losses = model.item_losses(rows)
    predictions = model.task.predictions(rows, answers)
    return DevPredictions(model.task, files["dev"], rows, predictions, losses, total)
