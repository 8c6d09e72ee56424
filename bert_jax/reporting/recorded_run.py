"""What the workdir of a run holds for a report: configuration, log and result."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bert_jax.command import UserError
from bert_jax.reporting import curves
from bert_jax.storage.location import Location
from bert_jax.storage.stores import check_access
from bert_jax.train.metrics import METRICS_FILE, read_metrics
from bert_jax.train.run import RESULT_FILE
from bert_jax.train.workdir import WorkdirConfig, read_config


@dataclass(frozen=True)
class RecordedRun:
    """What a workdir holds; result is None for a run that has not finished."""

    workdir: Location
    config: WorkdirConfig
    lines: list[dict[str, Any]]
    result: dict[str, Any] | None

    @property
    def loss_unit(self) -> str:
        """The unit of losses: mean squared errors for regression tasks, cross-entropies for all others."""
        return "squared error" if (self.config.task or {}).get("kind", "").endswith("regression") else curves.NATS

    @property
    def kind(self) -> str:
        """Pretraining, or fine-tuning on which task."""
        if self.config.kind == "pretraining":
            return "Pretraining"
        name = (self.config.task or {}).get("name")
        return "Fine-tuning on files of your own" if name == "own" else f"Fine-tuning on {name}"

    def latest(self, name: str) -> float | None:
        """Returns a metric of the result, or the last logged value."""
        final = (self.result or {}).get(name)
        if final is not None:
            return final
        return next((line[name] for line in reversed(self.lines) if line.get(name) is not None), None)

    def settings(self) -> dict[str, Mapping[str, Any]]:
        """Returns the configuration in groups: the model, the task, and the training keys by their groups."""
        training = dict(self.config.training)
        groups = {name: training.pop(name) for name in list(training) if isinstance(training[name], Mapping)}
        groups = {f"config.{name}": values for name, values in groups.items()}
        heads = {f"head {name}": value for name, value in self.config.heads.to_json().items()}
        return {
            "model": {**asdict(self.config.model), **heads},
            "task": dict(self.config.task or {}),
            "config": training,
            **groups,
        }


def read_run(workdir: Location) -> RecordedRun:
    """Reads a workdir. Raises UserError for another folder, and for a run that has logged nothing yet."""
    check_access(workdir)
    if not workdir.is_dir():
        raise UserError(f"no workdir at {workdir}; name the --workdir of a pretraining or fine-tuning run")
    config = read_config(workdir)
    lines = read_metrics(workdir)
    if not lines:
        raise UserError(f"{workdir / METRICS_FILE} has no lines yet; the run logs its first after log_every steps")
    try:
        result = json.loads((workdir / RESULT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        result = None
    except ValueError as error:
        raise UserError(f"{workdir / RESULT_FILE} is not JSON ({error}); run the training command again") from error
    return RecordedRun(workdir, config, lines, result)
