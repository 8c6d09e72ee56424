"""Spans against loops over them: vectors, classes, relations, and which are kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf, log_softmax, softmax

from bert_jax.config import ModelConfig
from bert_jax.model import layers
from bert_jax.model.bert import Bert, abstract_params, bind
from bert_jax.model.heads.config import Heads, SpanHeads
from bert_jax.model.heads.structured import choose_spans, possible_spans, take_spans
from bert_jax.model.outputs import relation_logits, span_logits, span_vectors
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.task import span_sums

CONFIG = ModelConfig(vocab_size=20, layers=1, width=6, heads=2, feed_forward=4, max_positions=8)
LONGEST, CLASSES, RELATIONS = 3, 4, 2
KINDS = [(boundaries, content) for boundaries in ("hidden", "networks") for content in ("mean", "attention")]
SEQUENCES = np.array([[1, 1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1]], np.int32)
HIDDEN = np.random.default_rng(0).normal(size=(2, 7, 6)).astype(np.float32)
SPANS = [  # every span of up to three positions of one sequence: row, first position, length
    (row, first, length)
    for row in range(2)
    for first in range(7)
    for length in range(1, LONGEST + 1)
    if first + length <= 7 and SEQUENCES[row, first] and len(set(SEQUENCES[row, first : first + length])) == 1
]
STARTS, LENGTHS = np.array([[0, 2, 4], [5, 0, 0]], np.int32), np.array([[2, 1, 2], [2, 3, 1]], np.int32)


def heads_of(kind: tuple[str, str]) -> Heads:
    return Heads(spans=SpanHeads(LONGEST, kind[0], kind[1], classes=CLASSES, relations=RELATIONS))


@functools.cache
def params_of(kind: tuple[str, str]) -> dict:
    draw = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: draw.normal(0, 0.5, leaf.shape).astype(np.float32), abstract_params(CONFIG, heads_of(kind))
    )


@functools.cache
def found(kind: tuple[str, str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors of all spans, their logits, and the logits of relations between those of STARTS and LENGTHS."""

    @jax.jit
    def compute(params: dict) -> tuple:
        model: Bert = bind(CONFIG, heads_of(kind), params, Runtime())
        vectors = span_vectors(model, jnp.asarray(HIDDEN))
        taken = take_spans(vectors, jnp.asarray(STARTS), jnp.asarray(LENGTHS))
        return vectors, span_logits(model, vectors), relation_logits(model, taken)

    return jax.tree.map(np.asarray, compute(params_of(kind)))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + erf(x / np.sqrt(2)))


def dense(flat: dict, path: str, x: np.ndarray) -> np.ndarray:
    return x @ flat[f"{path}/kernel"] + flat[f"{path}/bias"]


def network(flat: dict, path: str, x: np.ndarray) -> np.ndarray:
    return dense(flat, f"{path}/output", gelu(dense(flat, f"{path}/hidden", x)))


def vector_by_hand(kind: tuple[str, str], row: int, first: int, length: int) -> np.ndarray:
    flat = layers.flatten(params_of(kind))
    inside = HIDDEN[row, first : first + length].astype(np.float64)
    start, end = inside[0], inside[-1]
    if kind[0] == "networks":
        start, end = gelu(dense(flat, "spans/start", start)), gelu(dense(flat, "spans/end", end))
    content = inside.mean(axis=0)
    if kind[1] == "attention":
        weights = softmax([network(flat, "spans/attention", state)[0] for state in inside])
        content = sum(weight * state for weight, state in zip(weights, inside, strict=True))
    return np.concatenate([start, end, content])


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_and_classes_of_all_spans(kind: tuple[str, str]) -> None:
    vectors, logits, _ = found(kind)
    flat = layers.flatten(params_of(kind))
    for row, first, length in SPANS:
        wanted = vector_by_hand(kind, row, first, length)
        np.testing.assert_allclose(vectors[row, first, length - 1], wanted, atol=1e-5)
        classes = network(flat, "span_classifier", wanted)
        np.testing.assert_allclose(logits[row, first, length - 1], classes, atol=1e-4)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]])
