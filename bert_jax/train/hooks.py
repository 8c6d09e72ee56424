"""Hooks, which the loop calls between two steps: evaluation, log, progress, checkpoints, early stopping, profiles.

Read in this order: Point, which a hook receives; Hook, the interface, also for your own hooks; Recorder, which the
standard hooks share (clock, sums of metrics, log, checkpoints); the standard hooks, in the order of `standard_hooks`;
Interruption, which turns SIGTERM and Ctrl-C into a flag.
"""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax
from jax.sharding import Mesh

from bert_jax.errors import Stopped
from bert_jax.model import layers
from bert_jax.storage.files import scratch_folder
from bert_jax.storage.hold import NoLongerHeld
from bert_jax.storage.location import Location, add_files, is_stored, store_errors
from bert_jax.train import distributed, sharding, workdir
from bert_jax.train.checkpoint import EVALUATION
from bert_jax.train.clock import make_clock
from bert_jax.train.compilation import compiling, evaluating
from bert_jax.train.evaluation import EarlyStop, before_batch, has_stopped_early
from bert_jax.train.metric_accumulator import FiniteCheck, MetricAccumulator
from bert_jax.train.metrics import OF_HOSTS, MetricsWriter, ProgressLine
from bert_jax.train.prepare import OpenWorkdir, traced_steps
from bert_jax.train.run import TOKENS_BEFORE, Result, Run
from bert_jax.train.run_record import seconds_since_first
from bert_jax.train.step import Plan, TrainState
from bert_jax.train.watchdog import COMPILING, EVALUATING, SAVING, activity
from bert_jax.train.workdir import read_params


@dataclass
class Point:
    """A run between two steps. The standard hooks fill in the last fields for the hooks after them."""

    step: int  # the number of steps done
    state: TrainState  # valid until the next step, which takes its memory
    fraction: float  # the part of the run that is done, from 0 to 1
    done: bool  # the run ends here
    waited_seconds: float = 0.0  # spent waiting for batches since the loop began
    evaluated: bool = False
    evaluation: dict[str, float] = field(default_factory=dict)  # held-out metrics of this step, if it was evaluated
    line: dict[str, float | None] | None = None  # the values logged at this step; None: nothing


class Hook:
    """An action between two steps of a run, called by all processes.

    `every` is the number of steps between two calls; 0: only at the end. Its seconds count as training time, except
    for standard hooks.
    """

    every = 0

    def due(self, point: Point) -> bool:
        """Whether to call it here: at multiples of `every`, and at the end."""
        return point.done or (self.every > 0 and point.step % self.every == 0)

    def __call__(self, point: Point) -> None:
        """Acts on the run; `point` is valid until the next step."""

    def during(self, step: int) -> AbstractContextManager[None]:
        """Returns a context for dispatching step number `step`, counted from 0."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Releases resources; called once when the run ends, also after an error."""


