"""Tagging: a tag for every word, such as parts of speech and named entities.

In order: `WordTask`, the base class for all kinds that label words, the schemes of entity tags, the objective,
`TaggingTask`, its rows, and a baseline.
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32
from seqeval.metrics.sequence_labeling import get_entities

from bert_jax.config.finetuning import TaggingOptions
from bert_jax.errors import UserError
from bert_jax.model.bert import Bert
from bert_jax.model.heads import structured
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import encode_for_task, tag_logits
from bert_jax.tasks.labels import LabelTask
from bert_jax.tasks.metrics import TAGGING_METRICS, compute_metrics
from bert_jax.tasks.reading.inputs import PIECES, InputRecord, cut_words, record_words, unit_of_words
from bert_jax.tasks.reading.labelled import has_conll_columns, read_conll, read_conllu, read_word_lists, read_word_table
from bert_jax.tasks.reading.tables import Columns, ending, is_stored, kind_of_file
from bert_jax.tasks.rows import (
    IGNORED,
    LabelledWordRows,
    Sentence,
    Span,
    SpannedSentence,
    Split,
    Taken,
    TaskBatch,
    encode_words,
    spans,
)
from bert_jax.tasks.task import Description, Rows, SoftClassObjective, Task, TaskObjective, chain_sums
from bert_jax.tokenization.specification import is_unspaced
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train.losses import PLAIN, ClassCosts, classification_sums
from bert_jax.train.objectives import Counts, Term, Terms

SentenceReader = Callable[[Path, Columns, bool], Split[Sentence]]


SplitOfWords = TypeVar("SplitOfWords", bound=Split[Any])


@dataclass(frozen=True)
class RawWords:
    """How a task splits a raw text in a script without spaces (Chinese, Japanese, Thai ...): as its training file."""

    raw_words: str = PIECES  # or CHARACTERS, ALL_CHARACTERS

    def split_raw(self, split: SplitOfWords, tokenizer: Tokenizer) -> SplitOfWords:
        """Splits the words of raw texts before the tokenizer's pieces, unless the training file has characters."""
        # Text in ASCII has spaces between its words, so it needs no second tokenization.
        if self.raw_words != PIECES or not any(item.raw and not item.text.isascii() for item in split.items):
            return split
        return replace(split, items=tuple(_in_pieces(item, tokenizer) if item.raw else item for item in split.items))

    @property
    def raw_rule(self) -> str:
        """How raw texts in scripts without spaces are split, for a remark."""
        if self.raw_words != PIECES:
            return "into characters, as in the training file"
        return "before the tokenizer's pieces; to split it otherwise, give lists of words (tokens)"


def unspaced_texts(items: Sequence[Any]) -> int:
    """The number of raw texts with words in scripts without spaces."""
    return sum(getattr(item, "raw", False) and any(map(is_unspaced, item.text)) for item in items)


def _in_pieces(item: Any, tokenizer: Tokenizer) -> Any:
    _, characters = tokenizer.of_tasks.encode_offsets(item.text)
    offsets = cut_words(item.text, item.offsets, {int(start) for start, _ in characters})
    words = tuple(item.text[start:end] for start, end in offsets)
    item = item._replace(words=words, offsets=tuple(offsets))
    # All words of a raw text are on its one line.
    return item._replace(lines=(item.lines[0],) * len(words)) if isinstance(item, Sentence) else item


