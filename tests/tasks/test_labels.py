"""Labels: what their names mean, and what classes weigh in the loss."""

import dataclasses
import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_finetuning
from hypothesis import given as drawn
from hypothesis import strategies as st
from random_checkpoints import odd_config, random_checkpoint
from sklearn.metrics import f1_score
from sklearn.utils.class_weight import compute_class_weight

from bert_jax.config import AutoTaskConfig, CheckpointConfig, FinetuneConfig, TaskConfig, load
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model.heads.config import Heads
from bert_jax.tasks import labels, measurement, named, registry, runs, trials
from bert_jax.tasks.kinds.classification import ClassificationTask
from bert_jax.tasks.kinds.tagging import TaggingTask, TagLabels
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Example, LabelledRows, Sentence, Split, TaskBatch
from bert_jax.tasks.trials import Trial
from bert_jax.train.losses import ClassCosts

letters = tiny_finetuning.letters  # a fixture

TEXTS = ["the cat sat", "a dog", "un want able river on the mat . the dog", "mat", "the river", "a cat on a mat ."]
NLI = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")  # the order and case of roberta-large-mnli


def model_of(tmp_path: Path, labels: tuple[str, ...], kind: str = "classification", **heads: object) -> LoadedModel:
    task = {"name": "own", "kind": kind, "labels": list(labels), "max_length": 16, "metrics": ["accuracy"]}
    chosen = Heads(**heads) if heads else Heads(pooler=True, classes=len(labels))
    return random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), chosen, task=task, origin="the checkpoint")


