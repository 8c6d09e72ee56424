"""Values by training step: batch sizes, mask rates and folders of shards."""

import bisect
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from bert_jax.command import UserError

Value = TypeVar("Value")
_NEXT = re.compile(r",(?=\s*-?\d+\s*:)")  # the comma before the next STEP:


@dataclass(frozen=True)
class StepSchedule(Generic[Value]):
    """A value for each step. Each of the values applies from its step until the next one."""

    steps: tuple[int, ...]  # ascending
    values: tuple[Value, ...]

    @classmethod
    def constant(cls, value: Value) -> "StepSchedule[Value]":
        """The same value at all steps."""
        return cls((0,), (value,))

    def at(self, step: int) -> Value:
        """The value at a step."""
        return self.values[bisect.bisect_right(self.steps, step) - 1]


def parse(
    text: str, what: str, read: Callable[[str], Value], example: str, first: int = 0, *, commas: bool = False
) -> StepSchedule[Value]:
    """Parses `STEP:VALUE,STEP:VALUE`.

    what      the configuration key, for messages
    read      converts the text of a value; raises ValueError for an invalid one
    example   an example for messages
    first     0 if the first step must be 0; 1 if it may be any later step
    commas    whether a value may hold commas, those that no STEP: follows
    Raises UserError for invalid syntax or values, and for steps that do not ascend.
    """
    try:
        pairs = [entry.split(":", 1) for entry in (_NEXT.split(text) if commas else text.split(","))]
        steps = tuple(int(step) for step, _ in pairs)
        values = tuple(read(value) for _, value in pairs)
    except ValueError:
        raise UserError(f"{what} is {text!r}, not of the form STEP:VALUE,STEP:VALUE, such as {example}") from None
    starts_right = steps[0] >= 1 if first else steps[0] == 0
    if not starts_right or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise UserError(f"{what} is {text!r}. Its steps must ascend from {first}, such as {example}")
    return StepSchedule(steps, values)