class Recorder:
    """The standard hooks' shared state, restored from the checkpoint's metadata."""

    def __init__(
        self, run: Run, opened: OpenWorkdir, meta: dict[str, Any], interruption: "Interruption", progress: ProgressLine
    ) -> None:
        self.run, self.opened, self.interruption, self.progress = run, opened, interruption, progress
        self.report = progress.report
        self.clock = make_clock(run.config, meta, run.length)
        self.ended = has_stopped_early(run.early_stop, run.config.checkpoint.best, meta)
        self.unlogged = bool(meta.get("unlogged", False))  # the first step's evaluation and line are still to come
        self.budgeted = self.clock.budget > 0 or bool(run.config.budget_replay)
        # A branch has metadata, too: it resumes another run.
        self.first, self._resumes, self._seconds = meta.get("step", 0), bool(meta), meta.get("seconds", 0.0)
        self.finite = FiniteCheck(run.config, meta.get("skipped", 0), run.workdir, opened.checkpoints, self.report)
        # The sums since the last log line come from the checkpoint: a restart changes no mean.
        self.accumulator = MetricAccumulator(run.model, meta.get("window", {}), self.finite, run.objective)
        best = opened.checkpoints.best
        self.early_stop: EarlyStop | None = None
        if run.early_stop and best:
            evaluations = opened.checkpoints.evaluations()
            self.early_stop = EarlyStop(run.early_stop, best, meta.get("early_stop", {}), self.first, evaluations)
        # A branch begins its own log: existing lines in its workdir come from a run that left no checkpoint.
        self.writer = MetricsWriter(run.workdir, 0 if workdir.BRANCHED in meta else self.first - self.unlogged)
        # For the goodput. A branch's record begins with the branch, and so do its steps.
        self._stepped_before = 0.0 if workdir.BRANCHED in meta else meta.get("step_seconds", 0.0)
        self._began = time.monotonic() - (seconds_since_first(run.workdir) if distributed.is_primary() else 0.0)
        # The step from which the run resumes is saved already.
        self._saved_step, self.saved_seconds = self.first, self.clock.agreed

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After NoLongerHeld another run has the workdir, and repeats the lines that are not in the store yet.
        self.writer.close(flush=kind is None or not issubclass(kind, NoLongerHeld))

    @property
    def stops_early(self) -> bool:
        """Whether the run ends here because its evaluations no longer improve."""
        return self.early_stop is not None and self.early_stop.stopped

    def point(self, step: int, state: TrainState, waited_seconds: float = 0.0) -> Point:
        """Returns the point after `step` steps. Call it once for each, in order, since it reads the clock."""
        # The clock decides here whether the run ends, before any hook is called at this point.
        fraction = self.clock.read(step)
        done = self.ended or self.stops_early or fraction >= 1.0
        return Point(step, state, fraction, done, waited_seconds)

    @property
    def step_seconds(self) -> float:
        """Seconds spent on steps since the run began, without those that a kill lost."""
        return self._stepped_before + self.accumulator.step_seconds

    def operations(self, line: Mapping[str, float | None]) -> dict[str, float | None]:
        """Returns a log line's values about the processes: the largest over all, whose it is, goodput and saving."""
        # Process 0 writes the log, so only its clock and its record of the starts count.
        values: dict[str, float | None] = {"goodput": self.step_seconds / max(time.monotonic() - self._began, 1e-9)}
        checkpoints = self.opened.checkpoints
        if checkpoints.durable_seconds is not None:
            values["checkpoint_seconds"], checkpoints.durable_seconds = checkpoints.durable_seconds, None
        if jax.process_count() > 1:
            here = {name: value for name in OF_HOSTS if (value := line[name]) is not None}
            for name, (value, process) in distributed.largest(here).items():
                values |= {name: value, f"{name}_process": process}
        return values

    def correct_fraction(self) -> None:
        """Logs the budget fraction of the step from which the run resumes, so that the log can be replayed.

        Call it once, after any pending line.
        """
        # A run that trains no further needs it too: an extension that was killed before its first checkpoint left
        # another fraction there. So does a run that SIGTERM stops here, since the next one does not log it again.
        if self._resumes and self.budgeted:
            self.opened.check_held()
            self.writer.correct(self.first, {"budget_fraction": self.clock.fraction}, append=self.clock.refreshed)

    def save(self, point: Point, unlogged: bool = False) -> None:
        """Starts to save a step with everything needed to resume as if the run had not stopped.

        If the step is saved already, this only records its evaluation. With `unlogged`, the run evaluates and logs the
        step when it resumes.
        """
        self.opened.check_held()
        checkpoints, step, state = self.opened.checkpoints, point.step, point.state
        with activity.during(SAVING), self.accumulator.paused():
            # A step may have been saved before its evaluation: the last one, or the one from which the run resumes. All
            # processes take the same branch, whatever each of them sees on a shared file system.
            if step == self._saved_step:
                checkpoints.wait()
                if distributed.broadcast_from_primary(checkpoints.latest_step()) == step:
                    checkpoints.measured(step, point.evaluation)
                    self.saved_seconds = self.clock.agreed
                    return
            meta = {
                "step": step,
                "seconds": self.clock.elapsed,
                "step_seconds": self.step_seconds,
                "budget_fraction": self.clock.fraction,
                "window": self.accumulator.state(),
                "skipped": self.finite.skipped,
                "provenance": self.opened.provenance,
                "unlogged": unlogged,
                EVALUATION: point.evaluation,
            }
            if self.early_stop:
                meta["early_stop"] = self.early_stop.state()
            if self.run.tokens_before is not None:
                meta[TOKENS_BEFORE] = self.run.tokens_before(step)
            # Lines go first: a run that resumes from the checkpoint does not log them again.
            self.writer.flush()
            checkpoints.save(step, state.params, state.optimizer_state, meta, state.average)
        self._saved_step, self.saved_seconds = step, self.clock.agreed

    def finish(self, point: Point, evaluate: "Evaluate", mesh: Mesh) -> Result:
        """Evaluates and saves the last step and returns the run's result.

        With early stopping, that is the best evaluation; its parameters are read from the checkpoint.
        """
        best = self.early_stop if self.early_stop and self.early_stop.step is not None else None
        # `ended` means that an earlier process stopped early and reported it.
        if self.stops_early and not self.ended:
            result = "no evaluation was finite"
            if best:
                result = f"the best evaluation was {best.value:.4f} at step {best.step}"
            self.report(f"{self.run.workdir}: stopped early at step {point.step}; {result}")
        # With early stopping, the best evaluation of a run that had stopped is known from its checkpoint.
        if not point.evaluated and not (self.ended and best):
            evaluate(point)  # a finished run is evaluated again, and trained no further
        self.save(point)
        self.opened.check_held()
        with activity.during(SAVING):
            self.opened.checkpoints.wait()
        # A finished run that was only evaluated again keeps its seconds of training.
        seconds = self.clock.elapsed if point.step > self.first else self._seconds
        # The result is the last step, or with early stopping the best one, which only its checkpoint still has.
        params, selected, evaluation = point.state.params, point.step, point.evaluation
        if best is not None and best.step is not None:
            # An interrupted run may have saved its best step without best.json.
            selected, evaluation = best.step, best.evaluation
            self.opened.checkpoints.write_best()
        if selected != point.step:
            params = sharding.put(layers.unflatten(read_params(self.run.workdir, selected)), mesh)
        params = self.run.objective.evaluated_params(params)
        return Result(point.step, seconds, self.accumulator.tokens, evaluation, params, selected)


