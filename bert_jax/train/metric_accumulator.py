"""Computes the values in a log line: means over the steps, FLOPs, memory, and time shares.

FiniteCheck handles steps whose loss or gradient is not finite: it stops the run or counts them as skipped. The train
step itself has then made no update (train/step.py), so the host may read the flag one step late.
"""

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from bert_jax.config import ModelConfig, TrainConfig
from bert_jax.errors import UserError
from bert_jax.model.heads.config import Heads
from bert_jax.model.heads.tokens import SPAN_PLACE_WIDTH, generator_config
from bert_jax.shapes import padded_vocabulary
from bert_jax.storage.location import Location
from bert_jax.train.checkpoint import Checkpoints
from bert_jax.train.objectives.objective import Objective

NO_FURTHER_HEADS = Heads()
# So many steps' metrics stay on the device at most, until they are fetched together.
MOST_PENDING = 128
# Metrics whose last value goes into a log line; all others are means over the steps.
LATEST = ("learning_rate", "gradient_norm", "skipped")

# Dense bf16 peak of one device (a chip; of TPU7x one of its two cores), FLOP/s, by jax's device_kind. TPU:
# cloud.google.com/tpu/docs/system-architecture-tpu-vm; GPU: NVIDIA's data sheets, SXM, without sparsity.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


class FiniteCheck:
    """Reads a step's flag before the step is saved.

    `skipped` counts the updates left out since the run began, including those before a restart.
    """

    def __init__(
        self,
        config: TrainConfig,
        skipped: int,
        workdir: Location,
        checkpoints: Checkpoints,
        report: Callable[[str], None],
    ) -> None:
        self.skipped = skipped
        self._on_nonfinite, self._skip_at_most = config.on_nonfinite, config.skip_at_most
        self._workdir, self._checkpoints, self._report = workdir, checkpoints, report

    def __call__(self, step: int, values: Mapping[str, Any]) -> bool:
        """Returns whether a step made its update; `values` holds the step's metrics.

        Raises:
            UserError: it did not, and the run must stop.
        """
        if values["finite"]:
            return True
        self.skipped = int(values["skipped"])
        loss, norm = (
            f"{value:.4g}" if math.isfinite(value) else str(value)
            for value in (values["loss"], values["gradient_norm"])
        )
        cause = f"the loss is {loss} and the gradient norm {norm} at step {step}"
        if self._on_nonfinite == "skip" and self.skipped <= self._skip_at_most:
            self._report(f"{cause}: skipped this update ({self.skipped} of at most {self._skip_at_most})")
            return False
        # Nothing is lost: the step has kept the parameters, and older checkpoints stay whole.
        self._checkpoints.wait()  # a save may be under way
        last = self._checkpoints.latest_step()
        state = "there is no checkpoint yet" if last is None else f"the last checkpoint is step {last}"
        advice = "Lower --config.optimizer.learning_rate, lengthen --config.optimizer.schedule.warmup_steps, or "
        if self._on_nonfinite == "skip":
            advice += f"raise --config.skip_at_most={self._skip_at_most}"
        else:
            advice += "skip such steps with --config.on_nonfinite=skip"
        raise UserError(f"{cause}; {state} in {self._workdir / 'checkpoints'}. {advice}")


