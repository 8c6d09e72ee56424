"""Rows of questions: every piece of a context is in a window and best in one; labels cover the answer's characters."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import byte_pairs

from bert_jax.errors import UserError
from bert_jax.tasks import measurement
from bert_jax.tasks.kinds.question import QuestionTask
from bert_jax.tasks.kinds.question_data import Answer, AnswerSpan, Question, QuestionRows, windows_of
from bert_jax.tasks.rows import Split
from bert_jax.tokenization import tokenizer as tokenizer_lib
from bert_jax.tokenization.tokenizer import Tokenizer

TASK = QuestionTask("own", max_length=12, max_query_length=3, doc_stride=3, metrics=("f1", "exact_match"))


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A vocabulary in which every letter is a piece."""
    alphabet = "abcdefghijklmnopqrstuvwxyz?"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path = tmp_path_factory.mktemp("letters") / "vocab.txt"
    path.write_text("\n".join([*special, *alphabet, *(f"##{letter}" for letter in alphabet)]) + "\n")
    return tokenizer_lib.load(path, lowercase=True)


def split_of(*questions: tuple[str, str, tuple[Answer, ...] | None]) -> Split[Question]:
    items = tuple(Question(str(n), *one, f"line {n}") for n, one in enumerate(questions, 1))
    return Split(Path("train.jsonl"), items, labelled=items[0].answers is not None)


def best_windows(pieces: int, room: int, stride: int) -> list[tuple[int, int, list[int]]]:
    """Windows and what each has at best, as run_squad.py tells it: by a loop over windows and pieces."""
    windows, start = [], 0
    while True:
        end = min(start + room, pieces)
        windows.append((start, end))
        if end == pieces:
            break
        start += min(end - start, stride)
    owned: list[list[int]] = [[] for _ in windows]
    for piece in range(pieces):
        best, place = None, 0
        for number, (first, end) in enumerate(windows):
            if first <= piece < end:
                score = min(piece - first, end - 1 - piece) + 0.01 * (end - first)
                if best is None or score > best:
                    best, place = score, number
        owned[place].append(piece)
    return [(first, end, mine) for (first, end), mine in zip(windows, owned, strict=True)]


@given(st.integers(0, 400), st.integers(1, 130), st.integers(1, 140))
@settings(max_examples=30)
def test_windows_and_their_best_pieces_are_those_of_a_plain_loop(pieces, room, stride):
    expected = best_windows(pieces, room, stride)
    found = windows_of(pieces, room, stride).tolist()
    assert [(first, end, list(range(begin, stop))) for first, end, begin, stop in found] == expected


def test_a_row_is_a_question_and_a_window_of_its_context(letters):
    split = split_of(("ab?c", "abc defghi jk", (Answer("hi", 8),)))
    rows = TASK.encode(split, letters)
    assert rows.count == 3 and rows.truncated == 1
    assert measurement.remarks(rows, TASK) == ["train.jsonl: 1 questions lost tokens to task.max_query_length=3"]
    batch = rows.batch(np.arange(3), 12)
    words = letters.tokens(batch.input_ids[1])
    assert words == ["[CLS]", "a", "##b", "?", "[SEP]", "d", "##e", "##f", "##g", "##h", "##i", "[SEP]"]
    assert batch.segment_ids[1].tolist() == [0] * 5 + [1] * 7
    # h and i are at positions 9 and 10 of the second window, 6 and 7 of the third, and not in the first.
    assert list(zip(batch.labels.first, batch.labels.last, strict=True)) == [(0, 0), (9, 10), (6, 7)]
    assert batch.label_weights.tolist() == [1, 1, 1]
    assert batch.labels.begin.tolist() == [5, 5, 5] and batch.labels.end.tolist() == [11, 11, 10]


def test_roberta_has_two_separators_between_the_texts(tmp_path):
    tokenizer = tokenizer_lib.load(byte_pairs(tmp_path, []))
    rows = TASK.encode(split_of((" ab", "cd", (Answer("d", 1),))), tokenizer)
    assert tokenizer.tokens(rows.input_ids) == ["<s>", "a", "b", "</s>", "</s>", "c", "d", "</s>"]
    assert rows.places[0, :2].tolist() == [6, 6]


def covered(rows: QuestionRows, question: int) -> list[str]:
    """The part of the context that the label of each row covers."""
    found = []
    for row in range(rows.question_offsets[question], rows.question_offsets[question + 1]):
        places = AnswerSpan(*rows.places[row])
        if places.first:
            pieces = rows.first_pieces[row] - places.begin
            start = rows.characters[pieces + places.first, 0]
            found.append(rows.split.items[question].context[start : rows.characters[pieces + places.last, 1]])
    return found


contexts = st.text("abcde  \u200b", min_size=1, max_size=30).filter(lambda text: any(map(str.isalpha, text)))


@settings(max_examples=30)
@given(st.data(), contexts, st.integers(9, 16))
def test_labels_cover_the_answer_in_each_window_that_contains_it(letters, data, context, max_length):
    places = [place for place, character in enumerate(context) if character.isalpha()]
    start = data.draw(st.sampled_from(places))
    end = data.draw(st.sampled_from([place for place in places if place >= start])) + 1
    split = split_of(("a?", context, (Answer(context[start:end], start),)))
    rows = replace(TASK, max_length=max_length).encode(split, letters)
    texts = covered(rows, 0)
    assert set(texts) <= {context[start:end]}
    pieces = sum(1 for character in context[start:end] if character.isalpha())
    room = max_length - 5  # what is longer than two windows share may lie across both
    assert texts or pieces > room - TASK.doc_stride + 1
    assert rows.moved == rows.not_found == 0 and (rows.label_weights == 1).all()


def test_a_moved_answer_is_found_and_counted_and_a_missing_one_is_not_trained(letters):
    split = split_of(
        ("a", "ab cd ab", (Answer("ab", 3),)),  # not there, but at 0 and 6: the nearest, of equals the first
        ("a", "ab cd", (Answer("x", 0), Answer("cd", 3))),  # the second answer is there
        ("a", "ab cd", (Answer("x", 0),)),
        ("a", "ab cd", ()),
        ("a", "ab  cd", (Answer("ab cd", None),)),  # white space matches any
    )
    rows = TASK.encode(split, letters)
    assert [covered(rows, question) for question in range(5)] == [["ab"], ["cd"], [], [], ["ab  cd"]]
    assert rows.places[0, 0] == 3 and rows.label_weights.tolist() == [1, 1, 0, 1, 1]
    assert TASK.counts(rows) == {"unanswerable": 1, "answers_moved": 1, "answers_not_found": 1}
    assert TASK.remarks(rows) == [
        "train.jsonl: 1 answers are not at their answer_start; the nearest occurrence is used",
        "train.jsonl: 1 of 5 questions have no answer that occurs in the context; they are not trained on",
    ]


def test_without_labels_nothing_weighs(letters):
    rows = TASK.encode(split_of(("a", "ab cd", None)), letters)
    assert rows.label_weights.tolist() == [0] and rows.batch(np.array([0, -1]), 12).label_weights.tolist() == [0, 0]


def test_a_question_that_leaves_no_room_is_refused(letters):
    with pytest.raises(
        UserError, match=r"task.max_length is 12 and task.max_query_length 9, which leaves no space for a context"
    ):
        replace(TASK, max_query_length=9).encode(split_of(("abcdefghi", "a", ())), letters)
