"""Tags of words: encoding in windows, entity tags, metrics, and the baseline to beat."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from jaxtyping import Integer

from bert_jax.command import UserError
from bert_jax.tasks.classification import check_label
from bert_jax.tasks.example import Sentence, Split, TaskRows, spans
from bert_jax.tasks.metrics import tagging_metrics
from bert_jax.tasks.table import Task
from bert_jax.tokenizer import Tokenizer

# Outside, or inside a typed entity: IOB1, IOB2 (BIO) and IOBES.
ENTITY_TAG = re.compile(r"O|[BIES]-.+")


def complete(task: Task, train: Split[Sentence]) -> Task:
    """The task with the labels and metrics that its training file implies, where it names none.

    Tags that all look like O, B-X, I-X mark entities: their set is closed (B-X and I-X for each type X) and they
    are measured by entity. Raises UserError for fewer than two tags.
    """
    if not task.labels:
        found = {tag for sentence in train.items for tag in sentence.tags or ()}
        if len(found) < 2:
            raise UserError(f"{train.path}: every tag is {found.pop()!r}; is task.label the right column?")
        if marks_entities(found):
            types = {tag[2:] for tag in found if tag != "O"}
            found |= {"O"} | {f"{mark}-{name}" for name in types for mark in "BI"}
        task = replace(task, labels=tuple(sorted(found, key=lambda tag: (tag != "O", tag))))
    return replace(task, metrics=task.metrics or default_metrics(task))


def default_metrics(task: Task) -> tuple[str, ...]:
    """What a task that names no metrics is measured by: entities where its tags mark them."""
    return ("f1", "precision", "recall", "accuracy") if marks_entities(task.labels) else ("accuracy",)


def marks_entities(tags: Sequence[str] | set[str]) -> bool:
    """Whether tags mark entities (O, B-X, I-X ...) and are no plain classes."""
    return any(tag != "O" for tag in tags) and all(ENTITY_TAG.fullmatch(tag) for tag in tags)


def iob2(tags: Sequence[str]) -> tuple[str, ...]:
    """Entity tags with B- at the start of every entity; those that are in IOB2 already stay as they are.

    IOB1 (CoNLL-2003) writes B- only between two entities of one type that touch; elsewhere an I-X that follows no
    X starts an entity.
    """
    before = ("O", *tags)
    return tuple(
        f"B-{tag[2:]}" if tag.startswith("I-") and (last == "O" or last[2:] != tag[2:]) else tag
        for last, tag in zip(before, tags, strict=False)
    )


def encode(task: Task, split: Split[Sentence], tokenizer: Tokenizer) -> TaskRows:
    """One row a sentence, [CLS] pieces [SEP]; the tag stands on the first piece of each word, other slots weigh 0.

    A sentence over task.max_length goes on in further rows, cut between words, so that every word is guessed
    exactly once. A word without pieces becomes [UNK]; only a word that is longer than a row is itself cut.
    """
    room = task.max_length - 2
    flat, offsets = tokenizer.encode_many(
        [word for sentence in split.items for word in tokenizer.as_in_text(sentence.words)]
    )
    sizes = np.clip(np.diff(offsets), 1, room)
    sentence_offsets = np.cumsum([0, *(len(sentence.words) for sentence in split.items)], dtype=np.int64)
    first_words = _row_starts(sizes, sentence_offsets, room)
    word_rows = np.repeat(np.arange(len(first_words)), np.diff([*first_words, len(sizes)]))
    lengths = np.bincount(word_rows, sizes).astype(np.int64) + 2
    row_offsets = np.concatenate([[0], np.cumsum(lengths)])
    before = np.concatenate([[0], np.cumsum(sizes)])  # pieces of all words before each word
    word_slots = 1 + before[:-1] - before[first_words][word_rows]

    input_ids = np.full(row_offsets[-1], tokenizer.unk_id, np.int32)
    input_ids[row_offsets[:-1]] = tokenizer.cls_id
    input_ids[row_offsets[1:] - 1] = tokenizer.sep_id
    starts = row_offsets[word_rows] + word_slots
    known = np.diff(offsets) > 0  # words with pieces
    input_ids[spans(starts[known], sizes[known])] = flat[spans(offsets[:-1][known], sizes[known])]

    labels, weights = np.zeros(len(input_ids), np.int32), np.zeros(len(input_ids), np.float32)
    if split.labelled:
        labels[starts] = _label_ids(task, split)
        weights[starts] = 1
    return TaskRows(
        input_ids=input_ids,
        offsets=row_offsets,
        first_lengths=lengths.astype(np.int32),
        labels=labels,
        label_weights=weights,
        pad_id=tokenizer.pad_id,
        truncated=int((np.diff(offsets) > room).sum()),
        word_rows=word_rows,
        word_slots=word_slots,
        sentence_offsets=sentence_offsets,
    )


def measure(task: Task, rows: TaskRows, guesses: Integer[np.ndarray, "W"]) -> dict[str, float]:
    """The task's metrics of a labelled split, from the guessed tag id of each of its words, in order."""
    assert rows.word_rows is not None and rows.word_slots is not None
    truth = rows.labels[rows.offsets[rows.word_rows] + rows.word_slots]
    return tagging_metrics(task.metrics, _sentences(task, rows, truth), _sentences(task, rows, guesses))


