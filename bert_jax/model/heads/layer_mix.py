"""A learned mix of the embeddings and of all layers, as the input of other heads."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class LayerMix(nnx.Module):
    """gamma * sum_j softmax(s)_j h_j, over embeddings h_0 and layers h_1 to h_L (Peters et al. 2018, equation 1).

    scores [L + 1] are s, gamma [1] scales the mix. They begin as the mean of all layers. The layers are not normalized
    before, which section 3.2 has as an option.
    """

    def __init__(self, count: int) -> None:
        self.scores = nnx.Param(jnp.zeros(count))
        self.gamma = nnx.Param(jnp.ones(1))

    def __call__(self, states: Float[Array, "J *shape D"]) -> Float[Array, "*shape D"]:
        """Returns the mix, summed in float32, in the dtype of the states."""
        factors = self.gamma[...] * self.weights()
        mixed = jnp.tensordot(factors, states.astype(jnp.float32), axes=1, precision=jax.lax.Precision.HIGHEST)
        return mixed.astype(states.dtype)

    def weights(self) -> Float[Array, " J"]:
        """Returns softmax(s), the weights of the embeddings and of the layers from the lowest to the highest."""
        return jax.nn.softmax(self.scores[...])
