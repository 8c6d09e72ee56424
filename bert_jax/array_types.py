"""Array types for the signatures of modules that run without jax: jaxtyping's, if something checks them.

Type checkers and the tests' import hook, which imports jaxtyping first, check them. Otherwise they stand for numpy's
array, because importing jaxtyping adds 40 ms to each process, where a small job takes 270 ms.
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
