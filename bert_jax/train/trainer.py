"""The one training loop. Pretraining and fine-tuning pass it another objective, source of batches and evaluators."""

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.command import Stopped, UserError
from bert_jax.data.prefetch import Prefetched, prefetch
from bert_jax.model import attention
from bert_jax.storage.remote import is_remote
from bert_jax.train import distributed, early_stop, partitioning, steps, together
from bert_jax.train.clock import check_end, make_clock
from bert_jax.train.compilation_cache import later_batch_shapes
from bert_jax.train.evaluate import Evaluator
from bert_jax.train.interruption import Interrupted, Interruption
from bert_jax.train.member import Member
from bert_jax.train.metrics import ProgressLine
from bert_jax.train.parameter_summary import device_memory_summary
from bert_jax.train.profiler import Profiler
from bert_jax.train.run import RESULT_FILE, Result, Run, Source, runtime_of
from bert_jax.train.start import check_best, plan_of, write_workdir
from bert_jax.train.state import TrainState
from bert_jax.train.together import Begun

__all__ = ["RESULT_FILE", "Result", "Run", "Source", "fit", "fit_together", "runtime_of"]


def fit(run: Run) -> Result:
    """Trains until the run's steps or minutes are over, going on where the workdir's newest checkpoint stands.

    Raises Stopped after SIGTERM, once a checkpoint is written, and UserError for a workdir that holds another run,
    a batch that does not divide over the mesh, or a loss that is no longer finite.
    """
    return fit_together([run])[0]


def fit_together(runs: Sequence[Run]) -> list[Result]:
    """`fit` of several runs, which differ in seed, peak learning rate and workdir alone, as one program.

    Each workdir comes out as fit would leave it, but for rounding; a run that was begun one way may go on the other.
    One that ends before the others is kept as it is. Raises what fit does, and UserError for what together.refusal
    names.
    """
    run, source = runs[0], together.source_of(runs)
    mesh = _checked_mesh(runs, source)
    profiler = Profiler(run.config.profile, run.workdir)
    with jax.set_mesh(mesh), Interruption() as interruption, contextlib.ExitStack() as opened:
        plan = plan_of(run)
        for step in source.changes:  # refuses a kernel that cannot run before anything is written
            attention.kernels(plan.model, plan.runtime, _slots(source, step))
        evaluators = [make(plan, mesh) for make in run.evaluators]
        check_best(run.config, bool(run.evaluators), run.measured)
        begun = [together.begin(each, len(runs), opened) for each in runs]
        states = together.start_all(begun, plan, mesh)
        overview = together.overview(begun, states, plan)
        state = together.joined(begun, states)
        for each in runs:
            write_workdir(each)
        first = int(state.step)
        slots = _slots(source, first)  # before the loop's thread reads from the source, as the next line
        later = later_batch_shapes(source, first, run.config.steps, mesh)
        loop = _Loop(begun, source, plan, mesh, evaluators, interruption, profiler, state)
        for line in overview:
            loop.progress.report(line)
        loop.progress.report(how_it_runs(plan, mesh, slots))
        if mesh.size > 1:
            loop.progress.report(device_memory_summary(state, mesh))
        try:
            loop.compile_ahead(state, later)
            return loop.train(state)
        finally:
            loop.close()


def _checked_mesh(runs: Sequence[Run], source: Source) -> Mesh:
    """The mesh, once all that can be known to be wrong before anything is compiled or written has been refused."""
    run, config = runs[0], runs[0].config
    check_end(config.steps, config.budget_minutes, config.budget_replay)
    early_stop.check(run.early_stop, config.checkpoint.best)
    for workdir in (each.workdir for each in runs):
        if is_remote(workdir):
            raise UserError(
                f"--workdir {workdir} is in an object store; name a local folder, or one where the bucket is mounted"
            )
        if workdir.exists() and not workdir.is_dir():
            raise UserError(f"--workdir {workdir} is a file; name a folder")
    mesh = partitioning.make_mesh(config.mesh)
    for rows in dict.fromkeys(map(source.rows_at, source.changes)):
        key = "batch_schedule" if getattr(config, "batch_schedule", "") else "batch_size"
        partitioning.check_batch(rows, config.microbatches, mesh, key)
    partitioning.check_model(run.model, mesh)
    return mesh


