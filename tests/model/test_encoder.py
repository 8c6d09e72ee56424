"""The stack of layers: their order, groups and positions, and layers that a run takes from a checkpoint."""

import dataclasses
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES
from flax import nnx
from random_checkpoints import odd_config, random_checkpoint
from tiny_batches import lay, random_sequence

from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.interop import export
from bert_jax.interop.initial import open_initial, with_layers
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.embeddings import BUCKETS
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import Encoder, LayerGroups, gather_positions, repeating_groups

# Three layers: a first, a middle and a last one.
CONFIG = ModelConfig(vocab_size=10, layers=3, width=12, heads=3, feed_forward=20, initializer_range=0.3)
BUCKETED = dataclasses.replace(CONFIG, layers=2, relative="buckets", relative_distance=4)
SEQUENCES = jnp.asarray([[1, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]], jnp.int32)
HIDDEN = jax.random.normal(jax.random.key(1), (2, 7, 12))
POSITIONS = jnp.asarray([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]], jnp.int32)
SLOTS = jnp.asarray([[1, 1, 4], [6, 0, 2]], jnp.int32)


def encoder(layer_loop: str, config: ModelConfig = CONFIG) -> Encoder:
    return Encoder(config, runtime=Runtime(layer_loop=layer_loop), key=jax.random.key(0))


@pytest.mark.parametrize("dropout_key", [None, jax.random.key(5)], ids=["evaluation", "dropout"])
def test_scan_equals_unrolled(dropout_key):
    results = []
    for layer_loop in ("scan", "unrolled"):
        module = encoder(layer_loop)

        def loss(hidden, module=module):
            last, _, layers, _ = module(hidden, SEQUENCES, POSITIONS, dropout_key, all_layers=True)
            return jnp.square(last).sum() + jnp.sin(layers).sum(), (last, layers)

        gradient, outputs = jax.jit(jax.grad(loss, has_aux=True))(HIDDEN)
        results.append([gradient, *outputs])
    for scanned, unrolled in zip(*results, strict=True):
        np.testing.assert_allclose(scanned, unrolled, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "dtype"), [("scan", "float32"), ("unrolled", "bfloat16")])
@pytest.mark.parametrize("changes", [{}, {"gated": True, "bias": False, "norm": "pre", "positions": "rotary"}])
def test_what_is_written_otherwise_for_tpus_is_the_same(changes, loop, dtype):
    """Values and gradients of the last layer everywhere, and in bfloat16 of its output at some positions."""
    config, slots = dataclasses.replace(CONFIG, **changes), jnp.array([[0, 3], [5, 1]])
    results = []
    for platform in ("cpu", "tpu"):
        runtime = Runtime(layer_loop=loop, attention="einsum", compute_dtype=dtype, platform=platform)
        graph, params = nnx.split(Encoder(config, runtime=runtime, key=jax.random.key(0)))

        def loss(params, hidden, graph=graph):
            given = nnx.merge(graph, params), (hidden, SEQUENCES, POSITIONS), jax.random.key(5)
            return jnp.square(_last(*given, None if dtype == "float32" else slots).astype(jnp.float32)).sum()

        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, HIDDEN.astype(dtype))
        results.append([np.asarray(leaf, np.float32) for leaf in (value, *jax.tree.leaves(gradients))])
    for here, there in zip(*results, strict=True):
        if dtype == "float32":
            np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5)
        else:  # a few roundings of bfloat16 (2^-9) apart, of the whole array
            assert np.linalg.norm(here - there) <= 2**-5 * np.linalg.norm(here) + 1e-3


def _last(encoder, given, key, slots):
    return encoder(*given, key).last if slots is None else encoder.at_positions(*given, slots, key)


def test_every_layer_is_given_in_order_when_asked():
    module = encoder("scan")
    last, _, layers, _ = jax.jit(lambda hidden: module(hidden, SEQUENCES, POSITIONS, None, all_layers=True))(HIDDEN)
    assert layers.shape == (3, 2, 7, 12)
    np.testing.assert_array_equal(layers[-1], last)
    assert float(jnp.abs(layers[0] - layers[1]).max()) > 0.1


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("layer_loop", ["scan", "unrolled"])
def test_the_last_layer_at_some_positions_equals_the_whole_layer(layers, layer_loop):
    module = encoder(layer_loop, dataclasses.replace(CONFIG, layers=layers))

    def whole(hidden):
        return gather_positions(module(hidden, SEQUENCES, POSITIONS, None).last, SLOTS)

    def some(hidden):
        return module.at_positions(hidden, SEQUENCES, POSITIONS, SLOTS, None)

    def both_ways(hidden):
        outputs, pulls = zip(*(jax.vjp(get, hidden) for get in (some, whole)), strict=True)
        return outputs, [pull(jnp.cos(outputs[1])) for pull in pulls]

    for got, wanted in jax.jit(both_ways)(HIDDEN):
        np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buckets_at_all_positions_equal_the_whole_layer(dtype):
    """In values, and in the gradients of parameters and embeddings."""
    runtime, slots = Runtime(compute_dtype=dtype), jnp.tile(jnp.arange(7)[::-1], (2, 1))
    graph, params = nnx.split(Encoder(BUCKETED, runtime=runtime, key=jax.random.key(0)))

    def loss(params, hidden, slots):
        last = _last(nnx.merge(graph, params), (hidden, SEQUENCES, POSITIONS), None, slots).astype(jnp.float32)
        return jnp.sin(last).sum(), last if slots is None else last[:, ::-1]

    @jax.jit
    def both_ways(*given):
        return [jax.grad(loss, (0, 1), has_aux=True)(*given, chosen) for chosen in (slots, None)]

    some, whole = map(jax.tree.leaves, both_ways(params, HIDDEN.astype(dtype)))
    for got, wanted in zip(some, whole, strict=True):
        got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
        if dtype == "float32":
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        else:  # a few roundings of bfloat16 (2^-9) apart, of the whole array
            assert np.linalg.norm(got - wanted) <= 2**-5 * np.linalg.norm(wanted) + 1e-3


