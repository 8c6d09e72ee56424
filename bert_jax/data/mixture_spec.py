"""The text of a mixture: NAME=DIR:WEIGHT,NAME=DIR:WEIGHT, or NAME=DIR,NAME=DIR:alpha=A."""

import math
import re
from typing import NamedTuple

from bert_jax.command import UserError

_NAMED = re.compile(r"\s*([A-Za-z][A-Za-z0-9_-]*)=(.*)")
_ALPHA = re.compile(r"(.*):\s*alpha=([^:,=]*)")
_WEIGHT = re.compile(r":\s*[0-9.]+\s*$")


class NamedFolder(NamedTuple):
    """A source of a mixture as it is written."""

    name: str
    folder: str
    weight: float | None  # relative to the others; None: by the number of tokens


class MixtureSpec(NamedTuple):
    """The sources of a mixture, and the exponent of their numbers of tokens if they have no weights."""

    folders: tuple[NamedFolder, ...]
    alpha: float | None = None


def is_mixture(text: str) -> bool:
    """Whether a text names its sources: it begins with NAME=. A folder of such a name is written as ./NAME=."""
    return _NAMED.match(text) is not None


def parse_mixture(text: str, key: str) -> MixtureSpec:
    """Parses the text of a mixture. Folders may be addresses, such as gs://BUCKET/wiki.

    key   the configuration key of the text, for messages
    Raises UserError for another form, a name that occurs twice, and weights or an alpha outside of their range.
    """
    raised = _ALPHA.fullmatch(text)
    try:
        alpha = None if raised is None else float(raised[2])
        folders = tuple(_named_folder(entry, raised is None) for entry in (raised[1] if raised else text).split(","))
    except ValueError:
        raise UserError(
            f"{key} is {text!r}, not of the form NAME=DIR:WEIGHT,NAME=DIR:WEIGHT, such as "
            "wiki=shards/wiki:0.7,books=shards/books:0.3, or NAME=DIR,NAME=DIR:alpha=0.3"
        ) from None
    names = [each.name for each in folders]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{key} names {repeated[0]} twice. Give each source a name of its own")
    for each in folders:
        if each.weight is not None and not 0 < each.weight < math.inf:
            raise UserError(
                f"{key}: the weight of {each.name} is {each.weight:g}. Use a positive number, or leave the source out"
            )
    if alpha is not None and not 0 <= alpha < math.inf:
        raise UserError(f"{key}: alpha is {alpha:g}. Use 1 for shares as in the text, less for more equal shares")
    return MixtureSpec(folders, alpha)


def _named_folder(entry: str, weighted: bool) -> NamedFolder:
    """Parses NAME=DIR:WEIGHT, or NAME=DIR. Raises ValueError for another form."""
    named = _NAMED.fullmatch(entry)
    if named is None:
        raise ValueError(f"{entry!r} has no name")
    folder, _, weight = named[2].rpartition(":") if weighted else (named[2], "", "")
    if not folder.strip() or (not weighted and _WEIGHT.search(folder)):
        raise ValueError(f"{entry!r} lacks a folder or a weight, or has a weight next to alpha")
    return NamedFolder(named[1], folder.strip(), float(weight) if weighted else None)