def table(path: Path, labels: list[str]) -> Path:
    lines = ["text\tlabel", *(f"{text}\t{label}" for text, label in zip(TEXTS, labels, strict=True))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def accuracy(model: LoadedModel, data: Path, label_map: dict[str, str] | None = None) -> float:
    columns = Columns("text", label="label")
    return measurement.evaluate(model, data, columns=columns, label_map=label_map).metrics["accuracy"]


def share(truth: list[str], predicted: list[str]) -> float:
    return sum(one == other for one, other in zip(truth, predicted, strict=True)) / len(truth)


def test_a_model_is_measured_on_files_that_name_its_labels_otherwise(tmp_path):
    """Each file holds the model's own predictions, except one, under other names: the accuracy is 5/6."""
    model = model_of(tmp_path, NLI)
    truth = [one["label"] for one in predict(model, TEXTS)]
    truth[0] = next(label for label in NLI if label != truth[0])
    for spell in (str, str.lower, str.title):
        assert accuracy(model, table(tmp_path / "a.tsv", [spell(label) for label in truth])) == pytest.approx(5 / 6)
    numbered = dataclasses.replace(model, task={**model.task, "labels": ["LABEL_0", "LABEL_1", "LABEL_2"]})
    numbers = [NLI.index(label) for label in truth]
    assert accuracy(numbered, table(tmp_path / "b.tsv", list(map(str, numbers)))) == pytest.approx(5 / 6)
    given = {name.lower(): f"LABEL_{index}" for index, name in enumerate(NLI)}
    assert accuracy(numbered, table(tmp_path / "a.tsv", [one.lower() for one in truth]), given) == pytest.approx(5 / 6)
    json_lines = tmp_path / "c.jsonl"  # numbers of classes, by the names of the model
    rows = [json.dumps({"text": text, "label": number}) for text, number in zip(TEXTS, numbers, strict=True)]
    json_lines.write_text("\n".join(rows) + "\n")
    assert accuracy(model, json_lines) == accuracy(numbered, json_lines) == pytest.approx(5 / 6)
    turned = {"0": "ENTAILMENT", "1": "NEUTRAL", "2": "CONTRADICTION"}
    guessed = [one["label"] for one in predict(model, TEXTS)]
    assert accuracy(model, json_lines, turned) == pytest.approx(share([NLI[2 - one] for one in numbers], guessed))
    with pytest.raises(UserError, match=r"line 2: unknown label 'no'.*--label_map"):
        accuracy(model, table(tmp_path / "d.tsv", ["no"] * len(TEXTS)))


def test_the_positive_class_and_the_metrics_are_chosen_when_a_model_is_measured(tmp_path):
    model = model_of(tmp_path, ("LABEL_0", "LABEL_1"))  # without bert_jax's own metrics
    guessed = [one["label"] for one in predict(model, TEXTS)]
    truth = ["LABEL_1" if index % 2 else "LABEL_0" for index in range(len(TEXTS))]
    data, columns = table(tmp_path / "a.tsv", truth), Columns("text", label="label")
    for positive in ("LABEL_0", "LABEL_1"):
        found = measurement.evaluate(model, data, columns=columns, positive=positive).metrics
        assert list(found) == ["accuracy", "f1", "task_loss"]
        assert found["f1"] == pytest.approx(f1_score(truth, guessed, pos_label=positive))
    named = measurement.evaluate(
        model, data, columns=columns, metrics=("recall", "accuracy"), positive="LABEL_0"
    ).metrics
    assert list(named) == ["recall", "accuracy", "task_loss"]
    for wrong, said in (
        ({"metrics": ("bleu",)}, "unknown metric 'bleu'"),
        ({"positive": "no"}, "'no', which is not a"),
    ):
        with pytest.raises(UserError, match=said):
            measurement.evaluate(model, data, columns=columns, **wrong)


def test_numbers_of_tags_in_json_lines_are_those_of_the_model(tmp_path):
    labels = ("O", "B-PER", "I-PER")
    model = model_of(tmp_path, labels, "tagging", tags=3)
    named, numbered = tmp_path / "named.jsonl", tmp_path / "numbered.jsonl"
    with named.open("w") as names, numbered.open("w") as numbers:
        for text in TEXTS:
            words = text.split()
            tags = [index % 3 for index in range(len(words))]
            names.write(json.dumps({"tokens": words, "labels": [labels[tag] for tag in tags]}) + "\n")
            numbers.write(json.dumps({"tokens": words, "labels": tags}) + "\n")
    found = [measurement.evaluate(model, path).metrics for path in (named, numbered)]
    assert found[0] == found[1] and 0 < found[0]["accuracy"] < 1


def test_names_that_mean_the_same_are_paired():
    assert labels.same_names(["0", "x"], ["LABEL_0", "LABEL_1"]) == {"0": "LABEL_0"}
    assert labels.same_names(["Not-Entailment"], ["not_entailment"]) == {"Not-Entailment": "not_entailment"}
    assert labels.same_names(["No"], ["NO", "no"]) == {}  # ambiguous
    assert labels.permutation(("0", "1"), ("label_1", "LABEL_0")) == (1, 0)
    assert labels.permutation(("yes", "no"), ("no", "maybe")) is None


@pytest.mark.parametrize(
    ("label", "other", "same"),
    [
        ("caf\u00e9", "cafe\u0301", True),  # NFC and NFD
        ("\uff21\uff22", "ab", True),  # wide letters
        ("th\u00e9", "\ufeffth\u00e9", True),  # a byte-order mark
        ("hate", "ha\u00adte", True),  # a soft hyphen
        ("hate", "hate\u200b", True),  # a space without width
        ("\u2764", "\u2764\ufe0f", True),  # the selector of an emoji
        ("a b", "a\u00a0b", True),
        ("a-b", "a\u2013b", True),
        ("stra\u00dfe", "STRASSE", True),
        ("1", "1.0", True),
        ("-1", "-1.0", True),
        ("LABEL_1", "1.", True),
        ("1", "-1", False),
        ("1", "1.5", False),
        ("10", "1.0", False),
        ("C", "C#", False),
        ("resume", "r\u00e9sum\u00e9", False),
        ("\u0915", "\u0915\u093f", False),  # a vowel sign of Hindi is seen
    ],
)
def test_names_that_look_alike_are_paired_and_reported(letters, label, other, same):
    assert labels.same_names([other], [label]) == ({other: label} if same else {})
    items = [Example("a", None, each, line) for line, each in enumerate([label, other, "third"] * 2 + [label], 2)]
    task = ClassificationTask("own").complete(Split(Path("train.csv"), tuple(items), labelled=True))
    rows = task.encode(Split(Path("train.csv"), tuple(items), labelled=True), letters)
    found = [line for line in task.describe(rows, training=True).remarks if "look alike" in line]
    assert len(found) == same
    if same:
        assert f"{label!a} (3)" in found[0] and f"{other!a} (2)" in found[0] and "'third'" not in found[0]
        joined = replace(task, labels=(), label_map={other: label})
        assert len(joined.complete(joined.with_names(rows.split)).labels) == 2


@drawn(st.text(min_size=1, max_size=6), st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]))
def test_normal_forms_of_unicode_are_the_same_name(label, form):
    written = unicodedata.normalize(form, label)
    assert written == label or labels.same_names([written], [label]) == {written: label}