@dataclass(frozen=True)
class WordTask(RawWords, Task[Sentence, Rows]):
    """A task with a label for every word."""

    # A loss is a mean over the words of a batch. In batches of short rows, each word would count more than in others.
    length_pool = 1

    def choose_reader(self, path: Path) -> SentenceReader:
        """The reader for a file, by its name: for CoNLL-U, CoNLL columns, CSV, or stored lists (tables.is_stored)."""
        if is_stored(path):
            return functools.partial(read_word_lists, labels=self.numbered_labels)
        if ending(path) == ".csv":
            return read_word_table
        return read_conllu if kind_of_file(path) == "conllu" else read_conll

    def is_label(self, written: str) -> bool:
        """Whether a text may be the label of a word."""
        return False

    def has_layout(self, path: Path) -> bool:
        """Also true for CoNLL columns with the task's labels."""
        return super().has_layout(path) or has_conll_columns(path, self.columns, self.is_label)

    def parse_record(self, source: Path, record: InputRecord) -> Sentence:
        """A sentence from words or a raw text (record_words)."""
        words, text, offsets, raw = record_words(source, record, self.columns.text, self.raw_words)
        return Sentence(words, None, (record.line,) * len(words), text, offsets, raw)

    def complete(self, train: Split[Sentence]) -> Task:
        """Also records how the file splits text without spaces into words."""
        task = replace(self, raw_words=unit_of_words(item.words for item in train.items))
        # With two arguments, super() continues with the new task; without, it would continue with `self`.
        return super(WordTask, task).complete(train)


def sentence_objects(rows: LabelledWordRows, **values: Sequence[Any]) -> list[dict[str, Any]]:
    """One prediction per sentence: `words`, these values by word, and `offsets` in a raw text."""
    objects = []
    for item, *parts in zip(rows.split.items, *map(rows.by_sentence, values.values()), strict=True):
        prediction = {"words": list(item.words)} | {name: list(part) for name, part in zip(values, parts, strict=True)}
        if item.offsets is not None:
            prediction["offsets"] = [list(offset) for offset in item.offsets]
        objects.append(prediction)
    return objects


def span_object(sentence: Sentence | SpannedSentence, span: Span, score: float) -> dict[str, Any]:
    """A predicted span: `type`, `text`, `score` and `words` [first, end).

    In a raw text, also `start` and `end`, its characters.
    """
    prediction = {"type": span.label, "text": " ".join(sentence.words[span.first : span.end]), "score": score}
    if sentence.text is not None and sentence.offsets is not None:
        start, end = sentence.offsets[span.first][0], sentence.offsets[span.end - 1][1]
        prediction |= {"text": sentence.text[start:end], "start": start, "end": end}
    return prediction | {"words": [span.first, span.end]}


# Decodes tags that mark entities (IOB1, IOB2 or BIO, IOBES), and counts tags that break their scheme.
#
# Entities are defined as in conlleval, the script of the CoNLL shared tasks (Tjong Kim Sang and De Meulder 2003). It
# reads all of these schemes and any sequence of their tags: an I-X that does not follow an X also begins an entity.
# A file with a single type of entity may omit the type (B, I, O), which is then UNTYPED.


UNTYPED = "_"  # as in seqeval
# IOBES with other letters (last, unit; middle), for typed tags.
_OTHER_LETTERS = (re.compile(r"O|[BILU]-.+"), re.compile(r"O|[BMES]-.+"))
_USUAL = {"L": "E", "U": "S", "M": "I"}


def with_usual_letters(split: Split[Sentence]) -> Split[Sentence]:
    """Converts BILOU and BMES tags to IOBES; other files are unchanged."""
    tags = {tag for item in split.items for tag in known_tags(item)}
    known = any(all(map(pattern.fullmatch, tags)) for pattern in _OTHER_LETTERS)
    # Tags with only usual letters fit a pattern too, such as IOB the first one.
    if not known or not any(tag[:1] in _USUAL for tag in tags):
        return split

    def usual(tag: str) -> str:
        return _USUAL.get(tag[0], tag[0]) + tag[1:] if tag[1:2] == "-" else tag

    items = (item._replace(tags=item.tags and tuple(map(usual, item.tags))) for item in split.items)
    return replace(split, items=tuple(items), class_names=tuple(map(usual, split.class_names)))


