"""Reads words, spans and relations between spans from JSON lines or Parquet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.tasks.example import Relation, Span, SpannedSentence, Split
from bert_jax.tasks.reading.columns import Column, Columns
from bert_jax.tasks.reading.tables import is_stored, read_records

SPAN = 'an object like {"start": 0, "end": 2, "label": "PER"}: word indices from 0, the end exclusive'
RELATION = 'an object like {"head": 0, "tail": 1, "label": "works_for"}: indices of spans, from 0'


def read_spans(path: Path, columns: Columns, label_required: bool, relations: bool) -> Split[SpannedSentence]:
    """Reads sentences of `tokens` with `spans` and, for relations, `relations`, unless columns name the first two.

    A file is labelled if it has spans or, where relations are read, relations. Raises UserError, with file and line,
    for a file of another kind, a missing column that is required, and a malformed span or relation.
    """
    if not is_stored(path):
        raise UserError(
            f"{path}: spans are read from .jsonl or .parquet (non-nested ones also from .conll). Convert the file"
        )
    tokens, spans = columns.text or "tokens", columns.label or "spans"
    requested = [
        Column(tokens, "text"),
        Column(spans, "label", required=label_required),
        Column("relations", "label", required=label_required and relations),
    ]
    found = read_records(path, requested)
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
    return Split(path, tuple(items), found.present[2 if relations else 1])


def checked_spans(where: str, values: Any, words: int) -> tuple[Span, ...]:
    """The spans of a sentence of `words` words, from their JSON values. Raises UserError that begins with `where`."""
    if not isinstance(values, list):
        raise UserError(f"{where} is {values!r:.60}; expected a list of spans, each {SPAN}")
    return tuple(_span(f"{where}[{place}]", one, words) for place, one in enumerate(values))


def _relations(where: str, values: Any, spans: int) -> tuple[Relation, ...]:
    if not isinstance(values, list):
        raise UserError(f"{where} is {values!r:.60}; expected a list of relations, each {RELATION}")
    return tuple(_relation(f"{where}[{place}]", one, spans) for place, one in enumerate(values))


def _span(where: str, value: Any, words: int) -> Span:
    if not isinstance(value, Mapping):
        raise UserError(f"{where} is {value!r:.60}; expected {SPAN}")
    first, end, label = _fields(value, "start", "end", "label")
    if not _is_int(first) or not _is_int(end) or not (label is None or isinstance(label, str)):
        raise UserError(f"{where} is {value!r:.80}; expected {SPAN}")
    if not 0 <= first < end <= words:
        raise UserError(f"{where} is from word {first} to {end}, but the sentence has {words} words. Correct it")
    return Span(label or "", first, end)


def _relation(where: str, value: Any, spans: int) -> Relation:
    if not isinstance(value, Mapping):
        raise UserError(f"{where} is {value!r:.60}; expected {RELATION}")
    head, tail, label = _fields(value, "head", "tail", "label")
    if not _is_int(head) or not _is_int(tail) or not isinstance(label, str) or not label:
        raise UserError(f"{where} is {value!r:.80}; expected {RELATION}")
    if not (0 <= head < spans and 0 <= tail < spans) or head == tail:
        raise UserError(
            f"{where} is from span {head} to {tail}; expected the indices of two different spans (the line has {spans})"
        )
    return Relation(label, head, tail)


def _fields(value: Mapping[str, Any], *names: str) -> list[Any]:
    return [value.get(name) for name in names]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
