"""Tagging: a tag for every word, such as parts of speech and named entities."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, Integer

from bert_jax.command import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.head_outputs import tag_logits
from bert_jax.model.heads import Heads
from bert_jax.tasks import reading
from bert_jax.tasks.example import Sentence, Split, Taken, TaskBatch, spans
from bert_jax.tasks.input_records import InputRecord, sentences_of
from bert_jax.tasks.kinds import tagging_schemes
from bert_jax.tasks.kinds.labels import LabelTask, check_label
from bert_jax.tasks.metric_functions import TAGGING_METRICS, compute_metrics
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import check_choice
from bert_jax.tasks.word_rows import WordRows, encode_words
from bert_jax.tokenizer import Tokenizer
from bert_jax.train.losses import PLAIN, ClassCosts, chain_sums, classification_sums
from bert_jax.train.objectives import Counts, Term, Terms

HIGHEST = jax.lax.Precision.HIGHEST

SentenceReader = Callable[[Path, Columns, bool], Split[Sentence]]


@dataclass(frozen=True)
class TaggingTask(LabelTask[Sentence, "TagRows"]):
    """A tag for every word.

    | option | |
    |---|---|
    | label_subwords | which pieces of a word are trained to predict its tag: `first` (Devlin et al. 2019, section 5.3)
      or `all` (Jurafsky and Martin, Speech and Language Processing, 3rd edition, "Sequence Labeling") |
    | decode | what a word's tag is read from: the distribution at its `first` piece, or the `mean` of the
      distributions at all its pieces. The mean is over probabilities, not logarithms: aggregation_strategy="average"
      of Hugging Face's pipeline does the same, so an export predicts the same tags; and one confident piece cannot
      overrule all others |
    | crf | whether the tags of a row are predicted jointly, by a linear-chain CRF over the words' first pieces (Lample
      et al. 2016) |
    """

    kind = "tagging"

    label_subwords: str = "first"
    decode: str = "first"
    crf: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("task.label_subwords", self.label_subwords, ("first", "all"))
        check_choice("task.decode", self.decode, ("first", "mean"))
        if self.crf and (self.class_weights or self.label_smoothing):
            raise UserError(
                "task.class_weights and task.label_smoothing belong to the cross-entropy of single words, which "
                "task.crf replaces; remove one of the two"
            )
        if self.decode == "mean" and self.label_subwords == "first":
            raise UserError(
                "task.decode=mean reads all pieces of a word, but task.label_subwords=first trains only the first; "
                "add --config.task.label_subwords=all"
            )
        if self.crf and self.label_subwords == "all":
            raise UserError("task.crf uses the first piece of each word; leave out task.label_subwords=all")

    def reader_of(self, path: Path) -> SentenceReader:
        """The reader for a file, by its name."""
        if reading.is_stored(path):
            return reading.read_word_lists
        return reading.read_conllu if reading.kind_of_file(path) == "conllu" else reading.read_conll

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
        """Reads CoNLL-U, CoNLL columns, or lists in JSON lines, Parquet and prepared data.

        BILOU and BMES tags become IOBES. Without label_required, a file whose tags are all empty or _ is read as
        unlabelled. Raises UserError, with the line, for a word without a tag where tags are required.
        """
        split = tagging_schemes.with_usual_letters(self.reader_of(path)(path, columns, label_required))
        if not label_required:
            known = tagging_schemes.first_line(split, lambda tag: tag not in ("", "_")) is not None
            return replace(split, labelled=split.labelled and known)
        if (line := tagging_schemes.first_line(split, lambda tag: not tag)) is not None:
            raise UserError(f"{path} line {line}: a word has no tag, but others have one. Give it a tag, such as O")
        return split

    def parse(self, source: Path, records: Sequence[InputRecord]) -> Split[Sentence]:
        """Sentences of the given words, or of the words of raw texts."""
        return sentences_of(source, records, self.columns.text)

    def complete(self, train: Split[Sentence]) -> "TaggingTask":
        """The task with the labels, class weights and metrics that its training file implies.

        Tags that all look like O, B-X, I-X, E-X or S-X mark entities: the label set then has all tags of the scheme
        for each type X, and the metrics are over entities. Raises UserError for fewer than two tags.
        """
        task = self
        if not task.labels:
            found = {tag for sentence in train.items for tag in sentence.tags or ()}
            if len(found) < 2:
                raise UserError(f"{train.path}: every tag is {found.pop()!r}; is task.label the right column?")
            if tagging_schemes.marks_entities(found):
                found = tagging_schemes.closed_set(found)
            task = replace(task, labels=tuple(sorted(found, key=lambda tag: (tag != "O", tag))))
        if task.class_weights:  # counted by words, however many pieces of each are trained
            weights = task.weights_of(train, (task.labels[number] for number in _label_ids(task, train)))
            task = replace(task, class_weight_values=weights)
        return replace(task, metrics=task.metrics or task.default_metrics())

    def default_metrics(self) -> tuple[str, ...]:
        """Metrics over entities where the tags mark them, else accuracy."""
        if tagging_schemes.marks_entities(self.labels):
            return ("f1", "precision", "recall", "accuracy")
        return ("accuracy",)

    def encode(self, split: Split[Sentence], tokenizer: Tokenizer) -> "TagRows":
        """Rows of words (word_rows.encode_words). Pieces that are trained to predict a tag weigh 1, others 0.

        Entity tags are converted to the scheme of the task's labels. A tag that cannot follow the one before it is
        interpreted as conlleval does (tagging_schemes.entities), and counted.
        """
        encoded = encode_words([sentence.words for sentence in split.items], tokenizer, self.max_length)
        labels, weights = np.zeros(len(encoded.input_ids), np.int32), np.zeros(len(encoded.input_ids), np.float32)
        irregular = 0
        if split.labelled:
            trained_pieces = encoded.word_sizes if self.label_subwords == "all" else np.ones_like(encoded.word_sizes)
            labels[spans(encoded.starts, trained_pieces)] = np.repeat(_label_ids(self, split), trained_pieces)
            weights[spans(encoded.starts, trained_pieces)] = 1
            if tagging_schemes.marks_entities(self.labels):
                irregular = tagging_schemes.irregular_tags([sentence.tags or () for sentence in split.items])
        return TagRows(
            **encoded._asdict(),
            labels=labels,
            label_weights=weights,
            irregular_tags=irregular,
            pad_id=tokenizer.pad_id,
            split=split,
        )

    def counts(self, rows: "TagRows") -> dict[str, int]:
        """words, and irregular_tags: tags that cannot follow the one before them (tagging_schemes.irregular_tags)."""
        return {"words": len(rows.word_rows), "irregular_tags": rows.irregular_tags}

    def remarks(self, rows: "TagRows") -> list[str]:
        """A warning about tags that cannot follow the one before them."""
        if not rows.irregular_tags:
            return []
        return [
            f"{rows.split.path}: {rows.irregular_tags} tags cannot follow the one before them (such as I-X after O); "
            "as in conlleval, such an I-X begins an entity"
        ]

    def objective(self) -> TaskObjective:
        return TagObjective(len(self.labels), self.decode, self.crf, self.costs)

    def measure(self, rows: "TagRows", answers: Sequence["TagAnswer"]) -> dict[str, float]:
        """The metrics, from the predicted tag at each position."""
        truth = _by_sentence(self, rows, rows.labels[rows.word_starts])
        return compute_metrics(TAGGING_METRICS, self.metrics, truth, predicted_tags(self, rows, answers))

    def predictions(self, rows: "TagRows", answers: Sequence["TagAnswer"]) -> list[dict[str, Any]]:
        """`words`, `tags` and `tag_scores`, their probabilities; `offsets` of the words in a raw text; and `entities`
        where the tags mark them."""
        predicted = predicted_tags(self, rows, answers)
        places = zip(rows.word_rows, rows.word_slots, strict=True)
        scores = np.array([answers[row].scores[position] for row, position in places], np.float64)
        found = []
        for item, tags, (start, end) in zip(rows.split.items, predicted, pairwise(rows.sentence_offsets), strict=True):
            one = {"words": list(item.words), "tags": tags, "tag_scores": scores[start:end].tolist()}
            if item.offsets is not None:
                one["offsets"] = [list(place) for place in item.offsets]
            if tagging_schemes.marks_entities(self.labels):
                one["entities"] = entity_objects(item, tags, one["tag_scores"])
            found.append(one)
        return found


class TagLabels(NamedTuple):
    """The value of TaskBatch.labels."""

    tags: Any  # i32[B,T]
    words: Any  # i32[B,T]: number of the piece's word in its row, from 1, labelled or not; 0: no word


class TagAnswer(NamedTuple):
    """The prediction for the word that starts at each position of a row."""

    tags: Any  # i32[T]: ids
    scores: Any  # f32[T]: their probabilities; with a CRF, that of all paths with this tag here


@dataclass(frozen=True)
class TagObjective(TaskObjective):
    """Cross-entropy of the tags of the pieces that are trained (Devlin et al. 2019, section 5.3).

    With crf, minus the log-likelihood of the tags of a row's words (Lample et al. 2016, section 2.2).
    """

    tags: int
    decode: str = "first"
    crf: bool = False
    costs: ClassCosts = PLAIN

    @property
    def heads(self) -> Heads:
        return Heads(tags=self.tags, crf=self.crf)

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B T C"]:
        """Logits of the tags at each position."""
        return tag_logits(model, model.encode(batch, dropout_key).last, dropout_key)

    def terms_of(self, model: Bert, outputs: Float[Array, "B T C"], batch: TaskBatch) -> Terms:
        tags, weights = batch.labels.tags, batch.label_weights
        if self.crf:
            loss, correct = chain_sums(model.head("crf"), outputs, tags, weights, batch.sequence_ids)
        else:
            loss, correct = classification_sums(outputs, tags, weights, self.costs)
        return {"task": Term(loss, {"accuracy": correct})}

    def counts(self, batch: TaskBatch) -> Counts:
        return {"task": self.costs.weigh(batch.labels.tags, batch.label_weights).sum()}

    def answers(self, model: Bert, outputs: Float[Array, "B T C"], batch: TaskBatch) -> TagAnswer:
        """The predicted tag and its probability at each position, [B, T]."""
        if self.crf:
            return _best_path(model, outputs, batch)
        shares = jax.nn.softmax(outputs, axis=-1)
        if self.decode == "mean":
            shares = _word_means(shares, batch.labels.words)
        return TagAnswer(shares.argmax(axis=-1).astype(jnp.int32), shares.max(axis=-1))


@dataclass(frozen=True, eq=False, kw_only=True)
class TagRows(WordRows[Sentence]):
    """Rows of words with one tag each."""

    labels: Int32[np.ndarray, "N"]
    label_weights: Float32[np.ndarray, "N"]  # 0: a position that is not trained
    irregular_tags: int  # of the file

    @functools.cached_property
    def token_words(self) -> Int32[np.ndarray, "N"]:
        """The number of each token's word in its row, from 1; 0: no word."""
        numbers = np.arange(len(self.word_rows)) - np.searchsorted(self.word_rows, self.word_rows) + 1
        words = np.zeros(len(self.input_ids), np.int32)
        words[spans(self.word_starts, self.word_sizes)] = np.repeat(numbers, self.word_sizes)
        return words

    def targets(self, taken: Taken) -> tuple[TagLabels, Float32[np.ndarray, "B T"]]:
        def at(values: np.ndarray) -> np.ndarray:
            return np.where(taken.real, values[taken.tokens], 0).astype(values.dtype)

        return TagLabels(at(self.labels), at(self.token_words)), at(self.label_weights)