# A typed tag of any scheme; and one in other letters, cases or separators: B_PER, b-per, I:PER.
_TYPED = re.compile(r"[BIESLUM]-.+")
_LOOSE = re.compile(r"([BIESLUM])[-_:/|]([^-_:/|].*)", re.IGNORECASE)
MOSTLY = 0.9  # the share of the tags other than O that must mark entities, for the other ones to be strays


def with_entity_tags(split: Split[Sentence], known: Collection[str]) -> Split[Sentence]:
    """Corrects stray tags in a file whose tags mark entities, with a remark; other files are unchanged.

    A typed tag in another form becomes the usual one (B_PER and b-PER: B-PER). Any other tag becomes O, as conlleval
    reads it, if there are few; many are only reported. `known` has tags that stay as they are.
    """
    counts = Counter(tag for item in split.items for tag in known_tags(item) if tag not in known)
    typed = {tag for tag in counts if _TYPED.fullmatch(tag)}
    # Types in other cases are those of the usual tags.
    types = {tag[2:].casefold(): tag[2:] for tag in sorted(typed)}
    names = {
        tag: f"{match[1].upper()}-{types.get(match[2].casefold(), match[2])}"
        for tag in counts.keys() - typed
        if (match := _LOOSE.fullmatch(tag))
    }
    entity = typed | names.keys()
    strays = {tag for tag in counts if tag and tag != "O" and tag not in entity}
    # Files of entity tags have an O. Other tags that happen to look like B-X are left alone.
    if not entity or not (names or strays) or not {"O", "o", "0"} & (counts.keys() | known):
        return split
    marking = sum(counts[tag] for tag in entity)
    # o and 0 are other spellings of O, so however many there are, they do not show another kind of tags.
    few = marking >= MOSTLY * (marking + sum(counts[tag] for tag in strays - {"o", "0"}))
    line = first_line(split, lambda tag: tag in strays or (few and tag in names))
    if few:
        names |= dict.fromkeys(strays, "O")
    found = sorted(names if few else strays)
    shown = ", ".join(f"{tag!r} as {names[tag]} ({counts[tag]})" if few else f"{tag!r}" for tag in found[:10])
    shown += " ..." if len(found) > 10 else ""
    first = f"{sum(counts[tag] for tag in found)} of {counts.total()} tags (the first one in line {line})"
    if not few:
        remark = f"{first} do not mark entities as the others do, so metrics compare words: {shown}"
        return replace(split, remarks=(*split.remarks, remark))
    remark = f"{first} are read as entity tags (B-X, I-X, O): {shown}"
    items = (item._replace(tags=item.tags and tuple(names.get(tag, tag) for tag in item.tags)) for item in split.items)
    class_names = tuple(dict.fromkeys(names.get(name, name) for name in split.class_names))
    return replace(split, items=tuple(items), class_names=class_names, remarks=(*split.remarks, remark))


def known_tags(sentence: Sentence) -> list[str]:
    """Returns a sentence's tags, without those of words that have none."""
    return [tag for tag in sentence.tags or () if tag != IGNORED]


def first_line(split: Split[Sentence], chosen: Callable[[str], bool]) -> int | None:
    """Finds the line with a file's first tag for which `chosen` is true; None if there is none."""
    tags = ((tag, line) for item in split.items for tag, line in zip(item.tags or (), item.lines, strict=False))
    return next((line for tag, line in tags if chosen(tag)), None)


def entities(tags: Sequence[str]) -> list[Span]:
    """The entities in a sentence's tags, by conlleval's rules. An S-X (unknown to conlleval) is one word."""
    return [Span(label, first, last + 1) for label, first, last in get_entities(list(tags))]


def entity_tags(spans: Sequence[Span], words: int, ends: bool) -> tuple[str, ...]:
    """IOB2 tags for entities without overlaps, in a sentence with `words` words; with ends, IOBES tags."""
    tags = ["O"] * words
    for label, first, last in spans:
        tags[first:last] = [_tag("I", label)] * (last - first)
        tags[first] = _tag("B", label)
        if ends:
            tags[last - 1] = _tag("S" if last - first == 1 else "E", label)
    return tuple(tags)


