"""Parameter trees as flat dicts: `{"encoder": {"norm": x}}` is `{"encoder/norm": x}`.

Checkpoints, name tables and the rules for decay and sharding all speak of a parameter by its path.
"""

from collections.abc import Mapping
from typing import Any

from flax import traverse_util

SEPARATOR = "/"


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the leaves of a nested dict by path, in the order of their paths."""
    return dict(sorted(traverse_util.flatten_dict(nested, sep=SEPARATOR).items()))


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested dict whose flat form this is.

    Raises ValueError when one path is the folder of another.
    """
    for path in flat:
        for end, letter in enumerate(path):
            if letter == SEPARATOR and path[:end] in flat:
                raise ValueError(f"parameter path {path!r} goes through the parameter {path[:end]!r}")
    return traverse_util.unflatten_dict(dict(flat), sep=SEPARATOR)
