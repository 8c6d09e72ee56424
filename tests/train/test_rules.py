import dataclasses

import jax
import numpy as np
import pytest

from bert_jax.config import OptimizerConfig
from bert_jax.errors import UserError
from bert_jax.model import bert, layers
from bert_jax.model.heads.config import Heads
from bert_jax.train import optim, rules
from bert_jax.train.rules import Trained


@pytest.fixture
def params(tiny_config):
    return bert.abstract_params(tiny_config, Heads(mlm=True, next_sentence=True, pooler=True))


def test_a_rule_may_mean_one_layer_of_a_stack(params):
    values = layers.flatten(rules.per_layer(((r"layers/1/attention", 0.5), (r"bias$", 0.25), (r".*", 1.0)), params))
    kernel = values["encoder/layers/attention/qkv/kernel"]
    assert kernel.shape == (2, 1, 1, 1, 1) and kernel.dtype == np.float32
    np.testing.assert_array_equal(kernel.ravel(), [1, 0.5])
    np.testing.assert_array_equal(values["encoder/layers/attention/qkv/bias"].ravel(), [0.25, 0.5])
    assert values["encoder/layers/feed_forward/input/kernel"] == 1  # one number where the layers are alike
    assert values["pooler/dense/bias"] == 0.25


def test_rules_are_read_from_text(params):
    assert rules.parse("", "optimizer.rates", params) == ()
    text = "^embeddings/=0.1;layers/(0|1)/.*bias=0"
    assert rules.parse(text, "optimizer.rates", params) == (("^embeddings/", 0.1), ("layers/(0|1)/.*bias", 0.0))


@pytest.mark.parametrize(
    "text", ["embeddings", "=1", "embeddings=", "embeddings=-1", "embeddings=nan", "(=1", "embedings=1", "layers/2/=1"]
)
def test_text_that_is_no_rule_or_meets_nothing_is_refused(params, text):
    with pytest.raises(UserError, match=r"optimizer\.rates"):
        rules.parse(text, "optimizer.rates", params)


def test_everything_learns_by_default(params):
    assert rules.trainable("all", params) is None


def test_last_k_frees_the_last_layers_and_the_head(params):
    factors = layers.flatten(rules.trainable("last:1", params))
    kernel = factors["encoder/layers/attention/qkv/kernel"]
    assert kernel.ndim == 5
    np.testing.assert_array_equal(kernel.ravel(), [0, 1])
    assert factors["embeddings/token/table"] == 0
    assert factors["pooler/dense/kernel"] == factors["mlm_head/bias"] == 1


def test_last_k_keeps_what_the_frozen_layers_share(tiny_config):
    config = dataclasses.replace(tiny_config, norm="pre", relative="buckets")
    factors = layers.flatten(rules.trainable("last:1", bert.abstract_params(config, Heads(mlm=True))))
    assert factors["encoder/relative_bias/table"] == 0
    assert factors["encoder/final_norm/scale"] == 1


def test_head_freezes_the_encoder(params):
    factors = layers.flatten(rules.trainable("head", params))
    learning = {path for path, factor in factors.items() if np.any(factor)}
    assert learning
    assert all(path.startswith(("mlm_head", "next_sentence_head")) for path in learning)


def test_initialized_parameters_train_with_the_head(params):
    fresh = frozenset({"pooler/dense/kernel", "encoder/layers/attention/qkv/bias"})
    for words in ("head", "last:1"):
        factors = layers.flatten(rules.trainable(words, params, fresh))
        assert all(np.all(factors[path]) for path in fresh)


def test_no_embeddings_freezes_just_those(params):
    factors = layers.flatten(rules.trainable("no_embeddings", params))
    assert {path for path, factor in factors.items() if not np.any(factor)} == {
        path for path in factors if path.startswith("embeddings/")
    }


def test_stages_go_from_the_head_down_layer_by_layer(params):
    """Stage 0 is `head`, stage K `last:K`, and at last all learns: each by the rule of its own."""
    stages = layers.flatten(rules.stages(params))
    for stage, words in enumerate(("head", "last:1", "last:2")):
        factors = layers.flatten(rules.trainable(words, params))
        for path, begins in stages.items():
            np.testing.assert_array_equal(*np.broadcast_arrays(begins <= stage, factors[path] != 0), err_msg=path)
    assert max(np.max(begins) for begins in stages.values()) == 3
    assert not np.any(layers.flatten(rules.stages(params, frozenset({"pooler/dense/kernel"})))["pooler/dense/kernel"])
    assert [rules.gradual_epochs(words) for words in ("gradual", "gradual:0.5", "last:2")] == [1.0, 0.5, None]


@pytest.mark.parametrize("words", ["last:0", "last:3", "last:x", "some", "gradual:", "gradual:0", "gradual:soon"])
def test_what_cannot_be_trained_is_refused(params, words):
    with pytest.raises(UserError, match="train_layers"):
        rules.trainable(words, params)


def test_factors_are_tree_like_params(params):
    factors = rules.trainable("last:1", params)
    assert jax.tree.structure(factors) == jax.tree.structure(params)


@pytest.mark.parametrize("shared", ["attention", "feed_forward"])
def test_a_stack_has_the_layers_of_its_parts_that_are_not_shared(tiny_config, shared):
    """What all layers share is stored once, and counts as a part of the first layer, which needs it as it is."""
    config = dataclasses.replace(tiny_config, layers=3, shared_layers=shared)
    params = bert.abstract_params(config, Heads(mlm=True, pooler=True))
    assert rules.stacks(params) == {"encoder/layers/": 3}
    own = "feed_forward" if shared == "attention" else "attention"
    kernels = {part: f"encoder/layers/{part}/output/kernel" for part in (shared, own)}

    factors = layers.flatten(optim.rate_factors(OptimizerConfig(layer_decay=0.5), params))
    np.testing.assert_array_equal(factors[kernels[own]].ravel(), [0.125, 0.25, 0.5])
    assert factors[kernels[shared]] == 0.125 and factors["embeddings/token/table"] == 0.0625
    assert factors["pooler/dense/kernel"] == factors["mlm_head/bias"] == 1

    trains = rules.trainable("last:1", params)
    last = layers.flatten(trains)
    np.testing.assert_array_equal(last[kernels[own]].ravel(), [0, 0, 1])
    assert last[kernels[shared]] == last["embeddings/token/table"] == 0 and last["pooler/dense/kernel"] == 1
    assert Trained.where(trains).frozen_layers(params) == 2
    with pytest.raises(UserError, match="the model has 3 layers"):
        rules.trainable("last:4", params)
    stages = layers.flatten(rules.stages(params))
    np.testing.assert_array_equal(stages[kernels[own]].ravel(), [3, 2, 1])
    assert stages[kernels[shared]] == 3 and stages["embeddings/token/table"] == 4
