"""The activations between the two matmuls of a feed-forward layer, by name."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

_DENSITY_AT_0 = 1.0 / math.sqrt(2.0 * math.pi)


@functools.cache  # modules of equal configuration hold the same function, and are equal to jit
def activation(name: str, *, again: bool = False) -> Callable[[Array], Array]:
    """Returns the function that `model.activation` names (config.MODEL_CHOICES).

    It is elementwise, in the dtype of its argument.

    gelu          x times the normal distribution function of x, exactly: BERT's
    gelu_tanh     GELU by a tanh, as google-research/bert and GPT-2 compute it
    gelu_sigmoid  GELU by a sigmoid: x sigmoid(1.702 x)
    relu          max(x, 0)

    GELUs follow Hendrycks and Gimpel 2016, section 2. They are computed in float32, and their backward pass keeps x
    only, where autodiff would keep three arrays. `again` is for functions under jax.checkpoint, which recomputes them
    anyway.
    """
    if name == "relu":
        return jax.nn.relu
    return _lean(*_BY_NAME[name], again)


def _lean(value: Callable[[Array], Array], slope: Callable[[Array], Array], again: bool) -> Callable[[Array], Array]:
    """Returns a function given by its value and slope in float32, whose backward pass keeps the argument only."""

    @jax.custom_vjp
    def function(x: Array) -> Array:
        return value(x.astype(jnp.float32)).astype(x.dtype)

    def forward(x: Array) -> tuple[Array, Array]:
        return function(x), x

    def backward(x: Array, gradient: Array) -> tuple[Array]:
        # The barrier stops XLA from keeping values of the forward pass. The gradient has none, so that it can be fused
        # with the matmul that computes it.
        wide = (x if again else jax.lax.optimization_barrier(x)).astype(jnp.float32)
        return ((gradient.astype(jnp.float32) * slope(wide)).astype(x.dtype),)

    function.defvjp(forward, backward)
    return function


def _gelu(x: Array) -> Array:
    return x * _normal_distribution(x)


def _gelu_slope(x: Array) -> Array:
    return _normal_distribution(x) + x * (jnp.exp(-0.5 * jnp.square(x)) * _DENSITY_AT_0)


def _normal_distribution(x: Array) -> Array:
    return 0.5 * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


_CUBIC, _LINEAR = 0.044715, 2.0 * _DENSITY_AT_0


def _gelu_tanh(x: Array) -> Array:
    tanh = jnp.tanh(x * (_LINEAR + (_LINEAR * _CUBIC) * jnp.square(x)))
    return x * (0.5 + 0.5 * tanh)


def _gelu_tanh_slope(x: Array) -> Array:
    # As few operations as possible: on TPUs they delay the matmuls that they are fused with
    # (docs/decisions/planning_and_accelerators.md).
    square = jnp.square(x)
    tanh = jnp.tanh(x * (_LINEAR + (_LINEAR * _CUBIC) * square))
    change = x * (_LINEAR + (3.0 * _LINEAR * _CUBIC) * square)  # x times the derivative of tanh's argument
    return 0.5 + 0.5 * (tanh + (1.0 - jnp.square(tanh)) * change)


_LOGISTIC = 1.702


def _gelu_sigmoid(x: Array) -> Array:
    return x * jax.nn.sigmoid(_LOGISTIC * x)


def _gelu_sigmoid_slope(x: Array) -> Array:
    share = jax.nn.sigmoid(_LOGISTIC * x)
    return share * (1.0 + _LOGISTIC * x * (1.0 - share))


_BY_NAME: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "gelu": (_gelu, _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "gelu_sigmoid": (_gelu_sigmoid, _gelu_sigmoid_slope),
}
