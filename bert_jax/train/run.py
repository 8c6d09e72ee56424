"""What one run is made of, and what comes out of it."""

import hashlib
import json
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
from bert_jax.train.evaluate import Evaluator
from bert_jax.train.losses import Objective
from bert_jax.train.steps import Plan

RESULT_FILE = "result.json"  # of a workdir, once its run has ended well
FINGERPRINT_DIGITS = 16


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
    initial_params: dict[str, np.ndarray] = field(default_factory=dict)  # by path; what is absent is drawn afresh
    train_layers: str = "all"
    task: dict[str, Any] | None = None  # what a fine-tuned checkpoint must say of its labels


@dataclass(frozen=True)
class Result:
    step: int
    seconds: float
    tokens: int
    evaluation: dict[str, float]
    params: dict[str, Any]


# What a run must share with the checkpoint it goes on from, or its batches or its beginning would be others: the name
# in the checkpoint, and what a person calls it. The first that differs is told.
IDENTITY = {
    "batch_size": "batch_size",
    "seed": "seed",
    "train_layers": "train_layers",
    "init": "other initial parameters (init_from), of fingerprint",
    "data": "other data or masks (data.train, mask_rate, mask_schedule, or the task's files), of fingerprint",
}


def identity(run: Run) -> dict[str, Any]:
    """The values of IDENTITY for a run."""
    return {
        "batch_size": _batch_sizes(run.source),
        "seed": run.config.seed,
        "train_layers": run.train_layers,
        "init": _fingerprint(run.initial_params),
        "data": _digest(run),
    }


def _batch_sizes(source: Source) -> str:
    return ",".join(f"{step}:{source.rows_at(step)}" for step in source.changes).removeprefix("0:")


def _digest(run: Run) -> str:
    data = run.config.data
    rates = [getattr(data, name, None) for name in ("mask_rate", "mask_schedule")]
    return hashlib.sha256(json.dumps([dict(run.source.fingerprints), rates]).encode()).hexdigest()[:FINGERPRINT_DIGITS]


def _fingerprint(params: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b()
    for path, value in sorted(params.items()):
        digest.update(path.encode())
        digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()[:FINGERPRINT_DIGITS] if params else "none"


def runtime_of(config: TrainConfig) -> Runtime:
    """How a configuration runs its model; compute_dtype auto is float32 on a CPU and bfloat16 elsewhere."""
    dtype = config.compute_dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    model = config.model
    return Runtime(compute_dtype=dtype, layer_loop=model.layer_loop, attention=model.attention, remat=model.remat)
