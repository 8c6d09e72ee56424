"""Compiles a training step for the shapes of later batches in threads, while the run trains on those of its first.

With one process and several cores this takes hardly more time than one program. A program that does not compile, or
does not fit into memory, is reported in the first minutes, and not after days.

Several processes compile all shapes before the first step, in the same order. So do GPUs, because XLA times kernels on
the GPU while it compiles, which the training step would disturb.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.train import partitioning
from bert_jax.train.prepare import describe_batch
from bert_jax.train.run import Source
from bert_jax.train.step import TrainState


class CompilingAhead:
    """The programs of a jitted step that are being compiled for batches of later shapes.

    later       abstract batches, by the first step that has each (`later_batch_shapes`)
    arguments   what the step takes after state, batch and fraction
    """

    def __init__(
        self,
        train_step: Any,
        state: TrainState,
        later: Mapping[int, Any],
        arguments: Sequence[Any],
        mesh: Mesh,
        report: Callable[[str], None],
    ) -> None:
        # The state itself is donated to the first step.
        given = jax.tree.map(_abstract, (state, *arguments))

        def compile_for(batch: Any) -> None:
            with jax.set_mesh(mesh):  # which is a property of the thread
                train_step.lower(given[0], batch, np.float32(0), *given[1:]).compile()

        at_once = jax.process_count() > 1 or mesh.devices.flat[0].platform == "gpu"
        self._compiling: dict[Any, Future[None]] = {}
        self._threads = ThreadPoolExecutor(max(min(len(later), (os.cpu_count() or 2) - 1), 1), "compile")
        for step, batch in later.items():
            report(f"compiling for step {step}: {describe_batch(batch)}")
            if at_once:
                compile_for(batch)
            else:
                self._compiling[_shape(batch)] = self._threads.submit(compile_for, batch)

    def wait_for(self, batch: Any) -> None:
        """Returns once the step is compiled for batches of this shape, if it is one of the later ones.

        Raises the error of any program that has failed to compile.
        """
        if not self._compiling:
            return
        for shape in [shape for shape, future in self._compiling.items() if future.done() or shape == _shape(batch)]:
            self._compiling.pop(shape).result()

    def __enter__(self) -> "CompilingAhead":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def later_batch_shapes(
    source: Source, first: int, end: int, mesh: Mesh, shapes_at: Sequence[int] = ()
) -> dict[int, Any]:
    """Returns abstract batches of the shapes and types that a run meets besides that of its first one, by a step that
    has each.

    first, end   the first step, and the run's number of steps (0: unknown)
    shapes_at    Run.shapes_at
    Reads one row for each of these steps, or else for each change of the source.
    """
    if 0 < end <= first:  # a finished run takes no step
        return {}
    sharding = partitioning.rows_sharding(mesh)
    found: dict[int, Any] = {}
    seen = []
    later = shapes_at or (change for change in source.changes if change > first)
    for step in (first, *(step for step in later if step < end or end <= 0)):
        rows = source.rows_at(step)
        batch = jax.tree.map(
            lambda leaf, rows=rows: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=sharding),
            source.batch(step, slice(0, 1)),
        )
        if (type(batch), batch) not in seen:  # tuples of different types may be equal
            seen.append((type(batch), batch))
            found[step] = batch
    found.pop(first)
    return found


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    weak = getattr(leaf, "weak_type", False)  # which keys do not have
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak)


def _shape(batch: Any) -> Any:
    return type(batch), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch))
