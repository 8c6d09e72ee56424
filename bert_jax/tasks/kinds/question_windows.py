"""A question and its context as rows: [CLS] question [SEP] window of the context [SEP] (Devlin et al. 2019, 4.2).

A long context goes on in further rows, each doc_stride pieces on, as google-research/bert's run_squad.py has it. Of
the windows that a piece lies in, one has it at best: where it has the most context. Answers begin there only.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64

from bert_jax.command import UserError
from bert_jax.tasks.example import Taken, TaskRows
from bert_jax.tasks.kinds.question_files import Question, locate
from bert_jax.tasks.task import Task
from bert_jax.tokenizer import Tokenizer


class AnswerSpan(NamedTuple):
    """What is known of a row, as slots of it: i32[R] or [B] each; ends are exclusive but for last.

    A row that does not hold the whole answer has first and last 0, which is [CLS].
    """

    first: Any  # the answer's first slot
    last: Any  # the answer's last slot
    begin: Any  # of the window
    end: Any
    best_begin: Any  # of what this window has at best
    best_end: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class QuestionRows(TaskRows):
    """Rows of questions, those of one question one after another; K - 1 questions, P pieces of all contexts."""

    cut_part: ClassVar[str] = "questions"
    cut_option: ClassVar[str] = "max_query_length"

    places: Int32[np.ndarray, "R 6"]  # AnswerSpan
    label_weights: Float32[np.ndarray, "R"]  # 0: the answer is not known
    question_offsets: Int64[np.ndarray, "K"]  # question q has the rows question_offsets[q]:question_offsets[q + 1]
    first_pieces: Int64[np.ndarray, "R"]  # which of the P pieces the window begins with
    characters: Int32[np.ndarray, "P 2"]  # of each piece, [start, end) in its context
    moved: int  # answers that are not where the file has them, but elsewhere
    not_found: int  # questions none of whose answers is in the context

    def items(self) -> Int64[np.ndarray, "R"]:
        """Which question each row is of."""
        return np.repeat(np.arange(len(self.question_offsets) - 1), np.diff(self.question_offsets))

    def truth(self, taken: Taken) -> tuple[AnswerSpan, Float32[np.ndarray, "B"]]:
        places = AnswerSpan(*np.ascontiguousarray(self.places[taken.rows].T))
        return places, np.where(taken.filler, 0, self.label_weights[taken.rows]).astype(np.float32)


class _Target(NamedTuple):
    """The pieces of a context that an answer lies in, both inclusive; -1 both where there is none to find."""

    first: int
    last: int


def encode_questions(task: Task, questions: Sequence[Question], labelled: bool, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of QuestionRows but split.

    A question is cut to task.max_query_length pieces; a row has up to task.max_length. Raises UserError where that
    leaves no room for a context.
    """
    texts = list(dict.fromkeys(question.context for question in questions))
    pieces, bounds, characters = tokenizer.encode_offsets_many(texts)
    numbers = {text: number for number, text in enumerate(texts)}
    asked, asked_bounds = tokenizer.encode_many([question.question.strip() for question in questions])
    separators, close = tokenizer.pair_separators, np.array([tokenizer.sep_id], np.int32)
    rows: list[np.ndarray] = []
    places: list[tuple[int, ...]] = []
    first_lengths, first_pieces, weights, counts = [], [], [], []
    moved = not_found = truncated = 0
    for number, question in enumerate(questions):
        query = asked[asked_bounds[number] : asked_bounds[number + 1]]
        truncated += len(query) > task.max_query_length
        query = query[: task.max_query_length]
        head = np.array([tokenizer.cls_id, *query, *[tokenizer.sep_id] * separators], np.int32)
        room = task.max_length - len(head) - 1
        if room < 1:
            raise UserError(
                f"task.max_length is {task.max_length}, which task.max_query_length {task.max_query_length} leaves no "
                f"room for a context in; use --config.task.max_length={task.max_query_length + 128}"
            )
        context = numbers[question.context]
        begin, stop = int(bounds[context]), int(bounds[context + 1])
        target = None
        if labelled:
            target, elsewhere = _target(question, characters[begin:stop])
            moved += elsewhere
            not_found += target is None
        windows = windows_of(stop - begin, room, task.doc_stride)
        for first, end, best_first, best_end in windows.tolist():
            rows.append(np.concatenate([head, pieces[begin + first : begin + end], close]))
            slots = (0, 0)
            if target is not None and first <= target.first and target.last < end:
                slots = target.first - first + len(head), target.last - first + len(head)
            places.append((*slots, *(piece - first + len(head) for piece in (first, end, best_first, best_end))))
            first_pieces.append(begin + first)
        first_lengths += [len(head)] * len(windows)
        weights += [float(target is not None)] * len(windows)
        counts.append(len(windows))
    return {
        "input_ids": np.concatenate(rows),
        "first_lengths": np.array(first_lengths, np.int32),
        "offsets": np.cumsum([0, *map(len, rows)], dtype=np.int64),
        "pad_id": tokenizer.pad_id,
        "truncated": truncated,
        "places": np.array(places, np.int32),
        "label_weights": np.array(weights, np.float32),
        "question_offsets": np.cumsum([0, *counts], dtype=np.int64),
        "first_pieces": np.array(first_pieces, np.int64),
        "characters": characters.astype(np.int32),
        "moved": moved,
        "not_found": not_found,
    }


@functools.lru_cache(maxsize=4096)
def windows_of(pieces: int, room: int, stride: int) -> Int32[np.ndarray, "W 4"]:
    """The windows of a context: first piece, end, and from where to where each piece of it has its best window.

    A window is `room` pieces long, the last one as long as is left, and begins min(room, stride) after the one before
    it. A piece's context in a window is what stands on the shorter side of it, plus a hundredth of the window's length;
    of equals the first window is the best (run_squad.py, _check_is_max_context). A context without pieces has one
    empty window.
    """
    firsts = np.arange(0, max(pieces - room, 0) + min(stride, room), min(stride, room))
    ends = np.minimum(firsts + room, pieces)
    place = np.arange(pieces)
    inside = (firsts[:, None] <= place) & (place < ends[:, None])
    sides = np.minimum(place - firsts[:, None], ends[:, None] - 1 - place) + 0.01 * (ends - firsts)[:, None]
    best = np.where(inside, sides, -np.inf).argmax(axis=0)
    # Those that a window has at best lie side by side.
    best_firsts = np.searchsorted(best, np.arange(len(firsts)), side="left")
    best_ends = np.searchsorted(best, np.arange(len(firsts)), side="right")
    return np.stack([firsts, ends, best_firsts, best_ends], axis=-1).astype(np.int32)


def _target(question: Question, characters: Int64[np.ndarray, "n 2"]) -> tuple[_Target | None, bool]:
    """Where the pieces of the first answer lie that the context holds (None: no answer is there), and whether that is
    not where the file has it."""
    if not question.answers:
        return _Target(-1, -1), False
    for answer in question.answers:
        if span := locate(question.context, answer):
            # The first piece that ends behind the answer's begin, and the last that begins before its end.
            first = int(np.searchsorted(np.maximum.accumulate(characters[:, 1]), span[0], side="right"))
            last = int(np.searchsorted(characters[:, 0], span[1], side="left")) - 1
            if first <= last:
                start = None if answer.start is None else answer.start + len(answer.text) - len(answer.text.lstrip())
                return _Target(first, last), start is not None and span[0] != start
    return None, False
