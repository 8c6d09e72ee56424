"""Token regression: a number for every word, such as its reading time or its prominence."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Float32

from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import tag_logits
from bert_jax.tasks.kinds.tagging import WordTask, sentence_objects
from bert_jax.tasks.labels import parse_number
from bert_jax.tasks.metrics import LARGEST, REGRESSION_METRICS, UNDEFINED_OF_ONE, compute_metrics
from bert_jax.tasks.reading import tables
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.rows import LabelledWordRows, Sentence, Split, TaskBatch, encode_words
from bert_jax.tasks.task import ScaledTask, Task, TaskObjective, squared_error_sum
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train.losses import Scalar, squared_difference_sum
from bert_jax.train.objectives import Term, Terms

# Values of a word without a number; its weight is 0. The readers turn a null of JSON into an empty text.
MISSING = ("", "-", "_", "null", "NA", "nan", "NaN")


@dataclass(frozen=True)
class TokenRegressionTask(ScaledTask[Sentence, LabelledWordRows], WordTask[LabelledWordRows]):
    """A number for every word, trained and predicted at its first piece."""

    kind = "token_regression"
    has_labels = False

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
        """Reads CoNLL columns, CoNLL-U (where task.label must name the column of numbers), or lists in JSON lines or
        Parquet."""
        if not columns.label and tables.kind_of_file(path) == "conllu":
            raise UserError(f"task.label is not set; name the column of {path} that holds the numbers, such as MISC")
        found = self.reader_of(path)(path, columns, label_required)
        if found.labelled and not label_required and all(set(item.tags or ()) <= {*MISSING} for item in found.items):
            return replace(found, labelled=False)
        return found

    @property
    def known_metrics(self) -> Collection[str]:
        return REGRESSION_METRICS

    def complete(self, train: Split[Sentence]) -> Task:
        numbers = _numbers(train)
        return self.with_scale_of(numbers[~np.isnan(numbers)]).with_metrics()

    def default_metrics(self) -> tuple[str, ...]:
        return ("pearson", "spearman", "mse")

    def encode(self, split: Split[Sentence], tokenizer: Tokenizer) -> LabelledWordRows:
        """Rows of words (encode_words). A word's number is at its first piece; all other positions weigh 0.

        Raises UserError, with file and line, for a value that is neither a number nor in MISSING.
        """
        words = encode_words(split, tokenizer, self.max_length)
        labels, weights = np.zeros((2, len(words.input_ids)), np.float32)
        if split.labelled:
            numbers = _numbers(split)
            labels[words.word_starts] = np.nan_to_num(numbers)
            weights[words.word_starts] = ~np.isnan(numbers)
        return LabelledWordRows(**vars(words), labels=labels, label_weights=weights)

    def counts(self, rows: LabelledWordRows) -> dict[str, int]:
        return {"words": len(rows.word_rows), "words_with_number": int(rows.label_weights.sum())}

    def remarks(self, rows: LabelledWordRows) -> list[str]:
        numbers = rows.labels[rows.label_weights > 0]
        undefined = [name for name in self.metrics if name in UNDEFINED_OF_ONE]
        if not rows.split.labelled or np.ptp(numbers) > 0 or not undefined:
            return []
        return [f"{rows.split.path}: every number is {numbers[0]:g}, so {' and '.join(undefined)} are undefined"]

    def objective(self) -> TaskObjective:
        return NumberObjective((self.target_mean, self.target_std))

    def measure(self, rows: LabelledWordRows, answers: Sequence[Float[np.ndarray, "..."]]) -> dict[str, float]:
        """The metrics over all words that have a number, from the prediction at each position."""
        known = rows.label_weights[rows.word_starts] > 0
        labels, predicted = rows.labels[rows.word_starts][known], rows.at_words(answers)[known]
        return compute_metrics(REGRESSION_METRICS, self.metrics, labels, predicted)

    def predictions(self, rows: LabelledWordRows, answers: Sequence[Float[np.ndarray, "..."]]) -> list[dict[str, Any]]:
        """`words` and their `numbers` for each sentence; `offsets` of the words in a raw text."""
        return sentence_objects(rows, numbers=rows.at_words(answers).astype(float).tolist())


@dataclass(frozen=True)
class NumberObjective(TaskObjective):
    """The squared error of the words' numbers, each at the first piece of its word.

    scale: the mean and the deviation by which numbers are standardized in outputs and loss.
    """

    scale: tuple[float, float] = (0.0, 1.0)

    @property
    def heads(self) -> Heads:
        return Heads(tags=1)

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        return {"task": ()}

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B T"]:
        """The standardized number at each position."""
        return tag_logits(model, model.encode(batch, dropout_key).last, dropout_key)[..., 0]

    def terms_of(self, model: Bert, outputs: Float[Array, "B T"], batch: TaskBatch) -> Terms:
        mean, deviation = self.scale
        targets = (batch.labels - mean) / deviation
        return {"task": Term(squared_error_sum(outputs, targets, batch.label_weights), {})}

    def soft_sum(
        self, outputs: Float[Array, "B T"], teacher: Float[Array, "B T"], batch: TaskBatch, temperature: float
    ) -> Scalar:
        return squared_difference_sum(outputs, teacher, batch.label_weights)

    def answers(self, model: Bert, outputs: Float[Array, "B T"], batch: TaskBatch) -> Float[Array, "B T"]:
        """The number at each position, in the units of the files."""
        mean, deviation = self.scale
        return mean + deviation * outputs


def _numbers(split: Split[Sentence]) -> Float32[np.ndarray, "W"]:
    """The number of each word, NaN where it has none."""
    found = []
    for sentence in split.items:
        for line, written in zip(sentence.lines, sentence.tags or (), strict=True):
            number = math.nan if written in MISSING else parse_number(written)
            if abs(number) > LARGEST:
                raise UserError(
                    f"{split.path} line {line}: {written!r} is not a number, but the task is a token_regression. "
                    "Write - for a word without a number, or correct the column (task.label)"
                )
            found.append(number)
    if all(math.isnan(number) for number in found):
        raise UserError(f"{split.path} has no numbers. Correct the column (task.label)")
    return np.array(found, np.float32)
