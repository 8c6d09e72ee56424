"""Inputs of predict: texts, pairs and words of plain lines and JSON, where words lie, and what is refused."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.command import UserError
from bert_jax.tasks.example import Split
from bert_jax.tasks.inputs import Record, split_words
from bert_jax.tasks.kinds import kind_of
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task

SOURCE = Path("input.txt")
TEXTS = Task("own", "classification", ("a", "b"), columns=Columns("review", "", "stars"))
PAIRS = Task("own", "classification", ("a", "b"), columns=Columns("question1", "question2", "same"))
UNKNOWN = Task("own", "classification", ("a", "b"))  # as another's folder says it: without columns
TAGS = Task("own", "tagging", ("O", "B-X", "I-X"))


def parse(task: Task, *contents: Any) -> Split[Any]:
    records = [Record(line, content) for line, content in enumerate(contents, start=1)]
    return kind_of(task).parse(task, SOURCE, records)


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
        (TEXTS, ["a\tb"], "line 1 holds 2 texts, parted by tabs; wanted 1: text"),
        (PAIRS, ["a"], "line 1 holds 1 texts, parted by tabs; wanted 2: text, text_pair"),
        (UNKNOWN, ["a\tb", "c"], "line 2 is one text, line 1 is a pair"),
        (TEXTS, [{"sentence": "a"}], "line 1 has no field 'review' or 'text'; its fields are: 'sentence'"),
        (TEXTS, [{"text": 7}], "line 1: wanted a text in quotes, got 7"),
        (TEXTS, [{"text": "a \ud800"}], "line 1 holds half of a surrogate pair"),
        (TAGS, [""], "line 1 is empty"),
        (TAGS, [{"tokens": "a b"}], "tokens is 'a b'; wanted a list of words"),
        (TAGS, [{"tokens": ["a", "c"], "text": "a b"}], "the token 'c' is not in the text after character 1"),
    ],
)
def test_bad_records_are_told_by_their_line(task: Task, contents: list[Any], said: str) -> None:
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


@given(st.text())
def test_splitting_keeps_all_but_white_space_and_marks_stand_alone(text: str) -> None:
    words = [text[start:end] for start, end in split_words(text)]
    assert "".join(words) == "".join(text.split())
    for word in words:
        assert len(word) == 1 or not any(unicodedata.category(character)[0] in "PS" for character in word)
    for before, after in zip(split_words(text), split_words(text)[1:], strict=False):
        marks = any(unicodedata.category(character)[0] in "PS" for character in text[before[1] - 1 : after[0] + 1])
        assert before[1] < after[0] or marks  # nothing else parts words
