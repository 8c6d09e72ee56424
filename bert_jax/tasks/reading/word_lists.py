"""Reads words and their labels from two lists in each example (`tokens` and `labels` in Hugging Face's data sets)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.tasks.example import Sentence, Split
from bert_jax.tasks.reading.columns import Column, Columns
from bert_jax.tasks.reading.tables import read_records


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
