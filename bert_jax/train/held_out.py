"""What the logs call held-out metrics, and which way each improves. No jax here: data preparation draws curves, too."""

PREFIX = "eval_"  # what the logs call a held-out metric; the evaluation itself says `loss`
_LOWER_IS_BETTER = ("loss", "perplexity", "mse")


def lower_is_better(metric: str) -> bool:
    """Losses, perplexities and errors fall as a model learns; other metrics (accuracy, F1, correlation) rise."""
    return any(word in metric for word in _LOWER_IS_BETTER)
