"""Distillation: the terms by hand from two models, on any mesh, and a teacher that nothing trains or saves."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_checkpoints import random_tree
from scipy.special import softmax
from test_objective import OBJECTIVES, batch_of
from tiny_steps import CHANGES, ROWS, packed_rows

from bert_jax.config import AdamW, DistillConfig, LinearSchedule, MeshConfig, ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import bert, layers
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.kinds.choice import ChoiceLabels, ChoiceObjective
from bert_jax.tasks.kinds.classification import MultiLabelObjective
from bert_jax.tasks.kinds.question import QuestionObjective
from bert_jax.tasks.runs import DistilledTask
from bert_jax.train import optim, sharding
from bert_jax.train import step as step_lib
from bert_jax.train.objectives import DistilledMaskedLM, MaskedLMObjective, means
from bert_jax.train.objectives.distilled import Teacher
from bert_jax.train.rules import Trained

STUDENT = ModelConfig(vocab_size=61, **(CHANGES | {"max_positions": 32}))
# The teacher is deeper and wider, and its table has more rows.
TEACHER = dataclasses.replace(STUDENT, layers=4, width=48, feed_forward=64, vocab_size=200)
WORDS = 61
BASE = MaskedLMObjective()
KEY = jax.random.key(3)
HIDDEN = {"teacher": "T", "soft_weight": 0.0, "hidden_weight": 1.0}
SETTINGS = {"teacher": "T", "temperature": 3.0, "soft_weight": 5.0, "hard_weight": 2.0, "hidden_weight": 0.5}


def objective_of(teacher: ModelConfig = TEACHER, **changes: Any) -> DistilledMaskedLM:
    config = DistillConfig(**(SETTINGS | changes))
    pairs = config.pairs(STUDENT.layers, teacher.layers)
    projection = teacher.width if pairs and teacher.width != STUDENT.width else 0
    return DistilledMaskedLM(BASE, Teacher(teacher, Heads(mlm=True)), config, pairs, projection, words=WORDS)


@functools.cache
def random_params(model: ModelConfig, heads: Heads, seed: int) -> dict[str, Any]:
    """Parameters large enough that the models differ, sampled by numpy because jax takes longer."""
    return random_tree(bert.abstract_params(model, heads), 0.2, seed)


def params_of(objective: DistilledMaskedLM) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the student, and the constants."""
    teacher = objective.teacher
    own = random_params(STUDENT, objective.heads, 0)
    return own, {"teacher": random_params(teacher.model, teacher.heads, 1)}


@functools.partial(jax.jit, static_argnums=0)
def measured(objective: DistilledMaskedLM, params: dict[str, Any], batch: Any) -> dict[str, jax.Array]:
    terms = objective.apply(objective.bind(STUDENT, params, Runtime()), batch, None)
    return means(terms, objective.counts(batch), objective.term_weights)


@jax.jit
def measured_alone(params: dict[str, Any], batch: Any) -> dict[str, jax.Array]:
    terms = BASE.apply(BASE.bind(STUDENT, params, Runtime()), batch, None)
    return means(terms, BASE.counts(batch), BASE.term_weights)


