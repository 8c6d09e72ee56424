"""Tags of words: encoding in windows, entity tags, loss, metrics."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Integer
from seqeval.metrics.sequence_labeling import get_entities

from bert_jax.command import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads import Heads
from bert_jax.tasks import reading
from bert_jax.tasks.example import Sentence, Split, Taken, TaskBatch, TaskRows
from bert_jax.tasks.inputs import Record, words_of
from bert_jax.tasks.kinds.kind import Kind
from bert_jax.tasks.kinds.labels import check_label
from bert_jax.tasks.metrics import tagging_metrics
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task
from bert_jax.tasks.words import WordRows, encode_words
from bert_jax.tokenizer import Tokenizer
from bert_jax.train.losses import Sums, classification_sums

# Outside, or inside a typed entity: IOB1, IOB2 (BIO) and IOBES.
ENTITY_TAG = re.compile(r"O|[BIES]-.+")


class Tagging(Kind):
    """A tag for every word."""

    def read(self, task: Task, path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
        if task.name == "ewt" or reading.kind_of_file(path) == "conllu":
            return reading.read_conllu(path, columns, label_required)
        return reading.read_conll(path, columns, label_required)

    def parse(self, task: Task, source: Path, records: Sequence[Record]) -> Split[Sentence]:
        """Sentences of the words that were given, or that texts split into."""
        items = []
        for record in records:
            words, text, offsets = words_of(source, record, ("text",))
            items.append(Sentence(words, None, (record.line,) * len(words), text, offsets))
        return Split(source, tuple(items), labelled=False)

    def complete(self, task: Task, train: Split[Sentence]) -> Task:
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
        return replace(task, metrics=task.metrics or self.default_metrics(task))

    def default_metrics(self, task: Task) -> tuple[str, ...]:
        """What a task that names no metrics is measured by: entities where its tags mark them."""
        return ("f1", "precision", "recall", "accuracy") if marks_entities(task.labels) else ("accuracy",)

    def encode(self, task: Task, split: Split[Sentence], tokenizer: Tokenizer) -> "TagRows":
        """Rows of words (words.encode_words); the tag stands on the first piece of each word, other slots weigh 0."""
        encoded = encode_words([sentence.words for sentence in split.items], tokenizer, task.max_length)
        labels, weights = np.zeros(len(encoded.input_ids), np.int32), np.zeros(len(encoded.input_ids), np.float32)
        if split.labelled:
            labels[encoded.starts] = _label_ids(task, split)
            weights[encoded.starts] = 1
        return TagRows(**encoded._asdict(), labels=labels, label_weights=weights, pad_id=tokenizer.pad_id, split=split)

    def counts(self, rows: TaskRows) -> dict[str, int]:
        assert isinstance(rows, TagRows)
        return {"words": len(rows.word_rows)}

    def objective(self, task: Task) -> TaskObjective:
        return TagObjective(task.classes)

    def measure(self, task: Task, rows: TaskRows, answers: Sequence["TagAnswer"]) -> dict[str, float]:
        """From the guessed tag of each slot."""
        assert isinstance(rows, TagRows)
        truth = rows.labels[rows.offsets[rows.word_rows] + rows.word_slots]
        return tagging_metrics(task.metrics, _sentences(task, rows, truth), guessed_tags(task, rows, answers))

    def predictions(self, task: Task, rows: TaskRows, answers: Sequence["TagAnswer"]) -> list[dict[str, Any]]:
        """`words`, `tags` and `tag_scores`, their probabilities; `offsets` of the words in a raw text; and `entities`
        where tags mark them."""
        assert isinstance(rows, TagRows) and rows.split is not None
        guessed = guessed_tags(task, rows, answers)
        places = zip(rows.word_rows, rows.word_slots, strict=True)
        scores = np.array([answers[row].scores[slot] for row, slot in places], np.float64)
        told = []
        for item, tags, (start, end) in zip(rows.split.items, guessed, pairwise(rows.sentence_offsets), strict=True):
            one = {"words": list(item.words), "tags": tags, "tag_scores": scores[start:end].tolist()}
            if item.offsets is not None:
                one["offsets"] = [list(place) for place in item.offsets]
            if marks_entities(task.labels):
                one["entities"] = told_entities(item, tags, one["tag_scores"])
            told.append(one)
        return told


class TagAnswer(NamedTuple):
    """What is guessed at each slot of a row."""

    tags: Any  # i32[T]: ids
    scores: Any  # f32[T]: their probabilities


@dataclass(frozen=True)
class TagObjective(TaskObjective):
    """Cross-entropy of the words' tags, each at the first piece of its word (Devlin et al. 2019, section 5.3)."""

    tags: int

    @property
    def heads(self) -> Heads:
        return Heads(tags=self.tags)

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B T C"]:
        """Logits of tags by slot."""
        return model.tag_logits(model.encode(batch, dropout_key).last, dropout_key)

    def sums_of(self, model: Bert, outputs: Float[Array, "B T C"], batch: TaskBatch) -> Sums:
        loss, correct = classification_sums(outputs, batch.labels, batch.label_weights)
        return {"task_loss": loss, "task_correct": correct}

    def answers(self, model: Bert, outputs: Float[Array, "B T C"], batch: TaskBatch) -> TagAnswer:
        """Of each slot [B, T]."""
        return TagAnswer(outputs.argmax(axis=-1).astype(jnp.int32), jax.nn.softmax(outputs, axis=-1).max(axis=-1))


