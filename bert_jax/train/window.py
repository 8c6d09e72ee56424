"""Metrics between two log lines: means over the steps, and where the time went."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.train.metrics import peak_flops, training_flops

LATEST = ("learning_rate", "gradient_norm")  # of the last step; everything else is a mean over the window


class Window:
    """Collects the metrics of steps. A step's are fetched once the next is under way, so the device never waits."""

    def __init__(self, model: ModelConfig) -> None:
        self.tokens = 0  # real tokens seen since the loop began
        self._model = model
        self._peak = peak_flops()
        self._pending: dict[str, jax.Array] | None = None
        self._waited = 0.0
        self._reset()

    def _reset(self) -> None:
        self._metrics: list[dict[str, float]] = []
        self._slots = 0
        self._flops = 0.0
        self._paused = 0.0
        self._started = time.monotonic()

    def add(self, batch: Any, metrics: dict[str, jax.Array]) -> None:
        """Notes a step that has been dispatched, and fetches the one before it."""
        rows, length = batch.input_ids.shape
        masked = getattr(batch, "masked_positions", None)
        self._slots += rows * length
        self._flops += training_flops(self._model, rows, length, 0 if masked is None else masked.shape[1])
        pending, self._pending = self._pending, metrics
        self._fetch(pending)

    def close(self, waited_seconds: float) -> dict[str, float | None]:
        """The values of a log line over the steps since the last one; waits for the last step to end.

        waited_seconds is the time spent waiting for batches since the loop began.
        """
        pending, self._pending = self._pending, None
        self._fetch(pending)
        seconds = max(time.monotonic() - self._started - self._paused, 1e-9)
        tokens = sum(metrics["tokens"] for metrics in self._metrics)
        line: dict[str, float | None] = {}
        for name in self._metrics[0] if self._metrics else {"loss": None}:
            if name == "tokens":
                continue
            values = [metrics[name] for metrics in self._metrics]
            line[name] = values[-1] if name in LATEST else float(np.mean(values, dtype=np.float64))
        line |= {
            "tokens_per_second": tokens / seconds,
            "mfu": self._flops / seconds / self._peak if self._peak else None,
            "data_wait_share": (waited_seconds - self._waited) / seconds,
            "padding_share": 1 - tokens / max(self._slots, 1),
        }
        self._waited = waited_seconds
        self._reset()
        return line

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around evaluation and saving, which are not training's time."""
        started = time.monotonic()
        yield
        self._paused += time.monotonic() - started

    def _fetch(self, metrics: dict[str, jax.Array] | None) -> None:
        if metrics is None:
            return
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.tokens += int(values["tokens"])
        self._metrics.append(values)
