"""The operations of a layer in the form for TPUs.

docs/decisions/planning_and_accelerators.md has what each form gains.
"""

from jaxtyping import Array, Float

from bert_jax.model.ops.bias import add_bias
from bert_jax.model.ops.default import Heads, Operations

MATRIX_UNIT_ROWS = 8  # the rows that a TPU's matrix unit takes at a time


class TpuOperations(Operations):
    """The TPU form of each operation."""

    # Arrays keep their axes: the compiler then lays the output out as the next operation wants it. A matmul of
    # matrices and a reshape are followed by copies, a third of a layer's time by the compiler's cycles.
    multiplies_matrices = False
    # The activation becomes part of the matmul that reads it, forward and backward. Scanned layers would otherwise keep
    # its result, the largest of their arrays.
    recomputes_activation = True
    vocabulary_rows_of_ones = 0

    def project_heads(
        self,
        hidden: Float[Array, "B T D"],
        queries: Float[Array, "B Q D"] | None,
        kernel: Float[Array, "D 3 N H"],
        bias: Float[Array, "3 N H"] | None,
        separate: bool = False,
    ) -> Heads:
        """Projects by three matmuls: splitting the result of one is an extra pass over it."""

        def project(part: int, vectors: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
            found = self.dense(vectors, kernel[:, part], None, 1)
            if bias is not None:
                found = add_bias(found, bias[part], MATRIX_UNIT_ROWS)
            return self.runtime.placement.constrain("heads", found)

        return project(0, hidden if queries is None else queries), project(1, hidden), project(2, hidden)
