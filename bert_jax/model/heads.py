"""What stands on the encoder: pooler, masked language model, next sentence, classifier, tagger."""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.model.dropout import dropout
from bert_jax.model.layers import Dense, LayerNorm, add_bias, child_key, gelu
from bert_jax.model.runtime import Runtime
from bert_jax.shapes import padded_vocabulary

NEXT_SENTENCE_CLASSES = 2  # is next, random


@dataclass(frozen=True)
class Heads:
    """Which heads a model has. classes and tags count outputs, 0 for none; classes=1 is a regression.

    Raises UserError when a head that reads the pooled vector comes without the pooler.
    """

    mlm: bool = False
    next_sentence: bool = False
    pooler: bool = False
    classes: int = 0
    tags: int = 0

    def __post_init__(self) -> None:
        if (self.next_sentence or self.classes) and not self.pooler:
            raise UserError("heads.next_sentence and heads.classes read the pooled vector; set heads.pooler=True")


class Pooler(nnx.Module):
    """tanh of a dense layer over a [CLS] vector (google-research/bert, modeling.py)."""

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.dense = Dense(
            (config.width,),
            (config.width,),
            deviation=config.initializer_range,
            runtime=runtime,
            key=child_key(key, "dense"),
        )

    def __call__(self, vectors: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        return jnp.tanh(self.dense(vectors))


class MaskedLanguageModel(nnx.Module):
    """A dense layer, GELU and LayerNorm, then the token table as output matrix.

    As get_masked_lm_output of google-research/bert, run_pretraining.py.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.transform = Dense(
            (config.width,),
            (config.width,),
            deviation=config.initializer_range,
            runtime=runtime,
            key=child_key(key, "transform"),
        )
        self.norm = LayerNorm(config.width, epsilon=config.layer_norm_epsilon, runtime=runtime)
        self.bias = nnx.Param(jnp.zeros(padded_vocabulary(config.vocab_size)))
        self.vocab_size = config.vocab_size
        self.runtime = runtime

    def __call__(self, vectors: Float[Array, "B M D"], table: Float[Array, "V D"]) -> Float[Array, "B M V"]:
        """float32 logits; those of padding entries are -inf, so that no gradient reaches them."""
        rows = self.norm(gelu(self.transform(vectors))).reshape(-1, table.shape[1])
        # Matrices, for the reason of layers.affine: the gradient of the table is the largest product of all.
        logits = jnp.einsum(
            "rd,vd->rv",
            rows,
            table.astype(rows.dtype),
            precision=self.runtime.precision,
            preferred_element_type=jnp.float32,
        )
        in_vocabulary = jnp.arange(table.shape[0]) < self.vocab_size
        logits = jnp.where(in_vocabulary[None], add_bias(logits, self.bias[...]), -jnp.inf)
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
