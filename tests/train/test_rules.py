"""Rules over parameter paths, and parameters that are frozen by them."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from random_checkpoints import random_tree
from test_objective import MODEL, OBJECTIVES, batch_of

from bert_jax.config import AdamW, LinearSchedule, MeshConfig, ModelConfig, OptimizerConfig
from bert_jax.config.model import LoraConfig
from bert_jax.errors import UserError
from bert_jax.model import bert, layers, lora
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.train import optim, rules, sharding
from bert_jax.train import step as step_lib
from bert_jax.train.orbax_io import named_leaves
from bert_jax.train.rules import Trained, Unfreezing


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


def test_rules_keep_their_order(params):
    assert rules.check({}, "optimizer.rates", params) == ()
    numbers = {"^embeddings/": 0.1, "layers/(0|1)/.*bias": 0.0}
    assert rules.check(numbers, "optimizer.rates", params) == tuple(numbers.items())


@pytest.mark.parametrize(
    "numbers",
    [{"": 1.0}, {"embeddings": -1.0}, {"embeddings": math.nan}, {"(": 1.0}, {"embedings": 1.0}, {"layers/2/": 1.0}],
)
def test_what_is_no_rule_or_meets_nothing_is_refused(params, numbers):
    with pytest.raises(UserError, match=r"optimizer\.rates"):
        rules.check(numbers, "optimizer.rates", params)


def test_last_k_frees_the_last_layers_and_the_head(params):
    assert rules.trainable("all", params) is None
    tree = rules.trainable("last:1", params)
    assert jax.tree.structure(tree) == jax.tree.structure(params)
    factors = layers.flatten(tree)
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


def test_initialized_parameters_train_with_the_head(params):
    fresh = frozenset({"pooler/dense/kernel", "encoder/layers/attention/qkv/bias"})
    for words in ("head", "last:1"):
        factors = layers.flatten(rules.trainable(words, params, fresh))
        assert all(np.all(factors[path]) for path in fresh)


@pytest.mark.parametrize(
    ("words", "frozen"), [("head", ("embeddings/", "encoder/", "pooler/")), ("no_embeddings", ("embeddings/",))]
)
def test_whole_modules_are_frozen(params, words, frozen):
    for path, factor in layers.flatten(rules.trainable(words, params)).items():
        assert np.all(factor == (not path.startswith(frozen))), path


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


@pytest.mark.parametrize("shared", ["attention", "feed_forward"])
def test_a_stack_has_the_layers_of_its_parts_that_are_not_shared(tiny_config, shared):
    """What all layers share is stored once, and counts as a part of the first layer, which needs it as it is."""
    config = dataclasses.replace(tiny_config, layers=3, shared_layers=shared)
    params = bert.abstract_params(config, Heads(mlm=True, pooler=True))
    assert rules.stacks(params) == {"encoder/layers/": 3}
    own = "feed_forward" if shared == "attention" else "attention"
    kernels = {part: f"encoder/layers/{part}/output/kernel" for part in (shared, own)}

    factors = layers.flatten(optim.rate_factors(AdamW(layer_decay=0.5), params))
    np.testing.assert_array_equal(factors[kernels[own]].ravel(), [0.125, 0.25, 0.5])
    assert factors[kernels[shared]] == 0.125 and factors["embeddings/token/table"] == 0.0625
    assert factors["pooler/dense/kernel"] == factors["mlm_head/bias"] == 1

    trains = rules.trainable("last:1", params)
    last = layers.flatten(trains)
    np.testing.assert_array_equal(last[kernels[own]].ravel(), [0, 0, 1])
    assert last[kernels[shared]] == last["embeddings/token/table"] == 0 and last["pooler/dense/kernel"] == 1
    assert Trained.by_factors(trains).frozen_layers(params) == 2
    with pytest.raises(UserError, match="the model has 3 layers"):
        rules.trainable("last:4", params)
    stages = layers.flatten(rules.stages(params))
    np.testing.assert_array_equal(stages[kernels[own]].ravel(), [3, 2, 1])
    assert stages[kernels[shared]] == 3 and stages["embeddings/token/table"] == 4


# Frozen parameters have no backward pass and no optimizer state; the others get the values of a masked update.


OBJECTIVE = OBJECTIVES["classification"]
DEEP = dataclasses.replace(MODEL, layers=4, dropout=0.0, attention_dropout=0.0)
CONFIG = AdamW(
    learning_rate=0.01, schedule=LinearSchedule(warmup_steps=0), clip_norm=0.05, epsilon=1e-3, decays={"layers/3/": 0.1}
)
FRACTION, KEY = jnp.float32(0.5), jax.random.key(0)


def of_kind(name: str, **changes: float) -> OptimizerConfig:
    """Another optimizer with the options of CONFIG that it has."""
    kind = OptimizerConfig.kinds[name]
    shared = {item.name for item in dataclasses.fields(kind)} & vars(CONFIG).keys()
    return kind(**{key: getattr(CONFIG, key) for key in shared} | changes)


@functools.cache
def deep_params(model: ModelConfig = DEEP) -> dict[str, Any]:
    return jax.tree.map(jnp.asarray, random_tree(bert.abstract_params(model, OBJECTIVE.heads), 0.2))


def plan_of(words: str, config: OptimizerConfig = CONFIG, model: ModelConfig = DEEP, **changes: Any) -> step_lib.Plan:
    abstract = bert.abstract_params(model, OBJECTIVE.heads)
    adapters = frozenset(filter(lora.is_adapter, layers.flatten(abstract)))
    factors = optim.rate_factors(config, abstract, rules.trainable(words, abstract, adapters))
    trained = Trained.by_factors(factors)
    optimizer = optim.build(config, abstract, trained)
    changes = {"runtime": Runtime(), **changes}
    return step_lib.Plan(
        model,
        objective=OBJECTIVE,
        optimizer_config=config,
        optimizer=optimizer,
        factors=factors,
        trained=trained,
        **changes,
    )


def batch() -> Any:
    return jax.tree.map(jnp.asarray, batch_of("classification"))


def train(plan: step_lib.Plan, number: int = 2) -> step_lib.TrainState:
    step = jax.jit(functools.partial(step_lib.train_step, plan))
    state = step_lib.initial_state(plan, deep_params(plan.model))
    for _ in range(number):
        state, _ = step(state, batch(), FRACTION, KEY)
    return state


def train_masked(factors: dict[str, Any], config: OptimizerConfig = CONFIG, number: int = 2) -> dict[str, Any]:
    """Differentiates everything, zeroes what is frozen and updates the rest; the optimizer's parts are Optax's own."""
    params = deep_params()
    spread = jax.tree.map(lambda factor, leaf: jnp.broadcast_to(factor, leaf.shape), factors, params)
    decays = optim.decays(config, params)
    adam = optax.chain(
        optax.clip_by_global_norm(config.clip_norm), optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    )
    state = adam.init(params)
    rate = optim.learning_rate(config, jnp.int32(0), FRACTION)

    @jax.jit
    def step(params: dict[str, Any], state: Any) -> tuple[dict[str, Any], Any]:
        gradients, _ = step_lib.accumulate(plan_of("all"), params, batch(), OBJECTIVE.counts(batch()), KEY)
        masked = jax.tree.map(lambda gradient, factor: gradient * (factor != 0), gradients, spread)
        directions, state = adam.update(masked, state)
        moved = jax.tree.map(
            lambda value, change, decay, factor: value - rate * factor * (change + decay * value),
            params,
            directions,
            decays,
            spread,
        )
        return moved, state

    for _ in range(number):
        params, state = step(params, state)
    return params


def assert_close(got: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-6) -> None:
    for path, leaf in layers.flatten(wanted).items():
        np.testing.assert_allclose(layers.flatten(got)[path], leaf, atol=tolerance, rtol=0, err_msg=path)


def changed(after: dict[str, Any], before: dict[str, Any]) -> set[str]:
    """The parameters that moved, those of a stack by layer."""
    old, found = layers.flatten(before), set()
    for path, leaf in layers.flatten(after).items():
        if rules.stack_path(path):
            found |= {f"{path}:{n}" for n in range(len(leaf)) if not np.array_equal(leaf[n], old[path][n])}
        elif not np.array_equal(leaf, old[path]):
            found.add(path)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("words", ["last:2", "head", "no_embeddings"])
def test_what_trains_gets_the_values_of_a_masked_update(words):
    plan = plan_of(words)
    state = train(plan)
    assert_close(state.params, train_masked(plan.factors))
    frozen = rules.trainable(words, deep_params())
    for path, factor in layers.flatten(frozen).items():
        same = np.broadcast_to(factor, deep_leaf(path).shape) == 0
        np.testing.assert_array_equal(np.asarray(layers.flatten(state.params)[path])[same], deep_leaf(path)[same])


def deep_leaf(path: str) -> np.ndarray:
    return np.asarray(layers.flatten(deep_params())[path])


@pytest.mark.slow
def test_layers_that_a_rate_of_zero_freezes_may_lie_between_others():
    config = dataclasses.replace(CONFIG, rates={"layers/(0|2)/": 0.0, "^embeddings/token": 0.0})
    plan = plan_of("all", config)
    state = train(plan)
    assert_close(state.params, train_masked(plan.factors, config))
    layers = {name.rpartition(":")[2] for name in changed(state.params, deep_params()) if ":" in name}
    assert layers == {"1", "3"}


def test_the_optimizer_state_holds_only_what_trains():
    sizes = {words: shapes(plan_of(words)) for words in ("head", "last:1", "no_embeddings", "all")}
    assert set(sizes["head"]) == {
        "1/count",
        *(f"1/{moment}/classifier/dense/{name}" for moment in ("mu", "nu") for name in ("bias", "kernel")),
    }
    kernel = "1/mu/encoder/layers/feed_forward/input/kernel"
    assert sizes["all"][kernel] == (4, 16, 24) and sizes["last:1"][kernel] == (1, 16, 24)
    assert not any("embeddings" in name for name in sizes["no_embeddings"])
    trained = sum(np.prod(shape) for name, shape in sizes["last:1"].items() if "/mu/" in name)
    layer = sum(
        np.prod(leaf.shape[1:]) for path, leaf in layers.flatten(deep_params()).items() if rules.stack_path(path)
    )
    heads = sum(leaf.size for path, leaf in layers.flatten(deep_params()).items() if path.startswith(("pool", "class")))
    assert trained == layer + heads


def shapes(plan: step_lib.Plan) -> dict[str, tuple[int, ...]]:
    state = jax.eval_shape(functools.partial(step_lib.initial_state, plan), deep_params())
    return {name: leaf.shape for name, leaf in named_leaves(state.optimizer_state).items()}


def flops(plan: step_lib.Plan) -> float:
    state = jax.eval_shape(functools.partial(step_lib.initial_state, plan), deep_params(plan.model))
    program = jax.jit(functools.partial(step_lib.train_step, plan)).lower(state, wide_batch(), FRACTION, KEY)
    return program.compile().cost_analysis()["flops"]


def wide_batch() -> Any:
    """A batch that is large next to the model, so that the update of the parameters counts little."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((64, *leaf.shape[1:]), leaf.dtype), batch_of("classification")
    )


