"""Encoding of texts and pairs, and labels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kinds import byte_pairs

from bert_jax.config import FinetuneConfig, ModelOptions, TaskConfig
from bert_jax.errors import UserError
from bert_jax.storage.location import location
from bert_jax.tasks import embedder, measurement, rows
from bert_jax.tasks.kinds.classification import ClassificationTask, RegressionTask
from bert_jax.tasks.rows import Example, Split
from bert_jax.tasks.runs import prepare
from bert_jax.tokenization import tokenizer as tokenizer_lib
from bert_jax.tokenization.tokenizer import Tokenizer

TASK = ClassificationTask("own", ("no", "yes"), max_length=12, metrics=("accuracy",))


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary in which every letter is a piece."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path = tmp_path_factory.mktemp("letters") / "vocab.txt"
    path.write_text("\n".join([*special, *alphabet, *(f"##{letter}" for letter in alphabet)]) + "\n")
    return tokenizer_lib.load(path, lowercase=True)


def split_of(*items: tuple[str, str | None, str | None]) -> Split[Example]:
    examples = tuple(Example(text, pair, label, line) for line, (text, pair, label) in enumerate(items, 2))
    return Split(Path("train.tsv"), examples, labelled=items[0][2] is not None)


def test_a_pair_is_cls_text_sep_pair_sep_with_the_pair_in_segment_1(letters: Tokenizer) -> None:
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


def test_a_single_text_is_cls_text_sep(letters: Tokenizer) -> None:
    rows = TASK.encode(split_of(("ab", None, None), ("", None, None)), letters)
    assert letters.tokens(rows.input_ids) == ["[CLS]", "a", "##b", "[SEP]", "[CLS]", "[SEP]"]
    assert rows.label_weights.tolist() == [0, 0]


def test_special_tokens_in_a_text_are_text(letters: Tokenizer) -> None:
    rows = TASK.encode(split_of(("a [SEP] b", None, "yes")), letters)
    assert (rows.input_ids == letters.sep_id).sum() == 1


def by_hand(first: int, second: int, room: int) -> tuple[int, int]:
    """Takes one piece at a time from the longer; of equals, from the one that was not longer at first."""
    lengths = [first, second]
    tie = 1 if first > second else 0
    while sum(lengths) > room:
        lengths[tie if lengths[0] == lengths[1] else int(lengths[1] > lengths[0])] -= 1
    return lengths[0], lengths[1]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(4, 30))
def test_the_longer_text_is_cut_first(first: int, second: int, room: int) -> None:
    kept = rows.truncated_lengths(np.array([first]), np.array([second]), room)
    assert (int(kept[0][0]), int(kept[1][0])) == by_hand(first, second, room)


def test_cut_lengths_equal_those_of_hugging_face_tokenizers(letters: Tokenizer) -> None:
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


def test_cut_examples_are_counted_and_keep_both_separators(letters: Tokenizer) -> None:
    long = " ".join("abcdefghijklmno")
    rows = TASK.encode(split_of((long, "a b", "yes"), ("a", "b", "no"), ("a", long, "no")), letters)
    assert rows.truncated == 2
    assert rows.lengths.tolist() == [12, 5, 12]
    batch = rows.batch(np.array([0, 2]), 12)
    assert letters.tokens(batch.input_ids[0]) == ["[CLS]", *"abcdefg", "[SEP]", "a", "b", "[SEP]"]
    assert ((batch.input_ids == letters.sep_id).sum(axis=1) == 2).all()


def test_pairs_are_joined_and_cut_as_in_the_library_with_roberta_s_vocabulary(tmp_path: Path) -> None:
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


def test_labels_come_from_the_training_file_in_order() -> None:
    numbers = split_of(("a", None, "10"), ("b", None, "9"), ("c", None, "-1"))
    assert replace(TASK, labels=(), metrics=()).complete(numbers).labels == ("-1", "9", "10")
    words = replace(TASK, labels=(), metrics=()).complete(split_of(("a", None, "b"), ("b", None, "a")))
    assert (words.labels, words.metrics) == (("a", "b"), ("accuracy", "macro_f1"))
    assert TASK.complete(numbers) == TASK


def test_an_unknown_label_is_refused_with_file_and_line(letters: Tokenizer) -> None:
    with pytest.raises(
        UserError, match=r"train.tsv line 3: unknown label 'perhaps'; the task's labels are: 'no', 'yes'"
    ):
        TASK.encode(split_of(("a", None, "yes"), ("b", None, "perhaps")), letters)


@pytest.mark.parametrize("score", ["", "nan", "high", "inf", "1e39"])
def test_a_score_that_is_no_number_is_refused_with_file_and_line(letters: Tokenizer, score: str) -> None:
    task = RegressionTask("own", max_length=12)
    with pytest.raises(UserError, match=f"train.tsv line 3: '{score}' is not a number"):
        task.encode(split_of(("a", None, "2.5"), ("b", None, score)), letters)


def test_empty_texts_are_counted_and_reported(letters: Tokenizer) -> None:
    rows = TASK.encode(split_of(("", "a", "yes"), ("a", " \t", "no"), ("a", "b", "no")), letters)
    assert TASK.counts(rows) == {"empty_texts": 2} and rows.lengths.tolist() == [4, 4, 5]
    assert measurement.remarks(rows, TASK) == ["train.tsv: 2 of 3 examples have an empty text"]


def test_truncated_and_skipped_texts_are_reported(letters: Tokenizer) -> None:
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
def test_equal_labels_are_reported_with_the_undefined_metrics(
    letters: Tokenizer, metrics: tuple[str, ...], end: str
) -> None:
    task = replace(TASK, metrics=metrics)
    rows = task.encode(split_of(("a", "b", "no"), ("b", "c", "no")), letters)
    assert task.remarks(rows) == [f"train.tsv: every label is 'no'{end}"]
    measured = task.measure(rows, [np.array([1.0, 0.0]), np.array([0.0, 1.0])])
    undefined = {name for name, value in measured.items() if np.isnan(value)}
    assert undefined == ({"matthews_correlation"} if end else set())


def test_scores_are_read_as_they_are(letters: Tokenizer) -> None:
    task = RegressionTask("own", max_length=12)
    rows = task.encode(split_of(("a", "b", "2.5"), ("b", "c", "0")), letters)
    assert rows.labels.dtype == np.float32 and rows.labels.tolist() == [2.5, 0.0]
    outputs = np.array([[2.0], [-1.0]], np.float32)
    named = replace(task, metrics=("pearson",))
    assert named.measure(rows, list(outputs)) == {"pearson": pytest.approx(1.0)}


def test_a_classification_needs_labels_that_differ_and_repeat() -> None:
    unlabelled = replace(TASK, labels=())
    with pytest.raises(UserError, match="every label is 'a'"):
        unlabelled.complete(split_of(("x", None, "a"), ("y", None, "a")))
    many = split_of(*(("x", None, f"{number}.5") for number in range(80)))
    with pytest.raises(UserError, match=r"80 different labels in 80 lines.*task.kind=regression"):
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
def test_a_header_under_numbered_columns_is_reported(
    letters: Tokenizer, tmp_path: Path, kind: str, text: str, lines: list[str], looks: bool
) -> None:
    path = tmp_path / "train.csv"
    path.write_text("\n".join(lines) + "\n")
    task = TaskConfig(kind=kind, train=str(path), text=text, label="1", max_length=12)
    reported: list[str] = []
    config = FinetuneConfig(model=ModelOptions(preset="tiny"), task=task)
    prepare(config, location(tmp_path / "run"), letters, reported.append)
    said = f"{path}: only line 1 has the label 'label'; if it is a header, name columns by it"
    assert [line for line in reported if "header" in line] == [said] * looks