def predicted_tags(task: TaggingTask, rows: TagRows, answers: Sequence[TagAnswer]) -> list[list[str]]:
    """The tags of the words of each sentence, from the predicted tag at each position of each row."""
    places = zip(rows.word_rows, rows.word_slots, strict=True)
    return _by_sentence(task, rows, [int(answers[row].tags[position]) for row, position in places])


def entity_objects(sentence: Sentence, tags: Sequence[str], scores: Sequence[float]) -> list[dict[str, Any]]:
    """The entities of a sentence: `type`, `text`, `score`, `words` [first, end), and `start` and `end`, characters of
    the raw text, where there is one.

    The score is the mean of the words' probabilities.
    """
    found = []
    for name, first, end_word in tagging_schemes.entities(tags):
        words = slice(first, end_word)
        one = {"type": name, "text": " ".join(sentence.words[words]), "score": float(np.mean(scores[words]))}
        if sentence.text is not None and sentence.offsets is not None:
            start, end = sentence.offsets[first][0], sentence.offsets[end_word - 1][1]
            one |= {"text": sentence.text[start:end], "start": start, "end": end}
        found.append(one | {"words": [first, end_word]})
    return found


def _best_path(model: Bert, logits: Float[Array, "B T C"], batch: TaskBatch) -> TagAnswer:
    words = batch.labels.words
    first_pieces = (words > 0) & (words != jnp.pad(words[:, :-1], ((0, 0), (1, 0))))

    def log_partition(logits: Float[Array, "B T C"]) -> Float[Array, ""]:
        return model.head("crf").log_partition(logits, first_pieces, batch.sequence_ids).sum()

    path, _ = model.head("crf").decode(logits, first_pieces, batch.sequence_ids)
    # The derivative of the log-partition by a tag's logit is the probability of the tag there.
    marginals = jax.grad(log_partition)(logits)
    return TagAnswer(path, jnp.take_along_axis(marginals, path[..., None], axis=-1)[..., 0])


