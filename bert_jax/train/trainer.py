"""The one training loop. Pretraining and fine-tuning pass it another objective, source of batches and evaluators."""

import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.command import Stopped, UserError
from bert_jax.data.prefetch import Prefetched, prefetch
from bert_jax.files import is_remote
from bert_jax.model import attention
from bert_jax.train import checkpoint, distributed, partitioning, preservation, steps
from bert_jax.train.clock import Clock, check_end
from bert_jax.train.evaluate import Evaluator
from bert_jax.train.finite import FiniteCheck
from bert_jax.train.interruption import Interrupted, Interruption
from bert_jax.train.metrics import MetricsWriter, ProgressLine
from bert_jax.train.overview import parameter_table, share_of_a_device
from bert_jax.train.profiler import Profiler
from bert_jax.train.programs import later_batches
from bert_jax.train.provenance import provenance
from bert_jax.train.run import RESULT_FILE, Result, Run, Source, runtime_of
from bert_jax.train.start import check_workdir, plan_of, start, write_workdir
from bert_jax.train.state import TrainState
from bert_jax.train.window import Window
from bert_jax.train.workdir import CHECKPOINTS

__all__ = ["RESULT_FILE", "Result", "Run", "Source", "fit", "runtime_of"]


def fit(run: Run) -> Result:
    """Trains until the run's steps or minutes are over, going on where the workdir's newest checkpoint stands.

    Raises Stopped after SIGTERM, once a checkpoint is written, and UserError for a workdir that holds another run,
    a batch that does not divide over the mesh, or a loss that is no longer finite.
    """
    config = run.config
    check_end(config.steps, config.budget_minutes, config.budget_replay)
    profiler = Profiler(config.profile, run.workdir)
    if is_remote(run.workdir):
        raise UserError(
            f"--workdir {run.workdir} is in an object store; name a local folder, or one where the bucket is mounted"
        )
    if run.workdir.exists() and not run.workdir.is_dir():
        raise UserError(f"--workdir {run.workdir} is a file; name a folder")
    mesh = partitioning.make_mesh(config.mesh)
    for rows in dict.fromkeys(map(run.source.rows_at, run.source.changes)):
        key = "batch_schedule" if getattr(config, "batch_schedule", "") else "batch_size"
        partitioning.check_batch(rows, config.microbatches, mesh, key)
    partitioning.check_model(run.model, mesh)
    with jax.set_mesh(mesh), Interruption() as interruption:
        plan = plan_of(run)
        for step in run.source.changes:  # refuses a kernel that cannot run before anything is written
            attention.kernels(plan.model, plan.runtime, _slots(run.source, step))
        evaluators = [make(plan, mesh) for make in run.evaluators]
        preservation.check_best(config, measured=bool(run.evaluators))
        keeping = {name: getattr(config.checkpoint, name) for name in ("keep", "keep_every", "best")}
        made_by = provenance(run)
        distributed.check_same(made_by["configuration"] | made_by["versions"], "start all with the same command")
        with checkpoint.Checkpoints(run.workdir / CHECKPOINTS, **keeping) as checkpoints:
            told = check_workdir(run, made_by, checkpoints)
            state, meta = start(run, plan, mesh, checkpoints)
            write_workdir(run)
            first = int(state.step)
            slots = _slots(run.source, first)  # before the loop's thread reads from the source, as the next line
            later = later_batches(run.source, first, config.steps, mesh)
            loop = _Loop(run, plan, mesh, checkpoints, evaluators, interruption, profiler, made_by, meta, state)
            if meta:
                for line in (f"going on from step {loop.first} of {run.workdir}", *told):
                    loop.progress.say(line)
            else:
                for line in parameter_table(state.params, plan):
                    loop.progress.say(line)
            loop.progress.say(how_it_runs(plan, mesh, slots))
            if mesh.size > 1:
                loop.progress.say(share_of_a_device(state, mesh))
            try:
                loop.compile_ahead(state, later)
                return loop.train(state)
            finally:
                loop.close()


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
        profiler: Profiler,
        made_by: dict[str, Any],
        meta: dict[str, Any],
        state: TrainState,
    ) -> None:
        config, first = run.config, int(state.step)
        self.run, self.mesh, self.checkpoints, self.made_by = run, mesh, checkpoints, made_by
        self.evaluators, self.interruption, self.profiler = evaluators, interruption, profiler
        self.clock = Clock(
            config.steps,
            config.budget_minutes,
            config.log_every,
            start=first,
            fraction=meta.get("budget_fraction", 0.0),
            elapsed=meta.get("seconds", 0.0),
            replay=config.budget_replay,
        )
        self.first = self.saved_step = first
        self.seconds_before = meta.get("seconds", 0.0)
        self.saved_time = time.monotonic()
        self.evaluated: tuple[int, dict[str, float]] = (-1, {})
        self.unlogged = bool(meta.get("unlogged", False))
        self.writer = MetricsWriter(run.workdir, first - self.unlogged)
        self.progress = ProgressLine(run.description)
        self.finite = FiniteCheck(
            config.on_nonfinite,
            config.skip_at_most,
            meta.get("skipped", 0),
            run.workdir,
            last_checkpoint=self._last_checkpoint,
            say=self.progress.say,
        )
        self.window = Window(run.model, meta.get("window", {}), self.finite)
        self.batches = self._batches()
        # An argument, not a constant of the program, so that runs of many seeds compile it once.
        self.key = jax.device_put(jax.random.key(config.seed, impl=config.prng), partitioning.replicated(mesh))
        self.train_step = steps.jitted(plan, mesh, state)

    def compile_ahead(self, state: TrainState, later: dict[int, Any]) -> None:
        """Compiles the step for batches of other shapes that come later, so that one that cannot be is known now."""
        for step, batch in later.items():
            rows, slots = batch.input_ids.shape
            self.progress.say(f"compiling for step {step} and on, batches of {rows} rows of {slots} slots")
            self.train_step.lower(state, batch, np.float32(0), self.key).compile()

    def train(self, state: TrainState) -> Result:
        with self.batches:
            for step in itertools.count(self.first):
                fraction = self.clock.read(step)
                done = fraction >= 1.0
                if step > self.first or self.unlogged:
                    self._between_steps(step, state, done)
                if done:
                    break
                if step == self.first and self.interruption.asked:
                    self._save_and_stop(step, state)  # before the step is compiled, which cannot be interrupted
                if step == self.first and distributed.leads():
                    (self.run.workdir / RESULT_FILE).unlink(missing_ok=True)  # what it said is no longer so
                batch = next(self.batches)
                if step > self.first and step in self.run.source.changes:
                    rows, slots = batch.input_ids.shape
                    self.progress.say(f"from step {step} on, batches of {rows} rows of {slots} slots")
                with self.profiler.step(step):
                    state, metrics = self.train_step(state, batch, np.float32(fraction), self.key)
                self.window.add(step + 1, batch, metrics)
        evaluation = self._evaluate_or_save(step, state)
        self._save(step, state)
        self.checkpoints.wait()
        seconds = self.clock.elapsed if step > self.first else self.seconds_before
        return Result(step, seconds, self.window.tokens, evaluation, state.params, self.interruption.asked)

    def close(self) -> None:
        self.profiler.stop()
        if not self.profiler.traced:
            self.progress.say(f"no step of config.profile={self.run.config.profile} was run here: nothing was traced")
        self.writer.close()
        self.progress.close()

    def _between_steps(self, step: int, state: TrainState, done: bool) -> None:
        """Logs, evaluates, saves and stops, each when it is due, in this order, and before the next batch is drawn."""
        config = self.run.config
        if self.profiler.done(step):
            with self.window.paused():  # once the last traced step has ended
                self.profiler.stop()
            self.progress.say(f"traced steps {config.profile}: {self.profiler.folder}")
        evaluate = done or (config.eval.every_steps > 0 and step % config.eval.every_steps == 0)
        logged = done or evaluate or self.clock.refreshed or step % max(config.log_every, 1) == 0
        if logged:
            self._log(step, self._evaluate_or_save(step, state) if evaluate else {})
        by_steps = config.checkpoint.every_steps > 0 and step % config.checkpoint.every_steps == 0
        best = self.checkpoints.best is not None and self.checkpoints.best.beaten_by(self._evaluation(step))
        stop = self.interruption.at_step_end()
        if by_steps or best or stop or self._minutes_are_over(logged):
            self._save(step, state)
        if stop and not done:
            self._save_and_stop(step, state)

    def _save_and_stop(self, step: int, state: TrainState, unlogged: bool = False) -> NoReturn:
        """unlogged: the log line and evaluation of this step are still to come, when the run goes on."""
        self._save(step, state, unlogged)
        self.checkpoints.wait()
        raise Stopped(f"SIGTERM: saved step {step} in {self.run.workdir}; run the same command to go on")

    def _minutes_are_over(self, logged: bool) -> bool:
        """Whether it is time for a checkpoint by the clock: process 0's, which the others ask when a line is logged."""
        every = self.run.config.checkpoint.every_minutes
        if every <= 0 or not (logged or jax.process_count() == 1):
            return False
        return distributed.from_first((time.monotonic() - self.saved_time) / 60 >= every)

    def _batches(self) -> Prefetched[Any]:
        source, mesh = self.run.source, self.mesh

        @functools.cache
        def local_rows(size: int) -> slice | np.ndarray:
            return partitioning.local_rows(size, mesh)

        def make(step: int) -> Any:
            size = source.rows_at(step)
            return partitioning.place(source.batch(step, local_rows(size)), size, mesh)

        return prefetch(make, self.first, None, self.run.config.data.prefetch)

    def _log(self, step: int, evaluation: dict[str, float]) -> None:
        values = self.window.close(self.batches.waited_seconds)
        shown = {name: values[name] for name in values if "loss" in name or "accuracy" in name}
        shown |= {f"eval_{name}": value for name, value in evaluation.items()}
        shown |= {"tokens/s": values["tokens_per_second"]}
        if self.clock.budget > 0 or self.run.config.budget_replay:
            values["budget_fraction"] = self.clock.fraction
        self.writer.write(step, values | {f"eval_{name}": value for name, value in evaluation.items()})
        fraction = self.clock.fraction
        left = self.clock.elapsed * (1 - fraction) / fraction if fraction > 0 else None
        self.progress.update(step, fraction, left, shown)

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        """What the evaluators measure of the parameters, and under ema_* of their average where one is kept."""
        if self.evaluated[0] != step:
            with self.window.paused(), self.interruption.at_once():
                metrics: dict[str, float] = {}
                for evaluator in self.evaluators:
                    metrics |= evaluator(state.params, step)
                    if state.average is not None:
                        metrics |= {f"ema_{name}": value for name, value in evaluator(state.average, step).items()}
                self.evaluated = (step, metrics)
                if self.checkpoints.best:
                    self.checkpoints.best.check_among(metrics)
        return self.evaluated[1]

    def _evaluation(self, step: int) -> dict[str, float]:
        """What was measured at a step, if it was."""
        return self.evaluated[1] if self.evaluated[0] == step else {}

    def _evaluate_or_save(self, step: int, state: TrainState) -> dict[str, float]:
        """Evaluates; when that fails, what was learnt is saved first, unless other processes would have to help.

        SIGTERM ends an evaluation at once, for it may take longer than what sent that will wait.
        """
        self.window.settle()  # a step that was not finite stops the run here, unsaved
        try:
            return self._evaluate(step, state)
        except Interrupted:
            self._save_and_stop(step, state, unlogged=True)
        except Exception:
            if jax.process_count() > 1:
                raise
            self._save(step, state, unlogged=True)
            self.checkpoints.wait()
            raise

    def _last_checkpoint(self) -> int | None:
        """The newest step that is whole, once the save under way has ended."""
        self.checkpoints.wait()
        return self.checkpoints.latest_step()

    def _save(self, step: int, state: TrainState, unlogged: bool = False) -> None:
        if step == self.saved_step:
            self.checkpoints.wait()
            if distributed.from_first(self.checkpoints.latest_step()) == step:
                self.checkpoints.measured(step, self._evaluation(step))  # since then, where SIGTERM had cut that off
                return
        with self.window.paused():  # every flag up to this step is read then, or there is nothing to save
            meta = self._meta(step) | {"unlogged": unlogged}
            self.checkpoints.save(step, state.params, state.optimizer_state, meta, state.average)
        self.saved_step, self.saved_time = step, time.monotonic()

    def _meta(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "seconds": self.clock.elapsed,
            "budget_fraction": self.clock.fraction,
            "window": self.window.state(),
            "skipped": self.finite.skipped,
            "provenance": self.made_by,
            checkpoint.EVALUATION: self._evaluation(step),
        }


def _slots(source: Source, step: int) -> int:
    """T of a step's batch."""
    return source.batch(step, slice(0, 1)).input_ids.shape[1]


def how_it_runs(plan: steps.Plan, mesh: Mesh, slots: int) -> str:
    """One line: devices, mesh, dtype, layer loop, and the attention kernels for rows of so many slots."""
    loop = "unrolled" if plan.runtime.unrolled(plan.model.layers) else "scanned"
    kernels = " and ".join(attention.kernels(plan.model, plan.runtime, slots))
    return (
        f"{mesh.size} x {jax.devices()[0].device_kind}, mesh {dict(mesh.shape)}, "
        f"compute {plan.runtime.compute_dtype}, layers {loop}, attention {kernels}"
    )
