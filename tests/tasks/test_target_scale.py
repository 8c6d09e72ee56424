"""Large numbers as the targets of a regression: their scale in the loss, in predictions and in exports."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from random_checkpoints import odd_config, random_checkpoint

from bert_jax.commands.export import export
from bert_jax.interop import export as bert_jax_export
from bert_jax.interop.loaded_model import with_target_scale
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads.config import Heads
from bert_jax.tasks import measurement, registry, runs
from bert_jax.tasks.kinds.classification import RegressionTask
from bert_jax.tasks.kinds.token_regression import TokenRegressionTask
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Example, Sentence, Split

TEXTS = ["the cat sat", "a dog", "un want able river on the mat . the dog", "mat"]
PRICES = [250_000.0, 310_000.0, 1_200_000.0, 90_000.0]
KINDS = {"regression": Heads(pooler=True, classes=1), "token_regression": Heads(tags=1)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_scaled_head_predicts_in_the_units_of_the_files_and_so_does_its_export(kind: str, tmp_path: Path) -> None:
    task = {"name": "own", "kind": kind, "labels": [], "max_length": 16, "target_mean": 4e5, "target_std": 2e5}
    model = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), KINDS[kind], task=task)
    plain = dataclasses.replace(model, task={**task, "target_mean": 0.0, "target_std": 1.0})

    def numbers(of: object) -> np.ndarray:
        found = predict(of, TEXTS)
        return np.concatenate([np.atleast_1d(one["score"] if "score" in one else one["numbers"]) for one in found])

    wanted = 4e5 + 2e5 * numbers(plain)
    np.testing.assert_allclose(numbers(model), wanted, rtol=1e-5)
    np.testing.assert_allclose(numbers(with_target_scale(model)), wanted, rtol=1e-5)
    np.testing.assert_allclose(numbers(with_target_scale(model, -3e4, 7e5)), wanted, rtol=1e-5)
    bert_jax_export.write(model, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "hf")
    exported = open_checkpoint(tmp_path / "hf")
    assert exported.task["target_std"] == 1.0
    np.testing.assert_allclose(numbers(exported), wanted, rtol=1e-5)
    run = runs.with_labels_of(exported, registry.KINDS[kind]("own", target_mean=1e5, target_std=3e5))
    assert run.task["target_mean"] == 1e5
    np.testing.assert_allclose(numbers(run), wanted, rtol=1e-5)


def test_the_loss_is_that_of_standardized_targets_and_the_metrics_are_in_units(tmp_path: Path) -> None:
    task = {"name": "own", "kind": "regression", "labels": [], "max_length": 16, "metrics": ["mse"]}
    mean, deviation = np.mean(PRICES), np.std(PRICES)
    task |= {"target_mean": float(mean), "target_std": float(deviation)}
    model = random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), KINDS["regression"], task=task)
    data = tmp_path / "dev.tsv"
    data.write_text("text\tprice\n" + "".join(f"{text}\t{price}\n" for text, price in zip(TEXTS, PRICES, strict=True)))
    found = measurement.evaluate(model, data, columns=Columns("text", label="price")).metrics
    errors = np.array([one["score"] for one in predict(model, TEXTS)]) - PRICES
    assert found["mse"] == pytest.approx((errors**2).mean(), rel=1e-5)
    assert found["task_loss"] == pytest.approx(((errors / deviation) ** 2).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("given", "scores", "scale"),
    [
        ("auto", (0, 5, 2.5), (0, 1)),
        ("auto", (200, 300), (250, 50)),
        ("yes", (1, 3), (2, 1)),
        ("no", (200, 300), (0, 1)),
        ("yes", (7, 7), (7, 1)),
    ],
)
def test_the_scale_is_that_of_the_training_file_where_it_is_wanted(
    given: str, scores: tuple[float, ...], scale: tuple[float, float]
) -> None:
    items = tuple(Example("a", None, str(score), line) for line, score in enumerate(scores, 2))
    task = RegressionTask("own", scale_targets=given).complete(Split(Path("a.tsv"), items, True))
    assert (task.target_mean, task.target_std) == scale and task.metrics == ("pearson", "spearman")
    words = tuple(map(str, scores)) + ("-",)
    sentence = Sentence(words, words, tuple(range(len(words))))
    task = TokenRegressionTask("own", scale_targets=given).complete(Split(Path("a.conll"), (sentence,), True))
    assert (task.target_mean, task.target_std) == scale
