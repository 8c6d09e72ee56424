"""Everything between a Run and the first step of its loop.

In the order of the loop (train/loop.py): make_mesh and make_plan check the run and fix what a step needs, of which
make_plan is the one place where a configuration becomes a Plan; make_evaluators; open_workdir holds the workdir and
compares it with the run; restore_or_initialize makes the first state; write_workdir; step_arguments and
prefetch_batches. The lines that the run then prints are in train/describe.py.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.config import TrainConfig, to_dict
from bert_jax.data.prefetch import Prefetched
from bert_jax.errors import UserError
from bert_jax.model import layers
from bert_jax.model.attention import layer
from bert_jax.storage.location import Location, is_stored, replace_folder
from bert_jax.tokenization import vocabulary
from bert_jax.tokenization.vocabulary import TOKENIZER
from bert_jax.train import distributed, optim, rules, sharding, workdir
from bert_jax.train.checkpoint import CheckHeld, Checkpoints, check_workdir, held_workdir, restore
from bert_jax.train.clock import check_end
from bert_jax.train.evaluation import Best, Evaluator, check_early_stop
from bert_jax.train.rules import Trained, Unfreezing
from bert_jax.train.run import Run, Source, root_key, runtime_of
from bert_jax.train.step import Plan, TrainState, initial_state
from bert_jax.train.workdir import (
    CHECKPOINTS,
    CONFIG_FILE,
    WorkdirConfig,
    check_provenance,
    provenance,
    runtime_choices,
    write_config,
)

# The keys of a provenance that say with which parameters a run began.
INITIAL = ("init_from", "init_layers")


@dataclass(frozen=True)
class OpenWorkdir:
    """The checkpoints of a workdir, the provenance of the run in it, and what differs from its newest checkpoint."""

    checkpoints: Checkpoints
    provenance: dict[str, Any]
    differences: list[str]  # one line each
    check_held: CheckHeld  # called before anything is written


def check(run: Run) -> None:
    """Raises UserError for what a run refuses before it opens its workdir."""
    mesh = make_mesh(run)
    with jax.set_mesh(mesh):
        make_evaluators(run, make_plan(run), mesh)


def make_mesh(run: Run) -> Mesh:
    """Returns the mesh of a run, once everything has been checked that needs no compilation and no file."""
    config, source = run.config, run.source
    check_end(config.steps, config.budget_minutes, config.budget_replay, run.length)
    check_early_stop(run.early_stop, config.checkpoint.best)
    check_workdir(run.workdir)
    traced_steps(config.profile, run.workdir)
    if config.microbatches > 1 and run.objective.compares_rows:
        raise UserError(
            f"microbatches is {config.microbatches}, but this loss compares all rows of a batch. Use microbatches=1, "
            "and more devices or a smaller batch_size if it does not fit"
        )
    mesh = sharding.make_mesh(config.mesh)
    for rows in dict.fromkeys(map(source.rows_at, source.changes)):
        key = "batch_schedule" if getattr(config, "batch_schedule", "") else "batch_size"
        sharding.check_batch(rows, config.microbatches, mesh, key)
    sharding.check_model(run.model, mesh, shard_optimizer=config.mesh.shard_optimizer)
    return mesh


def traced_steps(steps: tuple[int, ...], workdir: Location) -> tuple[int, int]:
    """Returns the first traced step and the step after the last, the value of config.profile; -1 twice if it is empty.

    Raises UserError for anything else, and for a workdir in a store, to which the profiler cannot write.
    """
    if not steps:
        return -1, -1
    if is_stored(workdir):
        raise UserError(f"config.profile cannot be written to {workdir}; use a local --workdir for it")
    if len(steps) != 2 or not 0 <= steps[0] < steps[1]:
        raise UserError(
            f"config.profile is {steps}; give the first traced step and the step after the last, such as (100, 105)"
        )
    return steps[0], steps[1]


def make_plan(run: Run) -> Plan:
    """Returns the plan of a run's steps: the one place where a configuration becomes constants of a program."""
    config = run.config
    abstract = run.abstract_params()
    # What a run with initial parameters initializes itself always trains: frozen, it would stay noise.
    fresh = frozenset(layers.flatten(abstract)) - frozenset(run.initial_params) if run.initial_params else frozenset()
    optimizer_config = optim.with_token_shares(config.optimizer, run.length.tokens if run.length else 0.0)
    factors = optim.rate_factors(config.optimizer, abstract, rules.trainable(run.train_layers, abstract, fresh))
    trained, unfreezing = Trained.by_factors(factors), None
    if run.constants and trained is None:
        trained = Trained.everything(abstract)
    if trained is not None:
        trained.check(config.optimizer.rates, run.train_layers)
    if rules.gradual_epochs(run.train_layers) is not None:
        stages = rules.stages(abstract, fresh)
        unfreezing = Unfreezing.by_stages(stages if trained is None else trained.take(stages), run.unfreeze_every)
    return Plan(
        model=run.model,
        runtime=runtime_of(config),
        objective=run.objective,
        optimizer_config=optimizer_config,
        optimizer=optim.build(optimizer_config, abstract, trained),
        microbatches=config.microbatches,
        mesh_config=config.mesh,
        factors=factors,
        trained=trained,
        unfreezing=unfreezing,
    )