@functools.partial(jax.jit, static_argnums=(0, 1))
def states_and_logits(model: ModelConfig, heads: Heads, params: dict[str, Any], batch: Any) -> tuple[Any, Any]:
    """The embeddings and all layers, [L + 1, B, T, D], and the logits of the vocabulary at all positions."""
    bound = bert.bind(model, heads, params, Runtime())
    encoded = bound.encode(batch, all_layers=True)
    return jnp.concatenate([encoded.embeddings[None], encoded.layers]), vocabulary_logits(bound, encoded.last)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = {
    "masked tokens": {"hidden_weight": 0.0},
    "all tokens, cosine": {"positions": "all"},
    "uniform layers, projected": {"layers": "uniform", "hidden_loss": "mse"},
    "some layers": {"layers": {1: 4, 2: 1}, "hidden_loss": "mse", "teacher": dataclasses.replace(TEACHER, width=32)},
    "hidden states alone": {"soft_weight": 0.0, "temperature": 2.0, "layers": {2: 3}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_terms_of_masked_language_modeling_are_those_of_two_models_by_hand(case):
    changes = dict(CASES[case])
    objective = objective_of(changes.pop("teacher", TEACHER), **changes)
    batch, (own, constants) = packed_rows(), params_of(objective)
    found = measured(objective, own | constants, batch)
    ours, logits = states_and_logits(STUDENT, objective.heads, own, batch)
    theirs, targets = states_and_logits(objective.teacher.model, objective.teacher.heads, constants["teacher"], batch)
    real = np.asarray(batch.sequence_ids) > 0
    hard = measured_alone(own_only(own), batch)
    wanted = {name: float(hard[name]) for name in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")}
    wanted["loss"] = 2.0 * (wanted["mlm_loss"] + wanted["nsp_loss"])
    if objective.config.soft_weight:
        where = real
        if objective.config.positions == "masked":
            chosen = np.argwhere(batch.masked_weights > 0)
            places = [(row, batch.masked_positions[row, number]) for row, number in chosen]
        else:
            places = list(map(tuple, np.argwhere(where)))
        total = 0.0
        for place in places:
            p, q = (softmax(np.asarray(each, np.float64)[place][:WORDS] / 3.0, axis=-1) for each in (targets, logits))
            total += 9.0 * (p * np.log(p / q)).sum()
        wanted["soft_loss"] = total / len(places)
        wanted["loss"] += 5.0 * wanted["soft_loss"]
    if objective.pairs:
        total = 0.0
        for own_layer, layer in objective.pairs:
            a, b = np.asarray(ours[own_layer], np.float64)[real], np.asarray(theirs[layer], np.float64)[real]
            if objective.projection:
                dense = own["hidden_projection"]["dense"]
                a = a @ dense["kernel"] + dense["bias"]
            cosine = (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
            mse = objective.config.hidden_loss == "mse"
            total += (((a - b) ** 2).mean(-1) if mse else 1 - cosine).mean()
        wanted["hidden_loss"] = total
        wanted["loss"] += 0.5 * total
    assert set(found) == set(wanted) == set(objective.metric_names)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, err_msg=name)


def own_only(own: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in own.items() if name != "hidden_projection"}


def test_held_out_rows_are_measured_without_the_teacher():
    objective = objective_of()
    own, _ = params_of(objective)
    assert objective.evaluated == BASE
    assert set(objective.evaluated_params(own)) == set(own_only(own)) < set(own)
    abstract = bert.abstract_params(STUDENT, BASE.heads)
    assert jax.tree.map(np.shape, objective.evaluated_params(own)) == jax.tree.map(np.shape, abstract)


def plan_of(objective: Any, model: ModelConfig = STUDENT, **changes: Any) -> step_lib.Plan:
    config = AdamW(learning_rate=0.01, schedule=LinearSchedule(warmup_steps=1, from_start=True))
    abstract = bert.abstract_params(model, objective.heads)
    trained = Trained.everything(abstract)
    chain = optim.build(config, abstract, trained)
    return step_lib.Plan(model, Runtime(), objective, config, chain, trained=trained, **changes)


@pytest.mark.slow
def test_a_step_trains_the_student_and_its_projection_and_keeps_nothing_of_the_teacher():
    objective = objective_of(layers="uniform")
    own, constants = params_of(objective)
    plan = plan_of(objective)
    before = step_lib.initial_state(plan, jax.tree.map(jnp.asarray, own))
    batch = jax.tree.map(jnp.asarray, packed_rows())
    step = jax.jit(step_lib.train_step, static_argnums=0)
    after, metrics = step(plan, before, batch, jnp.float32(0), KEY, constants)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    paths_in_state = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(after)]
    assert not any("teacher" in path for path in paths_in_state)
    assert any("hidden_projection" in path for path in paths_in_state)
    assert metrics["soft_loss"] > 0 and metrics["hidden_loss"] > 0 and metrics["finite"]
    for path, leaf in layers.flatten(after.params).items():
        assert not np.array_equal(leaf, layers.flatten(own)[path]), f"{path} is not trained"


@pytest.mark.slow
def test_the_gradient_is_the_derivative_of_the_loss_in_any_direction():
    """By central differences of the loss, without dropout."""
    student = dataclasses.replace(STUDENT, dropout=0.0, attention_dropout=0.0)
    objective = objective_of(layers="uniform")
    own, constants = params_of(objective)
    batch = jax.tree.map(jnp.asarray, packed_rows())
    plan, counts = plan_of(objective, student), objective.counts(batch)
    gradient, _ = jax.jit(step_lib.accumulate, static_argnums=0)(plan, own, batch, counts, KEY, constants)
    draw = np.random.default_rng(5)
    direction = jax.tree.map(lambda leaf: draw.normal(0, 1, leaf.shape).astype(np.float32), own)

    def loss(amount: float) -> float:
        moved = jax.tree.map(lambda leaf, along: leaf + np.float32(amount) * along, own, direction)
        return float(measured(objective, moved | constants, batch)["loss"])

    slope = sum(float((a * b).sum()) for a, b in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    assert slope == pytest.approx((loss(1e-3) - loss(-1e-3)) / 2e-3, rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "microbatches"),
    [((2, 4, 1), 2), ((2, 2, 2), 1)],
)
def test_eight_devices_give_the_gradients_of_one(shape, microbatches):
    """The teacher is sharded like the student; dropout is on, whose masks have to be those of one device."""
    objective = objective_of(positions="all", layers="uniform")
    own, constants = params_of(objective)
    runtime = Runtime(layer_loop="scan", placement=sharding.OnMesh())
    plan = dataclasses.replace(plan_of(objective), runtime=runtime, microbatches=microbatches)
    accumulate = jax.jit(step_lib.accumulate, static_argnums=0)
    counts = objective.counts(jax.tree.map(jnp.asarray, packed_rows()))
    mesh = sharding.make_mesh(MeshConfig(*shape))
    found = {}
    for devices in (1, 8):
        used = mesh if devices == 8 else sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
        with jax.set_mesh(used):
            spread, teacher = (sharding.put(tree, used) for tree in (own, constants))
            batch = sharding.place(packed_rows(), ROWS, used)
            found[devices] = accumulate(plan, spread, batch, counts, KEY, teacher)
            if devices == 8 and shape[1] > 1:
                kernel = teacher["teacher"]["encoder"]["layers"]["attention"]["qkv"]["kernel"]
                assert "fsdp" in jax.tree.leaves(tuple(kernel.sharding.spec))
    gradients, terms = found[8]
    wanted, terms_wanted = found[1]
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-5), terms, terms_wanted)
    for path, leaf in layers.flatten(gradients).items():
        np.testing.assert_allclose(leaf, layers.flatten(wanted)[path], atol=2e-6, rtol=0, err_msg=path)


