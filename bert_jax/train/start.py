"""Where a run starts from, in this order: the newest whole checkpoint of its workdir; else the run's initial parameters
(init_from), what they lack drawn afresh; else all drawn afresh from the seed.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax import tokenizer
from bert_jax.command import UserError
from bert_jax.config import TrainConfig, to_dict
from bert_jax.model import paths
from bert_jax.storage.local import atomic_folder
from bert_jax.train import checkpoint, distributed, optim, partitioning, rules
from bert_jax.train.held_out import Best
from bert_jax.train.optim import first_average
from bert_jax.train.run import Run, runtime_of
from bert_jax.train.state import TrainState
from bert_jax.train.steps import Plan, initial_state
from bert_jax.train.workdir import CONFIG_FILE, WorkdirConfig, check_provenance, write_config


def plan_of(run: Run) -> Plan:
    """The plan of a run's steps."""
    config = run.config
    abstract = jax.eval_shape(lambda key: run.objective.init(run.model, key), jax.random.key(0))
    fresh = _fresh(run, abstract)
    gradual = rules.gradual_epochs(run.train_layers) is not None
    return Plan(
        model=run.model,
        runtime=runtime_of(config),
        objective=run.objective,
        optimizer_config=config.optimizer,
        optimizer=optim.build(config.optimizer, abstract),
        microbatches=config.microbatches,
        overlap=config.mesh.overlap,
        factors=optim.rate_factors(config.optimizer, abstract, rules.trainable(run.train_layers, abstract, fresh)),
        unfreezing=optim.Unfreezing(rules.stages(abstract, fresh), run.unfreeze_every) if gradual else None,
    )


def _fresh(run: Run, abstract: dict[str, Any]) -> frozenset[str]:
    """The parameters that a run with initial parameters draws afresh: frozen, they would stay noise."""
    return frozenset(paths.flatten(abstract)) - frozenset(run.initial_params) if run.initial_params else frozenset()


def start(
    run: Run,
    plan: Plan,
    mesh: Mesh,
    checkpoints: checkpoint.Checkpoints,
    among: Collection[int] | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """The state to go on from and its checkpoint's meta, or a first state and no meta.

    It goes on from the newest checkpoint, or the newest of some, which may be none.
    """

    def draw(key: jax.Array) -> TrainState:
        return initial_state(plan, run.objective.init(run.model, key))

    key = jax.random.key(run.config.seed, impl=run.config.prng)
    abstract = partitioning.with_shardings(mesh, jax.eval_shape(draw, key))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    found = checkpoints.restore_newest(abstract.params, abstract.optimizer_state, abstract.average, among)
    if found is not None:
        newest, restored = found
        step = partitioning.put_as(np.array(newest, np.int32), shardings.step)
        average = restored.average
        if average is None:  # its checkpoint was written without one: it begins here
            average = first_average(run.config.optimizer.ema_decay, restored.params)
        skipped = jax.device_put(np.int32(restored.meta.get("skipped", 0)), shardings.skipped)
        return TrainState(step, restored.params, restored.optimizer_state, average, skipped), restored.meta
    state = jax.jit(draw, out_shardings=shardings)(key)
    params = paths.flatten(state.params)
    for path, value in run.initial_params.items():
        params[path] = partitioning.put_as(np.asarray(value, params[path].dtype), params[path].sharding)
    initial = paths.unflatten(params)
    return state._replace(params=initial, average=first_average(run.config.optimizer.ema_decay, initial)), {}


def check_best(config: TrainConfig, evaluated: bool, measured: Sequence[str]) -> None:
    """Raises UserError when checkpoint.best is set for a run that does not measure that metric.

    measured   the names of the held-out metrics; empty: unknown until they are measured
    """
    if not config.checkpoint.best:
        return
    if not evaluated:
        raise UserError(
            f"checkpoint.best={config.checkpoint.best} needs a held-out part, which the data does not have. Name one "
            "with --config.data.eval, or leave out checkpoint.best"
        )
    if config.eval.every_steps <= 0:
        raise UserError(
            f"checkpoint.best={config.checkpoint.best}, but the run evaluates only at its end. "
            "Set --config.eval.every_steps"
        )
    if measured:
        averages = [f"ema_{name}" for name in measured if config.optimizer.ema_decay > 0]
        Best(config.checkpoint.best, {}).check_among([*measured, *averages])


def check_workdir(run: Run, made_by: Mapping[str, Any], checkpoints: checkpoint.Checkpoints) -> list[str]:
    """What is to be told of a run, of this provenance, that goes on in its workdir, a line each.

    Raises UserError when it holds another run: nothing in it is then changed. What a run without a checkpoint left
    behind binds nobody.
    """
    distributed.check_same(
        {"newest checkpoint": checkpoints.latest_step()}, "name a --workdir on a file system that all hosts share"
    )
    newest = checkpoints.newest_meta()
    if newest is None:
        return []
    step = newest.get("step", checkpoints.latest_step())
    return check_provenance(run, made_by, newest.get("provenance"), f"step {step} of {run.workdir}")


def write_workdir(run: Run) -> None:
    """Writes config.json and tokenizer/, which every checkpoint of the workdir is read with; process 0 does."""
    if distributed.is_primary():
        _write_workdir(run)
    distributed.broadcast_from_primary("written")
    if not (run.workdir / CONFIG_FILE).exists():
        raise UserError(
            f"process 0 wrote {run.workdir}, and process {jax.process_index()} does not see it: name a --workdir on a "
            "file system that all hosts share"
        )


def _write_workdir(run: Run) -> None:
    run.workdir.mkdir(parents=True, exist_ok=True)
    folder = run.workdir / "tokenizer"
    if folder.exists() and tokenizer.load(folder).content_hash != run.tokenizer.content_hash:
        shutil.rmtree(folder)  # of a run that left no checkpoint: check_workdir has compared the data of any other
    if not folder.exists():
        with atomic_folder(folder) as unfinished:
            run.tokenizer.save(unfinished)
    write_config(run.workdir, _workdir_config(run))


def _workdir_config(run: Run) -> WorkdirConfig:
    return WorkdirConfig(
        model=run.model,
        heads=run.objective.heads,
        kind=run.kind,
        training=to_dict(run.config),
        task=run.task,
    )