class MetricAccumulator:
    """Accumulates the metrics of steps, which it fetches together for a log line.

    Between lines it fetches only a step's flag `finite`, once the next step is dispatched. So the device never waits,
    the host is at most one step ahead of it, and a non-finite step is handled before another follows.

    Args:
        saved: an earlier accumulator's `state`, so that a restart between two lines changes no mean; empty at first.
        check: called with each step and its metrics; returns whether they count in the means.
        objective: tells the positions and heads that training_flops counts.
    """

    def __init__(
        self,
        model: ModelConfig,
        saved: Mapping[str, Any],
        check: Callable[[int, Mapping[str, Any]], bool],
        objective: Objective,
    ) -> None:
        self.tokens = int(saved.get("all_tokens", 0))  # real tokens since the run began
        self._closed_seconds = 0.0  # of steps in lines since this process began
        self._model, self._objective = model, objective
        self._peak = peak_flops()
        self._check = check
        # Dispatched steps, whose metrics are still on the devices.
        self._pending: list[tuple[int, dict[str, jax.Array]]] = []
        self._waited = 0.0
        self._in_pause = False
        self._begin_line(saved)

    def _begin_line(self, saved: Mapping[str, Any]) -> None:
        self._steps, self._positions = int(saved.get("steps", 0)), int(saved.get("slots", 0))
        self._sums: dict[str, float] = dict(saved.get("sums", {}))
        # By metric, how many steps lacked it: it belongs to one phase of a PhasedObjective.
        self._absent: dict[str, int] = dict(saved.get("absent", {}))
        self._latest: dict[str, float] = dict(saved.get("latest", {}))
        self._tokens_before = self._sums.get("tokens", 0.0)  # before a restart, outside this process's time
        self._flops = self._paused = 0.0
        self._dispatched = 0  # steps in this process's time
        self._started = time.monotonic()

    @property
    def step_seconds(self) -> float:
        """Seconds that this process spent on steps, without compiling, evaluating and saving."""
        return self._closed_seconds + self._line_seconds()

    def _line_seconds(self) -> float:
        # A line that follows a pause at once would divide by 0.
        return max(time.monotonic() - self._started - self._paused, 1e-9)

    def add(self, step: int, batch: Any, metrics: dict[str, jax.Array]) -> None:
        """Records a dispatched step, once the step before it has finished."""
        rows, length = batch.input_ids.shape[0], batch.input_ids.shape[-1]
        # Rows are those of the global batch, like the tokens among the metrics and the peak of all devices.
        self._positions += rows * length
        self._dispatched += 1
        read = self._objective.predictions(batch), self._objective.heads, self._objective.last_positions(batch)
        self._flops += training_flops(self._model, rows, length, *read)
        # Fetching the flag of the step before waits for that step, while the device already has the next one.
        if self._pending:
            finite = jax.device_get(self._pending[-1][1]["finite"])
            if len(self._pending) >= MOST_PENDING or not finite:
                self.settle()
        self._pending.append((step, metrics))

    def state(self) -> dict[str, Any]:
        """Returns the sums so far as JSON values, after the last step has finished."""
        self.settle()
        return {
            "all_tokens": self.tokens,
            "steps": self._steps,
            "sums": self._sums,
            "latest": self._latest,
            "slots": self._positions,
        } | ({"absent": self._absent} if self._absent else {})

    def close(self, waited_seconds: float) -> dict[str, float | None]:
        """Returns the values of a log line over the steps since the last one, after the last step has finished.

        `waited_seconds` is the time spent waiting for batches since the loop began.
        """
        self.settle()
        # Evaluating and saving are no training time. After a restart, earlier tokens were not read in this time.
        seconds = self._line_seconds()
        self._closed_seconds += seconds
        tokens = self._sums.get("tokens", 0.0)
        # A metric's mean is over the steps that have it: phases have different terms.
        had = {name: self._steps - self._absent.get(name, 0) for name in self._sums}
        means = {name: value / had[name] if had[name] else None for name, value in self._sums.items()}
        means.pop("tokens", None)
        line: dict[str, float | None] = {"loss": None, **means, **self._latest}
        line |= {
            "tokens_per_second": (tokens - self._tokens_before) / seconds,
            "mfu": self._flops / seconds / self._peak if self._peak else None,
            "data_wait_share": (waited_seconds - self._waited) / seconds,
            "step_seconds": seconds / max(self._dispatched, 1),
            "padding_share": 1 - tokens / max(self._positions, 1),
            "peak_memory_gb": peak_memory_gb(),
        }
        self._waited = waited_seconds
        self._begin_line({})
        return line

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds compiling, evaluation and saving, which are no training time; first waits for the last step."""
        self.settle()
        if self._in_pause:  # the outer pause counts the time
            yield
            return
        self._in_pause, started = True, time.monotonic()
        try:
            yield
        finally:
            self._in_pause = False
            self._paused += time.monotonic() - started

    def settle(self) -> None:
        """Waits for the last step; fetches, checks and counts all pending metrics."""
        # Cleared first, because the check may raise, and what follows a failure must not settle the same steps again.
        pending, self._pending = self._pending, []
        fetched = jax.device_get([metrics for _, metrics in pending])
        for (step, _), arrays in zip(pending, fetched, strict=True):
            values = {name: value.item() for name, value in arrays.items()}
            self.tokens += int(values["tokens"])
            # A skipped step counts in no mean, but its tokens were read.
            counts = self._check(step, values)
            if counts:
                for name in {*self._sums, *values} - {*LATEST, "finite", "tokens"}:
                    # A metric that appears for the first time was absent in all earlier steps of the line. A mean over
                    # no targets is NaN, although the step is finite.
                    absent = int(math.isnan(values.get(name, math.nan)))
                    absent += 0 if name in self._sums else self._steps
                    if absent:
                        self._absent[name] = self._absent.get(name, 0) + absent
            self._steps += counts
            for name, value in values.items():
                if name in LATEST:
                    self._latest[name] = float(value)
                elif name != "finite" and (counts or name == "tokens"):
                    self._sums[name] = self._sums.get(name, 0.0) + (0.0 if math.isnan(value) else float(value))


def training_flops(
    model: ModelConfig,
    rows: int,
    length: int,
    predictions: int,
    heads: Heads = NO_FURTHER_HEADS,
    read: int | None = None,
) -> float:
    """Returns a training step's FLOPs: 3 times the forward matmuls (one forward, two backward).

    For B rows of T positions with M predictions, L layers of width D and feed-forward width F, and V padded tokens:

        3 (L (8 B T D^2 + 4 B T D F + 4 B T^2 D) + B M (2 D^2 + 2 D V))

    If heads read only K positions per row, the last layer needs 4 B T D^2 for keys and values, and all else only K
    times instead of T times. A gated feed-forward has 6 B T D F, and a layer with a window counts only the positions it
    attends to. Padding counts, since the chip computes it. Look-ups, norms, softmax, dropout, the optimizer and
    recomputation count nothing (Chowdhery et al. 2022, appendix B, on MFU).

    Args:
        predictions: positions per row whose vocabulary logits are computed; causal and two-directional models compute
            all.
        read: K, the positions per row at which the last layer is computed (Objective.last_positions); None: all.
        heads: an ELECTRA generator predicts the tokens, and the model classifies all positions, with 2 D^2 + 2 D each.
            The span boundary head predicts them again, with 2 (2 D + 200) D + 2 D^2 + 2 D V.
    """
    if heads.generator:
        classified = rows * length * (2 * model.width**2 + 2 * model.width)
        generator = generator_config(model, heads.generator)
        of_generator = training_flops(generator, rows, length, predictions, read=predictions)
        return of_generator + 3.0 * classified + training_flops(model, rows, length, 0)
    width, positions = model.layer_width, rows * length * model.directions
    if (flops := model.encoder.layer_flops(model)) is not None:
        layers = positions * flops
    else:
        # A layer with a window attends to itself and `window` positions on either side.
        attended = [
            length if model.is_global(layer) else min(length, 2 * model.window + 1) for layer in range(model.layers)
        ]
        keys_and_values = 4 * model.width**2
        per_query = keys_and_values + (6 if model.gated else 4) * model.width * model.feed_forward
        layers = positions * (model.layers * (keys_and_values + per_query) + 4 * model.width * sum(attended))
        if read is not None:
            layers -= rows * (length - read) * (per_query + 4 * model.width * attended[-1])
    language_model = model.causal or model.directions > 1
    predicted = positions if language_model else rows * predictions
    projection = 2 * width * model.embedding_width  # from the embeddings' width, and in a language model back to it
    transform = projection if language_model else 2 * width * model.table_width
    # The padded vocabulary, since the matmul computes its padding, too.
    logits = 2 * model.table_width * padded_vocabulary(model.vocab_size)
    head = predicted * (transform + logits)
    if heads.span_boundary:
        inputs = 2 * (2 * width + SPAN_PLACE_WIDTH) * width
        head += rows * predictions * (inputs + 2 * width * model.table_width + logits)
    return 3.0 * (rows * length * projection + layers + head)


def peak_flops() -> float | None:
    """Returns all devices' total peak in FLOP/s, or None if it is unknown (CPUs)."""
    peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    return peak * jax.device_count() if peak else None


def peak_memory_gb() -> float:
    """Returns the highest peak memory of this process's devices, in 10^9 bytes; on a CPU, the process's own."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [values["peak_bytes_in_use"] for values in stats if "peak_bytes_in_use" in values]
    # The system counts bytes on macOS, and KiB elsewhere.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return max(peaks, default=resident) / 1e9
