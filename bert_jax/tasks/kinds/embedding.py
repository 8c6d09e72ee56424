"""Vectors of texts: how a text becomes one, and training that puts texts of like meaning close together."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.command import UserError
from bert_jax.config import ModelConfig, TaskConfig
from bert_jax.interop.sentence_transformers import COSINE
from bert_jax.tasks.example import Split
from bert_jax.tasks.input_records import InputRecord, texts_of
from bert_jax.tasks.kinds.embedding_items import TextGroup, read_groups
from bert_jax.tasks.kinds.embedding_objective import EmbeddingObjective, EmbeddingRows
from bert_jax.tasks.metric_functions import REGRESSION_METRICS, compute_metrics, select_metrics
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.pairs import encode_pairs
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.retrieval import ranks_of
from bert_jax.tasks.task import PooledTask, Task, check_choice
from bert_jax.tokenizer import Tokenizer

POOLINGS = ("cls", "mean", "max", "last")  # without parameters of their own
LOSSES = ("contrastive", "cosent")
QUERY, DOCUMENT = "query", "document"  # the names that sentence-transformers gives to query_prompt and document_prompt
# What training leaves as it is in the checkpoint, unless the configuration sets it.
KEPT = ("pooling", "normalize", "prompt", "query_prompt", "document_prompt", "truncate_dim")
SCORED, RANKED = ("spearman", "pearson"), ("mrr", "accuracy")  # metrics of pairs with and without a score


@dataclass(frozen=True)
class EmbeddingTask(PooledTask[TextGroup, EmbeddingRows]):
    """One vector of each text: the settings of a sentence-transformers folder, and the loss that trains the model.

    | option | |
    |---|---|
    | pooling | cls, mean, max or last |
    | normalize | whether vectors have length 1 |
    | prompt | put before a text; of pairs with a score, before both |
    | query_prompt, document_prompt | put before text, and before text_pair and negatives, of pairs without a score |
    | prompts | further prompts of a folder, by name |
    | similarity | how a folder says that its vectors are compared; for retrieval and export, training is by cosines |
    | negatives | columns of hard negatives, separated by commas, or one column that holds a list |
    | loss | contrastive, or cosent for pairs with a score; empty until the training file is read |
    | scale | the factor of cosines in the loss; the inverse of the temperature |
    | symmetric | contrastive: also find the text of each text_pair |
    | dimensions | train also, or only, the first d dimensions: 384,128,64; empty: the whole vectors |
    | truncate_dim | the first dimensions that vectors are cut to, after normalization; 0: the whole vectors |
    """

    kind = "embedding"
    unread_columns = ("marks",)

    pooling: str = "mean"
    normalize: bool = True
    prompt: str = TaskConfig.prompt
    query_prompt: str = TaskConfig.query_prompt
    document_prompt: str = TaskConfig.document_prompt
    prompts: tuple[tuple[str, str], ...] = ()
    similarity: str = COSINE
    negatives: str = TaskConfig.negatives
    loss: str = TaskConfig.loss
    scale: float = TaskConfig.scale
    symmetric: bool = TaskConfig.symmetric
    dimensions: tuple[int, ...] = TaskConfig.dimensions
    truncate_dim: int = TaskConfig.truncate_dim

    def __post_init__(self) -> None:
        check_choice("task.pooling", self.pooling, POOLINGS)
        super().__post_init__()
        if self.loss:
            check_choice("task.loss", self.loss, LOSSES)
        if not self.scale > 0:
            raise UserError(f"task.scale is {self.scale}; use a factor above 0, such as 20")
        if any(size < 1 for size in self.dimensions):
            raise UserError(f"task.dimensions is {self.dimensions}; use numbers of dimensions from 1")
        if self.truncate_dim < 0:
            raise UserError(f"task.truncate_dim is {self.truncate_dim}; use 1 or more dimensions, or 0 for all")
        if self.loss == "cosent" and (self.symmetric or self.negatives):
            raise UserError(
                "task.symmetric and task.negatives are for task.loss=contrastive, not for cosent. Omit them"
            )

    def with_pooling(self, pooling: str) -> "EmbeddingTask":
        return self  # the pooling of a model's other heads is not that of its vectors

    def check_model(self, model: ModelConfig) -> None:
        super().check_model(model)
        for option, largest in (("dimensions", max(self.dimensions, default=0)), ("truncate_dim", self.truncate_dim)):
            if largest > model.width:
                raise UserError(
                    f"task.{option} has {largest}, but the vectors have {model.width} dimensions. Use at most as many"
                )

    def continuing(self, start: Task | None, given: TaskConfig) -> "EmbeddingTask":
        """Takes from a checkpoint of this kind how its vectors are made, where `given` has the default."""
        if not isinstance(start, EmbeddingTask):
            return self
        kept = {name: getattr(start, name) for name in KEPT if getattr(given, name) == getattr(TaskConfig, name)}
        prompts = tuple(one for one in start.prompts if one[0] not in (QUERY, DOCUMENT))  # which have their own options
        return replace(self, prompts=prompts, **kept)

    def named_prompts(self) -> dict[str, str]:
        """All prompts by name, with the names that sentence-transformers gives to those of queries and documents."""
        named = {QUERY: self.query_prompt, DOCUMENT: self.document_prompt}
        named = {name: text for name, text in named.items() if text}
        return named | {name: text for name, text in self.prompts if name not in named}

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[TextGroup]:
        """Pairs, or groups with hard negatives; of a file with the label column, each pair has a score."""
        return read_groups(path, columns, self.negatives)

    def parse(self, source: Path, records: Sequence[InputRecord]) -> Split[TextGroup]:
        """Pairs without a score."""
        names = [(self.columns.text, "text"), (self.columns.text_pair, "text_pair")]
        items = tuple(TextGroup(tuple(texts_of(source, one, names, 2)), None, one.line) for one in records)
        return Split(source, items, labelled=False)

    def complete(self, train: Split[TextGroup]) -> Task:
        """The task with the loss that its training file implies: cosent for pairs with a score, else contrastive."""
        scored = train.items[0].score is not None
        if self.negatives and not any(any(item.texts[2:]) for item in train.items):
            raise UserError(
                f"{train.path} has no hard negatives: no column {self.negatives!r} (task.negatives), or nothing in it. "
                "Name another column, or leave task.negatives out"
            )
        if self.loss and scored != (self.loss == "cosent"):
            raise UserError(
                f"task.loss is {self.loss}, but {train.path} has {'' if scored else 'no '}scores (task.label). "
                "cosent trains on pairs with a score, contrastive on pairs without one"
            )
        return replace(self, loss="cosent" if scored else "contrastive").with_metrics()

    @property
    def known_metrics(self) -> Collection[str]:
        return (*RANKED, *REGRESSION_METRICS)

    def default_metrics(self) -> tuple[str, ...]:
        return SCORED if self.columns.label else RANKED

    def check_metrics(self, split: Split[TextGroup]) -> None:
        """Raises UserError where the split has no score and the metrics need one, or the other way round."""
        expected = SCORED if split.items[0].score is not None else RANKED
        if not set(self.metrics) <= {*expected, *(REGRESSION_METRICS if expected is SCORED else ())}:
            raise UserError(
                f"{split.path} has {'' if expected is SCORED else 'no '}scores (task.label), so it cannot be measured "
                f"by {', '.join(self.metrics)}. Use another file, or set task.label to its column of scores"
            )

    def metric_names(self, dev: Split[TextGroup]) -> tuple[str, ...]:
        """Raises UserError as check_metrics does."""
        self.check_metrics(dev)
        return super().metric_names(dev)

    def encode(self, split: Split[TextGroup], tokenizer: Tokenizer) -> EmbeddingRows:
        """One row for each group, whose texts are sequences [CLS] text [SEP] of up to max_length tokens each."""
        scored = split.items[0].score is not None
        by_role = self.query_prompt, self.document_prompt
        # Inputs of predict have no score, and a folder of sentence-transformers does not say what it was trained on.
        alike = scored if split.labelled else self.loss == "cosent" or (not self.loss and not any(by_role))
        prompts = (self.prompt, self.prompt) if alike else by_role
        places = [(row, place) for row, item in enumerate(split.items) for place, text in enumerate(item.texts) if text]
        texts = [prompts[min(place, 1)] + split.items[row].texts[place] for row, place in places]
        encoded, cut = encode_pairs(texts, None, tokenizer, self.max_length)
        shape = len(split.items), max(len(item.texts) for item in split.items)
        lengths = np.zeros(shape, np.int64)
        lengths[tuple(np.array(places).T)] = np.diff(encoded.offsets)
        return EmbeddingRows(
            input_ids=encoded.input_ids,
            offsets=np.concatenate([[0], np.cumsum(lengths.sum(axis=1))]),
            first_lengths=lengths.astype(np.int32),
            text_lengths=lengths,
            scores=np.array([item.score or 0 for item in split.items], np.float32),
            # A file of the other kind than the training file's is measured by metrics alone.
            label_weights=np.full(shape[0], float(scored == (self.loss == "cosent")), np.float32),
            pad_id=tokenizer.pad_id,
            truncated=len({row for (row, _), lost in zip(places, cut, strict=True) if lost}),
            split=split,
        )

    def remarks(self, rows: EmbeddingRows) -> list[str]:
        """Says that a file lacks the configured column of scores, and what of the task its pairs do not use."""
        found = []
        scored = rows.split.items[0].score is not None
        if self.columns.label and not scored:
            found = [f"{rows.split.path} has no column {self.columns.label!r} (task.label); its pairs have no scores"]
        by_role = ["query_prompt", "document_prompt"]
        used, others = (["prompt"], by_role) if scored else (by_role, ["prompt"])
        of = "pairs without a score" if scored else "single texts and pairs with a score"
        for key in others:
            if (text := getattr(self, key)) and text not in {getattr(self, one) for one in used}:
                found.append(f"{rows.split.path}: its pairs are read without task.{key} ({text!r}), which is for {of}")
        if self.similarity != COSINE:
            found.append(f"pairs are measured by cosines, but the checkpoint's similarity is {self.similarity!r}")
        return found

    def objective(self) -> TaskObjective:
        return EmbeddingObjective(
            pooling=self.pooling,
            scored=self.loss == "cosent",
            scale=self.scale,
            symmetric=self.symmetric,
            dimensions=tuple(sorted(set(self.dimensions), reverse=True)),
            truncate_dim=self.truncate_dim,
        )

    def measure(self, rows: EmbeddingRows, answers: Sequence[np.ndarray]) -> dict[str, float]:
        """The metrics, from the vectors f32[S, D] of each row, which have length 1.

        Of pairs with a score: spearman and pearson, the correlations of the cosines with the scores (or those of
        REGRESSION_METRICS that task.metrics names). Of others: mrr and accuracy, the mean reciprocal rank of an
        anchor's positive among all positives and hard negatives of the file, and how often it alone comes first; equal
        texts are one candidate, and texts of equal cosines have the mean of their ranks.
        """
        vectors = np.stack(answers)
        if rows.split.items[0].score is not None:
            names = [name for name in self.metrics if name in REGRESSION_METRICS] or SCORED
            cosines = (vectors[:, 0] * vectors[:, 1]).sum(axis=-1, dtype=np.float64)
            return compute_metrics(REGRESSION_METRICS, names, rows.scores, cosines)
        candidates: dict[str, np.ndarray] = {}
        for item, texts in zip(rows.split.items, vectors, strict=True):
            candidates |= {text: vector for text, vector in zip(item.texts[1:], texts[1:], strict=False) if text}
        numbers = {text: number for number, text in enumerate(candidates)}
        right = np.array([numbers[item.texts[1]] for item in rows.split.items])
        ranks = ranks_of(vectors[:, 0], np.stack(list(candidates.values())), right)
        found = {"mrr": float((1 / ranks).mean()), "accuracy": float((ranks == 1).mean())}
        return select_metrics([name for name in self.metrics if name in RANKED] or RANKED, found)

    def predictions(self, rows: EmbeddingRows, answers: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """`score`, the cosine of a pair's vectors."""
        return [{"score": float(vectors[0] @ vectors[1])} for vectors in answers]
