"""A workdir records what it holds; parameters are written and read on their own, completely or not at all."""

import shutil

import numpy as np
import pytest

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model.heads.config import Heads
from bert_jax.train.workdir import WorkdirConfig, latest_step, read_config, read_params, write_config, write_params


def test_config_is_written_whole_and_read_back(tmp_path):
    model = ModelConfig(vocab_size=100, layers=2, width=8, heads=2, feed_forward=16)
    config = WorkdirConfig(model, Heads(mlm=True, next_sentence=True, pooler=True), training={"steps": 3})
    write_config(tmp_path / "new", config)
    assert read_config(tmp_path / "new") == config
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["config.json"]


def test_a_missing_damaged_or_unrelated_config_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a workdir"):
        read_config(tmp_path)
    for text, message in (("{", "not valid JSON"), ('{"model_type": "bert"}', "is not from a workdir of bert_jax")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            read_config(tmp_path)


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


def test_a_folder_without_checkpoints_and_a_missing_step_are_refused(tmp_path):
    with pytest.raises(UserError, match="no checkpoint in"):
        read_params(tmp_path)
    write_params(tmp_path, 5, {"kernel": np.ones(3, np.float32)})
    with pytest.raises(UserError, match="no checkpoint of step 4 in"):
        read_params(tmp_path, 4)
