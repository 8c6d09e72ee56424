import jax
import numpy as np
import pytest

from bert_jax.command import UserError
from bert_jax.config import MeshConfig
from bert_jax.train import partitioning


@pytest.fixture
def mesh():
    return partitioning.make_mesh(MeshConfig())


def test_a_mesh_that_does_not_fill_the_devices_is_refused():
    with pytest.raises(UserError, match=r"8 devices.*mesh\.data=-1"):
        partitioning.make_mesh(MeshConfig(data=3))


@pytest.mark.parametrize(("batch_size", "microbatches", "better"), [(100, 1, 104), (8, 2, 16), (0, 1, 8)])
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(mesh, batch_size, microbatches, better):
    with pytest.raises(UserError, match=rf"batch_size={better}$"):
        partitioning.check_batch(batch_size, microbatches, mesh)


def test_rows_are_spread_and_parameters_are_whole(mesh):
    batch = partitioning.place({"x": np.arange(32).reshape(16, 2)}, 16, mesh)
    assert batch["x"].addressable_shards[3].data.shape == (2, 2)
    np.testing.assert_array_equal(batch["x"], np.arange(32).reshape(16, 2))
    shardings = partitioning.shardings(mesh, {"a": jax.ShapeDtypeStruct((4, 4), np.float32)})
    assert shardings["a"].is_fully_replicated


def test_one_process_loads_all_rows(mesh):
    assert partitioning.local_rows(16, mesh) == slice(0, 16)
