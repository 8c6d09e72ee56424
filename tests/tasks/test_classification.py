"""Classes, scores and sets of labels of texts: labels, rows, metrics, predictions."""

import dataclasses
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_finetuning
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from random_checkpoints import odd_config, random_checkpoint
from scipy.special import softmax
from sklearn.metrics import f1_score, matthews_corrcoef, roc_auc_score
from tiny_finetuning import config_of
from tokenizer_kinds import byte_pairs

from bert_jax.config import FinetuneConfig, ModelOptions, MultiLabelConfig, TaskConfig
from bert_jax.errors import UserError
from bert_jax.interop import huggingface, huggingface_export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads.config import Heads
from bert_jax.reporting.finetuning import error_sections
from bert_jax.storage.location import location
from bert_jax.tasks import embedder, measurement, registry, rows
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.kinds.classification import ClassificationTask, MultiLabelTask, RegressionTask
from bert_jax.tasks.metrics import best_threshold, multilabel_metrics
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.reading.labelled import read_label_sets
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Example, LabelSet, Split
from bert_jax.tasks.runs import prepare
from bert_jax.tokenization import tokenizer as tokenizer_lib
from bert_jax.train.workdir import read_config

letters = tiny_finetuning.letters  # a fixture

TASK = ClassificationTask("own", ("no", "yes"), max_length=12, metrics=("accuracy",))


def split_of(*items: tuple[str, str | None, str | None]) -> Split[Example]:
    examples = tuple(Example(text, pair, label, line) for line, (text, pair, label) in enumerate(items, 2))
    return Split(Path("train.tsv"), examples, labelled=items[0][2] is not None)


def test_a_pair_is_cls_text_sep_pair_sep_with_the_pair_in_segment_1(letters):
    rows = TASK.encode(split_of(("a b", "c d e", "yes"), ("f", "g", "no")), letters)
    batch = rows.batch(np.array([0, 1, -1]), 10)
    tokens = [letters.tokens(row) for row in batch.input_ids]
    assert tokens[0] == ["[CLS]", "a", "b", "[SEP]", "c", "d", "e", "[SEP]", "[PAD]", "[PAD]"]
    assert batch.segment_ids[0].tolist() == [0] * 4 + [1] * 4 + [0] * 2
    assert batch.sequence_ids[0].tolist() == [1] * 8 + [0] * 2
    assert batch.positions[0].tolist() == [*range(8), 0, 0]
    assert tokens[1][:5] == ["[CLS]", "f", "[SEP]", "g", "[SEP]"]
    assert batch.labels[:2].tolist() == [1, 0]
    assert batch.label_weights.tolist() == [1, 1, 0]
    assert not batch.sequence_ids[2].any()


def test_a_single_text_is_cls_text_sep(letters):
    rows = TASK.encode(split_of(("ab", None, None), ("", None, None)), letters)
    assert letters.tokens(rows.input_ids) == ["[CLS]", "a", "##b", "[SEP]", "[CLS]", "[SEP]"]
    assert rows.label_weights.tolist() == [0, 0]


def test_special_tokens_in_a_text_are_those_tokens(letters):
    rows = TASK.encode(split_of(("a [SEP] b", None, "yes")), letters)
    assert (rows.input_ids == letters.sep_id).sum() == 2


def by_hand(first: int, second: int, room: int) -> tuple[int, int]:
    """Takes one piece at a time from the longer; of equals, from the one that was not longer at first."""
    lengths = [first, second]
    tie = 1 if first > second else 0
    while sum(lengths) > room:
        lengths[tie if lengths[0] == lengths[1] else int(lengths[1] > lengths[0])] -= 1
    return lengths[0], lengths[1]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(4, 30))
def test_the_longer_text_is_cut_first(first, second, room):
    kept = rows.truncated_lengths(np.array([first]), np.array([second]), room)
    assert (int(kept[0][0]), int(kept[1][0])) == by_hand(first, second, room)


