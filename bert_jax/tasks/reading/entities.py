"""Reads entities that are given by their characters, as spaCy, doccano, Prodigy, Label Studio and Argilla write them.

`mark_entities` splits a text into words, as predict does, and finds the words of its entities.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bert_jax.errors import UserError
from bert_jax.tasks.reading.inputs import split_text
from bert_jax.tasks.rows import Span

STARTS, ENDS = ("start", "start_offset", "start_char"), ("end", "end_offset", "end_char")
LABELS = ("label", "labels", "type", "entity", "entity_group", "tag")
EXPECTED = '[start, end, "LABEL"] or {"start": 0, "end": 7, "label": "PER"}: characters from 0, the end exclusive'


class MarkedText(NamedTuple):
    """A text's words, and its entities as spans of words."""

    words: tuple[str, ...]
    offsets: tuple[tuple[int, int], ...]  # of each word, the characters [start, end)
    spans: tuple[Span, ...]
    widened: int  # entities that begin or end inside a word, of which the whole words are marked


def mark_entities(place: str, text: str, entities: Any) -> MarkedText:
    """Splits a text into words, and finds the words of its entities.

    Args:
        place: The file, line and column, for messages.
        entities: A list of EXPECTED, or Label Studio's results.

    Raises:
        UserError: An entity is malformed, is not in the text, or holds no word, or the text it gives is not at its
            characters.
    """
    offsets = split_text(text)
    if not isinstance(entities, list):
        raise UserError(f"{place} is {entities!r:.60}; expected a list of entities, each {EXPECTED}")
    spans, widened = [], 0
    for number, entity in enumerate(entities):
        start, end, label = _entity(f"{place}[{number}]", text, entity)
        inside = [word for word, (first, last) in enumerate(offsets) if first < end and start < last]
        if not inside:
            raise UserError(f"{place}[{number}] is {text[start:end]!r:.40}, which holds no word. Correct it")
        spans.append(Span(label, inside[0], inside[-1] + 1))
        widened += start > offsets[inside[0]][0] or end < offsets[inside[-1]][1]
    words = tuple(text[first:last] for first, last in offsets)
    return MarkedText(words, tuple(offsets), tuple(spans), widened)


def _entity(place: str, text: str, entity: Any) -> tuple[int, int, str]:
    """An entity's characters [start, end), and its label."""
    written = ""
    if isinstance(entity, list) and len(entity) >= 3:
        # The label is the last of three values, as in spaCy and doccano, or the first one, as in Argilla.
        values = entity[:3] if isinstance(entity[2], str) else [*entity[1:3], entity[0]]
    else:
        fields = entity if isinstance(entity, Mapping) else {}
        fields = fields["value"] if isinstance(fields.get("value"), Mapping) else fields  # of Label Studio
        values = [next((fields[key] for key in keys if key in fields), None) for keys in (STARTS, ENDS, LABELS)]
        written = fields.get("text") or ""
    start, end, label = values
    # Label Studio writes a list of labels, even for a single one.
    label = label[0] if isinstance(label, list) and len(label) == 1 else label
    # isinstance would take true and false for integers.
    if type(start) is not int or type(end) is not int or not isinstance(label, str) or not label.strip():
        raise UserError(f"{place} is {entity!r:.80}; expected {EXPECTED}")
    if not 0 <= start < end <= len(text):
        raise UserError(f"{place} is characters {start} to {end}, but the text has {len(text)} characters. Correct it")
    if written and isinstance(written, str) and written != text[start:end]:
        raise UserError(
            f"{place} is {text[start:end]!r:.40} by its characters, but {written!r:.40} by its text. Offsets count "
            "characters (code points), not bytes or UTF-16 units; correct them"
        )
    return start, end, label.strip()


def entity_tags(spans: Sequence[Span], words: int) -> tuple[tuple[str, ...], int]:
    """Tags a sentence's words (B-X, I-X, O); also returns how many entities overlap longer ones and are left out."""
    tags, lost = ["O"] * words, 0
    # The longest entities come first, so of two that overlap the outer one is kept.
    for span in sorted(spans, key=lambda span: (span.first - span.end, span.first)):
        if any(tag != "O" for tag in tags[span.first : span.end]):
            lost += 1
            continue
        tags[span.first : span.end] = [f"B-{span.label}", *[f"I-{span.label}"] * (span.end - span.first - 1)]
    return tuple(tags), lost


def entity_remarks(widened: int, lost: int = 0) -> tuple[str, ...]:
    """Remarks about entities that words or tags cannot hold."""
    remarks = {
        f"{widened} entities begin or end inside a word; the whole words are marked": widened,
        f"{lost} entities overlap longer ones, and a word has one tag, so they are left out (the kind spans holds "
        "all)": lost,
    }
    return tuple(remark for remark, count in remarks.items() if count)
