"""The parts of replaced token detection: a generator of replacements, and the detector's head (Clark et al. 2020)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.model.activations import activation
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads.classification import dense
from bert_jax.model.heads.language_model import MaskedLanguageModel
from bert_jax.model.layers import Dense, child_key
from bert_jax.model.runtime import Runtime
from bert_jax.model.token_positions import is_unpacked


class ReplacedTokens(nnx.Module):
    """A dense layer, the activation, and a dense layer to one logit: that the token is not the original.

    As get_discriminator_output of google-research/electra, run_pretraining.py.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.dense = dense(config, config.width, runtime=runtime, key=child_key(key, "dense"))
        deviation = config.initializer_range
        self.output = Dense((config.width,), (1,), deviation=deviation, runtime=runtime, key=child_key(key, "output"))
        self.activation = activation(config.activation)

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """float32 logits."""
        return self.output(self.activation(self.dense(hidden)), dtype=jnp.float32)[..., 0]


class Generator(nnx.Module):
    """A narrower encoder over the model's embeddings, and a head of masked tokens with the model's token table.

    It has as many layers as the model and heads of the same width where these divide its width (Clark et al. 2020,
    section 3.2 and table 6). A dense layer leads from the embeddings to its width where the two differ.
    """

    def __init__(self, config: ModelConfig, width: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.config = generator_config(config, width)
        if self.config.embedding_width:
            inputs = self.config.embedding_width
            self.projection = dense(self.config, inputs, runtime=runtime, key=child_key(key, "projection"))
        self.encoder = Encoder(self.config, runtime=runtime, key=child_key(key, "encoder"))
        self.mlm_head = MaskedLanguageModel(self.config, runtime=runtime, key=child_key(key, "mlm_head"))

    def __call__(
        self,
        embedded: Float[Array, "B T E"],
        batch: Any,
        masked_positions: Int[Array, "B M"],
        tokens: Float[Array, "V E"],
        dropout_key: PRNGKeyArray | None,
    ) -> Float[Array, "B M V"]:
        """float32 logits of the tokens at M positions of each row."""
        hidden = self.projection(embedded) if self.config.embedding_width else embedded
        vectors = self.encoder.at_positions(
            hidden,
            batch.sequence_ids,
            batch.positions,
            masked_positions,
            dropout_key,
            unpacked=is_unpacked(batch),
        )
        return self.mlm_head(vectors, tokens)


def generator_config(config: ModelConfig, width: int) -> ModelConfig:
    """The architecture of a model's generator of that width. Raises UserError for a width that no heads divide."""
    head_width = config.width // config.heads
    if width % head_width and width > head_width:
        raise UserError(
            f"a generator of width {width} cannot have heads of width {head_width}, as the model does; choose a "
            "config.generator_size that gives a multiple"
        )
    return dataclasses.replace(
        config,
        width=width,
        heads=max(1, width // head_width),
        feed_forward=config.feed_forward * width // config.width,
        embedding_width=config.table_width if width != config.table_width else 0,
        tied_output=True,
    )
