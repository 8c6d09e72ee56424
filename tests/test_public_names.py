"""The tests use the public names of the packages, so that the code behind those names is free to change."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("bert_jax", "data_prep", "benchmarks", "configs")
# Of collections.namedtuple: public in spite of the underscore, which keeps them apart from the fields.
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}


def is_private(name: str) -> bool:
    return bool(re.fullmatch(r"_[A-Za-z]\w*(?<!__)", name)) and name not in NAMED_TUPLE


def private_names() -> set[str]:
    """Every private function, class, variable, attribute and module of the packages."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            found.add(path.stem)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(node.id)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(node.attr)
    return {name for name in found if is_private(name)}


def uses(source: str) -> Iterator[tuple[int, str]]:
    """The line and the name of each use of a private name of another object or module.

    These are attributes (except those of self and cls), imported names, keyword arguments, and names in strings, as
    in monkeypatch.setattr(steps, "_name", ...) or in a program that a test runs.
    """
    tree = ast.parse(source)
    in_f_strings = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            for name in [*(node.module or "").split("."), *(alias.name for alias in node.names)]:
                yield node.lineno, name
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            pattern = r"[\w)\]]\.(_\w+)" if node in in_f_strings else r"(?:^|[\w)\]]\.)(_\w+)"
            for name in re.findall(pattern, node.value):
                yield node.lineno, name


def test_tests_use_no_private_name_of_the_packages():
    names = private_names()
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in uses(path.read_text(encoding="utf-8"))
        if name in names
    ]
    assert not found, "test what these names are for through a public name:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "steps._example_only(plan)",
        "make()._example_only.value",
        "from bert_jax.train.step import _example_only",
        "monkeypatch.setattr(steps, '_example_only', None)",
        "monkeypatch.setattr('bert_jax.train.step._example_only', None)",
        "program = 'print(steps._example_only)'",
        "program = f'print({module}, steps._example_only)'",
    ],
)
def test_a_use_of_a_private_name_is_found(source):
    assert "_example_only" in {name for _, name in uses(source)}


def test_public_names_and_those_of_the_test_itself_are_allowed():
    source = "rows._replace(ids=0).__class__; self._mine = [_local for _local in rows]; text = 'snake_case a_b._'"
    assert not [name for _, name in uses(source) if is_private(name)]
