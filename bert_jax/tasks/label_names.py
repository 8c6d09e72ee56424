"""Maps the labels that a file writes to those of a task: by task.label_map, and by names that mean the same.

Two names mean the same if they differ only in case and in white space, `_` and `-` (entailment, ENTAILMENT); and so do
the number i and LABEL_i, the name that transformers gives to class i of a model without names.
"""

import re
from collections.abc import Iterable, Sequence

from bert_jax.command import UserError

_UNNAMED = "label_"


def parse_names(field: str, given: str) -> tuple[str, ...]:
    """The names in a comma-separated list. Raises UserError for an empty or repeated one; field is its key."""
    names = tuple(name.strip() for name in given.split(",")) if given else ()
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"{field} is {given!r}; give different names, separated by commas")
    return names


def parse_label_map(given: str) -> dict[str, str]:
    """The label of the task for each label of a file, from FILE_LABEL:LABEL,...

    The last colon separates the two. Raises UserError for a malformed part and for a label that is mapped twice.
    """
    found: dict[str, str] = {}
    for part in given.split(",") if given else ():
        old, colon, new = (one.strip() for one in part.rpartition(":"))
        if not (old and colon and new) or old in found:
            what = "maps a label twice" if old in found else f"has the part {part!r}"
            raise UserError(
                f"the label map {given!r} {what}; write LABEL_OF_THE_FILE:LABEL_OF_THE_TASK,..., such as "
                "0:NEGATIVE,1:POSITIVE"
            )
        found[old] = new
    return found


def same_names(found: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    """The known label that each found label means, for found labels that are not known and mean one.

    Empty where two of the known labels would mean the same.
    """
    forms = {_form(label): label for label in known}
    if len(forms) < len(known):
        return {}
    missing = set(found) - set(known)
    return {label: forms[_form(label)] for label in missing if _form(label) in forms}


def permutation(labels: Sequence[str], other: Sequence[str]) -> tuple[int, ...] | None:
    """For each label, the index in `other` of the label that means the same; None unless this pairs all of both."""
    names = same_names(labels, other)
    paired = [names.get(label, label) for label in labels]
    if sorted(paired) != sorted(other):
        return None
    return tuple(other.index(label) for label in paired)


def _form(label: str) -> str:
    """The form in which labels are compared."""
    form = re.sub(r"[\s_-]+", "_", label.casefold())
    number = form.removeprefix(_UNNAMED)
    return number if number.isdecimal() else form
