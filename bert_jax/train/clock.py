"""Measures the completed part of a run: by steps, tokens or minutes, or by an earlier run's log (law 4)."""

import bisect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bert_jax.config import TrainConfig
from bert_jax.errors import UserError
from bert_jax.storage.location import location
from bert_jax.train import distributed
from bert_jax.train.metrics import METRICS_FILE, read_lines, read_metrics


@dataclass(frozen=True)
class TokenLength:
    """The length of a run that ends after reading `tokens` tokens.

    `before(step)` gives the tokens before a step and never falls (PhasedLoader.tokens_before;
    train/workdir.py). All processes and every restart know it without counting.
    """

    tokens: float
    before: Callable[[int], float]

    def share(self, step: int) -> float:
        """The run's completed share before a step, from 0 to 1."""
        return min(1.0, self.before(step) / self.tokens)

    @property
    def steps(self) -> int:
        """The first step before which all tokens are read."""
        # Doubling finds an upper bound for the bisection. The share is capped at 1, so the first 1 is the end.
        most = 1
        while self.share(most) < 1.0:
            most *= 2
        return bisect.bisect_left(range(most + 1), 1.0, lo=1, key=self.share)


# With a time budget the clock is read at least once per this share of it, so the run ends within 1%.
REFRESH_SHARE = 0.01
ENDED_BY = ("steps", "budget_minutes", "budget_replay")  # configuration keys that decide the fraction


class Clock:
    """A run's completed fraction before each step, from 0 to 1; the run ends at 1.

    Without a time budget the fraction is step / steps, or the share of a `length` in tokens. With a budget it comes
    from process 0's clock and changes only at refreshes; `refreshed` is true at those steps, so that the loop logs the
    value. With `replay` the clock follows the values logged by an earlier run and repeats it exactly.

    Several processes know process 0's clock at multiples of log_every.

    Args:
        start, fraction, elapsed: step, fraction and seconds of the checkpoint from which the run resumes.
        replay: a log, as for read_fractions.
        changed: whether steps or budget differ from the checkpoint's, so that its fraction belongs to another length.

    Raises:
        UserError: the log does not repeat the run.
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
        length: TokenLength | None = None,
        changed: bool = False,
    ) -> None:
        self.steps, self.length = steps, length
        self.budget = budget_minutes * 60
        self.log_every = max(log_every, 1)
        self.fraction, self.refreshed = fraction, False
        self._start, self._changed = start, changed
        self._elapsed_before = elapsed
        # monotonic(), because the system's clock may be set while the run trains.
        self._started = self._estimated_from = time.monotonic()
        self._share = self._share_then = fraction  # by steps or tokens, or by an earlier run's log
        self._last_refresh = -1.0
        self._received = elapsed
        self._sent: jax.Array | None = None
        self._replay = read_fractions(replay) if replay else None
        if self._replay and changed:
            # A changed length invalidates the checkpoint's fraction. The log has the value that held at this step.
            earlier = [step for step in self._replay if step <= start]
            if not earlier and fraction >= 1.0:
                raise UserError(
                    f"budget_replay: {replay} begins after step {start}, at which the run before it had ended, so the "
                    "learning rate of that step is unknown; branch from an earlier step"
                )
            self.fraction = self._replay[max(earlier)] if earlier else fraction

    @property
    def elapsed(self) -> float:
        """Seconds of training, including those before a restart."""
        return self._elapsed_before + time.monotonic() - self._started

    @property
    def agreed(self) -> float:
        """`elapsed` in process 0, as all processes know it since the last multiple of log_every."""
        return self.elapsed if jax.process_count() == 1 else self._received

    def start_estimate(self) -> None:
        """Makes `remaining` count from now on. Call it after the first step, which compiles, was dispatched."""
        self._estimated_from, self._share_then = time.monotonic(), self._share

    def leave_out(self, seconds: float) -> None:
        """Leaves seconds spent only once, such as on a compilation, out of the run's pace."""
        self._estimated_from += seconds

    @property
    def remaining(self) -> float | None:
        """Estimates the seconds until the run ends, by its pace and its budget; None before anything is done."""
        done = self._share - self._share_then
        by_pace = (time.monotonic() - self._estimated_from) * (1 - self._share) / done if done > 0 else None
        if self.budget <= 0 or self._replay is not None:
            return by_pace
        # A run with a budget may also end by its steps, so the sooner of both ends counts.
        by_budget = max(self.budget - self.elapsed, 0.0)
        return by_budget if by_pace is None else min(by_budget, by_pace)

    def read(self, step: int) -> float:
        """Returns the completed fraction before this step. Call it once for each step, in order."""
        if jax.process_count() > 1:
            # Process 0's clock for this step was sent one step earlier, while the device computed, so nobody waits.
            if self._sent is not None:
                self._received, self._sent = float(self._sent), None
            if (step + 1) % self.log_every == 0:
                self._sent = distributed.send_from_primary(self.elapsed)
        by_steps = step / self.steps if self.steps > 0 else 0.0
        if self.length is not None:
            by_steps = self.length.share(step)
        if self._replay is not None:
            self.refreshed = step in self._replay or (self._changed and step == self._start)
            self.fraction = self._replay.get(step, self.fraction)
            if 0 < self.steps <= step:  # the first of the two ends the run, as with a budget
                self.fraction, self.refreshed = 1.0, True
        elif self.budget <= 0:
            self.refreshed, self.fraction = step % self.log_every == 0, by_steps
        elif step > self._start or self.fraction >= 1.0 or self._changed:
            # A restart uses its checkpoint's fraction, like a run without a stop. A run that had finished, or whose end
            # has changed, reads the clock instead, and its log gets the value (Recorder.correct_fraction). Several
            # processes know one clock only at multiples of log_every, so they refresh nowhere else.
            due = jax.process_count() == 1 and self.elapsed - self._last_refresh >= REFRESH_SHARE * self.budget
            due |= step == self._start
            self.refreshed = due or step % self.log_every == 0 or (0 < self.steps <= step)
            if self.refreshed:
                self._last_refresh = self.elapsed
                # Rounded as the step sees it, so that the logged value replays exactly.
                self.fraction = float(np.float32(min(1.0, max(by_steps, self.agreed / self.budget))))
        # `remaining` needs a share that grows steadily. With a budget, the fraction changes only at refreshes.
        self._share = by_steps if self._replay is None else self.fraction
        return self.fraction


