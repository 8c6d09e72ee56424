"""A question and its context as rows: [CLS] question [SEP] window of the context [SEP] (Devlin et al. 2019, 4.2).

A long context continues in further rows, whose windows begin doc_stride pieces after each other, as in
run_squad.py of google-research/bert. Of the windows that contain a piece, the best is the one with the most context
around it. An answer begins only in the best window of its first piece.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64

from bert_jax.command import UserError
from bert_jax.tasks.example import Split, Taken, TaskRows
from bert_jax.tasks.kinds.question_files import Question, locate
from bert_jax.tasks.pairs import Texts, join_pairs
from bert_jax.tokenizer import Tokenizer


class AnswerSpan(NamedTuple):
    """Positions of the answer and of the window in a row: i32[R] or [B] each; all ends but `last` are exclusive.

    A row that does not contain the whole answer has first and last 0, the position of [CLS], or of the question's
    first piece if the vocabulary adds no special tokens (as run_qa.py of transformers has it for GPT-2).
    """

    first: Any  # the first position of the answer
    last: Any  # the last position of the answer
    begin: Any  # of the window
    end: Any
    best_begin: Any  # of the pieces whose best window this is
    best_end: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class QuestionRows(TaskRows[Question]):
    """Rows of questions in order; K - 1 questions, P pieces of all contexts."""

    cut_part: ClassVar[str] = "questions"
    cut_option: ClassVar[str] = "max_query_length"

    places: Int32[np.ndarray, "R 6"]  # AnswerSpan
    label_weights: Float32[np.ndarray, "R"]  # 0: the answer is unknown
    question_offsets: Int64[np.ndarray, "K"]  # question q has the rows question_offsets[q]:question_offsets[q + 1]
    first_pieces: Int64[np.ndarray, "R"]  # index among the P pieces of the first one of the window
    characters: Int32[np.ndarray, "P 2"]  # of each piece, [start, end) in its context
    moved: int  # answers that are not at their answer_start
    not_found: int  # questions without an answer that is in the context

    def items(self) -> Int64[np.ndarray, "R"]:
        """The question of each row."""
        return np.repeat(np.arange(len(self.question_offsets) - 1), np.diff(self.question_offsets))

    def targets(self, taken: Taken) -> tuple[AnswerSpan, Float32[np.ndarray, "B"]]:
        places = AnswerSpan(*np.ascontiguousarray(self.places[taken.rows].T))
        return places, np.where(taken.filler, 0, self.label_weights[taken.rows]).astype(np.float32)


class _Label(NamedTuple):
    """The answer to a question, as far as it is known."""

    first: int = -1  # the first and the last piece of the answer in its context; -1 both: none
    last: int = -1
    known: bool = False  # False: unlabelled, or no answer is in the context
    moved: bool = False  # whether the answer is not at its answer_start


def encode_questions(
    split: Split[Question], tokenizer: Tokenizer, *, max_length: int, max_query_length: int, doc_stride: int
) -> QuestionRows:
    """One row for each window of each question's context.

    A question is cut to max_query_length pieces; a row has up to max_length. Raises UserError where that leaves no
    space for a context.
    """
    # Many questions share a context: each is tokenized once.
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
    sizes = np.diff(bounds)[contexts]
    windows_by_question = [
        windows_of(size, room, doc_stride) for size, room in zip(sizes.tolist(), rooms.tolist(), strict=True)
    ]
    counts = list(map(len, windows_by_question))
    questions, windows = np.repeat(np.arange(len(contexts)), counts), np.concatenate(windows_by_question)
    first_pieces = bounds[contexts][questions] + windows[:, 0]
    encoded, _ = join_pairs(
        Texts(queries, query_offsets[questions], query_sizes[questions]),
        Texts(pieces, first_pieces, (windows[:, 1] - windows[:, 0]).astype(np.int64)),
        tokenizer,
    )
    labels = [
        _label_of(item, characters[bounds[context] : bounds[context + 1]]) if split.labelled else _Label()
        for item, context in zip(split.items, contexts, strict=True)
    ]
    answers = np.array([label[:2] for label in labels])[questions]
    known = np.array([label.known for label in labels])
    return QuestionRows(
        **encoded._asdict(),
        pad_id=tokenizer.pad_id,
        truncated=int((np.diff(query_offsets) > max_query_length).sum()),
        split=split,
        places=_answer_spans(windows, answers, encoded.first_lengths),
        label_weights=known[questions].astype(np.float32),
        question_offsets=np.cumsum([0, *counts], dtype=np.int64),
        first_pieces=first_pieces,
        characters=characters.astype(np.int32),
        moved=sum(label.moved for label in labels),
        not_found=int((~known).sum()) if split.labelled else 0,
    )


def _answer_spans(
    windows: Int32[np.ndarray, "R 4"], answers: Int64[np.ndarray, "R 2"], begins: Int32[np.ndarray, "R"]
) -> Int32[np.ndarray, "R 6"]:
    """The AnswerSpan of rows whose windows (windows_of) begin at these positions, from the pieces of the answers."""
    inside = (windows[:, 0] <= answers[:, 0]) & (answers[:, 1] < windows[:, 1])
    shifts = (begins - windows[:, 0])[:, None]
    return np.concatenate([np.where(inside[:, None], answers + shifts, 0), windows + shifts], axis=1).astype(np.int32)


@functools.lru_cache(maxsize=4096)
def windows_of(pieces: int, room: int, stride: int) -> Int32[np.ndarray, "W 4"]:
    """The windows of a context: first piece, end, and the range of the pieces whose best window it is.

    A window has `room` pieces, the last one at most as many, and begins min(room, stride) pieces after the one before
    it. The context of a piece in a window is the number of pieces on its shorter side, plus a hundredth of the
    window's length; the first window with the most context is the best (run_squad.py, _check_is_max_context). A
    context without pieces has one empty window.
    """
    firsts = np.arange(0, max(pieces - room, 0) + min(stride, room), min(stride, room))
    ends = np.minimum(firsts + room, pieces)
    place = np.arange(pieces)
    inside = (firsts[:, None] <= place) & (place < ends[:, None])
    sides = np.minimum(place - firsts[:, None], ends[:, None] - 1 - place) + 0.01 * (ends - firsts)[:, None]
    best = np.where(inside, sides, -np.inf).argmax(axis=0)
    # The pieces whose best window is the same are adjacent.
    best_firsts = np.searchsorted(best, np.arange(len(firsts)), side="left")
    best_ends = np.searchsorted(best, np.arange(len(firsts)), side="right")
    return np.stack([firsts, ends, best_firsts, best_ends], axis=-1).astype(np.int32)


def _label_of(question: Question, characters: Int64[np.ndarray, "n 2"]) -> _Label:
    """The pieces of the first answer that occurs in the context, given the characters of the context's pieces."""
    if not question.answers:
        return _Label(known=True)
    for answer in question.answers:
        if span := locate(question.context, answer):
            # The first piece that ends after the answer's start, and the last one that begins before its end.
            first = int(np.searchsorted(np.maximum.accumulate(characters[:, 1]), span[0], side="right"))
            last = int(np.searchsorted(characters[:, 0], span[1], side="left")) - 1
            if first <= last:
                start = None if answer.start is None else answer.start + len(answer.text) - len(answer.text.lstrip())
                return _Label(first, last, known=True, moved=start is not None and span[0] != start)
    return _Label()
