"""What is descended: terms as sums whose denominators are counted apart, by what they are learnt from.

  terms        a loss and its metrics from sums and counts; what an objective is
  labels       cross-entropies and squared errors over what the heads give
  pretraining  masked and next tokens, spans from their boundaries, next sentences

Never a mean: the train step divides once, by the counts over the whole global batch, so that no mesh, microbatch
or short row changes the gradient (law 3).
"""

from bert_jax.train.losses.labels import (
    IMPOSSIBLE,
    PLAIN,
    ClassCosts,
    answer_sums,
    binary_sums,
    chain_sums,
    choice_sums,
    classification_sums,
    span_sums,
    squared_error_sum,
)
from bert_jax.train.losses.pretraining import CausalObjective, PretrainingObjective
from bert_jax.train.losses.terms import Objective, Sums, means, total_loss

__all__ = [
    "IMPOSSIBLE",
    "PLAIN",
    "CausalObjective",
    "ClassCosts",
    "Objective",
    "PretrainingObjective",
    "Sums",
    "answer_sums",
    "binary_sums",
    "chain_sums",
    "choice_sums",
    "classification_sums",
    "means",
    "span_sums",
    "squared_error_sum",
    "total_loss",
]
