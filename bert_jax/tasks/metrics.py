"""Task metrics from scikit-learn, scipy and seqeval. An undefined metric is NaN, and so is any metric of NaN.

A metric is a function of all labels and predictions in a split. Kinds of tasks have dictionaries of metrics.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64
from scipy import stats
from seqeval.metrics import f1_score as entity_f1
from seqeval.metrics import precision_score as entity_precision
from seqeval.metrics import recall_score as entity_recall
from sklearn import metrics

from bert_jax.errors import UserError

Metric: TypeAlias = Callable[[Any, Any], float]

LARGEST = float(np.finfo(np.float32).max)  # the largest absolute value of a regression target
# Metrics that are undefined if all labels are the same.
UNDEFINED_OF_ONE = ("matthews_correlation", "mcc", "auroc", "pearson", "spearman", "r2")
# Metrics of one class, which need to know it if there are more than two.
OF_ONE_CLASS = ("f1", "precision", "recall")


def compute_metrics(
    functions: Mapping[str, Metric], names: Sequence[str], labels: Any, predicted: Any
) -> dict[str, float]:
    """Computes the named metrics. Raises UserError for a name that is not among the functions."""
    check_metric_names(names, functions)
    return {name: float(functions[name](labels, predicted)) for name in names}


def check_metric_names(names: Sequence[str], known: Collection[str]) -> None:
    """Raises UserError for an unknown metric."""
    for name in names:
        if name not in known:
            raise UserError(f"unknown metric {name!r} for this kind of task; choose from: {', '.join(known)}")


def retrieval_metrics(names: Sequence[str], counts: Mapping[str, tuple[int, int, int]]) -> dict[str, float]:
    """Computes `precision`, `recall` and `f1` by prefix, from the numbers of correct, predicted and true items."""
    # A ratio with denominator 0 is 0.
    values = {}
    for prefix, (correct, predicted, true) in counts.items():
        values[f"{prefix}precision"] = correct / predicted if predicted else 0.0
        values[f"{prefix}recall"] = correct / true if true else 0.0
        values[f"{prefix}f1"] = 2 * correct / (predicted + true) if predicted + true else 0.0
    return select_metrics(names, values)


def best_threshold(scores: Float[np.ndarray, "G"], true: Bool[np.ndarray, "G"], total: int) -> float:
    """Finds the lowest probability at which a candidate is predicted, for the best F1 against `total` true items.

    The highest of equally good thresholds is used, and 1/2 if no candidate is true.
    """
    order = np.argsort(-scores, kind="stable")
    scores, correct = scores[order], np.cumsum(true[order])
    # Predicting the first n gives F1 = 2 * correct / (n + total). A threshold can only separate different scores, so
    # only the last of equal scores is a cut.
    cuts = np.flatnonzero(np.diff(scores, append=-1))
    if not len(cuts) or not correct[-1]:
        return 0.5
    last = cuts[np.argmax(correct[cuts] / (cuts + 1 + total))]
    # Midway between the last candidate that is predicted and the next one, as in decision trees.
    following = scores[last + 1] if last + 1 < len(scores) else 0.0
    return float((scores[last] + following) / 2)


def multilabel_metrics(
    names: Sequence[str],
    labels: Bool[np.ndarray, "R C"],
    shares: Float[np.ndarray, "R C"],
    predicted: Bool[np.ndarray, "R C"],
) -> dict[str, float]:
    """Computes the named MULTILABEL_METRICS, from the labels' probabilities and the predicted labels.

    | metric | |
    |---|---|
    | micro_f1, macro_f1 | over all decisions; the mean over labels, where one neither true nor predicted counts 0 |
    | exact_match | the share of texts with exactly the right labels |
    | auroc | the mean area under the ROC curve (Hanley and McNeil 1982), over the labels that some texts have and some
      do not; NaN if there is no such label |
    | micro_auroc | the area over all decisions |
    """
    check_metric_names(names, MULTILABEL_METRICS)
    return {
        name: float(MULTILABEL_METRICS[name](labels, shares if name in SCORED_METRICS else predicted)) for name in names
    }


def select_metrics(names: Sequence[str], values: Mapping[str, float]) -> dict[str, float]:
    """Selects the named metrics. Raises UserError for one that is missing."""
    check_metric_names(names, values)
    return {name: values[name] for name in names}


def _constant(values: np.ndarray) -> bool:
    return bool((values == values[0]).all())


def _unless(undefined: Callable[[Any, Any], bool], metric: Metric) -> Metric:
    """A metric that is NaN if it is undefined for the labels and predictions."""
    return lambda labels, predicted: math.nan if undefined(labels, predicted) else float(metric(labels, predicted))


def _either_constant(labels: np.ndarray, predicted: np.ndarray) -> bool:
    return _constant(labels) or _constant(predicted)


def _any_nan(_: np.ndarray, predicted: np.ndarray) -> bool:  # which scikit-learn refuses
    return bool(np.isnan(predicted).any())


def _tag_accuracy(labels: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    flat = (np.array([tag for sentence in tags for tag in sentence]) for tags in (labels, predicted))
    return float(metrics.accuracy_score(*flat))


def classification_metrics(positive: int) -> Mapping[str, Metric]:
    """Returns the metrics for class ids; those in OF_ONE_CLASS measure the class `positive`.

    These are undefined if their denominator is 0; f1, if the class is neither a label nor a prediction. auroc reads the
    probabilities [R, C]: with two classes it is the area for `positive`, with more the mean over the classes that some
    texts have and some do not, each against all others.
    """

    def of_class(score: Callable[..., Any]) -> Metric:
        # The mean over one class. scikit-learn's average="binary" refuses more than two classes.
        return lambda labels, predicted: float(
            score(labels, predicted, labels=[positive], average="macro", zero_division=np.nan)
        )

    return {
        "accuracy": metrics.accuracy_score,
        "f1": of_class(metrics.f1_score),
        "macro_f1": lambda labels, predicted: metrics.f1_score(labels, predicted, average="macro", zero_division=0),
        "weighted_f1": lambda labels, predicted: metrics.f1_score(
            labels, predicted, average="weighted", zero_division=0
        ),
        "matthews_correlation": _matthews,
        "mcc": _matthews,
        "precision": of_class(metrics.precision_score),
        "recall": of_class(metrics.recall_score),
        "auroc": lambda labels, shares: (
            _auroc(labels == positive, shares[:, positive])
            if shares.shape[1] == 2
            else _macro_auroc(labels[:, None] == np.arange(shares.shape[1]), shares)
        ),
    }


_auroc = _unless(lambda labels, shares: _constant(labels) or bool(np.isnan(shares).any()), metrics.roc_auc_score)


def _macro_auroc(labels: np.ndarray, shares: np.ndarray) -> float:
    mixed = [label for label in range(labels.shape[1]) if not _constant(labels[:, label])]
    return float(np.mean([_auroc(labels[:, label], shares[:, label]) for label in mixed])) if mixed else math.nan


# 0 if only the predictions are all equal, as in scikit-learn.
_matthews = _unless(lambda labels, _: _constant(labels), metrics.matthews_corrcoef)
CLASSIFICATION_METRICS = classification_metrics(1)  # as GLUE's MRPC and QQP measure f1


# Metrics of sets of labels, [R,C], from the predicted sets or, for SCORED_METRICS, the probabilities of all labels.
MULTILABEL_METRICS: Mapping[str, Metric] = {
    "micro_f1": lambda labels, predicted: metrics.f1_score(labels, predicted, average="micro", zero_division=0),
    "macro_f1": lambda labels, predicted: metrics.f1_score(labels, predicted, average="macro", zero_division=0),
    "exact_match": lambda labels, predicted: (labels == predicted).all(axis=1).mean(),
    "auroc": _macro_auroc,
    "micro_auroc": lambda labels, shares: _auroc(labels.ravel(), shares.ravel()),
}
SCORED_METRICS = ("auroc", "micro_auroc")
REGRESSION_METRICS: Mapping[str, Metric] = {
    "pearson": _unless(_either_constant, lambda labels, predicted: stats.pearsonr(labels, predicted).statistic),
    "spearman": _unless(_either_constant, lambda labels, predicted: stats.spearmanr(labels, predicted).statistic),
    "mse": _unless(_any_nan, metrics.mean_squared_error),
    "rmse": _unless(_any_nan, metrics.root_mean_squared_error),
    "mae": _unless(_any_nan, metrics.mean_absolute_error),
    "r2": _unless(lambda labels, predicted: _constant(labels) or _any_nan(labels, predicted), metrics.r2_score),
}
# Metrics of the tags of each sentence: accuracy over words, the others over whole entities. An entity is correct if
# its type and both its boundaries are (Tjong Kim Sang and De Meulder 2003). A ratio with denominator 0 is 0, as in
# conlleval.
TAGGING_METRICS: Mapping[str, Metric] = {
    "accuracy": _tag_accuracy,
    "precision": lambda labels, predicted: entity_precision(labels, predicted, zero_division=0),
    "recall": lambda labels, predicted: entity_recall(labels, predicted, zero_division=0),
    "f1": lambda labels, predicted: entity_f1(labels, predicted, zero_division=0),
}


QUERIES_AT_ONCE = 1024  # rows of a matrix of scores, whose columns are the documents of a chunk


def right_ranks(
    queries: Float32[np.ndarray, "Q D"], candidates: Float32[np.ndarray, "K D"], right: Sequence[Sequence[int]]
) -> Float64[np.ndarray, "Q"]:
    """Ranks each query's best right candidate, from 1, among the wrong ones.

    Candidates with equal scores share their mean rank.
    """
    # In parts, because the scores of all queries may not fit in memory.
    ranks = np.zeros(len(queries))
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        part = slice(start, start + QUERIES_AT_ONCE)
        scores = queries[part] @ candidates.T
        own = np.array([row[list(known)].max() for row, known in zip(scores, right[part], strict=True)])[:, None]
        # Both are true for NaN, which therefore counts against the query.
        higher, at_least = ~(scores <= own), ~(scores < own)
        for row, known in enumerate(right[part]):
            higher[row, list(known)] = at_least[row, list(known)] = False
        ranks[part] = 1 + (higher.sum(axis=1) + at_least.sum(axis=1)) / 2
    return ranks
