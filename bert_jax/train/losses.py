"""Loss functions for the outputs of the heads, computed as weighted sums over all labelled items.

Every function converts logits to float32, and an item with weight 0 contributes nothing. Losses
are sums and not means, because the train step divides once, by a count over the whole global
batch. Most functions return (loss, correct), where `correct` is the weighted number of correct
predictions; a tie between the label and another class counts as correct.

Classes can have weights and labels can be smoothed (ClassCosts). Losses, `correct` and
denominators (ClassCosts.weigh) then include the class weights, so that their quotient equals
torch.nn.functional.cross_entropy(weight=, label_smoothing=), whose mean divides by the weights of
the labels.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bert_jax.model.ops import operations
from bert_jax.model.vocabulary_product import VocabularyProduct
from bert_jax.train.vocabulary_chunks import chunked_sums

Scalar = Float[Array, ""]


@dataclass(frozen=True)
class ClassCosts:
    """Class weights and label smoothing of a cross-entropy loss.

    weights    one weight for each class, in class order; empty means 1 for every class
    smoothing  the target distribution is (1 - smoothing) * one-hot label + smoothing * uniform
               distribution (Szegedy et al. 2016, section 7)
    """

    weights: tuple[float, ...] = ()
    smoothing: float = 0.0

    def weigh(self, labels: Int[Array, "*shape"], weights: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Returns the weights of labelled items multiplied by the weights of their classes."""
        return weights * jnp.array(self.weights, jnp.float32)[labels] if self.weights else weights


PLAIN = ClassCosts()


def classification_sums(
    logits: Float[Array, "*shape C"],
    labels: Int[Array, "*shape"],
    weights: Float[Array, "*shape"],
    costs: ClassCosts = PLAIN,
) -> tuple[Scalar, Scalar]:
    """Returns the cross-entropy in nats and `correct` for classes, tags, tokens, span classes or relations."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    # The softmax needs the largest logit anyway; an argmax would be a second, slower pass over the classes.
    top = jax.lax.stop_gradient(logits).max(axis=-1)
    total = jax.nn.logsumexp(logits, axis=-1)
    weighed = costs.weigh(labels, weights)
    loss = ((total - picked) * weighed).sum()
    if costs.smoothing:
        of_class = jnp.array(costs.weights or (1.0,) * logits.shape[-1], jnp.float32) / logits.shape[-1]
        each = total[..., None] - logits
        uniform = jnp.einsum("...c,c->...", each, of_class, precision=jax.lax.Precision.HIGHEST)
        loss = (1 - costs.smoothing) * loss + costs.smoothing * (uniform * weights).sum()
    return loss, ((picked >= top) * weighed).sum()


class VocabularySums(NamedTuple):
    """classification_sums of tokens, and the squared logarithm of the sum of a vector's exponentiated logits.

    The squares are those of the z-loss (train/objectives/z_loss.py).
    """

    loss: Scalar
    correct: Scalar
    squares: Scalar


def vocabulary_sums(
    product: VocabularyProduct, labels: Int[Array, "B M"], weights: Float[Array, "B M"]
) -> VocabularySums:
    """Returns the sums of a token for each vector, over the vocabulary.

    The logits are never whole where the runtime has a vocabulary_chunk or the platform a vocabulary_piece, except where
    the vocabulary is sharded, which divides them already. The pieces are kept for the backward pass.
    """
    runtime = product.runtime
    chunk = runtime.vocabulary_chunk or operations(runtime).vocabulary_piece
    if not chunk or runtime.placement.shards_layers:
        logits = product.logits()
        squares = (jax.nn.logsumexp(logits, axis=-1) ** 2 * weights).sum()
        return VocabularySums(*classification_sums(logits, labels, weights), squares)
    rows = product.vectors.reshape(-1, product.vectors.shape[-1])
    sums = chunked_sums(
        rows,
        product.table,
        product.bias,
        labels.reshape(-1),
        weights.reshape(-1),
        vocab_size=product.vocab_size,
        chunk=chunk,
        precision=runtime.precision,
        unrolled=not runtime.vocabulary_chunk,
    )
    return VocabularySums(*sums)


def binary_sums(
    logits: Float[Array, "*shape"], labels: Int[Array, "*shape"], weights: Float[Array, "*shape"]
) -> tuple[Scalar, Scalar]:
    """Returns the binary cross-entropy in nats and `correct` at a threshold of 1/2; P(label 1) = sigmoid(logit)."""
    signed = jnp.where(labels > 0, logits, -logits).astype(jnp.float32)
    return (jax.nn.softplus(-signed) * weights).sum(), ((signed >= 0) * weights).sum()
