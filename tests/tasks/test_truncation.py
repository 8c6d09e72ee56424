"""What a text over max_length loses, and windows: by brute force, in training, prediction and export."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from random_checkpoints import odd_config, random_checkpoint
from scipy.special import expit, softmax

from bert_jax.config import ClassificationConfig, FinetuneConfig
from bert_jax.errors import UserError
from bert_jax.interop import huggingface_export
from bert_jax.interop.export import export
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.tasks import registry
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.kinds.classification import ClassificationTask, MultiLabelTask, RegressionTask
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.rows import Example, LabelSet, Split
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.wordpiece import WordPieceSpec

WORDS = [f"w{number}" for number in range(200)]
TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
TOKENIZER = Tokenizer(WordPieceSpec(TOKENS, True, True))
SPECIAL = range(5)


def split_of(*texts: str | tuple[str, str], labels: tuple[str, ...] = ("a", "b")) -> Split[Example]:
    pairs = [(text, None) if isinstance(text, str) else text for text in texts]
    items = (Example(*pair, labels[place % len(labels)], place + 1) for place, pair in enumerate(pairs))
    return Split(Path("f.tsv"), tuple(items), labelled=True)


def words(first: int, count: int) -> str:
    return " ".join(WORDS[first : first + count])


def rows_of(task, split: Split) -> tuple[list[list[list[str]]], object]:
    """The words of each row, by segment."""
    encoded = task.encode(split, TOKENIZER)
    found = []
    for row in range(encoded.count):
        ids = encoded.input_ids[encoded.offsets[row] : encoded.offsets[row + 1]]
        border = encoded.first_lengths[row]
        found.append(
            [[TOKENS[token] for token in part if token not in SPECIAL] for part in (ids[:border], ids[border:])]
        )
    return found, encoded


@pytest.mark.parametrize("truncation", ["right", "left", "middle"])
@pytest.mark.parametrize("count", [5, 6, 7, 20])
def test_a_text_loses_its_end_beginning_or_middle(truncation, count):
    task = ClassificationTask("own", ("a", "b"), max_length=8, truncation=truncation)
    found, encoded = rows_of(task, split_of(words(0, count), words(50, 3)))
    text, size = WORDS[:count], min(count, 6)
    kept = {
        "right": text[:size],
        "left": text[-size:],
        "middle": text[: (size + 1) // 2] + text[len(text) - size // 2 :],
    }
    assert found == [[kept[truncation], []], [WORDS[50:53], []]]
    assert encoded.truncated == (count > 6) and encoded.row_items is None


@pytest.mark.parametrize("truncation", ["right", "left", "middle"])
def test_the_texts_of_a_pair_keep_as_many_words_on_every_side(truncation):
    task = ClassificationTask("own", ("a", "b"), max_length=13, truncation=truncation)
    found, _ = rows_of(task, split_of((words(0, 20), words(100, 3)), (words(0, 8), words(100, 9))))
    sizes = [[len(part) for part in row] for row in found]
    assert sizes == [[7, 3], [5, 5]]
    ends = {"right": "w6", "left": "w19", "middle": "w19"}
    assert found[0][0][-1] == ends[truncation] and found[0][1] == WORDS[100:103]


@pytest.mark.parametrize("length", [8, 13, 30])
def test_windows_hold_every_word_and_share_a_quarter(length):
    task = ClassificationTask("own", ("a", "b"), max_length=length, truncation="windows")
    draw = np.random.default_rng(0)
    counts = [1, length - 2, length - 1, 150, *draw.integers(1, 190, 20).tolist()]
    found, encoded = rows_of(task, split_of(*(words(0, count) for count in counts)))
    assert encoded.truncated == 0
    items = encoded.items().tolist()
    assert sorted(set(items)) == list(range(len(counts))) and items == sorted(items)
    for item, count in enumerate(counts):
        windows = [row[0] for row, number in zip(found, items, strict=True) if number == item]
        room = length - 2
        assert {len(window) for window in windows} == {min(count, room)}
        assert windows[0][0] == "w0" and windows[-1][-1] == f"w{count - 1}"
        starts = [int(window[0][1:]) for window in windows]
        assert all(window == WORDS[start : start + len(window)] for window, start in zip(windows, starts, strict=True))
        assert all(0 < step <= room - room // 4 for step in np.diff(starts))
        # No fewer windows could share as much.
        assert len(windows) == 1 or (len(windows) - 1) * (room - room // 4) < count - room + room - room // 4
    weights = np.bincount(items, encoded.label_weights)
    np.testing.assert_allclose(weights, 1, rtol=1e-6)
    assert encoded.item_labels.tolist() == [place % 2 for place in range(len(counts))]
    assert encoded.labels.tolist() == [item % 2 for item in items]


def test_the_longer_text_of_a_pair_has_windows():
    task = ClassificationTask("own", ("a", "b"), max_length=13, truncation="windows")
    texts = (words(0, 30), words(100, 3)), (words(100, 2), words(0, 30)), (words(0, 9), words(100, 9)), ("w1", "w2")
    found, encoded = rows_of(task, split_of(*texts))
    by_item = [[row for row, item in zip(found, encoded.items(), strict=True) if item == number] for number in range(4)]
    assert all(row[1] == WORDS[100:103] and len(row[0]) == 7 for row in by_item[0])
    assert all(row[0] == WORDS[100:102] and len(row[1]) == 8 for row in by_item[1])
    for rows, place in ((by_item[0], 0), (by_item[1], 1)):
        assert {word for row in rows for word in row[place]} == set(WORDS[:30])
    # Of two long texts, the first one (of equal length) is cut, and counted.
    assert all(row[0] == WORDS[:5] for row in by_item[2]) and encoded.truncated == 1
    assert {word for row in by_item[2] for word in row[1]} == set(WORDS[100:109])
    assert by_item[3] == [[["w1"], ["w2"]]]


@pytest.mark.parametrize("truncation", ["windows", "windows_max"])
def test_answers_are_the_mean_or_maximum_over_windows(truncation):
    combine = {"windows": np.mean, "windows_max": np.max}[truncation]
    texts = words(0, 20), words(50, 3), words(70, 11)
    draw = np.random.default_rng(1)

    def by_item(values: np.ndarray, items: np.ndarray) -> np.ndarray:
        return np.stack([combine(values[items == item], axis=0) for item in range(3)])

    task = ClassificationTask("own", ("a", "b", "c"), max_length=8, truncation=truncation, metrics=("accuracy",))
    rows = task.encode(split_of(*texts, labels=("a", "b", "c")), TOKENIZER)
    items = rows.items()
    assert np.bincount(items).tolist() == [4, 1, 2]
    logits = draw.normal(size=(7, 3)).astype(np.float32)
    shares = by_item(softmax(logits.astype(np.float64), axis=-1), items)
    shares /= shares.sum(axis=-1, keepdims=True)
    answers = task.predictions(rows, list(logits))
    np.testing.assert_allclose([[*answer["scores"].values()] for answer in answers], shares, rtol=1e-12)
    assert [answer["label"] for answer in answers] == ["abc"[place] for place in shares.argmax(axis=-1)]
    assert task.measure(rows, list(logits))["accuracy"] == (shares.argmax(axis=-1) == [0, 1, 2]).mean()
    assert (
        "2 of 3 examples are longer than task.max_length=8 tokens, and have 6 windows" in task.describe(rows).remarks[0]
    )

    numbers = RegressionTask("own", max_length=8, truncation=truncation, target_mean=5.0, target_std=2.0)
    rows = numbers.encode(split_of(*texts, labels=("1", "2", "4")), TOKENIZER)
    outputs = draw.normal(size=7).astype(np.float32)
    expected = by_item(5 + 2 * outputs.astype(np.float64), items)
    np.testing.assert_allclose([one["score"] for one in numbers.predictions(rows, list(outputs))], expected, rtol=1e-12)
    measured = dataclasses.replace(numbers, metrics=("mae",)).measure(rows, list(outputs))
    assert measured["mae"] == pytest.approx(np.abs(expected - [1, 2, 4]).mean())

    sets = MultiLabelTask(
        "own", ("a", "b"), max_length=8, truncation=truncation, threshold=0.5, metrics=("exact_match",)
    )
    split = Split(Path("f"), tuple(LabelSet(text, None, ("a",), 1) for text in texts), labelled=True)
    rows = sets.encode(split, TOKENIZER)
    logits = draw.normal(size=(7, 2)).astype(np.float32)
    expected = by_item(expit(logits.astype(np.float64)), items)
    found = sets.predictions(rows, list(logits))
    np.testing.assert_allclose([[*one["scores"].values()] for one in found], expected, rtol=1e-12)
    right = ((expected >= 0.5) == [True, False]).all(axis=1).mean()
    assert sets.measure(rows, list(logits))["exact_match"] == right
    assert sets.describe(rows).counts["labels"] == 3


def test_other_values_and_kinds_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"unknown task\.truncation 'head'; choose from right, left, middle, windows"):
        ClassificationTask("own", truncation="head")
    path = tmp_path / "a.conll"
    path.write_text("a B\nb O\n")
    with pytest.raises(UserError, match=r"task\.truncation is set, but the task is tagging, which does not have it"):
        registry.resolve(registry.TaskConfig.kinds["auto"](train=str(path), truncation="left"))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    loaded = random_checkpoint(folder / "words", odd_config(vocab_size=60, width=24, layers=1, max_positions=16))
    huggingface_export.write(loaded, folder / "hf")
    return folder / "hf"


@pytest.mark.parametrize("truncation", [pytest.param("left", marks=pytest.mark.slow), "windows"])
def test_training_prediction_and_export_read_long_texts_alike(tmp_path, start, one_device, truncation):
    lines = [
        (("word20 " if place % 2 else "word21 ") + "word30 " * (4 * (place % 9)), "yn"[place % 2])
        for place in range(16)
    ]
    (tmp_path / "f.tsv").write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in lines))
    file = str(tmp_path / "f.tsv")
    task = ClassificationConfig(train=file, dev=file, text="text", label="label", max_length=12, truncation=truncation)
    config = FinetuneConfig(init_from=str(start), task=task, batch_size=8, epochs=1.0)
    result = finetune(config, tmp_path / "run")
    assert result["counts"]["train"]["examples"] == 16
    assert (result["counts"]["train"]["rows"] > 16) == (truncation == "windows")
    measured = evaluate(tmp_path / "run", file)
    assert measured["accuracy"] == pytest.approx(result["metrics"]["accuracy"]["mean"])
    assert measured["task_loss"] == pytest.approx(result["metrics"]["task_loss"]["mean"], rel=1e-5)
    loaded = open_checkpoint(tmp_path / "run")
    told = predict(loaded, [text for text, _ in lines])
    assert np.mean([one["label"] == label for one, (_, label) in zip(told, lines, strict=True)]) == measured["accuracy"]
    export(tmp_path / "run", tmp_path / "out", "hf")
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings.get("truncation_side") == ("left" if truncation == "left" else None)
    again = predict(open_checkpoint(tmp_path / "out"), [text for text, _ in lines])
    assert [one["label"] for one in again] == [one["label"] for one in told]
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("windows, of whose answers the mean counts" in card) == (truncation == "windows")