def task_batches() -> dict[str, tuple[Any, Any]]:
    """An objective and a batch of each kind of task with soft targets."""
    plain = batch_of("classification")
    found = {name: (OBJECTIVES[name], batch_of(name)) for name in ("classification", "regression", "tagging")}
    places = jax.tree.map(np.asarray, (np.array([1, 2, 3]), np.array([2, 2, 4])))
    answers = dataclasses.make_dataclass("Places", ["first", "last"])(*places)
    jax.tree_util.register_dataclass(type(answers), ["first", "last"], [])
    found["question"] = (QuestionObjective(5), plain._replace(labels=answers))
    many = np.array([[1, 0, 1], [0, 0, 1], [1, 1, 0]], np.int32)
    found["multilabel"] = (MultiLabelObjective(3), plain._replace(labels=many))
    sides = {name: np.concatenate([getattr(plain, name)] * 2, axis=1) for name in plain._fields[:4]}
    sides["input_ids"][:, 12:] = np.where(sides["input_ids"][:, 12:] > 0, 7, 0)
    sides["sequence_ids"][2, 12:] = 0  # a row whose second choice is absent
    present = np.array([[True, True], [True, True], [True, False]])
    found["choice"] = (ChoiceObjective(), plain._replace(**sides, labels=ChoiceLabels(np.array([0, 1, 0]), present)))
    return found


