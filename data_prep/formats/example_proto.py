"""Encodes tf.train.Example without TensorFlow, for many rows at once (tensorflow/core/example/*.proto).

    Example { Features features = 1 }      Feature { BytesList 1 | FloatList 2 | Int64List 3 }
    Features { map<string, Feature> 1 }    BytesList, FloatList, Int64List { repeated value = 1 [packed numbers] }

Features are written in the order of their names, like protocol buffers' deterministic serialization.
"""

from collections.abc import Mapping

import numpy as np

from bert_jax.array_types import Float32, Integer, Shaped
from data_prep.formats.ragged import Ragged, concatenate, fixed, varints

_FIRST, _SECOND = b"\x0a", b"\x12"  # tags of fields 1 and 2 with a length and that many bytes
_BYTES, _FLOATS, _INTS = b"\x0a", b"\x12", b"\x1a"  # tags of Feature: fields 1, 2 and 3


def encode(features: Mapping[str, tuple[bytes, Ragged]], count: int) -> Ragged:
    """Encodes the Examples of `count` rows from features by name, which `ints`, `floats` and `raw` make."""
    pieces: list[Ragged | bytes] = []
    total = np.zeros(count, np.int64)
    for name, (kind, payload) in sorted(features.items()):
        key = _FIRST + _constant(len(name.encode())) + name.encode()
        numbers = [payload.lengths]  # lengths from the inside out: of the values, the list, the feature, the map entry
        for before in (0, 0, len(key)):
            numbers.append(before + 1 + _size(numbers[-1]) + numbers[-1])
        values, value_list, feature, entry = numbers
        pieces += [_FIRST, _lengths(entry), key, _SECOND, _lengths(feature), kind, _lengths(value_list)]
        pieces += [_FIRST, _lengths(values), payload]
        total += 1 + _size(entry) + entry
    return concatenate([_FIRST, _lengths(total), *pieces], count)


def ints(values: Integer[np.ndarray, "R n"]) -> tuple[bytes, Ragged]:
    """A feature of n int64."""
    return _INTS, varints(values)


def floats(values: Float32[np.ndarray, "R n"]) -> tuple[bytes, Ragged]:
    """A feature of n floats."""
    return _FLOATS, fixed(values)


def raw(values: Shaped[np.ndarray, "R *n"]) -> tuple[bytes, Ragged]:
    """A feature of one byte string: the bytes of the numbers in memory."""
    return _BYTES, fixed(values)


def _lengths(values: Integer[np.ndarray, "R"]) -> Ragged:
    return varints(values[:, None])


def _size(values: Integer[np.ndarray, "R"]) -> Integer[np.ndarray, "R"]:
    return _lengths(values).lengths


def _constant(value: int) -> bytes:
    return varints(np.array([[value]])).flat.tobytes()