def test_cut_lengths_equal_those_of_hugging_face_tokenizers(letters):
    from tokenizers import Tokenizer as Library
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    library = Library(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.pre_tokenizer = Whitespace()
    for room in (5, 6, 9):
        library.enable_truncation(max_length=room, strategy="longest_first")
        for first, second in ((3, 9), (9, 3), (9, 9), (6, 7), (7, 6), (0, 20), (20, 0), (2, 20), (2, 2)):
            ids = library.encode(" ".join("a" * first), " ".join("b" * second)).ids
            kept = rows.truncated_lengths(np.array([first]), np.array([second]), room)
            assert (int(kept[0][0]), int(kept[1][0])) == (ids.count(0), ids.count(1)), (room, first, second)


def test_cut_examples_are_counted_and_keep_both_separators(letters):
    long = " ".join("abcdefghijklmno")
    rows = TASK.encode(split_of((long, "a b", "yes"), ("a", "b", "no"), ("a", long, "no")), letters)
    assert rows.truncated == 2
    assert rows.lengths.tolist() == [12, 5, 12]
    batch = rows.batch(np.array([0, 2]), 12)
    assert letters.tokens(batch.input_ids[0]) == ["[CLS]", *"abcdefg", "[SEP]", "a", "b", "[SEP]"]
    assert ((batch.input_ids == letters.sep_id).sum(axis=1) == 2).all()


def test_pairs_are_joined_and_cut_as_in_the_library_with_roberta_s_vocabulary(tmp_path):
    words = tokenizer_lib.load(byte_pairs(tmp_path / "vocabulary", ["a b"]))
    words.save(tmp_path / "saved")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    library.enable_truncation(max_length=12, strategy="longest_first")
    examples = [("ab", "a c"), ("a b c d e f g h", "a"), ("b", "c d e f g h a b c"), ("a" * 9, "c" * 9), ("abc", "")]
    rows = TASK.encode(split_of(*((first, second, "no") for first, second in examples)), words)
    for row, (first, second) in enumerate(examples):
        ids = rows.input_ids[rows.offsets[row] : rows.offsets[row + 1]].tolist()
        assert ids == library.encode(first, second).ids
        assert ids[: rows.first_lengths[row]][-2:] == [words.sep_id] * 2 and ids.count(words.sep_id) == 3
    np.testing.assert_array_equal(embedder.encode(examples, words, 12, by_word=False).rows.input_ids, rows.input_ids)


def test_labels_come_from_the_training_file_in_order():
    numbers = split_of(("a", None, "10"), ("b", None, "9"), ("c", None, "-1"))
    assert replace(TASK, labels=(), metrics=()).complete(numbers).labels == ("-1", "9", "10")
    words = replace(TASK, labels=(), metrics=()).complete(split_of(("a", None, "b"), ("b", None, "a")))
    assert (words.labels, words.metrics) == (("a", "b"), ("accuracy", "macro_f1"))
    assert TASK.complete(numbers) == TASK


def test_an_unknown_label_is_refused_with_file_and_line(letters):
    with pytest.raises(UserError, match=r"train.tsv line 3: unknown label 'perhaps'; .* labels are: 'no', 'yes'"):
        TASK.encode(split_of(("a", None, "yes"), ("b", None, "perhaps")), letters)


@pytest.mark.parametrize("score", ["", "nan", "high", "inf", "1e39"])
def test_a_score_that_is_no_number_is_refused_with_file_and_line(letters, score):
    task = RegressionTask("own", max_length=12)
    with pytest.raises(UserError, match=f"train.tsv line 3: '{score}' is not a number"):
        task.encode(split_of(("a", None, "2.5"), ("b", None, score)), letters)


def test_empty_texts_are_counted_and_reported(letters):
    rows = TASK.encode(split_of(("", "a", "yes"), ("a", " \t", "no"), ("a", "b", "no")), letters)
    assert TASK.describe(rows).counts == {"empty_texts": 2} and rows.lengths.tolist() == [4, 4, 5]
    assert measurement.remarks(rows, TASK) == ["train.tsv: 2 of 3 examples have an empty text"]


def test_truncated_and_skipped_texts_are_reported(letters):
    long = " ".join("abcdefghijklmno")
    split = replace(split_of((long, "a b", "yes"), ("a", "b", "no")), left_out=3)
    assert measurement.remarks(TASK.encode(split, letters), TASK) == [
        "train.tsv: 3 lines are skipped, because their number of fields differs",
        "train.tsv: 1 of 2 examples lost tokens to task.max_length=12",
    ]


@pytest.mark.parametrize(
    ("metrics", "end"),
    [(("matthews_correlation", "accuracy"), ", so matthews_correlation is undefined"), (("accuracy",), "")],
)
def test_equal_labels_are_reported_with_the_undefined_metrics(letters, metrics, end):
    task = replace(TASK, metrics=metrics)
    rows = task.encode(split_of(("a", "b", "no"), ("b", "c", "no")), letters)
    assert task.describe(rows).remarks == [f"train.tsv: every label is 'no'{end}"]
    measured = task.measure(rows, [np.array([1.0, 0.0]), np.array([0.0, 1.0])])
    undefined = {name for name, value in measured.items() if np.isnan(value)}
    assert undefined == ({"matthews_correlation"} if end else set())


def test_scores_are_read_as_they_are(letters):
    task = RegressionTask("own", max_length=12)
    rows = task.encode(split_of(("a", "b", "2.5"), ("b", "c", "0")), letters)
    targets = rows.batch(np.array([0, 1]), 8).labels
    assert targets.dtype == np.float32 and targets.tolist() == rows.labels.tolist() == [2.5, 0.0]
    outputs = np.array([2.0, -1.0], np.float32)
    named = replace(task, metrics=("pearson",))
    assert named.measure(rows, list(outputs)) == {"pearson": pytest.approx(1.0)}


def test_a_classification_needs_labels_that_differ_and_repeat():
    unlabelled = replace(TASK, labels=())
    with pytest.raises(UserError, match="every label is 'a'"):
        unlabelled.complete(split_of(("x", None, "a"), ("y", None, "a")))
    many = split_of(*(("x", None, f"{number}.5") for number in range(80)))
    with pytest.raises(UserError, match=r"80 different labels in 80 lines.*task=regression"):
        unlabelled.complete(many)


@pytest.mark.parametrize(
    ("kind", "text", "lines", "looks"),
    [
        ("classification", "0", ["text,label", "a,pos", "b,neg", "c,pos", "d,neg"], True),
        ("multilabel", "0", ["text,label", "a,pos", 'b,"neg,pos"', "c,neg"], True),
        ("classification", "0", ["text,label", "a,1", "b,0"], True),
        ("classification", "0", ["a,pos", "b,neg", "c,pos"], False),
        ("classification", "0", ["a,rare", "b,neg", "c,pos", "d,neg"], False),
        ("multilabel", "0", ["a,rare", "b,neg", 'c,"pos,neg"'], False),
        ("classification", "text", ["text,label", "a,pos", "b,neg", "c,neg"], False),  # a name means a header
        ("regression", "0", ["a,1.5", "b,2"], False),
    ],
)
def test_a_header_under_numbered_columns_is_reported(letters, tmp_path, kind, text, lines, looks):
    path = tmp_path / "train.csv"
    path.write_text("\n".join(lines) + "\n")
    task = TaskConfig.kinds[kind](train=str(path), text=text, label="1", max_length=12, dev_share=0.0)
    reported: list[str] = []
    config = FinetuneConfig(model=ModelOptions(preset="tiny"), task=task)
    prepare(config, location(tmp_path / "run"), letters, reported.append)
    said = f"{path}: only line 1 has the label 'label'; if it is a header, name columns by it"
    assert [line for line in reported if "it is a header" in line] == [said] * looks


start = tiny_finetuning.start  # a fixture

TEXTS = ["the cat sat", "a dog", "un want able river on the mat . the dog", "mat", "the river", "a cat on a mat ."]
LABELS = ("joy", "anger", "fear")
AREAS_AND_LOSS = ("auroc", "micro_auroc", "task_loss")
SETS = [("joy",), (), ("joy", "fear"), ("anger",), ("anger", "fear"), ("fear",)]


def sets_of(path: Path, label: str = "labels", names: tuple[str, ...] = ()) -> list[tuple[str, ...] | None]:
    return [item.labels for item in read_label_sets(path, Columns("text", label=label), True, names).items]


def model_of(tmp_path: Path, **task: object) -> LoadedModel:
    values = {"name": "own", "kind": "multilabel", "labels": list(LABELS), "max_length": 16, "columns": {}} | task
    return random_checkpoint(tmp_path / "vocabulary", odd_config(layers=1), Heads(pooler=True, classes=3), task=values)


def json_lines(path: Path) -> Path:
    rows = zip(TEXTS, SETS, strict=True)
    path.write_text("".join(json.dumps({"text": text, "labels": labels}) + "\n" for text, labels in rows))
    return path


def test_label_sets_are_lists_or_separated_by_commas_or_columns(tmp_path):
    assert sets_of(json_lines(tmp_path / "a.jsonl")) == SETS
    tsv = ["text\tlabels", *(f"{text}\t{','.join(labels)}" for text, labels in zip(TEXTS, SETS, strict=True))]
    (tmp_path / "a.tsv").write_text("\n".join(tsv) + "\n")
    assert sets_of(tmp_path / "a.tsv") == SETS
    rows = [[text, *(str(int(name in labels)) for name in LABELS)] for text, labels in zip(TEXTS, SETS, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(",".join(row) for row in [["text", *LABELS], *rows]) + "\n")
    assert [set(found or ()) for found in sets_of(tmp_path / "a.csv", "joy, anger,fear")] == [set(one) for one in SETS]
    numbers = [[LABELS.index(label) for label in labels] for labels in SETS]
    table = pa.table({"text": TEXTS, "labels": pa.array(numbers, pa.list_(pa.int64()))})
    pq.write_table(table, tmp_path / "a.parquet")
    assert sets_of(tmp_path / "a.parquet", names=LABELS) == SETS
    assert sets_of(tmp_path / "a.parquet")[2] == ("0", "2")


@pytest.mark.parametrize(
    ("cells", "separator"),
    [
        (["a|b", "b"], "|"),
        (["a | b", "", "b|c"], "|"),
        (["a;b;", "b;"], ";"),
        (["a#b#c", "c"], "#"),
        (["a/b", "b"], "/"),
        (["C#", "F#", "C"], ","),  # no label is empty
        (["a|b", "c"], ","),  # no part is known to be a label
        (["a|b,b", "b"], ","),
        (["['a|b', 'b']", "b"], ","),
        (["science fiction", "fiction"], ","),
        (["AC/DC", "Queen"], ","),
    ],
)
def test_separators_of_labels_are_recognized_and_reported(tmp_path, cells, separator):
    for name, line in (("a.csv", 'x,"{}"'), ("a.tsv", "x\t{}")):
        path = tmp_path / name
        path.write_text("\n".join([line.replace("x", "text").format("label"), *map(line.format, cells)]) + "\n")
        split = read_label_sets(path, Columns("text", label="label"), label_required=True)
        if separator == ",":
            assert not split.remarks
            continue
        assert [item.labels for item in split.items] == [
            tuple(part.strip() for part in cell.split(separator) if part.strip()) for cell in cells
        ]
        several = sum(len(cell.strip(separator).split(separator)) > 1 for cell in cells)
        (remark,) = split.remarks
        assert remark == f"labels are separated by {separator!r}; {several} of {len(cells)} texts have several"


def test_a_file_is_separated_as_the_labels_of_the_model_need_it(tmp_path):
    path = tmp_path / "dev.csv"
    path.write_text("text,label\nx,a|b\n")
    for labels, read in ((("a", "b"), ("a", "b")), (("a|b", "c"), ("a|b",)), ((), ("a|b",))):
        (item,) = read_label_sets(path, Columns("text", label="label"), True, labels).items
        assert item.labels == read


def test_metrics_of_one_class_refuse_three_unless_it_is_named(letters):
    split = split_of(("a", None, "ham"), ("b", None, "promo"), ("c", None, "spam"))
    for metric in ("f1", "precision", "recall"):
        task = ClassificationTask("own", metrics=(metric,))
        with pytest.raises(UserError, match=rf"metric {metric} is of one class, but the task has 3 labels: ham, promo"):
            task.complete(split)
        assert replace(task, positive="spam").complete(split).metrics == (metric,)
        assert task.complete(split_of(("a", None, "ham"), ("b", None, "spam"))).metrics == (metric,)


@pytest.mark.parametrize("labels", [("no", "yes"), ("a", "b", "c", "d")])
def test_metrics_of_classes_are_those_of_scikit_learn(letters, labels):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(60, len(labels))).astype(np.float32)
    names = ("weighted_f1", "macro_f1", "mcc", "matthews_correlation", "auroc")
    task = ClassificationTask("own", labels, max_length=12, metrics=names)
    rows = task.encode(split_of(*(("a", None, labels[number % len(labels)]) for number in range(60))), letters)
    truth, predicted, shares = rows.labels, logits.argmax(-1), softmax(logits.astype(np.float64), axis=-1)
    area = roc_auc_score(truth, shares[:, 1] if len(labels) == 2 else shares, multi_class="ovr")
    assert task.measure(rows, list(logits)) == pytest.approx(
        {
            "weighted_f1": f1_score(truth, predicted, average="weighted"),
            "macro_f1": f1_score(truth, predicted, average="macro"),
            "mcc": matthews_corrcoef(truth, predicted),
            "matthews_correlation": matthews_corrcoef(truth, predicted),
            "auroc": area,
        }
    )
    if len(labels) == 2:
        turned = replace(task, positive="no", metrics=("auroc", "f1")).measure(rows, list(logits))
        assert turned["auroc"] == pytest.approx(roc_auc_score(truth == 0, shares[:, 0]))
        assert turned["f1"] == pytest.approx(f1_score(truth, predicted, pos_label=0))
    assert np.isnan(task.measure(rows, list(logits * np.nan))["auroc"])


def test_a_multilabel_file_without_two_labels_in_a_text_is_reported(letters):
    items = tuple(LabelSet("a", None, (label,), line) for line, label in enumerate(["x y", "y", "x"], 2))
    task = MultiLabelTask("own").complete(Split(Path("train.csv"), items, labelled=True))
    rows = task.encode(Split(Path("train.csv"), items, labelled=True), letters)
    assert "no text has more than one label" in task.describe(rows, training=True).remarks[-1]


def test_lists_may_be_written_in_brackets_as_pandas_does(tmp_path):
    for name, write in (("python", str), ("json", json.dumps)):
        lines = ["text\tlabels", *(f"{text}\t{write(list(one))}" for text, one in zip(TEXTS, SETS, strict=True))]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
        assert sets_of(tmp_path / f"{name}.tsv") == SETS
    (tmp_path / "sets.tsv").write_text("text\tlabels\na\t{'joy', 'fear'}\nb\tset()\n")
    assert sets_of(tmp_path / "sets.tsv") == [("fear", "joy"), ()]
    (tmp_path / "numbers.tsv").write_text("text\tlabels\na\t[0, 2]\n")
    assert sets_of(tmp_path / "numbers.tsv", names=LABELS) == [("joy", "fear")]


def test_labels_that_are_themselves_in_brackets_are_separated_by_commas(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("text\tlabels\na\t[other]\nb\t[a], [b]\nc\t[1], [2]\nd\tjoy\ne\t{}\n")
    assert sets_of(path) == [("[other]",), ("[a]", "[b]"), ("[1]", "[2]"), ("joy",), ("{}",)]


@pytest.mark.parametrize("withheld", ["", "-1"])
def test_several_columns_without_a_value_are_unlabelled(tmp_path, withheld):
    path, columns = tmp_path / "test.csv", Columns("text", label="joy,anger")
    path.write_text(f"text,joy,anger\na,{withheld},{withheld}\nb,{withheld},{withheld}\n")
    split = read_label_sets(path, columns, False)
    assert not split.labelled and [item.labels for item in split.items] == [None, None]
    with pytest.raises(UserError, match="column 'joy,anger' is empty, null or -1 throughout"):
        read_label_sets(path, columns, True)
    path.write_text("text,joy,anger\na,,1\nb,,\n")
    assert sets_of(path, "joy,anger") == [("anger",), ()]


@pytest.mark.parametrize(
    ("content", "label", "said"),
    [
        ("text\tlabels\na\t\n", "labels", "has no labels: column 'labels' is empty, null or -1 throughout"),
        ("text\tlabels\na\t['joy' 'fear']\n", "labels", r"line 2: column 'labels' holds .* such as \['a', 'b'\]"),
        ("text\tlabels\na\t[joy, fear]\n", "labels", r"line 2: column 'labels' holds '\[joy, fear\]'"),
        ("text\tlabels\na\t[1, 0]\nb\t[0, 1]\n", "labels", "one value for each class"),
        ("text\tx\ty\na\t-1\t-1\nb\t1\t0\n", "x,y", "line 2: column 'x' holds '-1'; expected 1 or 0"),
        ("text\tx\ty\na\t1\t2\n", "x,y", "line 2: column 'y' holds '2'; expected 1 or 0"),
        ("text\tx\na\t1\n", "x,y", "has no column 'y'"),
        ("text\tx\na\t1\n", "", "task.label is not set"),
    ],
)
def test_malformed_label_sets_are_refused(tmp_path, content, label, said):
    (tmp_path / "a.tsv").write_text(content)
    with pytest.raises(UserError, match=said):
        sets_of(tmp_path / "a.tsv", label)


def test_the_metrics_follow_their_definitions():
    draw = np.random.default_rng(0)
    truth, shares = draw.random((40, 4)) < 0.4, np.round(draw.random((40, 4)), 1)  # with ties
    truth[:, 3] = False
    predicted = shares >= [0.3, 0.5, 0.7, 0.2]

    def f1(true: np.ndarray, guess: np.ndarray) -> float:
        hits, total = (true & guess).sum(), true.sum() + guess.sum()
        return float(2 * hits / total) if total else 0.0

    def area(true: np.ndarray, scores: np.ndarray) -> float:
        """The share of pairs of a true and a false one that are in the right order; ties count half."""
        pairs = list(itertools.product(scores[true], scores[~true]))
        return sum((one > other) + 0.5 * (one == other) for one, other in pairs) / len(pairs)

    names = ("micro_f1", "macro_f1", "exact_match", "auroc", "micro_auroc")
    found = multilabel_metrics(names, truth, shares, predicted)
    assert list(found) == list(names)
    assert found["micro_f1"] == pytest.approx(f1(truth.ravel(), predicted.ravel()))
    assert found["macro_f1"] == pytest.approx(np.mean([f1(truth[:, k], predicted[:, k]) for k in range(4)]))
    assert found["exact_match"] == np.mean([(one == two).all() for one, two in zip(truth, predicted, strict=True)])
    assert found["auroc"] == pytest.approx(np.mean([area(truth[:, k], shares[:, k]) for k in range(3)]))
    assert found["micro_auroc"] == pytest.approx(area(truth.ravel(), shares.ravel()))
    assert np.isnan(multilabel_metrics(("auroc",), truth[:, 3:], shares[:, 3:], predicted[:, 3:])["auroc"])


def test_each_label_has_the_threshold_with_its_best_f1():
    draw = np.random.default_rng(1)
    for _ in range(50):
        shares, truth = np.round(draw.random(12), 1), draw.random(12) < 0.4
        if not truth.any():
            continue

        def f1(cut: float, shares: np.ndarray = shares, truth: np.ndarray = truth) -> float:
            guess = shares >= cut
            return 2 * (truth & guess).sum() / (truth.sum() + guess.sum()) if guess.any() else 0.0

        found = best_threshold(shares, truth, int(truth.sum()))
        assert f1(found) == pytest.approx(max(map(f1, np.linspace(0, 1, 41))))


def test_thresholds_are_calibrated_on_dev_and_used_afterwards(tmp_path):
    data, columns = json_lines(tmp_path / "dev.jsonl"), Columns("text", label="labels")
    model = model_of(tmp_path, metrics=["macro_f1", "micro_f1"])
    in_training = FineTuned(model, columns=columns)
    rows = in_training.encode(registry.read(in_training.task, data))
    before = in_training.task.measure(rows, in_training.answers(rows))
    assert list(before) == ["macro_f1", "micro_f1", *(f"threshold/{label}" for label in LABELS)]
    task = registry.restore_task(model).calibrated(before)
    assert task.thresholds == tuple(before[f"threshold/{label}"] for label in LABELS)
    assert task.calibrated({}) == task and MultiLabelTask("own", LABELS).calibrated({}).thresholds == (0.5,) * 3
    kept = dataclasses.replace(model, task=json.loads(json.dumps(registry.to_json(task))))
    after = measurement.evaluate(kept, data, columns=columns).metrics
    assert after.pop("task_loss") and after == {name: before[name] for name in ("macro_f1", "micro_f1")}
    for one in predict(kept, TEXTS, all_scores=True):
        chosen = [label for label, cut in zip(LABELS, task.thresholds, strict=True) if one["scores"][label] >= cut]
        assert one["labels"] == chosen and one["label_scores"] == [one["scores"][label] for label in chosen]


def test_without_thresholds_a_file_is_measured_by_what_is_predicted(tmp_path):
    data, columns = json_lines(tmp_path / "dev.jsonl"), Columns("text", label="labels")
    model = model_of(tmp_path, metrics=["micro_f1"])
    found = measurement.evaluate(model, data, columns=columns).metrics
    assert list(found) == ["micro_f1", "task_loss"]
    predictions = predict(model, TEXTS, all_scores=True)
    predicted = [set(one["labels"]) for one in predictions]
    hits = sum(len(one & set(labels)) for one, labels in zip(predicted, SETS, strict=True))
    assert found["micro_f1"] == pytest.approx(2 * hits / (sum(map(len, predicted)) + sum(map(len, SETS))))
    rows = [[one["scores"][label] for label in LABELS] for one in predictions]
    losses = [
        -np.log(share if label in labels else 1 - share)
        for shares, labels in zip(rows, SETS, strict=True)
        for share, label in zip(shares, LABELS, strict=True)
    ]
    assert found["task_loss"] == pytest.approx(np.mean(losses), rel=1e-5)  # torch's BCEWithLogitsLoss


def test_a_model_that_has_diverged_is_measured_and_reported(tmp_path):
    data, model = json_lines(tmp_path / "dev.jsonl"), model_of(tmp_path, metrics=["micro_f1", "auroc", "micro_auroc"])
    nowhere = {path: np.full_like(value, np.nan) for path, value in model.params.items()}
    columns = Columns("text", label="labels")
    found = measurement.evaluate(dataclasses.replace(model, params=nowhere), data, columns=columns)
    assert found.metrics == pytest.approx({"micro_f1": 0} | dict.fromkeys(AREAS_AND_LOSS, np.nan), nan_ok=True)
    assert any("metrics mean nothing, as parameters are NaN" in line for line in found.remarks)
    assert not any("NaN" in line for line in measurement.evaluate(model, data, columns=columns).remarks)


def test_the_hugging_face_layout_says_that_labels_are_independent(tmp_path):
    model = model_of(tmp_path, thresholds=[0.2, 0.4, 0.6])
    huggingface_export.write(model, tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    values = json.loads(config.read_text())
    assert values["problem_type"] == "multi_label_classification"
    assert predict(tmp_path / "hf", TEXTS) == predict(model, TEXTS)
    config.write_text(json.dumps({name: value for name, value in values.items() if name != huggingface.TASK_FIELD}))
    published = huggingface.read(tmp_path / "hf")
    assert published.task["kind"] == "multilabel" and published.task["labels"] == list(LABELS)
    assert registry.restore_task(published).threshold == 0.5  # never calibrated on the file that is measured


def test_labels_are_sorted_or_in_the_order_of_columns_and_keep_their_names(tmp_path):
    split = Split(Path("a.tsv"), tuple(LabelSet("a", None, labels, 1) for labels in SETS), labelled=True)
    assert MultiLabelTask("own").complete(split).labels == ("anger", "fear", "joy")
    in_columns = MultiLabelTask("own", columns=Columns("text", label="joy,anger,fear,none"))
    assert in_columns.complete(split).labels == (*LABELS, "none")
    train = str(json_lines(tmp_path / "a.jsonl"))
    config = MultiLabelConfig(train=train, text="text", label="labels", label_map={"joy": "JOY"})
    task, files = registry.resolve(config)
    assert task.complete(registry.read(task, files["train"])).labels == ("JOY", "anger", "fear")
    one = dataclasses.replace(split, items=(LabelSet("a", None, ("x",), 1),))
    with pytest.raises(UserError, match="a multilabel task needs two or more"):
        MultiLabelTask("own").complete(one)
    with pytest.raises(UserError, match=r"task\.threshold is 1\.5\. Use a probability below 1"):
        MultiLabelTask("own", threshold=1.5)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_learns_labels_and_keeps_the_thresholds_of_dev(start, tmp_path):
    draw = np.random.default_rng(0)
    words = {"good": "joy", "dark": "fear", "sea": "water"}
    for name, count in (("train", 96), ("dev", 32), ("test", 32)):
        rows = ["text\tlabels"]
        for _ in range(count):
            chosen = [word for word in words if draw.random() < 0.5]
            rows.append(" ".join(["the house was", *chosen]) + "\t" + ",".join(words[word] for word in chosen))
        (tmp_path / f"{name}.tsv").write_text("\n".join(rows) + "\n")
    files = {name: str(tmp_path / f"{name}.tsv") for name in ("train", "dev", "test")}
    task = MultiLabelConfig(text="text", label="labels", **files)
    result = finetune(config_of(start, task, epochs=20.0), tmp_path / "run")
    found = {name: metric["mean"] for name, metric in result["metrics"].items()}
    assert found["auroc"] > 0.9 and found["micro_f1"] > 0.8 and found["test_micro_f1"] > 0.7
    loaded = open_checkpoint(tmp_path / "run")
    assert loaded.task["labels"] == ["fear", "joy", "water"]
    assert loaded.task["thresholds"] == [found[f"threshold/{label}"] for label in loaded.task["labels"]]
    assert measurement.evaluate(loaded, files["test"]).metrics["micro_f1"] == pytest.approx(found["test_micro_f1"])
    assert error_sections(tmp_path / "run", read_config(tmp_path / "run"), most=10) == []  # the report has none


@pytest.mark.parametrize(
    ("values", "place"),
    [([[0, 1, 0, 1]], " line 1"), ([[0, 0, 0]], " line 1"), ([[True, False]], " line 1"), ([[0, 1], [1, 0]], "")],
)
def test_a_value_for_each_class_is_not_taken_for_the_numbers_of_classes(tmp_path, values, place):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "the cat", "labels": value}) + "\n" for value in values))
    with pytest.raises(UserError, match=rf"a\.jsonl{place}: column 'labels' holds .*, one value for each class"):
        sets_of(path)
    path.write_text("".join(json.dumps({"text": "the cat", "labels": pair}) + "\n" for pair in ([0, 1], [1])))
    assert sets_of(path) == [("0", "1"), ("1",)]
