"""The one training loop. Pretraining and fine-tuning pass it another objective, source of batches and evaluators.

Where a run starts from, in this order: the newest checkpoint of its workdir; else `initial_params` (init_from), what
they lack drawn afresh; else all drawn afresh from the seed.
"""

import functools
import itertools
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.command import Stopped, UserError
from bert_jax.config import ModelConfig, TrainConfig, to_dict
from bert_jax.data.loader import Prefetched, prefetch
from bert_jax.model import bert, paths
from bert_jax.model.runtime import Runtime
from bert_jax.tokenizer import Tokenizer
from bert_jax.train import checkpoint, optim, partitioning, rules, steps
from bert_jax.train.clock import Clock
from bert_jax.train.evaluate import Evaluator
from bert_jax.train.losses import Objective
from bert_jax.train.metrics import MetricsWriter, ProgressLine
from bert_jax.train.overview import parameter_table
from bert_jax.train.state import TrainState
from bert_jax.train.window import Window


@runtime_checkable
class Source(Protocol):
    """Training batches: a function of the step (law 1)."""

    @property
    def fingerprint(self) -> str:
        """Says which data and order these are; a run goes on only with the same."""

    def batch(self, step: int, rows: slice | None = None) -> Any:
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
    evaluators: Sequence[Callable[[steps.Plan, Mesh], Evaluator]] = ()
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


def fit(run: Run) -> Result:
    """Trains until the run's steps or minutes are over, going on where the workdir's newest checkpoint stands.

    Raises Stopped after SIGTERM, once a checkpoint is written, and UserError for a workdir that holds another run,
    a batch that does not divide over the mesh, or a loss that is no longer finite.
    """
    config = run.config
    mesh = partitioning.make_mesh(config.mesh)
    partitioning.check_batch(config.batch_size, config.microbatches, mesh)
    with jax.set_mesh(mesh), Interruption() as interruption:
        plan = _plan(run)
        evaluators = [make(plan, mesh) for make in run.evaluators]
        _write_workdir(run)
        with checkpoint.Checkpoints(run.workdir / "checkpoints", keep=config.checkpoint.keep) as checkpoints:
            state, meta = _start(run, plan, mesh, checkpoints)
            loop = _Loop(run, plan, mesh, checkpoints, evaluators, interruption, meta, int(state.step))
            if not meta:
                print_overview(plan, state, mesh, loop.progress)
            try:
                return loop.train(state)
            finally:
                loop.close()


