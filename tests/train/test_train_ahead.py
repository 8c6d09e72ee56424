"""Programs for later batches: compiled while a run trains, once each, and their errors are not lost."""

import logging
from typing import Any, NamedTuple
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import MeshConfig
from bert_jax.train import sharding
from bert_jax.train.compilation import CompilingAhead, later_batch_shapes
from bert_jax.train.run import Source
from bert_jax.train.step import TrainState

MESH = sharding.make_mesh(MeshConfig())


class Batch(NamedTuple):
    input_ids: Any


def step(state: TrainState, batch: Batch, fraction: Any, key: jax.Array) -> tuple[TrainState, jax.Array]:
    if batch.input_ids.shape[1] == 7:
        raise ValueError("no room for rows of 7")
    return state._replace(step=state.step + 1), batch.input_ids.sum() + fraction


def batch_of(length: int) -> Batch:
    return Batch(jax.device_put(np.ones((8, length), np.int32), sharding.rows_sharding(MESH)))


def start(lengths: list[int], lines: list[str]) -> tuple[Any, TrainState, jax.Array, CompilingAhead]:
    whole = sharding.replicated(MESH)
    zero = np.zeros((), np.int32)
    state = jax.device_put(TrainState(zero, {"w": np.ones(3, np.float32)}, (), None, zero), whole)
    key = jax.device_put(jax.random.key(0), whole)
    jitted = jax.jit(step, donate_argnums=0)
    later = {
        number: Batch(jax.ShapeDtypeStruct((8, length), jnp.int32, sharding=sharding.rows_sharding(MESH)))
        for number, length in enumerate(lengths, 1)
    }
    return jitted, state, key, CompilingAhead(jitted, state, later, (key,), MESH, lines.append)


def test_each_shape_is_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    jax.config.update("jax_log_compiles", True)
    try:
        with jax.set_mesh(MESH), caplog.at_level(logging.WARNING):
            jitted, state, key, ahead = start([5, 6], lines)
            with ahead:
                for length in (4, 6, 5, 6, 4):
                    ahead.wait_for(batch_of(length))
                    state, found = jitted(state, batch_of(length), np.float32(0), key)
                    assert found == 8 * length
    finally:
        jax.config.update("jax_log_compiles", False)
    messages = [record.getMessage() for record in caplog.records]
    for what in ("Compiling jit(step)", "Finished XLA compilation of jit(step)"):  # jax lowers it, and XLA compiles it
        assert sum(what in message for message in messages) == 3, what
    assert state.step == 5
    assert lines == [f"compiling for step {n}: batches of 8 rows of {n + 4} positions" for n in (1, 2)]


def test_a_program_that_does_not_compile_ends_the_run_before_its_first_batch() -> None:
    with jax.set_mesh(MESH):
        *_, ahead = start([7], [])
        with ahead, pytest.raises(ValueError, match="no room for rows of 7"):
            ahead.wait_for(batch_of(7))
        *_, ahead = start([7], [])
        with ahead, pytest.raises(ValueError, match="no room for rows of 7"):
            while True:
                ahead.wait_for(batch_of(4))


def test_a_finished_run_has_no_later_shapes() -> None:
    assert later_batch_shapes(Mock(spec=Source), 300, 300, MESH, (3, 7)) == {}
