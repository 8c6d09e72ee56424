"""Array types for signatures of modules that run without jax: jaxtyping's, if something checks them.

Type checkers do, and the import hook of the tests, which imports jaxtyping first. Otherwise they stand for numpy's
array, because importing jaxtyping adds 40 ms to each process, and a small job takes 270 ms.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Float64, Int, Int32, Int64, Integer, UInt, UInt8, UInt32, UInt64
else:

    class _Unchecked:
        def __getitem__(self, array_and_axes: tuple[Any, str]) -> Any:
            return array_and_axes[0]

    Bool = Float = Float64 = Int = Int32 = Int64 = Integer = UInt = UInt8 = UInt32 = UInt64 = _Unchecked()

__all__ = ["Bool", "Float", "Float64", "Int", "Int32", "Int64", "Integer", "UInt", "UInt8", "UInt32", "UInt64"]