@pytest.mark.slow
def test_frozen_layers_have_no_backward_pass():
    """A forward pass costs F and a backward pass 2 F, so the head alone costs a third, and last:1 of four layers half.

    The bound of the head is 40%, because the update and the softmax, whose backward pass is cheap, count too.
    """
    full, head, last = (flops(plan_of(words)) for words in ("all", "head", "last:1"))
    assert head <= 0.4 * full
    assert last <= 0.6 * full


def test_a_scan_over_layers_is_not_differentiated_where_they_are_frozen():
    def backward_scans(words: str) -> int:
        plan = plan_of(words, runtime=Runtime(layer_loop="scan"))
        counts = OBJECTIVE.counts(batch())
        program = jax.make_jaxpr(functools.partial(step_lib.accumulate, plan))(deep_params(), batch(), counts, KEY)
        return str(program).count("reverse=True")

    assert [backward_scans(words) for words in ("all", "last:2", "last:1", "head")] == [1, 1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"layer_loop": "scan"}, {"remat": "layer"}])
def test_the_loop_over_layers_does_not_change_what_the_upper_ones_learn(change):
    assert_close(train(plan_of("last:2", runtime=Runtime(**change))).params, train(plan_of("last:2")).params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "muon", "stable_adamw"])
def test_optimizers_of_whole_tensors_update_a_part_as_they_update_all(name):
    """Of one step: a frozen embedding changes no norm of another tensor, without clipping."""
    config = of_kind(name, clip_norm=0.0)
    part, whole = train(plan_of("last:2", config), 1), train(plan_of("all", config), 1)
    for path, leaf in layers.flatten(part.params).items():
        wanted = layers.flatten(whole.params)[path]
        rows = slice(2, None) if rules.stack_path(path) else slice(None)
        if rules.stack_path(path) or not path.startswith("embeddings/"):
            np.testing.assert_allclose(leaf[rows], wanted[rows], atol=2e-6, rtol=0, err_msg=path)


