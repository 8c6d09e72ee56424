"""Questions, contexts and answers: their files, and a row for each window of a context."""

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float32, Int32, Int64

from bert_jax.errors import UserError
from bert_jax.tasks.reading.inputs import InputRecord, checked_text, record_texts
from bert_jax.tasks.reading.labelled import yes_or_no
from bert_jax.tasks.reading.tables import (
    Column,
    Columns,
    is_number,
    is_stored,
    is_unicode,
    numbered_lines,
    opened,
    read_records,
)
from bert_jax.tasks.rows import Split, Taken, TaskRows, Texts, join_pairs
from bert_jax.tasks.windows import cut_windows
from bert_jax.tokenization.specification import is_unspaced
from bert_jax.tokenization.tokenizer import Tokenizer

# Reads questions, contexts and answers: SQuAD's JSON (Rajpurkar et al. 2016, 2018), and tables.


Part = TypeVar("Part")
QUESTION_COLUMNS = ("question", "context", "answers")


class Answer(NamedTuple):
    """An answer as its file gives it."""

    text: str
    start: int | None  # its first character in the context; None: unknown

    @property
    def stripped_start(self) -> int | None:
        """The first character that is not white space."""
        return None if self.start is None else self.start + len(self.text) - len(self.text.lstrip())


class Question(NamedTuple):
    """A question about a context, with its answers (None: the file gives none; empty: it cannot be answered)."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] | None
    place: str  # in the file, for messages


def read_squad(path: Path, label_required: bool) -> Split[Question]:
    """Reads SQuAD's JSON: data, paragraphs with a context, and qas.

    A question in qas has id, question, answers with text and answer_start, and is_impossible.

    Raises:
        UserError: The input is malformed, a context is empty, or only some questions have answers. The message names
            the article or question.
    """
    try:
        # numbered_lines also reads a compressed file, and drops a byte-order mark.
        content = json.loads("\n".join(line for _, line in numbered_lines(path)))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} line {error.lineno} is not JSON ({error.msg}). Correct the file") from None
    if not isinstance(content, dict):
        raise UserError(
            f"{path} does not hold an object; expected the JSON of SQuAD: {{'data': [...]}}. Name such a file"
        )

    def questions() -> Iterator[Question]:
        number = 0
        for title, article in enumerate(_part(path, "the file", content, "data", list)):
            article_place = f"article {title}"
            for paragraph in _part(path, article_place, article, "paragraphs", list):
                context = _part(path, article_place, paragraph, "context", str)
                if not context.strip():
                    raise UserError(f"{path}: {article_place} has an empty context. Give it a text, or remove it")
                for entry in _part(path, article_place, paragraph, "qas", list):
                    # A question without an id is known by its number in the whole file.
                    number += 1
                    place = f"question {entry['id'] if isinstance(entry, dict) and 'id' in entry else number}"
                    text = _part(path, place, entry, "question", str)
                    if not is_unicode(text + context):
                        raise UserError(f"{path} {place} contains half of a surrogate pair, which is not a character")
                    answers = _answers(path, place, entry.get("answers"))
                    impossible = _is_impossible(path, place, entry.get("is_impossible"))
                    yield Question(str(entry.get("id", number)), text, context, () if impossible else answers, place)

    return _split(path, questions(), label_required)


def read_questions(path: Path, columns: Columns, label_required: bool) -> Split[Question]:
    """Reads a table with one question per row.

    The columns are QUESTION_COLUMNS unless others are named: task.text for the question, task.text_pair for the
    context, task.label for the answers; and id and is_impossible, if the table has them. If is_impossible is true (or
    1), there is no answer, whatever the answers.

    Answers are {"text": [...], "answer_start": [...]} as in Hugging Face's data sets, a list of {"text",
    "answer_start"} as in SQuAD, a list of texts, or one text; an empty list or text means no answer. In CSV and TSV
    they are written as a text (opened).

    Raises:
        UserError: The input is malformed, a question or context is empty, or only some questions have answers. The
            message names the line.
    """
    names = columns.filled(Columns(*QUESTION_COLUMNS))
    requested = [Column(names.text, "text"), Column(names.text_pair, "text_pair")]
    by_number = is_number(names.text)  # a file without a header has the columns that are named, and no others
    if not by_number or label_required or columns.label:
        requested.append(Column(names.label, "label", required=label_required))
    requested += [Column(name, name, required=False) for name in ("id", "is_impossible") if not by_number]
    records = read_records(path, requested).records
    return _split(path, (_question(path, line, *values) for line, values in records), label_required)


def parse_question(source: Path, record: InputRecord, columns: Columns) -> Question:
    """Reads a question, without answers, from an input of predict.

    The input is an object with the columns of read_questions, or a plain line: a question, a tab and its context.

    Raises:
        UserError: A part is missing. The message names the line.
    """
    names = [(columns.text, "question"), (columns.text_pair, "context")]
    question, context = record_texts(source, record, names, needed=2)
    name = record.content.get("id") if isinstance(record.content, Mapping) else None
    return _question(source, record.line, question, context, None, name)


def locate(context: str, answer: Answer) -> tuple[int, int] | None:
    """Finds an answer in its context: characters [start, end) without surrounding white space; None if absent.

    If the answer is not at its start, the nearest occurrence is used; if two are equally near, one with whole words.
    Without a start, the first one with whole words is used, or else the first. White space within the answer matches
    any white space.
    """
    text = answer.text.strip()
    if not text:
        return None
    start = answer.stripped_start
    # Nearly all answers are where the file says, and need no search.
    if start is not None and start >= 0 and context.startswith(text, start):
        return start, start + len(text)
    pattern = r"\s+".join(map(re.escape, text.split()))
    spans = [match.span(1) for match in re.finditer(f"(?=({pattern}))", context)]  # they may overlap
    if start is None:
        return min(spans, key=lambda span: (_cuts_words(context, span), span[0]), default=None)
    return min(spans, key=lambda span: (abs(span[0] - start), _cuts_words(context, span)), default=None)


def _cuts_words(context: str, span: tuple[int, int]) -> bool:
    """Whether a word continues beyond an end of the span: letters, digits or marks are on both sides.

    In scripts without spaces between words, only a mark continues the word before it.
    """

    def is_mark(character: str) -> bool:
        return unicodedata.category(character).startswith("M")

    def continues(before: str, after: str) -> bool:
        in_words = all(is_mark(side) or side.isalnum() for side in (before, after))
        return in_words and (is_mark(after) or not (is_unspaced(before) or is_unspaced(after)))

    return any(continues(context[end - 1], context[end]) for end in span if 0 < end < len(context))


def _question(
    path: Path,
    line: int,
    question: Any,
    context: Any,
    answers: Any = None,
    name: Any = None,
    impossible: Any = None,
) -> Question:
    place = f"line {line}"
    return Question(
        str(line if name is None else name),
        checked_text(path, line, question),
        checked_text(path, line, context),
        () if _is_impossible(path, place, impossible) else _answers(path, place, answers),
        place,
    )


def _is_impossible(path: Path, place: str, value: Any) -> bool:
    impossible = yes_or_no(value)
    if impossible is None:
        raise UserError(f"{path} {place}: is_impossible is {value!r:.40}; expected true or false. Correct it")
    return impossible


def _answers(path: Path, place: str, answers: Any) -> tuple[Answer, ...] | None:
    """A question's answers from their value in a file; None if it gives none."""
    if answers is None:
        return None
    if isinstance(answers, str):
        text = answers
        # JSON and Parquet have lists of their own, so a text in them is an answer even if it is in brackets.
        answers = opened(text) if text.strip() and not is_stored(path) else text
        # A text in a table is the answer itself, unless it is written as a list (not a set) or an object of answers.
        is_list = isinstance(answers, list) and text.strip().startswith("[")
        is_list = is_list and all(isinstance(answer, str | dict) for answer in answers)
        if not is_list and not (isinstance(answers, dict) and "text" in answers):
            answers = [text] if text.strip() else []
    # All forms become a list of objects, as in SQuAD.
    if isinstance(answers, dict) and "text" in answers:
        texts, starts = answers["text"] or [], answers.get("answer_start")
        starts = [None] * len(texts) if starts is None else starts
        if not isinstance(texts, list) or not isinstance(starts, list) or len(starts) != len(texts):
            raise UserError(f"{path} {place}: answers has different numbers of text and answer_start. Correct it")
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list):
        raise UserError(
            f"{path} {place}: answers is {answers!r:.60}; expected a list of {{'text', 'answer_start'}}. Correct it"
        )
    checked = []
    for answer in answers:
        entry = {"text": answer} if isinstance(answer, str) else answer
        text = _part(path, place, entry, "text", str)
        start = entry.get("answer_start")
        if start is not None and (not isinstance(start, int) or isinstance(start, bool)):
            raise UserError(
                f"{path} {place}: answer_start is {start!r:.40}; expected a number of characters. Correct it"
            )
        checked.append(Answer(text, start))
    return tuple(checked)


