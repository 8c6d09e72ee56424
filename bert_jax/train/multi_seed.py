"""Trains runs that differ only in seed, peak learning rate and workdir as one program, their states stacked [K, ...].

An accelerator, which one small model leaves idle for part of the time, should train a few side by side for little more
than one; nobody has measured it. On a CPU, whose cores one model fills, nothing is gained: five seeds of BERT-Mini
train at 0.84 times the speed of training them in turn (benchmarks/seeds.py). The arithmetic of each run is what it is
alone, except for the order of sums within a matmul.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.command import UserError
from bert_jax.config import TrainConfig
from bert_jax.train import initial_state, setup, steps
from bert_jax.train.ahead import CompilingAhead, later_batch_shapes
from bert_jax.train.clock import Clock, make_clock
from bert_jax.train.compilation_notes import compiling, evaluating
from bert_jax.train.early_stop import has_stopped_early
from bert_jax.train.evaluate import Evaluator
from bert_jax.train.interruption import Interruption
from bert_jax.train.metrics import ProgressLine
from bert_jax.train.parameter_summary import parameter_count, parameter_table
from bert_jax.train.profiler import Profiler
from bert_jax.train.recorder import RunRecorder, saving_on_failure, stopped
from bert_jax.train.run import Result, Run
from bert_jax.train.stacked_states import StackedSource, jitted, stack_states, step_arguments, taking
from bert_jax.train.state import TrainState


def refusal(config: TrainConfig) -> str:
    """Returns why runs of this configuration cannot be one program, or an empty string where they can."""
    if jax.process_count() > 1:
        return "with several processes, seeds are trained one after the other"
    if config.mesh.fsdp != 1 or config.mesh.tensor != 1:
        return "each device holds its models whole, so mesh.fsdp and mesh.tensor must be 1"
    if config.mesh.shard_optimizer:
        return "each device holds its optimizer states whole, so mesh.shard_optimizer must be False"
    if getattr(config, "train_layers", "").startswith("gradual"):
        return "with gradual unfreezing (train_layers), the optimizer state of a run depends on its step"
    if config.distill.teacher:
        return "runs with a teacher (distill.teacher) are trained one after the other"
    if config.prng != "threefry2x32":
        return f"prng={config.prng} gives other numbers for several keys at once than for one; use threefry2x32"
    return ""


def fit(runs: Sequence[Run]) -> list[Result]:
    """Trains runs as trainer.fit does, as one program, and returns their results in the same order.

    Each workdir ends up as trainer.fit would leave it, except for rounding, and a run that was begun one way may
    resume the other way. A run that ends before the others keeps its state. Raises what trainer.fit raises, and
    UserError for what `refusal` names.
    """
    config, source = runs[0].config, stacked_source(runs)
    mesh, *_ = [setup.make_mesh(run, source) for run in runs]
    profiler = Profiler(config.profile, runs[0].workdir)
    with jax.set_mesh(mesh), Interruption() as interruption, contextlib.ExitStack() as stack:
        plan = setup.make_plan(runs[0])
        evaluators = setup.make_evaluators(runs[0], plan, mesh)
        # They resume from a step that all have, and may be killed while only some have saved the next one.
        keep = max(config.checkpoint.keep, 2) if config.checkpoint.keep else 0
        seeds = [Seed(run, stack.enter_context(setup.open_workdir(run, keep))) for run in runs]
        states = restore_or_initialize(seeds, plan, mesh)
        lines = _describe_start(seeds, states, plan)
        state = stack_states(states, [not seed.ended for seed in seeds])
        for seed in seeds:
            setup.write_workdir(seed.run, seed.opened.check_held)
        first = int(state.step)
        progress = stack.enter_context(ProgressLine(f"{runs[0].description} and {len(runs) - 1} more"))
        stack.callback(profiler.close, progress.report)
        group = SeedGroup(seeds, evaluators, mesh, progress, stack)
        for line in lines + setup.describe_program(plan, mesh, state, setup.batch_length(source, first)):
            progress.report(line)
        finished = group.clock.read(first) >= 1.0 or not group.running
        later = {} if finished else later_batch_shapes(source, first, config.steps, mesh, runs[0].shapes_at)
        train_step = jitted(plan, mesh, state)
        ahead = stack.enter_context(CompilingAhead(train_step, state, later, group.arguments, mesh, progress.report))
        depth = 0 if finished else config.data.prefetch
        batches = stack.enter_context(setup.prefetch_batches(source, mesh, first, depth))

        for step in itertools.count(first):
            done = (group.clock.read(step) if step > first else group.clock.fraction) >= 1.0
            if step > first or group.pending:
                shown = group.between_steps(step, state, done, interruption, batches.waited_seconds)
                if shown is not None:
                    progress.update(step, group.clock.fraction, group.clock.remaining, shown)
            if step == first:
                group.correct_fractions()
            stop = interruption.at_step_end()
            if done or not group.running:
                break
            if stop:
                group.save(step, state)
                raise stopped(step, [seed.run.workdir for seed in group.running])
            if step == first:
                for seed in group.running:
                    seed.recorder.reopen()
            batch = next(batches)
            if step > first and step in source.changes:
                progress.report(f"from step {step}: {setup.describe_batch(batch)}")
            ahead.wait_for(batch)
            with profiler.step(step), compiling(progress) if step == first else contextlib.nullcontext():
                state, metrics = train_step(state, batch, np.float32(group.clock.fraction), *group.arguments)
            if step == first:
                group.clock.start_estimate()
            for seed in group.running:
                seed.recorder.accumulator.add(step + 1, batch, metrics)
            profiler.end_step(step + 1, group.paused, progress.report)

        batches.close()
        results = group.finish(step, state, step > first, interruption)
    # SIGTERM may also have arrived while the last save ended.
    return [dataclasses.replace(result, stop_requested=interruption.requested) for result in results]


@dataclass
class Seed:
    """One of the runs: its open workdir, what its checkpoint records, and whether it has ended."""

    run: Run
    opened: setup.OpenWorkdir
    meta: dict[str, Any] = field(default_factory=dict)  # empty: it begins
    last: int = 0  # the step from which it resumes, and later the one at which it ended
    ended: bool = False  # it only keeps its place in the stacked state
    seconds: float = 0.0  # of training, once it has ended

    recorder: RunRecorder = field(init=False)

    def restore(self, plan: steps.Plan, mesh: Mesh, among: Collection[int] | None = None) -> TrainState:
        """Restores or initializes the state of this run alone, and notes its metadata and step."""
        state, self.meta = initial_state.restore_or_initialize(self.run, plan, mesh, self.opened.checkpoints, among)
        self.last, self.seconds = int(state.step), float(self.meta.get("seconds", 0.0))
        return state

    def end(self, step: int, seconds: float) -> None:
        """Records that this run has ended at a step, after so many seconds of training."""
        self.ended, self.last, self.seconds = True, step, seconds


class SeedGroup:
    """The recorders of runs that train as one program, and the clock that they share."""

    def __init__(
        self,
        seeds: Sequence[Seed],
        evaluators: Sequence[Evaluator],
        mesh: Mesh,
        progress: ProgressLine,
        stack: contextlib.ExitStack,
    ) -> None:
        self.seeds, self._mesh, self._progress = seeds, mesh, progress
        going_on = next((seed for seed in seeds if not seed.ended), seeds[0])
        self.clock: Clock = make_clock(going_on.run.config, going_on.meta)
        for index, seed in enumerate(seeds):
            recorder = RunRecorder(seed.run, seed.opened, seed.meta, evaluators, self.clock, progress.report, index)
            seed.recorder = stack.enter_context(recorder)
        self.arguments = self._arguments()

    @property
    def running(self) -> list[Seed]:
        """The runs that still train."""
        return [seed for seed in self.seeds if not seed.ended]

    @property
    def pending(self) -> bool:
        """Whether a run has still to log the step from which it resumes."""
        return any(seed.recorder.logger.pending for seed in self.running)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds what is not training time; first waits for the last step of all runs."""
        with contextlib.ExitStack() as stack:
            for seed in self.running:
                stack.enter_context(seed.recorder.accumulator.paused())
            yield

    def between_steps(
        self, step: int, state: TrainState, done: bool, interruption: Interruption, waited_seconds: float
    ) -> dict[str, float | None] | None:
        """Evaluates, logs and saves, each when it is due; returns the means of what was logged, None if nothing was."""
        shown, running = None, self.running
        leader = running[0].recorder
        # The runs that resume from this step have logged it, unless their line is pending.
        due = [seed for seed in running if step > seed.last or seed.recorder.logger.pending]
        if evaluated := done or leader.evaluation.due(step):
            self._evaluate(step, state, due, interruption)
        if logged := evaluated or leader.logger.due(step):
            values = [seed.recorder.logger.log(step, evaluated, waited_seconds) for seed in due]
            shown = means(values) | {"tokens/s": sum(one["tokens/s"] or 0.0 for one in values)}  # of the program
        ending = [seed for seed in running if seed.recorder.evaluation.stops_early]
        if ending or any(seed.recorder.saver.due(step, logged) for seed in running):
            self.save(step, state)
        for seed in ending:
            seed.end(step, self.clock.elapsed)
            best = seed.recorder.evaluation.describe_best()
            self._progress.report(f"{seed.run.workdir}: stopped early at step {step}; {best}")
        if ending:
            self.arguments = self._arguments()
        return shown

    def correct_fractions(self) -> None:
        """Corrects the fraction in each log at the step from which its run resumes (Logger.correct_fraction)."""
        for seed in self.seeds:
            clock = _clock_at(seed.last, seed.run, seed.meta) if seed.ended else self.clock
            seed.recorder.logger.correct_fraction(clock)

    def save(self, step: int, state: TrainState, unlogged: bool = False) -> None:
        """Starts to save this step of each run that still trains."""
        with self.paused():
            for index, seed in enumerate(self.seeds):
                if not seed.ended:
                    seed.recorder.saver.save(step, self._state_of(index, state), unlogged)

    def finish(self, step: int, state: TrainState, trained: bool, interruption: Interruption) -> list[Result]:
        """Evaluates and saves what is left at the end, and returns the result of each run."""
        unmeasured = [
            seed
            for seed in self.seeds
            if not seed.recorder.evaluation.is_measured(seed.last if seed.ended else step)
            and not (seed.ended and seed.recorder.evaluation.has_best)
        ]
        if unmeasured:
            self._evaluate(step, state, unmeasured, interruption)
        self.save(step, state)
        for seed in self.running:
            seed.end(step, self.clock.elapsed if trained else seed.seconds)
        take = taking(self._mesh)
        return [
            seed.recorder.result(seed.last, seed.seconds, take(np.int32(index), state.params), self._mesh)
            for index, seed in enumerate(self.seeds)
        ]

    def _evaluate(self, step: int, state: TrainState, seeds: Sequence[Seed], interruption: Interruption) -> None:
        save = functools.partial(self.save, step, state, unlogged=True)
        workdirs = [seed.run.workdir for seed in self.running]
        begins = all(seed.recorder.evaluation.begins for seed in self.seeds)
        notes = evaluating(self._progress, self.clock, begins)
        with self.paused(), saving_on_failure(interruption, step, workdirs, save), notes:
            for seed in seeds:
                index = self.seeds.index(seed)
                params, average = taking(self._mesh)(np.int32(index), (state.params, state.average))
                seed.recorder.evaluation.measure(seed.last if seed.ended else step, params, average)

    def _arguments(self) -> tuple[Any, ...]:
        """The arguments of the step after state, batch and fraction."""
        runs = [seed.run for seed in self.seeds]
        return step_arguments(runs, [not seed.ended for seed in self.seeds], self._mesh)

    def _state_of(self, index: int, state: TrainState) -> TrainState:
        return TrainState(state.step, *taking(self._mesh)(np.int32(index), tuple(state)[1:]))


