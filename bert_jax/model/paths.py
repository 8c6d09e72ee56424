"""Parameter trees as flat dicts: `{"encoder": {"norm": x}}` is `{"encoder/norm": x}`.

Checkpoints, name tables and the rules for decay and sharding all speak of a parameter by its path.
"""

from collections.abc import Mapping
from typing import Any

SEPARATOR = "/"


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a nested dict by path, in the order of their paths."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            found |= {f"{name}{SEPARATOR}{path}": leaf for path, leaf in flatten(value).items()}
        else:
            found[name] = value
    return dict(sorted(found.items()))


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict whose flat form this is.

    Raises ValueError when one path is the folder of another.
    """
    nested: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split(SEPARATOR)
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})
            if not isinstance(place, dict):
                raise ValueError(f"parameter path {path!r} goes through the parameter {folder!r}")
        if name in place:
            raise ValueError(f"parameter path {path!r} is both a parameter and a folder, or is given twice")
        place[name] = leaf
    return nested
