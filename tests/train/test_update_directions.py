"""Optimizers update stacked and fused arrays as they update each published tensor separately, and they learn."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import golden
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_steps import ROWS, random_batch

from bert_jax.config import AdamW, Lamb, MeshConfig, ModelConfig, Muon, OptimizerConfig, StableAdamW
from bert_jax.model import bert, layers
from bert_jax.model.runtime import Runtime
from bert_jax.train import optim, sharding
from bert_jax.train import step as step_lib
from bert_jax.train import update_directions as directions
from bert_jax.train.objectives import MaskedLMObjective
from bert_jax.train.step import TrainState

LAYERS, WIDTH, HEADS, HEAD, INNER = 2, 8, 2, 3, 10
SHAPES = {
    "embeddings/token/table": (16, WIDTH),
    "encoder/layers/attention/qkv/kernel": (LAYERS, WIDTH, 3, HEADS, HEAD),
    "encoder/layers/attention/qkv/bias": (LAYERS, 3, HEADS, HEAD),
    "encoder/layers/attention/output/kernel": (LAYERS, HEADS, HEAD, WIDTH),
    "encoder/layers/attention_norm/scale": (LAYERS, WIDTH),
    "encoder/layers/feed_forward/input/kernel": (LAYERS, WIDTH, 2, INNER),
    "encoder/layers/feed_forward/output/kernel": (LAYERS, INNER, WIDTH),
    "pooler/dense/kernel": (WIDTH, WIDTH),
}
STEPS = 3


def tensors(path: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The published tensors of an array, with matrices as [in, out], written by hand for the shapes above."""
    if not path.startswith("encoder/layers/"):
        yield path, array
        return
    for layer, of_layer in enumerate(array):
        name = f"{path}/{layer}"
        if path.endswith("qkv/kernel"):
            for part in range(3):
                yield f"{name}/{part}", of_layer[:, part].reshape(WIDTH, HEADS * HEAD)
        elif path.endswith("qkv/bias"):
            for part in range(3):
                yield f"{name}/{part}", of_layer[part].ravel()
        elif path.endswith("attention/output/kernel"):
            yield name, of_layer.reshape(HEADS * HEAD, WIDTH)
        elif path.endswith("feed_forward/input/kernel"):
            for part in range(2):
                yield f"{name}/{part}", of_layer[:, part]
        else:
            yield name, of_layer


def apart(nested: dict) -> dict[str, np.ndarray]:
    return {
        name: tensor
        for path, array in layers.flatten(nested).items()
        for name, tensor in tensors(path, np.asarray(array))
    }


def draw(random: np.random.Generator, scale: float = 1.0) -> dict:
    return layers.unflatten({path: jnp.float32(scale * random.normal(size=shape)) for path, shape in SHAPES.items()})


def descend(config: OptimizerConfig) -> Iterator[tuple[dict, dict, dict]]:
    """Yields parameters before, gradients, and parameters after each of STEPS steps, by published tensor."""
    random = np.random.default_rng(0)
    params = draw(random)
    optimizer = optim.build(config, params)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, gradients):
        direction, state = optimizer.update(gradients, state, params)
        return optim.apply_updates(params, direction, jnp.float32(config.learning_rate), None), state

    for number in range(STEPS):
        gradients = draw(random, scale=1.0 + 4 * number)  # growing, so that StableAdamW clips some updates
        before, (params, state) = apart(params), step(params, state, gradients)
        yield before, apart(gradients), apart(params)


def assert_each(config: OptimizerConfig, reference: Callable[[str], Callable], tolerance: float = 2e-6) -> None:
    """Compares with reference(name): a function from parameter and gradient to the next parameter, called each step."""
    steps: dict[str, Callable] = {}
    for before, gradients, after in descend(config):
        for name in after:
            steps.setdefault(name, reference(name))
            wanted = steps[name](before[name].astype(np.float64), gradients[name].astype(np.float64))
            np.testing.assert_allclose(after[name], wanted, rtol=tolerance, atol=tolerance, err_msg=name)


def decays(name: str) -> bool:
    return "bias" not in name and "norm" not in name


