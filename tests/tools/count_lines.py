"""Counts the lines of a checkout's packages, of what pretraining imports, and of the longest functions.

    python tests/tools/count_lines.py [CHECKOUT]

`lines` are all lines of the Python files; `code` leaves out blank lines, comments and docstrings. The import closure
is every module of bert_jax and data_prep that bert_jax.pretraining imports, directly or not, imports inside functions
included; those that `import bert_jax.pretraining` loads at once are counted too. A function counts from its `def`
to its last line, its docstring included; those over LONGEST_ALLOWED lines are counted.
"""

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("bert_jax", "data_prep", "configs", "benchmarks", "tests")
LONGEST_ALLOWED = 60
SHOWN = 10

LOADED = """
import json, sys
import bert_jax.pretraining
print(json.dumps([module.__file__ for name, module in list(sys.modules.items())
                  if name.split(".")[0] in ("bert_jax", "data_prep") and getattr(module, "__file__", None)]))
"""

NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


class Count(NamedTuple):
    files: int
    lines: int
    code: int


def count_file(source: str) -> Count:
    """The lines of one file. A line is code if a token other than a comment or a docstring touches it."""
    docstrings = {line for first, last in _docstrings(ast.parse(source)) for line in range(first, last + 1)}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return Count(1, len(source.splitlines()), len(code - docstrings))


def count(files: Iterable[Path]) -> Count:
    """The sum over files."""
    counts = [count_file(file.read_text(encoding="utf-8")) for file in files]
    return Count(*(sum(column) for column in zip(*counts, strict=True))) if counts else Count(0, 0, 0)


def import_closure(checkout: Path, module: str) -> list[Path]:
    """The files of bert_jax and data_prep that a module imports, directly or not, at any time."""
    found: dict[str, Path] = {}
    open_names = [module]
    while open_names:
        parts = open_names.pop().split(".")
        # Importing a.b.c imports a and a.b too. The last part may name an attribute: there is no such file.
        for name in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            file = _file_of(checkout, name)
            if file is not None and name not in found:
                found[name] = file
                open_names += _imports(ast.parse(file.read_text(encoding="utf-8")))
    return [file for name, file in sorted(found.items()) if name.split(".")[0] in ("bert_jax", "data_prep")]


def _file_of(checkout: Path, module: str) -> Path | None:
    base = checkout.joinpath(*module.split("."))
    return next((file for file in (base / "__init__.py", base.with_suffix(".py")) if file.exists()), None)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def loaded_modules(checkout: Path) -> list[Path]:
    """The files of bert_jax and data_prep that importing the pretraining command loads at once."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    output = subprocess.run([sys.executable, "-c", LOADED], cwd=checkout, env=environment,
                            stdout=subprocess.PIPE, check=True).stdout  # fmt: skip
    return sorted(map(Path, json.loads(output)))


def functions(file: Path) -> Iterator[tuple[int, str, int]]:
    """Each function of a file: its lines, its name and its first line."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.end_lineno - node.lineno + 1, node.name, node.lineno  # type: ignore[operator]


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """The first and the last line of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.end_lineno or value.lineno


def main(checkout: Path) -> None:
    print(f"{'':<28}{'files':>7}{'lines':>9}{'code':>9}")
    found = {name: sorted((checkout / name).rglob("*.py")) for name in PACKAGES}
    rows = {name: count(files) for name, files in found.items()}
    library = [*found["bert_jax"], *found["data_prep"]]
    rows["bert_jax and data_prep"] = count(library)
    rows["closure of bert_jax.pretraining"] = count(import_closure(checkout, "bert_jax.pretraining"))
    rows["loaded by importing it"] = count(loaded_modules(checkout))
    for name, row in rows.items():
        print(f"{name:<28}{row.files:>7,}{row.lines:>9,}{row.code:>9,}")

    every = [(*one, file.relative_to(checkout)) for file in library for one in functions(file)]
    every.sort(key=lambda one: -one[0])
    over = sum(lines > LONGEST_ALLOWED for lines, *_ in every)
    print(
        f"\n{len(every):,} functions in bert_jax and data_prep, {over} of them over {LONGEST_ALLOWED} lines; longest:"
    )
    for lines, name, start, path in every[:SHOWN]:
        print(f"{lines:>5}  {name}  {path}:{start}")
    sizes = sorted(((count_file(file.read_text(encoding="utf-8")).lines, file) for file in library), reverse=True)
    print(f"\n{sum(lines > 300 for lines, _ in sizes)} files over 300 lines; longest:")
    for lines, file in sizes[:SHOWN]:
        print(f"{lines:>5}  {file.relative_to(checkout)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(), help="default: the current folder")
    main(parser.parse_args().checkout.resolve())
