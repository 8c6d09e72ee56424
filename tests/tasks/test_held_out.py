"""Tests the rows that are held out of a training file without a dev file, and the baseline next to the metrics."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import tiny_finetuning
from sklearn.metrics import accuracy_score, f1_score, mean_squared_error
from tiny_finetuning import config_of

from bert_jax.config import AutoTaskConfig, RegressionConfig, TaggingConfig
from bert_jax.errors import UserError
from bert_jax.reporting.finetuning import predict_dev
from bert_jax.storage.location import location
from bert_jax.tasks import held_out, registry, trials
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.rows import Example, Split
from bert_jax.train.workdir import read_config

start, reviews = tiny_finetuning.start, tiny_finetuning.reviews  # fixtures
TASK = registry.kind_class("classification")("own")
REGRESSION = registry.kind_class("regression")("own")


def split_of(texts: list[str], labels: list[str] | None = None) -> Split[Example]:
    labels = labels or ["ab"[index % 2] for index in range(len(texts))]
    items = (Example(text, None, label, line) for line, (text, label) in enumerate(zip(texts, labels, strict=True), 1))
    return Split(Path("own.csv"), tuple(items), True)


@pytest.mark.parametrize("count", [20, 97, 1000])
@pytest.mark.parametrize("share", [0.1, 0.25])
def test_a_share_of_the_rows_is_held_out_and_none_is_lost(count: int, share: float):
    train, dev, line = held_out.split(TASK, split_of([f"text {index}" for index in range(count)]), share)
    assert dev is not None and len(dev.items) == round(share * count)
    assert sorted(item.line for item in (*train.items, *dev.items)) == list(range(1, count + 1))
    assert [item.line for item in dev.items] == sorted(item.line for item in dev.items)
    assert f"{len(dev.items):,} of the {count:,} examples of own.csv" in line and "\n" not in line


def test_the_text_decides_and_not_its_place():
    texts = [f"text {index}" for index in range(300)]
    order = np.random.default_rng(0).permutation(300)
    _, dev, _ = held_out.split(REGRESSION, split_of(texts), 0.1)
    _, other, _ = held_out.split(REGRESSION, split_of([texts[index] for index in order]), 0.1)
    assert dev and other and {item.text for item in dev.items} == {item.text for item in other.items}


def test_equal_texts_are_on_one_side():
    draw = np.random.default_rng(0)
    texts = [f"Text {draw.integers(60)}" for _ in range(400)]
    texts = [text.upper() + " " if index % 3 else text for index, text in enumerate(texts)]
    train, dev, _ = held_out.split(TASK, split_of(texts), 0.1)
    assert dev is not None and 30 <= len(dev.items) <= 60
    sides = [{" ".join(item.text.lower().split()) for item in part.items} for part in (train, dev)]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (["a"], ["x"]),
        (["a", "b"], ["x", "y"]),  # each class has one row
        (["a"] * 50, ["x", "y"] * 25),
        ([""] * 5, ["x"] * 5),
    ],
)
def test_too_few_texts_leave_all_rows_for_training(texts: list[str], labels: list[str]):
    train, dev, line = held_out.split(TASK, split_of(texts, labels), 0.1)
    assert dev is None and len(train.items) == len(texts)
    assert line.startswith("warning: ") and "task.dev" in line


def test_a_regression_on_one_text_keeps_it():
    for texts in (["a"], ["a"] * 9):
        assert held_out.indices(REGRESSION, split_of(texts), 0.9) == []


def test_every_class_stays_in_the_training_rows():
    labels = [f"class {index % 40}" if index < 80 else "most" for index in range(200)]
    for share in (0.1, 0.5, 0.9):
        train, dev, _ = held_out.split(TASK, split_of([f"text {index}" for index in range(200)], labels), share)
        assert dev is not None and {item.label for item in train.items} == {*labels}


def test_few_rows_are_announced_as_rough():
    _, dev, line = held_out.split(TASK, split_of(["a", "b", "c", "d"], ["x", "y", "x", "y"]), 0.1)
    assert dev is not None and len(dev.items) == 1 and "rough" in line
    assert "rough" not in held_out.split(TASK, split_of([f"{index}" for index in range(2000)]), 0.1)[2]


def own(reviews: dict[str, str], **options: object) -> AutoTaskConfig:
    return AutoTaskConfig(train=reviews["train"], text="review", label="stars", **options)


def test_a_run_measures_the_same_rows_when_it_resumes_and_in_its_report(reviews, start, tmp_path, capsys):
    config = config_of(start, own(reviews, dev_share=0.3), epochs=1.0, early_stop=5)
    result = finetune(config, tmp_path / "run")
    assert "are held out" in capsys.readouterr().err
    counts = result["counts"]
    # The file has ten texts, so groups of equal ones are held out.
    assert counts["train"]["examples"] + counts["dev"]["examples"] == 96
    assert 29 <= counts["dev"]["examples"] <= 48
    finetune(config, tmp_path / "run")  # refuses other held-out rows
    dev = predict_dev(location(tmp_path / "run"), read_config(tmp_path / "run"), 1000)
    assert dev.total == counts["dev"]["examples"]
    _, files = registry.resolve(config.task)
    lines = Path(files["train"]).read_text().splitlines()
    held = {item.text for item in dev.items}
    assert sum(line.split("\t")[0] in held for line in lines[1:]) == dev.total


def test_evaluating_the_training_file_measures_the_held_out_rows(reviews, start, tmp_path, capsys):
    config = config_of(start, own(reviews, dev_share=0.3))
    result = finetune(config, tmp_path / "run")
    measured = evaluate(tmp_path / "run", reviews["train"])
    assert measured["accuracy"] == result["metrics"]["accuracy"]["mean"]
    assert measured["counts"]["data"]["examples"] == result["counts"]["dev"]["examples"]
    assert "held-out examples count" in capsys.readouterr().err
    finetune(config_of(start, own(reviews, dev=reviews["dev"])), tmp_path / "with_dev")
    assert evaluate(tmp_path / "with_dev", reviews["train"])["counts"]["data"]["examples"] == 96
    assert "is the file that the checkpoint was trained on" in capsys.readouterr().err
    evaluate(tmp_path / "with_dev", reviews["dev"])
    assert "trained on" not in capsys.readouterr().err


def test_the_result_has_the_majority_class(reviews, start, tmp_path):
    config = config_of(start, own(reviews, dev=reviews["dev"], metrics=("accuracy", "macro_f1", "auroc")))
    result = finetune(config, tmp_path / "run")
    with open(reviews["train"]) as train, open(reviews["dev"]) as dev:
        labels = [[row["stars"] for row in csv.DictReader(file, delimiter="\t")] for file in (train, dev)]
    most = max(sorted({*labels[0]}), key=labels[0].count)
    predicted = [most] * len(labels[1])
    assert result["baseline"]["name"] == "majority class"
    baseline = result["baseline"]["metrics"]
    assert baseline["accuracy"] == pytest.approx(accuracy_score(labels[1], predicted))
    assert baseline["macro_f1"] == pytest.approx(f1_score(labels[1], predicted, average="macro"))
    assert baseline["auroc"] == 0.5
    shown = trials.table(json.loads((tmp_path / "run" / "result.json").read_text()))
    assert [column.header for column in shown.columns][:3] == ["metric", "mean", "majority class"]


def test_the_result_of_a_regression_has_the_mean(reviews, start, tmp_path):
    task = RegressionConfig(
        train=reviews["train"], dev=reviews["dev"], text="review", label="score", metrics=("pearson", "rmse")
    )
    result = finetune(config_of(start, task), tmp_path / "run")
    with open(reviews["train"]) as train, open(reviews["dev"]) as dev:
        numbers = [[float(row["score"]) for row in csv.DictReader(file, delimiter="\t")] for file in (train, dev)]
    error = mean_squared_error(numbers[1], [np.mean(numbers[0])] * len(numbers[1])) ** 0.5
    assert result["baseline"] == {"name": "mean", "metrics": {"pearson": None, "rmse": pytest.approx(error)}}


def test_the_result_of_a_tagger_has_the_majority_tag(start, tmp_path):
    text = "man\tO\nwas\tO\ngood\tJJ\n\nthe\tO\nsea\tNN\nwas\tO\n\n" * 20
    (tmp_path / "train.conll").write_text(text)
    task = TaggingConfig(train=str(tmp_path / "train.conll"), dev=str(tmp_path / "train.conll"), metrics=("accuracy",))
    result = finetune(config_of(start, task), tmp_path / "run")
    assert result["baseline"] == {"name": "majority tag", "metrics": {"accuracy": pytest.approx(4 / 6)}}


def test_dev_share_0_measures_nothing_and_says_so(reviews, start, tmp_path, capsys):
    result = finetune(config_of(start, own(reviews, dev_share=0.0)), tmp_path / "run")
    assert result["metrics"] == {} and result["baseline"] is None and [*result["counts"]] == ["train"]
    assert "nothing is measured" in capsys.readouterr().err


def test_a_share_of_1_is_refused():
    with pytest.raises(UserError, match=r"dev_share is 1.0. Use a share from 0 to below 1"):
        AutoTaskConfig(train="a.csv", dev_share=1.0)
