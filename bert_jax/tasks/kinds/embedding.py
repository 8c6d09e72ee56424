"""Text vectors: how a text becomes one, and training that puts texts with similar meaning close together.

Read `EmbeddingTask` first. Above it are the contrastive losses and the objective.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Int64

from bert_jax.config import EmbeddingConfig, ModelConfig, TaskConfig
from bert_jax.config.finetuning import EmbeddingOptions
from bert_jax.errors import UserError
from bert_jax.interop.sentence_transformers import COSINE
from bert_jax.model.bert import Bert
from bert_jax.model.heads.basic import pool_rows, unit_vectors
from bert_jax.model.heads.config import VECTOR_POOLINGS, Heads, pool_parts
from bert_jax.model.heads.structured import IMPOSSIBLE
from bert_jax.model.outputs import encode_for_task
from bert_jax.model.runtime import Placement
from bert_jax.tasks.labels import parse_number
from bert_jax.tasks.metrics import LARGEST, REGRESSION_METRICS, compute_metrics, right_ranks, select_metrics
from bert_jax.tasks.reading.inputs import InputRecord, record_texts
from bert_jax.tasks.reading.labelled import is_missing, read_labelled, read_text
from bert_jax.tasks.reading.tables import Column, Columns, is_stored
from bert_jax.tasks.rows import SideBySideRows, Split, TaskBatch, encode_side_by_side, separated
from bert_jax.tasks.task import Description, Task, TaskObjective, check_pooling
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train.losses import Scalar
from bert_jax.train.objectives import Term, Terms


class TextGroup(NamedTuple):
    """An anchor, its positive and hard negatives (an empty one is absent), and the score of a pair."""

    texts: tuple[str, ...]
    score: float | None
    line: int  # in the file, from 1


# Losses over the vectors of texts, whose negatives are the other rows of the whole global batch.
#
# Under shard_map each device holds its own rows. It gathers the vectors of all rows, and computes the loss of its own.
# The gradient of a gathered vector is summed over all devices, so loss and gradient are the same on any mesh. A row has
# S texts: an anchor, a positive and hard negatives.


class TextVectors(NamedTuple):
    """The vectors of a device's rows."""

    vectors: Float[Array, "B S D"]
    present: Bool[Array, "B S"]
    weights: Float[Array, "B"]  # 0 for a filler
    numbers: Int[Array, "B"]  # of the rows in their file
    texts: Int[Array, "B S"]  # equal for equal texts


def contrastive_sums(own: TextVectors, placement: Placement, scale: float, symmetric: bool) -> tuple[Scalar, Scalar]:
    """Returns the summed cross-entropy for each anchor's positive, and how many positives alone have the highest score.

    An anchor's candidates are the positives and hard negatives in the batch; a score is the cosine times scale (van den
    Oord et al. 2018, section 2.3; Henderson et al. 2017, section 4.4), as in MultipleNegativesRankingLoss of
    sentence-transformers. With symmetric, the loss is the mean of this one and the cross-entropy for each positive's
    anchor among all anchors (Radford et al. 2021, figure 3).

    Correct texts are no negatives: positives whose anchor equals this one, and texts equal to them or to the anchor. If
    a row is in the batch twice, as at the end of an epoch, neither copy is a candidate for the other.
    """

    def masked_scores(
        anchors: Float[Array, "B D"], candidates: Float[Array, "K D"], possible: Bool[Array, "B K"]
    ) -> Float[Array, "B K"]:
        # `scale` multiplies the rounding error of a cosine, so TPUs must not multiply in bfloat16, which is their
        # default.
        products = jnp.einsum("bd,kd->bk", anchors, candidates, precision=jax.lax.Precision.HIGHEST)
        return jnp.where(possible, scale * products, IMPOSSIBLE)

    units = unit_vectors(own.vectors)
    rows = placement.gather_rows(units)
    real = placement.gather_rows(own.present & (own.weights > 0)[:, None])
    first, _ = placement.row_numbers(units.shape[0])
    right = first + jnp.arange(units.shape[0])
    numbers = placement.gather_rows(own.numbers)
    itself = jnp.arange(len(numbers))[None] == right[:, None]
    other = itself | (numbers[None] != own.numbers[:, None])
    texts = placement.gather_rows(own.texts)

    def negative(sought: Int[Array, "B"], column: int, candidates: Int[Array, "K"]) -> Bool[Array, "B K"]:
        """Whether candidates are wrong for texts of a column of pairs, in which they stand next to right ones."""
        rows_of_text = sought[:, None] == texts[None, :, column]
        partners = texts[:, 1 - column][:, None] == candidates[None]
        # A matrix product counts the rows that hold both texts, without an array of [B, rows, K].
        right = jnp.einsum("br,rk->bk", rows_of_text.astype(jnp.float32), partners.astype(jnp.float32)) > 0
        return ~right & (sought[:, None] != candidates[None])

    # The positive of row i is candidate i, because all positives come first.
    candidates = jnp.swapaxes(rows[:, 1:], 0, 1).reshape(-1, rows.shape[-1])
    possible = jnp.tile(other, rows.shape[1] - 1) & real[:, 1:].T.reshape(1, -1)
    own_positive = jnp.arange(candidates.shape[0])[None] == right[:, None]
    possible &= own_positive | negative(own.texts[:, 0], 0, texts[:, 1:].T.reshape(-1))
    scores = masked_scores(units[:, 0], candidates, possible)
    picked = jnp.take_along_axis(scores, right[:, None], axis=1)[:, 0]
    losses = jax.nn.logsumexp(scores, axis=1) - picked
    if symmetric:
        possible = other & real[None, :, 0] & (itself | negative(own.texts[:, 1], 1, texts[:, 0]))
        backward = masked_scores(units[:, 1], rows[:, 0], possible)
        losses = (losses + jax.nn.logsumexp(backward, axis=1) - picked) / 2
    # A tie counts as wrong, so that equal vectors for all texts have accuracy 0.
    highest = jnp.where(~own_positive, jax.lax.stop_gradient(scores), IMPOSSIBLE).max(axis=1)
    correct = picked > highest  # false where a score is NaN
    return (losses * own.weights).sum(), (correct * own.weights).sum()