def make_evaluators(run: Run, plan: Plan, mesh: Mesh) -> list[Evaluator]:
    """Returns the run's evaluators. Raises UserError for an attention kernel that cannot run, or for checkpoint.best
    without a metric to compare.
    """
    for step in run.source.changes:
        layer.kernels(plan.model, plan.runtime, batch_length(run.source, step))
    objective = run.objective
    held_out = dataclasses.replace(plan, objective=objective.evaluated)

    def of_its_params(evaluator: Evaluator) -> Evaluator:
        return lambda params, steps_done: evaluator(objective.evaluated_params(params), steps_done)

    evaluators = [of_its_params(make(held_out, mesh)) for make in run.evaluators]
    check_best(run.config, bool(evaluators), run.measured)
    return evaluators


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


@contextlib.contextmanager
def open_workdir(run: Run) -> Iterator[OpenWorkdir]:
    """Holds a workdir and opens its checkpoints.

    Raises UserError, and changes nothing, when another run holds it, when the checkpoints belong to another run, or
    when processes were started with different configurations or without a shared workdir. Files of a run that left no
    checkpoint are replaced.
    """
    made_by = provenance(run)
    settings = made_by["configuration"] | runtime_choices(run) | made_by["versions"]
    distributed.check_same(settings, "start all with the same command")
    config = run.config.checkpoint
    with (
        held_workdir(run.workdir) as check_held,
        Checkpoints(
            run.workdir / CHECKPOINTS,
            keep=config.keep,
            keep_every=config.keep_every,
            best=config.best,
            check_held=check_held,
        ) as checkpoints,
    ):
        distributed.check_same(
            {"newest checkpoint": checkpoints.latest_step()}, "name a --workdir on a file system that all hosts share"
        )
        newest = checkpoints.newest_meta()
        if newest is None:
            differences = _branch(run, made_by) if run.branch_from else []
        else:
            differences = _resume(run, made_by, newest, checkpoints.latest_step())
        yield OpenWorkdir(checkpoints, made_by, differences, check_held)


def _resume(run: Run, made_by: dict[str, Any], newest: Mapping[str, Any], step: int | None) -> list[str]:
    """Compares a run with its newest checkpoint, at which its provenance `made_by` begins.

    Returns a line for each difference. Raises UserError for changes that are not allowed.
    """
    there = newest.get("provenance")
    recorded = (there or {}).get(workdir.RECORD)
    if run.branch_from:
        workdir.check_origin(run.branch_from, recorded, run.workdir)
    if there is not None and recorded is not None:  # its parameters come from the trunk, whatever those began with
        made_by[workdir.RECORD] = recorded
        _begin_as(made_by, there)
    return check_provenance(run, made_by, there, f"step {newest.get('step', step)} of {run.workdir}")


def _branch(run: Run, made_by: dict[str, Any]) -> list[str]:
    """Compares a run with the checkpoint at which it begins, and records that one in its provenance `made_by`.

    Returns a line for each difference. Raises UserError for changes that a branch cannot make, and where nothing of its
    length is left to train.
    """
    origin = workdir.open_branch(run.branch_from)
    distributed.check_same({"branch_from": origin.sha256}, "give all processes the same checkpoint")
    there = origin.meta.get("provenance")
    if there is not None:
        _begin_as(made_by, there)
    differences = check_provenance(run, made_by, there, str(origin.directory), workdir.MAY_CHANGE)
    origin.check_left(run)
    made_by[workdir.RECORD] = origin.record(differences)
    return differences


def _begin_as(made_by: dict[str, Any], trunk: Mapping[str, Any]) -> None:
    """Gives the provenance of a branch the initial parameters of its trunk, whatever its own recipe names."""
    for key in INITIAL:
        if key in trunk["configuration"]:
            made_by["configuration"][key] = trunk["configuration"][key]


