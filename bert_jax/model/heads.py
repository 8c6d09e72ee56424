"""What stands on the encoder: pooler, masked language model, next sentence, classifier, tagger."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.model.activations import activation
from bert_jax.model.dropout import dropout
from bert_jax.model.layers import Dense, LayerNorm, add_bias, child_key, truncated_normal
from bert_jax.model.runtime import Runtime
from bert_jax.shapes import padded_vocabulary

NEXT_SENTENCE_CLASSES = 2  # is next, random


@dataclass(frozen=True)
class Heads:
    """Which heads a model has. classes and tags count outputs, 0 for none; classes=1 is a regression.

    mlm predicts masked tokens, lm the next one.

    Raises UserError when a head that reads the pooled vector comes without the pooler.
    """

    mlm: bool = False
    lm: bool = False
    next_sentence: bool = False
    pooler: bool = False
    classes: int = 0
    tags: int = 0

    def __post_init__(self) -> None:
        if (self.next_sentence or self.classes) and not self.pooler:
            raise UserError("heads.next_sentence and heads.classes read the pooled vector; set heads.pooler=True")


def _square(config: ModelConfig, runtime: Runtime, key: PRNGKeyArray, name: str) -> Dense:
    """A dense layer that keeps the width."""
    deviation, bias = config.initializer_range, config.bias
    return Dense(
        (config.width,), (config.width,), deviation=deviation, runtime=runtime, key=child_key(key, name), bias=bias
    )


def _norm(config: ModelConfig, runtime: Runtime) -> LayerNorm:
    return LayerNorm(config.width, epsilon=config.layer_norm_epsilon, runtime=runtime, bias=config.bias)


class Pooler(nnx.Module):
    """What heads read in place of hidden states: tanh of a dense layer over the [CLS] vector (google-research/bert,
    modeling.py); or, as "transform", a dense layer, activation and norm over whatever they read (ModernBERT)."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.dense = _square(config, runtime, key, "dense")
        if config.pooler == "transform":
            self.norm = _norm(config, runtime)
        self.config = config

    def __call__(self, vectors: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        if self.config.pooler == "transform":
            return self.norm(activation(self.config.activation)(self.dense(vectors)))
        return jnp.tanh(self.dense(vectors))


class OutputTable(nnx.Module):
    """An output matrix that is not the token table: table [V, D], the vocabulary's padding zero."""

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray) -> None:
        drawn = truncated_normal(child_key(key, "table"), (config.vocab_size, config.width), config.initializer_range)
        missing = padded_vocabulary(config.vocab_size) - config.vocab_size
        self.table = nnx.Param(jnp.pad(drawn, ((0, missing), (0, 0))))


class MaskedLanguageModel(nnx.Module):
    """A dense layer, the activation and LayerNorm, then the output matrix and a bias for each token.

    As get_masked_lm_output of google-research/bert, run_pretraining.py.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.transform = _square(config, runtime, key, "transform")
        self.norm = _norm(config, runtime)
        self.bias = nnx.Param(jnp.zeros(padded_vocabulary(config.vocab_size)))
        if not config.tied_output:
            self.output = OutputTable(config, key=child_key(key, "output"))
        self.config = config
        self.runtime = runtime

    def __call__(self, vectors: Float[Array, "B M D"], tokens: Float[Array, "V D"]) -> Float[Array, "B M V"]:
        """float32 logits, by the token table where the output is tied to it; those of padding entries are -inf, so
        that no gradient reaches them."""
        rows = self.norm(activation(self.config.activation)(self.transform(vectors)))
        table = tokens if self.config.tied_output else self.output.table[...]
        return vocabulary_logits(rows, table, self.bias[...], self.config.vocab_size, self.runtime)


class LanguageModel(nnx.Module):
    """The output matrix over hidden states as they are (Radford et al. 2018, equation 2): left to right."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        if not config.tied_output:
            self.output = OutputTable(config, key=child_key(key, "output"))
        self.config = config
        self.runtime = runtime

    def __call__(self, vectors: Float[Array, "B M D"], tokens: Float[Array, "V D"]) -> Float[Array, "B M V"]:
        """As MaskedLanguageModel."""
        table = tokens if self.config.tied_output else self.output.table[...]
        return vocabulary_logits(vectors, table, None, self.config.vocab_size, self.runtime)


def vocabulary_logits(
    vectors: Float[Array, "B M D"],
    table: Float[Array, "V D"],
    bias: Float[Array, "V"] | None,
    vocab_size: int,
    runtime: Runtime,
) -> Float[Array, "B M V"]:
    """float32 products of vectors and the output matrix, -inf for the vocabulary's padding."""
    # Matrices, for the reason of layers.affine: the gradient of the table is the largest product of all.
    rows = vectors.reshape(-1, table.shape[1])
    logits = jnp.einsum(
        "rd,vd->rv",
        rows,
        table.astype(rows.dtype),
        precision=runtime.precision,
        preferred_element_type=jnp.float32,
    )
    in_vocabulary = jnp.arange(table.shape[0]) < vocab_size
    logits = jnp.where(in_vocabulary[None], logits if bias is None else add_bias(logits, bias), -jnp.inf)
    return logits.reshape(*vectors.shape[:2], -1)


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
