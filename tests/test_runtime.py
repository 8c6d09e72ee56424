import jax
import pytest

from bert_jax.command import UserError
from bert_jax.model.runtime import Runtime


def test_float32_multiplies_at_the_highest_precision():
    assert Runtime(compute_dtype="float32").precision == jax.lax.Precision.HIGHEST
    assert Runtime(compute_dtype="bfloat16").precision == jax.lax.Precision.DEFAULT


def test_auto_unrolls_shallow_models_only():
    assert Runtime(layer_loop="auto").unrolled(4)
    assert not Runtime(layer_loop="auto").unrolled(24)
    assert Runtime(layer_loop="unrolled").unrolled(12)
    assert not Runtime(layer_loop="scan").unrolled(4)


@pytest.mark.parametrize(("field", "value"), [("compute_dtype", "float16"), ("layer_loop", "while")])
def test_an_unknown_choice_is_refused_by_name(field, value):
    with pytest.raises(UserError, match=f"{field} is '{value}'.*use one of"):
        Runtime(**{field: value})
