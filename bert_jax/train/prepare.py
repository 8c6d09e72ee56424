"""Everything between a Run and its loop's first step, in the loop's order (train/loop.py).

make_mesh and make_plan check the run and fix the constants of a step. open_workdir holds the workdir and compares it
with the run. restore_or_initialize makes the first state. write_workdir, step_arguments and prefetch_batches follow.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.config import to_dict
from bert_jax.data.loader import Prefetched
from bert_jax.errors import UserError
from bert_jax.model import layers
from bert_jax.model.attention import layer
from bert_jax.storage.location import replace_folder
from bert_jax.tokenization import vocabulary
from bert_jax.tokenization.vocabulary import TOKENIZER
from bert_jax.train import distributed, optim, rules, sharding, workdir
from bert_jax.train.checkpoint import CheckHeld, Checkpoints, check_workdir, held_workdir, restore
from bert_jax.train.evaluation import Best
from bert_jax.train.rules import Trained, Unfreezing
from bert_jax.train.run import Run, Source, make_runtime, root_key
from bert_jax.train.step import Plan, TrainState, initial_state

# The provenance keys that record a run's initial parameters.
INITIAL = ("init_from", "init_layers")


@dataclass(frozen=True)
class OpenWorkdir:
    """A workdir's checkpoints, the provenance of its run, and the differences from its newest checkpoint."""

    checkpoints: Checkpoints
    provenance: dict[str, Any]
    differences: list[str]  # one line each
    check_held: CheckHeld  # called before anything is written


def check(run: Run) -> None:
    """Raises UserError if a run would be refused before it opens its workdir."""
    mesh = make_mesh(run)
    with jax.set_mesh(mesh):
        make_plan(run)


def make_mesh(run: Run) -> Mesh:
    """Makes a run's mesh, after all checks that need no compilation and no file."""
    config, source, best = run.config, run.source, run.config.checkpoint.best
    endless = not (config.steps > 0 or config.budget_minutes > 0 or config.budget_replay or run.length)
    refusals = {
        "neither steps nor budget_minutes is set, so the run would never end; set --config.steps=N or "
        "--config.budget_minutes=M": endless,
        f"early_stop={run.early_stop} needs a metric to compare evaluations by; set --config.checkpoint.best": (
            run.early_stop and not best
        ),
        f"checkpoint.best={best} needs a held-out part, which the data does not have. Name one with "
        "--config.data.eval, or leave out checkpoint.best": best and not run.evaluators,
        f"checkpoint.best={best}, but the run evaluates only at its end. Set --config.eval.every_steps": (
            best and config.eval.every_steps <= 0
        ),
        f"microbatches is {config.microbatches}, but this loss compares all rows of a batch. Use microbatches=1, "
        "and more devices or a smaller batch_size if it does not fit": (
            config.microbatches > 1 and run.objective.compares_rows
        ),
    }
    for message, refused in refusals.items():
        if refused:
            raise UserError(message)
    if best and run.measured:  # otherwise it is compared after the first evaluation
        averages = [f"ema_{name}" for name in run.measured if config.optimizer.ema_decay > 0]
        Best(best, {}).check_among([*run.measured, *averages])
    check_workdir(run.workdir)
    traced_steps(config.profile)
    # The sources' row counts are those of all phases and batch ramps: none is met only after days.
    mesh = sharding.make_mesh(config.mesh)
    for rows in dict.fromkeys(map(source.rows_at, source.changes)):
        key = "batch_schedule" if getattr(config, "batch_schedule", "") else "batch_size"
        sharding.check_batch(rows, config.microbatches, mesh, key)
    sharding.check_model(run.model, mesh, shard_optimizer=config.mesh.shard_optimizer)
    return mesh


def traced_steps(steps: tuple[int, ...]) -> tuple[int, int]:
    """Returns config.profile as the first traced step and the step after the last; -1 twice if it is empty.

    Raises:
        UserError: `steps` is anything else.
    """
    if not steps:
        return -1, -1
    if len(steps) != 2 or not 0 <= steps[0] < steps[1]:
        raise UserError(
            f"config.profile is {steps}; give the first traced step and the step after the last, such as (100, 105)"
        )
    return steps[0], steps[1]


