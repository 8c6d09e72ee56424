"""Defines a training run: its parts, its source of batches, and its result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.model.runtime import Runtime
from bert_jax.storage.location import Location
from bert_jax.tokenization.vocabulary import Vocabulary
from bert_jax.train import distributed, sharding
from bert_jax.train.clock import TokenLength
from bert_jax.train.evaluation import Evaluator
from bert_jax.train.objectives import Objective

RESULT_FILE = "result.json"  # written to a workdir when its run has finished
TOKENS_BEFORE = "tokens_before"  # the key of Run.tokens_before in a checkpoint's metadata


@runtime_checkable
class Source(Protocol):
    """Training batches as a function of the step (law 1)."""

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Hashes that identify the data, by its configuration key."""

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps at which a batch's row count or length changes; 0 is the first."""

    def rows_at(self, step: int) -> int:
        """Returns how many rows a step's global batch has."""

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Any:
        """Returns a step's global batch, or some of its rows, as a NamedTuple of numpy arrays."""


@dataclass(frozen=True)
class Run:
    """A complete description of a run."""

    config: TrainConfig
    model: ModelConfig
    objective: Objective
    source: Source
    workdir: Location
    tokenizer: Vocabulary
    kind: str  # "pretraining" or "finetuning"
    description: str = "training"
    # Steps whose batches together have all shapes of the run; empty: source.changes.
    shapes_at: tuple[int, ...] = ()
    evaluators: Sequence[Evaluator] = ()
    measured: tuple[str, ...] = ()  # names of the held-out metrics; empty: unknown until measured
    held_out: Mapping[str, str] = field(default_factory=dict)  # fingerprints of held-out data, as source.fingerprints
    shares: Mapping[str, float] = field(default_factory=dict)  # of mixture sources, by configuration key
    # (step, first step) -> epochs that the steps between them read, by mixture source; None: no mixture.
    epochs_before: Callable[[int, int], Mapping[str, float]] | None = None
    data: Sequence[Mapping[str, Any]] = ()  # written to config.json: what the shards hold (bert_jax/data/phases.py)
    # (last step or 0, first step) -> lines about the data and its epochs, printed when the run starts.
    describe_data: Callable[[int, int], Sequence[str]] | None = None
    counted_from: int = 0  # the first step that epochs count: where data or batches last changed (train/workdir.py)
    notes: tuple[str, ...] = ()  # further lines to print then
    initial_params: dict[str, np.ndarray] = field(default_factory=dict)  # by path; others are initialized
    # By path: arrays that the objective reads but does not train, such as a teacher's. They are not saved.
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    branch_from: str = ""  # WORKDIR/checkpoints/STEP of another run, at which this one begins (train/workdir.py)
    tokens_before: Callable[[int], float] | None = None  # tokens that the steps before a step read; None: unknown
    length: TokenLength | None = None  # of a run that ends by tokens_before; None: by steps or minutes
    train_layers: str = "all"
    unfreeze_every: int = 0  # steps between layers, for train_layers=gradual
    early_stop: int = 0  # evaluations without a better checkpoint.best before it ends; 0: never
    task: dict[str, Any] | None = None  # written to config.json: name, kind and labels of a fine-tuning task
    verbose: bool = False  # print the table of parameters when it begins
    recipe: str = ""  # by which the user configured it, if by one; for run.json
    requested: TrainConfig | None = None  # the configuration that became `config`; None: the same
    summary_workdir: Location | None = None  # holds the joint result of all seeds

    @property
    def end(self) -> int:
        """The step at which the run ends by steps or tokens; 0: unknown."""
        return self.config.steps if self.length is None else self.length.steps

    def abstract_params(self) -> dict[str, Any]:
        """Returns the shapes and dtypes of the model's parameters."""
        shapes: dict[str, Any] = jax.eval_shape(lambda: self.objective.init(self.model, jax.random.key(0)))
        return shapes

    def forget_result(self) -> None:
        """Removes a finished run's result files, because it now continues."""
        if distributed.is_primary():
            for folder in filter(None, (self.workdir, self.summary_workdir)):
                # Otherwise a reader would take the old result for that of the continued run.
                (folder / RESULT_FILE).unlink(missing_ok=True)


@dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    step: int
    seconds: float
    tokens: int
    evaluation: dict[str, float]
    params: dict[str, Any]
    kept: int  # the step of `evaluation` and `params`: the last one, or the best one of a run with early_stop
    stopped_by: str = ""  # the signal that arrived after the last step (Interruption.cause): start nothing more


def root_key(seed: int) -> PRNGKeyArray:
    """Makes a run's key."""
    # Other generators give other values on another mesh, and jax's default may change.
    return jax.random.key(seed, impl="threefry2x32")


def make_runtime(config: TrainConfig, platform: str = "", capability: str = "") -> Runtime:
    """Returns how a configuration runs its model; compute_dtype=auto is float32 on a CPU and bfloat16 elsewhere.

    Args:
        platform: the platform to compile for, if it is not this machine's.
        capability: its GPUs' compute capability.
    """
    # Most CPUs compute bfloat16 by way of float32, so it would only cost precision there.
    dtype = config.compute_dtype
    if dtype == "auto":
        dtype = "float32" if (platform or jax.default_backend()) == "cpu" else "bfloat16"
    model = config.model
    return Runtime(
        compute_dtype=dtype,
        layer_loop=model.layer_loop,
        attention=model.attention,
        remat=model.remat,
        logits_at_once=model.logits_at_once,
        placement=sharding.OnMesh(),
        compiler_options=tuple(config.mesh.compiler_options.items()),
        platform=platform,
        capability=capability,
    )
