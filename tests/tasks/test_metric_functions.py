"""Metrics against numbers from their definitions, and against what their papers call undefined."""

import math

import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.tasks.metrics import CLASSIFICATION_METRICS, REGRESSION_METRICS, TAGGING_METRICS, compute_metrics

TRUTH = np.array([1, 1, 1, 1, 0, 0, 0, 1])
GUESS = np.array([1, 1, 0, 1, 0, 1, 0, 0])


def test_classification_metrics_follow_their_definitions() -> None:
    right, wrong, missed, rejected = 3, 1, 2, 2  # true and false positives, false and true negatives
    found = compute_metrics(CLASSIFICATION_METRICS, ("matthews_correlation", "accuracy", "f1"), TRUTH, GUESS)
    assert list(found) == ["matthews_correlation", "accuracy", "f1"]
    assert found["accuracy"] == pytest.approx(5 / 8)
    assert found["f1"] == pytest.approx(2 * right / (2 * right + wrong + missed))
    denominator = math.sqrt((right + wrong) * (right + missed) * (rejected + wrong) * (rejected + missed))
    assert found["matthews_correlation"] == pytest.approx((right * rejected - wrong * missed) / denominator)


def test_macro_f1_is_the_mean_of_each_class() -> None:
    truth, guess = np.array([0, 1, 2, 2]), np.array([0, 2, 2, 2])
    assert compute_metrics(CLASSIFICATION_METRICS, ("macro_f1",), truth, guess)["macro_f1"] == pytest.approx(
        (1 + 0 + 0.8) / 3
    )


def test_regression_metrics_follow_their_definitions() -> None:
    truth, guess = np.array([0.0, 1.0, 2.5, 5.0], np.float32), np.array([0.1, 3.0, 2.0, 9.0], np.float32)
    found = compute_metrics(REGRESSION_METRICS, ("pearson", "spearman"), truth, guess)
    assert found["pearson"] == pytest.approx(np.corrcoef(truth, guess)[0, 1], abs=1e-6)
    assert found["spearman"] == pytest.approx(1 - 6 * (1 + 1) / (4 * 15))  # by differences of ranks


def test_metrics_of_predictions_that_are_no_numbers_are_nan() -> None:
    guess = np.array([0.5, math.nan, 1.0], np.float32)
    found = compute_metrics(REGRESSION_METRICS, tuple(REGRESSION_METRICS), np.arange(3, dtype=np.float32), guess)
    assert len(found) == 3 and all(map(math.isnan, found.values()))


def test_entities_count_when_type_and_borders_are_right() -> None:
    truth = [["B-PER", "I-PER", "O", "B-LOC"], ["B-ORG", "B-ORG", "O"]]
    guess = [["B-PER", "I-PER", "O", "B-ORG"], ["B-ORG", "I-ORG", "O"]]
    found = compute_metrics(TAGGING_METRICS, ("precision", "recall", "f1", "accuracy"), truth, guess)
    assert found == pytest.approx({"precision": 1 / 3, "recall": 1 / 4, "f1": 2 / 7, "accuracy": 5 / 7})


def test_without_a_predicted_entity_the_entity_metrics_are_zero() -> None:
    found = compute_metrics(TAGGING_METRICS, ("precision", "recall", "f1"), [["B-PER", "O"]], [["O", "O"]])
    assert set(found.values()) == {0.0}


def test_what_is_undefined_is_nan() -> None:
    ones, mixed = np.ones(4, np.int32), np.array([0, 1, 0, 1])
    assert math.isnan(
        compute_metrics(CLASSIFICATION_METRICS, ("matthews_correlation",), ones, mixed)["matthews_correlation"]
    )
    assert compute_metrics(CLASSIFICATION_METRICS, ("matthews_correlation",), mixed, ones)["matthews_correlation"] == 0
    assert math.isnan(compute_metrics(CLASSIFICATION_METRICS, ("f1",), ones * 0, ones * 0)["f1"])
    flat = compute_metrics(
        REGRESSION_METRICS, ("pearson", "spearman"), mixed.astype(np.float32), ones.astype(np.float32)
    )
    assert all(math.isnan(value) for value in flat.values())


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown metric 'bleu' for this kind of task; choose from: accuracy"):
        compute_metrics(CLASSIFICATION_METRICS, ("bleu",), TRUTH, GUESS)
