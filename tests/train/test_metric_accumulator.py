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
from bert_jax.train.metric_accumulator import MetricAccumulator
from bert_jax.train.objectives import MaskedLMObjective

CONFIG = ModelConfig(vocab_size=10, layers=1, width=8, heads=2, feed_forward=16, max_positions=16)
BATCH = SimpleNamespace(
    input_ids=np.zeros((2, 8), np.int32),
    masked_positions=np.zeros((2, 2), np.int32),
    cls_positions=np.zeros((2, 1), np.int32),
)
SKIPPED = (4, 9)  # steps whose loss is not finite


class Check:
    """Counts only finite steps, and notes those it has seen."""

    def __init__(self):
        self.seen = []

    def __call__(self, step, values):
        self.seen.append(step)
        return values["finite"]


def accumulator(check):
    return MetricAccumulator(CONFIG, {}, check, MaskedLMObjective())


def made_steps(count):
    """The metrics of each step."""
    rng = np.random.default_rng(3)
    for step in range(1, count + 1):
        finite = np.array(step not in SKIPPED)
        loss = np.where(finite, rng.normal(), np.nan).astype(np.float32)
        yield (
            step,
            {
                "loss": loss,
                "learning_rate": np.array(0.5 / step, np.float32),
                "tokens": np.array(10 + step, np.int32),
                "finite": finite,
                "skipped": np.array(sum(step >= bad for bad in SKIPPED), np.int32),
            },
        )


@pytest.mark.parametrize("most", [1, 3, 100])
def test_a_line_is_the_mean_over_its_finite_steps_whatever_is_fetched_when(most, monkeypatch):
    monkeypatch.setattr(metric_accumulator, "MOST_PENDING", most)
    check = Check()
    made, lines = accumulator(check), []
    found = list(made_steps(12))
    for step, metrics in found:
        made.add(step, BATCH, jax.tree.map(jnp.asarray, metrics))
        if step in (5, 12):
            lines.append(made.close(0.0))
    for line, first, last in zip(lines, (1, 6), (5, 12), strict=True):
        steps = [metrics for step, metrics in found if first <= step <= last]
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


def test_a_line_of_skipped_steps_alone_has_no_means():
    made = accumulator(Check())
    for loss, finite in ((np.inf, False), (2.0, True)):
        metrics = {
            "loss": np.float32(loss),
            "mlm_accuracy": np.float32(0.5),
            "tokens": np.int32(8),
            "finite": np.bool_(finite),
            "learning_rate": np.float32(0.25),
        }
        made.add(1, BATCH, jax.tree.map(jnp.asarray, metrics))
        line = made.close(0.0)
        assert line["learning_rate"] == 0.25
        assert (line["loss"], line.get("mlm_accuracy")) == ((2.0, 0.5) if finite else (None, None))


def test_steps_without_targets_count_in_no_mean_of_their_term():
    made = accumulator(Check())
    for step, (mlm, nsp) in enumerate(((1.0, np.nan), (np.nan, np.nan), (3.0, np.nan)), start=1):
        metrics = {"loss": 2.0, "mlm_loss": mlm, "nsp_loss": nsp, "learning_rate": 0.1}
        arrays = {name: np.float32(value) for name, value in metrics.items()}
        made.add(step, BATCH, jax.tree.map(jnp.asarray, arrays | {"tokens": np.int32(8), "finite": np.bool_(True)}))
    line = made.close(0.0)
    assert (line["loss"], line["mlm_loss"], line["nsp_loss"]) == (2.0, 2.0, None)