def test_relations_of_pairs_of_spans(kind: tuple[str, str]) -> None:
    flat = layers.flatten(params_of(kind))
    for row in range(2):
        chosen = [vector_by_hand(kind, row, *span) for span in zip(STARTS[row], LENGTHS[row], strict=True)]
        for one, first in enumerate(chosen):
            for other, second in enumerate(chosen):
                wanted = network(flat, "span_relations", np.concatenate([first, second, first * second]))
                np.testing.assert_allclose(found(kind)[2][row, one, other], wanted, atol=2e-4)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]])
def test_dropout_of_vectors_equals_that_of_attention_over_their_positions(kind: tuple[str, str]) -> None:
    model: Bert = bind(CONFIG, heads_of(kind), jax.tree.map(jnp.asarray, params_of(kind)), Runtime())
    vectors = span_vectors(model, jnp.asarray(HIDDEN), jax.random.key(0))
    changed = np.abs(vectors - found(kind)[0]).max(axis=(0, 1, 2)) > 1e-4
    np.testing.assert_array_equal(changed, np.arange(18) >= (12 if kind[1] == "attention" else 18))


def test_possible_spans_lie_in_one_sequence() -> None:
    wanted = np.zeros((2, 7, LONGEST), bool)
    for row, first, length in SPANS:
        wanted[row, first, length - 1] = True
    np.testing.assert_array_equal(possible_spans(jnp.asarray(SEQUENCES), LONGEST), wanted)


def test_the_spans_that_are_kept_are_the_best_possible_ones() -> None:
    scores = np.random.default_rng(2).normal(size=(2, 7, LONGEST)).astype(np.float32)
    count = 12  # more than row 0 has
    starts, lengths, real = choose_spans(jnp.asarray(scores), possible_spans(jnp.asarray(SEQUENCES), LONGEST), count)
    for row in range(2):
        best = sorted((span for span in SPANS if span[0] == row), key=lambda span: -scores[row, span[1], span[2] - 1])
        wanted = [span[1:] for span in best][:count]
        kept = [(int(start), int(length)) for start, length in zip(starts[row], lengths[row], strict=True)]
        assert [span for span, one in zip(kept, real[row], strict=True) if one] == wanted


def test_the_sums_are_over_possible_spans_with_class_0_for_null() -> None:
    logits = found(KINDS[0])[1]
    labels = np.random.default_rng(3).integers(0, CLASSES, logits.shape[:3])
    weights = possible_spans(jnp.asarray(SEQUENCES), LONGEST).astype(jnp.float32)
    loss, correct = span_sums(jnp.asarray(logits), jnp.asarray(labels), weights)
    picked = [(log_softmax(logits[place].astype(np.float64)), labels[place]) for place in _places()]
    np.testing.assert_allclose(loss, -sum(values[label] for values, label in picked), rtol=1e-5)
    assert correct == sum(values.argmax() == label for values, label in picked)


def test_one_class_asks_whether_it_is_a_span() -> None:
    scores = found(KINDS[0])[1][..., :1]
    labels = np.random.default_rng(4).integers(0, 2, scores.shape[:3])
    weights = possible_spans(jnp.asarray(SEQUENCES), LONGEST).astype(jnp.float32)
    loss, correct = span_sums(jnp.asarray(scores), jnp.asarray(labels), weights)
    yes = {place: 1 / (1 + np.exp(-float(scores[place][0]))) for place in _places()}
    wanted = -sum(np.log(share if labels[place] else 1 - share) for place, share in yes.items())
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert correct == sum((share >= 0.5) == labels[place] for place, share in yes.items())


def _places() -> list[tuple[int, int, int]]:
    return [(row, first, length - 1) for row, first, length in SPANS]
