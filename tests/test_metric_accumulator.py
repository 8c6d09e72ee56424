"""Log lines are means over steps, whenever the metrics of these steps are fetched from the device."""

import functools
import operator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import ModelConfig
from bert_jax.train import metric_accumulator
from bert_jax.train.finite import FiniteCheck
from bert_jax.train.metric_accumulator import MetricAccumulator
from bert_jax.train.multi_seed import means

CONFIG = ModelConfig(vocab_size=10, layers=1, width=8, heads=2, feed_forward=16, max_positions=16)
BATCH = SimpleNamespace(input_ids=np.zeros((2, 8), np.int32))
SKIPPED = (4, 9)  # steps whose loss is not finite


class Check(FiniteCheck):
    """Counts only finite steps, and notes those it has seen."""

    def __init__(self):
        self.skipped, self.seen = 0, []

    def __call__(self, step, values):
        self.seen.append(step)
        return values["finite"]


def accumulator(check, index=None):
    return MetricAccumulator(CONFIG, {}, check, index, predictions=lambda batch: 2)


def made_steps(count, seeds=()):
    """The metrics of each step, with one value for each seed."""
    rng = np.random.default_rng(3)
    for step in range(1, count + 1):
        finite = np.full(seeds, step not in SKIPPED)
        loss = np.where(finite, rng.normal(size=seeds), np.nan).astype(np.float32)
        yield (
            step,
            {
                "loss": loss,
                "learning_rate": np.full(seeds, 0.5 / step, np.float32),
                "tokens": np.full(seeds, 10 + step, np.int32),
                "finite": finite,
                "skipped": np.full(seeds, sum(step >= bad for bad in SKIPPED), np.int32),
            },
        )


@pytest.mark.parametrize("most", [1, 3, 100])
def test_a_line_is_the_mean_over_its_finite_steps_whatever_is_fetched_when(most, monkeypatch):
    monkeypatch.setattr(metric_accumulator, "MOST_PENDING", most)
    for index in (None, 0, 1):
        check = Check()
        made, lines = accumulator(check, index), []
        found = list(made_steps(12, () if index is None else (2,)))
        for step, metrics in found:
            made.add(step, BATCH, jax.tree.map(jnp.asarray, metrics))
            if step in (5, 12):
                lines.append(made.close(0.0))
        of_seed = [
            (step, {name: value[... if index is None else index] for name, value in m.items()}) for step, m in found
        ]
        for line, first, last in zip(lines, (1, 6), (5, 12), strict=True):
            steps = [metrics for step, metrics in of_seed if first <= step <= last]
            losses = [float(metrics["loss"]) for metrics in steps if metrics["finite"]]
            assert len(losses) == len(steps) - 1
            # Exactly: added in float64 in the order of the steps. The sum() of Python 3.12 compensates for rounding.
            assert line["loss"] == functools.reduce(operator.add, losses) / len(losses)
            assert line["learning_rate"] == steps[-1]["learning_rate"]
            assert line["skipped"] == steps[-1]["skipped"]
            assert line["padding_share"] == pytest.approx(1 - sum(m["tokens"] for m in steps) / (16 * len(steps)))
        assert made.tokens == sum(range(11, 23))
        assert check.seen == list(range(1, 13))


def test_only_the_flag_is_fetched_between_two_lines(monkeypatch):
    fetched, real = [], jax.device_get

    def device_get(tree):
        fetched.append(len(jax.tree.leaves(tree)))
        return real(tree)

    monkeypatch.setattr(jax, "device_get", device_get)
    made = accumulator(Check())
    for step, metrics in made_steps(3):
        made.add(step, BATCH, jax.tree.map(jnp.asarray, metrics))
    assert fetched == [1, 1]
    made.close(0.0)
    assert fetched == [1, 1, 15]


def test_a_step_that_is_not_finite_is_checked_before_another_one_follows_the_next():
    check = Check()
    made = accumulator(check)
    for step, metrics in made_steps(5):
        made.add(step, BATCH, jax.tree.map(jnp.asarray, metrics))
        assert check.seen == ([1, 2, 3, 4] if step == 5 else [])


def test_a_seed_whose_line_has_only_skipped_steps_stops_nobody():
    """The line of such a seed has no means, of which the seeds that made updates have several."""
    seeds = [accumulator(Check(), index) for index in (0, 1)]
    metrics = {
        "loss": np.array([np.inf, 2.0], np.float32),
        "mlm_accuracy": np.array([np.nan, 0.5], np.float32),
        "tokens": np.array([8, 8], np.int32),
        "finite": np.array([False, True]),
        "learning_rate": np.array([0.25, 0.25], np.float32),
    }
    for made in seeds:
        made.add(1, BATCH, jax.tree.map(jnp.asarray, metrics))
    skipped, updated = (made.close(0.0) for made in seeds)
    assert "mlm_accuracy" not in skipped and updated["mlm_accuracy"] == 0.5
    for lines in ([skipped, updated], [updated, skipped]):
        shown = means(lines)
        assert shown.keys() == updated.keys()
        assert shown["loss"] is None and shown["mlm_accuracy"] is None and shown["learning_rate"] == 0.25
    assert means([updated, updated])["loss"] == 2.0
