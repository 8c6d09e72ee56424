"""The operations of a layer in the form for TPUs; docs/tpu_plan.md has what each form gains."""

from collections.abc import Callable

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from bert_jax.model.ops.bias import add_bias, add_bias_by_matmul
from bert_jax.model.ops.default import Heads, Operations

MATRIX_UNIT_ROWS = 8  # the rows that a TPU's matrix unit takes at a time


class TpuOperations(Operations):
    """The TPU form of each operation."""

    # The activation becomes part of the matmul that reads it, forward and backward. Scanned layers would otherwise keep
    # its result, the largest of their arrays.
    recomputes_activation = True

    def dense(
        self,
        x: Float[Array, "..."],
        kernel: Float[Array, "..."],
        bias: Float[Array, "..."] | None,
        input_axes: int,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, "..."]:
        """Arrays keep their axes: the compiler then lays the output out as the next operation wants it. A matmul of
        matrices and a reshape are followed by copies, a third of a layer's time by the compiler's cycles."""
        return self._dense_unmerged(x, kernel, bias, input_axes, dtype)

    def project_heads(
        self,
        hidden: Float[Array, "B T D"],
        queries: Float[Array, "B Q D"] | None,
        kernel: Float[Array, "D 3 N H"],
        bias: Float[Array, "3 N H"] | None,
    ) -> Heads:
        """Three matmuls: splitting the result of one is an extra pass over it."""
        asked = hidden if queries is None else queries
        query, key, value = (
            self._project_one(part, vectors, kernel, bias) for part, vectors in enumerate((asked, hidden, hidden))
        )
        return query, key, value

    def add_vocabulary_bias(self, logits: Float[Array, "R V"], bias: Float[Array, "V"]) -> Float[Array, "R V"]:
        return add_bias(logits, bias)

    def feed_forward_output(
        self, output: Callable[[Array], Array], inner: Float[Array, "B T *inner"], unrolled: bool
    ) -> Float[Array, "B T D"]:
        # In a scan nothing has to be protected from common subexpression elimination, and a barrier would be a copy.
        return jax.checkpoint(output, prevent_cse=unrolled)(inner)

    def _project_one(
        self, part: int, vectors: Float[Array, "B T D"], kernel: Array, bias: Array | None
    ) -> Float[Array, "B T N H"]:
        """Queries (part 0), keys (1) or values (2)."""
        found = self.dense(vectors, kernel[:, part], None, 1)
        if bias is not None:
            found = add_bias_by_matmul(found, bias[part], MATRIX_UNIT_ROWS)
        return self.runtime.placement.constrain("heads", found)
