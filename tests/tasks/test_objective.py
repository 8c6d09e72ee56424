"""The fine-tuning loss against a computation by hand, and what must not change it."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bert_jax.config import ModelConfig
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.kinds.classification import ClassificationTask, RegressionTask
from bert_jax.tasks.kinds.tagging import TaggingTask, TagRows
from bert_jax.tasks.rows import LabelledRows, Split, TaskBatch
from bert_jax.train.objectives import means, total_loss

MODEL = ModelConfig(vocab_size=50, layers=2, width=16, heads=2, feed_forward=24, max_positions=32)
TASKS = {
    "classification": ClassificationTask("own", ("a", "b", "c")),
    "regression": RegressionTask("own"),
    "tagging": TaggingTask("own", ("a", "b", "c", "d")),
    "mean_pooled": ClassificationTask("own", ("a", "b", "c"), pooling="mean"),
}
OBJECTIVES = {name: task.objective() for name, task in TASKS.items()}


def batch_of(kind: str, length: int = 12, fillers: int = 0) -> TaskBatch:
    """Three rows of 5, 9 and 7 tokens, then fillers."""
    draw = np.random.default_rng(0)
    lengths = np.array([5, 9, 7])
    size = int(lengths.sum()) if kind == "tagging" else 3
    labels = draw.integers(0, max(len(TASKS[kind].labels), 1), size).astype(np.int32)
    shared: dict[str, Any] = {
        "input_ids": draw.integers(5, 50, lengths.sum()).astype(np.int32),
        "first_lengths": np.array([5, 4, 7], np.int32),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "labels": draw.normal(size=size).astype(np.float32) if kind == "regression" else labels,
        "label_weights": (draw.random(size) < 0.6).astype(np.float32) if kind == "tagging" else np.ones(3, np.float32),
        "pad_id": 0,
        "truncated": 0,
        "split": Split(Path("train.tsv"), (), labelled=True),
    }
    ones = np.ones(3, np.int64)  # one word in each row, whose place does not matter
    tags = {"word_rows": np.arange(3), "word_slots": ones, "word_sizes": ones, "sentence_offsets": np.arange(4)}
    tags["token_words"] = np.zeros(lengths.sum(), np.int32)
    rows = TagRows(**shared, **tags, irregular_tags=0) if kind == "tagging" else LabelledRows(**shared)
    return rows.batch(np.array([0, 1, 2] + [-1] * fillers), length)


@functools.cache
def params_of(kind: str) -> dict:
    """Parameters large enough that predictions differ, sampled by numpy because jax takes longer than the test."""
    draw = np.random.default_rng(1)
    abstract = abstract_params(MODEL, OBJECTIVES[kind].heads)
    return jax.tree.map(lambda leaf: draw.normal(0, 0.2, leaf.shape).astype(np.float32), abstract)


@functools.partial(jax.jit, static_argnums=0)
def compute(kind: str, params: dict, batch: TaskBatch) -> tuple[dict, dict, jax.Array]:
    """Sums, counts and the last hidden states."""
    model = bind(MODEL, OBJECTIVES[kind].heads, params, Runtime())
    objective = OBJECTIVES[kind]
    return objective.apply(model, batch, None), objective.counts(batch), model.encode(batch).last


def sums_of(kind: str, batch: TaskBatch) -> tuple[dict, dict]:
    return compute(kind, params_of(kind), batch)[:2]


def outputs_by_hand(kind: str, batch: TaskBatch) -> np.ndarray:
    params = params_of(kind)
    hidden = np.asarray(compute(kind, params, batch)[2])
    if kind == "tagging":
        return hidden @ np.asarray(params["tagger"]["dense"]["kernel"]) + np.asarray(params["tagger"]["dense"]["bias"])
    pooler, head = params["pooler"]["dense"], params["classifier"]["dense"]
    vectors = hidden[:, 0]
    if kind == "mean_pooled":
        real = batch.sequence_ids[..., None] > 0
        vectors = (hidden * real).sum(axis=1) / real.sum(axis=1)
    pooled = np.tanh(vectors @ np.asarray(pooler["kernel"]) + np.asarray(pooler["bias"]))
    return pooled @ np.asarray(head["kernel"]) + np.asarray(head["bias"])


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_the_sums_equal_a_loop_by_hand(kind):
    batch = batch_of(kind)
    outputs = outputs_by_hand(kind, batch)
    labels = batch.labels.tags if kind == "tagging" else batch.labels
    loss = right = 0.0
    for place in np.ndindex(labels.shape):
        label, weight = labels[place], batch.label_weights[place]
        if kind == "regression":
            loss += float((outputs[place][0] - label) ** 2)
        else:
            probabilities = np.exp(outputs[place]) / np.exp(outputs[place]).sum()
            loss -= weight * np.log(probabilities[label])
            right += weight * (outputs[place].argmax() == label)
    terms, counts = sums_of(kind, batch)
    assert float(terms["task"].loss) == pytest.approx(loss, rel=1e-4)
    assert float(counts["task"]) == batch.label_weights.sum()
    if kind != "regression":
        assert float(terms["task"].metrics["accuracy"]) == right


def test_label_0_counts_like_any_other():
    batch = batch_of("classification")
    batch = batch._replace(labels=np.zeros_like(batch.labels))
    terms, counts = sums_of("classification", batch)
    assert counts["task"] == 3 and terms["task"].loss > 0


@pytest.mark.parametrize("kind", ["classification", pytest.param("regression", marks=pytest.mark.slow), "tagging"])
def test_padding_and_fillers_change_neither_loss_nor_gradient(kind):
    objective = OBJECTIVES[kind]

    def loss(params: dict, batch: TaskBatch) -> jax.Array:
        model = bind(MODEL, objective.heads, params, Runtime(layer_loop="scan"))
        return total_loss(objective.apply(model, batch, None), objective.counts(batch))

    gradient = jax.jit(jax.value_and_grad(loss))
    plain, padded = batch_of(kind), batch_of(kind, length=20, fillers=2)
    for left, right in zip(
        jax.tree.leaves(gradient(params_of(kind), plain)),
        jax.tree.leaves(gradient(params_of(kind), padded)),
        strict=True,
    ):
        np.testing.assert_allclose(left, right, atol=2e-6)


def test_metrics_are_named_after_the_task():
    found = means(*sums_of("tagging", batch_of("tagging")))
    assert set(found) == {"loss", "task_loss", "task_accuracy"}
    assert set(means(*sums_of("regression", batch_of("regression")))) == {"loss", "task_loss"}


def test_dropout_acts_in_training_only():
    objective = OBJECTIVES["classification"]
    model = replace(MODEL, dropout=0.5)

    @jax.jit
    def loss(params: dict, batch: TaskBatch) -> jax.Array:
        bound = bind(model, objective.heads, params, Runtime())
        return objective.apply(bound, batch, jax.random.key(0))["task"].loss

    batch = batch_of("classification")
    without = float(sums_of("classification", batch)[0]["task"].loss)
    assert abs(without - float(loss(params_of("classification"), batch))) > 1e-3
