"""Names of held-out metrics, and the direction in which each improves.

This module does not import jax, since data preparation also draws curves of these metrics.
"""

PREFIX = "eval_"  # the logs write eval_loss for what the evaluation itself calls loss
_LOWER_IS_BETTER = ("loss", "perplexity", "mse")


def lower_is_better(metric: str) -> bool:
    """Whether a metric falls as a model improves, as losses do; others (accuracy, F1, correlation) rise."""
    return any(word in metric for word in _LOWER_IS_BETTER)
