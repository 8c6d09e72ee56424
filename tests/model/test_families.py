"""What holds for every architecture: packing, loops and recomputation change nothing; who sees whom."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, PACKED, WAYS, assert_same, heads_of, losses_and_gradients, params_of

from bert_jax.model import layers
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.runtime import Runtime

# Compiling is what takes time: the others are of the slow tests.
FIRST = ("modernbert", "gpt")
EACH = [family if family in FIRST else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]


@pytest.mark.parametrize("family", EACH)
def test_packed_rows_equal_padded_ones_and_a_scan_an_unrolled_loop(family):
    """Law 5, in losses and gradients. One comparison for both, as compiling is what takes time; the slow tests below
    have the loops and the rows apart."""
    padded = losses_and_gradients(family, "scan", packed=False)
    assert_same(losses_and_gradients(family, "unrolled", packed=True), padded)
    idle = [path for path, gradient in padded[1].items() if not np.any(gradient)]
    assert idle == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "scan"])
def test_neither_the_loop_nor_computing_layers_again_changes_anything(family, way):
    assert_same(losses_and_gradients(family, way, packed=True), losses_and_gradients(family, "scan", packed=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_who_sees_whom_is_shown_by_gradients(family):
    """In encoders each token of a sequence moves each other one's vector, in GPT those behind it; never those of
    another sequence, nor padding."""
    config = FAMILIES[family]
    batch = jax.tree.map(lambda leaf: leaf[:1, :17], PACKED)  # sequences of 9 and 6, and two positions of a third
    params = params_of(family)

    def last(embedded):
        model = bind(config, heads_of(config), params, Runtime(layer_loop="scan"))
        return model.encoder(embedded, batch.sequence_ids, batch.positions, None).last[0]

    embedded = jax.random.normal(jax.random.key(1), (1, 17, config.width))
    moved = np.abs(jax.jit(jax.jacobian(last))(embedded)).max(axis=(1, 2, 4))
    sequence = np.asarray(batch.sequence_ids[0])
    wanted = sequence[:, None] == sequence[None, :]
    if config.causal:
        wanted = np.tril(wanted)
    np.testing.assert_array_equal(moved > 0, wanted)


@pytest.mark.parametrize("family", EACH)
def test_the_last_layer_at_some_positions_equals_the_whole_layer(family):
    config = FAMILIES[family]
    slots = jnp.asarray([[1, 1, 12, 24], [2, 0, 1, 2]], jnp.int32)

    @jax.jit
    def both(params):
        model = bind(config, heads_of(config), params, Runtime(layer_loop="scan"))
        return model.encode_at(PACKED, slots), model.encode(PACKED).last

    some, whole = both(params_of(family))
    np.testing.assert_allclose(some, np.take_along_axis(whole, np.asarray(slots)[..., None], axis=1), atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "shaw", "modernbert", "gpt"])
def test_attention_maps_are_probabilities_over_what_is_seen(family):
    config = FAMILIES[family]
    found = []
    for way in ("scan", "unrolled"):
        model = bind(config, heads_of(config), params_of(family), WAYS[way])
        found.append(jax.jit(functools.partial(model.encode, all_layers=True, attention_maps=True))(PACKED))
    scanned, unrolled = found
    np.testing.assert_allclose(scanned.attention_maps, unrolled.attention_maps, atol=1e-5)
    np.testing.assert_allclose(scanned.layers[-1], scanned.last)
    maps = np.asarray(scanned.attention_maps)
    assert maps.shape == (config.layers, 2, config.heads, 25, 25)
    np.testing.assert_allclose(maps.sum(axis=-1), 1, atol=1e-5)
    ahead = np.arange(25)[None, :] - np.arange(25)[:, None]
    sequence = np.asarray(PACKED.sequence_ids)
    for layer in range(config.layers):
        seen = sequence[:, :, None] == sequence[:, None, :]
        if not config.is_global(layer):
            seen &= np.abs(ahead) <= config.window
        if config.causal:
            seen &= ahead <= 0
        np.testing.assert_array_equal(maps[layer] > 0, np.broadcast_to(seen[:, None], maps[layer].shape))


def test_parameters_of_each_choice_are_the_documented_ones():
    def shapes(family: str) -> dict[str, tuple[int, ...]]:
        config = FAMILIES[family]
        found = layers.flatten(abstract_params(config, heads_of(config)))
        return {path: leaf.shape for path, leaf in found.items()}

    bert = shapes("bert")
    assert shapes("roberta")["embeddings/position/table"] == (34, 12)
    assert shapes("roberta")["embeddings/segment/table"] == (1, 12)
    added = {"encoder/final_norm/scale": (12,), "encoder/final_norm/bias": (12,), "mlm_head/output/table": (128, 12)}
    assert shapes("pre_norm") == bert | added
    assert shapes("shaw")["encoder/layers/attention/relative/table"] == (3, 7, 4)
    assert shapes("buckets")["encoder/relative_bias/table"] == (32, 3)
    modern = shapes("modernbert")
    assert modern["encoder/layers/feed_forward/input/kernel"] == (3, 12, 2, 20)
    biases = {path for path in modern if path.endswith("bias")}
    assert biases == {"mlm_head/bias", "next_sentence_head/dense/bias", "tagger/dense/bias"}
    assert "pooler/norm/scale" in modern and "embeddings/position/table" not in modern
    assert not any(path.startswith(("embeddings/norm", "embeddings/segment", "mlm_head")) for path in shapes("gpt"))
    assert "embeddings/position/table" not in shapes("original")
