"""Decodes tags that mark entities (IOB1, IOB2 or BIO, IOBES), and counts tags that break their scheme.

Entities are defined as in conlleval, the script of the CoNLL shared tasks (Tjong Kim Sang and De Meulder 2003). It
reads all of these schemes and any sequence of their tags: an I-X that does not follow an X also begins an entity. Files
with a single type of entity may omit the type (B, I, O); the type is then UNTYPED.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from seqeval.metrics.sequence_labeling import get_entities

from bert_jax.model.heads.tag_scheme import (
    ENTITY_TAG,
    breaks_iob1,
    breaks_iob2,
    breaks_iobes,
    lacks_beginnings,
    marks_ends,
    marks_entities,
)
from bert_jax.tasks.example import Sentence, Span, Split

__all__ = [
    "ENTITY_TAG",
    "UNTYPED",
    "closed_set",
    "entities",
    "first_line",
    "iob1",
    "irregular_tags",
    "lacks_beginnings",
    "marks_ends",
    "marks_entities",
    "tags_of",
    "with_usual_letters",
]

UNTYPED = "_"  # as in seqeval
# IOBES with other letters (last, unit; middle), for typed tags.
_OTHER_LETTERS = (re.compile(r"O|[BILU]-.+"), re.compile(r"O|[BMES]-.+"))
_USUAL = {"L": "E", "U": "S", "M": "I"}


def with_usual_letters(split: Split[Sentence]) -> Split[Sentence]:
    """Converts BILOU and BMES tags to IOBES; other files are unchanged."""
    tags = {tag for item in split.items for tag in item.tags or ()}
    if not any(tag[:1] in _USUAL for tag in tags) or not any(all(map(one.fullmatch, tags)) for one in _OTHER_LETTERS):
        return split
    items = (item._replace(tags=item.tags and tuple(map(_usual, item.tags))) for item in split.items)
    return replace(split, items=tuple(items), class_names=tuple(map(_usual, split.class_names)))


def _usual(tag: str) -> str:
    return _USUAL.get(tag[0], tag[0]) + tag[1:] if tag[1:2] == "-" else tag


def first_line(split: Split[Sentence], chosen: Callable[[str], bool]) -> int | None:
    """The line of the first tag of a file for which `chosen` is true; None if there is none."""
    tags = ((tag, line) for item in split.items for tag, line in zip(item.tags or (), item.lines, strict=False))
    return next((line for tag, line in tags if chosen(tag)), None)


def entities(tags: Sequence[str]) -> list[Span]:
    """The entities that a sentence's tags mark, by conlleval's rules. An S-X (unknown to conlleval) is one word."""
    return [Span(label, first, last + 1) for label, first, last in get_entities(list(tags))]


def tags_of(found: Sequence[Span], words: int, ends: bool) -> tuple[str, ...]:
    """IOB2 tags of entities that do not overlap, in a sentence of `words` words; with ends, IOBES tags."""
    tags = ["O"] * words
    for label, first, last in found:
        tags[first:last] = [_tag("I", label)] * (last - first)
        tags[first] = _tag("B", label)
        if ends:
            tags[last - 1] = _tag("S" if last - first == 1 else "E", label)
    return tuple(tags)


def iob1(tags: Sequence[str]) -> tuple[str, ...]:
    """IOB1 tags of IOB2 tags: B-X only marks the beginning of an entity that follows another X at once."""
    pairs = pairwise(("O", *tags))
    return tuple("I" + tag[1:] if breaks_iob1(last, tag) else tag for last, tag in pairs)


def closed_set(tags: Collection[str]) -> set[str]:
    """All tags of the scheme for the types of these tags: IOBES if a tag marks an end, else IOB2."""
    types = {tag[2:] or UNTYPED for tag in tags if tag != "O"}
    return {"O"} | {_tag(mark, name) for name in types for mark in ("BIES" if marks_ends(tags) else "BI")}


def irregular_tags(sentences: Sequence[Sequence[str]]) -> int:
    """How many tags of a file cannot follow the one before them (or end their sentence) in the file's scheme.

    The scheme is IOBES if a tag marks an end. Otherwise it is IOB1 or IOB2, whichever the file breaks less often,
    because both use the same tags: in IOB2, an I-X must follow an X; in IOB1, a B-X must.
    """
    if marks_ends({tag for tags in sentences for tag in tags}):
        return sum(breaks_iobes(*pair) for tags in sentences for pair in pairwise(("O", *tags, "O")))
    pairs = [pair for tags in sentences for pair in pairwise(("O", *tags))]
    return min(sum(breaks(*pair) for pair in pairs) for breaks in (breaks_iob1, breaks_iob2))


def _tag(mark: str, label: str) -> str:
    return mark if label == UNTYPED else f"{mark}-{label}"
