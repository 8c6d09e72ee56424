"""A projection of hidden states to the width of a teacher, which only training uses."""

from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.model.layers import Dense, child_key
from bert_jax.model.runtime import Runtime

NAME = "hidden_projection"  # of the head, and the first component of its parameters' paths


class HiddenProjection(nnx.Module):
    """A dense layer from the width of the model to that of its teacher, the same for all layers.

    Jiao et al. 2020, equation 8, where each layer may have its own; their code has one (modeling.py, fit_dense).
    """

    def __init__(self, config: ModelConfig, width: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        deviation = config.initializer_range
        dense_key = child_key(key, "dense")
        self.dense = Dense((config.width,), (width,), deviation=deviation, runtime=runtime, key=dense_key)

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        return self.dense(hidden)
