"""Records a run while it trains: logging, held-out evaluation and saving, one small object each."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.command import Stopped
from bert_jax.model import paths
from bert_jax.storage.holder import NoLongerHeld
from bert_jax.storage.location import Location
from bert_jax.train import branch, distributed, partitioning
from bert_jax.train.checkpoint import EVALUATION, Checkpoints
from bert_jax.train.clock import Clock
from bert_jax.train.early_stop import EarlyStop
from bert_jax.train.evaluate import Evaluator
from bert_jax.train.finite import FiniteCheck
from bert_jax.train.interruption import Interrupted, Interruption
from bert_jax.train.metric_accumulator import MetricAccumulator
from bert_jax.train.metrics import MetricsWriter
from bert_jax.train.run import TOKENS_BEFORE, Result, Run
from bert_jax.train.setup import OpenWorkdir
from bert_jax.train.state import TrainState
from bert_jax.train.workdir import read_params


class HeldOutEvaluation:
    """Measures the held-out metrics of a run, and decides whether it stops early."""

    def __init__(
        self, run: Run, evaluators: Sequence[Evaluator], checkpoints: Checkpoints, meta: Mapping[str, Any]
    ) -> None:
        self._evaluators, self._best = evaluators, checkpoints.best
        self._every = run.config.eval.every_steps
        self._measured = run.measured
        self._step, self._metrics = -1, dict[str, float]()
        self.early_stop: EarlyStop | None = None
        if run.early_stop and checkpoints.best:
            saved, first = meta.get("early_stop", {}), meta.get("step", 0)
            self.early_stop = EarlyStop(run.early_stop, checkpoints.best, saved, first, checkpoints.evaluations())

    def due(self, step: int) -> bool:
        """Whether the configuration asks for an evaluation at this step."""
        return self._every > 0 and step % self._every == 0

    @property
    def begins(self) -> bool:
        """Whether the next measurement is the first one of this process, which compiles."""
        return self._step < 0 and bool(self._evaluators)

    def measure(self, step: int, params: dict[str, Any], average: dict[str, Any] | None) -> None:
        """Measures the parameters and, as ema_*, their moving average; once for each step."""
        if self._step == step:
            return
        metrics: dict[str, float] = {}
        if average is not None and self._evaluators:
            average = partitioning.put_like(average, params)  # mesh.shard_optimizer shards it further than params
        for evaluator in self._evaluators:
            metrics |= evaluator(params, step)
            if average is not None:
                metrics |= {f"ema_{name}": value for name, value in evaluator(average, step).items()}
        self._step, self._metrics = step, metrics
        if self._best and not self._measured:  # otherwise checked before; one that is not finite is missing here
            self._best.check_among(metrics)

    def is_measured(self, step: int) -> bool:
        """Whether this step has been measured by this process."""
        return self._step == step

    def at(self, step: int) -> dict[str, float]:
        """Returns what was measured at this step, if anything."""
        return self._metrics if self._step == step else {}

    def found_best(self, step: int) -> bool:
        """Whether this step was measured and is better than all saved ones."""
        return self._best is not None and self._best.beaten_by(self.at(step))

    @property
    def stops_early(self) -> bool:
        """Whether the run ends here because its evaluations no longer improve."""
        return self.early_stop is not None and self.early_stop.stopped

    @property
    def has_best(self) -> bool:
        """Whether early stopping knows a best step."""
        return self.early_stop is not None and self.early_stop.step is not None

    def describe_best(self) -> str:
        """Returns a few words about the best evaluation."""
        if self.early_stop is None or self.early_stop.step is None:
            return "no evaluation was finite"
        return f"the best evaluation was {self.early_stop.value:.4f} at step {self.early_stop.step}"


class Logger:
    """Writes the log lines of a run.

    pending   whether the line of the step from which the run resumes is still to be written
    """

    def __init__(
        self,
        run: Run,
        opened: OpenWorkdir,
        accumulator: MetricAccumulator,
        evaluation: HeldOutEvaluation,
        clock: Clock,
        meta: Mapping[str, Any],
    ) -> None:
        self._opened, self._accumulator, self._evaluation, self._clock = opened, accumulator, evaluation, clock
        self._every, self._epochs_before = max(run.config.log_every, 1), run.epochs_before
        self._counted_from = run.counted_from
        self._budgeted = clock.budget > 0 or bool(run.config.budget_replay)
        self.pending, self._resumes = bool(meta.get("unlogged", False)), bool(meta)
        self._first = meta.get("step", 0)
        # A branch begins its log: lines in its workdir are of a run that left no checkpoint, and not of the trunk.
        self._writer = MetricsWriter(run.workdir, 0 if branch.BRANCHED in meta else self._first - self.pending)

    def due(self, step: int) -> bool:
        """Whether a line is written at this step: every log_every steps, and where the clock was refreshed."""
        return self._clock.refreshed or step % self._every == 0

    def log(self, step: int, evaluated: bool, waited_seconds: float) -> dict[str, float | None]:
        """Writes a line, with the evaluation of this step if `evaluated`; returns the values for the progress line.

        waited_seconds   spent waiting for batches since the loop began
        """
        self._opened.check_held()
        evaluation = self._evaluation.at(step) if evaluated else {}
        if evaluated and self._evaluation.early_stop:
            self._evaluation.early_stop.note(step, evaluation)
        self.pending = False
        values = self._accumulator.close(waited_seconds)
        measured: dict[str, float | None] = {f"eval_{name}": value for name, value in evaluation.items()}
        shown = {name: values[name] for name in values if "loss" in name or "accuracy" in name}
        shown |= {name: value for name, value in measured.items() if "/" not in name}  # without those of each source
        shown["tokens/s"] = values["tokens_per_second"]
        if self._epochs_before is not None:
            read = self._epochs_before(step, self._counted_from)
            values |= {f"epochs/{name}": epochs for name, epochs in read.items()}
        if self._budgeted:
            values["budget_fraction"] = self._clock.fraction
        self._writer.write(step, values | measured)
        return shown

    def correct_fraction(self, clock: Clock) -> None:
        """Writes the fraction of the step from which the run resumes into the log, which repeats the run.

        clock   has been read for that step
        Call it once, after the line that may be pending: also for a run that trains no further, since an extension
        that was killed before its first checkpoint has left another fraction there, and for one that is stopped here,
        since its checkpoint has the fraction and the run that resumes does not log it.
        """
        if self._resumes and self._budgeted:
            self._opened.check_held()
            self._writer.correct(self._first, {"budget_fraction": clock.fraction}, append=clock.refreshed)

    def flush(self) -> None:
        """Writes all lines so far, which a run that resumes from a later checkpoint does not log again."""
        self._writer.flush()

    def close(self, flush: bool = True) -> None:
        """Ends the log, without a last write to a store unless `flush`."""
        self._writer.close(flush)


class Saver:
    """Saves the checkpoints of a run, with everything that it needs to resume as if it had not stopped."""

    def __init__(
        self,
        run: Run,
        opened: OpenWorkdir,
        accumulator: MetricAccumulator,
        evaluation: HeldOutEvaluation,
        clock: Clock,
        meta: Mapping[str, Any],
        logger: Logger,
    ) -> None:
        self._config, self._opened, self._clock, self._logger = run.config.checkpoint, opened, clock, logger
        self._accumulator, self._evaluation, self._tokens_before = accumulator, evaluation, run.tokens_before
        self._saved_step, self._saved_seconds = meta.get("step", 0), clock.agreed

    def due(self, step: int, logged: bool) -> bool:
        """Whether to save this step: by its number, because it is the best one, or by the clock.

        With several processes the clock of process 0 decides, at steps that are logged.
        """
        every, every_minutes = (self._config.every_steps, self._config.keep_every), self._config.every_minutes
        if any(steps > 0 and step % steps == 0 for steps in every) or self._evaluation.found_best(step):
            return True
        if every_minutes <= 0 or not (logged or jax.process_count() == 1):
            return False
        return (self._clock.agreed - self._saved_seconds) / 60 >= every_minutes

    def save(self, step: int, state: TrainState, unlogged: bool = False) -> None:
        """Starts to save a step; for a step that is saved already, only records what was measured since.

        unlogged   the log line and the evaluation of this step are still to come when the run resumes
        """
        self._opened.check_held()
        checkpoints = self._opened.checkpoints
        evaluation, early_stop = self._evaluation.at(step), self._evaluation.early_stop
        with self._accumulator.paused():
            if step == self._saved_step:
                checkpoints.wait()
                if distributed.broadcast_from_primary(checkpoints.latest_step()) == step:
                    checkpoints.measured(step, evaluation)
                    self._saved_seconds = self._clock.agreed
                    return
            meta = {
                "step": step,
                "seconds": self._clock.elapsed,
                "budget_fraction": self._clock.fraction,
                "window": self._accumulator.state(),
                "skipped": self._accumulator.skipped,
                "provenance": self._opened.provenance,
                "unlogged": unlogged,
                EVALUATION: evaluation,
            }
            if early_stop:
                meta["early_stop"] = early_stop.state()
            if self._tokens_before is not None:
                meta[TOKENS_BEFORE] = self._tokens_before(step)
            self._logger.flush()
            checkpoints.save(step, state.params, state.optimizer_state, meta, state.average)
        self._saved_step, self._saved_seconds = step, self._clock.agreed


class RunRecorder:
    """The accumulator, evaluation, logger and saver of one run, as its checkpoint's metadata left them."""

    def __init__(
        self,
        run: Run,
        opened: OpenWorkdir,
        meta: Mapping[str, Any],
        evaluators: Sequence[Evaluator],
        clock: Clock,
        report: Callable[[str], None],
    ) -> None:
        self.run, self._opened = run, opened
        check = FiniteCheck(run.config, meta.get("skipped", 0), run.workdir, opened.checkpoints, report)
        self.accumulator = MetricAccumulator(
            run.model,
            meta.get("window", {}),
            check,
            predictions=run.objective.predictions,
            heads=run.objective.heads,
        )
        self.evaluation = HeldOutEvaluation(run, evaluators, opened.checkpoints, meta)
        self.logger = Logger(run, opened, self.accumulator, self.evaluation, clock, meta)
        self.saver = Saver(run, opened, self.accumulator, self.evaluation, clock, meta, self.logger)

    def __enter__(self) -> "RunRecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A run that has replaced this one repeats the lines that are not in the store yet.
        self.logger.close(flush=kind is None or not issubclass(kind, NoLongerHeld))

    def reopen(self) -> None:
        """Removes the result of a run that had finished and now continues. Call it before the first step."""
        self._opened.check_held()
        self.run.forget_result()

    def result(self, step: int, seconds: float, params: dict[str, Any], mesh: Mesh) -> Result:
        """Returns the result of a run that ended at this step with these parameters.

        A run with early stopping results in its best evaluation, whose parameters are read from the checkpoint.
        """
        self._opened.check_held()
        self._opened.checkpoints.wait()
        selected, evaluation, early_stop = step, self.evaluation.at(step), self.evaluation.early_stop
        if early_stop is not None and early_stop.step is not None:
            selected, evaluation = early_stop.step, early_stop.evaluation
            self._opened.checkpoints.write_best()
        if selected != step:
            params = partitioning.put(paths.unflatten(read_params(self.run.workdir, selected)), mesh)
        params = self.run.objective.evaluated_params(params)
        return Result(step, seconds, self.accumulator.tokens, evaluation, params, selected)


def stopped(step: int, workdir: Location) -> Stopped:
    """Returns the exception that ends a run after SIGTERM, once its step is saved."""
    return Stopped(f"SIGTERM: saved step {step} in {workdir}; run the same command to resume")


@contextlib.contextmanager
def saving_on_failure(
    interruption: Interruption, step: int, workdir: Location, save: Callable[[], None]
) -> Iterator[None]:
    """Surrounds an evaluation; when it fails, calls `save` first, so that no training is lost.

    SIGTERM ends an evaluation at once, since it may take longer than whoever sent the signal waits; raises Stopped.
    With several processes nothing is saved after an error, because saving needs all of them.
    """
    try:
        with interruption.at_once():
            yield
    except Interrupted:
        save()
        raise stopped(step, workdir) from None
    except Exception:
        if jax.process_count() == 1:
            save()
        raise
