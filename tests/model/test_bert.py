import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import BERT, random_params
from tiny_batches import lay, random_sequence

from bert_jax.config import ModelConfig
from bert_jax.data.example import Batch
from bert_jax.errors import UserError
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params, bind, init_params
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import masked_logits, next_sentence_logits, pool_vectors, vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import gather_positions

CONFIG = dataclasses.replace(BERT, layers=2)
DROPPING = dataclasses.replace(CONFIG, dropout=0.2, attention_dropout=0.2)
PRETRAINING = Heads(mlm=True, next_sentence=True, pooler=True)
EVERY_HEAD = Heads(mlm=True, next_sentence=True, pooler=True, classes=3, tags=5)
KEY = jax.random.key(0)


def padded_batch(slots: int = 13) -> Batch:
    return on_device(lay([[random_sequence(length, 61, length)] for length in (13, 7, 9)], slots, predictions=4))


def on_device(batch: Batch) -> Batch:
    return jax.tree.map(jnp.asarray, batch)


def losses(model, batch: Batch, dropout_key=None) -> jax.Array:
    """The sums of both losses over the batch, by the shortest path through the model."""
    hidden = model.encode(batch, dropout_key).last
    logits = masked_logits(model, hidden, batch.masked_positions)
    masked = _cross_entropy(logits, batch.masked_ids, batch.masked_weights)
    logits = next_sentence_logits(model, pool_vectors(model, gather_positions(hidden, batch.cls_positions)))
    return jnp.stack([masked, _cross_entropy(logits, batch.next_sentence_label, batch.next_sentence_weight)])


def _cross_entropy(logits, labels, weights):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
    return -(picked * weights).sum()


@jax.jit
def total_gradients(params, batch: Batch):
    def total(params):
        parts = losses(bind(CONFIG, PRETRAINING, params, Runtime()), batch)
        return parts.sum(), parts

    return jax.grad(total, has_aux=True)(params)


def losses_and_gradients(params, batch: Batch):
    gradients, parts = total_gradients(params, batch)
    return parts, layers.flatten(gradients)


@functools.partial(jax.jit, static_argnames=("config", "runtime"))
def encoded(params, batch: Batch, dropout_key=None, config: ModelConfig = CONFIG, runtime: Runtime = Runtime()):  # noqa: B008
    return bind(config, PRETRAINING, params, runtime).encode(batch, dropout_key)


def encode(*arguments, **options) -> np.ndarray:
    return np.asarray(encoded(*arguments, **options).last, np.float32)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, PRETRAINING)


def test_paths_and_shapes_are_the_documented_ones():
    found = {path: leaf.shape for path, leaf in layers.flatten(abstract_params(CONFIG, EVERY_HEAD)).items()}
    norms = ("embeddings/norm", "mlm_head/norm")
    layer_norms = ("encoder/layers/attention_norm", "encoder/layers/feed_forward_norm")
    wanted = {
        "embeddings/token/table": (128, 12),
        "embeddings/position/table": (32, 12),
        "embeddings/segment/table": (2, 12),
        "encoder/layers/attention/qkv/kernel": (2, 12, 3, 3, 4),
        "encoder/layers/attention/qkv/bias": (2, 3, 3, 4),
        "encoder/layers/attention/output/kernel": (2, 3, 4, 12),
        "encoder/layers/attention/output/bias": (2, 12),
        "encoder/layers/feed_forward/input/kernel": (2, 12, 20),
        "encoder/layers/feed_forward/input/bias": (2, 20),
        "encoder/layers/feed_forward/output/kernel": (2, 20, 12),
        "encoder/layers/feed_forward/output/bias": (2, 12),
        "pooler/dense/kernel": (12, 12),
        "pooler/dense/bias": (12,),
        "mlm_head/transform/kernel": (12, 12),
        "mlm_head/transform/bias": (12,),
        "mlm_head/bias": (128,),
        "next_sentence_head/dense/kernel": (12, 2),
        "next_sentence_head/dense/bias": (2,),
        "classifier/dense/kernel": (12, 3),
        "classifier/dense/bias": (3,),
        "tagger/dense/kernel": (12, 5),
        "tagger/dense/bias": (5,),
    }
    wanted |= {f"{norm}/{name}": (12,) for norm in norms for name in ("scale", "bias")}
    wanted |= {f"{norm}/{name}": (2, 12) for norm in layer_norms for name in ("scale", "bias")}
    assert found == wanted