@pytest.mark.slow
def test_the_average_of_a_frozen_parameter_is_the_parameter():
    state = train(plan_of("last:1", dataclasses.replace(CONFIG, ema_decay=0.9)))
    assert changed(state.average, deep_params()) == changed(state.params, deep_params())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "words", "microbatches", "adapters"),
    [
        ((2, 2, 2), "last:2", 1, None),
        ((8, 1, 1), "last:2", 2, None),
        ((2, 4, 1), "last:2", 2, None),
        ((2, 2, 2), "head", 1, LoraConfig(rank=2, targets=".*")),
    ],
)
def test_eight_devices_train_a_part_as_one_does(axes, words, microbatches, adapters):
    model = dataclasses.replace(DEEP, width=32, heads=4, feed_forward=48, lora=adapters)
    runtime = Runtime(placement=sharding.OnMesh(), layer_loop="scan")
    plan = plan_of(words, model=model, runtime=runtime, microbatches=microbatches)
    rows = jax.tree.map(lambda leaf: np.tile(leaf, (16, *[1] * (leaf.ndim - 1)))[:16], batch_of("classification"))
    params, step = deep_params(model), functools.partial(step_lib.train_step, plan)
    alone, _ = jax.jit(step)(step_lib.initial_state(plan, params), jax.tree.map(jnp.asarray, rows), FRACTION, KEY)
    mesh = sharding.make_mesh(MeshConfig(*axes))
    with jax.set_mesh(mesh):
        spread = sharding.put(jax.tree.map(np.asarray, params), mesh)
        state = step_lib.initial_state(plan, spread)
        together, _ = jax.jit(step)(state, sharding.place(rows, 16, mesh), FRACTION, KEY)
    assert_close(jax.device_get(together.params), alone.params, 1e-5)


