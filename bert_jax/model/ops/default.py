"""The operations of a layer in the form for CPUs, and for GPUs of other makers than NVIDIA."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, UInt32

from bert_jax.model.dropout import dropout
from bert_jax.model.ops.bias import add_bias
from bert_jax.model.ops.look_up import rows_by_matmul
from bert_jax.model.runtime import Runtime

Heads = tuple[Float[Array, "B Q N H"], Float[Array, "B T N H"], Float[Array, "B T N H"]]


class Operations:
    """Operations that have another form on some platform. All forms give the same values up to rounding."""

    # Arrays are reshaped to matrices, so that a kernel's gradient is a matmul of matrices too: with several row axes,
    # XLA on a CPU transposes the activations for it in an extra pass.
    multiplies_matrices = True
    recomputes_activation = False  # whether a layer's activation is computed again in the backward pass
    # Rows of ones in the gradient of a bias, and in that of the vocabulary bias (bias.add_bias).
    bias_rows_of_ones = 1
    vocabulary_rows_of_ones = 1
    drops_again = False  # whether the backward pass computes dropout masks again (dropout.dropout)
    splits_norm_gradient = False  # layers.layer_norm_narrow
    vocabulary_piece = 0  # tokens whose logits are one array where all logits are kept (train/losses.py); 0: all
    narrows_score_gradients = False  # attention_einsum.einsum_attention

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def dense(
        self,
        x: Float[Array, "..."],
        kernel: Float[Array, "..."],
        bias: Float[Array, "..."] | None,
        input_axes: int,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, "..."]:
        """Returns the product of x [..., *in] and kernel [*in, *out], plus any bias [*out].

        `in` has input_axes axes. The result has the compute dtype unless another is given.
        """
        runtime, dtype = self.runtime, dtype or self.runtime.dtype
        x, kernel = x.astype(runtime.dtype), kernel.astype(runtime.dtype)
        # Where heads lie on several devices, N of a kernel [D, 3, N, H] cannot be merged with the axis before it.
        if runtime.placement.shards_layers or not self.multiplies_matrices:
            product = jnp.tensordot(x, kernel, input_axes, precision=runtime.precision, preferred_element_type=dtype)
            return product if bias is None else add_bias(product, bias)
        leading, outputs = x.shape[: x.ndim - input_axes], kernel.shape[input_axes:]
        inputs = math.prod(kernel.shape[:input_axes])
        product = jnp.matmul(
            x.reshape(-1, inputs),
            kernel.reshape(inputs, -1),
            precision=runtime.precision,
            preferred_element_type=dtype,
        )
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
        """Returns queries, keys and values of attention. The queries come from `queries` where these are given.

        separate   whether the attention kernel wants them in three arrays

        One matmul gives all three, or keys and values where the queries come from other vectors.
        """
        if queries is None:
            query, key, value = self._split(self.dense(hidden, kernel, bias, 1))
            return query, key, value
        first, others = (None, None) if bias is None else (bias[0], bias[1:])
        query = self.dense(queries, kernel[:, 0], first, 1)
        key, value = self._split(self.dense(hidden, kernel[:, 1:], others, 1))
        return self.runtime.placement.constrain("heads", query), key, value

    def dropout(
        self, x: Float[Array, "B *shape"], rate: float, seeds: UInt32[Array, "B 2"] | None
    ) -> Float[Array, "B *shape"]:
        """Applies dropout.dropout."""
        return dropout(x, rate, seeds, again=self.drops_again)

    def look_up(self, table: Float[Array, "K D"], rows: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns table[rows] for a small table, exactly."""
        return rows_by_matmul(table, rows)

    def stored(self, summed: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Returns the sum of embeddings in the dtype in which it is stored."""
        return summed

    def whole_gradients(self, gradients: PyTree) -> PyTree:
        """Returns the gradients of all parameters, which may have to exist as whole arrays."""
        return gradients

    def add_vocabulary_bias(self, logits: Float[Array, "R V"], bias: Float[Array, "V"]) -> Float[Array, "R V"]:
        """Adds the bias of the vocabulary head."""
        return add_bias(logits, bias, self.vocabulary_rows_of_ones)

    def feed_forward_output(
        self, output: Callable[[Array], Array], inner: Float[Array, "B T *inner"], unrolled: bool
    ) -> Float[Array, "B T D"]:
        """Returns output(inner), where output is the activation and the second matmul of a feed-forward layer."""
        if not self.recomputes_activation:
            return output(inner)
        # In a scan nothing has to be protected from common subexpression elimination, and a barrier would be a copy.
        return jax.checkpoint(output, prevent_cse=unrolled)(inner)

    def _split(self, stacked: Float[Array, "B T K N H"]) -> tuple[Float[Array, "B T N H"], ...]:
        """Returns the K arrays of axis 2.

        The gradient of lax.split is one concatenation; indexing would give a sum for each array.
        """
        stacked = self.runtime.placement.constrain("heads", stacked)
        parts = jax.lax.split(stacked, (1,) * stacked.shape[2], axis=2)
        return tuple(part[:, :, 0] for part in parts)