def test_initial_values_depend_on_key_and_path_alone():
    few = layers.flatten(init_params(CONFIG, Heads(), KEY))
    many = layers.flatten(init_params(CONFIG, EVERY_HEAD, KEY))
    assert len(many) > len(few)
    for path, value in few.items():
        assert value.dtype == jnp.float32
        np.testing.assert_array_equal(value, many[path])
    kernels = [np.asarray(value).ravel()[:20] for path, value in many.items() if path.endswith("kernel")]
    assert len({kernel.tobytes() for kernel in kernels}) == len(kernels)


def test_initial_biases_are_zero_scales_one_and_vocabulary_padding_zero():
    for path, value in layers.flatten(init_params(CONFIG, EVERY_HEAD, KEY)).items():
        if path.endswith(("bias", "scale")):
            np.testing.assert_array_equal(value, float(path.endswith("scale")))
        else:
            assert np.abs(value).max() <= 2 * CONFIG.initializer_range
    np.testing.assert_array_equal(init_params(CONFIG, Heads(), KEY)["embeddings"]["token"]["table"][61:], 0)


@pytest.mark.parametrize("config", [CONFIG, DROPPING])
def test_padding_changes_no_real_output(params, config):
    batch, longer = padded_batch(), padded_batch(slots=20)
    noise = jax.random.randint(KEY, (3, 20), 0, 2)
    padding = longer.sequence_ids == 0
    longer = longer._replace(
        input_ids=jnp.where(padding, 7 * noise, longer.input_ids),
        segment_ids=jnp.where(padding, noise, longer.segment_ids),
        positions=jnp.where(padding, noise, longer.positions),
    )
    real = np.asarray(batch.sequence_ids > 0)
    one, other = (encode(params, each, jax.random.key(1), config) for each in (batch, longer))
    np.testing.assert_allclose(other[:, :13][real], one[real], atol=1e-5)


def test_padding_and_other_sequences_have_no_gradient(params):
    batch = on_device(lay([[random_sequence(5, 61, 1), random_sequence(6, 61, 2)]], slots=13, predictions=2))
    model = bind(CONFIG, PRETRAINING, params, Runtime())

    def first_sequence(embedded):
        return jnp.square(model.encoder(embedded, batch.sequence_ids, batch.positions, None).last[0, :5]).sum()

    gradient = np.asarray(jax.jit(jax.grad(first_sequence))(encoded(params, batch).embeddings))
    assert np.abs(gradient[0, :5]).min() > 0
    np.testing.assert_array_equal(gradient[0, 5:], 0)


def test_bfloat16_is_near_float32_and_its_logits_are_float32(params):
    batch = padded_batch()
    narrow = Runtime(compute_dtype="bfloat16")
    got, wanted = encode(params, batch, runtime=narrow), encode(params, batch)
    real = np.asarray(batch.sequence_ids > 0)
    # bfloat16 keeps 8 bits; hidden states are about 1 and pass a dozen roundings.
    assert np.abs(got - wanted)[real].max() < 0.1
    assert np.abs(got - wanted)[real].mean() < 0.015

    def outputs(params):
        model = bind(CONFIG, PRETRAINING, params, narrow)
        hidden = model.encode(batch).last
        vectors = pool_vectors(model, gather_positions(hidden, batch.cls_positions))
        return hidden, masked_logits(model, hidden, batch.masked_positions), next_sentence_logits(model, vectors)

    dtypes = [output.dtype for output in jax.eval_shape(outputs, params)]
    assert dtypes == [jnp.bfloat16, jnp.float32, jnp.float32]


@pytest.mark.slow
def test_vocabulary_padding_is_invisible_and_stays_zero(params):
    batch = padded_batch()
    hidden = encoded(params, batch).last
    logits = masked_logits(bind(CONFIG, PRETRAINING, params, Runtime()), hidden, batch.masked_positions)
    assert np.isfinite(logits[..., :61]).all()
    np.testing.assert_array_equal(logits[..., 61:], -np.inf)
    parts, gradients = losses_and_gradients(params, batch)
    assert np.isfinite(parts).all()
    np.testing.assert_array_equal(gradients["embeddings/token/table"][61:], 0)
    np.testing.assert_array_equal(gradients["mlm_head/bias"][61:], 0)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