@dataclass(frozen=True)
class Baseline:
    """What the most frequent tag of each word reaches; NaN for an accuracy over no words."""

    accuracy: float
    unknown_accuracy: float  # over the words that the training file does not hold
    words: int
    unknown_words: int


def most_frequent_tag_baseline(train: Split[Sentence], test: Split[Sentence]) -> Baseline:
    """Tags each word as it mostly is in train, and an unknown word by train's most frequent tag.

    The baseline of Jurafsky and Martin, Speech and Language Processing, chapter on part-of-speech tagging. Words
    are compared as written; of equally frequent tags the first in the alphabet is taken.
    """
    by_word: dict[str, Counter[str]] = defaultdict(Counter)
    for word, tag in _tagged_words(train):
        by_word[word][tag] += 1
    overall = sum(by_word.values(), Counter())
    choice = {word: _most_frequent(counts) for word, counts in by_word.items()}
    fallback = _most_frequent(overall)
    pairs = list(_tagged_words(test))
    right = [choice.get(word, fallback) == tag for word, tag in pairs]
    unknown = [hit for hit, (word, _) in zip(right, pairs, strict=True) if word not in choice]
    mean_unknown = sum(unknown) / len(unknown) if unknown else float("nan")
    return Baseline(sum(right) / len(right), mean_unknown, len(right), len(unknown))


def _tagged_words(split: Split[Sentence]) -> list[tuple[str, str]]:
    if not split.labelled:
        raise UserError(f"{split.path} has no tags; the baseline needs them")
    return [pair for item in split.items for pair in zip(item.words, item.tags or (), strict=True)]


def _most_frequent(counts: Counter[str]) -> str:
    return min(counts, key=lambda tag: (-counts[tag], tag))


def _label_ids(task: Task, split: Split[Sentence]) -> list[int]:
    entities = marks_entities(task.labels)
    ids = []
    for sentence in split.items:
        tags = iob2(sentence.tags or ()) if entities else sentence.tags or ()
        ids += [check_label(task, split, line, tag) for line, tag in zip(sentence.lines, tags, strict=True)]
    return ids


def _row_starts(sizes: Integer[np.ndarray, "W"], sentence_offsets: Integer[np.ndarray, "K"], room: int) -> list[int]:
    """The first word of each row: as many words of a sentence as fit into room pieces, then a new row."""
    starts = []
    for first, last in pairwise(sentence_offsets):
        used = room
        for word in range(first, last):
            if word == first or used + sizes[word] > room:
                starts.append(word)
                used = 0
            used += sizes[word]
    return starts


def _sentences(task: Task, rows: TaskRows, ids: Integer[np.ndarray, "W"]) -> list[list[str]]:
    assert rows.sentence_offsets is not None
    tags = [task.labels[number] for number in ids]
    return [tags[start:stop] for start, stop in pairwise(rows.sentence_offsets)]
