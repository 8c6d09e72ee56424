"""Small batches and plans, and a step of them on a mesh of any shape."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from families import FAMILIES
from tiny_batches import lay, random_sequence

from bert_jax.config import AdamW, LinearSchedule, MeshConfig, ModelConfig, OptimizerConfig
from bert_jax.data.example import Batch
from bert_jax.data.schedules import StepSchedule
from bert_jax.lineage import BidirectionalLMObjective, FeedForward
from bert_jax.model import bert, layers
from bert_jax.model.runtime import Runtime
from bert_jax.train import optim, sharding
from bert_jax.train import step as step_lib
from bert_jax.train.objectives import (
    CausalLMObjective,
    DiffusionObjective,
    MaskedLMObjective,
    PhasedObjective,
    ReplacedTokensObjective,
)

CONFIG = AdamW(learning_rate=0.01, schedule=LinearSchedule(warmup_steps=1, from_start=True))
ROWS, LENGTH, PREDICTIONS = 16, 24, 4
ONE = (1, 1, 1)
# Sizes that every mesh divides; dropout on, whose masks have to be those of one device.
CHANGES: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "feed_forward": 48}
CHANGES |= {"dropout": 0.1, "attention_dropout": 0.1}
MESHES = {"8x1x1": (8, 1, 1), "2x4x1": (2, 4, 1), "1x8x1": (1, 8, 1), "2x2x2": (2, 2, 2), "2x1x4": (2, 1, 4)}
DEFAULT, ZERO_1 = MeshConfig(), MeshConfig(shard_optimizer=True)


def random_batch(vocab_size: int, seed: int = 0) -> Batch:
    """Rows of many lengths, with 0 to M predictions and some without a next-sentence label."""
    random = np.random.default_rng(seed)
    lengths = random.integers(8, LENGTH + 1, size=(ROWS, 1))
    slots = np.arange(LENGTH)[None]
    real = slots < lengths
    weights = np.arange(PREDICTIONS) < random.integers(0, PREDICTIONS + 1, size=(ROWS, 1))
    return Batch(
        input_ids=np.where(real, random.integers(5, vocab_size, size=(ROWS, LENGTH)), 0).astype(np.int32),
        segment_ids=(real & (slots >= lengths // 2)).astype(np.int32),
        sequence_ids=real.astype(np.int32),
        positions=np.where(real, slots, 0).astype(np.int32),
        masked_positions=random.integers(1, 7, size=(ROWS, PREDICTIONS)).astype(np.int32),
        masked_ids=random.integers(0, vocab_size, size=(ROWS, PREDICTIONS)).astype(np.int32),
        masked_weights=weights.astype(np.float32),
        cls_positions=np.zeros((ROWS, 1), np.int32),
        next_sentence_label=random.integers(0, 2, size=(ROWS, 1)).astype(np.int32),
        next_sentence_weight=random.integers(0, 2, size=(ROWS, 1)).astype(np.float32),
    )


@functools.cache  # equal plans are one, so that tests share what is traced and compiled for it
def plain_plan(model: ModelConfig) -> step_lib.Plan:
    objective = MaskedLMObjective()
    abstract = bert.abstract_params(model, objective.heads)
    return step_lib.Plan(model, Runtime(), objective, CONFIG, optim.build(CONFIG, abstract))


def make_plan(model: ModelConfig, **changes: object) -> step_lib.Plan:
    return dataclasses.replace(plain_plan(model), **changes) if changes else plain_plan(model)


def assert_close(got, wanted, tolerance):
    wanted_flat = layers.flatten(wanted)
    for path, leaf in layers.flatten(got).items():
        np.testing.assert_allclose(leaf, wanted_flat[path], atol=tolerance, rtol=0, err_msg=path)


@functools.cache
def packed_rows():
    """Rows of two packed sequences and of one with padding."""
    rows = []
    for number in range(ROWS):
        lengths = (9, 13) if number % 2 else (17,)
        rows.append([random_sequence(length, 61, seed=10 * number + length) for length in lengths])
    return lay(rows, LENGTH, 5)


def plan_of(
    family: str,
    *,
    loop: str = "scan",
    microbatches: int = 1,
    mesh_config: MeshConfig = DEFAULT,
    optimizer: type[OptimizerConfig] = AdamW,
    ema_decay: float = 0.0,
) -> step_lib.Plan:
    base = {"electra": "bert", "diffusion": "bert", "causal phase": "bert", "feed_forward": "rnn"}.get(family, family)
    model = dataclasses.replace(FAMILIES[base], **CHANGES)
    if family == "feed_forward":
        model = dataclasses.replace(model, encoder=FeedForward(window=3), layers=1)
    if family == "bilstm":
        model = dataclasses.replace(model, encoder=dataclasses.replace(model.encoder, cell_width=24))
    if family in ("albert", "bilstm", "electra", "lstm"):
        model = dataclasses.replace(model, embedding_width=8)
    objective = CausalLMObjective() if model.causal else MaskedLMObjective()
    if family == "bilstm":
        objective = BidirectionalLMObjective()
    if family == "electra":
        objective = ReplacedTokensObjective(generator=16)
    if family == "diffusion":
        objective = DiffusionObjective(special_ids=(0, 1, 2, 3, 4), mask_id=4)
    if family == "causal phase":
        objective = PhasedObjective(StepSchedule((0, 9), ("causal", "mlm")))
    config = optimizer(
        learning_rate=0.01, schedule=LinearSchedule(warmup_steps=1, from_start=True), ema_decay=ema_decay
    )
    runtime = Runtime(layer_loop=loop, placement=sharding.OnMesh())
    chain = optim.build(config, bert.abstract_params(model, objective.heads))
    return step_lib.Plan(model, runtime, objective, config, chain, microbatches, mesh_config=mesh_config)


def step_on(shape: tuple[int, ...], plan: step_lib.Plan) -> tuple[Any, dict[str, Any], Any]:
    """The state and the metrics after a step on a number of devices, and the program."""
    mesh = sharding.make_mesh(MeshConfig(*shape), jax.devices()[: int(np.prod(shape))])
    sharding.check_model(plan.model, mesh)
    first = first_state(plan)
    with jax.set_mesh(mesh):
        shardings = sharding.shardings(mesh, first, shard_optimizer=plan.mesh_config.shard_optimizer)
        state = jax.tree.map(jax.device_put, first, shardings)
        batch = sharding.place(plan.objective.batch_at(0, packed_rows()), ROWS, mesh)
        arguments = (batch, jnp.float32(0), jax.device_put(jax.random.key(0), sharding.replicated(mesh)))
        program = step_lib.jitted(plan, mesh, state).lower(state, *arguments).compile()
        state, metrics = program(state, *arguments)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    return state, jax.device_get(metrics), program


def first_state(plan: step_lib.Plan) -> Any:
    """The initial state, sampled by numpy because programs that sample take long to compile."""
    generator = np.random.default_rng(1)
    params = {}
    for path, leaf in layers.flatten(bert.abstract_params(plan.model, plan.objective.heads)).items():
        drawn = generator.normal(float(path.endswith("scale")), 0.02, leaf.shape)
        params[path] = drawn.astype(leaf.dtype)
    return jax.device_get(step_lib.initial_state(plan, layers.unflatten(params)))
