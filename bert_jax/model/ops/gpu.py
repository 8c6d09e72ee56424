"""The operations of a layer in the form for NVIDIA GPUs.

docs/decisions/planning_and_accelerators.md has what they gain.
"""

import jax
from jaxtyping import Array, Float, Int, PyTree

from bert_jax.model.ops.default import Heads, Operations
from bert_jax.model.ops.look_up import rows_by_gather


class GpuOperations(Operations):
    """The form of each operation for NVIDIA GPUs, whose steps mostly wait for memory.

    Each choice lets XLA make fewer kernels of elementwise work and reductions, so that arrays are read and written less
    often.
    """

    # The gradient of a bias is part of the kernel that computes the gradient which it sums. A matmul with ones would
    # read that gradient again, and before that XLA would make a float32 copy of it.
    bias_rows_of_ones = 0
    vocabulary_rows_of_ones = 0
    drops_again = True  # instead of writing and reading a byte for each element
    splits_norm_gradient = True
    vocabulary_piece = 8192  # the gradient of the logits is written once, in bfloat16
    narrows_score_gradients = True

    def look_up(self, table: Float[Array, "K D"], rows: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Gathers. A matmul with a float32 table takes as long as one of a layer, at the speed of float32."""
        return rows_by_gather(table, rows, self.runtime.compute_dtype)

    def stored(self, summed: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """The sum of embeddings has the compute dtype, as that before every other norm."""
        return summed.astype(self.runtime.dtype)

    def whole_gradients(self, gradients: PyTree) -> PyTree:
        """The gradient of a stack is concatenated once, not in each kernel of the optimizer that reads it."""
        return jax.lax.optimization_barrier(gradients)

    def project_heads(
        self,
        hidden: Float[Array, "B T D"],
        queries: Float[Array, "B Q D"] | None,
        kernel: Float[Array, "D 3 N H"],
        bias: Float[Array, "3 N H"] | None,
        separate: bool = False,
    ) -> Heads:
        """Projects by three matmuls for a kernel that wants three arrays, since splitting one is a pass over it.

        Einsum transposes all three anyway, and splits them at the same time.
        """
        if not separate:
            return super().project_heads(hidden, queries, kernel, bias)

        def project(part: int, vectors: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
            found = self.dense(vectors, kernel[:, part], None if bias is None else bias[part], 1)
            return self.runtime.placement.constrain("heads", found)

        if queries is None:
            queries, hidden, values = thrice(hidden)
        else:
            values = hidden
        return project(0, queries), project(1, hidden), project(2, values)


@jax.custom_vjp
def thrice(x: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], ...]:
    """Returns x three times. The gradient is summed in the order in which each matmul can add to the sum before it."""
    return x, x, x


thrice.defvjp(lambda x: (thrice(x), None), lambda _, gradients: (gradients[0] + (gradients[1] + gradients[2]),))
