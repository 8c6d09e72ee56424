"""The loop of inference: results in order, and batches that are made while others are computed."""

import jax
import numpy as np
import pytest

from bert_jax.config import MeshConfig
from bert_jax.tasks.inference import run_batches
from bert_jax.train import sharding


@pytest.mark.parametrize("count", [0, 1, 4])
def test_results_come_in_order_while_the_next_batch_is_computed(count):
    events, double = [], jax.jit(lambda batch: batch["x"] * 2)
    indices = [np.arange(8) + 8 * number for number in range(count)]

    def compute(batch):
        events.append("compute")
        return double(batch)

    def batches():
        for rows in indices:
            events.append("make")
            yield rows, {"x": rows.astype(np.float32)}

    for rows, found in run_batches(compute, batches(), sharding.make_mesh(MeshConfig())):
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, 2 * rows)
        events.append("use")
    assert events == (["make", "compute", *["make", "compute", "use"] * (count - 1), "use"] if count else [])
