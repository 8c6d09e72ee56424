"""Tests that folding keeps a function's values and leaves only what depends on its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from bert_jax.interop.onnx import folded

STACKED = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@jax.jit
def layer(hidden, kernel):
    return jax.nn.silu(hidden @ kernel.T)  # a function with a derivative of its own


def run(hidden):
    kernels = jnp.asarray(STACKED) * 0.01
    kernels = [kernels[0], kernels[1][::-1]]
    for kernel in kernels:
        hidden = layer(hidden, kernel) @ kernel
    return hidden + jnp.arange(hidden.shape[0], dtype=jnp.float32)[:, None]


def test_constants_are_computed_calls_are_inlined_and_symbolic_sizes_are_kept():
    rows = export.symbolic_shape("rows")
    argument = jax.ShapeDtypeStruct((*rows, 4), jnp.float32)
    traced = jax.make_jaxpr(run)(argument)
    after = jax.make_jaxpr(folded(traced))(argument)
    names = {equation.primitive.name for equation in after.jaxpr.eqns}
    assert names <= {"dot_general", "transpose", "logistic", "mul", "add", "iota", "broadcast_in_dim", "reshape"}
    assert {constant.shape for constant in after.consts} >= {(3, 4)}
    assert not any(constant.shape == STACKED.shape for constant in after.consts)
    assert after.out_avals[0].shape == (*rows, 4)
    hidden = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    [got] = jax.jit(folded(jax.make_jaxpr(run)(hidden)))(hidden)
    np.testing.assert_allclose(got, run(hidden), rtol=1e-6)
