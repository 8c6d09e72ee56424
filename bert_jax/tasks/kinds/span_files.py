"""Reads words, spans and relations between spans from JSON lines or Parquet."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.tasks.example import Relation, Span, SpannedSentence, Split
from bert_jax.tasks.reading.columns import Column, Columns
from bert_jax.tasks.reading.tables import is_stored, read_records

SPAN = 'an object like {"start": 0, "end": 2, "label": "PER"}: word indices from 0, the end exclusive'
RELATION = 'an object like {"head": 0, "tail": 1, "label": "works_for"}: indices of spans, from 0'


def read_spans(
    path: Path, columns: Columns, label_required: bool, relations: bool, spans_required: bool = False
) -> Split[SpannedSentence]:
    """Reads sentences of `tokens` with `spans` and, for relations, `relations`, unless columns name the first two.

    A file is labelled if it has spans or, where relations are read, relations, and not null alone. With spans_required
    it must have spans, also where labels need not be there: they are part of the input. Raises UserError, with file and
    line, for a file of another kind, missing labels or columns that are required, and a malformed span or relation.
    """
    if not is_stored(path):
        raise UserError(
            f"{path}: spans are read from .jsonl or .parquet (non-nested ones also from .conll). Convert the file"
        )
    tokens, spans = columns.text or "tokens", columns.label or "spans"
    requested = [
        Column(tokens, "text"),
        Column(spans, "label", required=label_required or spans_required),
        Column("relations", "label", required=label_required and relations),
    ]
    found = read_records(path, requested)
    deciding = 2 if relations else 1
    labelled = any(record.values[deciding] is not None for record in found.records)
    if label_required and not labelled:
        raise UserError(f"{path} has no labels: column {requested[deciding].name!r} is null throughout")
    items = []
    for number, (words, span_values, relation_values) in found.records:
        where = f"{path} line {number}"
        if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
            raise UserError(
                f"{where}: {tokens} is {words!r:.60}; expected a list of words, each a text that is not empty"
            )
        of_words = checked_spans(f"{where}: {spans}", span_values or [], len(words))
        between = _relations(f"{where}: relations", relation_values or [], len(of_words))
        items.append(SpannedSentence(tuple(words), of_words, between, number))
    return Split(path, tuple(items), labelled)


def checked_spans(where: str, values: Any, words: int) -> tuple[Span, ...]:
    """The spans of a sentence of `words` words, from their JSON values. Raises UserError that begins with `where`."""
    found = []
    for place, first, end, label in _listed(where, values, "spans", SPAN, ("start", "end", "label")):
        if not 0 <= first < end <= words:
            raise UserError(f"{place} is from word {first} to {end}, but the sentence has {words} words. Correct it")
        found.append(Span(label, first, end))
    return tuple(found)


def _relations(where: str, values: Any, spans: int) -> tuple[Relation, ...]:
    found = []
    for place, head, tail, label in _listed(where, values, "relations", RELATION, ("head", "tail", "label")):
        if not (0 <= head < spans and 0 <= tail < spans) or head == tail:
            raise UserError(
                f"{place} is from span {head} to {tail}; expected the indices of two different spans (the line has "
                f"{spans})"
            )
        found.append(Relation(label, head, tail))
    return tuple(found)


def _listed(
    where: str, values: Any, what: str, expected: str, names: tuple[str, str, str]
) -> Iterator[tuple[str, int, int, str]]:
    """Where each object of a list is, and its fields of these names: two indices and a label.

    The label of a span may be missing.
    """
    if not isinstance(values, list):
        raise UserError(f"{where} is {values!r:.60}; expected a list of {what}, each {expected}")
    for number, value in enumerate(values):
        place = f"{where}[{number}]"
        first, second, label = map(value.get, names) if isinstance(value, Mapping) else (None,) * 3
        has_label = (isinstance(label, str) and label != "") or (what == "spans" and label in (None, ""))
        if type(first) is not int or type(second) is not int or not has_label:
            raise UserError(f"{place} is {value!r:.80}; expected {expected}")
        yield place, first, second, label or ""
