"""Heads that predict tokens: masked ones, next ones, span boundaries, and replaced ones (ELECTRA)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.embeddings import Embedding, is_unpacked, token_table
from bert_jax.model.heads.basic import biased_dense
from bert_jax.model.layers import activation, child_key, dense, norm
from bert_jax.model.ops import VocabularyProduct, look_up_by_matmul
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import Encoder
from bert_jax.shapes import padded_vocabulary

# facebookresearch/SpanBERT, pair_bert.py: max_targets and position_embedding_size. Tokens further into a span are not
# predicted.
SPAN_PLACES = 20
SPAN_PLACE_WIDTH = 200


class MaskedLanguageModel(nnx.Module):
    """A dense layer, the activation and LayerNorm, then the output matrix and a bias for each token.

    As get_masked_lm_output of google-research/bert, run_pretraining.py. The dense layer leads to the width of the
    embeddings if they have their own (Lan et al. 2020).
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        width = config.table_width
        self.transform = dense(config, config.width, width, runtime=runtime, key=child_key(key, "transform"))
        self.norm = norm(config, width, runtime=runtime)
        self.bias = nnx.Param(jnp.zeros(padded_vocabulary(config.vocab_size)))
        if not config.tied_output:
            self.output = token_table(config, child_key(key, "output"))
        self.config = config
        self.runtime = runtime

    def product(self, vectors: Float[Array, "B M D"], tokens: Float[Array, "V E"]) -> VocabularyProduct:
        """Returns the logits before they are computed, by the token table if model.tied_output is set."""
        rows = self.norm(activation(self.config.activation)(self.transform(vectors)))
        table = tokens if self.config.tied_output else self.output.table[...]
        return VocabularyProduct(rows, table, self.bias[...], self.config.vocab_size, self.runtime)


class LanguageModel(nnx.Module):
    """The output matrix applied to a causal model's hidden states (Radford et al. 2018, equation 2).

    A dense layer comes first if the embeddings have a width of their own. The two directions of an encoder share the
    parameters (Peters et al. 2018, section 3.1).
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        if config.embedding_width:
            widths = config.layer_width, config.embedding_width
            self.projection = dense(config, *widths, runtime=runtime, key=child_key(key, "projection"))
        if not config.tied_output:
            self.output = token_table(config, child_key(key, "output"))
        self.config = config
        self.runtime = runtime

    def product(self, vectors: Float[Array, "B M D"], tokens: Float[Array, "V E"]) -> VocabularyProduct:
        """Does the same as MaskedLanguageModel.product."""
        table = tokens if self.config.tied_output else self.output.table[...]
        rows = self.projection(vectors) if self.config.embedding_width else vectors
        return VocabularyProduct(rows, table, None, self.config.vocab_size, self.runtime)


class SpanBoundary(nnx.Module):
    """Predicts masked tokens from the hidden states on both sides of their span, and from their offset in it.

    Two layers of dense, activation and norm over [left; right; offset], then the masked-token output matrix (Joshi
    et al. 2020, section 3.2), and a bias for each token (SpanBERT's code).
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        width = config.table_width
        self.position = Embedding(config, SPAN_PLACES, SPAN_PLACE_WIDTH, key=child_key(key, "position"))
        inputs = 2 * config.width + SPAN_PLACE_WIDTH
        self.first = dense(config, inputs, runtime=runtime, key=child_key(key, "first"))
        self.first_norm = norm(config, runtime=runtime)
        self.second = dense(config, config.width, width, runtime=runtime, key=child_key(key, "second"))
        self.second_norm = norm(config, width, runtime=runtime)
        self.bias = nnx.Param(jnp.zeros(padded_vocabulary(config.vocab_size)))
        self.config = config
        self.runtime = runtime

    def __call__(
        self,
        left: Float[Array, "B M D"],
        right: Float[Array, "B M D"],
        offsets: Int[Array, "B M"],
        table: Float[Array, "V E"],
    ) -> VocabularyProduct:
        """Returns the logits before they are computed. Offsets in the span count from 1."""
        # Fillers (offset 0) and offsets past the table get some row: the loss gives both the weight 0.
        places = look_up_by_matmul(self.position.table[...], jnp.clip(offsets - 1, 0, SPAN_PLACES - 1))
        joined = jnp.concatenate([left, right, places.astype(left.dtype)], axis=-1)
        function = activation(self.config.activation)
        hidden = self.first_norm(function(self.first(joined)))
        hidden = self.second_norm(function(self.second(hidden)))
        return VocabularyProduct(hidden, table, self.bias[...], self.config.vocab_size, self.runtime)


class ReplacedTokens(nnx.Module):
    """A dense layer, the activation, and a dense layer to one logit: the token is not the original.

    As get_discriminator_output of google-research/electra, run_pretraining.py.
    """

    def __init__(self, config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.dense = dense(config, config.width, runtime=runtime, key=child_key(key, "dense"))
        self.output = biased_dense(config, config.width, 1, runtime=runtime, key=child_key(key, "output"))
        self.activation = activation(config.activation)

    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        return self.output(self.activation(self.dense(hidden)), dtype=jnp.float32)[..., 0]


class Generator(nnx.Module):
    """A narrower encoder over the model's embeddings, and a masked-token head with the model's token table.

    It has as many layers as the model, and heads of the same width if these divide its width (Clark et al. 2020,
    section 3.2 and table 6). A dense layer leads to its width if that differs from the embeddings'.
    """

    def __init__(self, config: ModelConfig, width: int, *, runtime: Runtime, key: PRNGKeyArray) -> None:
        self.config = generator_config(config, width)
        if width := self.config.embedding_width:
            self.projection = dense(self.config, width, runtime=runtime, key=child_key(key, "projection"))
        self.encoder = Encoder(self.config, runtime=runtime, key=child_key(key, "encoder"))
        self.mlm_head = MaskedLanguageModel(self.config, runtime=runtime, key=child_key(key, "mlm_head"))

    def __call__(
        self,
        embedded: Float[Array, "B T E"],
        batch: Any,
        masked_positions: Int[Array, "B M"],
        tokens: Float[Array, "V E"],
        dropout_key: DropoutKey,
    ) -> Float[Array, "B M V"]:
        """Returns float32 token logits at each row's M positions."""
        hidden, places = embedded, (batch.sequence_ids, batch.positions, masked_positions)
        if self.config.embedding_width:
            hidden = self.projection(embedded)
        # Nothing reads the generator's states at other positions, so its last layer leaves them out.
        vectors = self.encoder.at_positions(hidden, *places, dropout_key, unpacked=is_unpacked(batch))
        return self.mlm_head.product(vectors, tokens).logits()


def generator_config(config: ModelConfig, width: int) -> ModelConfig:
    """Returns the architecture of a model's generator.

    Raises:
        UserError: heads as wide as the model's do not divide `width`.
    """
    # The generator keeps the width of heads and changes their number. One narrower than a head has a single one.
    head_width = config.width // config.heads
    if width % head_width and width > head_width:
        raise UserError(
            f"a generator of width {width} cannot have heads of width {head_width}, as the model does; choose a "
            "config.objective.generator_size that gives a multiple"
        )
    # Its embeddings are the model's, so a width of its own takes a projection.
    return dataclasses.replace(
        config,
        width=width,
        heads=max(1, width // head_width),
        feed_forward=config.feed_forward * width // config.width,
        embedding_width=config.table_width if width != config.table_width else 0,
        tied_output=True,
    )
