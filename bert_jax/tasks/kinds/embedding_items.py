"""Reads the pairs and groups of texts that vectors are trained and measured on."""

from pathlib import Path
from typing import NamedTuple

from bert_jax.command import UserError
from bert_jax.tasks.example import Split
from bert_jax.tasks.kinds.labels import parse_number
from bert_jax.tasks.metric_functions import LARGEST
from bert_jax.tasks.reading import Column, Columns, is_stored
from bert_jax.tasks.reading.labelled_texts import is_missing, read_labelled, text_of


class TextGroup(NamedTuple):
    """An anchor, its positive and hard negatives (an empty one is absent), and the score of a pair."""

    texts: tuple[str, ...]
    score: float | None
    line: int  # in the file, from 1


def read_groups(path: Path, columns: Columns, negatives: str) -> Split[TextGroup]:
    """Reads pairs of a table (reading.read_records) from the columns text and text_pair, with their scores.

    A file without the label column has no scores. negatives names columns of hard negatives, separated by commas, or
    one column that holds a text or a list of texts (JSON lines and Parquet); a file without them has pairs. The split
    is labelled in any case: a pair is its own target. Raises UserError, with file and line, for an empty anchor or
    positive, and a score that is missing or no number.
    """
    if not columns.text_pair:
        raise UserError(f"task.text_pair is not set; name the column of {path} that holds the second text of each pair")
    names = [name.strip() for name in negatives.split(",")] if negatives else []
    others = [Column(name, "negatives", required=False) for name in names]
    found, scored = read_labelled(path, columns, others, label_required=False)
    there = found.present[-len(names) :] if names else ()
    if any(there) and not all(there):
        missing = names[there.index(False)]
        raise UserError(f"{path} has no column {missing!r}, but others of task.negatives. Correct the name")
    items = []
    for line, (text, text_pair, label, *hard) in found.records:
        where = f"{path} line {line}"
        pair = text_of(where, text), text_of(where, text_pair)
        if not all(one.strip() for one in pair):
            raise UserError(f"{where} has an empty text. Write both texts of the pair, or remove the line")
        if len(names) == 1 and is_stored(path) and isinstance(hard[0], list):
            hard = hard[0]
        texts = (*pair, *(text_of(f"{where}: negatives", one).strip() for one in hard))
        items.append(TextGroup(texts, _score(where, label) if scored else None, line))
    return Split(path, tuple(items), labelled=True, left_out=found.left_out)


def _score(where: str, label: object) -> float:
    value = float("nan") if is_missing(label) else parse_number(str(label))
    if not abs(value) <= LARGEST:
        raise UserError(f"{where}: {label!r} is not a score; expected a number. Correct the line or task.label")
    return value
