"""Adapters of rank r: they begin at the model itself, compute what merged matrices do, and train alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES
from test_objective import MODEL, OBJECTIVES, batch_of

from bert_jax import config as config_lib
from bert_jax.config import FinetuneConfig, ModelConfig
from bert_jax.config.model import MATRICES, WITHOUT, LoraConfig
from bert_jax.errors import UserError
from bert_jax.model import bert, layers, lora
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime

OBJECTIVE = OBJECTIVES["classification"]
ALL = LoraConfig(rank=3, alpha=6.0, targets=".*")


def random_params(model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters by path, adapters included, large enough that each one changes the outputs."""
    draw = np.random.default_rng(seed)
    abstract = layers.flatten(bert.abstract_params(model, OBJECTIVE.heads))
    found = {path: draw.normal(0, 0.2, leaf.shape).astype(np.float32) for path, leaf in abstract.items()}
    return {path: value + np.float32(path.endswith("/scale")) for path, value in found.items()}


def outputs(model: ModelConfig, params: dict[str, np.ndarray], key: Any = None) -> np.ndarray:
    nested = layers.unflatten({path: jnp.asarray(value) for path, value in params.items()})
    bound = bert.bind(model, OBJECTIVE.heads, nested, Runtime())
    return np.asarray(OBJECTIVE.outputs(bound, jax.tree.map(jnp.asarray, batch_of("classification")), key))


LAYERED = [name for name, model in FAMILIES.items() if model.encoder.kind == "transformer"]


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYERED)
def test_merged_matrices_compute_what_the_adapters_do(family):
    sizes = {"vocab_size": 50, "layers": 2, "width": 16, "heads": 2, "feed_forward": 24, "max_positions": 32}
    if FAMILIES[family].embedding_width:
        sizes["embedding_width"] = min(FAMILIES[family].embedding_width, 16)
    model = dataclasses.replace(FAMILIES[family], **sizes, lora=ALL)
    params = random_params(model)
    plain, merged = lora.merge(model, params)
    assert plain == dataclasses.replace(model, lora=None)
    assert set(merged) == set(layers.flatten(bert.abstract_params(plain, OBJECTIVE.heads)))
    without = {path: value for path, value in params.items() if not lora.is_adapter(path)}
    assert np.abs(outputs(model, params) - outputs(plain, without)).max() > 0.01
    np.testing.assert_allclose(outputs(plain, merged), outputs(model, params), atol=1e-5, rtol=0)


@pytest.mark.parametrize("matrix", [pytest.param(name, marks=pytest.mark.slow) for name in MATRICES])
@pytest.mark.parametrize("family", ["bert", "modernbert", "albert"])
def test_a_pattern_reaches_the_matrix_that_it_names_alone(family, matrix):
    """The merged model differs in one kernel, and computes what the model with the adapter does."""
    sizes = {"vocab_size": 50, "layers": 2, "width": 16, "heads": 2, "feed_forward": 24, "max_positions": 32}
    model = dataclasses.replace(FAMILIES[family], **sizes, lora=LoraConfig(rank=2, targets=f"^{matrix}$"))
    params = random_params(model)
    plain, merged = lora.merge(model, params)
    changed = {path for path in merged if not np.array_equal(merged[path], params[path])}
    assert changed == {lora.kernel_path(matrix)[0]}
    assert {path for path in params if lora.is_adapter(path)} == {f"{matrix}_lora/a", f"{matrix}_lora/b"}
    adapted = outputs(model, params)
    without = {path: value for path, value in params.items() if not lora.is_adapter(path)}
    assert np.abs(adapted - outputs(plain, without)).max() > 1e-3
    np.testing.assert_allclose(outputs(plain, merged), adapted, atol=1e-5, rtol=0)


def test_every_matrix_of_a_model_has_an_adapter_or_is_named_as_one_without():
    """The heads are those of frequent tasks; a new kind of matrix in a layer fails here."""
    heads = Heads(mlm=True, pooler=True, classes=3, tags=3, question=True)
    for name in LAYERED:
        found = layers.flatten(bert.abstract_params(FAMILIES[name], heads))
        kernels = {path.rpartition("/")[0] for path in found if path.endswith(("/kernel", "/table"))}
        within = {lora.kernel_path(matrix)[0].rpartition("/")[0] for matrix in MATRICES}
        rest = {path for path in kernels - within if path not in WITHOUT}
        tables = {"mlm_head/output", "encoder/layers/attention/relative", "encoder/relative_bias"}
        assert within <= kernels and rest <= tables, (name, rest)


