"""Values that each hold from their step until the next one's, as the configuration writes them: STEP:VALUE,..."""

import itertools
from collections.abc import Callable
from typing import TypeVar

from bert_jax.command import UserError

Value = TypeVar("Value")


def parse(
    text: str, what: str, read: Callable[[str], Value], example: str, first: int = 0
) -> tuple[tuple[int, ...], tuple[Value, ...]]:
    """The steps and the values of `STEP:VALUE,STEP:VALUE`.

    what, example   name the schedule in a message, and show how one is written
    read            makes a value of its text; ValueError says that it is none
    first           where the steps begin: at 0, or (1) anywhere behind it
    Raises UserError for another form, and for steps that do not ascend from there.
    """
    try:
        pairs = [entry.split(":", 1) for entry in text.split(",")]
        steps = tuple(int(step) for step, _ in pairs)
        values = tuple(read(value) for _, value in pairs)
    except ValueError:
        raise UserError(f"{what} {text!r}; it is STEP:VALUE,STEP:VALUE, as {example}") from None
    begins = steps[0] >= 1 if first else steps[0] == 0
    if not begins or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise UserError(f"{what} {text!r}; its steps ascend from {first}, as {example}")
    return steps, values