@pytest.mark.slow
def test_the_tied_table_learns_from_both_of_its_uses(params):
    batch = padded_batch()
    model = bind(CONFIG, PRETRAINING, params, Runtime())

    def loss(seen_table, output_table):
        seen = {**params, "embeddings": {**params["embeddings"], "token": {"table": seen_table}}}
        hidden = bind(CONFIG, PRETRAINING, seen, Runtime()).encode(batch).last
        vectors = jnp.take_along_axis(hidden, batch.masked_positions[..., None], axis=1)
        return _cross_entropy(
            model.mlm_head.product(vectors, output_table).logits(), batch.masked_ids, batch.masked_weights
        )

    table = params["embeddings"]["token"]["table"]
    as_input, as_output = jax.jit(jax.grad(loss, (0, 1)))(table, table)
    assert np.abs(as_input).max() > 1e-3
    assert np.abs(as_output).max() > 1e-3
    only_masked = dataclasses.replace(PRETRAINING, next_sentence=False)
    without = {name: value for name, value in params.items() if name != "next_sentence_head"}

    def tied(params):
        model = bind(CONFIG, only_masked, params, Runtime())
        logits = masked_logits(model, model.encode(batch).last, batch.masked_positions)
        return _cross_entropy(logits, batch.masked_ids, batch.masked_weights)

    gradient = jax.jit(jax.grad(tied))(without)["embeddings"]["token"]["table"]
    np.testing.assert_allclose(gradient, as_input + as_output, atol=1e-5)


def test_evaluation_is_deterministic_and_dropout_follows_its_key(params):
    batch = padded_batch()
    run = lambda key: encode(params, batch, key, DROPPING)  # noqa: E731
    np.testing.assert_array_equal(run(None), run(None))
    np.testing.assert_array_equal(run(None), encode(params, batch))
    np.testing.assert_array_equal(run(jax.random.key(1)), run(jax.random.key(1)))
    assert np.abs(run(jax.random.key(1)) - run(jax.random.key(2))).max() > 0.1


def test_a_row_of_padding_alone_makes_no_nan(params):
    batch = jax.tree.map(lambda field: field.at[1].set(0), padded_batch())
    parts, gradients = losses_and_gradients(params, batch)
    assert np.isfinite(parts).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_encode_at_gives_the_vectors_that_the_heads_read(params):
    batch = padded_batch()

    @jax.jit
    def both_ways(params):
        model = bind(CONFIG, PRETRAINING, params, Runtime())
        positions = jnp.concatenate([batch.masked_positions, batch.cls_positions], axis=1)
        vectors = model.encode_at(batch, positions)
        hidden = model.encode(batch).last
        logits = vocabulary_logits(model, vectors[:, :4]), masked_logits(model, hidden, batch.masked_positions)
        pooled = pool_vectors(model, vectors[:, 4:]), pool_vectors(model, gather_positions(hidden, batch.cls_positions))
        return logits, pooled

    logits, pooled = both_ways(params)
    np.testing.assert_allclose(*logits, atol=1e-4)
    np.testing.assert_allclose(*pooled, atol=1e-5)


def test_rows_longer_than_the_positions_are_refused(params):
    with pytest.raises(UserError, match="rows of 40 positions do not fit a model with max_positions=32"):
        bind(CONFIG, PRETRAINING, params, Runtime()).encode(padded_batch(slots=40))


@pytest.mark.parametrize(
    ("changes", "heads", "message"),
    [
        (
            {"feed_forward": 21},
            PRETRAINING,
            r"feed_forward/input/bias has shape \[2, 20\], but the model expects \[2, 21\]",
        ),
        ({}, EVERY_HEAD, "classifier/dense/bias is missing"),
        ({}, Heads(pooler=True), "mlm_head/bias does not belong to this model"),
    ],
)
def test_parameters_of_another_architecture_are_refused_by_path(params, changes, heads, message):
    with pytest.raises(UserError, match=message):
        bind(dataclasses.replace(CONFIG, **changes), heads, params, Runtime())
