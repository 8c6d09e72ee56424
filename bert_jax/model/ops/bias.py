"""The addition of a bias, with two forms of its gradient. Which form is faster depends on the platform."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def add_bias(x: Float[Array, "*rows_and_out"], bias: Float[Array, "*out"]) -> Float[Array, "*rows_and_out"]:
    """x plus a bias over its last axes, in the dtype of x. The bias gradient is a sum in float32."""
    return x + jnp.expand_dims(bias.astype(x.dtype), range(x.ndim - bias.ndim))


def _add_bias_forward(x: Array, bias: Array) -> tuple[Array, tuple[None, ...]]:
    return add_bias(x, bias), (None,) * bias.ndim


def _add_bias_backward(outputs: tuple[None, ...], gradient: Array) -> tuple[Array, Array]:
    rows = tuple(range(gradient.ndim - len(outputs)))
    return gradient, gradient.sum(axis=rows, dtype=jnp.float32)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def add_bias_by_matmul(
    x: Float[Array, "*rows_and_out"], bias: Float[Array, "*out"], copies: int = 1
) -> Float[Array, "*rows_and_out"]:
    """The same, with the bias gradient as a matmul with `copies` rows of ones, of which one row is used.

    On a CPU one row takes a tenth of the time of XLA's reduction. On a TPU eight rows, which its matrix unit takes at
    a time, take a sixth where no matmul before the reduction could absorb it.
    """
    return x + jnp.expand_dims(bias.astype(x.dtype), range(x.ndim - bias.ndim))


def _by_matmul_forward(x: Array, bias: Array, copies: int) -> tuple[Array, tuple[None, ...]]:
    return add_bias_by_matmul(x, bias, copies), (None,) * bias.ndim


def _by_matmul_backward(copies: int, outputs: tuple[None, ...], gradient: Array) -> tuple[Array, Array]:
    rows = gradient.shape[: gradient.ndim - len(outputs)]
    ones = jnp.ones((copies, *rows), gradient.dtype)
    # A matmul of ones and bfloat16 values is exact at the default precision.
    precision = jax.lax.Precision.HIGHEST if gradient.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    sums = jnp.tensordot(ones, gradient, len(rows), precision=precision, preferred_element_type=jnp.float32)
    return gradient, sums[0]


add_bias_by_matmul.defvjp(_by_matmul_forward, _by_matmul_backward)