def _split(path: Path, questions: Iterable[Question], label_required: bool) -> Split[Question]:
    questions = tuple(questions)
    if not questions:
        raise UserError(f"{path} contains no questions. Name another file")
    without = [question for question in questions if question.answers is None]
    if without and (label_required or len(without) < len(questions)):
        raise UserError(
            f"{path} {without[0].place} has no answers; if there is no answer, write an empty list: 'answers': []"
        )
    return Split(path, questions, labelled=not without)


def _part(path: Path, place: str, holder: Any, key: str, kind: type[Part]) -> Part:
    if isinstance(holder, dict) and isinstance(value := holder.get(key), kind):
        return value
    expected = "a text" if kind is str else "a list"
    raise UserError(f"{path}: {place} has no {key!r} ({expected}), which SQuAD's JSON requires. Correct the file")


# A question and its context as rows: [CLS] question [SEP] window of the context [SEP] (Devlin et al. 2019, 4.2).
#
# A long context continues in further rows, whose windows begin doc_stride pieces after each other, as in
# run_squad.py of google-research/bert. A piece's best window has the most context around it. An answer begins only in
# the best window of its first piece.


class AnswerSpan(NamedTuple):
    """Positions of the answer and the window in a row, i32[R] or [B]; all ends but `last` are exclusive.

    A row that does not contain the whole answer has first and last 0: the position of [CLS], or the question's first
    piece if the vocabulary adds no special tokens (as for GPT-2 in run_qa.py of transformers).
    """

    first: Any  # the first position of the answer
    last: Any  # the last position of the answer
    begin: Any  # the window
    end: Any
    best_begin: Any  # the pieces whose best window this is
    best_end: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class QuestionRows(TaskRows[Question]):
    """Rows of K - 1 questions, in order; the contexts have P pieces."""

    cut_part: ClassVar[str] = "questions"
    cut_option: ClassVar[str] = "max_query_length"

    places: Int32[np.ndarray, "R 6"]  # AnswerSpan
    label_weights: Float32[np.ndarray, "R"]  # 0: the answer is unknown
    question_offsets: Int64[np.ndarray, "K"]  # question q has the rows question_offsets[q]:question_offsets[q + 1]
    first_pieces: Int64[np.ndarray, "R"]  # the window's first piece, as an index among the P pieces
    characters: Int32[np.ndarray, "P 2"]  # each piece's [start, end) in its context
    answer_sizes: tuple[int, ...]  # the pieces of each question's answer; 0: none, or unknown
    moved: int  # answers that are not at their answer_start
    not_found: int  # questions without an answer that is in the context

    @property
    def cut_answers(self) -> int:
        """Counts the answers that no row holds entirely."""
        held = np.zeros(len(self.answer_sizes), bool)
        # The last position is 0 in a row that lacks the answer. With it, [CLS] or the question comes first.
        np.logical_or.at(held, self.items(), self.places[:, 1] > 0)
        return int((~held & (np.array(self.answer_sizes) > 0)).sum())

    def items(self) -> Int64[np.ndarray, "R"]:
        """The question per row."""
        return np.repeat(np.arange(len(self.question_offsets) - 1), np.diff(self.question_offsets))

    def targets(self, taken: Taken) -> tuple[AnswerSpan, Float32[np.ndarray, "B"]]:
        places = AnswerSpan(*np.ascontiguousarray(self.places[taken.rows].T))
        return places, np.where(taken.filler, 0, self.label_weights[taken.rows]).astype(np.float32)


