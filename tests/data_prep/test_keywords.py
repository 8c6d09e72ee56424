"""The keyword arguments of data preparation have the names and types of the options of its commands."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Required, get_args, get_origin, get_type_hints

import pytest

from data_prep.build_options import BuildKeywords, BuildOptions, Input, TokenizerKeywords
from data_prep.flags import REQUIRED
from data_prep.vocabulary import TokenizerOptions


def keyword_type(field: dataclasses.Field[Any], hint: Any) -> Any:
    """The type of an option's keyword argument: any sequence for a tuple, and several files for `input`."""
    if field.name == "input":
        return Input
    return Sequence[get_args(hint)[0]] if get_origin(hint) is tuple else hint


@pytest.mark.parametrize(
    "options, keywords", [(TokenizerOptions, TokenizerKeywords), (BuildOptions, BuildKeywords)], ids=["words", "rows"]
)
def test_keywords_are_the_options(options: Any, keywords: Any) -> None:
    hints = get_type_hints(options)
    fields = {field.name: field for field in dataclasses.fields(options)}
    expected = {name: keyword_type(field, hints[name]) for name, field in fields.items()}
    aliases = {alias: name for name, field in fields.items() for alias in field.metadata["aliases"]}
    assert get_type_hints(keywords) == expected | {alias: expected[name] for alias, name in aliases.items()}
    required = {name for name, field in fields.items() if field.default is REQUIRED}
    assert keywords.__required_keys__ == required - set(aliases.values())
    assert get_origin(get_type_hints(keywords, include_extras=True)["input"]) is Required
