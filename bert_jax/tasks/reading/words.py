"""Reads sentences of labelled words: CoNLL columns, CoNLL-U, and lists in each record."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.tasks.reading import tables
from bert_jax.tasks.reading.inputs import InputRecord, sentences_of
from bert_jax.tasks.reading.tables import Column, Columns, numbered_lines, place_of, read_records
from bert_jax.tasks.rows import LabelledWordRows, Sentence, Span, SpannedSentence, Split
from bert_jax.tasks.task import Rows, Task

# Reads CoNLL columns and CoNLL-U.


# The columns of CoNLL-U: https://universaldependencies.org/format.html
CONLLU_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
# Marks the start of a document in the CoNLL-2003 files; it is not a sentence.
DOCUMENT_MARK = "-DOCSTART-"

Group = list[tuple[int, list[str]]]  # the line and the fields of each word of a sentence


def read_conllu(path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
    """Reads CoNLL-U: words from FORM and tags from UPOS, unless columns names others.

    Lines of multiword tokens (1-2) and empty nodes (1.1) are not words and are skipped. Raises UserError for a line
    without the ten columns, an unknown column name, and a file without words.
    """
    groups: list[Group] = [[]]
    for number, line in numbered_lines(path):
        if not line.strip():
            groups.append([])
        elif not line.startswith("#"):
            fields = line.split("\t")
            if len(fields) != len(CONLLU_COLUMNS):
                raise UserError(
                    f"{path} line {number} has {len(fields)} tab-separated fields; a word of CoNLL-U has "
                    f"{len(CONLLU_COLUMNS)} (https://universaldependencies.org/format.html)"
                )
            if fields[0].isdigit():
                groups[-1].append((number, fields))
    _check_words(path, groups)
    names, width = list(CONLLU_COLUMNS), len(CONLLU_COLUMNS)
    word_column = place_of(path, names, width, columns.text or "FORM", "text")
    tag_column = place_of(path, names, width, columns.label or "UPOS", "label")
    return _sentences(path, groups, word_column, tag_column)


def read_conll(path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
    """Reads CoNLL columns: one word on each line, columns separated by tabs or spaces, blank lines between sentences.

    Words are in column 0 and tags in the last column, unless columns gives other numbers; -DOCSTART- lines
    are skipped. Without label_required, a file of one column is read as unlabelled. Raises UserError for a
    line whose number of columns differs from that of the first line, a missing column, and a file without words.
    """
    groups: list[Group] = [[]]
    width = 0
    for number, line in numbered_lines(path):
        if not line.strip():
            groups.append([])
            continue
        fields = line.split("\t") if "\t" in line else [field for field in line.split(" ") if field]
        width = width or len(fields)
        if len(fields) != width:
            raise UserError(
                f"{path} line {number} has {len(fields)} columns, but the first line has {width}. Correct the line"
            )
        if fields[0] != DOCUMENT_MARK:
            groups[-1].append((number, fields))
    _check_words(path, groups)
    word_column = place_of(path, [], width, columns.text or "0", "text")
    if width == 1 and not label_required:
        return _sentences(path, groups, word_column, None)
    tag_column = place_of(path, [], width, columns.label or "-1", "label")
    if width == 1:
        raise UserError(f"{path} has one column; expected two or more, for words and tags, separated by tabs or spaces")
    return _sentences(path, groups, word_column, tag_column)


def _check_words(path: Path, groups: list[Group]) -> None:
    if not any(groups):
        raise UserError(f"{path} contains no words; expected one word on each line and a blank line between sentences")


def _sentences(path: Path, groups: list[Group], word_column: int, tag_column: int | None) -> Split[Sentence]:
    items = tuple(
        Sentence(
            words=tuple(fields[word_column] for _, fields in group),
            tags=None if tag_column is None else tuple(fields[tag_column] for _, fields in group),
            lines=tuple(number for number, _ in group),
        )
        for group in groups
        if group
    )
    return Split(path, items, tag_column is not None)


# Reads words and their labels from two lists in each example (`tokens` and `labels` in Hugging Face's data sets).


def read_word_lists(path: Path, columns: Columns, label_required: bool, labels: Sequence[str] = ()) -> Split[Sentence]:
    """Reads sentences from JSON lines, Parquet or prepared data.

    The words are in column text (default `tokens`), their labels in column label (default `labels`). Labels become
    texts: null an empty one, and the number of a class its name where the file gives it, or the label with this index
    in `labels` unless these are numbers; -1 is no class. Without label_required, a file without the label column, or
    whose values there are all null or empty lists, is read as unlabelled. Raises UserError, with file and line, for a
    value that is not a list of words, and for a list of labels of another length than the list of words.
    """
    requested = [
        Column(columns.text or "tokens", "text"),
        Column(columns.label or "labels", "label", required=label_required),
    ]
    found = read_records(path, requested)
    labelled = label_required or any(not _is_withheld(record.values[1]) for record in found.records)
    items = []
    numbered = any(label.removeprefix("-").isdecimal() for label in labels)
    names = found.class_names[1] or (() if numbered else labels)
    for line, (words, of_words) in found.records:
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise UserError(f"{path} line {line}: {requested[0].name} is {words!r:.60}; expected a list of words")
        tags = None
        if labelled:
            if not isinstance(of_words, list) or len(of_words) != len(words):
                got = f"has {len(of_words)} labels" if isinstance(of_words, list) else f"is {of_words!r:.40}"
                raise UserError(
                    f"{path} line {line}: {requested[1].name} {got}; expected a list of {len(words)}, one for each word"
                )
            tags = tuple(_written(label, names) for label in of_words)
        items.append(Sentence(tuple(words), tags, (line,) * len(words)))
    return Split(path, tuple(items), labelled, class_names=found.class_names[1] if labelled else ())


def _is_withheld(labels: Any) -> bool:
    return labels is None or (isinstance(labels, list) and not labels)


def _written(label: Any, names: Sequence[str]) -> str:
    if isinstance(label, int) and 0 <= label < len(names):
        return names[label]
    if label is None or (names and label == -1):
        return ""
    return label.strip() if isinstance(label, str) else repr(label)


# What the kinds that label words share: reading and parsing sentences, and the objects of their predictions.


SentenceReader = Callable[[Path, Columns, bool], Split[Sentence]]


@dataclass(frozen=True)
class WordTask(Task[Sentence, Rows]):
    """A task with a label for every word."""

    unread_columns = ("text_pair", "marks")

    @property
    def numbered_labels(self) -> tuple[str, ...]:
        """The labels that numbers in JSON lines, Parquet and prepared data stand for."""
        return ()

    def reader_of(self, path: Path) -> SentenceReader:
        """The reader for a file, by its name: CoNLL-U, CoNLL columns, or lists in JSON lines, Parquet and prepared
        data."""
        if tables.is_stored(path):
            return functools.partial(read_word_lists, labels=self.numbered_labels)
        return read_conllu if tables.kind_of_file(path) == "conllu" else read_conll

    def parse(self, source: Path, records: Sequence[InputRecord]) -> Split[Sentence]:
        """Sentences of the given words, or of the words of raw texts."""
        return sentences_of(source, records, self.columns.text)


def sentence_objects(rows: LabelledWordRows, **values: Sequence[Any]) -> list[dict[str, Any]]:
    """The prediction for each sentence: `words`, the values of its words, and their `offsets` in a raw text.

    values has one value for each word of the file.
    """
    found = []
    for item, *parts in zip(rows.split.items, *map(rows.by_sentence, values.values()), strict=True):
        one = {"words": list(item.words)} | {name: list(part) for name, part in zip(values, parts, strict=True)}
        if item.offsets is not None:
            one["offsets"] = [list(place) for place in item.offsets]
        found.append(one)
    return found


def span_object(sentence: Sentence | SpannedSentence, span: Span, score: float) -> dict[str, Any]:
    """A predicted span of a sentence: `type`, `text`, `score`, `words` [first, end), and `start` and `end`, characters
    of the raw text, where there is one."""
    one = {"type": span.label, "text": " ".join(sentence.words[span.first : span.end]), "score": score}
    if sentence.text is not None and sentence.offsets is not None:
        start, end = sentence.offsets[span.first][0], sentence.offsets[span.end - 1][1]
        one |= {"text": sentence.text[start:end], "start": start, "end": end}
    return one | {"words": [span.first, span.end]}