def test_a_head_is_kept_for_the_same_labels_in_another_order(tmp_path):
    model = model_of(tmp_path, NLI)
    task = registry.resolve(AutoTaskConfig(name="mnli", train=str(tmp_path / "a.tsv"), max_length=16))[0]
    kept = runs.with_task_labels(model, task)
    assert kept.task["labels"] == ["entailment", "neutral", "contradiction"]
    before, after = predict(model, TEXTS), predict(kept, TEXTS)
    assert [one["label"].lower() for one in before] == [one["label"] for one in after]
    assert [one["score"] for one in before] == pytest.approx([one["score"] for one in after])
    other = dataclasses.replace(task, labels=("entailment", "not_entailment"))
    assert runs.with_task_labels(model, other) is model

    tagger = model_of(tmp_path, ("O", "B-X", "I-X"), "tagging", tags=3, crf=True)
    turned = runs.with_task_labels(tagger, registry.KINDS["tagging"]("own", ("i-x", "O", "b-x"), crf=True))
    for path, axes in (("tagger/dense/kernel", 1), ("crf/start", 1), ("crf/end", 1), ("crf/transitions", 2)):
        wanted = tagger.params[path][..., [2, 0, 1]]
        np.testing.assert_array_equal(turned.params[path], wanted[[2, 0, 1]] if axes == 2 else wanted)


def test_labels_of_a_named_task_take_new_names_and_an_order(tmp_path):
    train = table(tmp_path / "train.tsv", ["0", "1", "1", "0", "1", "0"])
    config = AutoTaskConfig(
        train=str(train), text="text", label="label", label_map={"0": "NEGATIVE", "1": "POSITIVE"}, positive="NEGATIVE"
    )
    task, files = registry.resolve(config)
    split = registry.read(task, files["train"])
    task = task.complete(split)
    assert task.labels == ("NEGATIVE", "POSITIVE") and task.metrics == ("accuracy", "f1")
    assert registry.from_json(json.loads(json.dumps(registry.to_json(task)))) == task
    assert {item.label for item in split.items} == set(task.labels)
    task, _ = registry.resolve(dataclasses.replace(config, labels=("POSITIVE", "NEGATIVE")))
    assert task.complete(registry.read(task, files["train"])).labels == ("POSITIVE", "NEGATIVE")
    named, _ = registry.resolve(
        AutoTaskConfig(name="sst2", train=str(train), label_map={"0": "NEGATIVE", "1": "POSITIVE"})
    )
    assert named.labels == ("NEGATIVE", "POSITIVE")


def test_metrics_are_chosen_and_f1_is_that_of_the_positive_label():
    config = AutoTaskConfig(
        train="a.tsv", text="0", label="1", metrics=("precision", "recall", "f1", "accuracy"), positive="c"
    )
    task = dataclasses.replace(registry.resolve(config)[0], labels=("a", "b", "c"))
    truth, guess = np.array([0, 1, 1, 2, 1, 0], np.int32), np.array([1, 1, 2, 2, 1, 1])
    rows = LabelledRows(
        input_ids=np.zeros(6, np.int32),
        first_lengths=np.ones(6, np.int32),
        offsets=np.arange(7),
        labels=truth,
        label_weights=np.ones(6, np.float32),
        pad_id=0,
        truncated=0,
        split=Split(Path("a.tsv"), (), labelled=True),
    )
    found = task.measure(rows, list(np.eye(3)[guess]))
    assert list(found) == ["precision", "recall", "f1", "accuracy"]
    assert found == pytest.approx({"precision": 1 / 2, "recall": 1, "f1": 2 / 3, "accuracy": 3 / 6})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metrics": ("f1", "bleu")}, "unknown metric 'bleu' for this kind of task; choose from: accuracy, f1"),
        ({"metrics": ("f1", "f1")}, "task.metrics is 'f1,f1'; give different names"),
        ({"labels": ("a", "b"), "positive": "c"}, "task.positive is 'c', which is not a label of the task: a, b"),
        ({"labels": ("a", "b"), "label_map": {"0": "c"}}, "names 'c', which is not a label of the task: a, b"),
        ({"kind": "regression", "labels": ("a", "b")}, "unknown key task.labels: task=regression does not have it"),
        (
            {"kind": "regression", "label_map": {"0": "a"}},
            "unknown key task.label_map: .* --task=auto or classification",
        ),
        ({"kind": "regression", "scale_targets": "maybe"}, "scale_targets 'maybe'; choose from auto, yes, no"),
    ],
)
def test_impossible_metrics_and_labels_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        registry.resolve(
            load(TaskConfig, {"kind": "auto", "train": "a.tsv", "text": "0", "label": "1"} | options, "task")
        )