def test_buckets_at_some_positions_have_no_array_of_all_buckets_for_each_row():
    rows, some, length = 16, 16, 64
    module = encoder("unrolled", dataclasses.replace(BUCKETED, layers=1))
    ids = jnp.ones((rows, length), jnp.int32)

    def last(hidden):
        return module.at_positions(hidden, ids, ids, ids[:, :some], None)

    program = jax.jit(last).lower(jnp.zeros((rows, length, 12))).compile()
    one_hot = 4 * rows * some * length * BUCKETS
    assert program.memory_analysis().temp_size_in_bytes < one_hot


def test_layers_differ_in_their_dropout():
    # Layers that are copies of each other and blind to their input give the same output but for their masks.
    module = encoder("unrolled", dataclasses.replace(CONFIG, layers=2, dropout=0.5, attention_dropout=0.0))
    module.layers.feed_forward_norm.scale[...] = jnp.ones((2, 12))
    for part in (module.layers.attention.qkv, module.layers.attention.output, module.layers.feed_forward.input):
        part.kernel[...] = jnp.zeros_like(part.kernel[...])
    module.layers.feed_forward.output.kernel[...] = jnp.zeros((2, 20, 12))
    module.layers.feed_forward.output.bias[...] = jnp.tile(1000.0 * jnp.arange(12.0), (2, 1))
    layers = jax.jit(lambda key: module(HIDDEN, SEQUENCES, POSITIONS, key, all_layers=True).layers)(jax.random.key(2))
    assert float(jnp.abs(layers[0] - layers[1]).max()) > 0.1


def test_positions_are_gathered_exactly_in_both_dtypes():
    for dtype in (jnp.float32, jnp.bfloat16):
        hidden = HIDDEN.astype(dtype)
        wanted = np.take_along_axis(np.asarray(hidden), np.asarray(SLOTS)[..., None], axis=1)
        np.testing.assert_array_equal(gather_positions(hidden, SLOTS), wanted)


MODERN = dataclasses.replace(FAMILIES["modernbert"], layers=8, global_every=3)


def test_the_groups_of_published_stacks():
    base = ["first", *(("local", "global")[layer % 3 == 0] for layer in range(1, 22))]
    assert repeating_groups(base) == LayerGroups(1, 3, 7, 0)
    assert repeating_groups(["same"] * 24) == LayerGroups(0, 1, 24, 0)
    assert repeating_groups([]) == LayerGroups(0, 0, 0, 0)
    assert repeating_groups(["a", "b"]) == LayerGroups(2, 0, 0, 0)


def test_groups_give_the_stack_back_and_no_division_traces_fewer_layers():
    draw = random.Random(0)
    for _ in range(300):
        types = [draw.choice("ab") for _ in range(draw.randint(0, 11))]
        found = repeating_groups(types)
        group = types[found.before :][: found.period]
        assert types[: found.before] + group * found.repeats + types[len(types) - found.after :] == types
        possible = [len(types)]
        for before, period, repeats in itertools.product(range(12), range(1, 12), range(2, 12)):
            group = types[before : before + period]
            if types[before : before + period * repeats] == group * repeats and len(group) == period:
                possible.append(len(types) - period * (repeats - 1))
        assert found.traced == min(possible), types


def packed_batch() -> Any:
    rows = [[random_sequence(length, 61, length) for length in lengths] for lengths in ((9, 13), (17,))]
    return jax.tree.map(jnp.asarray, lay(rows, 24, 5))


def noisy_params(config: ModelConfig) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(0, 0.3, leaf.shape), jnp.float32), abstract_params(config, Heads())
    )


def stack_loss(params: Any, runtime: Runtime, key: Any = None, config: ModelConfig = MODERN) -> tuple[jax.Array, Any]:
    encoded = bind(config, Heads(), params, runtime).encode(packed_batch(), key, all_layers=True)
    return (encoded.last.astype(jnp.float32) ** 2).sum(), encoded.layers


@pytest.mark.slow
def test_a_scan_over_groups_equals_unrolled_layers_with_the_same_dropout():
    config = dataclasses.replace(MODERN, dropout=0.1, attention_dropout=0.1)
    params, key = noisy_params(config), jax.random.key(3)
    found = [
        jax.jit(jax.value_and_grad(lambda p, r=runtime: stack_loss(p, r, key, config), has_aux=True))(params)
        for runtime in (Runtime(layer_loop="unrolled"), Runtime(layer_loop="scan"))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


@pytest.mark.slow
def test_layers_that_differ_are_scanned_without_branches_and_keep_no_more_than_unrolled_ones():
    params = noisy_params(MODERN)
    kept = {}
    for loop in ("unrolled", "scan"):
        runtime = Runtime(layer_loop=loop)
        program = str(jax.make_jaxpr(jax.grad(lambda p, r=runtime: stack_loss(p, r)[0]))(params))
        assert "cond[" not in program and ("scan[" in program) == (loop == "scan")
        residuals = jax.eval_shape(lambda p, r=runtime: jax.vjp(lambda p: stack_loss(p, r)[0], p)[1], params)
        kept[loop] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(residuals))
    assert kept["scan"] <= 1.05 * kept["unrolled"]


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