class _Loop:
    """The loop and what it keeps beside the state: clock, batches, and what each member has of its own."""

    def __init__(
        self,
        begun: Sequence[Begun],
        source: Source,
        plan: steps.Plan,
        mesh: Mesh,
        evaluators: Sequence[Evaluator],
        interruption: Interruption,
        profiler: Profiler,
        state: TrainState,
    ) -> None:
        self.run, self.source, self.mesh = begun[0].run, source, mesh
        self.interruption, self.profiler = interruption, profiler
        self.first = int(state.step)
        going_on = next((each for each in begun if not each.ended), begun[0])
        self.clock = make_clock(going_on.run.config, going_on.meta)
        self.saved_time = time.monotonic()
        more = len(begun) - 1
        self.progress = ProgressLine(self.run.description + (f" and {more} more" if more else ""))
        self.members = [
            Member(
                each,
                evaluators,
                together.taker(number, len(begun), mesh),
                number if more else None,
                self.progress.report,
            )
            for number, each in enumerate(begun)
        ]
        self.batches = self._batches()
        self.train_step = together.jitted(plan, mesh, state, members=len(begun))
        self.arguments = self._arguments()

    @property
    def running(self) -> list[Member]:
        """The members that still train."""
        return [member for member in self.members if member.running]

    def compile_ahead(self, state: TrainState, later: dict[int, Any]) -> None:
        """Compiles the step for batches of other shapes that come later, so that one that cannot be is known now."""
        for step, batch in later.items():
            rows, slots = _shape(batch)
            self.progress.report(f"compiling for step {step} and on, batches of {rows} rows of {slots} slots")
            self.train_step.lower(state, batch, np.float32(0), *self.arguments).compile()

    def train(self, state: TrainState) -> list[Result]:
        with self.batches:
            for step in itertools.count(self.first):
                fraction = self.clock.read(step)
                done = fraction >= 1.0
                if step > self.first or any(member.unlogged for member in self.running):
                    self._between_steps(step, state, done)
                if done or not self.running:
                    break
                if step == self.first and self.interruption.requested:
                    self._save_and_stop(step, state)  # before the step is compiled, which cannot be interrupted
                if step == self.first and distributed.is_primary():
                    for member in self.running:
                        member.run.forget_result()
                batch = next(self.batches)
                if step > self.first and step in self.source.changes:
                    rows, slots = _shape(batch)
                    self.progress.report(f"from step {step} on, batches of {rows} rows of {slots} slots")
                with self.profiler.step(step):
                    state, metrics = self.train_step(state, batch, np.float32(fraction), *self.arguments)
                for member in self.running:
                    member.accumulator.add(step + 1, batch, metrics)
        return self._end(step, state)

    def close(self) -> None:
        self.profiler.stop()
        if not self.profiler.traced:
            self.progress.report(
                f"no step of config.profile={self.run.config.profile} was run here: nothing was traced"
            )
        for member in self.members:
            member.close()
        self.progress.close()

    def _arguments(self) -> tuple[Any, ...]:
        runs, running = zip(*((member.run, member.running) for member in self.members), strict=True)
        return together.arguments(runs, running, self.mesh)

    def _between_steps(self, step: int, state: TrainState, done: bool) -> None:
        """Logs, evaluates, saves and stops, each when it is due, in this order, and before the next batch is drawn."""
        config = self.run.config
        if self.profiler.done(step):
            with self._paused():  # once the last traced step has ended
                self.profiler.stop()
            self.progress.report(f"traced steps {config.profile}: {self.profiler.folder}")
        evaluate = done or (config.eval.every_steps > 0 and step % config.eval.every_steps == 0)
        logged = done or evaluate or self.clock.refreshed or step % max(config.log_every, 1) == 0
        if logged:
            self._log(step, state, evaluate)
        by_steps = config.checkpoint.every_steps > 0 and step % config.checkpoint.every_steps == 0
        best = any(member.found_better(step) for member in self.running)
        over = [member for member in self.running if member.stops_early]
        stop = self.interruption.at_step_end()
        if by_steps or best or over or stop or self._minutes_are_over(logged):
            self._save(step, state)
        for member in over:
            member.ended_at(step, self.clock.elapsed)
            self.progress.report(f"{member.run.workdir}: stopped at step {step}, {member.best()}")
        if over:
            self.arguments = self._arguments()
        if stop and not done and self.running:
            self._save_and_stop(step, state)

    def _save_and_stop(self, step: int, state: TrainState, unlogged: bool = False) -> NoReturn:
        """unlogged: the log line and evaluation of this step are still to come, when the run goes on."""
        self._save(step, state, unlogged)
        for member in self.members:
            member.wait()
        names = " and ".join(str(member.run.workdir) for member in self.running)
        raise Stopped(f"SIGTERM: saved step {step} in {names}; run the same command to go on")

    def _minutes_are_over(self, logged: bool) -> bool:
        """Whether it is time for a checkpoint by the clock: process 0's, which the others ask when a line is logged."""
        every = self.run.config.checkpoint.every_minutes
        if every <= 0 or not (logged or jax.process_count() == 1):
            return False
        return distributed.broadcast_from_primary((time.monotonic() - self.saved_time) / 60 >= every)

    def _batches(self) -> Prefetched[Any]:
        source, mesh = self.source, self.mesh

        @functools.cache
        def local_rows(size: int) -> slice | np.ndarray:
            return partitioning.local_rows(size, mesh)

        def make(step: int) -> Any:
            size = source.rows_at(step)
            return partitioning.place(source.batch(step, local_rows(size)), size, mesh)

        return prefetch(make, self.first, None, self.run.config.data.prefetch)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Around what is not training's time; every flag up to this step is read then."""
        with contextlib.ExitStack() as windows:
            for member in self.running:
                windows.enter_context(member.accumulator.paused())
            yield

    def _log(self, step: int, state: TrainState, evaluate: bool) -> None:
        due = [member for member in self.running if step > self.first or member.unlogged]
        if evaluate:
            self._evaluate_or_save(step, state, due)
        shown = [member.log(step, evaluate, self.clock, self.batches.waited_seconds) for member in due]
        fraction = self.clock.fraction
        left = self.clock.elapsed * (1 - fraction) / fraction if fraction > 0 else None
        self.progress.update(step, fraction, left, together.means(shown))

    def _evaluate_or_save(self, step: int, state: TrainState, members: Sequence[Member]) -> None:
        """Evaluates; when that fails, what was learnt is saved first, unless other processes would have to help.

        SIGTERM ends an evaluation at once, for it may take longer than what sent that will wait.
        """
        for member in self.running:
            member.accumulator.settle()  # a step that was not finite stops the run here, unsaved
        due = [member for member in members if not member.is_measured(step)]
        if not due:
            return
        try:
            with self._paused(), self.interruption.at_once():
                for member in due:
                    member.evaluate(step, state)
        except Interrupted:
            self._save_and_stop(step, state, unlogged=True)
        except Exception:
            if jax.process_count() > 1:
                raise
            self._save(step, state, unlogged=True)
            for member in self.members:
                member.wait()
            raise

    def _save(self, step: int, state: TrainState, unlogged: bool = False) -> None:
        with self._paused():
            for member in self.running:
                member.save(step, state, self.clock, unlogged)
        self.saved_time = time.monotonic()

    def _end(self, step: int, state: TrainState) -> list[Result]:
        """What came of all members; those that ended before the others were saved then."""
        self._evaluate_or_save(step, state, self.members)
        self._save(step, state)
        for member in self.running:
            member.ended_at(step, self.clock.elapsed if step > self.first else None)
        for member in self.members:
            member.wait()
        return [member.result(state, self.mesh, self.interruption.requested) for member in self.members]


def _slots(source: Source, step: int) -> int:
    """T of a step's batch."""
    return _shape(source.batch(step, slice(0, 1)))[1]


def _shape(batch: Any) -> tuple[int, int]:
    """The rows of a batch, of each member of several, and its slots."""
    return batch.input_ids.shape[0], batch.input_ids.shape[-1]


def how_it_runs(plan: steps.Plan, mesh: Mesh, slots: int) -> str:
    """One line: devices, mesh, dtype, layer loop, and the attention kernels for rows of so many slots."""
    loop = "unrolled" if plan.runtime.unrolled(plan.model.layers) else "scanned"
    kernels = " and ".join(attention.kernels(plan.model, plan.runtime, slots))
    return (
        f"{mesh.size} x {jax.devices()[0].device_kind}, mesh {dict(mesh.shape)}, "
        f"compute {plan.runtime.compute_dtype}, layers {loop}, attention {kernels}"
    )
