"""Counts the matmul FLOPs of a traced function, with loops multiplied out and recomputation included.

The count reads the jaxpr instead of the compiled program, where a loop body counts once and a Pallas
kernel not at all.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flops:
    """FLOPs of matmuls summed over all devices, two for each multiply-add."""

    xla: float = 0.0
    pallas: float = 0.0  # inside Pallas kernels, with every block of their grids

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.xla + other.xla, self.pallas + other.pallas)

    def __mul__(self, times: float) -> "Flops":
        return Flops(self.xla * times, self.pallas * times)

    @property
    def total(self) -> float:
        return self.xla + self.pallas


def count_flops(jaxpr: Any, in_kernel: bool = False) -> Flops:
    """Returns the FLOPs of the dot_general equations of a (closed) jaxpr and of every jaxpr that it calls.

    A cond counts the mean of its branches and a while loop one iteration, since the jaxpr does not say
    more. In a Pallas kernel a cond counts its largest branch: the other branch skips a block of the grid
    (pl.when).
    """
    total = Flops()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        total += _of_equation(equation, in_kernel)
    return total


def _of_equation(equation: Any, in_kernel: bool) -> Flops:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        return Flops(xla=_dot(equation))
    if name == "pallas_call":
        inner = count_flops(parameters["jaxpr"], in_kernel=True).total
        return Flops(pallas=inner * math.prod(int(size) for size in parameters["grid_mapping"].grid))
    if name == "cond":
        branches = [count_flops(branch, in_kernel) for branch in parameters["branches"]]
        if in_kernel:
            return max(branches, key=lambda branch: branch.total)
        return sum(branches, Flops()) * (1 / len(branches))
    times = float(parameters["length"]) if name == "scan" else 1.0
    if name == "shard_map":  # shapes inside are those of one device
        times = float(math.prod(parameters["mesh"].shape[name] for name in parameters["newly_manual_axes"]))
    return sum((count_flops(inner, in_kernel) for inner in _inner(parameters)), Flops()) * times


def _inner(parameters: dict[str, Any]) -> Iterator[Any]:
    for value in parameters.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns") or hasattr(getattr(one, "jaxpr", None), "eqns"):
                yield one


def _dot(equation: Any) -> float:
    left = equation.invars[0].aval.shape
    (contracted, _), _ = equation.params["dimension_numbers"]
    depth = math.prod(left[axis] for axis in contracted)
    return 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