def unfreezing_plan(every: int = 2, config: OptimizerConfig = CONFIG) -> step_lib.Plan:
    plan, stages = plan_of("all", config), rules.stages(deep_params())
    return dataclasses.replace(plan, unfreezing=Unfreezing.by_stages(plan.part(stages), every))


@pytest.mark.slow
def test_gradual_unfreezing_updates_a_parameter_as_if_the_run_had_begun_with_it():
    """Each parameter moves as in a run whose Adam began when it began to train, clipped by the norm of all that train.

    Checked against Optax's own Adam for each group of parameters; in the last two steps everything trains.
    """
    plan = unfreezing_plan(every=1)
    state = step_lib.initial_state(plan, deep_params())
    params, adam = deep_params(), optax.scale_by_adam(CONFIG.beta1, CONFIG.beta2, CONFIG.epsilon)
    stages, own = rules.stages(deep_params()), [adam.init(deep_params()) for _ in range(6)]
    rate, decays = optim.learning_rate(CONFIG, jnp.int32(0), FRACTION), optim.decays(CONFIG, params)
    gradient = jax.jit(
        lambda params: step_lib.accumulate(plan_of("all"), params, batch(), OBJECTIVE.counts(batch()), KEY)[0]
    )
    step = jax.jit(functools.partial(step_lib.train_step, plan))
    for number in range(7):
        state, _ = step(state, batch(), FRACTION, KEY)
        stage = min(number, 5)
        opened = jax.tree.map(lambda begins, leaf, s=stage: jnp.broadcast_to(begins <= s, leaf.shape), stages, params)
        masked = jax.tree.map(lambda leaf, learns: leaf * learns, gradient(params), opened)
        clipped, _ = optax.clip_by_global_norm(CONFIG.clip_norm).update(masked, optax.EmptyState())
        for group in range(stage + 1):
            directions, own[group] = adam.update(clipped, own[group])
            params = jax.tree.map(
                lambda value, change, decay, begins, g=group: value - rate * (begins == g) * (change + decay * value),
                params,
                directions,
                decays,
                stages,
            )
        assert_close(state.params, params)
    assert shapes(plan) == shapes(plan_of("all"))  # the state of a run that trains everything from the first step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "stable_adamw"])