def make_plan(run: Run) -> Plan:
    """Turns a configuration into the constants of a program. Call it with the run's mesh set.

    Raises:
        UserError: nothing trains, or the attention kernel cannot run.
    """
    config = run.config
    abstract = run.abstract_params()
    # Parameters that the run initializes next to given ones always train: frozen, they would stay noise.
    fresh = frozenset(layers.flatten(abstract)) - frozenset(run.initial_params) if run.initial_params else frozenset()
    optimizer_config = optim.with_token_shares(config.optimizer, run.length.tokens if run.length else 0.0)
    # Factors cover the whole model. The optimizer gets only the part that trains, so that only this part has moments.
    factors = optim.rate_factors(config.optimizer, abstract, rules.trainable(run.train_layers, abstract, fresh))
    trained, unfreezing = Trained.by_factors(factors), None
    # Constants are bound in the tree of parameters, so the part that is differentiated must be named.
    if run.constants and trained is None:
        trained = Trained.everything(abstract)
    if trained is not None:
        trained.check(config.optimizer.rates, run.train_layers)
    if rules.gradual_epochs(run.train_layers) is not None:
        stages = rules.stages(abstract, fresh)
        unfreezing = Unfreezing.by_stages(stages if trained is None else trained.take(stages), run.unfreeze_every)
    plan = Plan(
        model=run.model,
        runtime=make_runtime(config),
        objective=run.objective,
        optimizer_config=optimizer_config,
        optimizer=optim.build(optimizer_config, abstract, trained),
        microbatches=config.microbatches,
        mesh_config=config.mesh,
        factors=factors,
        trained=trained,
        unfreezing=unfreezing,
    )
    # Asked only for its refusal: a kernel that cannot run with the rows of any phase.
    for step in run.source.changes:
        layer.kernels(plan.model, plan.runtime, batch_length(run.source, step))
    return plan


@contextlib.contextmanager
def open_workdir(run: Run) -> Iterator[OpenWorkdir]:
    """Holds a workdir and opens its checkpoints. Files of a run without a checkpoint are replaced.

    Raises:
        UserError: another run holds the workdir, the checkpoints belong to another run, or processes were started with
            different configurations or without a shared workdir. Nothing has changed then.
    """
    made_by = workdir.provenance(run)
    # Processes must agree on everything that their common program depends on, before they hold or write anything.
    settings = made_by["configuration"] | workdir.runtime_choices(run) | made_by["versions"]
    distributed.check_same(settings, "start all with the same command")
    config = run.config.checkpoint
    with (
        # The workdir is held first, because opening its checkpoints removes what an interrupted save has left.
        held_workdir(run.workdir) as check_held,
        Checkpoints(
            run.workdir / workdir.CHECKPOINTS,
            keep=config.keep,
            keep_every=config.keep_every,
            best=config.best,
            check_held=check_held,
        ) as checkpoints,
    ):
        # Hosts with separate disks would each see their own checkpoints.
        distributed.check_same(
            {"newest checkpoint": checkpoints.latest_step()}, "name a --workdir on a file system that all hosts share"
        )
        yield OpenWorkdir(checkpoints, made_by, _compare_with_origin(run, made_by, checkpoints), check_held)


def _compare_with_origin(run: Run, made_by: dict[str, Any], checkpoints: Checkpoints) -> list[str]:
    """Compares a run with the checkpoint at which it resumes or branches; returns a line for each difference.

    Records a branch's origin in the run's provenance, `made_by`. Refuses forbidden changes, and a branch with nothing
    left to train.
    """
    newest, origin = checkpoints.newest_meta(), None
    if newest is not None:
        there = newest.get("provenance")
        name = f"step {newest.get('step', checkpoints.latest_step())} of {run.workdir}"
        recorded = (there or {}).get(workdir.RECORD)
        # A workdir with checkpoints resumes. branch_from then only has to name the checkpoint where it once began.
        if run.branch_from:
            workdir.check_origin(run.branch_from, recorded, run.workdir)
        if recorded is not None:
            made_by[workdir.RECORD] = recorded
    elif run.branch_from:
        origin = workdir.open_branch(run.branch_from)
        distributed.check_same({"branch_from": origin.sha256}, "give all processes the same checkpoint")
        there, name, recorded = origin.meta.get("provenance"), str(origin.directory), None
    else:
        return []
    if there is not None and (origin is not None or recorded is not None):
        # A branch's parameters come from its trunk, whatever its own recipe names.
        trunk = there["configuration"]
        made_by["configuration"] |= {key: trunk[key] for key in INITIAL if key in trunk}
    differences = workdir.check_provenance(run, made_by, there, name, workdir.MAY_CHANGE if origin else ())
    if origin is not None:
        origin.check_left(run)
        made_by[workdir.RECORD] = origin.record(differences)
    return differences


