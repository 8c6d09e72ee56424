"""Traces a few training steps for TensorBoard and Perfetto."""

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import jax

from bert_jax.command import UserError
from bert_jax.storage.location import Location, is_stored

PROFILE = "profile"  # the folder in a workdir


class Profiler:
    """Traces the steps FIRST:LAST of a run (counted from 0, LAST excluded) into WORKDIR/profile.

    Each process writes plugins/profile/TIME/HOST.xplane.pb, which TensorBoard reads (with tensorboard-plugin-profile),
    and HOST.trace.json.gz, which ui.perfetto.dev reads. Raises UserError unless the steps are two increasing numbers,
    and for a workdir in a store.
    """

    def __init__(self, steps: str, workdir: Location) -> None:
        self.first, self.last = parse_steps(steps) if steps else (-1, -1)
        if steps and is_stored(workdir):
            raise UserError(f"config.profile={steps} cannot be written to {workdir}; use a local --workdir for it")
        self.folder = workdir / PROFILE
        self._tracing = False
        self._traced = not steps  # whether there is nothing to trace any more

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Surrounds the dispatch of a step, which the trace then shows as a step."""
        if self.first <= step < self.last and not self._tracing:
            jax.profiler.start_trace(self.folder)
            self._tracing = self._traced = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def end_step(
        self, step: int, settled: Callable[[], AbstractContextManager[None]], report: Callable[[str], None]
    ) -> None:
        """Writes the trace if its last step has been dispatched; `step` is the number of steps done.

        settled   a context that first waits for dispatched steps, so that the trace holds all of the last one
        """
        if self._tracing and step >= self.last:
            with settled():
                self._stop()
            report(f"traced steps {self.first}:{self.last} into {self.folder}")

    def close(self, report: Callable[[str], None]) -> None:
        """Writes a trace that the end of the run cuts short; reports when none of the steps has run."""
        self._stop()
        if not self._traced:
            report(f"config.profile={self.first}:{self.last}: none of these steps ran, so nothing was traced")

    def _stop(self) -> None:
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
