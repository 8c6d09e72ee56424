"""Programs that some versions of jaxlib compute wrong on CPUs, unless bert_jax is imported first."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

import bert_jax

# The reproductions of jax issues 39103, 40412 and 39257, with less data in the last one.
PROGRAM = """
import bert_jax
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)

def squares(rows):
    matrix = jnp.eye(3, dtype=rows.dtype)
    return jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(rows)

for dtype, count in (("float64", 16_385), ("float32", 32_769), ("float32", 70_001)):
    rows = np.zeros((count, 3), dtype)
    rows[:, 0] = np.arange(count)
    assert np.array_equal(jax.jit(squares)(rows), (rows**2).sum(1)), (dtype, count)

draw = np.random.default_rng(0)
left, right = draw.normal(size=(2, 3, 1, 2, 2, 8, 8, 8)).astype("float32")
products = jax.jit(lambda left, right: jnp.sum(left * right, axis=3))(left, right)
assert np.allclose(products, (left * right).sum(3), atol=1e-5)

seen, table = np.ones((10, 4, 6), "float32"), np.ones((10, 4, 6, 3, 3, 3, 3, 3), "float32")
summed = jax.jit(lambda seen, table: jnp.sum(seen[..., None, None, None, None, None] * table, axis=2))(seen, table)
assert (np.asarray(summed) == 6).all()
"""
TOO_LATE = "import jax; jax.devices(); import bert_jax"


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with the XLA flags that users have: none, except those given."""
    own = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment = own | {"JAX_PLATFORMS": "cpu"} | variables
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)


def test_the_published_programs_have_the_right_results() -> None:
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(version("jaxlib") not in bert_jax.FAULTY_JAXLIB, reason="this jaxlib does not have the fault")
def test_a_warning_says_when_it_is_too_late_unless_the_flag_is_set() -> None:
    assert "set XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=" in run(TOO_LATE).stderr
    assert not run(TOO_LATE, XLA_FLAGS="--xla_cpu_experimental_ynn_fusion_type=").stderr
