"""A trace of a few steps, for TensorBoard and Perfetto."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from bert_jax.command import UserError

PROFILE = "profile"  # where in a workdir


class Profiler:
    """Traces the steps FIRST:LAST of a run, both counted from 0 and the last left out, into WORKDIR/profile.

    jax.profiler writes plugins/profile/TIME/HOST.xplane.pb, which TensorBoard reads (with tensorboard-plugin-profile),
    and HOST.trace.json.gz, which ui.perfetto.dev reads; every process its own. Raises UserError for steps that are
    not two numbers, the second the greater.
    """

    def __init__(self, steps: str, workdir: Path) -> None:
        self.first, self.last = parse_steps(steps) if steps else (-1, -1)
        self.folder = workdir / PROFILE
        self._tracing = False
        self.traced = not steps  # what was asked for, so far

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the dispatch of a step, which is then a step in the trace, too."""
        if self.first <= step < self.last and not self._tracing:
            jax.profiler.start_trace(self.folder)
            self._tracing = self.traced = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def done(self, step: int) -> bool:
        """Whether the trace ends before this step: then what runs has to end first, and `stop` is to be called."""
        return self._tracing and step >= self.last

    def stop(self) -> None:
        """Writes what was traced, if anything is being."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()


def parse_steps(text: str) -> tuple[int, int]:
    """The two numbers of FIRST:LAST. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"config.profile is {text!r}; give the first step and the one after the last, as 100:105")
    return int(match[1]), int(match[2])
