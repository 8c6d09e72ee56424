"""How much of a run is done: by steps, by minutes, or by the record of an earlier run (law 4)."""

import time
from pathlib import Path

import jax
import numpy as np

from bert_jax.command import UserError
from bert_jax.train import distributed
from bert_jax.train.metrics import read_lines

# A clocked run reads the clock at least this often, in shares of its budget, so that it ends within a percent of it.
REFRESH_SHARE = 0.01


class Clock:
    """The share of the run done before each step, from 0 to 1; the run ends when it reaches 1.

    With steps alone it is step / steps. With a budget it is read from process 0's clock at refreshes only, and
    `refreshed` says at which, so that the loop logs the value there; between two refreshes it stands still. Following a
    log's values instead (`replay`) repeats the run exactly.
    """

    def __init__(
        self,
        steps: int,
        budget_minutes: float,
        log_every: int,
        *,
        start: int = 0,
        fraction: float = 0.0,
        elapsed: float = 0.0,
        replay: str = "",
    ) -> None:
        """start, fraction and elapsed are those of the checkpoint that the run goes on from."""
        check_end(steps, budget_minutes, replay)
        self.steps = steps
        self.budget = budget_minutes * 60
        self.log_every = max(log_every, 1)
        self.fraction = fraction
        self.refreshed = False
        self._start = start
        self._elapsed_before = elapsed
        self._started = time.monotonic()
        self._last_refresh = -1.0
        self._replay = read_fractions(replay) if replay else None

    @property
    def elapsed(self) -> float:
        """Seconds of training, those before a restart counted."""
        return self._elapsed_before + time.monotonic() - self._started

    def read(self, step: int) -> float:
        """The share done before this step; steps are read in order."""
        if self._replay is not None:
            self.refreshed = step in self._replay
            self.fraction = self._replay.get(step, self.fraction)
            return self.fraction
        by_steps = step / self.steps if self.steps > 0 else 0.0
        if self.budget > 0 and step == self._start and self.fraction < 1.0:
            return self.fraction  # no line is logged here, so nothing new may be decided, but that a longer run goes on
        if self.budget <= 0:
            self.refreshed, self.fraction = step % self.log_every == 0, by_steps
            return self.fraction
        # Several processes must refresh at the same steps, which only the step tells them all.
        due = jax.process_count() == 1 and self.elapsed - self._last_refresh >= REFRESH_SHARE * self.budget
        self.refreshed = due or step % self.log_every == 0 or (0 < self.steps <= step)
        if self.refreshed:
            self._last_refresh = self.elapsed
            share = np.float32(min(1.0, max(by_steps, self.elapsed / self.budget)))
            self.fraction = distributed.from_first(float(share))
        return self.fraction


def check_end(steps: int, budget_minutes: float, replay: str) -> None:
    """Raises UserError for a run that nothing would end."""
    if steps <= 0 and budget_minutes <= 0 and not replay:
        raise UserError("nothing says when to stop; set --config.steps=N or --config.budget_minutes=M")


def read_fractions(metrics_file: str) -> dict[int, float]:
    """The budget fractions that a run logged, by step. Raises UserError if the file has none."""
    path = Path(metrics_file)
    if not path.is_file():
        raise UserError(f"budget_replay: no such file: {path}; name the metrics.jsonl of a run with a budget")
    lines = read_lines(path)
    fractions = {line["step"]: line["budget_fraction"] for line in lines if "budget_fraction" in line}
    if not fractions:
        raise UserError(f"budget_replay: {path} logs no budget_fraction; it is not from a run with a budget")
    last = max(fractions)
    if fractions[last] < 1.0:
        raise UserError(
            f"budget_replay: {path} ends at step {last}, with {fractions[last]:.0%} of its budget, and would never end "
            "the run that follows it; let its own run end first"
        )
    return fractions
