"""Tags of words: which pieces learn them, how a word's tag is decoded, loss, metrics."""

import functools
from collections.abc import Sequence
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
from bert_jax.tasks.example import Sentence, Split, Taken, TaskBatch, TaskRows, spans
from bert_jax.tasks.input_records import InputRecord, sentences_of
from bert_jax.tasks.kinds import tagging_schemes
from bert_jax.tasks.kinds.kind import Kind
from bert_jax.tasks.kinds.labels import check_label, weigh_classes
from bert_jax.tasks.metric_functions import tagging_metrics
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task
from bert_jax.tasks.word_rows import WordRows, encode_words
from bert_jax.tokenizer import Tokenizer
from bert_jax.train.losses import PLAIN, ClassCosts, chain_sums, classification_sums
from bert_jax.train.objectives import Counts, Term, Terms

HIGHEST = jax.lax.Precision.HIGHEST


class Tagging(Kind):
    """A tag for every word.

    task.label_subwords  which pieces of a word learn its tag: `first` (Devlin et al. 2019, section 5.3) or `all`
                         (Jurafsky and Martin, Speech and Language Processing, 3rd edition, "Sequence Labeling")
    task.decode          what a word's tag is read from: the distribution over tags at its first piece, or the `mean`
                         of the distributions at all its pieces. Of probabilities, not of their logarithms: so does
                         aggregation_strategy="average" of Hugging Face's pipeline, and an export then guesses the
                         same; nor can one piece that is sure veto all the others
    task.crf             whether the tags of a row are guessed together, by a linear chain over the words' first
                         pieces (Lample et al. 2016)
    """

    def read(self, task: Task, path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
        """CoNLL-U, CoNLL columns, or lists in JSON lines, Parquet and prepared data.

        BILOU and BMES are read as IOBES. Without label_required a file whose tags are all empty or _ is read as
        unlabelled. Raises UserError, with the line, for a word without a tag that is required.
        """
        if reading.is_stored(path):
            read = reading.read_word_lists
        elif task.name == "ewt" or reading.kind_of_file(path) == "conllu":
            read = reading.read_conllu
        else:
            read = reading.read_conll
        split = tagging_schemes.with_usual_letters(read(path, columns, label_required))
        if not label_required:
            known = tagging_schemes.first_line(split, lambda tag: tag not in ("", "_")) is not None
            return replace(split, labelled=split.labelled and known)
        if (line := tagging_schemes.first_line(split, lambda tag: not tag)) is not None:
            raise UserError(f"{path} line {line}: a word has no tag, and others have. Give it one, as O")
        return split

    def parse(self, task: Task, source: Path, records: Sequence[InputRecord]) -> Split[Sentence]:
        """Sentences of the words that were given, or that texts split into."""
        return sentences_of(source, records, task.columns.text)

    def complete(self, task: Task, train: Split[Sentence]) -> Task:
        """The task with the labels and metrics that its training file implies, where it names none.

        Tags that all look like O, B-X, I-X, E-X, S-X mark entities: their set is closed (all marks of the scheme for
        each type X) and they are measured by entity. Raises UserError for fewer than two tags.
        """
        if not task.labels:
            found = {tag for sentence in train.items for tag in sentence.tags or ()}
            if len(found) < 2:
                raise UserError(f"{train.path}: every tag is {found.pop()!r}; is task.label the right column?")
            if tagging_schemes.marks_entities(found):
                found = tagging_schemes.closed_set(found)
            task = replace(task, labels=tuple(sorted(found, key=lambda tag: (tag != "O", tag))))
        if task.class_weights:  # by words, however many pieces of each learn its tag
            task = weigh_classes(task, train, (task.labels[number] for number in _label_ids(task, train)))
        return replace(task, metrics=task.metrics or self.default_metrics(task))

    def default_metrics(self, task: Task) -> tuple[str, ...]:
        """What a task that names no metrics is measured by: entities where its tags mark them."""
        return (
            ("f1", "precision", "recall", "accuracy") if tagging_schemes.marks_entities(task.labels) else ("accuracy",)
        )

    def encode(self, task: Task, split: Split[Sentence], tokenizer: Tokenizer) -> "TagRows":
        """Rows of words (words.encode_words); pieces that learn a tag weigh 1, other slots 0.

        Entity tags are learnt in the scheme of the task's labels, in whichever the file is written; one that cannot
        follow is read as conlleval reads it (tagging_schemes.entities), and counted.
        """
        encoded = encode_words([sentence.words for sentence in split.items], tokenizer, task.max_length)
        labels, weights = np.zeros(len(encoded.input_ids), np.int32), np.zeros(len(encoded.input_ids), np.float32)
        irregular = 0
        if split.labelled:
            learning = encoded.word_sizes if task.label_subwords == "all" else np.ones_like(encoded.word_sizes)
            labels[spans(encoded.starts, learning)] = np.repeat(_label_ids(task, split), learning)
            weights[spans(encoded.starts, learning)] = 1
            if tagging_schemes.marks_entities(task.labels):
                irregular = tagging_schemes.irregular_tags([sentence.tags or () for sentence in split.items])
        return TagRows(
            **encoded._asdict(),
            labels=labels,
            label_weights=weights,
            irregular_tags=irregular,
            pad_id=tokenizer.pad_id,
            split=split,
        )

    def counts(self, rows: TaskRows) -> dict[str, int]:
        """words, and irregular_tags: how many cannot follow the one before them (tagging_schemes.irregular_tags)."""
        assert isinstance(rows, TagRows)
        return {"words": len(rows.word_rows), "irregular_tags": rows.irregular_tags}

    def remarks(self, task: Task, rows: TaskRows) -> list[str]:
        """Tags that cannot follow the one before them, where there are any."""
        assert isinstance(rows, TagRows) and rows.split is not None
        if not rows.irregular_tags:
            return []
        return [
            f"{rows.split.path}: {rows.irregular_tags} tags cannot follow the one before them (as I-X after O); they "
            "are read as conlleval reads them, an I-X then beginning an entity"
        ]

    def objective(self, task: Task) -> TaskObjective:
        return TagObjective(task.classes, task.decode, task.crf, task.costs)

    def measure(self, task: Task, rows: TaskRows, answers: Sequence["TagAnswer"]) -> dict[str, float]:
        """From the guessed tag of each slot."""
        assert isinstance(rows, TagRows)
        truth = rows.labels[rows.word_starts]
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
            if tagging_schemes.marks_entities(task.labels):
                one["entities"] = told_entities(item, tags, one["tag_scores"])
            told.append(one)
        return told


class TagLabels(NamedTuple):
    """What TaskBatch.labels holds."""

    tags: Any  # i32[B,T]
    words: Any  # i32[B,T]: which word of its row a piece is of, from 1, labelled or not; 0: none


class TagAnswer(NamedTuple):
    """What is guessed of the word that starts in each slot of a row."""

    tags: Any  # i32[T]: ids
    scores: Any  # f32[T]: their probabilities; with a CRF, of all paths with this tag here


@dataclass(frozen=True)
class TagObjective(TaskObjective):
    """Cross-entropy of the tags of the pieces that learn one (Devlin et al. 2019, section 5.3).

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
        """Logits of tags by slot."""
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
        """Of each slot [B, T]."""
        if self.crf:
            return _best_path(model, outputs, batch)
        shares = jax.nn.softmax(outputs, axis=-1)
        if self.decode == "mean":
            shares = _word_means(shares, batch.labels.words)
        return TagAnswer(shares.argmax(axis=-1).astype(jnp.int32), shares.max(axis=-1))


@dataclass(frozen=True, eq=False, kw_only=True)
class TagRows(WordRows):
    """Rows of words with a tag each."""

    labels: Int32[np.ndarray, "N"]
    label_weights: Float32[np.ndarray, "N"]  # 0: a slot that learns no tag
    irregular_tags: int  # of the file

    @functools.cached_property
    def token_words(self) -> Int32[np.ndarray, "N"]:
        """Which word of its row each token is of, from 1; 0: none."""
        numbers = np.arange(len(self.word_rows)) - np.searchsorted(self.word_rows, self.word_rows) + 1
        words = np.zeros(len(self.input_ids), np.int32)
        words[spans(self.word_starts, self.word_sizes)] = np.repeat(numbers, self.word_sizes)
        return words

    def truth(self, taken: Taken) -> tuple[TagLabels, Float32[np.ndarray, "B T"]]:
        def at(values: np.ndarray) -> np.ndarray:
            return np.where(taken.real, values[taken.tokens], 0).astype(values.dtype)

        return TagLabels(at(self.labels), at(self.token_words)), at(self.label_weights)


def guessed_tags(task: Task, rows: TagRows, answers: Sequence[TagAnswer]) -> list[list[str]]:
    """The tags of each sentence's words, from the guessed tag of each slot of each row."""
    places = zip(rows.word_rows, rows.word_slots, strict=True)
    return _sentences(task, rows, [int(answers[row].tags[slot]) for row, slot in places])


def told_entities(sentence: Sentence, tags: Sequence[str], scores: Sequence[float]) -> list[dict[str, Any]]:
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
    """In each slot the mean over all slots of the same word."""
    same = (words[:, :, None] == words[:, None, :]).astype(shares.dtype)
    return jnp.einsum("bts,bsc->btc", same, shares, precision=HIGHEST) / same.sum(axis=-1, keepdims=True)


def _label_ids(task: Task, split: Split[Sentence]) -> list[int]:
    entity_tags, ends = tagging_schemes.marks_entities(task.labels), tagging_schemes.marks_ends(task.labels)
    ids = []
    for sentence in split.items:
        tags = sentence.tags or ()
        if entity_tags and all(map(tagging_schemes.ENTITY_TAG.fullmatch, tags)):
            tags = tagging_schemes.tags_of(tagging_schemes.entities(tags), len(tags), ends)
        ids += [check_label(task, split, line, tag) for line, tag in zip(sentence.lines, tags, strict=True)]
    return ids


def _sentences(task: Task, rows: TagRows, ids: Sequence[int] | Integer[np.ndarray, "W"]) -> list[list[str]]:
    tags = [task.labels[number] for number in ids]
    return [tags[start:stop] for start, stop in pairwise(rows.sentence_offsets)]
