"""Tagging: a tag for every word, such as parts of speech and named entities."""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32, Integer

from bert_jax.command import UserError
from bert_jax.config import TaskConfig
from bert_jax.model.heads.tag_scheme import scheme_of
from bert_jax.tasks.example import Sentence, Split, Taken, spans
from bert_jax.tasks.kinds import tagging_schemes
from bert_jax.tasks.kinds.labels import LabelTask, check_label
from bert_jax.tasks.kinds.tagging_objective import TagAnswer, TagLabels, TagObjective
from bert_jax.tasks.kinds.words import WordTask, sentence_objects, span_object
from bert_jax.tasks.metric_functions import TAGGING_METRICS, compute_metrics
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.reading import Columns
from bert_jax.tasks.task import Task, check_choice
from bert_jax.tasks.word_rows import LabelledWordRows, encode_words
from bert_jax.tokenizer import Tokenizer


@dataclass(frozen=True)
class TaggingTask(LabelTask[Sentence, "TagRows"], WordTask["TagRows"]):
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
      et al. 2016). Sequences that the scheme of entity tags does not allow have the probability 0 |
    | crf_rate | the learning rate of the CRF's transitions, relative to the others' |
    | layer_mix | whether tags are read from a learned mix of all layers (Peters et al. 2018, section 3.2) |
    """

    kind = "tagging"

    label_subwords: str = "first"
    decode: str = "first"
    crf: bool = TaskConfig.crf
    crf_rate: float = TaskConfig.crf_rate
    layer_mix: bool = TaskConfig.layer_mix

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
        if not self.crf and self.crf_rate != TaskConfig.crf_rate:
            raise UserError(
                f"task.crf_rate is {self.crf_rate}, but there is no CRF; leave it out, or set task.crf=True"
            )
        if not 0 <= self.crf_rate < float("inf"):
            raise UserError(f"task.crf_rate is {self.crf_rate}; use a factor of the learning rate of 0 or more")

    @property
    def known_metrics(self) -> Collection[str]:
        return TAGGING_METRICS

    def labels_in(self, split: Split[Sentence]) -> set[str]:
        return {tag for sentence in split.items for tag in sentence.tags or ()}

    def replace_labels(self, split: Split[Sentence], names: Mapping[str, str]) -> Split[Sentence]:
        items = (
            item._replace(tags=item.tags and tuple(names.get(tag, tag) for tag in item.tags)) for item in split.items
        )
        return replace(split, items=tuple(items))

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

    def complete(self, train: Split[Sentence]) -> Task:
        """The task with the labels, class weights and metrics that its training file implies.

        Tags that all look like O, B-X, I-X, E-X or S-X mark entities: the label set then has all tags of the scheme
        for each type X, and the metrics are over entities. Labels are in the order of the classes that the file names;
        others follow, sorted, O first. Raises UserError for fewer than two tags.
        """
        task = self
        if not task.labels:
            found = {tag for sentence in train.items for tag in sentence.tags or ()}
            if len(found) < 2:
                raise UserError(f"{train.path}: every tag is {found.pop()!r}; is task.label the right column?")
            named = train.class_names if found <= set(train.class_names) else ()
            if tagging_schemes.marks_entities(found):
                named = tuple(name for name in named if tagging_schemes.marks_entities({*found, name}))
                found = tagging_schemes.closed_set({*found, *named})
            found |= set(named)
            others = sorted(found - set(named), key=lambda tag: (tag != "O", tag))
            task = replace(task, labels=(*named, *others))
        entity_metrics = [name for name in task.metrics if name != "accuracy"]
        if entity_metrics and not tagging_schemes.marks_entities(task.labels):
            raise UserError(
                f"task.metrics has {entity_metrics[0]!r}, which is of entities, but the tags of {train.path} mark "
                "none; use accuracy"
            )
        if task.class_weights:  # counted by words, however many pieces of each are trained
            weights = task.weights_of(train, (task.labels[number] for number in task.label_ids(train)))
            task = replace(task, class_weight_values=weights)
        return task.with_metrics()

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
        words = encode_words(split, tokenizer, self.max_length)
        labels, weights = np.zeros(len(words.input_ids), np.int32), np.zeros(len(words.input_ids), np.float32)
        irregular = 0
        if split.labelled:
            trained_pieces = words.word_sizes if self.label_subwords == "all" else np.ones_like(words.word_sizes)
            labels[spans(words.word_starts, trained_pieces)] = np.repeat(self.label_ids(split), trained_pieces)
            weights[spans(words.word_starts, trained_pieces)] = 1
            if tagging_schemes.marks_entities(self.labels):
                irregular = tagging_schemes.irregular_tags([sentence.tags or () for sentence in split.items])
        return TagRows(**vars(words), labels=labels, label_weights=weights, irregular_tags=irregular)

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
        scheme = scheme_of(self.labels) if self.crf else None
        return TagObjective(len(self.labels), self.decode, self.crf, self.costs, self.layer_mix, scheme)

    def measure(self, rows: "TagRows", answers: Sequence[TagAnswer]) -> dict[str, float]:
        """The metrics, from the predicted tag at each position. Entities are those of the file, even where the labels
        cannot tell adjacent ones apart."""
        true_tags = [list(self._in_scheme(sentence.tags or ())) for sentence in rows.split.items]
        predicted = rows.by_sentence(self._predicted(rows, answers))
        return compute_metrics(TAGGING_METRICS, self.metrics, true_tags, predicted)

    def predictions(self, rows: "TagRows", answers: Sequence[TagAnswer]) -> list[dict[str, Any]]:
        """`words`, `tags` and `tag_scores`, their probabilities; `offsets` of the words in a raw text; and `entities`
        where the tags mark them, whose score is the mean of the words' probabilities."""
        scores = rows.at_words([answer.scores for answer in answers]).astype(np.float64).tolist()
        objects = sentence_objects(rows, tags=self._predicted(rows, answers), tag_scores=scores)
        if tagging_schemes.marks_entities(self.labels):
            for item, one in zip(rows.split.items, objects, strict=True):
                one["entities"] = [
                    span_object(item, span, float(np.mean(one["tag_scores"][span.first : span.end])))
                    for span in tagging_schemes.entities(one["tags"])
                ]
        return objects

    def label_ids(self, split: Split[Sentence]) -> list[int]:
        """The ids of the tags of all words. Entity tags are converted to the scheme of the task's labels; an I-X stands
        for a B-X that the labels lack."""
        ids = []
        for sentence in split.items:
            for line, tag in zip(sentence.lines, self._in_scheme(sentence.tags or ()), strict=True):
                inside = "I" + tag[1:]
                known = tag in self.labels or tag[:1] != "B" or inside not in self.labels
                ids.append(check_label(split, line, tag if known else inside, self.labels))
        return ids

    def _in_scheme(self, tags: Sequence[str]) -> Sequence[str]:
        """The tags of a sentence in the scheme of the task's labels, where these mark entities: IOBES, IOB2, or IOB1 if
        the labels lack a B-X, as those of models that were trained on IOB1 do."""
        if not tagging_schemes.marks_entities(self.labels) or not all(map(tagging_schemes.ENTITY_TAG.fullmatch, tags)):
            return tags
        ends = tagging_schemes.marks_ends(self.labels)
        found = tagging_schemes.tags_of(tagging_schemes.entities(tags), len(tags), ends)
        return tagging_schemes.iob1(found) if tagging_schemes.lacks_beginnings(self.labels) else found

    def _predicted(self, rows: "TagRows", answers: Sequence[TagAnswer]) -> list[str]:
        """The predicted tag of each word. With a CRF, the tags of each sentence are a sequence of their scheme.

        A CRF covers one row; where a sentence continues in further rows, an entity may be open on one side only. The
        tags are then written for the entities that conlleval reads in them.
        """
        tags = self._tags(_predicted_ids(rows, answers))
        if not self.crf or not tagging_schemes.marks_entities(self.labels) or rows.whole.all():
            return tags
        return [tag for of_sentence in rows.by_sentence(tags) for tag in self._in_scheme(of_sentence)]

    def _tags(self, ids: Integer[np.ndarray, "W"]) -> list[str]:
        return [self.labels[number] for number in ids]