@dataclass(frozen=True, eq=False, kw_only=True)
class TagRows(WordRows):
    """Rows of words with a tag each."""

    labels: Int32[np.ndarray, "N"]
    label_weights: Float32[np.ndarray, "N"]  # 0: a slot that starts no word

    def truth(self, taken: Taken) -> tuple[Int32[np.ndarray, "B T"], Float32[np.ndarray, "B T"]]:
        weights = np.where(taken.real, self.label_weights[taken.tokens], 0)
        return np.where(taken.real, self.labels[taken.tokens], 0).astype(np.int32), weights.astype(np.float32)


def guessed_tags(task: Task, rows: TagRows, answers: Sequence[TagAnswer]) -> list[list[str]]:
    """The tags of each sentence's words, from the guessed tag of each slot of each row."""
    places = zip(rows.word_rows, rows.word_slots, strict=True)
    return _sentences(task, rows, [int(answers[row].tags[slot]) for row, slot in places])


def told_entities(sentence: Sentence, tags: Sequence[str], scores: Sequence[float]) -> list[dict[str, Any]]:
    """The entities of a sentence: `type`, `text`, `score`, `words` [first, last + 1), and `start` and `end`, characters
    of the raw text, where there is one.

    Tags are read as conlleval reads them (Tjong Kim Sang and De Meulder 2003): an I- that follows no entity of its type
    begins one. The score is the mean of the words' probabilities.
    """
    found = []
    for name, first, last in get_entities(list(tags)):
        words = slice(first, last + 1)
        one = {"type": name, "text": " ".join(sentence.words[words]), "score": float(np.mean(scores[words]))}
        if sentence.text is not None and sentence.offsets is not None:
            start, end = sentence.offsets[first][0], sentence.offsets[last][1]
            one |= {"text": sentence.text[start:end], "start": start, "end": end}
        found.append(one | {"words": [first, last + 1]})
    return found


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


def _label_ids(task: Task, split: Split[Sentence]) -> list[int]:
    entities = marks_entities(task.labels)
    ids = []
    for sentence in split.items:
        tags = iob2(sentence.tags or ()) if entities else sentence.tags or ()
        ids += [check_label(task, split, line, tag) for line, tag in zip(sentence.lines, tags, strict=True)]
    return ids


def _sentences(task: Task, rows: TagRows, ids: Sequence[int] | Integer[np.ndarray, "W"]) -> list[list[str]]:
    tags = [task.labels[number] for number in ids]
    return [tags[start:stop] for start, stop in pairwise(rows.sentence_offsets)]