def test_a_parameter_stays_as_it_is_until_its_stage(name):
    """Weight decay and non-finite gradients included; the state of the optimizer and the average stay zero, too."""
    config = of_kind(name, weight_decay=0.5, ema_decay=0.9)
    plan = unfreezing_plan(every=1, config=config)
    state = step_lib.initial_state(plan, deep_params())
    step = jax.jit(functools.partial(step_lib.train_step, plan))
    stages = {path: np.ravel(stage) for path, stage in layers.flatten(rules.stages(deep_params())).items()}
    for number in range(3):
        state, metrics = step(state, batch(), FRACTION, KEY)
        assert metrics["finite"]
        due = {
            f"{path}:{layer}" if rules.stack_path(path) else path
            for path, stage in stages.items()
            for layer, begins in enumerate(np.broadcast_to(stage, len(deep_leaf(path))))
            if begins <= number
        }
        moved = changed(state.params, deep_params())
        assert moved <= due and changed(state.average, deep_params()) == moved
        assert {name for name in due if "kernel" in name} <= moved
    moments = {name: leaf for name, leaf in named_leaves(state.optimizer_state).items() if "embeddings/" in name}
    assert moments and not any(np.any(leaf) for leaf in moments.values())


def test_a_gradient_that_is_not_finite_counts_only_where_a_parameter_trains():
    plan = unfreezing_plan()
    infinite = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.inf), deep_params())
    opened = layers.flatten(plan.unfreezing.mask(infinite, jnp.int32(3)))
    kernel = opened["encoder/layers/feed_forward/input/kernel"]
    assert np.isinf(kernel[3:]).all() and not kernel[:3].any() and not opened["embeddings/norm/scale"].any()


def test_a_rate_of_zero_freezes_in_gradual_unfreezing_too():
    plan = unfreezing_plan(config=dataclasses.replace(CONFIG, rates={"layers/1/": 0.0}))
    begins = layers.flatten(plan.unfreezing.begins)
    assert begins["encoder/layers/feed_forward/input/kernel"].ravel().tolist() == [8, 4, 2]
    assert begins["embeddings/norm/scale"] == 10 and begins["classifier/dense/kernel"] == 0


def test_parts_are_put_back_where_they_were_taken():
    tree = {"encoder": {"layers": {"a": jnp.arange(12.0).reshape(6, 2)}}, "b": jnp.ones(3), "c": jnp.ones(2)}
    part = Trained({"encoder/layers/a": (0, 2, 3, 5), "b": None})
    taken = part.take(tree)
    np.testing.assert_array_equal(taken["encoder"]["layers"]["a"][:, 0], [0, 4, 6, 10])
    assert "c" not in taken
    for replaced in (part.put, part.join):
        found = replaced(tree, jax.tree.map(lambda leaf: -leaf, taken))
        np.testing.assert_array_equal(found["encoder"]["layers"]["a"][:, 1], [-1, 3, -5, -7, 9, -11])
        np.testing.assert_array_equal(found["b"], -1)
        np.testing.assert_array_equal(found["c"], 1)


def test_layers_are_frozen_only_where_nothing_below_them_trains():
    params = deep_params()
    count = {
        words: Trained.by_factors(rules.trainable(words, params)).frozen_layers(params) for words in ("head", "last:3")
    }
    assert count == {"head": 4, "last:3": 1}
    assert Trained.by_factors(rules.trainable("no_embeddings", params)).frozen_layers(params) == 0
    assert Trained({"embeddings/norm/scale": None}).frozen_layers(params) == 0
    assert Trained({"encoder/final_norm/scale": None, "mlm_head/bias": None}).frozen_layers(params) == 4
