"""The state from which a run trains.

A run starts, in this order of preference, from the newest undamaged checkpoint of its workdir, from the checkpoint of
another run (branch_from), from its initial parameters (init_from; missing ones are initialized from the seed), or from
parameters initialized from the seed.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.model import paths
from bert_jax.train import branch, partitioning, steps
from bert_jax.train.checkpoint import Checkpoints, restore
from bert_jax.train.optim import first_average
from bert_jax.train.run import Run, root_key
from bert_jax.train.state import TrainState
from bert_jax.train.steps import Plan


def restore_or_initialize(
    run: Run, plan: Plan, mesh: Mesh, checkpoints: Checkpoints
) -> tuple[TrainState, dict[str, Any]]:
    """Returns the state from which to train and the metadata of its checkpoint, which is empty for a new run.

    It restores the newest undamaged checkpoint. Without one, a branch restores the checkpoint at which it begins; the
    metadata then names it under branch.BRANCHED.
    """

    def initialize(key: jax.Array) -> TrainState:
        return steps.initial_state(plan, run.objective.init(run.model, key))

    key = root_key(run.config.seed)

    # Shapes first, then shardings, then values straight into sharded memory: no device ever holds a full copy.
    abstract = partitioning.with_shardings(
        mesh, jax.eval_shape(initialize, key), shard_optimizer=run.config.mesh.shard_optimizer
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    found = checkpoints.restore_newest(abstract.params, abstract.optimizer_state, abstract.average)
    if found is None and run.branch_from:
        origin = branch.open_branch(run.branch_from)
        restored = restore(origin.directory, abstract.params, abstract.optimizer_state, abstract.average)
        found = origin.step, restored._replace(meta={**origin.meta, branch.BRANCHED: str(origin.directory)})
    if found is not None:
        newest, restored = found
        step = partitioning.put_as(np.array(newest, np.int32), shardings.step)
        average = restored.average
        if average is None:  # the checkpoint was written by a run that kept no average; it begins here
            average = _begin_average(run, restored.params, shardings.average)
        skipped = jax.device_put(np.int32(restored.meta.get("skipped", 0)), shardings.skipped)
        return TrainState(step, restored.params, restored.optimizer_state, average, skipped), restored.meta

    def initialize_missing(key: jax.Array) -> TrainState:
        state = initialize(key)
        return state._replace(params=missing(state.params), average=None)

    def missing(params: dict[str, Any]) -> dict[str, Any]:
        return {path: leaf for path, leaf in paths.flatten(params).items() if path not in run.initial_params}

    # What the initial parameters replace is not computed, nor compiled.
    of_missing = shardings._replace(params=missing(shardings.params), average=None)
    state = jax.jit(initialize_missing, out_shardings=of_missing)(key)
    params = state.params
    for path, leaf in paths.flatten(abstract.params).items():
        if path in run.initial_params:
            params[path] = partitioning.put_as(np.asarray(run.initial_params[path], leaf.dtype), leaf.sharding)
    initial = paths.unflatten(params)
    return state._replace(params=initial, average=_begin_average(run, initial, shardings.average)), {}


def _begin_average(run: Run, params: dict[str, Any], shardings: Any) -> dict[str, Any] | None:
    """The moving average at its first step, with its shardings; None where the run keeps none."""
    if shardings is None:
        return None
    begin = functools.partial(first_average, run.config.optimizer.ema_decay)
    return jax.jit(begin, out_shardings=shardings)(params)
