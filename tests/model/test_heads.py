"""Which heads a model may have, their parameters by path, and the shapes and dtypes of their logits."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax import config as config_lib
from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params, bind, init_params
from bert_jax.model.heads.config import Heads, SpanHeads
from bert_jax.model.heads.structured import take_spans
from bert_jax.model.outputs import (
    answer_logits,
    choice_logits,
    relation_logits,
    sequence_vectors,
    span_boundary_product,
    span_logits,
    span_vectors,
    tag_logits,
)
from bert_jax.model.runtime import Runtime

CONFIG = ModelConfig(vocab_size=61, layers=1, width=12, heads=3, feed_forward=20, max_positions=32, dropout=0.2)
OTHERS = Heads(
    mlm=True,
    span_boundary=True,
    pooling="attention_additive",
    choices=True,
    tags=5,
    crf=True,
    question=True,
    spans=SpanHeads(4, "networks", "attention", classes=3, relations=6),
)


def test_paths_and_shapes_of_the_heads() -> None:
    found = {path: leaf.shape for path, leaf in layers.flatten(abstract_params(CONFIG, OTHERS)).items()}
    without = layers.flatten(abstract_params(CONFIG, Heads(mlm=True)))
    dense = {
        "span_boundary_head/first": (2 * 12 + 200, 12),
        "span_boundary_head/second": (12, 12),
        "pooling/dense": (12, 12),
        "classifier/dense": (12, 1),
        "tagger/dense": (12, 5),
        "question_head/dense": (12, 2),
        "spans/start": (12, 12),
        "spans/end": (12, 12),
        "spans/attention/hidden": (12, 12),
        "spans/attention/output": (12, 1),
        "span_classifier/hidden": (36, 12),
        "span_classifier/output": (12, 3),
        "span_relations/hidden": (108, 12),
        "span_relations/output": (12, 6),
    }
    wanted = {f"{path}/kernel": shape for path, shape in dense.items()}
    wanted |= {f"{path}/bias": shape[1:] for path, shape in dense.items()}
    wanted |= {
        f"span_boundary_head/{norm}/{name}": (12,)
        for norm in ("first_norm", "second_norm")
        for name in ("scale", "bias")
    }
    wanted |= {"span_boundary_head/position/table": (20, 200), "span_boundary_head/bias": (128,)}
    wanted |= {"pooling/query": (12,), "crf/transitions": (5, 5), "crf/start": (5,), "crf/end": (5,)}
    assert {path: shape for path, shape in found.items() if path not in without} == wanted


def test_heads_without_biases_keep_those_of_their_logits() -> None:
    flat = layers.flatten(abstract_params(dataclasses.replace(CONFIG, bias=False), OTHERS))
    biases = {path for path in flat if path.endswith("/bias")}
    outputs = ("classifier/dense", "tagger/dense", "question_head/dense", "mlm_head", "span_boundary_head")
    networks = ("spans/attention/output", "span_classifier/output", "span_relations/output")
    assert biases == {f"{path}/bias" for path in outputs + networks}


def test_logits_are_float32_and_drop_out_by_the_key() -> None:
    hidden = jax.random.normal(jax.random.key(1), (2, 7, 12)).astype(jnp.bfloat16)
    sequence_ids, firsts = jnp.ones((2, 7), jnp.int32), jnp.zeros((2, 1), jnp.int32)
    spans = jnp.array([[0, 3], [2, 4]]), jnp.array([[1, 4], [2, 3]])

    @jax.jit
    def logits(params: dict, key: jax.Array | None) -> dict[str, jax.Array]:
        model = bind(CONFIG, OTHERS, params, Runtime(compute_dtype="bfloat16"))
        vectors = span_vectors(model, hidden)
        return {
            "choices": choice_logits(model, sequence_vectors(model, hidden, sequence_ids, firsts), key),
            "tags": tag_logits(model, hidden, key),
            "spans": span_logits(model, vectors, key),
            "relations": relation_logits(model, take_spans(vectors, *spans), key),
            "answers": answer_logits(model, hidden),
            "span_boundary": span_boundary_product(
                model, hidden[:, :2], hidden[:, 2:4], jnp.array([[1, 2], [0, 33]])
            ).logits(),
        }

    draw = np.random.default_rng(0)  # initialising by jax takes longer than the rest
    abstract = abstract_params(CONFIG, OTHERS)
    params = jax.tree.map(lambda leaf: draw.normal(0, 0.2, leaf.shape).astype(np.float32), abstract)
    plain, dropped = logits(params, None), logits(params, jax.random.key(2))
    shapes = {
        "choices": (2, 1),
        "tags": (2, 7, 5),
        "spans": (2, 7, 4, 3),
        "relations": (2, 2, 2, 6),
        "answers": (2, 7, 2),
        "span_boundary": (2, 2, 128),
    }
    assert {name: value.shape for name, value in plain.items()} == shapes
    assert {value.dtype for value in plain.values()} == {jnp.dtype("float32")}
    for name in ("choices", "tags", "spans", "relations"):
        assert jnp.abs(plain[name] - dropped[name]).max() > 0, name


def test_the_transform_of_modernbert_stands_before_the_heads_that_read_tokens() -> None:
    modern = dataclasses.replace(CONFIG, pooler="transform")
    for heads in (Heads(tags=3), Heads(question=True)):
        assert "pooler/norm/scale" in layers.flatten(abstract_params(modern, heads))
        assert "pooler/dense/kernel" not in layers.flatten(abstract_params(CONFIG, heads))


def test_heads_are_json_and_back() -> None:
    for heads in (OTHERS, Heads(named=("a", "b"))):
        assert config_lib.load(Heads, json.loads(json.dumps(heads.to_json()))) == heads
    assert config_lib.load(Heads, {"mlm": True}) == Heads(mlm=True)
    assert "named" not in OTHERS.to_json()  # so that files without such heads stay as they were


def test_an_unknown_head_is_refused() -> None:
    with pytest.raises(UserError, match="unknown head 'mine'; choose from pooler, "):
        abstract_params(CONFIG, Heads(named=("mine",)))
    model = bind(CONFIG, Heads(tags=3), init_params(CONFIG, Heads(tags=3), jax.random.key(0)), Runtime())
    with pytest.raises(UserError, match="the model has no head mlm_head; its heads are: tagger"):
        model.head("mlm_head")


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Heads, {"classes": 2}, "pooler=True"),
        (Heads, {"choices": True}, "pooler=True"),
        (Heads, {"next_sentence": True, "pooling": "mean"}, "pooler=True"),
        (Heads, {"pooling": "median"}, "unknown heads.pooling 'median'; choose from cls, mean, max"),
        (Heads, {"classes": 2, "choices": True, "pooler": True}, "one classifier"),
        (Heads, {"mlm": True, "lm": True}, "either causal or bidirectional"),
        (Heads, {"span_boundary": True}, "heads.mlm=True"),
        (Heads, {"crf": True, "tags": 1}, "two or more tags, got heads.tags=1"),
        (SpanHeads, {"classes": 2}, "heads.spans.length is 0"),
        (SpanHeads, {"length": 3, "content": "sum"}, "unknown heads.spans.content 'sum'; choose from mean, attention"),
    ],
)
def test_heads_that_do_not_go_together_are_refused(kind: type, arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind(**arguments)