def test_an_adapter_adds_its_scaled_product_to_the_matrix():
    """By the definition, Hu et al. 2021, equation 3, for the query matrix of each layer."""
    model = dataclasses.replace(MODEL, lora=LoraConfig(rank=3, alpha=6.0, targets="query|value"))
    params = random_params(model)
    _, merged = lora.merge(model, params)
    folder = "encoder/layers/attention"
    for layer in range(model.layers):
        for part, name in ((0, "query"), (2, "value")):
            a, b = (params[f"{folder}/{name}_lora/{matrix}"][layer] for matrix in ("a", "b"))
            change = (merged[f"{folder}/qkv/kernel"] - params[f"{folder}/qkv/kernel"])[layer][:, part]
            np.testing.assert_allclose(change.reshape(16, 16), 2.0 * a @ b.reshape(3, 16), atol=1e-6)
    keys = (merged[f"{folder}/qkv/kernel"] == params[f"{folder}/qkv/kernel"])[:, :, 1]
    assert keys.all()


@pytest.mark.slow
def test_new_adapters_change_nothing():
    params = layers.flatten(bert.init_params(dataclasses.replace(MODEL, lora=ALL), OBJECTIVE.heads, jax.random.key(0)))
    narrow = [value for path, value in params.items() if lora.is_adapter(path) and path.endswith("/a")]
    assert len(narrow) == len(MATRICES)
    for value in narrow:
        bound = 1 / np.sqrt(np.prod(value.shape[1:-1]))
        assert 0.8 * bound < np.abs(value).max() <= bound
    assert not any(np.any(value) for path, value in params.items() if lora.is_adapter(path) and path.endswith("/b"))
    without = {path: value for path, value in params.items() if not lora.is_adapter(path)}
    plain = bert.init_params(MODEL, OBJECTIVE.heads, jax.random.key(0))
    for path, value in layers.flatten(plain).items():
        np.testing.assert_array_equal(without[path], value, err_msg=path)


@pytest.mark.slow
def test_dropout_of_adapters_drops_their_inputs_in_training_only():
    model = dataclasses.replace(MODEL, dropout=0.0, attention_dropout=0.0, lora=dataclasses.replace(ALL, dropout=0.5))
    params, key = random_params(model), jax.random.key(1)
    undropped = dataclasses.replace(model, lora=ALL)
    np.testing.assert_array_equal(outputs(model, params), outputs(undropped, params))
    np.testing.assert_array_equal(outputs(undropped, params, key), outputs(undropped, params))
    assert not np.allclose(outputs(model, params, key), outputs(model, params), atol=1e-3)
    np.testing.assert_array_equal(outputs(model, params, key), outputs(model, params, key))


def test_the_scale_is_alpha_over_the_rank_or_its_root():
    assert LoraConfig(rank=4, alpha=8.0).scale == 2.0
    assert LoraConfig(rank=4, alpha=8.0, rank_stabilized=True).scale == 4.0


def test_a_configuration_with_adapters_is_read_as_it_was_written():
    model = dataclasses.replace(MODEL, lora=ALL)
    assert config_lib.load(ModelConfig, config_lib.to_dict(model)) == model
    assert config_lib.load(ModelConfig, config_lib.to_dict(MODEL)) == MODEL


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"alpha": 8.0}, "lora.alpha is 8.0, but lora.rank is 0"),
        ({"rank": -1}, "lora.rank is -1"),
        ({"rank": 8, "alpha": 0.0}, "lora.alpha is 0.0"),
        ({"rank": 8, "dropout": 1.0}, "lora.dropout is 1.0"),
        ({"rank": 8, "targets": "attention/("}, "not a regular expression"),
        ({"rank": 8, "targets": "embeddings"}, "matches no matrix; they are encoder/layers/attention/query"),
        (
            {"rank": 8, "targets": "query|embeddings/token"},
            "also matches embeddings/token, but only matrices of encoder",
        ),
        ({"rank": 8, "targets": "(pooler|feed_forward)"}, "also matches pooler/dense, but only matrices of encoder"),
        ({"rank": 8, "targets": "key|_head"}, "also matches mlm_head/transform, but only matrices of encoder"),
        ({"rank": 8, "targets": "q_proj"}, "matches no matrix; they are encoder/layers/attention/query"),
    ],
)
def test_values_that_make_no_adapter_are_refused(values, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")) as caught:
        LoraConfig(**values).check_unused()
    assert "\n" not in str(caught.value)


def test_combinations_without_meaning_are_refused():
    with pytest.raises(UserError, match=r"train_layers=last:2 trains layers, but lora\.rank=8"):
        FinetuneConfig(init_from="base", train_layers="last:2", lora=LoraConfig(rank=8))
    with pytest.raises(UserError, match="init_from is not set: adapters need a pretrained model"):
        FinetuneConfig(lora=LoraConfig(rank=8))
    with pytest.raises(UserError, match=r"model\.encoder=lstm does not have"):
        dataclasses.replace(FAMILIES["lstm"], lora=ALL)