def closed_set(tags: Collection[str]) -> set[str]:
    """All tags for the types in these tags: in IOBES if a tag marks an end, else in IOB2."""
    types = {tag[2:] or UNTYPED for tag in tags if tag != "O"}
    return {"O"} | {_tag(mark, name) for name in types for mark in ("BIES" if structured.marks_ends(tags) else "BI")}


def irregular_tags(sentences: Sequence[Sequence[str]]) -> int:
    """Counts the tags in a file that cannot follow the previous one (or end their sentence) in its scheme.

    The scheme is IOBES if a tag marks an end. Otherwise it is IOB1 or IOB2, whichever the file breaks less often,
    because both use the same tags: in IOB2, an I-X must follow an X; in IOB1, a B-X must.
    """
    if structured.marks_ends({tag for tags in sentences for tag in tags}):
        return sum(structured.breaks_iobes(*pair) for tags in sentences for pair in pairwise(("O", *tags, "O")))
    # The end of a sentence breaks neither scheme.
    pairs = [pair for tags in sentences for pair in pairwise(("O", *tags))]
    return min(sum(breaks(*pair) for pair in pairs) for breaks in (structured.breaks_iob1, structured.breaks_iob2))


def _tag(mark: str, label: str) -> str:
    return mark if label == UNTYPED else f"{mark}-{label}"


class TagLabels(NamedTuple):
    """The value of TaskBatch.labels."""

    tags: Any  # i32[B,T]
    words: Any  # i32[B,T]: the number of the piece's word in its row, from 1, labelled or not; 0: no word
    whole: Any  # bool[B,2]: whether the row begins and ends where its sentence does


class TagAnswer(NamedTuple):
    """The predictions for a row, at the positions where words start."""

    tags: Any  # i32[T]: ids
    scores: Any  # f32[T]: their probabilities; with a CRF, that of all paths with this tag here


@dataclass(frozen=True)
class TagObjective(SoftClassObjective):
    """Cross-entropy for the tags of trained pieces (Devlin et al. 2019, section 5.3).

    With crf, the negative log-likelihood of a row's tags (Lample et al. 2016, section 2.2).
    """

    tags: int
    decode: str = "first"
    crf: bool = False
    costs: ClassCosts = PLAIN
    layer_mix: bool = False
    scheme: structured.Scheme | None = None  # of the tags of a crf; None: any tag may follow any other

    @property
    def heads(self) -> Heads:
        return Heads(tags=self.tags, crf=self.crf, layer_mix=self.layer_mix)

    def outputs(self, model: Bert, batch: TaskBatch, dropout_key: Array | None) -> Float[Array, "B T C"]:
        """Tag logits by position."""
        return tag_logits(model, encode_for_task(model, batch, dropout_key), dropout_key)

    def loss_terms(self, model: Bert, outputs: Float[Array, "B T C"], batch: TaskBatch) -> Terms:
        tags, weights = batch.labels.tags, batch.label_weights
        if self.crf:
            allowed = structured.allowed_by(self.scheme, batch.labels.whole)
            loss, correct = chain_sums(model.head("crf"), outputs, tags, weights, batch.sequence_ids, allowed)
        else:
            loss, correct = classification_sums(outputs, tags, weights, self.costs)
        return {"task": Term(loss, {"accuracy": correct})}

    def counts(self, batch: TaskBatch) -> Counts:
        # Class weights are part of the denominator, too (ClassCosts).
        return {"task": self.costs.weigh(batch.labels.tags, batch.label_weights).sum()}

    @property
    def has_soft_targets(self) -> bool:
        return not self.crf

    def answers(self, model: Bert, outputs: Float[Array, "B T C"], batch: TaskBatch) -> TagAnswer:
        """The predicted tag and its probability at each position, [B, T]."""
        words = batch.labels.words
        if self.crf:
            chain, allowed = model.head("crf"), structured.allowed_by(self.scheme, batch.labels.whole)
            # A word's first piece has another number than the position before it.
            first_pieces = (words > 0) & (words != jnp.pad(words[:, :-1], ((0, 0), (1, 0))))
            path, _ = chain.decode(outputs, first_pieces, batch.sequence_ids, allowed)
            # The derivative of the log-partition by a tag's logit is the probability of the tag there.
            marginals = jax.grad(
                lambda logits: chain.log_partition(logits, first_pieces, batch.sequence_ids, allowed).sum()
            )(outputs)
            return TagAnswer(path, jnp.take_along_axis(marginals, path[..., None], axis=-1)[..., 0])
        shares = jax.nn.softmax(outputs, axis=-1)
        if self.decode == "mean":  # at each position, over all positions of the same word
            same = (words[:, :, None] == words[:, None, :]).astype(shares.dtype)
            # In full float32: by default, TPUs multiply in bfloat16, which may change the best tag.
            sums = jnp.einsum("bts,bsc->btc", same, shares, precision=jax.lax.Precision.HIGHEST)
            shares = sums / same.sum(axis=-1, keepdims=True)
        return TagAnswer(shares.argmax(axis=-1).astype(jnp.int32), shares.max(axis=-1))