def standard_hooks(recorder: Recorder, evaluate: "Evaluate") -> list[Hook]:
    """Returns every run's hooks, in calling order."""
    # A trace ends first. Early stopping and the log line need the evaluation. A step is saved last, after its line: a
    # checkpoint is never newer than the log, so a run that resumes from it repeats nothing.
    return [Profile(recorder), evaluate, StopEarly(recorder), Log(recorder), Save(recorder)]


@contextlib.contextmanager
def during_step(hooks: Sequence[Hook], step: int) -> Iterator[None]:
    """Enters the hooks' contexts for the dispatch of a step."""
    with contextlib.ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook.during(step))
        yield


class Profile(Hook):
    """Traces the steps (FIRST, LAST) of config.profile (counted from 0, LAST excluded) into WORKDIR/profile.

    Each process writes plugins/profile/TIME/HOST.xplane.pb, which TensorBoard reads (with tensorboard-plugin-profile),
    and HOST.trace.json.gz, which ui.perfetto.dev reads.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.first, self.last = traced_steps(recorder.run.config.profile)
        self.folder = recorder.run.workdir / "profile"
        self._written = self.folder  # by the profiler, which writes to disks only
        self._opened = contextlib.ExitStack()
        self._tracing = False
        self._traced = self.last < 0  # whether there is nothing to trace any more

    def due(self, point: Point) -> bool:
        return self._tracing and point.step >= self.last

    def __call__(self, point: Point) -> None:
        with self._recorder.accumulator.paused():  # waits for dispatched steps, so that the trace holds the last one
            self._stop()
        self._recorder.report(f"traced steps {self.first}:{self.last} into {self.folder}")

    @contextlib.contextmanager
    def during(self, step: int) -> Iterator[None]:
        if self.first <= step < self.last and not self._tracing:
            if is_stored(self.folder):
                self._written = self._opened.enter_context(scratch_folder())
            jax.profiler.start_trace(self._written)
            self._tracing = self._traced = True
        # Marks the step in any trace, also in one that another tool takes. Without a trace it costs almost nothing.
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def close(self) -> None:
        """Writes a trace cut short by the run's end; reports if none of its steps ran."""
        self._stop()
        if not self._traced:
            self._recorder.report(
                f"config.profile={self.first},{self.last}: none of these steps ran, so nothing was traced"
            )

    def _stop(self) -> None:
        if self._tracing:
            # Cleared first, so that close() does not repeat a stop that failed.
            self._tracing = False
            jax.profiler.stop_trace()
            if self._written != self.folder:
                with self._opened, store_errors(self.folder, f"write {self.folder}"):
                    add_files(Path(self._written), self.folder)