def test_the_metric_that_keeps_a_checkpoint_chooses_seeds_and_rates():
    task = named.TASKS["mrpc"].task
    for given, chosen in (("", "accuracy"), ("eval_f1", "f1"), ("eval_task_loss", "task_loss")):
        config = FinetuneConfig(early_stop=1, checkpoint=CheckpointConfig(best=given))
        assert trials.chosen_by(config, task) == chosen
        kept_by = trials.settings(config, Trial(0), task, 96, measured=True).checkpoint.best
        assert kept_by == f"eval_{chosen}"


LABELS = ["b"] * 5 + ["a"] * 2 + ["c"]
TRAIN = Split(Path("train.tsv"), tuple(Example("x", None, label, 2) for label in LABELS), labelled=True)
TASK = ClassificationTask("own", ("a", "b", "c", "d"))


def weights_of(given: str | dict[str, float]) -> tuple[float, ...]:
    task = replace(TASK, class_weights=given)
    return task.complete(TRAIN).class_weight_values


def test_balanced_weights_are_those_of_scikit_learn_and_1_for_what_the_file_does_not_have():
    wanted = compute_class_weight("balanced", classes=np.array(["a", "b", "c"]), y=np.array(LABELS))
    np.testing.assert_allclose(weights_of("balanced"), [*wanted, 1.0], rtol=1e-12)


def test_given_weights_go_by_label_and_the_others_weigh_1():
    assert weights_of({"c": 3.0, "a": 0.5}) == (0.5, 1.0, 3.0, 1.0)
    assert weights_of("") == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"class_weights": {"e": 2.0}}, r"names 'e', which is not a label of train.tsv: a, b, c, d"),
        ({"class_weights": "balance"}, r"class_weights is 'balance'; use balanced, or"),
        ({"class_weights": dict.fromkeys("abcd", 0.0)}, r"with numbers of 0 or more, one of them above 0"),
        ({"class_weights": {"a": -1.0}}, r"class_weights is \{'a': -1\.0\}; .* with numbers of 0 or more"),
        ({"label_smoothing": 1.0}, r"task.label_smoothing is 1.0. Use a rate from 0 to below 1"),
    ],
)
def test_invalid_weights_and_shares_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        task = replace(TASK, **options)
        task.complete(TRAIN)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"class_weights": "balanced"}])
def test_options_of_another_kind_are_refused(options):
    with pytest.raises(UserError, match=rf"unknown key task.{next(iter(options))}: task=regression does not have it"):
        load(TaskConfig, {"kind": "regression", **options}, "task")
    with pytest.raises(UserError, match=r"which task.crf replaces; remove one"):
        TaggingTask("own", crf=True, **options)


def test_tags_are_weighed_by_words_in_the_scheme_of_the_labels():
    words = Sentence(("EU", "says", "Rome", "Paris", "!"), ("I-ORG", "O", "I-LOC", "B-LOC", "O"), (1, 2, 3, 4, 5))
    train = Split(Path("train.conll"), (words,), labelled=True)
    task = TaggingTask("own", ("O", "B-ORG", "B-LOC", "I-LOC"), class_weights="balanced", label_smoothing=0.1)
    found = task.complete(train)
    assert found.class_weight_values == (5 / 6, 5 / 3, 5 / 6, 1.0)  # n / (3 * count); I-LOC is in the set only
    objective = found.objective()
    labels = TagLabels(tags=jnp.array([[2, 0, 3]]), words=jnp.array([[0, 1, 2]]), whole=jnp.ones((1, 2), bool))
    batch = TaskBatch(*[jnp.zeros((1, 3), jnp.int32)] * 4, labels=labels, label_weights=jnp.array([[1.0, 1, 0]]))
    assert objective.counts(batch)["task"] == pytest.approx(5 / 6 + 5 / 6)
    assert objective.costs == ClassCosts(found.class_weight_values, 0.1)


def test_the_denominator_is_the_weight_of_the_labels_and_evaluation_has_no_weights():
    task = replace(
        TASK, class_weight_values=(0.5, 2.0, 1.0, 1.0), class_weights={"a": 0.5, "b": 2.0}, label_smoothing=0.1
    )
    labels, weights = jnp.array([0, 1, 1, 0]), jnp.array([1.0, 1, 1, 0])
    batch = TaskBatch(*[jnp.zeros((4, 8), jnp.int32)] * 4, labels=labels, label_weights=weights)
    assert task.objective().counts(batch)["task"] == 0.5 + 2 + 2
    plain = task.measured.objective()
    assert plain.counts(batch)["task"] == 3 and plain == TASK.objective()
    assert task.costs == ClassCosts((0.5, 2.0, 1.0, 1.0), 0.1) and task.measured.costs == ClassCosts()
