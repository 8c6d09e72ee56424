"""Reads questions, contexts and answers: SQuAD's JSON (Rajpurkar et al. 2016, 2018), and tables."""

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bert_jax.command import UserError
from bert_jax.tasks.example import Split
from bert_jax.tasks.input_records import InputRecord, checked_text, is_unicode, texts_of
from bert_jax.tasks.reading import Column, Columns, is_stored, numbered_lines, opened, read_records
from bert_jax.tasks.reading.columns import is_number
from bert_jax.tasks.reading.labelled_texts import yes_or_no
from bert_jax.tokenization.scripts import is_unspaced

Part = TypeVar("Part")
QUESTION_COLUMNS = ("question", "context", "answers")


class Answer(NamedTuple):
    """An answer as its file gives it."""

    text: str
    start: int | None  # its first character in the context; None: unknown


class Question(NamedTuple):
    """A question about a context, with its answers (None: the file gives none; empty: it cannot be answered)."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] | None
    place: str  # in the file, for messages


def read_squad(path: Path, label_required: bool) -> Split[Question]:
    """Reads SQuAD's JSON: data, paragraphs with a context each, and qas (id, question, answers with text and
    answer_start; is_impossible).

    Raises UserError, with the article or question, for malformed input, an empty context, and a file in which only
    some questions have answers.
    """
    try:
        content = json.loads("\n".join(line for _, line in numbered_lines(path)))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} line {error.lineno} is not JSON ({error.msg}). Correct the file") from None
    if not isinstance(content, dict):
        raise UserError(
            f"{path} does not hold an object; expected the JSON of SQuAD: {{'data': [...]}}. Name such a file"
        )
    return _split(path, _questions(path, content), label_required)


def read_questions(path: Path, columns: Columns, label_required: bool) -> Split[Question]:
    """Reads a table (tasks.reading.tables) with one question in each row.

    The columns are QUESTION_COLUMNS unless others are named: task.text for the question, task.text_pair for the
    context, task.label for the answers.

    A true is_impossible (or 1) means that there is no answer, whatever the answers.
    Answers are {"text": [...], "answer_start": [...]} as in Hugging Face's data sets, a list of {"text",
    "answer_start"} as in SQuAD, a list of texts, or one text; an empty list or text means that there is no answer. In
    CSV and TSV each is written as a text (reading.opened).
    Raises UserError, with the line, for malformed input, an empty question or context, and a file in which only some
    questions have answers.
    """
    names = columns.filled(Columns(*QUESTION_COLUMNS))
    requested = [
        Column(names.text, "text"),
        Column(names.text_pair, "text_pair"),
    ]
    by_number = is_number(names.text)  # a file without a header has the columns that are named, and no others
    if not by_number or label_required or columns.label:
        requested.append(Column(names.label, "label", required=label_required))
    requested += [Column(name, name, required=False) for name in ("id", "is_impossible") if not by_number]
    found = read_records(path, requested)
    return _split(path, (_question(path, line, *values) for line, values in found.records), label_required)


def question_of(source: Path, record: InputRecord, columns: Columns) -> Question:
    """The question, without answers, of an input of a prediction: an object with the columns of read_questions, or a
    plain line of a question, a tab and its context. Raises UserError, with the line, for a missing part."""
    names = [(columns.text, "question"), (columns.text_pair, "context")]
    question, context = texts_of(source, record, names, needed=2)
    given = None if isinstance(record.content, str) else record.content.get("id")
    return _question(source, record.line, question, context, None, given)


def locate(context: str, answer: Answer) -> tuple[int, int] | None:
    """The characters [start, end) of an answer in its context, without surrounding white space.

    Where the answer is not at its start, the nearest occurrence is used, of two equally near the one of whole words.
    Without a start, it is the first one of whole words, or else the first. White space within the answer matches any
    white space. None where the answer does not occur.
    """
    text = answer.text.strip()
    if not text:
        return None
    start = None if answer.start is None else answer.start + len(answer.text) - len(answer.text.lstrip())
    if start is not None and start >= 0 and context.startswith(text, start):
        return start, start + len(text)
    pattern = r"\s+".join(map(re.escape, text.split()))
    found = [match.span(1) for match in re.finditer(f"(?=({pattern}))", context)]  # they may overlap
    if start is None:
        return min(found, key=lambda span: (_cuts_words(context, span), span[0]), default=None)
    return min(found, key=lambda span: (abs(span[0] - start), _cuts_words(context, span)), default=None)


def _cuts_words(context: str, span: tuple[int, int]) -> bool:
    """Whether a word continues at an end of a span: letters, digits and their marks are on both sides of it. In scripts
    without spaces between words, only a mark continues what is before it."""
    return any(_continues(context[end - 1], context[end]) for end in span if 0 < end < len(context))


def _continues(last: str, character: str) -> bool:
    parts = _is_mark(last) or last.isalnum(), _is_mark(character) or character.isalnum()
    return all(parts) and (_is_mark(character) or not (is_unspaced(last) or is_unspaced(character)))


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


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
        () if _impossible(path, place, impossible) else None if answers is None else _answers(path, place, answers),
        place,
    )


def _impossible(path: Path, place: str, value: Any) -> bool:
    found = yes_or_no(value)
    if found is None:
        raise UserError(f"{path} {place}: is_impossible is {value!r:.40}; expected true or false. Correct it")
    return found


def _questions(path: Path, content: Mapping[str, Any]) -> Iterator[Question]:
    number = 0
    for title, article in enumerate(_part(path, "the file", content, "data", list)):
        of_article = f"article {title}"
        for paragraph in _part(path, of_article, article, "paragraphs", list):
            context = _part(path, of_article, paragraph, "context", str)
            if not context.strip():
                raise UserError(f"{path}: {of_article} has an empty context. Give it a text, or remove it")
            for entry in _part(path, of_article, paragraph, "qas", list):
                number += 1
                place = f"question {entry['id'] if isinstance(entry, dict) and 'id' in entry else number}"
                question = _part(path, place, entry, "question", str)
                if not is_unicode(question + context):
                    raise UserError(f"{path} {place} contains half of a surrogate pair, which is not a character")
                answers = None if entry.get("answers") is None else _answers(path, place, entry["answers"])
                impossible = _impossible(path, place, entry.get("is_impossible"))
                yield Question(str(entry.get("id", number)), question, context, () if impossible else answers, place)


def _answers(path: Path, place: str, answers: Any) -> tuple[Answer, ...]:
    if isinstance(answers, str):
        read = (lambda text: [text]) if is_stored(path) else _written
        answers = read(answers) if answers.strip() else []
    if isinstance(answers, dict) and "text" in answers:
        texts, starts = answers["text"], answers.get("answer_start")
        texts, starts = texts or [], [None] * len(texts or ()) if starts is None else starts
        if not isinstance(texts, list) or not isinstance(starts, list) or len(starts) != len(texts):
            raise UserError(f"{path} {place}: answers has different numbers of text and answer_start. Correct it")
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list):
        raise UserError(
            f"{path} {place}: answers is {answers!r:.60}; expected a list of {{'text', 'answer_start'}}. Correct it"
        )
    found = []
    for answer in answers:
        entry = {"text": answer} if isinstance(answer, str) else answer
        text = _part(path, place, entry, "text", str)
        start = entry.get("answer_start")
        if start is not None and (not isinstance(start, int) or isinstance(start, bool)):
            raise UserError(
                f"{path} {place}: answer_start is {start!r:.40}; expected a number of characters. Correct it"
            )
        found.append(Answer(text, start))
    return tuple(found)


def _written(text: str) -> Any:
    """The answers that a table holds as a text; otherwise the text is the answer."""
    found = opened(text)
    if isinstance(found, dict) and "text" in found:
        return found
    is_list = isinstance(found, list) and text.strip().startswith("[")  # otherwise a set
    return found if is_list and all(isinstance(one, str | dict) for one in found) else [text]


def _split(path: Path, found: Iterator[Question], label_required: bool) -> Split[Question]:
    questions = tuple(found)
    if not questions:
        raise UserError(f"{path} contains no questions. Name another file")
    without = [question for question in questions if question.answers is None]
    if without and (label_required or len(without) < len(questions)):
        raise UserError(
            f"{path} {without[0].place} has no answers; where there is no answer, write an empty list: 'answers': []"
        )
    return Split(path, questions, labelled=not without)


def _part(path: Path, place: str, holder: Any, key: str, kind: type[Part]) -> Part:
    if isinstance(holder, dict) and isinstance(value := holder.get(key), kind):
        return value
    expected = "a text" if kind is str else "a list"
    raise UserError(f"{path}: {place} has no {key!r} ({expected}), which SQuAD's JSON requires. Correct the file")