def restore_or_initialize(
    run: Run, plan: Plan, mesh: Mesh, checkpoints: Checkpoints
) -> tuple[TrainState, dict[str, Any]]:
    """Returns the first state and its checkpoint's metadata, which is empty for a new run.

    A run starts from the first of these that exists: its workdir's newest undamaged checkpoint; another run's
    checkpoint (branch_from; the metadata then names it under workdir.BRANCHED); its initial parameters (init_from;
    missing ones are initialized); parameters initialized from the seed.
    """

    def initialize(key: jax.Array) -> TrainState:
        return initial_state(plan, run.objective.init(run.model, key))

    # Shapes first, then shardings, then values straight into sharded memory: no device ever holds a full copy.
    abstract = jax.eval_shape(initialize, root_key(run.config.seed))
    abstract = sharding.with_shardings(mesh, abstract, shard_optimizer=run.config.mesh.shard_optimizer)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    trees = abstract.params, abstract.optimizer_state, abstract.average
    newest = checkpoints.restore_newest(*trees)
    if newest is None and run.branch_from:
        origin = workdir.open_branch(run.branch_from)
        restored = restore(origin.directory, *trees)
        # The metadata says that the run is a branch, which its log and its first lines depend on.
        newest = origin.step, restored._replace(meta={**origin.meta, workdir.BRANCHED: str(origin.directory)})
    if newest is None:
        return _initialize(run, initialize, abstract.params, shardings), {}
    number, restored = newest
    average = restored.average
    if average is None:  # the checkpoint was written by a run that kept no average; it begins here
        average = _begin_average(run, restored.params, shardings.average)
    step = sharding.put_as(np.array(number, np.int32), shardings.step)
    skipped = jax.device_put(np.int32(restored.meta.get("skipped", 0)), shardings.skipped)
    return TrainState(step, restored.params, restored.optimizer_state, average, skipped), restored.meta


def _initialize(
    run: Run, initialize: Callable[[jax.Array], TrainState], params: dict[str, Any], shardings: TrainState
) -> TrainState:
    """Returns the first state of a new run; `params` are abstract."""

    def missing(params: dict[str, Any]) -> dict[str, Any]:
        return {path: leaf for path, leaf in layers.flatten(params).items() if path not in run.initial_params}

    def initialize_missing(key: jax.Array) -> TrainState:
        state = initialize(key)
        return state._replace(params=missing(state.params), average=None)

    # Values that the initial parameters replace are neither computed nor compiled.
    left = shardings._replace(params=missing(shardings.params), average=None)
    state = jax.jit(initialize_missing, out_shardings=left)(root_key(run.config.seed))
    values = dict(state.params)
    for path, leaf in layers.flatten(params).items():
        if path in run.initial_params:
            # All processes have the whole value, in the caller's dtype; each device gets its shard in the run's.
            values[path] = sharding.put_as(np.asarray(run.initial_params[path], leaf.dtype), leaf.sharding)
    initial = layers.unflatten(values)
    return state._replace(params=initial, average=_begin_average(run, initial, shardings.average))


def _begin_average(run: Run, params: dict[str, Any], shardings: Any) -> dict[str, Any] | None:
    """Returns the moving average at its first step; None if the run keeps none."""
    if shardings is None:
        return None
    begin = functools.partial(optim.first_average, run.config.optimizer.ema_decay)
    return jax.jit(begin, out_shardings=shardings)(params)


def write_workdir(run: Run, check_held: CheckHeld) -> None:
    """Writes config.json and tokenizer/ in process 0; all checkpoints of the workdir are read with them."""
    if distributed.is_primary():
        check_held()
        folder, same = run.workdir / TOKENIZER, False
        # Another tokenizer, or part of one, is left from a run that was killed before its first checkpoint:
        # open_workdir has compared the data of all others.
        if isinstance(folder, Path):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(UserError):
                same = folder.exists() and vocabulary.load(folder).content_hash == run.tokenizer.content_hash
        if not same:
            replace_folder(folder, run.tokenizer.save)
        config, heads = to_dict(run.config), run.objective.heads
        document = workdir.WorkdirConfig(run.model, heads, run.kind, config, run.task, data=run.data)
        workdir.write_config(run.workdir, document)
    # A barrier: the others look for the file only once process 0 has written it.
    distributed.broadcast_from_primary("written")
    if not (run.workdir / workdir.CONFIG_FILE).exists():
        raise UserError(
            f"process 0 wrote {run.workdir}, but process {jax.process_index()} does not see it; name a --workdir on a "
            "file system that all hosts share"
        )


def step_arguments(run: Run, mesh: Mesh) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the last arguments of a step: the run's key on all devices, and its constants.

    Constants, such as a teacher's parameters, are sharded like parameters and never donated.
    """
    # Arguments, not values in the program, so all seeds share one program.
    key = jax.device_put(root_key(run.config.seed), sharding.replicated(mesh))
    return key, sharding.put(layers.unflatten(run.constants), mesh)


def prefetch_batches(source: Source, mesh: Mesh, first: int, depth: int) -> Prefetched[Any]:
    """Iterates over the batches from step `first`, placed on the mesh, `depth` of them made ahead (0: none at all)."""
    # A batch ramp has few sizes, and a size's rows do not depend on the step.
    local_rows = functools.cache(functools.partial(sharding.local_rows, mesh=mesh))

    def make(step: int) -> Any:
        size = source.rows_at(step)
        return sharding.place(source.batch(step, local_rows(size)), size, mesh)

    return Prefetched(make, first, depth)


def batch_length(source: Source, step: int) -> int:
    """Returns T of a step's batch."""
    return source.batch(step, slice(0, 1)).input_ids.shape[-1]
