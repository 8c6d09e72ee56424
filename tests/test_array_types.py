"""Signatures are checked here, and cost nobody else an import."""

import subprocess
import sys

import jaxtyping
import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation

from bert_jax import array_types
from bert_jax.data import example
from data_prep import units

PROGRAM = """
import sys
import numpy as np
from bert_jax import array_types
for name in array_types.__all__:
    assert getattr(array_types, name)[np.ndarray, "B T"] is np.ndarray, name
assert "jaxtyping" not in sys.modules
"""


def test_types_are_those_of_jaxtyping_where_it_checks() -> None:
    for name in array_types.__all__:
        assert getattr(array_types, name) is getattr(jaxtyping, name)
    row = array_types.UInt8[np.ndarray, "T"]
    assert isinstance(np.zeros(3, np.uint8), row) and not isinstance(np.zeros((3, 3), np.uint8), row)


def test_types_are_numpys_where_nothing_checks() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_calls_are_checked_with_and_without_array_types(pytestconfig: pytest.Config) -> None:
    """By jaxtyping where a signature has shapes, by beartype alone where it has none (conftest.py)."""
    if not pytestconfig.getoption("jaxtyping_packages"):
        pytest.skip("types are not checked in this run (--jaxtyping-packages=)")
    with pytest.raises(jaxtyping.TypeCheckError, match="summarise"):
        units.summarise(np.zeros((2, 2), np.int64))
    with pytest.raises(BeartypeCallHintViolation, match="max_predictions"):
        example.max_predictions("128", 1, 0.15)
