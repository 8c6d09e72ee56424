"""The figures of two programs' vectors; the programs themselves need the extra onnx (tests/test_onnx.py)."""

import numpy as np
import pytest

from benchmarks.onnx_precision import compared


def test_vectors_are_compared_by_cosines():
    first = {"float32": np.eye(3, dtype=np.float32) * 5, "int8": np.eye(3, dtype=np.float32)}
    turned = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0]], np.float32)  # cosines 1, 0.71 and 0
    second = {"float32": turned, "int8": turned[[2, 1, 0]]}  # cosines 0, 0.71 and 0
    found = compared(first, second, [5.0, 3.0, 1.0])
    assert found["spearman"]["float32"] == 1.0 and found["spearman"]["int8"] < 1
    cosines = [1, 1, 1, 0, 1, 0]  # of the six vectors of both programs
    assert found["cosine_mean"] == pytest.approx(np.mean(cosines), abs=1e-4) and found["cosine_least"] == 0
