"""Dense and LayerNorm, the parts of every other module; activations by name; parameter trees as flat dicts of paths.

Modules hold parameters and no changing state. `stack` is a leading shape: (L,) for the layers of the encoder, which are
stored stacked. A module is called on one layer's slice of its parameters (transformer.py).
"""

import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.model.ops import operations
from bert_jax.model.runtime import Runtime

# Checkpoints, name tables and the rules for decay and sharding name a parameter by its path: the leaf of
# {"encoder": {"norm": x}} is `encoder/norm`.
SEPARATOR = "/"
Shape = tuple[int, ...]


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a nested dict's leaves by path, sorted."""
    # Sorted, so that equal trees give equal dicts, in whatever order they were built.
    return dict(sorted(traverse_util.flatten_dict(nested, sep=SEPARATOR).items()))


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested dict whose flat form this is.

    Raises:
        ValueError: one path is the folder of another.
    """
    for path in flat:
        for end, letter in enumerate(path):
            if letter == SEPARATOR and path[:end] in flat:
                raise ValueError(f"parameter path {path!r} goes through the parameter {path[:end]!r}")
    return traverse_util.unflatten_dict(dict(flat), sep=SEPARATOR)


def child_key(key: PRNGKeyArray, name: str) -> PRNGKeyArray:
    """Derives a part's key by its name, so that no other part changes a parameter's initial value."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def truncated_normal(key: PRNGKeyArray, shape: Shape, deviation: float) -> Float[Array, "..."]:
    """Samples a normal distribution cut off at two deviations, not rescaled (google-research/bert, modeling.py)."""
    return deviation * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


class Dense(nnx.Module):
    """A matmul over the last axes of its input, and any bias: kernel [*stack, *in, *out], bias [*stack, *out]."""

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
        """Maps [..., *in] to [..., *out], in the compute dtype unless another is given."""
        bias = None if self.bias is None else self.bias[...]
        return operations(self.runtime).dense(x, self.kernel[...], bias, self.input_axes, dtype)


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
            split = operations(self.runtime).splits_norm_gradient
            return layer_norm_narrow(x, scale, bias, self.epsilon, "bfloat16", split)
        # Two passes: float32 has bits to lose if the mean is much larger than the deviation.
        wide = x.astype(jnp.float32)
        centered = wide - wide.mean(axis=-1, keepdims=True)
        variance = jnp.square(centered).mean(axis=-1, keepdims=True)
        normal = centered * jax.lax.rsqrt(variance + self.epsilon) * _by_row(scale, x.ndim)
        return normal if bias is None else normal + _by_row(bias, x.ndim)


def dense(config: ModelConfig, inputs: int, outputs: int = 0, *, runtime: Runtime, key: PRNGKeyArray) -> Dense:
    """Makes a dense layer to the model's width or to `outputs`; it has a bias if the encoder's layers do."""
    shapes, deviation = ((inputs,), (outputs or config.width,)), config.initializer_range
    return Dense(*shapes, deviation=deviation, runtime=runtime, key=key, bias=config.bias)


def norm(config: ModelConfig, width: int = 0, *, runtime: Runtime, stack: Shape = ()) -> LayerNorm:
    """Makes a norm over the model's width or another; it has a bias if the encoder's layers do."""
    epsilon = config.layer_norm_epsilon
    return LayerNorm(width or config.width, epsilon=epsilon, runtime=runtime, stack=stack, bias=config.bias)


def _by_row(vector: Float[Array, " D"], axes: int) -> Float[Array, "..."]:
    # Rank promotion is off, so a vector gets the axes of the array that it scales.
    return jnp.expand_dims(vector, range(axes - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def layer_norm_narrow(
    x: Float[Array, "*shape D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    epsilon: float,
    dtype: str,
    split: bool = False,
) -> Float[Array, "*shape D"]:
    """Applies layer normalization in float32 to an array that is stored in fewer bits; the result has `dtype`.

    With `split` the backward pass computes its two sums over the width first, in a kernel of their own. The kernel that
    reads them can then include the gradients of scale, bias and additions before the norm. A kernel for whole rows
    cannot, since it would not see whole columns.
    """
    return _norm_forward(x, scale, bias, epsilon, dtype, split)[0]


def _norm_forward(
    x: Array, scale: Array, bias: Array | None, epsilon: float, dtype: str, split: bool
) -> tuple[Array, tuple]:
    # XLA computes both sums in one pass, within the matmul before. Even with a mean of 100 deviations that loses no
    # more than bfloat16 has already lost of x.
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True)
    # The difference of two rounded means may be just below 0.
    variance = jnp.maximum(jnp.square(wide).mean(axis=-1, keepdims=True) - jnp.square(mean), 0.0)
    inverse = jax.lax.rsqrt(variance + epsilon)
    normal = (wide - mean) * inverse * _by_row(scale, x.ndim)
    normal = (normal if bias is None else normal + _by_row(bias, x.ndim)).astype(dtype)
    if split:
        normal = jax.lax.optimization_barrier(normal)
    # The backward pass keeps x and two numbers a row, where autodiff would keep three float32 arrays.
    return normal, (x, scale, bias is not None, mean, inverse)


def _norm_backward(
    epsilon: float, dtype: str, split: bool, residuals: tuple, gradient: Array
) -> tuple[Array, Array, Array | None]:
    x, scale, has_bias, mean, inverse = residuals
    wide, rows = gradient.astype(jnp.float32), tuple(range(x.ndim - 1))
    normal = (x.astype(jnp.float32) - mean) * inverse
    scaled = wide * _by_row(scale, x.ndim)
    along = (scaled * normal).mean(axis=-1, keepdims=True)
    level = scaled.mean(axis=-1, keepdims=True)
    if split:
        level, along = jax.lax.optimization_barrier((level, along))
    change = inverse * (scaled - level - normal * along)
    return change.astype(x.dtype), (wide * normal).sum(rows), wide.sum(rows) if has_bias else None


layer_norm_narrow.defvjp(_norm_forward, _norm_backward)


_DENSITY_AT_0 = 1.0 / math.sqrt(2.0 * math.pi)
_CUBIC, _LINEAR = 0.044715, 2.0 * _DENSITY_AT_0  # of gelu_tanh
_LOGISTIC = 1.702  # of gelu_sigmoid


@functools.cache  # modules of equal configuration hold the same function, and are equal to jit
def activation(name: str, *, again: bool = False) -> Callable[[Array], Array]:
    """Returns the elementwise function that `model.activation` names; its result has the dtype of its argument.

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
    value, slope = GELUS[name]

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


def _gelu_slope(x: Array) -> Array:
    return _normal_distribution(x) + x * (jnp.exp(-0.5 * jnp.square(x)) * _DENSITY_AT_0)


def _normal_distribution(x: Array) -> Array:
    return 0.5 * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


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


def _gelu_sigmoid_slope(x: Array) -> Array:
    share = jax.nn.sigmoid(_LOGISTIC * x)
    return share * (1.0 + _LOGISTIC * x * (1.0 - share))


# The value and the slope of each GELU, in float32.
GELUS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "gelu": (lambda x: x * _normal_distribution(x), _gelu_slope),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "gelu_sigmoid": (lambda x: x * jax.nn.sigmoid(_LOGISTIC * x), _gelu_sigmoid_slope),
}