def restore_or_initialize(
    run: Run, plan: Plan, mesh: Mesh, checkpoints: Checkpoints
) -> tuple[TrainState, dict[str, Any]]:
    """Returns the state from which to train and the metadata of its checkpoint, which is empty for a new run.

    In this order of preference, a run starts from the newest undamaged checkpoint of its workdir, from the checkpoint
    of another run (branch_from; the metadata then names it under workdir.BRANCHED), from its initial parameters
    (init_from; missing ones are initialized from the seed), or from parameters initialized from the seed.
    """

    def initialize(key: jax.Array) -> TrainState:
        return initial_state(plan, run.objective.init(run.model, key))

    # Shapes first, then shardings, then values straight into sharded memory: no device ever holds a full copy.
    abstract = jax.eval_shape(initialize, root_key(run.config.seed))
    abstract = sharding.with_shardings(mesh, abstract, shard_optimizer=run.config.mesh.shard_optimizer)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    found = checkpoints.restore_newest(abstract.params, abstract.optimizer_state, abstract.average)
    if found is None and run.branch_from:
        origin = workdir.open_branch(run.branch_from)
        restored = restore(origin.directory, abstract.params, abstract.optimizer_state, abstract.average)
        found = origin.step, restored._replace(meta={**origin.meta, workdir.BRANCHED: str(origin.directory)})
    if found is None:
        return _initialize(run, initialize, abstract.params, shardings), {}
    newest, restored = found
    step = sharding.put_as(np.array(newest, np.int32), shardings.step)
    average = restored.average
    if average is None:  # the checkpoint was written by a run that kept no average; it begins here
        average = _begin_average(run, restored.params, shardings.average)
    skipped = jax.device_put(np.int32(restored.meta.get("skipped", 0)), shardings.skipped)
    return TrainState(step, restored.params, restored.optimizer_state, average, skipped), restored.meta


def _initialize(
    run: Run, initialize: Callable[[jax.Array], TrainState], params: dict[str, Any], shardings: TrainState
) -> TrainState:
    """The first state of a new run; `params` are the abstract parameters."""

    def missing(params: dict[str, Any]) -> dict[str, Any]:
        return {path: leaf for path, leaf in layers.flatten(params).items() if path not in run.initial_params}

    def initialize_missing(key: jax.Array) -> TrainState:
        state = initialize(key)
        return state._replace(params=missing(state.params), average=None)

    # What the initial parameters replace is not computed, nor compiled.
    of_missing = shardings._replace(params=missing(shardings.params), average=None)
    state = jax.jit(initialize_missing, out_shardings=of_missing)(root_key(run.config.seed))
    found = dict(state.params)
    for path, leaf in layers.flatten(params).items():
        if path in run.initial_params:
            found[path] = sharding.put_as(np.asarray(run.initial_params[path], leaf.dtype), leaf.sharding)
    initial = layers.unflatten(found)
    return state._replace(params=initial, average=_begin_average(run, initial, shardings.average))


def _begin_average(run: Run, params: dict[str, Any], shardings: Any) -> dict[str, Any] | None:
    """The moving average at its first step, with its shardings; None where the run keeps none."""
    if shardings is None:
        return None
    begin = functools.partial(optim.first_average, run.config.optimizer.ema_decay)
    return jax.jit(begin, out_shardings=shardings)(params)


def write_workdir(run: Run, check_held: CheckHeld) -> None:
    """Writes config.json and tokenizer/ in process 0; every checkpoint of the workdir is read with them."""
    if distributed.is_primary():
        check_held()
        folder = run.workdir / TOKENIZER
        if isinstance(folder, Path):
            folder.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(folder, Path) or not _holds(folder, run.tokenizer):
            replace_folder(folder, run.tokenizer.save)
        config = WorkdirConfig(run.model, run.objective.heads, run.kind, to_dict(run.config), run.task, data=run.data)
        write_config(run.workdir, config)
    distributed.broadcast_from_primary("written")
    if not (run.workdir / CONFIG_FILE).exists():
        raise UserError(
            f"process 0 wrote {run.workdir}, but process {jax.process_index()} does not see it; name a --workdir on a "
            "file system that all hosts share"
        )


def _holds(folder: Path, tokenizer: vocabulary.Vocabulary) -> bool:
    """Whether a folder of a workdir holds a tokenizer.

    Another one is of a run that left no checkpoint: open_workdir has compared the data of any other. A kill or a power
    failure can leave a part of one.
    """
    try:
        return folder.exists() and vocabulary.load(folder).content_hash == tokenizer.content_hash
    except UserError:
        return False


def step_arguments(run: Run, mesh: Mesh) -> tuple[jax.Array, dict[str, Any]]:
    """Returns what a step takes after state, batch and fraction: the key of the run on all devices, and its constants.

    Both are arguments, and not part of the program, so that all seeds share one. Constants, such as the parameters of
    a teacher, are sharded like parameters and never donated.
    """
    key = jax.device_put(root_key(run.config.seed), sharding.replicated(mesh))
    return key, sharding.put(layers.unflatten(run.constants), mesh)


def prefetch_batches(source: Source, mesh: Mesh, first: int, depth: int) -> Prefetched[Any]:
    """Returns an iterator over the batches from step `first`, placed on the mesh, `depth` of them made ahead.

    A depth of 0, for a run that has no more steps, makes none.
    """

    @functools.cache
    def local_rows(size: int) -> slice | np.ndarray:
        return sharding.local_rows(size, mesh)

    def make(step: int) -> Any:
        size = source.rows_at(step)
        return sharding.place(source.batch(step, local_rows(size)), size, mesh)

    return Prefetched(make, first, depth)


def batch_length(source: Source, step: int) -> int:
    """Returns T of a step's batch."""
    return source.batch(step, slice(0, 1)).input_ids.shape[-1]
