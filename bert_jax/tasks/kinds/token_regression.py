"""Token regression: a number for every word, such as its reading time or its prominence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Float64

from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import tag_logits
from bert_jax.tasks.kinds.tagging import WordTask, sentence_objects
from bert_jax.tasks.labels import parse_number
from bert_jax.tasks.metrics import LARGEST, REGRESSION_METRICS, UNDEFINED_OF_ONE, compute_metrics
from bert_jax.tasks.reading import tables
from bert_jax.tasks.reading.inputs import unit_of_words
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import Sentence, Split, TaskBatch
from bert_jax.tasks.task import Description, ScaledObjective, ScaledTask, Task, TaskObjective
from bert_jax.tasks.word_rows import LabelledWordRows, encode_words
from bert_jax.tokenization.tokenizer import Tokenizer

# What stands for no number; the word's weight is then 0. The readers turn a null of JSON into an empty text.
MISSING = ("", "-", "_", "null", "NA", "nan", "NaN")


@dataclass(frozen=True)
class TokenRegressionTask(ScaledTask[Sentence, LabelledWordRows], WordTask[LabelledWordRows]):
    """A number for every word, trained and predicted at its first piece."""

    kind = "token_regression"
    known_metrics = REGRESSION_METRICS
    usual_metrics = ("pearson", "spearman", "mse")

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
        """Reads CoNLL columns, lists in JSON lines or Parquet, or CoNLL-U if task.label names the column of numbers."""
        if not columns.label and tables.kind_of_file(path) == "conllu":
            raise UserError(f"task.label is not set; name the column of {path} that holds the numbers, such as MISC")
        split = self.choose_reader(path)(path, columns, label_required)
        if split.labelled and not label_required and all(set(item.tags or ()) <= {*MISSING} for item in split.items):
            return replace(split, labelled=False)
        return split

    def is_label(self, written: str) -> bool:
        # parse_number returns infinity for other texts.
        return written in MISSING or abs(parse_number(written)) <= LARGEST

    def complete(self, train: Split[Sentence]) -> Task:
        numbers = _numbers(train)
        task = replace(self, raw_words=unit_of_words(item.words for item in train.items))
        return task.scaled(numbers[~np.isnan(numbers)]).with_metrics()

    def encode(self, split: Split[Sentence], tokenizer: Tokenizer) -> LabelledWordRows:
        """Rows of words (encode_words). A word's number is at its first piece; all other positions weigh 0.

        Raises UserError, with file and line, for a value that is neither a number nor in MISSING.
        """
        split = self.split_raw(split, tokenizer)
        words = encode_words(split, tokenizer, self.max_length, self.doc_stride)
        labels, weights = np.zeros(len(words.input_ids)), np.zeros(len(words.input_ids), np.float32)
        if split.labelled:
            numbers = _numbers(split)
            # NaN would remain NaN even with weight 0. Labels are float64 until they are standardized
            # (rows.standardized).
            labels[words.word_starts] = np.nan_to_num(numbers)
            weights[words.word_starts] = ~np.isnan(numbers)
        return LabelledWordRows(**vars(words), labels=labels, label_weights=weights, scale=self.scale)

    def describe(self, rows: LabelledWordRows, training: bool = False) -> Description:
        numbers, remarks = rows.labels[rows.label_weights > 0], super().describe(rows, training).remarks
        remarks += rows.window_remarks(self.max_length)
        undefined = " and ".join(name for name in self.metrics if name in UNDEFINED_OF_ONE)
        if rows.split.labelled and np.ptp(numbers) == 0 and undefined:
            remarks += [f"{rows.split.path}: every number is {numbers[0]:g}, so {undefined} are undefined"]
        return Description({"words": len(rows.word_rows), "words_with_number": int(rows.label_weights.sum())}, remarks)

    def objective(self) -> TaskObjective:
        return NumberObjective()

    def measure(self, rows: LabelledWordRows, answers: Sequence[Float[np.ndarray, "..."]]) -> dict[str, float]:
        """Computes the metrics over all words with a number, from the prediction at each position."""
        known = rows.label_weights[rows.word_starts] > 0
        labels, predicted = rows.labels[rows.word_starts][known], rows.at_words(answers)[known]
        return compute_metrics(REGRESSION_METRICS, self.metrics, labels, self.in_units(predicted))

    def predictions(self, rows: LabelledWordRows, answers: Sequence[Float[np.ndarray, "..."]]) -> list[dict[str, Any]]:
        """`words`, their `numbers`, and their `offsets` in a raw text."""
        return sentence_objects(rows, numbers=self.in_units(rows.at_words(answers)).tolist())


@dataclass(frozen=True)
class NumberObjective(ScaledObjective):
    """The squared error of the words' numbers, at their first pieces."""

    @property
    def heads(self) -> Heads:
        return Heads(tags=1)

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B T"]:
        """Standardized numbers by position."""
        return tag_logits(model, model.encode(batch, dropout_key).last, dropout_key)[..., 0]


def _numbers(split: Split[Sentence]) -> Float64[np.ndarray, "W"]:
    """Parses the words' numbers; NaN if a word has none."""
    numbers = []
    for sentence in split.items:
        for line, written in zip(sentence.lines, sentence.tags or (), strict=True):
            number = math.nan if written in MISSING else parse_number(written)
            if abs(number) > LARGEST:
                raise UserError(
                    f"{split.path} line {line}: {written!r} is not a number, but the task is a token_regression. "
                    "Write - for a word without a number, or correct the column (task.label)"
                )
            numbers.append(number)
    if all(map(math.isnan, numbers)):
        raise UserError(f"{split.path} has no numbers. Correct the column (task.label)")
    return np.array(numbers, np.float64)
