"""A run begins with some layers of a checkpoint: which parameters it gets, and what is refused."""

import dataclasses

import numpy as np
import pytest
from families import FAMILIES
from random_checkpoints import odd_config, random_checkpoint

from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.interop import export
from bert_jax.interop.initial import open_initial, with_layers
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params


def loaded_of(tmp_path, model: ModelConfig) -> LoadedModel:
    return random_checkpoint(tmp_path / "words", dataclasses.replace(model, vocab_size=131))


def test_every_second_layer_is_that_of_the_checkpoint_and_the_rest_is_the_same(tmp_path):
    loaded = loaded_of(tmp_path, odd_config(layers=6))
    export.write(loaded, tmp_path / "all")
    student = open_initial(TrainConfig(init_from=str(tmp_path / "all"), init_layers=(0, 2, 5)))
    assert student.model == dataclasses.replace(loaded.model, layers=3)
    abstract = layers.flatten(abstract_params(student.model, student.heads))
    assert {path: leaf.shape for path, leaf in abstract.items()} == {
        path: v.shape for path, v in student.params.items()
    }
    for path, value in student.params.items():
        whole = loaded.params[path]
        if path.startswith("encoder/layers/"):
            whole = np.stack([whole[0], whole[2], whole[5]])
        np.testing.assert_array_equal(value, whole, err_msg=path)


def test_parameters_that_layers_share_stay_shared(tmp_path):
    model = dataclasses.replace(FAMILIES["albert"], layers=4)
    loaded = loaded_of(tmp_path, model)
    student = with_layers(loaded, (1, 3))
    assert student.model.layers == 2
    assert {path: value.shape for path, value in student.params.items()} == {
        path: leaf.shape for path, leaf in layers.flatten(abstract_params(student.model, student.heads)).items()
    }


@pytest.mark.parametrize("layers", [(3,), (0, 0), (2, 1), (-1, 0)])
def test_layers_that_do_not_exist_or_are_not_in_order_are_refused(layers, tmp_path):
    with pytest.raises(UserError, match="use ascending numbers from 0 to 2, the last layer of the checkpoint"):
        with_layers(loaded_of(tmp_path, odd_config()), layers)


def test_layers_keep_their_kind_of_attention(tmp_path):
    model = dataclasses.replace(FAMILIES["modernbert"], layers=6, global_every=3, window=4)
    loaded = loaded_of(tmp_path, model)
    assert with_layers(loaded, (0, 4, 5)).model.layers == 3
    for chosen in ((0, 3), (1, 2), (3, 4, 5)):
        with pytest.raises(UserError, match="Take whole groups of 3 layers, with layer 0 first"):
            with_layers(loaded, chosen)


def test_layers_without_a_checkpoint_are_refused():
    with pytest.raises(UserError, match=r"init_layers is \(0, 2\), but init_from is not set"):
        open_initial(TrainConfig(init_layers=(0, 2)))