class Evaluate(Hook):
    """Measures the held-out metrics, outside of training time."""

    def __init__(self, recorder: Recorder, plan: Plan, mesh: Mesh) -> None:
        self._recorder, self._mesh = recorder, mesh
        self._plan = dataclasses.replace(plan, objective=plan.objective.evaluated)
        self.every = recorder.run.config.eval.every_steps
        self._begins = bool(recorder.run.evaluators)  # the first evaluation of a process compiles

    def __call__(self, point: Point) -> None:
        """Evaluates the step, and saves it if that fails, so that no training is lost.

        Raises:
            Stopped: SIGTERM arrived. It ends an evaluation at once, which may take longer than the sender waits.
        """
        recorder = self._recorder
        notes = evaluating(recorder.progress, recorder.clock, self._begins)
        # Pausing waits for the last step first: one that is not finite stops the run here, and is not saved.
        with recorder.accumulator.paused():
            try:
                with recorder.interruption.at_once(), notes, activity.during(EVALUATING):
                    point.evaluation = self.measure(point.step, point.state.params, point.state.average)
            except Interrupted:
                recorder.save(point, unlogged=True)
                raise stopped(point.step, recorder.run.workdir, recorder.interruption.cause) from None
            except Exception:
                if jax.process_count() == 1:  # saving needs all processes, and only this one may have failed
                    recorder.save(point, unlogged=True)
                raise
        point.evaluated, self._begins = True, False

    def measure(self, step: int, params: dict[str, Any], average: dict[str, Any] | None) -> dict[str, float]:
        """Returns the metrics for the parameters and, as ema_*, for their moving average."""
        run, best = self._recorder.run, self._recorder.opened.checkpoints.best
        # The parameters and their average are measured by one program, so they must have equal shardings.
        trees = {"": params}
        if average is not None and run.evaluators:
            # mesh.shard_optimizer shards the average further than the parameters.
            trees["ema_"] = sharding.put_like(average, params)
        trees = {prefix: run.objective.evaluated_params(tree) for prefix, tree in trees.items()}
        metrics: dict[str, float] = {}
        for evaluator in run.evaluators:
            for prefix, tree in trees.items():
                measured = evaluator(self._plan, self._mesh, tree, step)
                metrics |= {f"{prefix}{name}": value for name, value in measured.items()}
        # If the names were known, prepare.make_mesh has checked them: a metric that is not finite is missing here.
        if best and not run.measured:
            best.check_among(metrics)
        return metrics


class StopEarly(Hook):
    """Ends the run after too many evaluations without a better one (train/evaluation.py)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def due(self, point: Point) -> bool:
        return point.evaluated

    def __call__(self, point: Point) -> None:
        if self._recorder.early_stop:
            self._recorder.early_stop.note(point.step, point.evaluation)
            point.done |= self._recorder.stops_early


class Log(Hook):
    """Writes and shows the log lines, with means over the steps since the last one, and shows the first compilation."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.every = max(recorder.run.config.log_every, 1)

    def due(self, point: Point) -> bool:
        """Whether the step was evaluated, is a multiple of log_every, or refreshed the clock, whose value is logged."""
        return point.evaluated or self._recorder.clock.refreshed or point.step % self.every == 0

    def __call__(self, point: Point) -> None:
        recorder, run = self._recorder, self._recorder.run
        recorder.opened.check_held()
        # Closing waits for the last step and checks it, so a run whose loss is not finite stops before it logs the
        # step.
        line = recorder.accumulator.close(point.waited_seconds)
        line |= recorder.operations(line)
        if run.epochs_before is not None:
            read = run.epochs_before(point.step, run.counted_from)
            line |= {f"epochs/{name}": epochs for name, epochs in read.items()}
        if recorder.budgeted:
            line["budget_fraction"] = point.fraction
        # After an evaluation the line has its metrics, too; hooks that follow read both from the point.
        held_out: dict[str, float | None] = {f"eval_{name}": value for name, value in point.evaluation.items()}
        point.line = line | held_out
        recorder.writer.write(point.step, point.line)
        # On the screen, all held-out metrics but those with a slash, which belong to one source of several.
        shown = {name: line[name] for name in line if "loss" in name or "accuracy" in name} | held_out
        shown = {name: value for name, value in shown.items() if "/" not in name}
        shown["tokens/s"] = line["tokens_per_second"]
        recorder.progress.update(
            point.step, point.fraction, recorder.clock.remaining, shown, keep=bool(point.evaluation)
        )

    @contextlib.contextmanager
    def during(self, step: int) -> Iterator[None]:
        if step != self._recorder.first:  # only the first dispatch compiles; later shapes are compiled ahead
            yield
            return
        recorder = self._recorder
        with compiling(recorder.progress), activity.during(COMPILING), recorder.accumulator.paused():
            yield
        self._recorder.clock.start_estimate()