@pytest.mark.parametrize(
    "kind", ["classification", *map(slow, ("regression", "tagging", "question", "multilabel", "choice"))]
)
def test_the_soft_term_of_a_task_is_the_divergence_of_its_outputs(kind):
    base, batch = task_batches()[kind]
    model = dataclasses.replace(STUDENT, vocab_size=50)
    bigger = dataclasses.replace(model, layers=3, width=48)
    config = DistillConfig(**(SETTINGS | {"hidden_loss": "mse"}))
    objective = DistilledTask(base, Teacher(bigger, base.heads), config, config.pairs(2, 3), bigger.width)
    own, theirs = random_params(model, objective.heads, 0), random_params(bigger, base.heads, 1)
    for head in {"classifier", "question_head", "tagger"} & set(own):  # so that the outputs differ clearly
        own, theirs = (tree | {head: jax.tree.map(lambda leaf: 20 * leaf, tree[head])} for tree in (own, theirs))

    @jax.jit
    def run(own: Any, theirs: Any, batch: Any) -> Any:
        pair = objective.bind(model, own | {"teacher": theirs}, Runtime())
        terms = objective.apply(pair, batch, None)
        outputs = [base.outputs(each, batch, None) for each in pair]
        return means(terms, objective.counts(batch), objective.term_weights), outputs

    found, (ours, targets) = run(own, theirs, batch)
    weights, logits, goals = np.asarray(batch.label_weights), *(np.asarray(one, np.float64) for one in (ours, targets))
    count = weights.sum()
    if kind == "regression":
        wanted = (weights * (logits - goals) ** 2).sum() / count
    elif kind == "multilabel":
        p, q = (1 / (1 + np.exp(-one / 3.0)) for one in (goals, logits))
        wanted = 9.0 * (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean(-1).sum() / count
    else:
        if kind == "question":  # a distribution over the positions of the row, for each end
            logits, goals = (one.swapaxes(1, 2) for one in (logits, goals))
            low = np.where(np.asarray(batch.sequence_ids)[:, None] > 0, 0, -1e30)
            logits, goals, weights = logits + low, goals + low, np.stack([weights, weights], -1) / 2
        p, q = softmax(goals / 3.0, axis=-1), softmax(logits / 3.0, axis=-1)
        ratio = np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1))
        wanted = 9.0 * (weights * (p * ratio).sum(-1)).sum() / count
    np.testing.assert_allclose(found["soft_loss"], wanted, rtol=1e-4)
    hard = {name: float(value) for name, value in found.items() if name in base.metric_names}
    total = 2 * hard["task_loss"] + 5 * float(found["soft_loss"]) + 0.5 * float(found["hidden_loss"])
    assert float(found["loss"]) == pytest.approx(total, rel=1e-5)
    assert found["hidden_loss"] > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, "distill.temperature is 0.0"),
        ({"soft_weight": -1.0}, "distill.soft_weight is -1.0"),
        ({"hidden_loss": "kl"}, "unknown distill.hidden_loss 'kl'; choose from cosine, mse"),
        ({"positions": "some"}, "unknown distill.positions 'some'; choose from masked, all"),
        ({"teacher": "T", "soft_weight": 0.0}, "are both 0, so nothing is learned from distill.teacher"),
        ({"teacher": "T", "layers": "no such"}, "layers is no such, which has no effect with distill.hidden_weight=0"),
        (
            {"teacher": "T", "hidden_loss": "mse"},
            "distill.hidden_loss is mse, .* or leave distill.hidden_loss at cosine",
        ),
        (HIDDEN | {"temperature": 3.0}, "distill.temperature is 3.0, which has no effect with distill.soft_weight=0"),
        (HIDDEN | {"positions": "all"}, "distill.positions is all, .* or leave distill.positions at masked"),
    ],
)
def test_values_that_teach_nothing_are_refused(values, message):
    with pytest.raises(UserError, match=message) as caught:
        DistillConfig(**values).check_unused()
    assert "\n" not in str(caught.value)


def test_settings_without_a_teacher_are_refused():
    with pytest.raises(UserError, match=r"distill.temperature is 4.0, but distill.teacher is not set. Name the"):
        DistillConfig(temperature=4.0).check_unused()
    DistillConfig().check_unused()


def test_pairs_of_layers_count_from_1_above_the_embeddings():
    def pairs(layers: str | dict[int, int]) -> Any:
        return DistillConfig(teacher="T", hidden_weight=1.0, layers=layers).pairs(3, 6)

    assert pairs("last") == ((3, 6),)
    assert pairs("uniform") == ((0, 0), (1, 2), (2, 4), (3, 6))
    assert pairs({0: 0, 2: 5}) == ((0, 0), (2, 5))
    assert DistillConfig(teacher="T").pairs(3, 6) == ()
    with pytest.raises(UserError, match="layer 7 of the teacher, which has 6"):
        pairs({3: 7})
    with pytest.raises(UserError, match="use last, uniform, or pairs such as"):
        pairs("first")
    with pytest.raises(UserError, match="no multiple of the student's 4"):
        DistillConfig(teacher="T", hidden_weight=1.0, layers="uniform").pairs(4, 6)
