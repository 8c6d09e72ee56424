"""Inputs of predict: texts, pairs and words of plain lines and JSON, where words lie, and what is refused."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.errors import UserError
from bert_jax.tasks.kinds.classification import ClassificationTask
from bert_jax.tasks.kinds.span import SpanPairTask
from bert_jax.tasks.kinds.tagging import TaggingTask
from bert_jax.tasks.kinds.token_regression import TokenRegressionTask
from bert_jax.tasks.reading.inputs import InputRecord, split_words
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Span, Split
from bert_jax.tasks.task import Task

SOURCE = Path("input.txt")
TEXTS = ClassificationTask("own", ("a", "b"), columns=Columns("review", "", "stars"))
PAIRS = ClassificationTask("own", ("a", "b"), columns=Columns("question1", "question2", "same"))
UNKNOWN = ClassificationTask("own", ("a", "b"))  # as another's folder says it: without columns
TAGS = TaggingTask("own", ("O", "B-X", "I-X"))


def parse(task: Task, *contents: Any) -> Split[Any]:
    records = [InputRecord(line, content) for line, content in enumerate(contents, start=1)]
    return task.parse(SOURCE, records)


def texts(split: Split[Any]) -> list[tuple[str, str | None]]:
    assert not split.labelled
    return [(item.text, item.text_pair) for item in split.items]


def test_a_tab_parts_the_texts_of_a_pair() -> None:
    assert texts(parse(PAIRS, "one text\tanother", "b\tc")) == [("one text", "another"), ("b", "c")]
    assert texts(parse(TEXTS, "one text")) == [("one text", None)]
    assert texts(parse(UNKNOWN, "a\tb")) == [("a", "b")]
    assert texts(parse(UNKNOWN, "a")) == [("a", None)]


def test_fields_have_the_columns_names_or_the_general_ones() -> None:
    assert texts(parse(TEXTS, {"review": "good", "stars": 3, "text": "other"})) == [("good", None)]
    assert texts(parse(TEXTS, {"text": "good"})) == [("good", None)]
    assert texts(parse(PAIRS, {"question2": "b", "question1": "a"}, {"text": "c", "text_pair": "d"})) == [
        ("a", "b"),
        ("c", "d"),
    ]
    assert texts(parse(UNKNOWN, {"text": "a", "text_pair": None})) == [("a", None)]


@pytest.mark.parametrize(
    ("task", "contents", "said"),
    [
        (TEXTS, ["fine", "  "], "input.txt line 2 is empty"),
        (TEXTS, ["a\tb"], "line 1 has 2 texts separated by tabs; expected 1: text"),
        (PAIRS, ["a"], "line 1 has 1 texts separated by tabs; expected 2: text, text_pair"),
        (UNKNOWN, ["a\tb", "c"], "line 2 is one text, but line 1 is a pair"),
        (TEXTS, [{"sentence": "a"}], "line 1 has no field 'review' or 'text'; its fields are: 'sentence'"),
        (TEXTS, [{"text": 7}], "line 1: expected a string, got 7"),
        (TEXTS, [{"text": "a \ud800"}], "line 1 has half of a surrogate pair"),
        (TAGS, [""], "line 1 is empty"),
        (TAGS, [{"tokens": "a b"}], "tokens is 'a b'; expected a list of words"),
        (TAGS, [{"tokens": ["a", "c"], "text": "a b"}], "the token 'c' is not in the text after character 1"),
    ],
)
def test_invalid_records_are_refused_with_their_line(task: Task, contents: list[Any], said: str) -> None:
    with pytest.raises(UserError, match=r"^input.txt line") as error:
        parse(task, *contents)
    assert said in str(error.value)


def test_words_of_text_and_given_words_keep_their_places() -> None:
    (split,) = parse(TAGS, "Ann's (1,5) €").items
    assert split.words == ("Ann", "'", "s", "(", "1", ",", "5", ")", "€")
    assert [split.text[start:end] for start, end in split.offsets] == list(split.words)
    (given,) = parse(TAGS, {"tokens": ["do", "n't", "go"], "text": "do  don't go"}).items
    assert given.offsets == ((0, 2), (6, 9), (10, 12))
    (bare,) = parse(TAGS, {"tokens": ["a", "b-c"]}).items
    assert (bare.words, bare.text, bare.offsets) == (("a", "b-c"), None, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I \u2764\ufe0fNY", ["I", "\u2764\ufe0f", "NY"]),
        ("\U0001f468\u200d\U0001f469 \ufe0f", ["\U0001f468\u200d", "\U0001f469", "\ufe0f"]),
        ("cafe\u0301 =\u0338.", ["cafe\u0301", "=\u0338", "."]),
    ],
)
def test_what_combines_with_a_symbol_stays_with_it(text: str, words: list[str]) -> None:
    assert [text[start:end] for start, end in split_words(text)] == words


def test_words_are_read_from_the_column_of_the_training_file() -> None:
    task = TaggingTask("own", ("O", "B-X"), columns=Columns("forms", "", "ner"))
    objects = [{"forms": ["a", "b"], "tokens": ["c"]}, {"tokens": ["c"]}, {"forms": "a b"}, {"text": "a b"}]
    assert [item.words for item in parse(task, *objects).items] == [("a", "b"), ("c",), ("a", "b"), ("a", "b")]
    called_text = TokenRegressionTask("own", columns=Columns("text", "", "labels"))
    (words, line) = parse(called_text, {"text": ["a", "b"]}, {"tokens": ["a", "b"], "text": "a b"}).items
    assert (words.words, words.offsets) == (("a", "b"), None) and line.offsets == ((0, 1), (2, 3))
    pairs = SpanPairTask("own", ("X",), relations_between="given", columns=Columns("forms", "", "entities"))
    (item,) = parse(pairs, {"forms": ["a", "b"], "entities": [{"start": 0, "end": 2, "label": "X"}]}).items
    assert item.words == ("a", "b") and item.spans == (Span("X", 0, 2),)


@given(st.text())
def test_splitting_keeps_all_but_white_space_and_marks_stand_alone(text: str) -> None:
    words = [text[start:end] for start, end in split_words(text)]
    assert "".join(words) == "".join(text.split())
    kinds = [[unicodedata.category(character)[0] for character in word] for word in words]
    for word, (first, *others) in zip(words, kinds, strict=True):
        assert not {"P", "S"} & set(others)
        joined = [kind == "M" or character == "\u200d" for character, kind in zip(word[1:], others, strict=True)]
        assert first not in "PS" or all(joined)
    for before, after in zip(split_words(text), split_words(text)[1:], strict=False):
        marks = any(unicodedata.category(text[place])[0] in "PS" for place in (before[0], after[0]))
        assert before[1] < after[0] or marks  # nothing else parts words