@dataclass(frozen=True, eq=False, kw_only=True)
class TagRows(LabelledWordRows):
    """Rows of words with one tag each."""

    irregular_tags: int  # of the file

    @functools.cached_property
    def token_words(self) -> Int32[np.ndarray, "N"]:
        """The number of each token's word in its row, from 1; 0: no word."""
        numbers = np.arange(len(self.word_rows)) - np.searchsorted(self.word_rows, self.word_rows) + 1
        words = np.zeros(len(self.input_ids), np.int32)
        words[spans(self.word_starts, self.word_sizes)] = np.repeat(numbers, self.word_sizes)
        return words

    @functools.cached_property
    def whole(self) -> Bool[np.ndarray, "R 2"]:
        """Whether each row begins with the first word of its sentence, and ends with the last one."""
        sentences = self.items()
        return np.stack([np.diff(sentences, prepend=-1), np.diff(sentences, append=-1)], axis=1) != 0

    def targets(self, taken: Taken) -> tuple[TagLabels, Float32[np.ndarray, "B T"]]:
        tags, weights = super().targets(taken)
        words = np.where(taken.real, self.token_words[taken.tokens], 0).astype(np.int32)
        return TagLabels(tags, words, self.whole[taken.rows]), weights


def _predicted_ids(rows: TagRows, answers: Sequence[TagAnswer]) -> Integer[np.ndarray, "W"]:
    """The predicted tag of each word, from the predicted tag at each position of each row."""
    return rows.at_words([answer.tags for answer in answers])
