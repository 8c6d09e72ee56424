"""Look-ups in a small table, with two forms of the product. The gradient of both is a matmul, not a scatter."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rows_by_matmul(table: Float[Array, "K D"], rows: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns table[rows] for a small table, exactly.

    Its gradient is a matmul; a gather's would be a serial scatter.
    """
    chosen = jax.nn.one_hot(rows, table.shape[0], dtype=table.dtype)
    return jnp.einsum("btk,kd->btd", chosen, table, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rows_by_gather(table: Float[Array, "K D"], rows: Int[Array, "B T"], gradient_dtype: str) -> Float[Array, "B T D"]:
    """Returns table[rows] for a small table, by a gather, which XLA fuses with what reads it.

    The gradient is a matmul of gradients in gradient_dtype, which sums in float32. A scatter would have no fixed order
    on a GPU.
    """
    return table[rows]


def _forward(table: Array, rows: Array, gradient_dtype: str) -> tuple[Array, tuple[Array, Array]]:
    return table[rows], (rows, jnp.zeros((len(table), 0), table.dtype))


def _backward(gradient_dtype: str, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    rows, shape = kept
    chosen = jax.nn.one_hot(rows, len(shape), dtype=gradient_dtype)
    precision = jax.lax.Precision.HIGHEST if gradient_dtype == "float32" else jax.lax.Precision.DEFAULT
    sums = jnp.einsum(
        "btk,btd->kd",
        chosen,
        gradient.astype(gradient_dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return sums.astype(shape.dtype), None


rows_by_gather.defvjp(_forward, _backward)