def cosent_sum(own: TextVectors, targets: Float[Array, "B"], placement: Placement, scale: float) -> Scalar:
    """Returns log(1 + sum exp(scale * (s_i - s_j))) over all pairs of rows with target_i < target_j, times the rows.

    s is the cosine of a row's two texts (Huang et al. 2024, CoSENT, section 3.3). The loss belongs to the batch as a
    whole; every row counts an equal share, so dividing by the number of rows gives the loss.
    """
    units = unit_vectors(own.vectors)
    cosines = (units[:, 0] * units[:, 1]).sum(axis=-1)
    scores, labels, weights = (placement.gather_rows(leaf) for leaf in (scale * cosines, targets, own.weights))
    ordered = (labels[:, None] < labels[None, :]) & (weights[:, None] > 0) & (weights[None, :] > 0)
    differences = jnp.where(ordered, scores[:, None] - scores[None, :], IMPOSSIBLE)
    # The appended 0 is the 1 in the logarithm. Without any ordered pair, the loss is 0.
    loss = jax.nn.logsumexp(jnp.append(differences.ravel(), 0.0))
    return loss * own.weights.sum()


def truncations(own: TextVectors, dimensions: Sequence[int]) -> list[TextVectors]:
    """Cuts the vectors to d dimensions, for every d; without dimensions, returns the whole vectors.

    The sum of their losses trains vectors whose beginnings are vectors, too (Kusupati et al. 2022, Matryoshka).
    """
    return [own._replace(vectors=own.vectors[..., :size]) for size in dimensions] or [own]


class GroupLabels(NamedTuple):
    """The value of TaskBatch.labels."""

    scores: Any  # f32[B]; 0 if there are none
    present: Any  # bool[B,S]; a row's positions are S equal parts
    numbers: Any  # i32[B], the row's number in its file
    texts: Any  # i32[B,S], equal for equal texts; 0 if absent


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingRows(SideBySideRows[TextGroup]):
    """Rows with S texts: an anchor, its positive, and hard negatives; some may be absent."""

    scores: Float32[np.ndarray, "R"]
    label_weights: Float32[np.ndarray, "R"]

    def select_targets(
        self, rows: Int64[np.ndarray, "B"], present: Bool[np.ndarray, "B S"]
    ) -> tuple[GroupLabels, Float32[np.ndarray, "B"]]:
        labels = GroupLabels(self.scores[rows], present, rows.astype(np.int32), self.texts[rows])
        return labels, self.label_weights[rows]

    @functools.cached_property
    def texts(self) -> Int32[np.ndarray, "R S"]:
        """The texts' numbers, from 1, equal for equal texts; 0 if absent."""
        numbers = np.zeros(self.part_lengths.shape, np.int32)
        known: dict[str, int] = {}
        for row, item in enumerate(self.split.items):
            for place, text in enumerate(item.texts):
                # By content, because equal texts of different rows must not be negatives of one another.
                numbers[row, place] = known.setdefault(text.strip(), len(known) + 1) if text else 0
        return numbers