class Interruption:
    """Notes SIGTERM while it is open, so that the loop can save and stop at a step's end."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "Interruption":
        try:
            self._before = signal.signal(signal.SIGTERM, self._note)
        except ValueError:  # not in the main thread (a notebook's worker): then nobody sends us signals
            self._before = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True


class _Loop:
    """The loop and what it keeps beside the state: clock, batches, windows of metrics."""

    def __init__(
        self,
        run: Run,
        plan: steps.Plan,
        mesh: Mesh,
        checkpoints: checkpoint.Checkpoints,
        evaluators: Sequence[Evaluator],
        interruption: Interruption,
        meta: dict[str, Any],
        start: int,
    ) -> None:
        config = run.config
        self.run, self.mesh, self.checkpoints = run, mesh, checkpoints
        self.evaluators, self.interruption = evaluators, interruption
        self.clock = Clock(
            config.steps,
            config.budget_minutes,
            config.log_every,
            elapsed=meta.get("seconds", 0.0),
            replay=config.budget_replay,
        )
        self.clock.restore(meta.get("budget_fraction", 0.0))
        self.tokens = meta.get("tokens", 0)
        self.start = self.saved_step = start
        self.saved_time = time.monotonic()
        self.evaluated: tuple[int, dict[str, float]] = (-1, {})
        self.window = Window(run.model)
        self.writer = MetricsWriter(run.workdir, start)
        self.progress = ProgressLine(run.description)
        self.batches = self._batches()
        self.train_step = jax.jit(functools.partial(steps.train_step, plan), donate_argnums=0)

    def train(self, state: TrainState) -> Result:
        with self.batches:
            for step in itertools.count(self.start):
                fraction = self.clock.read(step)
                done = fraction >= 1.0
                if step > self.start:
                    self._between_steps(step, state, done)
                if done:
                    break
                batch = next(self.batches)
                state, metrics = self.train_step(state, batch, np.float32(fraction))
                self.window.add(batch, metrics)
        evaluation = self._evaluate(step, state.params)
        self._save(step, state)
        self.checkpoints.wait()
        return Result(step, self.clock.elapsed, self.tokens + self.window.tokens, evaluation, state.params)

    def close(self) -> None:
        self.writer.close()
        self.progress.close()

    def _between_steps(self, step: int, state: TrainState, done: bool) -> None:
        """Logs, evaluates, saves and stops, each when it is due, in this order, and before the next batch is drawn."""
        config = self.run.config
        evaluate = done or (config.eval.every_steps > 0 and step % config.eval.every_steps == 0)
        if done or evaluate or self.clock.refreshed or step % max(config.log_every, 1) == 0:
            self._log(step, self._evaluate(step, state.params) if evaluate else {})
        minutes = (time.monotonic() - self.saved_time) / 60
        by_steps = config.checkpoint.every_steps > 0 and step % config.checkpoint.every_steps == 0
        # Several processes save together, so only process 0's clock may say when; the refreshes of Clock are that.
        by_clock = 0 < config.checkpoint.every_minutes <= minutes and jax.process_count() == 1
        if by_steps or by_clock or self.interruption.asked:
            self._save(step, state)
        if self.interruption.asked and not done:
            self.checkpoints.wait()
            raise Stopped(f"SIGTERM: saved step {step} in {self.run.workdir}; run the same command to go on")

    def _batches(self) -> Prefetched[Any]:
        size = self.run.config.batch_size
        rows = partitioning.local_rows(size, self.mesh)

        def make(step: int) -> Any:
            return partitioning.place(self.run.source.batch(step, rows), size, self.mesh)

        return prefetch(make, self.start, None, self.run.config.data.prefetch)

    def _log(self, step: int, evaluation: dict[str, float]) -> None:
        values = self.window.close(self.batches.waited_seconds)
        loss = values["loss"]
        if loss is None or not np.isfinite(loss):
            last = self.checkpoints.latest_step()
            raise UserError(
                f"the loss is {loss} at step {step}; the last checkpoint is "
                f"{'none' if last is None else f'step {last}'} in {self.run.workdir}/checkpoints. "
                "Lower --config.optimizer.learning_rate or lengthen --config.optimizer.warmup_steps"
            )
        shown = {name: values[name] for name in values if "loss" in name or "accuracy" in name}
        shown |= {f"eval_{name}": value for name, value in evaluation.items()}
        shown |= {"tokens/s": values["tokens_per_second"]}
        if self.clock.budget > 0 or self.run.config.budget_replay:
            values["budget_fraction"] = self.clock.fraction
        self.writer.write(step, values | {f"eval_{name}": value for name, value in evaluation.items()})
        fraction = self.clock.fraction
        left = self.clock.elapsed * (1 - fraction) / fraction if fraction > 0 else None
        self.progress.update(step, fraction, left, shown)

    def _evaluate(self, step: int, params: dict[str, Any]) -> dict[str, float]:
        if self.evaluated[0] != step:
            with self.window.paused():
                metrics: dict[str, float] = {}
                for evaluator in self.evaluators:
                    metrics |= evaluator(params)
                self.evaluated = (step, metrics)
        return self.evaluated[1]

    def _save(self, step: int, state: TrainState) -> None:
        if step == self.saved_step and self.checkpoints.latest_step() == step:
            return
        with self.window.paused():
            self.checkpoints.save(step, state.params, state.optimizer_state, self._meta(step))
        self.saved_step, self.saved_time = step, time.monotonic()

    def _meta(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "seconds": self.clock.elapsed,
            "budget_fraction": self.clock.fraction,
            "tokens": self.tokens + self.window.tokens,
            "identity": identity(self.run),
        }


def identity(run: Run) -> dict[str, Any]:
    """What a run must share with the checkpoint it goes on from, or its batches would not be the next ones."""
    return {
        "data": run.source.fingerprint,
        "batch_size": run.config.batch_size,
        "seed": run.config.seed,
        "train_layers": run.train_layers,
    }


def print_overview(plan: steps.Plan, state: TrainState, mesh: Mesh, progress: ProgressLine) -> None:
    """Every parameter with its shape, dtype, sharding and decay, and the totals."""
    for line in parameter_table(state.params, plan.trainable):
        progress.say(line)
    progress.say(
        f"{mesh.size} x {jax.devices()[0].device_kind}, mesh {dict(mesh.shape)}, compute {plan.runtime.compute_dtype}, "
        f"layers {plan.runtime.layer_loop}, attention {plan.runtime.attention}"
    )


def _plan(run: Run) -> steps.Plan:
    config = run.config
    abstract = bert.abstract_params(run.model, run.objective.heads)
    return steps.Plan(
        model=run.model,
        runtime=runtime_of(config),
        objective=run.objective,
        optimizer_config=config.optimizer,
        optimizer=optim.build(config.optimizer, abstract),
        seed=config.seed,
        microbatches=config.microbatches,
        trainable=rules.trainable(run.train_layers, abstract),
    )


def runtime_of(config: TrainConfig) -> Runtime:
    """How a configuration runs its model; compute_dtype auto is float32 on a CPU and bfloat16 elsewhere."""
    dtype = config.compute_dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return Runtime(compute_dtype=dtype, layer_loop=config.model.layer_loop, attention=config.model.attention)


def _start(
    run: Run, plan: steps.Plan, mesh: Mesh, checkpoints: checkpoint.Checkpoints
) -> tuple[TrainState, dict[str, Any]]:
    """The state to go on from and its checkpoint's meta, or a first state and no meta."""

    def draw(key: jax.Array) -> TrainState:
        return steps.initial_state(plan, bert.init_params(run.model, run.objective.heads, key))

    key = jax.random.key(run.config.seed)
    abstract = partitioning.with_shardings(mesh, jax.eval_shape(draw, key))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    if (latest := checkpoints.latest_step()) is not None:
        restored = checkpoints.restore(latest, abstract.params, abstract.optimizer_state)
        _check_identity(run, restored.meta)
        step = jax.device_put(np.int32(latest), shardings.step)
        return TrainState(step, restored.params, restored.optimizer_state), restored.meta
    state = jax.jit(draw, out_shardings=shardings)(key)
    params = paths.flatten(state.params)
    for path, value in run.initial_params.items():
        params[path] = jax.device_put(value, params[path].sharding)
    return state._replace(params=paths.unflatten(params)), {}


