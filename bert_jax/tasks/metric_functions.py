"""The metrics of the tasks, by scikit-learn, scipy and seqeval. A metric that is undefined is NaN, never a guess."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Integer
from scipy import stats
from seqeval.metrics import f1_score as entity_f1
from seqeval.metrics import precision_score as entity_precision
from seqeval.metrics import recall_score as entity_recall
from sklearn import metrics

from bert_jax.command import UserError

LARGEST = float(np.finfo(np.float32).max)  # that a number to be learnt may be
# Of labels that are all the same they have no value.
UNDEFINED_OF_ONE = ("matthews_correlation", "pearson", "spearman")


def classification_metrics(
    names: Sequence[str], truth: Integer[np.ndarray, "R"], guess: Integer[np.ndarray, "R"]
) -> dict[str, float]:
    """`accuracy`, `f1` (of class 1, as GLUE has it for MRPC), `macro_f1`, `matthews_correlation` of class ids.

    matthews_correlation is undefined where the truth is all of one class, and 0 where only the guesses are, as
    scikit-learn has it; f1 is undefined where class 1 is in neither.
    """
    found = {
        "accuracy": lambda: metrics.accuracy_score(truth, guess),
        "f1": lambda: metrics.f1_score(truth, guess, labels=[1], average="macro", zero_division=np.nan),
        "macro_f1": lambda: metrics.f1_score(truth, guess, average="macro", zero_division=0),
        "matthews_correlation": lambda: math.nan if _constant(truth) else metrics.matthews_corrcoef(truth, guess),
    }
    return _chosen(names, found)


def regression_metrics(
    names: Sequence[str], truth: Float[np.ndarray, "R"], guess: Float[np.ndarray, "R"]
) -> dict[str, float]:
    """`pearson` and `spearman` correlation of scores, undefined where truth or guesses are all the same; `mse`."""
    undefined = _constant(truth) or _constant(guess)
    found = {
        "pearson": lambda: math.nan if undefined else stats.pearsonr(truth, guess).statistic,
        "spearman": lambda: math.nan if undefined else stats.spearmanr(truth, guess).statistic,
        "mse": lambda: metrics.mean_squared_error(truth, guess),
    }
    return _chosen(names, found)


def tagging_metrics(
    names: Sequence[str], truth: Sequence[Sequence[str]], guess: Sequence[Sequence[str]]
) -> dict[str, float]:
    """`accuracy` over words, and `precision`, `recall`, `f1` over whole entities, of tags by sentence.

    An entity counts as found when its type and both its borders are right (Tjong Kim Sang and De Meulder 2003).
    A share of nothing (no entity guessed, or none there) is 0, as conlleval has it.
    """
    flat_truth = np.array([tag for sentence in truth for tag in sentence])
    flat_guess = np.array([tag for sentence in guess for tag in sentence])
    found = {
        "accuracy": lambda: metrics.accuracy_score(flat_truth, flat_guess),
        "precision": lambda: entity_precision(truth, guess, zero_division=0),
        "recall": lambda: entity_recall(truth, guess, zero_division=0),
        "f1": lambda: entity_f1(truth, guess, zero_division=0),
    }
    return _chosen(names, found)


def found_metrics(names: Sequence[str], counted: Mapping[str, tuple[int, int, int]]) -> dict[str, float]:
    """`precision`, `recall` and `f1` after each prefix, from how many were rightly found, found, and there.

    A share of nothing is 0.
    """
    found = {}
    for prefix, (hits, guessed, there) in counted.items():
        found[f"{prefix}precision"] = lambda hits=hits, of=guessed: hits / of if of else 0.0
        found[f"{prefix}recall"] = lambda hits=hits, of=there: hits / of if of else 0.0
        found[f"{prefix}f1"] = lambda hits=hits, of=guessed + there: 2 * hits / of if of else 0.0
    return _chosen(names, found)


def _chosen(names: Sequence[str], found: dict) -> dict[str, float]:
    for name in names:
        if name not in found:
            raise UserError(f"no metric {name!r} for this kind of task; there are: {', '.join(found)}")
    return {name: float(found[name]()) for name in names}


def _constant(values: np.ndarray) -> bool:
    return bool((values == values[0]).all())