class Adam:
    """Adam's step, where u is the bias-corrected mean of squares (Kingma and Ba 2015, algorithm 1)."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config, self.count, self.mean, self.square = config, 0, 0.0, 0.0

    def __call__(self, gradient: np.ndarray) -> np.ndarray:
        config = self.config
        self.count += 1
        self.mean = config.beta1 * self.mean + (1 - config.beta1) * gradient
        self.square = config.beta2 * self.square + (1 - config.beta2) * gradient**2
        self.u = self.square / (1 - config.beta2**self.count)
        return self.mean / (1 - config.beta1**self.count) / (np.sqrt(self.u) + config.epsilon)


@pytest.mark.slow
def test_lamb_equals_optax_lamb_for_matrices_and_adam_for_biases_and_norms():
    config = Lamb(learning_rate=0.01, weight_decay=0.1, clip_norm=0.0)

    options = {"b1": config.beta1, "b2": config.beta2, "eps": config.epsilon}
    parts = {True: optax.lamb(0.01, weight_decay=0.1, **options), False: optax.adam(0.01, **options)}
    reference, state = None, None
    for before, gradients, after in descend(config):
        if reference is None:
            reference = optax.partition(parts, {name: decays(name) for name in before})
            state, update = reference.init(before), jax.jit(reference.update)
        updates, state = update(gradients, state, before)
        for name, wanted in optax.apply_updates(before, updates).items():
            np.testing.assert_allclose(after[name], wanted, rtol=2e-6, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_lamb_does_not_scale_the_update_of_a_tensor_of_zeros():
    params = {"encoder": {"layers": {"feed_forward": {"output": {"kernel": jnp.zeros((2, 3, 4)).at[0].set(1.0)}}}}}
    config = Lamb(weight_decay=0.0, clip_norm=0.0)
    optimizer = optim.build(config, params)
    direction, _ = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
    kernel = direction["encoder"]["layers"]["feed_forward"]["output"]["kernel"]
    np.testing.assert_allclose(jnp.linalg.norm(kernel[0]), np.sqrt(12), rtol=1e-6)  # the norm of the tensor
    np.testing.assert_allclose(kernel[1], 1.0, rtol=1e-5)  # Adam's update


@pytest.mark.slow
def test_stable_adamw_equals_the_paper_for_each_tensor():
    config = StableAdamW(learning_rate=0.01, weight_decay=0.1, beta2=0.9, clip_norm=0.0)
    clipped = []

    def reference(name):
        adam = Adam(config)

        def step(param, gradient):
            direction = adam(gradient)
            rms = np.sqrt((gradient**2 / np.maximum(adam.u, config.epsilon**2)).mean())
            clipped.append(rms > 1)
            rate = config.learning_rate / max(1.0, rms)
            return param - rate * direction - rate * (config.weight_decay if decays(name) else 0.0) * param

        return step

    assert_each(config, reference)
    assert any(clipped) and not all(clipped)


@pytest.mark.slow
def test_muon_orthogonalizes_each_matrix_and_leaves_the_rest_to_adamw():
    config = Muon(learning_rate=0.01, weight_decay=0.1, clip_norm=0.0)

    def reference(name):
        adam, mean = Adam(config), 0.0

        def step(param, gradient):
            nonlocal mean
            decay = config.weight_decay if decays(name) else 0.0
            if not name.startswith("encoder") or not decays(name):
                return param - config.learning_rate * (adam(gradient) + decay * param)
            mean = 0.95 * mean + 0.05 * gradient
            x = 0.95 * mean + 0.05 * gradient
            x = x.T if len(x) > len(x[0]) else x
            x = x / np.linalg.norm(x)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
            x = x if x.shape == param.shape else x.T
            return param - config.learning_rate * (0.2 * np.sqrt(max(param.shape)) * x + decay * param)

        return step

    assert_each(config, reference, tolerance=1e-5)


@pytest.mark.parametrize("name", ["wide", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tall", "square"))])
def test_muon_equals_torch(name):
    arrays = golden.read_arrays("muon")
    start, after = arrays[f"{name}/start"], arrays[f"{name}/after"]
    config = Muon(
        momentum=float(arrays["settings/momentum"]), weight_decay=float(arrays["settings/decay"]), clip_norm=0.0
    )
    params = layers.unflatten({"encoder/layers/feed_forward/output/kernel": jnp.asarray(start)[None]})
    optimizer = optim.build(config, params)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient, wanted in zip(arrays[f"{name}/gradients"], after, strict=True):
        direction, state = update(jax.tree.map(lambda _, g=gradient: jnp.asarray(g)[None], params), state, params)
        params = optim.apply_updates(params, direction, jnp.float32(arrays["settings/rate"]), None)
        (kernel,) = jax.tree.leaves(params)
        np.testing.assert_allclose(kernel[0], wanted, atol=1e-5, rtol=0, err_msg=golden.REFRESH)


@pytest.mark.slow
def test_orthogonalized_matrices_have_singular_values_near_one():
    matrix = np.random.default_rng(0).normal(size=(2, 12, 30)).astype(np.float32)
    values = np.linalg.svd(np.asarray(directions.orthogonalize(jnp.asarray(matrix))), compute_uv=False)
    assert values.min() > 0.68 and values.max() < 1.16
    np.testing.assert_array_equal(directions.orthogonalize(jnp.zeros((3, 4))), 0)


def test_devices_divide_the_matrices_of_muon():
    """8 matrices of 6 x 8 and 6 of 8 x 10: each of 8 devices has one of them, or none, and all gather the results."""
    params = draw(np.random.default_rng(0))
    optimizer = optim.build(Muon(), params)
    state = optimizer.init(params)
    mesh = sharding.make_mesh(MeshConfig())
    assert mesh.size == 8

    def update(arguments, **shardings):
        jitted = jax.jit(optimizer.update, **shardings)
        text = jitted.lower(*arguments).compile().as_text()
        return jitted(*arguments)[0], re.findall(r"= f32\[([\d,]+)\]\S* (dot|all-gather)\(", text)

    alone, products = update((params, state, params))
    with jax.set_mesh(mesh):
        whole = sharding.replicated(mesh)
        together, divided = update(jax.device_put((params, state, params), whole), out_shardings=whole)
    for path, leaf in layers.flatten(together).items():
        np.testing.assert_allclose(leaf, layers.flatten(alone)[path], rtol=1e-5, atol=1e-6)
    assert {shape for shape, _ in products} == {"8,6,6", "8,6,8", "6,8,8", "6,8,10"}
    assert {shape for shape, name in divided if name == "dot"} == {"6,6", "6,8", "8,8", "8,10"}
    assert sorted(shape for shape, name in divided if name == "all-gather") == ["8,6,8", "8,8,10"]


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "stable_adamw"])
def test_the_path_of_every_moment_ends_as_that_of_its_parameter(name):
    """The path of a moment ends with that of its parameter, which determines its sharding (partitioning.shardings)."""
    params = draw(np.random.default_rng(0))
    state = optim.build(OptimizerConfig.kinds[name](), params).init(params)
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        assert leaf.ndim == 0 or any(path.endswith("/" + param) and leaf.shape == SHAPES[param] for param in SHAPES)


# An optimizer learns, and its step is equal with scanned and unrolled layers, on one device and on a mesh.

OBJECTIVE = MaskedLMObjective()
OPTIMIZERS = {
    "adamw": AdamW(learning_rate=0.01, layer_decay=0.8),
    "lamb": Lamb(learning_rate=0.05),
    "muon": Muon(learning_rate=0.02),
    "stable_adamw": StableAdamW(learning_rate=0.01, clip_norm=0.0),
}


class Made(NamedTuple):
    model: ModelConfig
    params: dict
    alone: Callable  # parameters to gradients and the loss: unrolled, one device
    spread: Callable  # scanned, for a mesh


def make_plan(model: ModelConfig, config: OptimizerConfig, layer_loop: str) -> step_lib.Plan:
    abstract = bert.abstract_params(model, OBJECTIVE.heads)
    factors = optim.rate_factors(config, abstract)
    runtime = Runtime(layer_loop=layer_loop)
    return step_lib.Plan(model, runtime, OBJECTIVE, config, optim.build(config, abstract), factors=factors)


@pytest.fixture(scope="module")
def made(tiny_config):
    """One gradient program for each layer loop, shared by the optimizers."""
    model = dataclasses.replace(tiny_config, dropout=0.0, attention_dropout=0.0)

    def gradients(layer_loop):
        plan = make_plan(model, AdamW(), layer_loop)

        @jax.jit
        def run(params, batch):
            counts = OBJECTIVE.counts(batch)
            found, terms = step_lib.accumulate(plan, params, batch, counts, jax.random.key(0))
            return found, terms["mlm"].loss / counts["mlm"]

        return run

    params = bert.init_params(model, OBJECTIVE.heads, jax.random.key(1))
    return Made(model, params, gradients("unrolled"), gradients("scan"))


def jitted_descend(plan: step_lib.Plan) -> Callable[[TrainState, dict], TrainState]:
    rate = jnp.float32(plan.optimizer_config.learning_rate)
    return jax.jit(lambda state, gradients: step_lib.descend(plan, state, gradients, rate))


def assert_near(got: dict, wanted: dict, tolerance: float) -> None:
    wanted_flat = layers.flatten(wanted)
    for path, leaf in layers.flatten(got).items():
        np.testing.assert_allclose(leaf, wanted_flat[path], atol=tolerance, rtol=0, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_learns_and_its_step_is_equal_for_any_layer_loop_and_mesh(name, made):
    # A large epsilon makes Adam's step smooth; with a small one, gradients of rounding noise would count by their sign.
    config = dataclasses.replace(OPTIMIZERS[name], epsilon=1e-3, ema_decay=0.9)
    plan, batch = make_plan(made.model, config, "unrolled"), random_batch(made.model.vocab_size)
    step, state, losses = jitted_descend(plan), step_lib.initial_state(plan, made.params), []
    for number in range(25):
        gradients, loss = made.alone(state.params, batch)
        state = step(state, gradients)
        losses.append(float(loss))
        if number == 0:
            first = state
    assert losses[-1] < losses[0] - 1, losses
    assert made.alone(state.average, batch)[1] < losses[0] - 1  # the moving average has learned, too

    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        state = step_lib.initial_state(plan, made.params)
        state = jax.device_put(state, sharding.shardings(mesh, state))
        gradients, _ = made.spread(state.params, sharding.place(batch, ROWS, mesh))
        spread = step(state, gradients)
    cut = [leaf for leaf in jax.tree.leaves(spread.optimizer_state) if not leaf.sharding.is_fully_replicated]
    assert cut, "no moment is sharded"
    assert_near(spread.params, first.params, 2e-4 * config.learning_rate)
    assert_near(spread.average, first.average, 2e-4 * config.learning_rate)
