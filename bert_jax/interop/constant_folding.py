"""Simplifies a traced function before it is converted: computes what depends on constants alone, and inlines calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# The parameter that holds the function of a call, by primitive. Derivatives that a call defines are left out.
_CALLED = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def folded(traced: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns the function that was traced, which computes at trace time what it can, such as the slice of each layer.

    A model's parameters must be constants of the traced function.
    """

    def run(*arguments: Any) -> list[Any]:
        return _evaluate(traced.jaxpr, traced.consts, arguments)

    return run


def _evaluate(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        if equation.primitive.name in _CALLED:
            called = equation.params[_CALLED[equation.primitive.name]]
            results: Sequence[Any] = _evaluate(called.jaxpr, called.consts, operands)
        elif _is_constant(equation, operands):
            with jax.ensure_compile_time_eval():
                results = _apply(equation.primitive, operands, equation.params)
        else:
            results = _apply(equation.primitive, operands, equation.params)
        values |= zip(equation.outvars, results, strict=True)
    return [read(variable) for variable in jaxpr.outvars]


def _is_constant(equation: Any, operands: Sequence[Any]) -> bool:
    """Returns whether nothing in an equation is traced, and no size of its results is symbolic."""
    sizes = [size for variable in equation.outvars for size in getattr(variable.aval, "shape", ())]
    return all(isinstance(size, int) for size in sizes) and not any(
        isinstance(one, jax.core.Tracer) for one in operands
    )


def _apply(primitive: Any, operands: Sequence[Any], options: Mapping[str, Any]) -> Sequence[Any]:
    results = primitive.bind(*operands, **options)
    return results if primitive.multiple_results else [results]
