import jax
import jax.numpy as jnp
import pytest

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.rows import TaskBatch


def test_float32_multiplies_at_the_highest_precision():
    assert Runtime(compute_dtype="float32").precision == jax.lax.Precision.HIGHEST
    assert Runtime(compute_dtype="bfloat16").precision == jax.lax.Precision.DEFAULT


@pytest.mark.parametrize(
    ("loop", "platform", "layers", "unrolled"),
    [
        ("auto", "", 4, True),
        ("auto", "", 24, False),
        ("auto", "rocm", 24, False),
        *(("auto", platform, layers, layers == 24) for platform in ("gpu", "tpu") for layers in (24, 25)),
        ("unrolled", "", 12, True),
        ("scan", "", 4, False),
    ],
)
def test_auto_unrolls_shallow_models_only(loop, platform, layers, unrolled):
    assert Runtime(layer_loop=loop, platform=platform).unrolled(layers) == unrolled


@pytest.mark.parametrize(("field", "value"), [("compute_dtype", "float16"), ("layer_loop", "while"), ("remat", "most")])
def test_an_unknown_choice_is_refused_by_name(field, value):
    with pytest.raises(UserError, match=f"unknown config.*{field} '{value}'; choose from "):
        Runtime(**{field: value})


@pytest.mark.slow
def test_each_choice_of_remat_needs_less_memory_than_the_one_before():
    config = ModelConfig(vocab_size=128, layers=4, width=32, heads=4, feed_forward=128, max_positions=128)
    slots = jnp.tile(jnp.arange(128, dtype=jnp.int32), (8, 1))
    batch = TaskBatch(slots, slots * 0, slots * 0 + 1, slots, jnp.zeros(8), jnp.zeros(8))
    params = bert.abstract_params(config, Heads())

    def temporary_bytes(remat: str) -> int:
        runtime = Runtime(layer_loop="scan", remat=remat)

        def loss(params):
            return jnp.square(bert.bind(config, Heads(), params, runtime).encode(batch, jax.random.key(0)).last).sum()

        return jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis().temp_size_in_bytes

    sizes = [temporary_bytes(remat) for remat in ("none", "attention", "matmuls", "layer")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 2
