"""Tags that mark entities: IOB1, IOB2 (BIO), IOBES; the entities that they mark, and tags that cannot follow.

What an entity is follows conlleval, the script of the CoNLL shared tasks (Tjong Kim Sang and De Meulder 2003), which
reads any of the schemes, and any sequence of their tags: an I-X that follows no X begins an entity, too. Where there is
one type of entity only, files may leave it out (B, I, O): it is then called UNTYPED.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from seqeval.metrics.sequence_labeling import get_entities

from bert_jax.tasks.example import Sentence, Span, Split

# Outside, or beginning, inside, ending or alone an entity, typed or not.
ENTITY_TAG = re.compile(r"O|[BIES](-.+)?")
UNTYPED = "_"  # as seqeval has it
# IOBES under other letters (last, unit; middle), of typed tags.
_OTHER_LETTERS = (re.compile(r"O|[BILU]-.+"), re.compile(r"O|[BMES]-.+"))
_USUAL = {"L": "E", "U": "S", "M": "I"}


def with_usual_letters(split: Split[Sentence]) -> Split[Sentence]:
    """The file, of BILOU or BMES tags with IOBES's letters; any other as it is."""
    tags = {tag for item in split.items for tag in item.tags or ()}
    if not any(tag[:1] in _USUAL for tag in tags) or not any(all(map(one.fullmatch, tags)) for one in _OTHER_LETTERS):
        return split
    usual = {tag: _USUAL.get(tag[0], tag[0]) + tag[1:] for tag in tags}
    items = (item._replace(tags=item.tags and tuple(usual[tag] for tag in item.tags)) for item in split.items)
    return replace(split, items=tuple(items))


def marks_entities(tags: Collection[str]) -> bool:
    """Whether tags mark entities (O, B-X, I-X ...) and are no plain classes.

    Those without types do where they hold O, and B or I: other sets of such letters are of classes.
    """
    bare = any(len(tag) == 1 for tag in tags if tag != "O")
    if bare and not ("O" in tags and {"B", "I"} & set(tags)):
        return False
    return any(tag != "O" for tag in tags) and all(ENTITY_TAG.fullmatch(tag) for tag in tags)


def first_line(split: Split[Sentence], chosen: Callable[[str], bool]) -> int | None:
    """The line of the first tag of a file that is chosen; None where none is."""
    tags = ((tag, line) for item in split.items for tag, line in zip(item.tags or (), item.lines, strict=False))
    return next((line for tag, line in tags if chosen(tag)), None)


def marks_ends(tags: Collection[str]) -> bool:
    """Whether entity tags are IOBES: the last word of an entity is told from those before it."""
    return any(tag[:1] in ("E", "S") for tag in tags)


def entities(tags: Sequence[str]) -> list[Span]:
    """The entities that a sentence's tags mark, by conlleval's rules (and S-X, which it does not know, alone)."""
    return [Span(label, first, last + 1) for label, first, last in get_entities(list(tags))]


def tags_of(found: Sequence[Span], words: int, ends: bool) -> tuple[str, ...]:
    """IOB2 tags of entities that do not overlap, in a sentence of so many words; with ends, IOBES tags."""
    tags = ["O"] * words
    for label, first, last in found:
        tags[first:last] = [_tag("I", label)] * (last - first)
        tags[first] = _tag("B", label)
        if ends:
            tags[last - 1] = _tag("S" if last - first == 1 else "E", label)
    return tuple(tags)


def closed_set(tags: Collection[str]) -> set[str]:
    """All tags of the scheme for the types that these tags have: IOBES where one ends an entity, else IOB2."""
    types = {tag[2:] or UNTYPED for tag in tags if tag != "O"}
    return {"O"} | {_tag(mark, name) for name in types for mark in ("BIES" if marks_ends(tags) else "BI")}


def irregular_tags(sentences: Sequence[Sequence[str]]) -> int:
    """How many tags of a file cannot follow the one before them (or end their sentence) in the file's scheme.

    IOBES where a tag ends an entity; else IOB1 or IOB2, whichever the file breaks less often, since both are written
    with the same tags: in IOB2 an I-X follows an X, in IOB1 a B-X does.
    """
    if marks_ends({tag for tags in sentences for tag in tags}):
        return sum(_breaks_iobes(*pair) for tags in sentences for pair in pairwise(("O", *tags, "O")))
    pairs = [pair for tags in sentences for pair in pairwise(("O", *tags))]
    breaks = [tag for last, tag in pairs if last == "O" or last[2:] != tag[2:]]
    return min(sum(tag[0] == mark for tag in breaks) for mark in "IB")


def _breaks_iobes(last: str, tag: str) -> bool:
    goes_on = last[0] in "BI"
    return goes_on != (tag[0] in "IE") or (goes_on and last[2:] != tag[2:])


def _tag(mark: str, label: str) -> str:
    return mark if label == UNTYPED else f"{mark}-{label}"
