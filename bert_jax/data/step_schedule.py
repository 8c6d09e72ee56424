"""Parses schedules of the form STEP:VALUE,..., in which each value applies from its step until the next one."""

import itertools
from collections.abc import Callable
from typing import TypeVar

from bert_jax.command import UserError

Value = TypeVar("Value")


def parse(
    text: str, what: str, read: Callable[[str], Value], example: str, first: int = 0
) -> tuple[tuple[int, ...], tuple[Value, ...]]:
    """Parses `STEP:VALUE,STEP:VALUE` into the steps and the values.

    what      the configuration key, for messages
    read      converts the text of a value; raises ValueError for an invalid one
    example   an example for messages
    first     0 if the first step must be 0; 1 if it may be any later step
    Raises UserError for invalid syntax or values, and for steps that do not ascend.
    """
    try:
        pairs = [entry.split(":", 1) for entry in text.split(",")]
        steps = tuple(int(step) for step, _ in pairs)
        values = tuple(read(value) for _, value in pairs)
    except ValueError:
        raise UserError(f"{what} is {text!r}, not of the form STEP:VALUE,STEP:VALUE, such as {example}") from None
    starts_right = steps[0] >= 1 if first else steps[0] == 0
    if not starts_right or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise UserError(f"{what} is {text!r}. Its steps must ascend from {first}, such as {example}")
    return steps, values
