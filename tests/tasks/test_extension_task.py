"""A kind of task from outside the package trains, resumes, is evaluated, predicts and is reported."""

import dataclasses
import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from extensions import new_task
from random_checkpoints import WORDS
from report_pages import finetuned_workdir

from bert_jax.config import AdamW, ConstantSchedule, FinetuneConfig, ModelOptions, TaskConfig
from bert_jax.errors import UserError
from bert_jax.interop import export
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.reporting.document import percent
from bert_jax.reporting.finetuning import error_sections, predict_dev
from bert_jax.reporting.report import report
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.registry import from_json, to_json
from bert_jax.tokenization import tokenizer
from bert_jax.train.workdir import read_config

FILE = Path(new_task.__file__)
ADVERBS = ("never", "seldom", "often", "always")


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Texts with one of four adverbs, which tells their rating from 1 to 4."""
    folder = tmp_path_factory.mktemp("ratings")
    draw = np.random.default_rng(0)
    for split, count in (("train", 64), ("dev", 16)):
        ranks = draw.permutation(np.arange(count) % 4)
        lines = [f"she is {ADVERBS[rank]} here\t{rank + 1}" for rank in ranks]
        (folder / f"{split}.tsv").write_text("text\tstars\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return {split: str(folder / f"{split}.tsv") for split in ("train", "dev")}


def config_of(ratings: dict[str, str], steps: int) -> FinetuneConfig:
    return FinetuneConfig(
        model=ModelOptions(preset="tiny", layers=1, width=32, heads=2, feed_forward=32, dropout=0.0),
        optimizer=AdamW(learning_rate=1e-3, schedule=ConstantSchedule(warmup_steps=0)),
        task=TaskConfig.kinds["ordinal"](**ratings, text="text", label="stars", max_length=16),
        batch_size=16,
        steps=steps,
        length_pool=1,
        log_every=1,
    )


def test_the_example_is_short_and_uses_public_names_only():
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    assert not re.findall(r"bert_jax\S* import .*\b_|\._[a-z]", text)


def test_an_option_that_its_objective_does_not_read_is_refused(ratings, vocab_dir, tmp_path):
    config = config_of(ratings, 1)
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, layer_mix=True))
    with pytest.raises(UserError, match=r"task\.layer_mix is set, but the objective of kind ordinal does not read it"):
        finetune(config, tmp_path / "run", tokenizer.load(vocab_dir))


def test_the_report_shows_the_predictions_of_the_kind(tmp_path):
    lines = [
        "text\tstars",
        *(f"{' '.join(words)}\t{1 + n % 4}" for n, words in enumerate(product(WORDS[:6], repeat=2))),
    ]
    alike = finetuned_workdir(tmp_path, "ordinal", lines, "dev.tsv", text="text", label="stars")
    found = predict_dev(alike, read_config(alike), most=100)
    # The same model, with logits that differ more between texts, and on the mean not at all between classes.
    means = np.mean([np.log(list(one["scores"].values())) for one in found.predictions], axis=0)
    loaded = open_checkpoint(alike)
    kernel, bias = (loaded.params[f"classifier/dense/{name}"] for name in ("kernel", "bias"))
    changed = {"classifier/dense/kernel": 60 * kernel, "classifier/dense/bias": 60 * (bias - means).astype(np.float32)}
    run = tmp_path / "spread"
    export.write(dataclasses.replace(loaded, params={**loaded.params, **changed}), run)
    found = predict_dev(run, read_config(run), most=100)
    assert any(one["label"] != max(one["scores"], key=one["scores"].get) for one in found.predictions)
    matrix, calibration, cards = error_sections(run, read_config(run), 100)
    accuracy = evaluate(run, tmp_path / "dev.tsv", metrics=("accuracy",))["accuracy"]
    confidence = float(np.mean([one["score"] for one in found.predictions]))
    assert f"the mean confidence is {percent(confidence)}, the accuracy {percent(accuracy)}" in calibration.note
    shown = re.findall(r"<h3>. *, predicted (.) <span>line (\d+)</span>(.*?)</article>", cards.blocks[0].html)
    assert len(shown) > 5
    for label, line, content in shown:
        assert label == found.predictions[int(line) - 2]["label"] and f">{label}<" in content
    counts = {(n % 4, found.task.labels.index(one["label"])) for n, one in enumerate(found.predictions)}
    titles = re.findall(r'title="(.) predicted as (.): [^0]', matrix.blocks[0].html)
    assert {(found.task.labels.index(a), found.task.labels.index(b)) for a, b in titles} == counts


@pytest.mark.slow
def test_a_new_kind_trains_resumes_is_evaluated_predicts_and_is_reported(ratings, vocab_dir, tmp_path):
    words = tokenizer.load(vocab_dir)
    straight = finetune(config_of(ratings, 4), tmp_path / "straight", words)
    finetune(config_of(ratings, 2), tmp_path / "resumed", words)
    result = finetune(
        dataclasses.replace(config_of(ratings, 4), allow_changes=("steps", "eval.every_steps")),
        tmp_path / "resumed",
        words,
    )
    assert list(result["metrics"]) == ["weighted_kappa", "accuracy", "task_loss"]
    assert result["metrics"] == straight["metrics"] and result["steps"] == [4]
    wanted = open_checkpoint(tmp_path / "straight").params
    for path, value in open_checkpoint(tmp_path / "resumed").params.items():
        np.testing.assert_array_equal(value, wanted[path], err_msg=path)

    saved = json.loads((tmp_path / "resumed" / "config.json").read_text(encoding="utf-8"))["task"]
    assert saved["kind"] == "ordinal" and saved["labels"] == ["1", "2", "3", "4"]
    assert isinstance(from_json(saved), new_task.OrdinalTask) and to_json(from_json(saved)).keys() == saved.keys()

    measured = evaluate(tmp_path / "resumed", ratings["dev"])
    for name, metric in result["metrics"].items():
        assert measured[name] == pytest.approx(metric["mean"], abs=1e-5), name
    (prediction,) = predict(tmp_path / "resumed", ["she is never here"])
    assert prediction["label"] in ("1", "2", "3", "4")
    page = report(tmp_path / "resumed").read_text(encoding="utf-8")
    assert "weighted_kappa" in page and "Confusion matrix" in page  # the section of its base class


def test_weighted_kappa_follows_its_definition():
    truth = np.array([0, 1, 2, 3])
    assert new_task.weighted_kappa(truth, truth) == 1
    assert new_task.weighted_kappa(truth, truth[::-1]) == pytest.approx(-1)
    assert new_task.weighted_kappa(truth, np.array([1, 1, 2, 2])) == pytest.approx(1 - 0.5 / 1.5)
    assert np.isnan(new_task.weighted_kappa(truth * 0, truth * 0))


def test_an_unregistered_kind_is_refused_with_the_way_to_register_it():
    with pytest.raises(UserError, match=r"task.kind is 'ranking'; choose from: .*, or import the file that registers"):
        from_json({"name": "own", "kind": "ranking"})
