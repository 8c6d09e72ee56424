"""The training loop of pretraining and fine-tuning. Both pass it a Run (train/run.py).

Read `fit` from top to bottom. The preparation is in train/prepare.py, a step in train/step.py, and the hooks between
two steps in train/hooks.py.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from bert_jax.train import prepare
from bert_jax.train.compilation import CompilingAhead, later_batch_shapes
from bert_jax.train.describe import describe, describe_batch
from bert_jax.train.hooks import Evaluate, Hook, Interruption, Recorder, during_step, standard_hooks, stopped
from bert_jax.train.metrics import ProgressLine
from bert_jax.train.run import Result, Run
from bert_jax.train.run_record import record_start
from bert_jax.train.step import jitted
from bert_jax.train.watchdog import COMPILING, WAITING, activity
from bert_jax.train.workdir import counting_on

# Batches that a thread makes ahead: enough to hide a slow one, such as the first of a new shard.
PREFETCH = 4


# A pass of the loop begins at the point after `step` steps: hooks, then the decision to end, then step number `step`.
# So a run starts, resumes and ends at a point, never within a step. The step takes the memory of the state before it,
# so hooks see that state only until then. Adding a step's metrics waits for the step before, which keeps the host at
# most one step ahead of the devices.
def fit(run: Run, hooks: Sequence[Hook] = ()) -> Result:
    """Trains a run until its steps or its budget are used up, resuming from the workdir's newest checkpoint.

    Raises:
        Stopped: SIGTERM or Ctrl-C arrived, and a checkpoint is written.
        UserError: `prepare` refuses the run, or the loss is no longer finite.
    """
    source, mesh = run.source, prepare.make_mesh(run)
    with jax.set_mesh(mesh), Interruption() as interruption, activity.run(), contextlib.ExitStack() as stack:
        # Checks that need no workdir come before it is opened, so that a refused run changes nothing in it.
        plan = prepare.make_plan(run)
        opened = stack.enter_context(prepare.open_workdir(run))
        state, meta = prepare.restore_or_initialize(run, plan, mesh, opened.checkpoints)
        run = counting_on(run, opened.provenance, meta)  # before anything reads the run's tokens
        prepare.write_workdir(run, opened.check_held)
        record_start(run, opened.provenance, int(state.step), opened.differences)
        progress = stack.enter_context(ProgressLine(run.description))
        recorder = stack.enter_context(Recorder(run, opened, meta, interruption, progress))
        evaluate = Evaluate(recorder, plan, mesh)
        hooks = [*standard_hooks(recorder, evaluate), *hooks]
        for hook in hooks:
            stack.callback(hook.close)  # at the end, also after an error
        for line in describe(run, plan, mesh, state, meta, opened.differences, recorder.ended):
            progress.report(line)
        first = int(state.step)
        point = recorder.point(first, state)
        train_step, arguments = jitted(plan, mesh, state), prepare.step_arguments(run, mesh)
        later = {} if point.done else later_batch_shapes(source, first, run.end, mesh, run.shapes_at)
        with activity.during(COMPILING), recorder.accumulator.paused():
            ahead = stack.enter_context(CompilingAhead(train_step, state, later, arguments, mesh, progress.report))
        batches = stack.enter_context(prepare.prefetch_batches(source, mesh, first, 0 if point.done else PREFETCH))

        for step in itertools.count(first):
            activity.begin_step(step)
            # Nothing is due at the checkpoint's own step, unless it was saved before its evaluation and log line.
            if step > first or recorder.unlogged:
                for hook in hooks:
                    if hook.due(point):
                        hook(point)
            if step == first:
                recorder.correct_fraction()
            stop = interruption.at_step_end()  # asked at every step, since all processes agree on the answer
            if point.done:
                break
            if stop:  # also before the first step, because its compilation cannot be interrupted
                recorder.save(point)
                raise stopped(step, run.workdir, interruption.cause)
            if step == first:
                opened.check_held()
                run.forget_result()  # of a run that had finished and now continues
            with activity.during(WAITING):
                batch = next(batches)
            if step > first and step in source.changes:
                progress.report(f"from step {step}: {describe_batch(batch)}")
            ahead.wait_for(batch)
            # The state is donated: from here on, nothing may read the old point's.
            with during_step(hooks, step):  # returns once the step is dispatched; the devices may still compute it
                state, metrics = train_step(state, batch, np.float32(point.fraction), *arguments)
            recorder.accumulator.add(step + 1, batch, metrics)
            point = recorder.point(step + 1, state, batches.waited_seconds)
        batches.close()  # the thread's memory and cores are free for the last evaluation
        result = recorder.finish(point, evaluate, mesh)
    return dataclasses.replace(result, stopped_by=interruption.cause)  # also while the last save ended
