"""Losses of a student against the outputs and hidden states of its teacher; conventions as in bert_jax.train.losses.

They are summed in float32, and teachers get no gradient.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bert_jax.train.losses import Scalar

# torch.nn.CosineEmbeddingLoss adds this to the squared lengths.
COSINE_EPSILON = 1e-12


def soft_class_sum(
    logits: Float[Array, "*shape C"],
    teacher: Float[Array, "*shape C"],
    weights: Float[Array, "*shape"],
    temperature: float,
) -> Scalar:
    """Returns the weighted sum of T^2 KL(p || q) in nats, where p = softmax(teacher / T) and q = softmax(logits / T).

    The factor T^2 keeps the size of gradients about the same for any T (Hinton et al. 2015, section 2). Logits must be
    finite.
    """
    ours = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature)
    theirs = jax.nn.log_softmax(jax.lax.stop_gradient(teacher).astype(jnp.float32) / temperature)
    divergence = (jnp.exp(theirs) * (theirs - ours)).sum(axis=-1)
    return temperature**2 * (divergence * weights).sum()


def soft_binary_sum(
    logits: Float[Array, "*shape"], teacher: Float[Array, "*shape"], weights: Float[Array, "*shape"], temperature: float
) -> Scalar:
    """Returns soft_class_sum of the two classes whose probabilities are sigmoid(logit / T) and the rest."""
    ours, theirs = (jnp.stack([each, jnp.zeros_like(each)], axis=-1) for each in (logits, teacher))
    return soft_class_sum(ours, theirs, weights, temperature)


def squared_difference_sum(
    outputs: Float[Array, "*shape"], teacher: Float[Array, "*shape"], weights: Float[Array, "*shape"]
) -> Scalar:
    """Returns the weighted sum of squared differences between numbers that both predict."""
    difference = outputs.astype(jnp.float32) - jax.lax.stop_gradient(teacher).astype(jnp.float32)
    return (jnp.square(difference) * weights).sum()


def hidden_sum(
    kind: str, states: Float[Array, "B T D"], teacher: Float[Array, "B T D"], weights: Float[Array, "B T"]
) -> Scalar:
    """Returns the weighted sum over positions of the distance between hidden states.

    kind   cosine: 1 - cos (Sanh et al. 2019, section 3); mse: the mean over D of squared differences (Jiao et al. 2020,
           equation 8)
    """
    ours, theirs = states.astype(jnp.float32), jax.lax.stop_gradient(teacher).astype(jnp.float32)
    if kind == "mse":
        return (jnp.square(ours - theirs).mean(axis=-1) * weights).sum()
    lengths = [jnp.square(each).sum(axis=-1) + COSINE_EPSILON for each in (ours, theirs)]
    cosine = (ours * theirs).sum(axis=-1) * jax.lax.rsqrt(lengths[0] * lengths[1])
    return ((1 - cosine) * weights).sum()
