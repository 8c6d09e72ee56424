"""Words and what is said of each, as two lists an example (`tokens` and `labels` in Hugging Face's data sets)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.tasks.example import Sentence, Split
from bert_jax.tasks.reading.columns import Column, Columns
from bert_jax.tasks.reading.tables import read_records


def read_word_lists(path: Path, columns: Columns, label_required: bool) -> Split[Sentence]:
    """Reads sentences of JSON lines, Parquet or prepared data: the words in column text (`tokens` unless it is named),
    what is said of them in column label (`labels`), as texts; null is an empty one, and the number of a class its name
    where the file tells it.

    Without label_required a file that lacks the label column is read as unlabelled. Raises UserError, with file and
    line, for what is no list of words, and for as many labels as there are no words.
    """
    wanted = [
        Column(columns.text or "tokens", "text"),
        Column(columns.label or "labels", "label", required=label_required),
    ]
    found = read_records(path, wanted)
    items = []
    for line, (words, labels) in found.records:
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            raise UserError(f"{path} line {line}: {wanted[0].name} is {words!r:.60}; wanted a list of words")
        tags = None
        if found.present[1]:
            if not isinstance(labels, list) or len(labels) != len(words):
                count = f"{len(labels)} labels" if isinstance(labels, list) else f"no list of labels ({labels!r:.40})"
                raise UserError(f"{path} line {line} has {count} for {len(words)} words in {wanted[1].name}")
            tags = tuple(_written(label, found.class_names[1]) for label in labels)
        items.append(Sentence(tuple(words), tags, (line,) * len(words)))
    return Split(path, tuple(items), found.present[1])


def _written(label: Any, names: Sequence[str]) -> str:
    if isinstance(label, int) and 0 <= label < len(names):
        return names[label]
    return "" if label is None else label.strip() if isinstance(label, str) else repr(label)