@dataclass(frozen=True)
class TaggingTask(TaggingOptions, LabelTask[Sentence, "TagRows"], WordTask["TagRows"]):
    """A tag for every word.

    label_subwords=first is as in Devlin et al. 2019, section 5.3, `all` as in Jurafsky and Martin, Speech and Language
    Processing, 3rd edition, "Sequence Labeling". decode=mean averages probabilities, not logarithms, as in
    aggregation_strategy="average" of Hugging Face's pipeline, so an export predicts the same tags and one confident
    piece cannot overrule all others. crf predicts the tags of a row jointly, from the words' first pieces (Lample et
    al. 2016); sequences that the scheme of entity tags does not allow have probability 0.
    """

    kind = "tagging"
    known_metrics = TAGGING_METRICS

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if not self.crf and self.crf_rate != TaggingOptions.crf_rate:
            raise UserError(
                f"task.crf_rate is {self.crf_rate}, but there is no CRF; leave it out, or set task.crf=True"
            )

    def is_label(self, written: str) -> bool:
        entity = structured.marks_entities(self.labels) and structured.ENTITY_TAG.fullmatch(written)
        return bool(entity) or written in {*self.labels, *self.label_map, IGNORED}

    def labels_in(self, split: Split[Sentence]) -> set[str]:
        return {tag for sentence in split.items for tag in known_tags(sentence)}

    def replace_labels(self, split: Split[Sentence], names: Mapping[str, str]) -> Split[Sentence]:
        items = (
            item._replace(tags=item.tags and tuple(names.get(tag, tag) for tag in item.tags)) for item in split.items
        )
        return replace(split, items=tuple(items))

    def read(self, path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
        """Reads CoNLL-U, CoNLL columns, or lists in JSON lines, Parquet and prepared data.

        BILOU and BMES tags become IOBES, and stray tags are corrected (with_entity_tags). Without label_required, a
        file whose tags are all empty or _ is read as unlabelled.

        Raises:
            UserError: A word has no tag, and tags are required. The message names the line.
        """
        # Before the letters are converted, because a single stray tag would hide that a file is in BILOU or BMES.
        split = with_entity_tags(
            self.choose_reader(path)(path, columns, label_required), {*self.labels, *self.label_map}
        )
        split = with_usual_letters(split)
        if not label_required:
            known = first_line(split, lambda tag: tag not in ("", "_", IGNORED)) is not None
            return replace(split, labelled=split.labelled and known)
        if (line := first_line(split, lambda tag: not tag)) is not None:
            raise UserError(f"{path} line {line}: a word has no tag, but others have one. Give it a tag, such as O")
        return split

    def complete(self, train: Split[Sentence]) -> Task:
        """Also sets the class weights.

        If all tags look like O, B-X, I-X, E-X or S-X, they mark entities: the label set then has all tags of the scheme
        for each type X, and the metrics are over entities. Labels are in the order in which the file names classes;
        others follow, sorted, O first.

        Raises:
            UserError: The file has fewer than two tags, or a metric compares entities and the tags mark none.
        """
        task = self
        if not task.labels:
            tags = self.labels_in(train)
            if len(tags) < 2:
                only = "".join(tags) or IGNORED
                raise UserError(f"{train.path}: every tag is {only!r}; is task.label the right column?")
            named = train.class_names if tags <= set(train.class_names) else ()
            if structured.marks_entities(tags):
                # A class that no word has and that is no entity tag is dropped; with it, the labels would no longer
                # mark entities.
                named = tuple(name for name in named if structured.marks_entities({*tags, name}))
                tags = closed_set({*tags, *named})
            others = sorted(tags - set(named), key=lambda tag: (tag != "O", tag))
            task = replace(task, labels=(*named, *others))
        entity_metrics = [name for name in task.metrics if name != "accuracy"]
        if entity_metrics and not structured.marks_entities(task.labels):
            raise UserError(
                f"task.metrics has {entity_metrics[0]!r}, which compares entities, but the tags of {train.path} mark "
                "none; use accuracy"
            )
        if task.class_weights:  # counted by words, however many pieces of each are trained
            weights = task.compute_class_weights(train, (task.labels[number] for number in task.label_ids(train)))
            task = replace(task, class_weight_values=weights)
        return super(TaggingTask, task).complete(train)

    def default_metrics(self) -> tuple[str, ...]:
        if structured.marks_entities(self.labels):
            return ("f1", "precision", "recall", "accuracy")
        return ("accuracy",)

    def encode(self, split: Split[Sentence], tokenizer: Tokenizer) -> "TagRows":
        """Rows of words (encode_words). Pieces that are trained to predict a tag weigh 1, others and IGNORED words 0.

        Entity tags are converted to the scheme of the task's labels. A tag that cannot follow the previous one is
        counted, and interpreted as in conlleval (entities).
        """
        split = self.split_raw(split, tokenizer)
        words = encode_words(split, tokenizer, self.max_length)
        labels, weights = np.zeros(len(words.input_ids), np.int32), np.zeros(len(words.input_ids), np.float32)
        irregular = 0
        if split.labelled:
            # The number of pieces of each word, from its first one, that have its tag as a target.
            trained_pieces = words.word_sizes if self.label_subwords == "all" else np.ones_like(words.word_sizes)
            tagged = _tagged(split)
            starts, trained_pieces = words.word_starts[tagged], trained_pieces[tagged]
            labels[spans(starts, trained_pieces)] = np.repeat(self.label_ids(split), trained_pieces)
            weights[spans(starts, trained_pieces)] = 1
            if structured.marks_entities(self.labels):
                # Words without a tag are left out, as in the metrics.
                irregular = irregular_tags([known_tags(sentence) for sentence in split.items])
        return TagRows(**vars(words), labels=labels, label_weights=weights, irregular_tags=irregular)

    def describe(self, rows: "TagRows", training: bool = False) -> Description:
        """Counts words, ignored_words without a tag, and irregular_tags: tags that cannot follow the previous one."""
        path, words = rows.split.path, len(rows.word_rows)
        counts, remarks = super().describe(rows, training)
        ignored = int((~_tagged(rows.split)).sum()) if rows.split.labelled else 0
        if ignored:
            remarks.append(f"{path}: {ignored} of {words} words have the label {IGNORED}, which stands for none")
        if rows.irregular_tags:
            remarks.append(
                f"{path}: {rows.irregular_tags} tags cannot follow the one before them (such as I-X after O); "
                "as in conlleval, such an I-X begins an entity"
            )
        counts |= {"words": words, "irregular_tags": rows.irregular_tags}
        return Description(counts | ({"ignored_words": ignored} if ignored else {}), remarks)

    def objective(self) -> TaskObjective:
        scheme = structured.recognize_scheme(self.labels) if self.crf else None
        return TagObjective(len(self.labels), self.decode, self.crf, self.costs, self.layer_mix, scheme)

    def measure(self, rows: "TagRows", answers: Sequence[TagAnswer]) -> dict[str, float]:
        """Computes the metrics from the predicted tag at each position.

        True entities are read from the file, even if the labels cannot tell adjacent ones apart.
        """
        true_tags = [list(self._in_scheme(known_tags(sentence))) for sentence in rows.split.items]
        predicted = [
            [tag for tag, label in zip(tags, sentence.tags or (), strict=True) if label != IGNORED]
            for tags, sentence in zip(rows.by_sentence(self._predicted(rows, answers)), rows.split.items, strict=True)
        ]
        return compute_metrics(TAGGING_METRICS, self.metrics, true_tags, predicted)

    def baseline(self, train: "TagRows", rows: "TagRows") -> tuple[str, dict[str, float]]:
        # One tag per word, however many of its pieces are trained.
        tags = train.labels[train.word_starts].astype(int)[train.label_weights[train.word_starts] > 0]
        most = int(np.bincount(tags, minlength=len(self.labels)).argmax())
        # One answer with the maximum length serves rows of any length.
        answer = TagAnswer(np.full(self.max_length, most), np.ones(self.max_length))
        return "majority tag", self.measure(rows, [answer] * rows.count)

    def predictions(self, rows: "TagRows", answers: Sequence[TagAnswer]) -> list[dict[str, Any]]:
        """`words`, `tags`, `tag_scores` (probabilities), and `offsets` of the words in a raw text.

        If the tags mark entities, also `entities`, scored by the mean probability of their words.
        """
        scores = rows.at_words([answer.scores for answer in answers]).astype(np.float64).tolist()
        objects = sentence_objects(rows, tags=self._predicted(rows, answers), tag_scores=scores)
        if structured.marks_entities(self.labels):
            for item, prediction in zip(rows.split.items, objects, strict=True):
                prediction["entities"] = [
                    span_object(item, span, float(np.mean(prediction["tag_scores"][span.first : span.end])))
                    for span in entities(prediction["tags"])
                ]
        return objects

    def label_ids(self, split: Split[Sentence]) -> list[int]:
        """Returns all tags' ids, in the scheme of the task's labels; if these lack a B-X, I-X replaces it."""
        ids = []
        for sentence in split.items:
            lines = [line for line, tag in zip(sentence.lines, sentence.tags or (), strict=True) if tag != IGNORED]
            for line, tag in zip(lines, self._in_scheme(known_tags(sentence)), strict=True):
                inside = "I" + tag[1:]
                known = tag in self.labels or tag[:1] != "B" or inside not in self.labels
                ids.append(self.label_value(split, line, tag if known else inside))
        return ids

    def _in_scheme(self, tags: Sequence[str]) -> Sequence[str]:
        """A sentence's tags in the scheme of the task's labels, if these mark entities.

        It is IOBES or IOB2; or IOB1 if the labels lack a B-X, as in models that were trained on IOB1.
        """
        if not structured.marks_entities(self.labels) or not all(map(structured.ENTITY_TAG.fullmatch, tags)):
            return tags
        converted = entity_tags(entities(tags), len(tags), structured.marks_ends(self.labels))
        if not structured.lacks_beginnings(self.labels):
            return converted
        # In IOB1, B-X only marks the beginning of an entity that follows another X at once.
        pairs = pairwise(("O", *converted))
        return tuple("I" + tag[1:] if structured.breaks_iob1(last, tag) else tag for last, tag in pairs)

    def _predicted(self, rows: "TagRows", answers: Sequence[TagAnswer]) -> list[str]:
        """The predicted tags, by word. With a CRF, each sentence's tags obey their scheme.

        A CRF covers one row. If a sentence continues in further rows, an entity may be open on one side only; the tags
        are then rewritten for the entities that conlleval reads in them.
        """
        tags = [self.labels[number] for number in rows.at_words([answer.tags for answer in answers])]
        if not self.crf or not structured.marks_entities(self.labels) or rows.whole.all():
            return tags
        return [tag for sentence_tags in rows.by_sentence(tags) for tag in self._in_scheme(sentence_tags)]


def _tagged(split: Split[Sentence]) -> Bool[np.ndarray, "W"]:
    """Whether each word of a labelled split has a tag."""
    return np.array([tag != IGNORED for sentence in split.items for tag in sentence.tags or ()], bool)


@dataclass(frozen=True, eq=False, kw_only=True)
class TagRows(LabelledWordRows):
    """Rows of words with one tag per word."""

    irregular_tags: int  # of the file

    @functools.cached_property
    def token_words(self) -> Int32[np.ndarray, "N"]:
        """The token's word, as a number in its row from 1; 0: no word."""
        # word_rows ascends, so searchsorted gives the first word of the row.
        numbers = np.arange(len(self.word_rows)) - np.searchsorted(self.word_rows, self.word_rows) + 1
        words = np.zeros(len(self.input_ids), np.int32)
        words[spans(self.word_starts, self.word_sizes)] = np.repeat(numbers, self.word_sizes)
        return words

    @functools.cached_property
    def whole(self) -> Bool[np.ndarray, "R 2"]:
        """Whether each row begins with the first word of its sentence, and ends with the last one."""
        # A row begins its sentence if the row before belongs to another one.
        sentences = self.items()
        return np.stack([np.diff(sentences, prepend=-1), np.diff(sentences, append=-1)], axis=1) != 0

    def targets(self, taken: Taken) -> tuple[TagLabels, Float32[np.ndarray, "B T"]]:
        tags, weights = super().targets(taken)
        words = np.where(taken.real, self.token_words[taken.tokens], 0).astype(np.int32)
        return TagLabels(tags, words, self.whole[taken.rows]), weights


# A baseline for taggers: the most frequent tag of each word.


@dataclass(frozen=True)
class Baseline:
    """The accuracies of the baseline; NaN for an accuracy over no words."""

    accuracy: float
    unknown_accuracy: float  # over the words that are not in the training file
    words: int
    unknown_words: int


def most_frequent_tag_baseline(train: Split[Sentence], test: Split[Sentence]) -> Baseline:
    """Tags each word with its most frequent tag in train, and unknown words with the most frequent of all.

    This is the baseline of Jurafsky and Martin, Speech and Language Processing, chapter on part-of-speech tagging.
    Words are compared as written; of equally frequent tags, the alphabetically first one is used.

    Raises:
        UserError: A file has no tags.
    """
    pairs = []
    for split in (train, test):
        if not split.labelled:
            raise UserError(f"{split.path} has no tags, which the baseline needs. Name a tagged file")
        tagged = (pair for item in split.items for pair in zip(item.words, item.tags or (), strict=True))
        pairs.append([pair for pair in tagged if pair[1] != IGNORED])
    by_word: dict[str, Counter[str]] = defaultdict(Counter)
    for word, tag in pairs[0]:
        by_word[word][tag] += 1

    def most_frequent(counts: Counter[str]) -> str:
        return min(counts, key=lambda tag: (-counts[tag], tag))

    best = {word: most_frequent(counts) for word, counts in by_word.items()}
    fallback = most_frequent(sum(by_word.values(), Counter()))
    correct = [best.get(word, fallback) == tag for word, tag in pairs[1]]
    unknown = [is_correct for is_correct, (word, _) in zip(correct, pairs[1], strict=True) if word not in best]
    mean_unknown = sum(unknown) / len(unknown) if unknown else float("nan")
    return Baseline(sum(correct) / len(correct), mean_unknown, len(correct), len(unknown))