class Save(Hook):
    """Saves steps by number and by the clock, the best steps and the last one.

    With several processes, process 0's clock decides, at logged steps.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._config = recorder, recorder.run.config.checkpoint

    def due(self, point: Point) -> bool:
        config, best = self._config, self._recorder.opened.checkpoints.best
        # keep_every selects among saved steps, so its multiples have to be saved as well.
        if any(steps > 0 and point.step % steps == 0 for steps in (config.every_steps, config.keep_every)):
            return True
        # A better step is saved wherever it comes: the next step takes the memory of its parameters.
        if self._recorder.stops_early or (best is not None and best.beaten_by(point.evaluation)):
            return True
        # Several processes agree on the clock only at steps that are logged.
        if config.every_minutes <= 0 or not (point.line is not None or jax.process_count() == 1):
            return False
        return (self._recorder.clock.agreed - self._recorder.saved_seconds) / 60 >= config.every_minutes

    def __call__(self, point: Point) -> None:
        self._recorder.save(point)


class Interrupted(BaseException):
    """A signal arrived while the process can leave at once without losing anything."""


class Interruption:
    """Records SIGTERM and Ctrl-C while it is open, so that the loop can save and stop at the end of a step.

    A second Ctrl-C quits without saving. With several processes, jax records SIGTERM and makes all agree on a step;
    Ctrl-C then ends them at once.

    Attributes:
        cause: The signal that arrived, SIGTERM or Ctrl-C; empty if none did.
    """

    def __init__(self) -> None:
        self.cause = ""
        self._at_once = False
        self._several = jax.process_count() > 1
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def at_step_end(self) -> bool:
        """Whether to stop here. Call it once per step or batch; all processes get the same answer."""
        if self._several and not self.cause:
            self.cause = "SIGTERM" if distributed.stop_requested() else ""
        return bool(self.cause)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Surrounds code that only reads and may take long: raises Interrupted if a signal arrives or has arrived.

        With several processes, all leave before the same batch of an evaluation.
        """
        if self._several:
            token = before_batch.set(self._leave_if_asked)
            try:
                yield
            finally:
                before_batch.reset(token)
            return
        self._at_once = True
        try:
            if self.cause:
                raise Interrupted
            yield
        finally:
            self._at_once = False

    def _leave_if_asked(self) -> None:
        if self.at_step_end():
            raise Interrupted

    def __enter__(self) -> "Interruption":
        if self._several:
            return self
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) is signal.SIG_IGN:  # as Ctrl-C is for a job in the background
                continue
            with contextlib.suppress(ValueError):  # outside the main thread, as in a notebook's worker, none arrives
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        # A handler runs between any two instructions of the main thread, so it only sets flags, unless leaving is safe.
        if number == signal.SIGINT:
            if self.cause == "Ctrl-C":
                raise KeyboardInterrupt
            with contextlib.suppress(RuntimeError):  # it arrived while a line was printed, which cannot be interrupted
                distributed.note("Ctrl-C: saving at the end of this step. Press it again to quit without saving")
        self.cause = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if self._at_once:
            # A second signal must not interrupt the save that follows.
            self._at_once = False
            raise Interrupted


def stopped(step: int, workdir: Location, cause: str) -> Stopped:
    """Makes the exception for ending a run after a signal, once its step is saved."""
    return Stopped(f"saved step {step} in {workdir}; run the same command to resume", cause)
