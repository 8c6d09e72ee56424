"""Dense layers to logits: of classes, of tags, of both ends of an answer."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from bert_jax.config import ModelConfig
from bert_jax.model.activations import activation
from bert_jax.model.dropout import dropout
from bert_jax.model.layers import Dense, LayerNorm, child_key
from bert_jax.model.runtime import Runtime

NEXT_SENTENCE_CLASSES = 2  # is next, random
ANSWER_ENDS = 2  # first position, last position


class Classifier(nnx.Module):
    """Dropout and a dense layer to float32 logits, over pooled vectors or over every token."""

    def __init__(self, config: ModelConfig, outputs: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.dense = Dense(
            (config.width,),
            (outputs,),
            deviation=config.initializer_range,
            runtime=runtime,
            key=child_key(key, "dense"),
        )
        self.dropout_rate = config.dropout

    def __call__(
        self, vectors: Float[Array, "B K D"], seeds: UInt32[Array, "B 2"] | None = None
    ) -> Float[Array, "B K C"]:
        return self.dense(dropout(vectors, self.dropout_rate, seeds), dtype=jnp.float32)


class Network(nnx.Module):
    """A dense layer to the model's width, the activation, dropout, and a dense layer to float32 outputs."""

    def __init__(self, config: ModelConfig, inputs: int, outputs: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.hidden = dense(config, inputs, runtime=runtime, key=child_key(key, "hidden"))
        self.output = Dense(
            (config.width,),
            (outputs,),
            deviation=config.initializer_range,
            runtime=runtime,
            key=child_key(key, "output"),
        )
        self.activation = config.activation
        self.dropout_rate = config.dropout

    def __call__(
        self, vectors: Float[Array, "B *shape I"], seeds: UInt32[Array, "B 2"] | None = None
    ) -> Float[Array, "B *shape C"]:
        hidden = activation(self.activation)(self.hidden(vectors))
        return self.output(dropout(hidden, self.dropout_rate, seeds), dtype=jnp.float32)


def dense(config: ModelConfig, inputs: int, outputs: int = 0, *, runtime: Runtime, key: PRNGKeyArray) -> Dense:
    """A dense layer inside a head, to the model's width or to `outputs`."""
    return Dense(
        (inputs,),
        (outputs or config.width,),
        deviation=config.initializer_range,
        runtime=runtime,
        key=key,
        bias=config.bias,
    )


def norm(config: ModelConfig, width: int = 0, *, runtime: Runtime) -> LayerNorm:
    """A norm inside a head, over the model's width or another."""
    return LayerNorm(width or config.width, epsilon=config.layer_norm_epsilon, runtime=runtime, bias=config.bias)
