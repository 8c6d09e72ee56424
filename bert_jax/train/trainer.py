"""Trains one run: the training loop of pretraining and of fine-tuning.

Both pass it a Run (train/run.py): their objective, their source of batches and their evaluators.
"""

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np

from bert_jax.train import initial_state, setup, steps
from bert_jax.train.ahead import CompilingAhead, later_batch_shapes
from bert_jax.train.branch import counting_on
from bert_jax.train.clock import make_clock
from bert_jax.train.compilation_notes import compiling, evaluating
from bert_jax.train.early_stop import has_stopped_early
from bert_jax.train.interruption import Interruption
from bert_jax.train.metrics import ProgressLine
from bert_jax.train.parameter_summary import parameter_count, parameter_table
from bert_jax.train.profiler import Profiler
from bert_jax.train.recorder import RunRecorder, saving_on_failure, stopped
from bert_jax.train.run import RESULT_FILE, Result, Run, Source, runtime_of
from bert_jax.train.state import TrainState

__all__ = ["RESULT_FILE", "Result", "Run", "Source", "fit", "runtime_of"]


def fit(run: Run) -> Result:
    """Trains a run until its steps or its time budget are used up, resuming from the workdir's newest checkpoint.

    Raises Stopped after SIGTERM, once a checkpoint is written, and UserError for a workdir that holds another run, a
    batch size that the mesh does not divide, or a loss that is no longer finite.
    """
    config, source, mesh = run.config, run.source, setup.make_mesh(run, run.source)
    profiler = Profiler(config.profile, run.workdir)
    with jax.set_mesh(mesh), Interruption() as interruption, contextlib.ExitStack() as stack:
        plan = setup.make_plan(run)
        evaluators = setup.make_evaluators(run, plan, mesh)
        opened = stack.enter_context(setup.open_workdir(run))
        state, meta = initial_state.restore_or_initialize(run, plan, mesh, opened.checkpoints)
        run = counting_on(run, opened.provenance, meta)
        setup.write_workdir(run, opened.check_held)
        first, ended = int(state.step), has_stopped_early(run.early_stop, config.checkpoint.best, meta)
        clock = make_clock(config, meta, run.length)
        progress = stack.enter_context(ProgressLine(run.description))
        recorder = stack.enter_context(RunRecorder(run, opened, meta, evaluators, clock, progress.report))
        evaluation, logger, saver = recorder.evaluation, recorder.logger, recorder.saver
        stack.callback(profiler.close, progress.report)
        _report_start(run, plan, mesh, state, meta, opened, progress)
        train_step = steps.jitted(plan, mesh, state)
        arguments = (setup.training_key(run, mesh), setup.place_constants(run, mesh))
        fraction = clock.read(first)
        finished = ended or fraction >= 1.0
        later = {} if finished else later_batch_shapes(source, first, run.end, mesh, run.shapes_at)
        ahead = stack.enter_context(CompilingAhead(train_step, state, later, arguments, mesh, progress.report))
        depth = 0 if finished else config.data.prefetch
        batches = stack.enter_context(setup.prefetch_batches(source, mesh, first, depth))

        for step in itertools.count(first):
            if step > first:
                fraction = clock.read(step)
            done = ended or fraction >= 1.0
            if step > first or logger.pending:
                if evaluated := done or evaluation.due(step):
                    _evaluate(step, state, recorder, interruption, evaluating(progress, clock, evaluation.begins))
                if logged := evaluated or logger.due(step):
                    shown = logger.log(step, evaluated, batches.waited_seconds)
                    progress.update(step, fraction, clock.remaining, shown)
                if evaluation.stops_early or saver.due(step, logged):
                    saver.save(step, state)
            if step == first:
                logger.correct_fraction(clock)
            stop = interruption.at_step_end()
            if done or evaluation.stops_early:
                break
            if stop:  # also before the first step, because its compilation cannot be interrupted
                saver.save(step, state)
                raise stopped(step, run.workdir)
            if step == first:
                recorder.reopen()
            batch = next(batches)
            if step > first and step in source.changes:
                progress.report(f"from step {step}: {setup.describe_batch(batch)}")
            ahead.wait_for(batch)
            with profiler.step(step), compiling(progress) if step == first else contextlib.nullcontext():
                state, metrics = train_step(state, batch, np.float32(fraction), *arguments)
            if step == first:
                clock.start_estimate()
            recorder.accumulator.add(step + 1, batch, metrics)
            profiler.end_step(step + 1, recorder.accumulator.paused, progress.report)

        batches.close()
        if evaluation.stops_early and not ended:
            progress.report(f"{run.workdir}: stopped early at step {step}; {evaluation.describe_best()}")
        if not evaluation.is_measured(step) and not (ended and evaluation.has_best):
            # A finished run is evaluated again, and trained no further.
            _evaluate(step, state, recorder, interruption, evaluating(progress, clock, evaluation.begins))
        saver.save(step, state)
        seconds = clock.elapsed if step > first else meta.get("seconds", 0.0)
        result = recorder.result(step, seconds, state.params, mesh)
    # SIGTERM may also have arrived while the last save ended.
    return dataclasses.replace(result, stop_requested=interruption.requested)


def _evaluate(
    step: int,
    state: TrainState,
    recorder: RunRecorder,
    interruption: Interruption,
    notes: contextlib.AbstractContextManager[None],
) -> None:
    """Evaluates a step outside of training time. When that fails, the step is saved before the error is raised."""
    save = functools.partial(recorder.saver.save, step, state, unlogged=True)
    # Pausing waits for the last step first: one that is not finite stops the run here, and is not saved.
    with recorder.accumulator.paused(), saving_on_failure(interruption, step, recorder.run.workdir, save), notes:
        recorder.evaluation.measure(step, state.params, state.average)


def _report_start(
    run: Run,
    plan: steps.Plan,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    meta: dict[str, Any],
    opened: setup.OpenWorkdir,
    progress: ProgressLine,
) -> None:
    """Reports from where the run starts, what it trains, and on what."""
    length = setup.batch_length(run.source, int(state.step))
    ended = has_stopped_early(run.early_stop, run.config.checkpoint.best, meta)
    lines = setup.describe_start(run, meta, opened.differences, ended)
    lines += [] if ended else setup.describe_optimizer(run, meta)
    if run.length is not None:
        lines.append(f"a run of {run.length.tokens:,.0f} tokens: {run.length.steps:,} steps")
    lines += [*(run.describe_data(run.end, run.counted_from) if run.describe_data else ()), *run.notes]
    if not meta:
        lines += [*(parameter_table(state.params, plan) if run.verbose else []), parameter_count(state.params)]
    for line in lines + setup.describe_program(plan, mesh, state, length):
        progress.report(line)
