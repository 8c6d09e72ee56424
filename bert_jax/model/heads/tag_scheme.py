"""Which tags of entities may follow which: IOB1 and IOB2 (O, B-X, I-X), and IOBES (O, B-X, I-X, E-X, S-X).

Files with a single type of entity may omit the type (B, I, O).
"""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

# Outside an entity; or the beginning, inside, end or single word of one, with or without a type.
ENTITY_TAG = re.compile(r"O|[BIES](-.+)?")


class Scheme(NamedTuple):
    """The sequences of tag ids that a scheme allows: the pairs [from][to], the first and the last tags."""

    pairs: tuple[tuple[bool, ...], ...]
    first: tuple[bool, ...]
    last: tuple[bool, ...]


def marks_entities(tags: Collection[str]) -> bool:
    """Whether tags mark entities (O, B-X, I-X ...), rather than plain classes.

    Tags without types mark entities if they include O and also B or I; other sets of such letters are classes.
    """
    bare = any(len(tag) == 1 for tag in tags if tag != "O")
    if bare and not ("O" in tags and {"B", "I"} & set(tags)):
        return False
    return any(tag != "O" for tag in tags) and all(ENTITY_TAG.fullmatch(tag) for tag in tags)


def marks_ends(tags: Collection[str]) -> bool:
    """Whether entity tags are IOBES, which mark the last word of an entity."""
    return any(tag[:1] in ("E", "S") for tag in tags)


def lacks_beginnings(tags: Collection[str]) -> bool:
    """Whether tags without ends (not IOBES) have an I-X without its B-X."""
    return not marks_ends(tags) and any(tag[0] == "I" and "B" + tag[1:] not in tags for tag in tags)


def breaks_iob1(last: str, tag: str) -> bool:
    """Whether a tag cannot follow another one in IOB1, where B-X only separates two X. O is also before the first."""
    return tag[0] == "B" and (last == "O" or last[2:] != tag[2:])


def breaks_iob2(last: str, tag: str) -> bool:
    """Whether a tag cannot follow another one in IOB2. O is also what comes before the first tag."""
    return tag[0] == "I" and (last == "O" or last[2:] != tag[2:])


def breaks_iobes(last: str, tag: str) -> bool:
    """Whether a tag cannot follow another one in IOBES. O is also what is before the first tag and after the last."""
    inside = last[0] in "BI"
    return inside != (tag[0] in "IE") or (inside and last[2:] != tag[2:])


def scheme_of(labels: Sequence[str]) -> Scheme | None:
    """The scheme of tags by id: IOBES if a tag marks an end, IOB1 if an I-X has no B-X, else IOB2; None if they do not
    mark entities."""
    if not marks_entities(labels):
        return None
    ends = marks_ends(labels)
    breaks = breaks_iobes if ends else breaks_iob1 if lacks_beginnings(labels) else breaks_iob2
    return Scheme(
        tuple(tuple(not breaks(last, tag) for tag in labels) for last in labels),
        tuple(not breaks("O", tag) for tag in labels),
        tuple(not (ends and breaks(tag, "O")) for tag in labels),
    )
