"""The words that decide sentence borders in each language: abbreviations that take a full stop, and frequent words.

languages.toml holds them, with an explanation of each list.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple


class Language(NamedTuple):
    """Words by the meaning of a full stop after them."""

    common: frozenset[str]
    never: frozenset[str]  # the full stop never ends a sentence: titles before names
    counted: frozenset[str]  # it does not end a sentence before a number: No. 5
    may: frozenset[str]  # it ends one if a common word follows
    last: frozenset[str]  # it ends one before anything but a lower-case letter, however short the word
    known: frozenset[str]  # all of these
    ordinals: bool  # whether a number with a full stop is an ordinal: der 4. Mai


TITLES = frozenset(("mr", "mrs", "dr", "prof", "rev", "st"))  # known in every language


def _language(ordinals: bool = False, **words: str) -> Language:
    listed = {name: frozenset(words.get(name, "").split()) for name in ("common", "never", "counted", "may", "last")}
    abbreviations = frozenset().union(*(listed[name] for name in ("never", "counted", "may", "last")))
    parts = (part for word in abbreviations for part in (word, *word.lower().split(".")))
    return Language(**listed, known=TITLES.union(parts), ordinals=ordinals)


_TABLES = tomllib.loads((Path(__file__).parent / "languages.toml").read_text(encoding="utf-8"))
LANGUAGES = {name: _language(**table) for name, table in _TABLES.items()}