def make_clock(config: TrainConfig, meta: Mapping[str, Any], length: TokenLength | None = None) -> Clock:
    """Makes a run's clock, given the metadata of the checkpoint from which it resumes (empty: it begins)."""
    # A key that the checkpoint does not record counts as unchanged.
    there = (meta.get("provenance") or {}).get("configuration", {})
    return Clock(
        config.steps,
        config.budget_minutes,
        config.log_every,
        start=meta.get("step", 0),
        fraction=meta.get("budget_fraction", 0.0),
        elapsed=meta.get("seconds", 0.0),
        replay=config.budget_replay,
        length=length,
        changed=any(key in there and there[key] != getattr(config, key) for key in ENDED_BY),
    )


def read_fractions(log: str) -> dict[int, float]:
    """Returns a run's logged budget fractions by step; `log` is a metrics.jsonl or a workdir, also in a store.

    Raises:
        UserError: there is no log, it has no fraction, or its run has not finished.
    """
    path = location(log)
    workdir = path.parent if path.name == METRICS_FILE else path  # a workdir in a store has its log in segments
    lines = read_lines(path) if path.is_file() else read_metrics(workdir)
    fractions = {line["step"]: line["budget_fraction"] for line in lines if "budget_fraction" in line}
    # Only a finished run's log ends at 1, which ends the run that follows it.
    last = max(fractions, default=0)
    problem = ""
    if not lines:
        problem = f"no log in {log}; name the workdir, or metrics.jsonl, of a run with a time budget"
    elif not fractions:
        problem = f"{path} contains no budget_fraction; name the log of a run with a time budget"
    elif fractions[last] < 1.0:
        problem = (
            f"{path} ends at step {last} with {fractions[last]:.0%} of its budget, so a run that follows it would "
            "never end; let that run finish first"
        )
    if problem:
        raise UserError(f"budget_replay: {problem}")
    return fractions
