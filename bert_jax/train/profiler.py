"""Traces a few training steps for TensorBoard and Perfetto."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from bert_jax.command import UserError

PROFILE = "profile"  # the folder in a workdir


class Profiler:
    """Traces the steps FIRST:LAST of a run (counted from 0, LAST excluded) into WORKDIR/profile.

    Each process writes plugins/profile/TIME/HOST.xplane.pb, which TensorBoard reads (with tensorboard-plugin-profile),
    and HOST.trace.json.gz, which ui.perfetto.dev reads. Raises UserError unless the steps are two increasing numbers.
    """

    def __init__(self, steps: str, workdir: Path) -> None:
        self.first, self.last = parse_steps(steps) if steps else (-1, -1)
        self.folder = workdir / PROFILE
        self._tracing = False
        self.traced = not steps  # whether everything that was requested so far has been traced

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Surrounds the dispatch of a step, which the trace then shows as a step."""
        if self.first <= step < self.last and not self._tracing:
            jax.profiler.start_trace(self.folder)
            self._tracing = self.traced = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def done(self, step: int) -> bool:
        """Whether the trace ends before this step; the caller then waits for running steps and calls `stop`."""
        return self._tracing and step >= self.last

    def stop(self) -> None:
        """Writes the trace if one is being recorded."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()


def parse_steps(text: str) -> tuple[int, int]:
    """Returns the two numbers of FIRST:LAST. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(
            f"config.profile is {text!r}; expected FIRST:LAST, the first traced step and the step after the last, "
            "such as 100:105"
        )
    return int(match[1]), int(match[2])