def stacked_source(runs: Sequence[Run]) -> StackedSource:
    """Returns the batches of all runs. Raises UserError for runs that cannot be one program."""
    if why := refusal(runs[0].config):
        raise UserError(
            f"these runs cannot be trained together: {why}; or train them in turn: --config.run_together=no"
        )
    return StackedSource([run.source for run in runs])


def restore_or_initialize(seeds: Sequence[Seed], plan: steps.Plan, mesh: Mesh) -> list[TrainState]:
    """Returns the state of each run, and notes its metadata and step in its Seed.

    Runs that have not ended start at one step: the newest of which all have an undamaged checkpoint, or the first.
    """
    found: dict[int, TrainState] = {}
    for index, seed in enumerate(seeds):
        newest = seed.opened.checkpoints.newest_meta() or {}
        if has_ended(seed.run, newest):
            state = seed.restore(plan, mesh)
            # Where the last checkpoint turned out to be damaged, the run has not ended: it trains with the others.
            seed.ended = seed.last == newest.get("step") and has_ended(seed.run, seed.meta)
            if seed.ended:
                found[index] = state
    training = [index for index in range(len(seeds)) if index not in found]
    saved = [set(seeds[index].opened.checkpoints.steps()) for index in training]
    common = set.intersection(*saved) if saved else set()
    together: dict[int, TrainState] = {}
    while training and not together:
        together = {index: seeds[index].restore(plan, mesh, common) for index in training}
        oldest = min(seeds[index].last for index in training)
        if any(seeds[index].last > oldest for index in training):  # a checkpoint was damaged: all go back before it
            common, together = {step for step in common if step <= oldest}, {}
    found |= together
    for index in training:
        _replace_later_steps(seeds[index])
    return [found[index] for index in range(len(seeds))]


