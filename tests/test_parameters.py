"""Parameters are written and read alone, whole or not at all."""

import shutil

import numpy as np
import pytest

from bert_jax.command import UserError
from bert_jax.train.parameters import read_params, write_params
from bert_jax.train.workdir import latest_step


def test_params_are_read_without_the_optimizer_and_written_without_one(tmp_path):
    flat = {"a/kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, np.float32)}
    write_params(tmp_path, 5, flat)
    assert latest_step(tmp_path) == 5
    read = read_params(tmp_path)
    assert set(read) == set(flat) and all(isinstance(value, np.ndarray) for value in read.values())
    for name, value in flat.items():
        np.testing.assert_array_equal(read[name], value)


def test_a_tensor_other_than_the_one_saved_is_found(tmp_path):
    for workdir, value in (("one", 1.0), ("other", 2.0)):
        write_params(tmp_path / workdir, 1, {"kernel": np.full(4, value, np.float32)})
    params = tmp_path / "one" / "checkpoints" / "1" / "params"
    shutil.rmtree(params)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "1" / "params", params)
    with pytest.raises(UserError, match=r"damaged.*params/kernel does not have the content"):
        read_params(tmp_path / "one")


def test_a_folder_without_checkpoints_and_a_step_that_is_not_there_are_said(tmp_path):
    with pytest.raises(UserError, match="no checkpoint in"):
        read_params(tmp_path)
    write_params(tmp_path, 5, {"kernel": np.ones(3, np.float32)})
    with pytest.raises(UserError, match="no checkpoint of step 4 in"):
        read_params(tmp_path, 4)
