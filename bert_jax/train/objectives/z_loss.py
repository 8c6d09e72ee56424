"""The z-loss, a term that keeps the normalizer of the vocabulary's softmax near 1, by config.z_loss.

"we use an auxiliary loss of z_loss = 1e-4 * log^2 Z to encourage the softmax normalizer log(Z) to be close to 0"
(Chowdhery et al. 2022, PaLM, section 5). The term is the mean of log^2 Z over the predictions of an objective, and is
logged as z_loss without its weight. With a weight of 0 there is no term.
"""

from collections.abc import Mapping

from bert_jax.train.losses import VocabularySums
from bert_jax.train.objectives.objective import Counts, Term, Terms

Z = "z"


def z_metrics(weight: float) -> Mapping[str, tuple[str, ...]]:
    """What the term adds to Objective.term_metrics."""
    return {Z: ()} if weight else {}


def z_weights(weight: float) -> Mapping[str, float]:
    """What the term adds to Objective.term_weights."""
    return {Z: weight} if weight else {}


def z_counts(weight: float, counts: Counts, term: str) -> Counts:
    """What the term adds to the counts, from those of the term whose predictions it is about."""
    return {Z: counts[term]} if weight else {}


def z_terms(weight: float, sums: VocabularySums) -> Terms:
    """What the term adds to the terms of a batch."""
    return {Z: Term(sums.squares, {})} if weight else {}
