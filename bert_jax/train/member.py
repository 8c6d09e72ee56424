"""What a run has of its own while it trains, alone or together with others: log, checkpoints, evaluations, its end."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from bert_jax.model import paths
from bert_jax.train import distributed, partitioning
from bert_jax.train.checkpoint import EVALUATION
from bert_jax.train.clock import Clock
from bert_jax.train.early_stop import EarlyStop
from bert_jax.train.evaluate import Evaluator
from bert_jax.train.finite import FiniteCheck
from bert_jax.train.metric_accumulator import MetricAccumulator
from bert_jax.train.metrics import MetricsWriter
from bert_jax.train.run import Result
from bert_jax.train.state import TrainState
from bert_jax.train.together import Begun
from bert_jax.train.workdir import read_params


class Member:
    """A run in the loop. The state that its methods take is the loop's, of which `take` gives its own part.

    running     whether it still trains; one that has ended before the others stays as it is
    unlogged    whether the log line and the evaluation of the step that it goes on from are still to come
    """

    def __init__(
        self,
        begun: Begun,
        evaluators: Sequence[Evaluator],
        take: Callable[[Any], Any],
        place: int | None,
        report: Callable[[str], None],
    ) -> None:
        """place is that in the stacked state, None where there is one run alone."""
        self.run, self._checkpoints, self._made_by = begun.run, begun.checkpoints, begun.made_by
        self._evaluators, self._take = evaluators, take
        run, meta, first = begun.run, begun.meta, begun.first
        self.running = not begun.ended
        self._last = self._saved_step = first
        self._seconds = float(meta.get("seconds", 0.0))
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self.unlogged = bool(meta.get("unlogged", False))
        self._writer = MetricsWriter(run.workdir, first - self.unlogged)
        self._finite = FiniteCheck(
            run.config.on_nonfinite,
            run.config.skip_at_most,
            meta.get("skipped", 0),
            run.workdir,
            last_checkpoint=self._last_checkpoint,
            report=report,
        )
        self.accumulator = MetricAccumulator(run.model, meta.get("window", {}), self._finite, place)
        self._early: EarlyStop | None = None
        if run.early_stop and self._checkpoints.best:
            saved, evaluations = meta.get("early_stop", {}), self._checkpoints.evaluations()
            self._early = EarlyStop(run.early_stop, self._checkpoints.best, saved, first, evaluations)

    @property
    def stops_early(self) -> bool:
        """Whether its evaluations say that it is to end, though its steps are not over."""
        return self._early is not None and self._early.stopped

    def ended_at(self, step: int, seconds: float | None) -> None:
        """Ends it, with the seconds of training until then (None: those that its checkpoint says)."""
        self.running, self._last = False, step
        self._seconds = self._seconds if seconds is None else seconds

    def evaluation(self, step: int) -> dict[str, float]:
        """What was measured at a step, if it was."""
        return self._evaluated[1] if self._evaluated[0] == step else {}

    def is_measured(self, step: int) -> bool:
        """Whether nothing is left to measure at a step."""
        if not self.running:
            return self._keeps_best or self._evaluated[0] == self._last
        return self._evaluated[0] == step

    def evaluate(self, step: int, state: TrainState) -> None:
        """What the evaluators measure of the parameters, and under ema_* of their average where one is kept."""
        step = step if self.running else self._last
        metrics: dict[str, float] = {}
        params, average = self._take((state.params, state.average))
        for evaluator in self._evaluators:
            metrics |= evaluator(params, step)
            if average is not None:
                metrics |= {f"ema_{name}": value for name, value in evaluator(average, step).items()}
        self._evaluated = (step, metrics)
        if self._checkpoints.best:
            self._checkpoints.best.check_among(metrics)

    def log(self, step: int, measured: bool, clock: Clock, waited_seconds: float) -> dict[str, float | None]:
        """Writes a line, with what was measured if so; returns what of it is shown."""
        evaluation = self.evaluation(step) if measured else {}
        if self._early and measured:
            self._early.note(step, evaluation)
        self.unlogged = False
        values = self.accumulator.close(waited_seconds)
        shown = {name: values[name] for name in values if "loss" in name or "accuracy" in name}
        shown |= {f"eval_{name}": value for name, value in evaluation.items()}
        shown |= {"tokens/s": values["tokens_per_second"]}
        if clock.budget > 0 or self.run.config.budget_replay:
            values["budget_fraction"] = clock.fraction
        self._writer.write(step, values | {f"eval_{name}": value for name, value in evaluation.items()})
        return shown

    def best(self) -> str:
        """One line of its best evaluation."""
        if not self._keeps_best:
            return "nothing that was measured of it was finite"
        assert self._early is not None
        return f"its best was {self._early.value:.4f} at step {self._early.step}"

    def found_better(self, step: int) -> bool:
        """Whether a step was measured, and is to be saved for that."""
        best = self._checkpoints.best
        return best is not None and best.beaten_by(self.evaluation(step))

    def save(self, step: int, state: TrainState, clock: Clock, unlogged: bool = False) -> None:
        """Begins to save a step, or notes that it is saved already."""
        if step == self._saved_step:
            self._checkpoints.wait()
            if distributed.broadcast_from_primary(self._checkpoints.latest_step()) == step:
                self._checkpoints.measured(step, self.evaluation(step))  # since then, where SIGTERM had cut that off
                return
        meta = {
            "step": step,
            "seconds": clock.elapsed,
            "budget_fraction": clock.fraction,
            "window": self.accumulator.state(),
            "skipped": self._finite.skipped,
            "provenance": self._made_by,
            "unlogged": unlogged,
            EVALUATION: self.evaluation(step),
        }
        if self._early:
            meta["early_stop"] = self._early.state()
        params, optimizer_state, average = self._take((state.params, state.optimizer_state, state.average))
        self._checkpoints.save(step, params, optimizer_state, meta, average)
        self._saved_step = step

    def wait(self) -> None:
        """Until what was saved is on disk."""
        self._checkpoints.wait()

    def result(self, state: TrainState, mesh: Mesh, stop_requested: bool) -> Result:
        """What came of it, once it has ended: of its last step, or of the best of those measured if it may stop early.

        That one is read from its checkpoint.
        """
        kept, evaluation = self._last, self.evaluation(self._last)
        if self._early is not None and self._early.step is not None:
            kept, evaluation = self._early.step, self._early.evaluation
            self._checkpoints.write_best()
        if kept == self._last:
            params = self._take(state.params)
        else:
            params = partitioning.put(paths.unflatten(read_params(self.run.workdir, kept)), mesh)
        return Result(self._last, self._seconds, self.accumulator.tokens, evaluation, params, kept, stop_requested)

    def close(self) -> None:
        self._writer.close()

    @property
    def _keeps_best(self) -> bool:
        return self._early is not None and self._early.step is not None

    def _last_checkpoint(self) -> int | None:
        """The newest step that is whole, once the save under way has ended."""
        self._checkpoints.wait()
        return self._checkpoints.latest_step()
