"""The array types in signatures of what runs without jax: jaxtyping's, wherever something checks them.

That is a type checker, and the tests' import hook, which has imported jaxtyping before. To everybody else they are
numpy's array alone: jaxtyping takes 40 ms to import, in each process, beside the 270 that a small job takes.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import (
        Bool,
        Float,
        Float32,
        Float64,
        Int,
        Int32,
        Int64,
        Integer,
        Shaped,
        UInt,
        UInt8,
        UInt32,
        UInt64,
    )
else:

    class _Unchecked:
        def __getitem__(self, array_and_axes: tuple[Any, str]) -> Any:
            return array_and_axes[0]

    Bool = Float = Float32 = Float64 = Int = Int32 = Int64 = Integer = Shaped = _Unchecked()
    UInt = UInt8 = UInt32 = UInt64 = _Unchecked()

__all__ = [
    "Bool",
    "Float",
    "Float32",
    "Float64",
    "Int",
    "Int32",
    "Int64",
    "Integer",
    "Shaped",
    "UInt",
    "UInt8",
    "UInt32",
    "UInt64",
]
