"""Regression of words and texts: numbers of any size, and words without one."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_finetuning
from random_checkpoints import odd_config, random_checkpoint
from scipy import stats

from bert_jax.config import ModelConfig, TokenRegressionConfig
from bert_jax.errors import UserError
from bert_jax.interop import export as bert_jax_export
from bert_jax.interop.export import export
from bert_jax.interop.loaded_model import with_target_scale
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import measurement, registry, runs
from bert_jax.tasks.kinds.classification import RegressionTask
from bert_jax.tasks.kinds.token_regression import TokenRegressionTask
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.reading.inputs import InputRecord
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Example, Sentence, Split
from bert_jax.tasks.word_rows import LabelledWordRows
from bert_jax.tokenization.tokenizer import Tokenizer

letters = tiny_finetuning.letters  # a fixture

TASK = TokenRegressionTask("own", max_length=8, metrics=("pearson", "spearman", "mse"))
CONLL = "cat\t1.5\nis\t-\na\t-2\n\nbe\t0.25\nab\t_\n"


def rows_of(path: Path, tokenizer: Tokenizer) -> LabelledWordRows:
    task, files = registry.resolve(TokenRegressionConfig(train=str(path), max_length=8))
    return task.encode(registry.read(task, files["train"]), tokenizer)


@pytest.fixture
def rows(tmp_path: Path, letters: Tokenizer) -> LabelledWordRows:
    path = tmp_path / "train.conll"
    path.write_text(CONLL)
    return rows_of(path, letters)


def test_numbers_stand_on_first_pieces_and_what_is_missing_weighs_nothing(rows):
    batch = rows.batch(np.array([0, 1, -1]), 8)
    assert batch.labels.tolist()[0] == [0, 1.5, 0, 0, 0, 0, -2, 0]  # [CLS] c ##a ##t i ##s a [SEP]
    assert batch.labels.tolist()[1] == [0, 0.25, 0, 0, 0, 0, 0, 0]  # [CLS] b ##e a ##b [SEP]
    assert batch.label_weights.tolist() == [[0, 1, 0, 0, 0, 0, 1, 0], [0, 1, *[0] * 6], [0] * 8]
    assert TASK.describe(rows).counts == {"words": 5, "words_with_number": 3}


def test_lists_in_json_lines_are_the_same_sentences(tmp_path, rows, letters):
    path = tmp_path / "train.jsonl"
    sentences = [(["cat", "is", "a"], [1.5, None, -2]), (["be", "ab"], [0.25, None])]
    path.write_text("".join(json.dumps({"tokens": words, "labels": labels}) + "\n" for words, labels in sentences))
    for name, array in rows_of(path, letters).arrays().items():
        np.testing.assert_array_equal(array, getattr(rows, name))


def test_the_loss_is_the_mean_square_over_words_with_a_number(rows):
    model = ModelConfig(vocab_size=60, layers=1, width=16, heads=2, feed_forward=24, max_positions=16)
    objective, draw = TASK.objective(), np.random.default_rng(0)
    abstract = abstract_params(model, objective.heads)
    params = jax.tree.map(lambda leaf: draw.normal(0, 0.3, leaf.shape).astype(np.float32), abstract)

    @jax.jit
    def run(params: dict, batch: object) -> tuple:
        bound = bind(model, objective.heads, params, Runtime())
        outputs = objective.outputs(bound, batch, None)
        return outputs, objective.loss_terms(bound, outputs, batch)["task"].loss, objective.counts(batch)["task"]

    outputs, loss, count = run(params, jax.tree.map(jnp.asarray, rows.batch(np.array([0, 1, -1]), 8)))
    guesses = np.asarray(outputs)[[0, 0, 1], [1, 6, 1]]
    assert count == 3
    assert float(loss) == pytest.approx(((guesses - [1.5, -2, 0.25]) ** 2).sum(), rel=1e-5)


def test_metrics_are_over_words_that_have_a_number_and_answers_are_of_all(rows):
    answers = [np.arange(8, dtype=np.float32) * factor for factor in (1, -3)]
    truth, guess = [1.5, -2, 0.25], [1, 6, -3]
    found = TASK.measure(rows, answers)
    assert found["pearson"] == pytest.approx(stats.pearsonr(truth, guess).statistic)
    assert found["spearman"] == pytest.approx(-0.5) and found["mse"] == pytest.approx((0.25 + 64 + 3.25**2) / 3)
    told = TASK.predictions(rows, answers)
    assert told == [
        {"words": ["cat", "is", "a"], "numbers": [1.0, 4.0, 6.0]},
        {"words": ["be", "ab"], "numbers": [-3.0, -9.0]},
    ]


def test_raw_text_is_answered_with_places(letters):
    rows = TASK.encode(TASK.parse(Path("in"), [InputRecord(1, "a cat.")]), letters)
    (told,) = TASK.predictions(rows, [np.arange(8, dtype=np.float32)] * rows.count)
    assert (told["words"], told["offsets"]) == (["a", "cat", "."], [[0, 1], [2, 5], [5, 6]])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.conll", "cat\tmany\n", r"a.conll line 1: 'many' is not a number, but the task is a token_regression"),
        ("a.conll", "cat\tinf\n", "line 1: 'inf' is not a number"),
        ("a.conll", "cat\t-\n", "a.conll has no numbers"),
        ("a.conllu", "1\tcat" + "\t_" * 8 + "\n", "task.label is not set; name the column"),
        ("a.jsonl", '{"tokens": ["a", "b"], "labels": [1]}\n', "line 1: labels has 1 labels; expected a list of 2"),
        ("a.jsonl", '{"tokens": ["a"], "labels": 1}\n', "line 1: labels is 1; expected a list of 1"),
        ("a.jsonl", '{"tokens": "a", "labels": [1]}\n', "line 1: tokens is 'a'; expected a list of words"),
    ],
)
def test_an_invalid_number_is_refused_with_file_and_line(tmp_path, letters, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        rows_of(tmp_path / name, letters)


def test_equal_numbers_are_reported_to_leave_correlations_undefined(tmp_path, rows, letters):
    assert TASK.describe(rows).remarks == []
    path = tmp_path / "dev.conll"
    path.write_text("cat\t1.5\nis\t-\na\t1.5\n")
    said = f"{path}: every number is 1.5, so pearson and spearman are undefined"
    assert TASK.describe(rows_of(path, letters)).remarks == [said]


def test_truncation_is_reported_in_words(tmp_path, letters):
    path = tmp_path / "train.conll"
    path.write_text("abcdefgh\t1\nabcdefghi\t2\n")
    told = measurement.remarks(rows_of(path, letters), TASK)
    assert told[0] == f"{path}: 2 words lost tokens to task.max_length=8"  # of one sentence
    assert told[1:] == [f"{path}: 1 of 1 sentences are longer than task.max_length=8 tokens, and are read in 2 windows"]


def test_a_file_without_any_number_is_labelled_only_where_numbers_are_required(tmp_path):
    path = tmp_path / "test.conll"
    path.write_text("cat\t_\nis\t-\n\nbe\t_\n")
    assert not TASK.read(path, TASK.columns, False).labelled and TASK.read(path, TASK.columns, True).labelled
    path.write_text("cat\t_\nis\t1\n")
    assert TASK.read(path, TASK.columns, False).labelled


TEXTS = ["the cat sat", "a dog", "un want able river on the mat . the dog", "mat"]
PRICES = [250_000.0, 310_000.0, 1_200_000.0, 90_000.0]
KINDS = {"regression": Heads(pooler=True, classes=1), "token_regression": Heads(tags=1)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_scaled_head_predicts_in_the_units_of_the_files_and_so_does_its_export(kind, tmp_path):
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
    run = runs.with_task_labels(exported, registry.KINDS[kind]("own", target_mean=1e5, target_std=3e5))
    assert run.task["target_mean"] == 1e5
    np.testing.assert_allclose(numbers(run), wanted, rtol=1e-5)


def test_the_loss_is_that_of_standardized_targets_and_the_metrics_are_in_units(tmp_path):
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
        ("auto", (-0.0001, 0.0001), (0, 0.0001)),
        ("auto", (4.75, 5.25), (5, 0.25)),
        ("auto", (1.7e9 + 1, 1.7e9 + 2), (1.7e9 + 1.5, 0.5)),
        ("auto", (0, 1), (0, 1)),
        ("yes", (1, 3), (2, 1)),
        ("no", (200, 300), (0, 1)),
        ("yes", (7, 7), (7, 1)),
    ],
)
def test_the_scale_is_that_of_the_training_file_where_it_is_wanted(given, scores, scale):
    items = tuple(Example("a", None, str(score), line) for line, score in enumerate(scores, 2))
    task = RegressionTask("own", scale_targets=given).complete(Split(Path("a.tsv"), items, True))
    assert (task.target_mean, task.target_std) == scale and task.metrics == ("pearson", "spearman")
    words = tuple(map(str, scores)) + ("-",)
    sentence = Sentence(words, words, tuple(range(len(words))))
    task = TokenRegressionTask("own", scale_targets=given).complete(Split(Path("a.conll"), (sentence,), True))
    assert (task.target_mean, task.target_std) == scale


@pytest.mark.parametrize("numbers", [[1.7e9, 1.7e9 + 1, 1.7e9 + 3], [1e-12, 2e-12, 4e-12], [1e30, -1e30, 2e30]])
def test_targets_and_metrics_keep_numbers_that_float32_does_not_tell_apart(letters, numbers):
    items = tuple(Example("a", None, repr(score), line) for line, score in enumerate(numbers, 2))
    split = Split(Path("a.tsv"), items, True)
    task = RegressionTask("own", max_length=8, metrics=("mae", "r2")).complete(split)
    rows = task.encode(split, letters)
    wanted = (np.array(numbers) - np.mean(numbers)) / np.std(numbers)
    targets = rows.batch(np.arange(3), 8).labels
    assert targets.dtype == np.float32
    np.testing.assert_allclose(targets, wanted, rtol=1e-6)
    assert task.measure(rows, list(targets))["mae"] <= 1e-6 * np.std(numbers)
    assert task.measure(rows, list(targets))["r2"] == pytest.approx(1)
    np.testing.assert_allclose([one["score"] for one in task.predictions(rows, list(targets))], numbers, rtol=1e-6)
    (remark,) = task.describe(rows, training=True).remarks
    assert "training standardizes the numbers" in remark