@dataclass(frozen=True)
class EmbeddingObjective(TaskObjective):
    """A contrastive loss with in-batch negatives, or CoSENT for pairs with a score.

    accuracy is the share of anchors whose positive alone scores highest in the batch. With
    `dimensions`, the loss is the sum over truncations, and accuracy is for the largest one.
    """

    pooling: str = "mean"
    scored: bool = False
    scale: float = 20.0
    symmetric: bool = False
    dimensions: tuple[int, ...] = ()  # descending; empty: the whole vectors
    truncate_dim: int = 0  # of answers; 0: the whole vectors

    @property
    def heads(self) -> Heads:
        return Heads()

    @property
    def compares_rows(self) -> bool:
        return True

    @property
    def term_metrics(self) -> Mapping[str, tuple[str, ...]]:
        return {"task": () if self.scored else ("accuracy",)}

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B S D"]:
        """One vector per text; 0 for an absent one."""
        texts = separated(batch, batch.labels.present)
        vectors = pool_rows(self.pooling, encode_for_task(model, texts, dropout_key), texts.sequence_ids)
        return vectors.reshape(*batch.labels.present.shape, -1)

    def loss_terms(self, model: Bert, outputs: Float[Array, "B S D"], batch: TaskBatch) -> Terms:
        labels, placement = batch.labels, model.runtime.placement
        whole = TextVectors(outputs, labels.present, batch.label_weights, labels.numbers, labels.texts)
        parts = truncations(whole, self.dimensions)
        if self.scored:
            losses = [cosent_sum(part, labels.scores, placement, self.scale) for part in parts]
            return {"task": Term(sum(losses[1:], losses[0]), {})}
        sums = [contrastive_sums(part, placement, self.scale, self.symmetric) for part in parts]
        return {"task": Term(sum((loss for loss, _ in sums[1:]), sums[0][0]), {"accuracy": sums[0][1]})}

    def answers(self, model: Bert, outputs: Float[Array, "B S D"], batch: TaskBatch) -> Float[Array, "B S _"]:
        """Computes vectors with length 1 from the first truncate_dim dimensions."""
        return unit_vectors(outputs[..., : self.truncate_dim or None])


QUERY, DOCUMENT = "query", "document"  # the names that sentence-transformers gives to query_prompt and document_prompt
# Training leaves these as they are in the checkpoint, unless the configuration sets them.
KEPT = ("pooling", "normalize", "prompt", "query_prompt", "document_prompt", "truncate_dim")
SCORED, RANKED = ("spearman", "pearson"), ("mrr", "accuracy")  # metrics of pairs with and without a score


