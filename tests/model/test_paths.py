import numpy as np
import pytest

from bert_jax.model import layers


def test_flatten_and_unflatten_undo_each_other():
    nested = {"encoder": {"norm": {"scale": 1, "bias": 2}}, "bias": 3}
    flat = layers.flatten(nested)
    assert flat == {"bias": 3, "encoder/norm/bias": 2, "encoder/norm/scale": 1}
    assert list(flat) == sorted(flat)
    assert layers.unflatten(flat) == nested


def test_an_array_is_a_leaf():
    value = np.ones((2, 3))
    assert layers.flatten({"a": {"b": value}})["a/b"] is value


@pytest.mark.parametrize("flat", [{"a": 1, "a/b": 2}, {"a/b": 2, "a": 1}])
def test_a_path_that_is_parameter_and_folder_is_refused(flat):
    with pytest.raises(ValueError, match="'a"):
        layers.unflatten(flat)
