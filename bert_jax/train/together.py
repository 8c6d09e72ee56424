"""Runs that differ in seed, peak learning rate and workdir alone, as one program: their states stacked, [K, ...].

On an accelerator a few small models side by side cost little more than one; on a CPU, whose cores one fills, nothing
is gained. The arithmetic of a member is what it is alone, but for the order of the sums within a product.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Key

from bert_jax.command import UserError
from bert_jax.config import TrainConfig
from bert_jax.train import distributed, partitioning, steps
from bert_jax.train.checkpoint import Checkpoints
from bert_jax.train.clock import make_clock
from bert_jax.train.parameter_summary import parameter_table
from bert_jax.train.run import Run, Source
from bert_jax.train.start import check_workdir, start
from bert_jax.train.state import TrainState
from bert_jax.train.workdir import CHECKPOINTS, provenance


class StackedSource:
    """The batches of several sources, [B, K, ...]: member k's are [:, k]. Those of a step are to be of one shape."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.fingerprints = sources[0].fingerprints
        self.changes = sources[0].changes

    def rows_at(self, step: int) -> int:
        """Rows of a step's global batch, of each member."""
        return self._sources[0].rows_at(step)

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Any:
        """The members' global batches of a step, or those rows of each."""
        batches = [source.batch(step, rows) for source in self._sources]
        return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *batches)


def refusal(config: TrainConfig) -> str:
    """Why runs of this configuration cannot be one program; empty where they can."""
    if jax.process_count() > 1:
        return "several processes train one member at a time"
    if config.mesh.fsdp != 1 or config.mesh.tensor != 1:
        return "each device holds its members whole: mesh.fsdp and mesh.tensor are to be 1"
    if config.prng != "threefry2x32":
        return f"prng={config.prng} draws other numbers for several keys at once than for one: it is to be threefry2x32"
    return ""


@dataclass
class Begun:
    """A run whose workdir is open; what its checkpoint says, once start_all has read that."""

    run: Run
    made_by: dict[str, Any]  # its provenance
    checkpoints: Checkpoints
    told: list[str]  # of going on there, a line each
    meta: dict[str, Any] = field(default_factory=dict)  # empty: it begins
    first: int = 0  # the step that it goes on from
    ended: bool = False  # before the others, or with all of them: it only keeps its place

    def goes_back(self) -> None:
        """Has the checkpoints after the step that it goes on from make room for those that are made anew, and says so.

        Left there, they would be taken for those, though the end of the run may have changed.
        """
        if later := self.checkpoints.replace_after(self.first):
            self.told.append(
                f"{self.run.workdir} goes back from step {max(later)} to step {self.first}: what is trained together "
                "goes on from a step that all have saved; --config.run_together=no goes on with each for itself"
            )


def source_of(runs: Sequence[Run]) -> Source:
    """The batches of all runs. Raises UserError for runs that cannot be one program."""
    if len(runs) == 1:
        return runs[0].source
    if why := refusal(runs[0].config):
        raise UserError(f"these runs cannot be trained together: {why}; or in turn, by --config.run_together=no")
    return StackedSource([run.source for run in runs])


def begin(run: Run, members: int, opened: contextlib.ExitStack) -> Begun:
    """Opens a run's checkpoints; raises UserError where they are another's."""
    made_by = provenance(run)
    distributed.check_same(made_by["configuration"] | made_by["versions"], "start all with the same command")
    config = run.config.checkpoint
    # Members go back to a step that all have, and are killed while some have saved the next one.
    keep = max(config.keep, 2) if members > 1 and config.keep else config.keep
    checkpoints = opened.enter_context(
        Checkpoints(run.workdir / CHECKPOINTS, keep=keep, keep_every=config.keep_every, best=config.best)
    )
    return Begun(run, made_by, checkpoints, check_workdir(run, made_by, checkpoints))


def start_all(begun: Sequence[Begun], plan: steps.Plan, mesh: Mesh) -> list[TrainState]:
    """The state that each run goes on from (start.start), and its meta and step, which are noted there.

    Those that have not ended begin at one step: the newest of which all have a whole checkpoint, or the first.
    """
    found: dict[int, TrainState] = {}
    alone = len(begun) == 1

    def read(number: int, among: Collection[int] | None) -> int:
        each = begun[number]
        found[number], each.meta = start(each.run, plan, mesh, each.checkpoints, among)
        each.first = int(found[number].step)
        return each.first

    for number, each in enumerate(begun):
        newest = each.checkpoints.newest_meta() or {}
        if alone or _has_ended(each.run, newest, alone):
            each.ended = read(number, None) == newest.get("step") and _has_ended(each.run, each.meta, alone)
        if not alone and not each.ended:  # of one whose last checkpoint is damaged nothing is kept, either
            found.pop(number, None)
    going_on = [number for number in range(len(begun)) if number not in found]
    common = set.intersection(*(set(begun[number].checkpoints.steps()) for number in going_on)) if going_on else set()
    while behind := [number for number in going_on if number not in found]:
        at = read(behind[0], common)
        common = {step for step in common if step <= at}
        for number in going_on:  # where one's checkpoint was damaged, all go back to the one before
            if number in found and begun[number].first > at:
                del found[number]
    for number in going_on:
        begun[number].goes_back()
    return [found[number] for number in range(len(begun))]


