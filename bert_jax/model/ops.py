"""Operations whose best form depends on the platform: operations(runtime) returns those of CPUs, NVIDIA GPUs or TPUs.

All forms compute the same values up to rounding, and layers read the same on every platform. Bias additions and
look-ups come first, then Operations with its forms for GPUs and TPUs, then the logits of a vocabulary.
docs/decisions/planning_and_accelerators.md has the evidence for each form.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from bert_jax.model.dropout import Seeds, dropout
from bert_jax.model.runtime import Runtime


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def add_bias(
    x: Float[Array, "*rows_and_out"], bias: Float[Array, "*out"], rows_of_ones: int = 0
) -> Float[Array, "*rows_and_out"]:
    """Adds a bias over the last axes of x, in its dtype. The bias gradient is a sum in float32.

    With `rows_of_ones` the sum is a matmul with so many rows of ones, and the first row of its result is used.
    """
    # On a CPU one row takes a tenth as long as XLA's reduction. On a TPU eight rows, which its matrix unit takes at a
    # time, take a sixth as long if no matmul before the reduction could absorb it.
    return x + jnp.expand_dims(bias.astype(x.dtype), range(x.ndim - bias.ndim))


def _bias_forward(x: Array, bias: Array, rows_of_ones: int) -> tuple[Array, tuple[None, ...]]:
    return add_bias(x, bias, rows_of_ones), (None,) * bias.ndim


def _bias_backward(rows_of_ones: int, outputs: tuple[None, ...], gradient: Array) -> tuple[Array, Array]:
    rows = gradient.ndim - len(outputs)
    if not rows_of_ones:
        return gradient, gradient.sum(axis=tuple(range(rows)), dtype=jnp.float32)
    ones = jnp.ones((rows_of_ones, *gradient.shape[:rows]), gradient.dtype)
    # A matmul of ones and bfloat16 values is exact at the default precision.
    precision = jax.lax.Precision.HIGHEST if gradient.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    sums = jnp.tensordot(ones, gradient, rows, precision=precision, preferred_element_type=jnp.float32)
    return gradient, sums[0]


add_bias.defvjp(_bias_forward, _bias_backward)


def look_up_by_matmul(table: Float[Array, "K D"], rows: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns table[rows] for a small table, exactly. Its gradient is a matmul, not a gather's serial scatter."""
    chosen = jax.nn.one_hot(rows, table.shape[0], dtype=table.dtype)
    return jnp.einsum("btk,kd->btd", chosen, table, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up_by_gather(
    table: Float[Array, "K D"], rows: Int[Array, "B T"], gradient_dtype: str
) -> Float[Array, "B T D"]:
    """Returns table[rows] for a small table, by a gather, which XLA fuses with its readers.

    The gradient is a matmul that sums in float32: a scatter would have no fixed order on a GPU.
    """
    return table[rows]


def _look_up_forward(table: Array, rows: Array, gradient_dtype: str) -> tuple[Array, tuple[Array, Array]]:
    # The empty array carries the table's length and dtype to the backward pass.
    return table[rows], (rows, jnp.zeros((len(table), 0), table.dtype))


def _look_up_backward(gradient_dtype: str, residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    rows, shape = residuals
    chosen = jax.nn.one_hot(rows, len(shape), dtype=gradient_dtype)
    precision = jax.lax.Precision.HIGHEST if gradient_dtype == "float32" else jax.lax.Precision.DEFAULT
    gradient = gradient.astype(gradient_dtype)
    sums = jnp.einsum("btk,btd->kd", chosen, gradient, precision=precision, preferred_element_type=jnp.float32)
    return sums.astype(shape.dtype), None


look_up_by_gather.defvjp(_look_up_forward, _look_up_backward)


Heads = tuple[Float[Array, "B Q N H"], Float[Array, "B T N H"], Float[Array, "B T N H"]]


@jax.custom_vjp
def thrice(x: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], ...]:
    """Returns x three times. Its gradient is summed in an order in which each of three matmuls can add to the sum."""
    return x, x, x


thrice.defvjp(lambda x: (thrice(x), None), lambda _, gradients: (gradients[0] + (gradients[1] + gradients[2]),))


class Operations:
    """The form of each operation for CPUs, and for GPUs by other makers than NVIDIA."""

    # Arrays are reshaped to matrices, so that a kernel's gradient is a matmul of matrices too: with several row axes,
    # XLA on a CPU transposes the activations for it in an extra pass.
    multiplies_matrices = True
    recomputes_activation = False  # whether the backward pass computes a layer's activation again
    # Rows of ones (add_bias) in the bias gradient of matrices, of queries, keys and values, and of the vocabulary.
    bias_rows_of_ones = 1
    heads_rows_of_ones = 0
    vocabulary_rows_of_ones = 1
    # Whether queries, keys and values come from three matmuls, for kernels that want three arrays and for others.
    projects_three_arrays_apart = False
    projects_all_apart = False
    orders_head_gradients = False  # whether the three matmuls read their input by `thrice`
    drops_again = False  # whether the backward pass computes dropout masks again (dropout.dropout)
    gathers_rows = False  # whether look-ups are gathers
    narrows_embeddings = False  # whether the sum of embeddings has the compute dtype
    splits_norm_gradient = False  # layers.layer_norm_narrow
    vocabulary_piece = 0  # tokens whose logits are one array if all logits are kept (train/losses.py); 0: all
    narrows_score_gradients = False  # einsum_attention

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def dense(
        self,
        x: Float[Array, "..."],
        kernel: Float[Array, "..."],
        bias: Float[Array, "..."] | None,
        input_axes: int,
        dtype: DTypeLike | None = None,
        rows_of_ones: int = 0,
    ) -> Float[Array, "..."]:
        """Multiplies x [..., *in] by kernel [*in, *out] and adds any bias [*out].

        Args:
            input_axes: how many axes `in` has.
            dtype: of the result; None: the compute dtype.
            rows_of_ones: as in add_bias, for arrays that keep their axes.
        """
        runtime, dtype = self.runtime, dtype or self.runtime.dtype
        x, kernel = x.astype(runtime.dtype), kernel.astype(runtime.dtype)
        # If heads lie on several devices, N of a kernel [D, 3, N, H] cannot be merged with the axis before it.
        if runtime.placement.shards_layers or not self.multiplies_matrices:
            product = jnp.tensordot(x, kernel, input_axes, precision=runtime.precision, preferred_element_type=dtype)
            return product if bias is None else add_bias(product, bias, rows_of_ones)
        leading, outputs = x.shape[: x.ndim - input_axes], kernel.shape[input_axes:]
        inputs = math.prod(kernel.shape[:input_axes])
        matrices = x.reshape(-1, inputs), kernel.reshape(inputs, -1)
        product = jnp.matmul(*matrices, precision=runtime.precision, preferred_element_type=dtype)
        if bias is not None:
            product = add_bias(product, bias.reshape(-1), self.bias_rows_of_ones)
        return product.reshape(leading + outputs)

    def project_heads(
        self,
        hidden: Float[Array, "B T D"],
        queries: Float[Array, "B Q D"] | None,
        kernel: Float[Array, "D 3 N H"],
        bias: Float[Array, "3 N H"] | None,
        separate: bool = False,
    ) -> Heads:
        """Computes queries, keys and values of attention.

        Args:
            hidden: the vectors for keys and values, and for queries unless `queries` is given.
            kernel: axis 1 has queries, keys and values in this order, as has the bias's axis 0.
            separate: whether the attention kernel wants three arrays.
        """

        def project(vectors: Array, part: int) -> Array:
            part_kernel, part_bias = kernel[:, part], None if bias is None else bias[part]
            projected = self.dense(vectors, part_kernel, part_bias, 1, rows_of_ones=self.heads_rows_of_ones)
            return self.runtime.placement.constrain("heads", projected)

        def split(stacked: Array) -> tuple[Array, ...]:
            # The gradient of lax.split is one concatenation; indexing would give a sum for each array.
            stacked = self.runtime.placement.constrain("heads", stacked)
            return tuple(part[:, :, 0] for part in jax.lax.split(stacked, (1,) * stacked.shape[2], axis=2))

        apart = self.projects_three_arrays_apart if separate else self.projects_all_apart
        if apart:
            values = hidden
            if queries is None:
                queries, hidden, values = thrice(hidden) if self.orders_head_gradients else (hidden,) * 3
            return project(queries, 0), project(hidden, 1), project(values, 2)
        # One matmul gives all three, or keys and values if the queries come from other vectors.
        if queries is None:
            query, key, value = split(self.dense(hidden, kernel, bias, 1))
            return query, key, value
        query = project(queries, 0)
        key, value = split(self.dense(hidden, kernel[:, 1:], None if bias is None else bias[1:], 1))
        return query, key, value

    def dropout(self, x: Float[Array, "B *shape"], rate: float, seeds: Seeds) -> Float[Array, "B *shape"]:
        """Applies dropout.dropout."""
        return dropout(x, rate, seeds, again=self.drops_again)

    def look_up(self, table: Float[Array, "K D"], rows: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns table[rows] for a small table, exactly."""
        if self.gathers_rows:
            return look_up_by_gather(table, rows, self.runtime.compute_dtype)
        return look_up_by_matmul(table, rows)

    def whole_gradients(self, gradients: PyTree) -> PyTree:
        """Returns all parameters' gradients, which may have to exist as whole arrays."""
        return gradients


class GpuOperations(Operations):
    """The form of each operation for NVIDIA GPUs."""

    # Steps mostly wait for memory, so each choice lets XLA make fewer elementwise and reduction kernels, which read and
    # write arrays less often.
    #
    # The gradient of a bias is part of the kernel that computes the gradient which it sums. A matmul with ones would
    # read that gradient again, and before that XLA would make a float32 copy of it.
    bias_rows_of_ones = 0
    vocabulary_rows_of_ones = 0
    # Splitting one array is a pass over it, except for einsum, which transposes all three anyway.
    projects_three_arrays_apart = True
    orders_head_gradients = True
    drops_again = True  # instead of writing and reading a byte for each element
    gathers_rows = True  # a matmul with a float32 table takes as long as one of a layer, at the speed of float32
    narrows_embeddings = True  # as before every other norm
    splits_norm_gradient = True
    vocabulary_piece = 8192  # the gradient of the logits is written once, in bfloat16
    narrows_score_gradients = True

    def whole_gradients(self, gradients: PyTree) -> PyTree:
        """A stack's gradient is concatenated once, not in each optimizer kernel that reads it."""
        return jax.lax.optimization_barrier(gradients)


class TpuOperations(Operations):
    """The TPU form of each operation."""

    # Arrays keep their axes: the compiler then lays the output out as the next operation wants it. A matmul of
    # matrices and a reshape are followed by copies, a third of a layer's time by the compiler's cycles.
    multiplies_matrices = False
    # The activation becomes part of the matmul that reads it, forward and backward. Scanned layers would otherwise keep
    # its result, the largest of their arrays.
    recomputes_activation = True
    heads_rows_of_ones = 8  # the rows that the matrix unit takes at a time
    vocabulary_rows_of_ones = 0
    # Splitting the result of one matmul is an extra pass over it.
    projects_three_arrays_apart = True
    projects_all_apart = True


def operations(runtime: Runtime) -> Operations:
    """Returns the operations for the platform that programs are compiled for."""
    if runtime.on_tpu:
        return TpuOperations(runtime)
    return GpuOperations(runtime) if runtime.on_nvidia else Operations(runtime)


@dataclass(frozen=True)
class VocabularyProduct:
    """Vectors, the output matrix of a vocabulary and its bias, before they are multiplied.

    The logits of a batch are often its largest array. train/losses.py can compute a loss from these parts, a few
    vocabulary tokens at a time.
    """

    vectors: Float[Array, "B M E"]
    table: Float[Array, "V E"]
    bias: Float[Array, "V"] | None
    vocab_size: int  # rows of the table from here on are padding
    runtime: Runtime

    def logits(self) -> Float[Array, "B M V"]:
        """Computes float32 logits; -inf for the padding of the vocabulary, so that no gradient reaches it."""
        table, runtime = self.table, self.runtime
        # Matrices, for the reason that Operations.dense gives: the gradient of the table is the largest matmul of all.
        rows = self.vectors.reshape(-1, table.shape[1])
        table = table.astype(rows.dtype)
        logits = jnp.einsum("rd,vd->rv", rows, table, precision=runtime.precision, preferred_element_type=jnp.float32)
        if self.bias is not None:
            logits = add_bias(logits, self.bias, operations(runtime).vocabulary_rows_of_ones)
        in_vocabulary = jnp.arange(table.shape[0]) < self.vocab_size
        logits = jnp.where(in_vocabulary[None], logits, -jnp.inf)
        return runtime.placement.constrain("logits", logits.reshape(*self.vectors.shape[:2], -1))