def _check_identity(run: Run, meta: dict[str, Any]) -> None:
    wanted = identity(run)
    for name, saved in meta["identity"].items():
        if saved != wanted[name]:
            raise UserError(
                f"{run.workdir} holds a run with {name}={saved}, and this one has {name}={wanted[name]}. "
                "Give the same value to go on, or another --workdir to start anew"
            )


def _write_workdir(run: Run) -> None:
    """Writes config.json and tokenizer/, or raises UserError when the workdir holds a run of another architecture."""
    here = checkpoint.WorkdirConfig(
        model=run.model,
        heads=run.objective.heads,
        kind=run.kind,
        training=to_dict(run.config),
        task=run.task,
    )
    if (run.workdir / checkpoint.CONFIG_FILE).exists():
        there = checkpoint.read_config(run.workdir)
        for part in ("model", "heads"):
            saved, wanted = to_dict(getattr(there, part)), to_dict(getattr(here, part))
            if differing := [name for name in wanted if saved[name] != wanted[name]]:
                name = differing[0]
                raise UserError(
                    f"{run.workdir} holds a checkpoint of another architecture: {part}.{name} is {saved[name]} there, "
                    f"{wanted[name]} here. Name another --workdir, or the configuration it was trained with"
                )
    if jax.process_index() == 0:
        folder = run.workdir / "tokenizer"
        if not folder.exists():
            run.workdir.mkdir(parents=True, exist_ok=True)
            unfinished = folder.with_name("tokenizer.incomplete")
            run.tokenizer.save(unfinished)
            unfinished.rename(folder)
        checkpoint.write_config(run.workdir, here)
