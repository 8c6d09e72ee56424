"""What stands between the two products of a feed-forward layer, by name."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def activation(name: str) -> Callable[[Array], Array]:
    """The function that `model.activation` names (config.MODEL_CHOICES); elementwise, in the dtype of its argument."""
    return _BY_NAME[name]


def gelu_tanh(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """GELU by a tanh (Hendrycks and Gimpel 2016, section 2), as google-research/bert and GPT-2 compute it."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def gelu_sigmoid(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """GELU by a sigmoid: x sigmoid(1.702 x) (Hendrycks and Gimpel 2016, section 2)."""
    wide = x.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(1.702 * wide)).astype(x.dtype)


@jax.custom_vjp
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x times the normal distribution function of x, exactly (Hendrycks and Gimpel 2016): BERT's activation.

    In float32 inside. The backward pass keeps x alone and computes the distribution function again; autodiff
    would keep three arrays.
    """
    wide = x.astype(jnp.float32)
    return (wide * _normal_distribution(wide)).astype(x.dtype)


def _normal_distribution(x: Array) -> Array:
    return 0.5 * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


def _gelu_forward(x: Array) -> tuple[Array, Array]:
    return gelu(x), x


def _gelu_backward(x: Array, gradient: Array) -> tuple[Array]:
    # Else XLA keeps the forward pass's distribution after all. The gradient is left free, to be fused with its product.
    return _gelu_again_backward(jax.lax.optimization_barrier(x), gradient)


def _gelu_again_backward(x: Array, gradient: Array) -> tuple[Array]:
    wide = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(wide)) * (1.0 / math.sqrt(2.0 * math.pi))
    slope = _normal_distribution(wide) + wide * density
    return ((gradient.astype(jnp.float32) * slope).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


@jax.custom_vjp
def gelu_again(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """gelu for what jax.checkpoint computes again: that keeps the forward pass's values out by itself."""
    return gelu(x)


gelu_again.defvjp(_gelu_forward, _gelu_again_backward)

_BY_NAME: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_sigmoid": gelu_sigmoid,
    "relu": jax.nn.relu,
}