def _word_means(shares: Float[Array, "B T C"], words: Int[Array, "B T"]) -> Float[Array, "B T C"]:
    """At each position, the mean over all positions of the same word."""
    same = (words[:, :, None] == words[:, None, :]).astype(shares.dtype)
    return jnp.einsum("bts,bsc->btc", same, shares, precision=HIGHEST) / same.sum(axis=-1, keepdims=True)


def _label_ids(task: TaggingTask, split: Split[Sentence]) -> list[int]:
    entity_tags, ends = tagging_schemes.marks_entities(task.labels), tagging_schemes.marks_ends(task.labels)
    ids = []
    for sentence in split.items:
        tags = sentence.tags or ()
        if entity_tags and all(map(tagging_schemes.ENTITY_TAG.fullmatch, tags)):
            tags = tagging_schemes.tags_of(tagging_schemes.entities(tags), len(tags), ends)
        ids += [check_label(split, line, tag, task.labels) for line, tag in zip(sentence.lines, tags, strict=True)]
    return ids


def _by_sentence(task: TaggingTask, rows: TagRows, ids: Sequence[int] | Integer[np.ndarray, "W"]) -> list[list[str]]:
    tags = [task.labels[number] for number in ids]
    return [tags[start:stop] for start, stop in pairwise(rows.sentence_offsets)]