def _replace_later_steps(seed: Seed) -> None:
    """Lets a run's next save replace its checkpoints after the step from which it resumes, and reports it.

    Left in place, they would be taken for newer checkpoints of this run, though its end may have changed.
    """
    if later := seed.opened.checkpoints.replace_after(seed.last):
        seed.opened.differences.append(
            f"{seed.run.workdir} goes back from step {max(later)} to step {seed.last}: runs that are trained together "
            "resume from a step that all have saved; --config.run_together=no resumes each from its own"
        )


def has_ended(run: Run, meta: Mapping[str, Any]) -> bool:
    """Whether a checkpoint with this metadata is the last one of its run (empty: the run begins)."""
    if not meta or meta.get("unlogged"):
        return False
    stopped_early = has_stopped_early(run.early_stop, run.config.checkpoint.best, meta)
    return stopped_early or _clock_at(meta["step"], run, meta).fraction >= 1.0


def _clock_at(step: int, run: Run, meta: Mapping[str, Any]) -> Clock:
    """Returns the clock of one run, read for the step of its checkpoint."""
    clock = make_clock(run.config, meta)
    clock.read(step)
    return clock


def means(shown: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Returns the mean over runs of each value; None where a run has none, as after skipped steps alone."""
    found: dict[str, float | None] = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(shown)):
        values = [each.get(name) for each in shown]
        known = [value for value in values if value is not None]
        found[name] = sum(known) / len(known) if len(known) == len(values) else None
    return found


def _describe_start(seeds: Sequence[Seed], states: Sequence[TrainState], plan: steps.Plan) -> list[str]:
    """Returns lines about where each run starts, and the parameters of those that begin."""
    lines: list[str] = []
    for seed in seeds:
        lines += setup.describe_start(seed.run, seed.meta, seed.opened.differences, seed.ended)
    lines += dict.fromkeys(
        line for seed in seeds if not seed.ended for line in setup.describe_optimizer(seed.run, seed.meta)
    )
    new = next((state for seed, state in zip(seeds, states, strict=True) if not seed.meta), None)
    if new is not None:
        verbose = seeds[0].run.verbose
        lines += [*(parameter_table(new.params, plan) if verbose else []), parameter_count(new.params)]
    return lines