@dataclass(frozen=True)
class EmbeddingTask(EmbeddingOptions, Task[TextGroup, EmbeddingRows]):
    """One vector per text: the settings of a sentence-transformers folder, and the loss that trains the model.

    The pooling is independent of the one for other heads. Training uses cosines, whatever the similarity.
    """

    kind = "embedding"
    known_metrics = (*RANKED, *REGRESSION_METRICS)

    pooling: str = "mean"  # some of VECTOR_POOLINGS, joined by " + "
    normalize: bool = True
    prompts: tuple[tuple[str, str], ...] = ()  # further prompts of a folder, by name
    similarity: str = COSINE  # how a folder compares its vectors, for retrieval and export

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(part in VECTOR_POOLINGS for part in pool_parts(self.pooling)):
            raise UserError(f"unknown task.pooling {self.pooling!r}; choose from {', '.join(VECTOR_POOLINGS)}")
        if self.loss == "cosent" and (self.symmetric or self.negatives):
            raise UserError(
                "task.symmetric and task.negatives are for task.loss=contrastive, not for cosent. Omit them"
            )

    def check_model(self, model: ModelConfig) -> None:
        check_pooling(self.pooling, model)
        super().check_model(model)
        for key, largest in (("dimensions", max(self.dimensions, default=0)), ("truncate_dim", self.truncate_dim)):
            if largest > (width := model.width * len(pool_parts(self.pooling))):
                raise UserError(
                    f"task.{key} has {largest}, but the vectors have {width} dimensions. Use at most as many"
                )

    def continuing(self, start: Task, given: TaskConfig) -> "EmbeddingTask":
        """The task with the checkpoint's way to make vectors, for options that have their default in `given`."""
        assert isinstance(start, EmbeddingTask)
        kept = {name: getattr(start, name) for name in KEPT if getattr(given, name) == getattr(EmbeddingConfig, name)}
        # These two have options of their own.
        prompts = tuple((name, text) for name, text in start.prompts if name not in (QUERY, DOCUMENT))
        return replace(self, prompts=prompts, **kept)

    def named_prompts(self) -> dict[str, str]:
        """All prompts by name; the query and document prompts have the names that sentence-transformers gives them."""
        own = {QUERY: self.query_prompt, DOCUMENT: self.document_prompt}
        named = {name: text for name, text in own.items() if text}
        return named | {name: text for name, text in self.prompts if name not in named}

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[TextGroup]:
        """Reads pairs of a table (read_records) from the columns text and text_pair, with hard negatives and scores.

        A file without the label column has no scores; one without the columns of negatives has pairs. A single column
        of negatives holds a text, or a list of texts in JSON lines and Parquet. The split is labelled in any case,
        because a pair is its own target.

        Raises:
            UserError: An anchor or positive is empty, or a score is missing or not a number. The message names the
                line.
        """
        if not columns.text_pair:
            raise UserError(
                f"task.text_pair is not set; name the column of {path} that holds the second text of each pair"
            )
        names = self.negatives
        others = [Column(name, "negatives", required=False) for name in names]
        table, scored = read_labelled(path, columns, others, label_required=False)
        present = table.present[-len(names) :] if names else ()
        if any(present) and not all(present):
            missing = names[present.index(False)]
            raise UserError(f"{path} has no column {missing!r}, but others of task.negatives. Correct the name")
        items = []
        for line, (text, text_pair, label, *negatives) in table.records:
            place = f"{path} line {line}"
            pair = read_text(place, text), read_text(place, text_pair)
            if not all(text.strip() for text in pair):
                raise UserError(f"{place} has an empty text. Write both texts of the pair, or remove the line")
            score = None
            if scored:
                score = float("nan") if is_missing(label) else parse_number(str(label))
                # Also true for NaN, which compares as false.
                if not abs(score) <= LARGEST:
                    raise UserError(
                        f"{place}: {label!r} is not a score; expected a number. Correct the line or task.label"
                    )
            if len(names) == 1 and is_stored(path) and isinstance(negatives[0], list):
                negatives = negatives[0]
            texts = (*pair, *(read_text(f"{place}: negatives", text).strip() for text in negatives))
            items.append(TextGroup(texts, score, line))
        return Split(path, tuple(items), labelled=True, left_out=table.left_out)

    def parse_record(self, source: Path, record: InputRecord) -> TextGroup:
        names = [(self.columns.text, "text"), (self.columns.text_pair, "text_pair")]
        return TextGroup(tuple(record_texts(source, record, names, needed=2)), None, record.line)

    def complete(self, train: Split[TextGroup]) -> Task:
        """Also sets the loss: cosent for pairs with a score, else contrastive."""
        # Either all pairs in a file have a score, or none.
        scored = train.items[0].score is not None
        if self.negatives and not any(any(item.texts[2:]) for item in train.items):
            raise UserError(
                f"{train.path} has no hard negatives: no column {', '.join(self.negatives)!r} (task.negatives), or "
                "nothing in it. Name another column, or leave task.negatives out"
            )
        if self.loss and scored != (self.loss == "cosent"):
            raise UserError(
                f"task.loss is {self.loss}, but {train.path} has {'' if scored else 'no '}scores (task.label). "
                "cosent trains on pairs with a score, contrastive on pairs without one"
            )
        return replace(self, loss="cosent" if scored else "contrastive").with_metrics()

    def default_metrics(self) -> tuple[str, ...]:
        return SCORED if self.columns.label else RANKED

    def metric_names(self, split: Split[TextGroup], explicit: bool = False) -> tuple[str, ...]:
        """Raises UserError if the split has no score and the metrics need one, or the other way round."""
        scored = split.items[0].score is not None
        if not set(self.metrics) <= {*(REGRESSION_METRICS if scored else RANKED)}:
            raise UserError(
                f"{split.path} has {'' if scored else 'no '}scores (task.label), so it cannot be measured "
                f"by {', '.join(self.metrics)}. Use another file, or set task.label to its column of scores"
            )
        return super().metric_names(split)

    def encode(self, split: Split[TextGroup], tokenizer: Tokenizer) -> EmbeddingRows:
        """One row per group; its texts are sequences [CLS] text [SEP] with at most max_length tokens."""
        scored = split.items[0].score is not None
        by_role = self.query_prompt, self.document_prompt
        # Inputs of predict have no score, and a folder of sentence-transformers does not say what it was trained on.
        alike = scored if split.labelled else self.loss == "cosent" or (not self.loss and not any(by_role))
        # The texts of a pair with a score have the same role. Without a score, the first one is a query and the others
        # are documents.
        prompts = (self.prompt, self.prompt) if alike else by_role
        texts = [
            [(prompts[min(place, 1)] + text,) if text else None for place, text in enumerate(item.texts)]
            for item in split.items
        ]
        return EmbeddingRows(
            **encode_side_by_side(texts, tokenizer, self.max_length),
            scores=np.array([item.score or 0 for item in split.items], np.float32),
            # A file with scores, unlike the training file, or the other way round, is measured by metrics alone.
            label_weights=np.full(len(split.items), float(scored == (self.loss == "cosent")), np.float32),
            split=split,
        )

    def describe(self, rows: EmbeddingRows, training: bool = False) -> Description:
        """Warns if the file lacks the configured scores, and about prompts that its pairs do not use."""
        remarks, path = [], rows.split.path
        scored = rows.split.items[0].score is not None
        if self.columns.label and not scored:
            remarks.append(f"{path} has no column {self.columns.label!r} (task.label); its pairs have no scores")
        used, unused = ["prompt"], ["query_prompt", "document_prompt"]
        purpose = "pairs without a score"
        if not scored:
            used, unused, purpose = unused, used, "single texts and pairs with a score"
        for key in unused:
            if (text := getattr(self, key)) and text not in [getattr(self, other) for other in used]:
                remarks.append(f"{path}: its pairs are read without task.{key} ({text!r}), which is for {purpose}")
        if training and not scored:
            texts = [item.texts for item in rows.split.items]
            anchors, positives = (Counter(text[place].strip() for text in texts) for place in (0, 1))
            if count := sum(max(anchors[first.strip()], positives[second.strip()]) > 1 for first, second, *_ in texts):
                remarks.append(
                    f"{path}: {count} of {rows.count} pairs repeat a text of another pair; equal texts are no "
                    "negatives of one another"
                )
        if self.similarity != COSINE:
            remarks.append(f"pairs are measured by cosines, but the checkpoint's similarity is {self.similarity!r}")
        return Description({}, remarks)

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
        """Computes the metrics from vectors f32[S, D] by row, which have length 1.

        For pairs with a score, spearman and pearson (or the REGRESSION_METRICS in task.metrics) compare the cosines
        with the scores. For other rows, mrr and accuracy are means over the distinct anchors: the reciprocal rank of
        the best positive among all positives and hard negatives in the file, and how often it comes first. All
        positives of equal anchors are right. Equal texts are one candidate, and texts with equal cosines share their
        mean rank.
        """
        vectors = np.stack(answers)
        if rows.split.items[0].score is not None:
            names = [name for name in self.metrics if name in REGRESSION_METRICS] or SCORED
            cosines = (vectors[:, 0] * vectors[:, 1]).sum(axis=-1, dtype=np.float64)
            return compute_metrics(REGRESSION_METRICS, names, rows.scores, cosines)
        # By text, so that a positive that occurs twice does not compete with itself.
        candidates: dict[int, np.ndarray] = {}
        queries: dict[int, np.ndarray] = {}
        positives: dict[int, set[int]] = {}
        for numbers, texts in zip(rows.texts.tolist(), vectors, strict=True):
            candidates |= {number: text for number, text in zip(numbers[1:], texts[1:], strict=True) if number}
            queries.setdefault(numbers[0], texts[0])
            positives.setdefault(numbers[0], set()).add(numbers[1])
        places = {number: place for place, number in enumerate(candidates)}
        right = [[places[number] for number in known] for known in positives.values()]
        ranks = right_ranks(np.stack(list(queries.values())), np.stack(list(candidates.values())), right)
        values = {"mrr": float((1 / ranks).mean()), "accuracy": float((ranks == 1).mean())}
        return select_metrics([name for name in self.metrics if name in RANKED] or RANKED, values)

    def predictions(self, rows: EmbeddingRows, answers: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """`score`, the cosine of a pair's vectors."""
        return [{"score": float(vectors[0] @ vectors[1])} for vectors in answers]
