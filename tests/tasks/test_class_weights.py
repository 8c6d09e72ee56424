"""What classes weigh in the loss: by frequency or as given, in its denominator too, and not where it is measured."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from bert_jax.config import TaskConfig
from bert_jax.errors import UserError
from bert_jax.tasks import registry
from bert_jax.tasks.kinds.classification import ClassificationTask
from bert_jax.tasks.kinds.tagging import TaggingTask, TagLabels
from bert_jax.tasks.rows import Example, Sentence, Split, TaskBatch
from bert_jax.train.losses import ClassCosts

LABELS = ["b"] * 5 + ["a"] * 2 + ["c"]
TRAIN = Split(Path("train.tsv"), tuple(Example("x", None, label, 2) for label in LABELS), labelled=True)
TASK = ClassificationTask("own", ("a", "b", "c", "d"))


def weights_of(given: str) -> tuple[float, ...]:
    task = replace(TASK, class_weights=given)
    return task.complete(TRAIN).class_weight_values


def test_balanced_weights_are_those_of_scikit_learn_and_1_for_what_the_file_does_not_have() -> None:
    wanted = compute_class_weight("balanced", classes=np.array(["a", "b", "c"]), y=np.array(LABELS))
    np.testing.assert_allclose(weights_of("balanced"), [*wanted, 1.0], rtol=1e-12)


def test_given_weights_go_by_label_and_the_others_weigh_1() -> None:
    assert weights_of("c=3, a=0.5") == (0.5, 1.0, 3.0, 1.0)
    assert weights_of("") == ()


def test_a_label_may_hold_an_equals_sign() -> None:
    task = replace(TASK, labels=("x=1", "y"), class_weights="x=1=2")
    assert task.complete(TRAIN).class_weight_values == (2.0, 1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"class_weights": "e=2"}, r"names 'e' in 'e=2', which is not a label of train.tsv: a, b, c, d. Use balanced"),
        ({"class_weights": "balance"}, r"names '' in 'balance'"),
        ({"class_weights": "a=many"}, r"has 'a=many', but 'many' is not a weight"),
        ({"class_weights": "a=0,b=0,c=0,d=0"}, r"so all classes weigh 0; give one a weight above 0"),
        ({"class_weights": "a=-1"}, r"'-1' is not a weight; use a number of 0 or more"),
        ({"label_smoothing": 1.0}, r"task.label_smoothing is 1.0; use 0 \(none\) or a share below 1"),
    ],
)
def test_invalid_weights_and_shares_are_refused(options: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        task = replace(TASK, **options)
        task.complete(TRAIN)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"class_weights": "balanced"}])
def test_options_of_another_kind_are_refused(options: dict) -> None:
    with pytest.raises(UserError, match=rf"task.{next(iter(options))} is for classification, .*, not for regression;"):
        registry.resolve(TaskConfig(train="a.tsv", kind="regression", **options))
    with pytest.raises(UserError, match=r"which task.crf replaces; remove one"):
        TaggingTask("own", crf=True, **options)


def test_tags_are_weighed_by_words_in_the_scheme_of_the_labels() -> None:
    words = Sentence(("EU", "says", "Rome", "Paris", "!"), ("I-ORG", "O", "I-LOC", "B-LOC", "O"), (1, 2, 3, 4, 5))
    train = Split(Path("train.conll"), (words,), labelled=True)
    task = TaggingTask("own", ("O", "B-ORG", "B-LOC", "I-LOC"), class_weights="balanced", label_smoothing=0.1)
    found = task.complete(train)
    assert found.class_weight_values == (5 / 6, 5 / 3, 5 / 6, 1.0)  # n / (3 * count); I-LOC is in the set only
    objective = found.objective()
    labels = TagLabels(tags=jnp.array([[2, 0, 3]]), words=jnp.array([[0, 1, 2]]), whole=jnp.ones((1, 2), bool))
    batch = TaskBatch(*[jnp.zeros((1, 3), jnp.int32)] * 4, labels=labels, label_weights=jnp.array([[1.0, 1, 0]]))
    assert objective.counts(batch)["task"] == pytest.approx(5 / 6 + 5 / 6)
    assert objective.costs == ClassCosts(found.class_weight_values, 0.1)


def test_the_denominator_is_the_weight_of_the_labels_and_evaluation_has_no_weights() -> None:
    task = replace(TASK, class_weight_values=(0.5, 2.0, 1.0, 1.0), class_weights="a=0.5,b=2", label_smoothing=0.1)
    labels, weights = jnp.array([0, 1, 1, 0]), jnp.array([1.0, 1, 1, 0])
    batch = TaskBatch(*[jnp.zeros((4, 8), jnp.int32)] * 4, labels=labels, label_weights=weights)
    assert task.objective().counts(batch)["task"] == 0.5 + 2 + 2
    plain = task.measured.objective()
    assert plain.counts(batch)["task"] == 3 and plain == TASK.objective()
    assert task.costs == ClassCosts((0.5, 2.0, 1.0, 1.0), 0.1) and task.measured.costs == ClassCosts()