class _Label(NamedTuple):
    """The answer to a question, as far as it is known."""

    first: int = -1  # the first and the last piece of the answer in its context; both -1: none
    last: int = -1
    known: bool = False  # False: unlabelled, or no answer is in the context
    moved: bool = False  # whether the answer is not at its answer_start

    @property
    def size(self) -> int:
        """The answer's pieces; 0 without one."""
        return self.last - self.first + 1 if self.first >= 0 else 0


def _find_answer(question: Question, characters: Int64[np.ndarray, "n 2"]) -> _Label:
    """Finds the first answer that is in the context, whose pieces have these characters."""
    for answer in question.answers or ():
        if span := locate(question.context, answer):
            # The first piece that ends after the answer's start, and the last one that begins before its end.
            first = int(np.searchsorted(np.maximum.accumulate(characters[:, 1]), span[0], side="right"))
            last = int(np.searchsorted(characters[:, 0], span[1], side="left")) - 1
            # The tokenizer may drop all characters of an answer.
            if first <= last:
                return _Label(first, last, known=True, moved=answer.stripped_start not in (None, span[0]))
    return _Label(known=not question.answers)


def encode_questions(
    split: Split[Question], tokenizer: Tokenizer, *, max_length: int, max_query_length: int, doc_stride: int
) -> QuestionRows:
    """One row per window of a question's context.

    A question is cut to max_query_length pieces; a row has up to max_length. Raises UserError if that leaves no space
    for a context.
    """
    # Many questions share a context, which is tokenized once.
    numbers = {text: number for number, text in enumerate(dict.fromkeys(item.context for item in split.items))}
    pieces, bounds, characters = tokenizer.of_tasks.encode_offsets_many(list(numbers))
    contexts = [numbers[item.context] for item in split.items]
    queries, query_offsets = tokenizer.of_tasks.encode_many([item.question.strip() for item in split.items])
    query_sizes = np.minimum(np.diff(query_offsets), max_query_length)
    rooms = max_length - query_sizes - tokenizer.begin - tokenizer.between - tokenizer.end
    if not tokenizer.adds_special_tokens and query_sizes.min() < 1:
        raise UserError(
            f"question {int(query_sizes.argmin()) + 1} is empty, but the vocabulary adds no special tokens, so its "
            "window has no position for `no answer`. Remove the question"
        )
    if rooms.min() < 1:
        raise UserError(
            f"task.max_length is {max_length} and task.max_query_length {max_query_length}, which leaves no space "
            f"for a context; use --config.task.max_length={max_query_length + 128}"
        )
    # Rows are windows of all questions, in order. A window counts the pieces of its own context.
    sizes = zip(np.diff(bounds)[contexts].tolist(), rooms.tolist(), strict=True)
    windows_by_question = [cut_windows(size, room, doc_stride) for size, room in sizes]
    counts = list(map(len, windows_by_question))
    questions, windows = np.repeat(np.arange(len(contexts)), counts), np.concatenate(windows_by_question)
    first_pieces = bounds[contexts][questions] + windows[:, 0]
    encoded, _ = join_pairs(
        Texts(queries, query_offsets[questions], query_sizes[questions]),
        Texts(pieces, first_pieces, (windows[:, 1] - windows[:, 0]).astype(np.int64)),
        tokenizer,
    )
    labels = [
        _find_answer(item, characters[bounds[context] : bounds[context + 1]]) if split.labelled else _Label()
        for item, context in zip(split.items, contexts, strict=True)
    ]
    answers = np.array([label[:2] for label in labels])[questions]
    known = np.array([label.known for label in labels])
    # An answer that the window does not contain entirely counts as none in its row.
    inside = (windows[:, 0] <= answers[:, 0]) & (answers[:, 1] < windows[:, 1])
    shifts = (encoded.first_lengths - windows[:, 0])[:, None]  # from pieces to positions
    places = np.concatenate([np.where(inside[:, None], answers + shifts, 0), windows + shifts], axis=1)
    return QuestionRows(
        **encoded._asdict(),
        pad_id=tokenizer.pad_id,
        truncated=int((np.diff(query_offsets) > max_query_length).sum()),
        split=split,
        places=places.astype(np.int32),
        label_weights=known[questions].astype(np.float32),
        question_offsets=np.cumsum([0, *counts], dtype=np.int64),
        first_pieces=first_pieces,
        characters=characters.astype(np.int32),
        answer_sizes=tuple(label.size for label in labels),
        moved=sum(label.moved for label in labels),
        not_found=int((~known).sum()) if split.labelled else 0,
    )
