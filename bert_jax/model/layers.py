"""Dense, LayerNorm and GELU: what every other module is made of.

Modules hold parameters and nothing that changes. `stack` is a leading shape, (L,) for the layers of the encoder,
whose one stored form is stacked; a module is called on a slice of it (encoder.py).
"""

import math
import zlib

import jax
import jax.numpy as jnp
from flax import nnx
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
    """A matmul over the last axes of its input, plus a bias: kernel [*stack, *inputs, *outputs], bias [*stack, *outputs]."""

    def __init__(
        self,
        inputs: Shape,
        outputs: Shape,
        *,
        deviation: float,
        runtime: Runtime,
        key: PRNGKeyArray,
        stack: Shape = (),
    ) -> None:
        self.kernel = nnx.Param(
            truncated_normal(child_key(key, "kernel"), stack + inputs + outputs, deviation)
        )
        self.bias = nnx.Param(jnp.zeros(stack + outputs))
        self.input_axes = len(inputs)
        self.runtime = runtime

    def __call__(self, x: Float[Array, "..."], dtype: jnp.dtype | None = None) -> Float[Array, "..."]:
        """[..., *inputs] to [..., *outputs], in the compute dtype unless another is asked."""
        compute = self.runtime.dtype
        product = jax.lax.dot_general(
            x.astype(compute),
            self.kernel[...].astype(compute),
            dimension_numbers=(
                (tuple(range(x.ndim - self.input_axes, x.ndim)), tuple(range(self.input_axes))),
                ((), ()),
            ),
            precision=self.runtime.precision,
            preferred_element_type=dtype or compute,
        )
        bias = self.bias[...].astype(product.dtype)
        return product + jnp.expand_dims(bias, tuple(range(product.ndim - bias.ndim)))


class LayerNorm(nnx.Module):
    """Layer normalization over the width in float32 (Ba et al. 2016): scale [*stack, D], bias [*stack, D]."""

    def __init__(self, width: int, *, epsilon: float, runtime: Runtime, stack: Shape = ()) -> None:
        self.scale = nnx.Param(jnp.ones((*stack, width)))
        self.bias = nnx.Param(jnp.zeros((*stack, width)))
        self.epsilon = epsilon
        self.runtime = runtime

    def __call__(self, x: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        wide = x.astype(jnp.float32)
        centered = wide - wide.mean(axis=-1, keepdims=True)
        variance = jnp.square(centered).mean(axis=-1, keepdims=True)
        axes = tuple(range(x.ndim - 1))
        scale, bias = (jnp.expand_dims(part[...], axes) for part in (self.scale, self.bias))
        return (centered * jax.lax.rsqrt(variance + self.epsilon) * scale + bias).astype(self.runtime.dtype)


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x times the normal distribution function of x, exactly (Hendrycks and Gimpel 2016): BERT's activation."""
    return x * (0.5 * (1.0 + jax.lax.erf(x * math.sqrt(0.5))))
