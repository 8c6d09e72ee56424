"""What one run is made of, and what comes out of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.model.runtime import Runtime
from bert_jax.tokenizer import Tokenizer
from bert_jax.train import partitioning
from bert_jax.train.evaluate import Evaluator
from bert_jax.train.losses import Objective
from bert_jax.train.steps import Plan

RESULT_FILE = "result.json"  # of a workdir, once its run has ended well


@runtime_checkable
class Source(Protocol):
    """Training batches: a function of the step (law 1)."""

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Says which data these are, by the key of the configuration that names them."""

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps, 0 the first, from which batches have another number of rows, or their rows another length."""

    def rows_at(self, step: int) -> int:
        """Rows of a step's global batch."""

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Any:
        """The global batch of a step, or those rows of it, as a NamedTuple of numpy arrays."""


@dataclass(frozen=True)
class Run:
    """All that one run is made of."""

    config: TrainConfig
    model: ModelConfig
    objective: Objective
    source: Source
    workdir: Path
    tokenizer: Tokenizer
    kind: str  # "pretraining" or "finetuning"
    description: str = "training"
    evaluators: Sequence[Callable[[Plan, Mesh], Evaluator]] = ()
    measured: tuple[str, ...] = ()  # the names of what evaluators measure; none: they are known once it is measured
    held_out: Mapping[str, str] = field(default_factory=dict)  # as source.fingerprints, of what evaluators measure
    initial_params: dict[str, np.ndarray] = field(default_factory=dict)  # by path; what is absent is drawn afresh
    train_layers: str = "all"
    unfreeze_every: int = 0  # steps from one layer to the next, of train_layers gradual
    early_stop: int = 0  # evaluations without a better config.checkpoint.best after which it ends; 0: never
    task: dict[str, Any] | None = None  # what a fine-tuned checkpoint must say of its labels
    summed_up_in: Path | None = None  # the workdir whose result is that of all seeds and rates, of which this is one

    def forget_result(self) -> None:
        """Removes what was said of the run when it had ended, which is no longer so."""
        for folder in filter(None, (self.workdir, self.summed_up_in)):
            (folder / RESULT_FILE).unlink(missing_ok=True)


@dataclass(frozen=True)
class Result:
    step: int
    seconds: float
    tokens: int
    evaluation: dict[str, float]
    params: dict[str, Any]
    kept: int  # the step that evaluation and params are of: the last, or the best of a run with early_stop
    stop_asked: bool = False  # SIGTERM came when the last step was done: nothing more is to be begun


def runtime_of(config: TrainConfig, platform: str = "") -> Runtime:
    """How a configuration runs its model; compute_dtype auto is float32 on a CPU and bfloat16 elsewhere.

    platform is that which it is compiled for, where that is not this machine's.
    """
    dtype = config.compute_dtype
    if dtype == "auto":
        dtype = "float32" if (platform or jax.default_backend()) == "cpu" else "bfloat16"
    model = config.model
    return Runtime(
        compute_dtype=dtype,
        layer_loop=model.layer_loop,
        attention=model.attention,
        remat=model.remat,
        placement=partitioning.OnMesh(),
        platform=platform,
    )
