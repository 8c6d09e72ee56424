"""Dense and LayerNorm: what every other module is made of.

Modules hold parameters and nothing that changes. `stack` is a leading shape, (L,) for the layers of the
encoder, whose one stored form is stacked; a module is called on a slice of it (encoder.py).
"""

import functools
import math
import zlib

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from bert_jax.model.runtime import Runtime

Shape = tuple[int, ...]


def child_key(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """The key of a part by its name, so that no other part changes a parameter's initial value."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def truncated_normal(key: PRNGKeyArray, shape: Shape, deviation: float) -> Float[Array, "..."]:
    """Normal values cut off at two deviations, not rescaled (google-research/bert, create_initializer)."""
    return deviation * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


class Dense(nnx.Module):
    """A matmul over the last axes of its input, and a bias unless it has none.

    kernel [*stack, *in, *out], bias [*stack, *out]
    """

    def __init__(
        self,
        inputs: Shape,
        outputs: Shape,
        *,
        deviation: float,
        runtime: Runtime,
        key: PRNGKeyArray,
        stack: Shape = (),
        bias: bool = True,
    ) -> None:
        self.kernel = nnx.Param(truncated_normal(child_key(key, "kernel"), stack + inputs + outputs, deviation))
        self.bias = nnx.Param(jnp.zeros(stack + outputs)) if bias else None
        self.input_axes = len(inputs)
        self.runtime = runtime

    def __call__(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """[..., *in] to [..., *out], in the compute dtype unless another is asked."""
        bias = None if self.bias is None else self.bias[...]
        return affine(x, self.kernel[...], bias, self.input_axes, self.runtime, dtype)


def affine(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    bias: Float[Array, "..."] | None,
    input_axes: int,
    runtime: Runtime,
    dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """The product of x [..., *in] and kernel [*in, *out], plus any bias [*out]; in is input_axes long.

    On a TPU a product of the arrays as they are: the compiler then lays the output out as what follows wants it, where
    a product of matrices, and a reshape, are followed by copies (a third of a layer's time, by its own cycles). Else a
    product of two matrices, so that the kernel's gradient is one as well: with several row axes XLA on a CPU transposes
    the activations for it in a pass of their own.
    """
    wide = dtype or runtime.dtype
    x, kernel = x.astype(runtime.dtype), kernel.astype(runtime.dtype)
    # Where heads lie on several devices, N of [D, 3, N, H] cannot be merged with what is before it either.
    if runtime.on_tpu or runtime.placement.cuts_layers:
        product = jnp.tensordot(x, kernel, input_axes, precision=runtime.precision, preferred_element_type=wide)
        return product if bias is None else add_bias(product, bias)
    leading, outputs = x.shape[: x.ndim - input_axes], kernel.shape[input_axes:]
    inputs = math.prod(kernel.shape[:input_axes])
    product = jnp.matmul(
        x.reshape(-1, inputs), kernel.reshape(inputs, -1), precision=runtime.precision, preferred_element_type=wide
    )
    if bias is not None:
        product = add_bias_by_product(product, bias.reshape(-1))
    return product.reshape(leading + outputs)


@jax.custom_vjp
def add_bias(x: Float[Array, "*rows_and_out"], bias: Float[Array, "*out"]) -> Float[Array, "*rows_and_out"]:
    """x plus a bias of its last axes, in the dtype of x; the bias's gradient is summed in float32."""
    return x + jnp.expand_dims(bias.astype(x.dtype), range(x.ndim - bias.ndim))


def _add_bias_forward(x: Array, bias: Array) -> tuple[Array, tuple[None, ...]]:
    return add_bias(x, bias), (None,) * bias.ndim


def _add_bias_backward(outputs: tuple[None, ...], gradient: Array) -> tuple[Array, Array]:
    rows = tuple(range(gradient.ndim - len(outputs)))
    return gradient, gradient.sum(axis=rows, dtype=jnp.float32)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def add_bias_by_product(
    x: Float[Array, "*rows_and_out"], bias: Float[Array, "*out"], copies: int = 1
) -> Float[Array, "*rows_and_out"]:
    """The same, the bias's gradient as a product with rows of ones, as many as `copies`, of which one is used.

    On a CPU one row takes a tenth of the time of XLA's reduction. On a TPU eight rows, which its matrix unit takes at a
    time, take a sixth, where no product before the reduction could do it along.
    """
    return x + jnp.expand_dims(bias.astype(x.dtype), range(x.ndim - bias.ndim))


def _by_product_forward(x: Array, bias: Array, copies: int) -> tuple[Array, tuple[None, ...]]:
    return add_bias_by_product(x, bias, copies), (None,) * bias.ndim


def _by_product_backward(copies: int, outputs: tuple[None, ...], gradient: Array) -> tuple[Array, Array]:
    rows = gradient.shape[: gradient.ndim - len(outputs)]
    ones = jnp.ones((copies, *rows), gradient.dtype)
    # A product of ones and bfloat16 values is exact as it is.
    precision = jax.lax.Precision.HIGHEST if gradient.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    sums = jnp.tensordot(ones, gradient, len(rows), precision=precision, preferred_element_type=jnp.float32)
    return gradient, sums[0]


add_bias_by_product.defvjp(_by_product_forward, _by_product_backward)


class LayerNorm(nnx.Module):
    """Layer normalization over the width in float32 (Ba et al. 2016): scale [*stack, D], bias [*stack, D] if any."""

    def __init__(self, width: int, *, epsilon: float, runtime: Runtime, stack: Shape = (), bias: bool = True) -> None:
        self.scale = nnx.Param(jnp.ones((*stack, width)))
        self.bias = nnx.Param(jnp.zeros((*stack, width))) if bias else None
        self.epsilon = epsilon
        self.runtime = runtime

    def __call__(self, x: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        scale, bias = self.scale[...], None if self.bias is None else self.bias[...]
        if self.runtime.compute_dtype == "bfloat16":
            return layer_norm_narrow(x, scale, bias, self.epsilon, "bfloat16")
        wide = x.astype(jnp.float32)
        centered = wide - wide.mean(axis=-1, keepdims=True)
        variance = jnp.square(centered).mean(axis=-1, keepdims=True)
        normal = centered * jax.lax.rsqrt(variance + self.epsilon) * _by_row(scale, x.ndim)
        return normal if bias is None else normal + _by_row(bias, x.ndim)


def _by_row(vector: Float[Array, " D"], axes: int) -> Float[Array, "..."]:
    return jnp.expand_dims(vector, range(axes - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm_narrow(
    x: Float[Array, "*shape D"], scale: Float[Array, " D"], bias: Float[Array, " D"] | None, epsilon: float, dtype: str
) -> Float[Array, "*shape D"]:
    """Layer normalization in float32 of what is stored in less, the result in dtype.

    Both sums are of one pass, which XLA does within the product before; with a mean of 100 deviations that loses
    nothing yet that bfloat16 has not lost of x. The backward pass keeps x and two numbers a row, where autodiff would
    keep three float32 arrays.
    """
    return _normalized(x, scale, bias, epsilon, dtype)[0]


def _normalized(
    x: Array, scale: Array, bias: Array | None, epsilon: float, dtype: str
) -> tuple[Array, tuple[Array, Array]]:
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True)
    variance = jnp.maximum(jnp.square(wide).mean(axis=-1, keepdims=True) - jnp.square(mean), 0.0)
    inverse = jax.lax.rsqrt(variance + epsilon)
    normal = (wide - mean) * inverse * _by_row(scale, x.ndim)
    return (normal if bias is None else normal + _by_row(bias, x.ndim)).astype(dtype), (mean, inverse)


def _norm_forward(x: Array, scale: Array, bias: Array | None, epsilon: float, dtype: str) -> tuple[Array, tuple]:
    normal, statistics = _normalized(x, scale, bias, epsilon, dtype)
    return normal, (x, scale, bias is not None, *statistics)


def _norm_backward(epsilon: float, dtype: str, kept: tuple, gradient: Array) -> tuple[Array, Array, Array | None]:
    x, scale, has_bias, mean, inverse = kept
    wide, rows = gradient.astype(jnp.float32), tuple(range(x.ndim - 1))
    normal = (x.astype(jnp.float32) - mean) * inverse
    scaled = wide * _by_row(scale, x.ndim)
    along = (scaled * normal).mean(axis=-1, keepdims=True)
    change = inverse * (scaled - scaled.mean(axis=-1, keepdims=True) - normal * along)
    return change.astype(x.dtype), (wide * normal).sum(rows), wide.sum(rows) if has_bias else None


layer_norm_narrow.defvjp(_norm_forward, _norm_backward)
