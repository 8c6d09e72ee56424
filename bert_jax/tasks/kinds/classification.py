"""Classes and scores of texts and pairs: encoding, labels to numbers, loss, metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32
from scipy.special import softmax

from bert_jax.command import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.head_outputs import class_logits, sequence_vectors
from bert_jax.model.heads import Heads
from bert_jax.tasks import reading
from bert_jax.tasks.example import Example, LabelledRows, Split, TaskBatch, TaskRows
from bert_jax.tasks.input_records import InputRecord, texts_of, value_of
from bert_jax.tasks.kinds.kind import Kind
from bert_jax.tasks.kinds.labels import check_label, weigh_classes
from bert_jax.tasks.metric_functions import LARGEST, UNDEFINED_OF_ONE, classification_metrics, regression_metrics
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.pairs import encode_pairs
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task
from bert_jax.tokenizer import Tokenizer
from bert_jax.train.losses import PLAIN, ClassCosts, classification_sums, squared_error_sum
from bert_jax.train.objectives import Counts, Term, Terms


class Classification(Kind):
    """A class, or a score (kind regression), of a text or a pair of texts."""

    def read(self, task: Task, path: Path, columns: Columns, label_required: bool) -> Split[Example]:
        if reading.kind_of_file(path) != "table":
            other = "question" if reading.kind_of_file(path) == "squad" else "tagging"
            raise UserError(f"{path} is a {other} file, but the task is {task.kind}. Use --config.task.kind={other}")
        return reading.read_table(path, columns, label_required, task.labels)

    def parse(self, task: Task, source: Path, records: Sequence[InputRecord]) -> Split[Example]:
        """Texts, or pairs where the task is of pairs; where a checkpoint does not tell, as the first record is."""
        columns = task.columns
        names = [(columns.text, "text"), (columns.text_pair, "text_pair")]
        needed = 2 if columns.text_pair else 1
        if columns.text and not columns.text_pair:
            names.pop()
        items = []
        for record in records:
            first, *second = texts_of(source, record, names, needed)
            if columns.marks and not isinstance(record.content, str):
                borders = [value_of(source, record, (name,)) for name in columns.marks]
                first, *second = reading.mark_words(source, record.line, (first, *second), borders)
            items.append(Example(first, second[0] if second else None, None, record.line))
            if bool(second) != (items[0].text_pair is not None):
                raise UserError(
                    f"{source} line {record.line} is {'a pair' if second else 'one text'}, line {items[0].line} is "
                    f"{'one text' if second else 'a pair'}. Give texts or pairs, not both"
                )
        return Split(source, tuple(items), labelled=False)

    def complete(self, task: Task, train: Split[Example]) -> Task:
        """The task with the labels and metrics that its training file implies, where it names none.

        Labels are in the order of the classes that the file names, or else sorted, whole numbers first and as numbers.
        Raises UserError for fewer than two.
        """
        if task.kind == "classification" and not task.labels:
            found = {example.label or "" for example in train.items}
            if len(found) < 2:
                raise UserError(f"{train.path}: every label is {found.pop()!r}; a classification needs two or more")
            if len(found) > max(50, len(train.items) // 2):
                raise UserError(
                    f"{train.path}: {len(found)} different labels in {len(train.items)} lines; is task.label "
                    f"{task.columns.label!r} the right column? For numbers use --config.task.kind=regression"
                )
            named = found <= set(train.class_names)
            task = replace(task, labels=train.class_names if named else tuple(sorted(found, key=_label_order)))
        task = weigh_classes(task, train, (example.label or "" for example in train.items))
        return replace(task, metrics=task.metrics or self.default_metrics(task))

    def default_metrics(self, task: Task) -> tuple[str, ...]:
        """What a task that names no metrics is measured by."""
        if task.kind == "regression":
            return ("pearson", "spearman")
        return ("accuracy", "f1") if task.labels == ("0", "1") else ("accuracy", "macro_f1")

    def encode(self, task: Task, split: Split[Example], tokenizer: Tokenizer) -> TaskRows:
        """One row an example: [CLS] text [SEP], or [CLS] text [SEP] pair [SEP] with the pair in segment 1.

        Some vocabularies part the two by two separators (pairs.py). Over task.max_length the longer of the two is cut,
        piece by piece, from its end (pairs.truncated_lengths).
        """
        paired = split.items[0].text_pair is not None
        seconds = [example.text_pair or "" for example in split.items] if paired else None
        encoded = encode_pairs([example.text for example in split.items], seconds, tokenizer, task.max_length)
        labels, weights = _labels(task, split)
        return LabelledRows(
            input_ids=encoded.input_ids,
            offsets=encoded.offsets,
            first_lengths=encoded.first_lengths,
            labels=labels,
            label_weights=weights,
            pad_id=tokenizer.pad_id,
            truncated=int(encoded.cut.sum()),
            split=split,
        )

    def counts(self, rows: TaskRows) -> dict[str, int]:
        """Texts that are empty or white space, of a pair either."""
        assert rows.split is not None
        return {"empty_texts": sum(_is_empty(example) for example in rows.split.items)}

    def remarks(self, task: Task, rows: TaskRows) -> list[str]:
        """Empty texts, and labels that are all the same."""
        assert isinstance(rows, LabelledRows) and rows.split is not None
        told = []
        if empty := self.counts(rows)["empty_texts"]:
            told.append(f"{rows.split.path}: {empty} of {rows.count} examples have an empty text")
        if rows.split.labelled and (rows.labels == rows.labels[0]).all():
            undefined = [name for name in task.metrics if name in UNDEFINED_OF_ONE]
            what = f", so {' and '.join(undefined)} is undefined" if undefined else ""
            told.append(f"{rows.split.path}: every label is {rows.split.items[0].label!r}{what}")
        return told

    def objective(self, task: Task) -> TaskObjective:
        return ClassObjective(
            task.classes, regression=task.kind == "regression", pooling=task.pooling, costs=task.costs
        )

    def measure(self, task: Task, rows: TaskRows, answers: Sequence[np.ndarray]) -> dict[str, float]:
        """From each row's logits f32[C] of classes, or its score (C = 1)."""
        assert isinstance(rows, LabelledRows)
        outputs = np.stack(answers)
        if task.kind == "regression":
            return regression_metrics(task.metrics, rows.labels, outputs[:, 0])
        return classification_metrics(task.metrics, rows.labels, outputs.argmax(axis=-1))

    def predictions(self, task: Task, rows: TaskRows, answers: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """`label`, `score` (its probability) and `scores` of all labels; of a regression `score`, the number."""
        outputs = np.stack(answers)
        if task.kind == "regression":
            return [{"score": float(value)} for value in outputs[:, 0]]
        told = []
        for shares in softmax(outputs.astype(np.float64), axis=-1):
            best = int(shares.argmax())
            scores = {label: float(share) for label, share in zip(task.labels, shares, strict=True)}
            told.append({"label": task.labels[best], "score": float(shares[best]), "scores": scores})
        return told


@dataclass(frozen=True)
class ClassObjective(TaskObjective):
    """Cross-entropy of classes, or the squared error of a score (Devlin et al. 2019, section 4)."""

    classes: int
    regression: bool = False
    pooling: str = "cls"
    costs: ClassCosts = PLAIN

    @property
    def heads(self) -> Heads:
        return Heads(pooling=self.pooling, pooler=True, classes=self.classes)

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        return {"task": () if self.regression else ("accuracy",)}

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B C"]:
        """Logits of classes, or the score (C = 1)."""
        hidden = model.encode(batch, dropout_key).last
        first_slot = jnp.zeros((hidden.shape[0], 1), jnp.int32)  # one sequence a row: its [CLS] is in slot 0
        vectors = sequence_vectors(model, hidden, batch.sequence_ids, first_slot)
        return class_logits(model, vectors, dropout_key)[:, 0]

    def terms_of(self, model: Bert, outputs: Float[Array, "B C"], batch: TaskBatch) -> Terms:
        if self.regression:
            return {"task": Term(squared_error_sum(outputs[:, 0], batch.labels, batch.label_weights), {})}
        loss, correct = classification_sums(outputs, batch.labels, batch.label_weights, self.costs)
        return {"task": Term(loss, {"accuracy": correct})}

    def counts(self, batch: TaskBatch) -> Counts:
        if self.regression:
            return super().counts(batch)
        return {"task": self.costs.weigh(batch.labels, batch.label_weights).sum()}


def _labels(
    task: Task, split: Split[Example]
) -> tuple[Int32[np.ndarray, "R"] | Float32[np.ndarray, "R"], Float32[np.ndarray, "R"]]:
    count = len(split.items)
    dtype = np.float32 if task.kind == "regression" else np.int32
    if not split.labelled:
        return np.zeros(count, dtype), np.zeros(count, np.float32)
    convert = _score if task.kind == "regression" else check_label
    values = [convert(task, split, example.line, example.label or "") for example in split.items]
    return np.array(values, dtype), np.ones(count, np.float32)


def _score(task: Task, split: Split, line: int, label: str) -> float:
    try:
        value = float(label)
    except ValueError:
        value = math.nan
    if not abs(value) <= LARGEST:
        raise UserError(f"{split.path} line {line}: {label!r} is no number, and the task is a regression")
    return value


def _is_empty(example: Example) -> bool:
    return not example.text.strip() or (example.text_pair is not None and not example.text_pair.strip())


def _label_order(label: str) -> tuple[float, str]:
    return (float(int(label)), label) if label.removeprefix("-").isdecimal() else (math.inf, label)
