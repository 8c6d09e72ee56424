"""Tags that mark entities (IOB1, IOB2 or BIO, IOBES): decodes, corrects and checks them.

Entities are defined as in conlleval, the script of the CoNLL shared tasks (Tjong Kim Sang and De Meulder 2003). It
reads all of these schemes and any sequence of their tags: an I-X that does not follow an X also begins an entity.
A file with a single type of entity may omit the type (B, I, O), which is then UNTYPED.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from seqeval.metrics.sequence_labeling import get_entities

from bert_jax.model.heads import structured
from bert_jax.tasks.rows import IGNORED, Sentence, Span, Split

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