def _has_ended(run: Run, meta: Mapping[str, Any], alone: bool) -> bool:
    """Whether a checkpoint of that meta is its run's last. One alone ends by its clock, in the loop."""
    if not meta or meta.get("unlogged"):
        return False
    if meta.get("early_stop", {}).get("waited", 0) >= run.early_stop > 0:
        return True
    return not alone and make_clock(run.config, meta).read(meta["step"]) >= 1.0


def joined(begun: Sequence[Begun], states: list[TrainState]) -> TrainState:
    """The state of all: that of one alone, or stacked, with the step of those that go on. Each leaf is then freed."""
    if len(states) == 1:
        return states[0]
    step = next((state.step for each, state in zip(begun, states, strict=True) if not each.ended), states[0].step)

    def stack(*leaves: jax.Array) -> jax.Array:
        whole = jax.block_until_ready(jnp.stack(leaves))
        for leaf in leaves:
            leaf.delete()
        return whole

    return TrainState(step, *jax.tree.map(stack, *[tuple(state)[1:] for state in states]))


def overview(begun: Sequence[Begun], states: Sequence[TrainState], plan: steps.Plan) -> list[str]:
    """Where each run begins, and what is trained where one begins at its beginning."""
    lines: list[str] = []
    for each in begun:
        if each.meta:
            what = "nothing is left to do" if each.ended else "going on"
            lines.append(f"{what} from step {each.first} of {each.run.workdir}")
        lines += each.told
    fresh = [state for each, state in zip(begun, states, strict=True) if not each.meta]
    return lines + (parameter_table(fresh[0].params, plan) if fresh else [])


def jitted(plan: steps.Plan, mesh: Mesh, state: TrainState, members: int) -> Any:
    """The jitted step of a state (steps.jitted, for one alone), for (state, batch, fraction, *arguments)."""
    if members == 1:
        return steps.jitted(plan, mesh, state)
    lies = jax.tree.map(lambda leaf: leaf.sharding, state)
    shardings = (lies, partitioning.replicated(mesh))
    return jax.jit(functools.partial(members_step, plan), donate_argnums=0, out_shardings=shardings)


def members_step(
    plan: steps.Plan,
    state: TrainState,
    batch: Any,
    fraction: Float[Array, ""],
    keys: Key[Array, "K"],
    peaks: Float[Array, "K"],
    running: Bool[Array, "K"],
) -> tuple[TrainState, dict[str, Array]]:
    """steps.train_step of each member, with its own key and peak of the rate; one that has ended stays as it is.

    All but the step has a leading axis of members, batches the second, and metrics are [K].
    """

    def step(own: tuple[Any, ...], batch: Any, key: Array, peak: Array, running: Array) -> tuple[Any, dict[str, Array]]:
        before = TrainState(state.step, *own)
        following, metrics = steps.train_step(plan, before, batch, fraction, key, peak)
        return steps.choose(running, following, before)[1:], metrics

    own, metrics = jax.vmap(step, in_axes=(0, 1, 0, 0, 0))(tuple(state)[1:], batch, keys, peaks, running)
    return TrainState(state.step + 1, *own), metrics


def arguments(runs: Sequence[Run], running: Sequence[bool], mesh: Mesh) -> tuple[Any, ...]:
    """What the jitted step takes beside state, batch and fraction: the key, or keys, peaks and who is running.

    Not constants of the program, so that runs of many seeds compile it once.
    """
    keys = [jax.random.key(run.config.seed, impl=run.config.prng) for run in runs]
    whole = partitioning.replicated(mesh)
    if len(runs) == 1:
        return (jax.device_put(keys[0], whole),)
    peaks = np.array([run.config.optimizer.learning_rate for run in runs], np.float32)
    return tuple(jax.device_put(value, whole) for value in (jnp.stack(keys), peaks, np.array(running)))


def taker(number: int, members: int, mesh: Mesh) -> Callable[[Any], Any]:
    """A function that takes a member's part of a stacked tree; of one alone, all of it."""
    if members == 1:
        return lambda tree: tree
    return functools.partial(_take(mesh), np.int32(number))


@functools.cache
def _take(mesh: Mesh) -> Callable[..., Any]:
    """One program for all members: their number is an argument."""
    return jax.jit(
        lambda number, tree: jax.tree.map(lambda leaf: leaf[number], tree), out_shardings=partitioning.replicated(mesh)
    )


def means(shown: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The mean over members of each value; None where one has none."""
    found: dict[str, float | None] = {}
    for name in shown[0] if shown else ():
        values = [each[name] for each in shown]
        known = [value for value in values if value is not None]
        found[name] = sum(known) / len(known) if len(known) == len(values) else None
    return found
