"""Writes the generated pages of the documentation site: commands, recipes, configuration keys, Python, exit codes.

    python -m website.reference --output build/docs

Each page comes from the program itself: the help text of each command, the docstrings of recipes and of
`bert_jax.__all__`, and the sources of the configuration. The pages are made by `make docs` and are not in the
repository.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import bert_jax
from bert_jax import command_line
from bert_jax.commands import main as commands
from bert_jax.config import FinetuneConfig, ModelOptions, PretrainConfig, TrainConfig, loading
from bert_jax.config.loading import shipped_recipes
from bert_jax.config.options import Key, keys

# Where a type of a signature is defined, which its reader does not need.
_PLACES = re.compile(
    r"\b(?:pathlib\._local|pathlib|collections\.abc|typing|jaxtyping|ml_collections[.\w]*|bert_jax[.\w]*)\.(?=[A-Z])"
)
_UNPACKED = re.compile(r'\*<class "(?:[\w.]+\.)?(\w+)">')  # the type of keyword arguments


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes all pages below a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="the folder, whose reference/ is written")
    folder = Path(parser.parse_args(arguments).output) / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / f"{name}.md").write_text(page(), encoding="utf-8")


def commands_page() -> str:
    """The help text of every command, by job."""
    introduction = "`bert-jax NAME` runs a command. All have the same exit codes"
    parts = ["# Commands", f"{introduction} ([list](exit_codes.md))."]
    for job, listed in commands.JOBS.items():
        parts.append(f"## {job}")
        for name, purpose in listed.items():
            parts.append(f"### {name}\n\n`bert-jax {name}`: {purpose}.\n\n{_fenced(help_text(name))}")
    return _joined(parts)


def recipes_page() -> str:
    """The docstring of every recipe, which has its command, hardware, expected result and source."""
    parts = [
        "# Recipes by name",
        "`--config NAME` runs a recipe, `bert-jax recipes NAME` shows it, and `--copy FILE` copies it. "
        "[Recipes](../recipes.md) explains them by purpose.",
    ]
    for name, file in shipped_recipes().items():
        found = importlib.util.spec_from_file_location(name, file)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        parts.append(f"## {name}\n\n{_fenced(inspect.getdoc(module) or '')}")
    return _joined(parts)


def config_page() -> str:
    """All configuration keys with types, defaults and meanings."""
    shared = [key for key in keys(TrainConfig()) if not key.name.startswith("model.")]
    own = {
        config: [key for key in keys(config()) if key not in keys(TrainConfig())]
        for config in (PretrainConfig, FinetuneConfig)
    }
    rows = (f"| `--{flag}` | `{key}` |" for flag, key in loading.KEYS.items())
    flags = "\n".join(["| flag | key |", "|---|---|", *rows])
    return _joined(
        [
            "# Configuration keys",
            "`--config.KEY=VALUE` sets a key of a recipe on the command line, and `overrides={KEY: VALUE}` in Python. "
            "Recipes have other defaults for some keys. A key that does not exist is refused, with the nearest one "
            "that does.",
            f"## Pretraining and fine-tuning\n\n{_table(shared)}",
            f"## Pretraining only\n\n{_table(own[PretrainConfig])}",
            f"## Fine-tuning only\n\nDefaults of keys above that differ are listed here, too.\n\n"
            f"{_table(own[FinetuneConfig])}",
            "## Model\n\n`model.preset` names an architecture, which the other keys change. None keeps its "
            f"value.\n\n{_table(keys(ModelOptions(), 'model.'))}",
            f"## Short flags\n\nThese flags set keys, too, where a recipe has them.\n\n{flags}",
        ]
    )


def api_page() -> str:
    """Signature and docstring of every public name of `import bert_jax`, and of the methods of Model."""
    parts = [
        "# Python reference",
        "The docstrings of the public names. [From Python](../python.md) shows them in use.",
    ]
    for name in bert_jax.__all__:
        value = getattr(bert_jax, name)
        parts.append(_documented(f"## bert_jax.{name}", name, value))
        if inspect.isclass(value):
            for member, found in vars(value).items():
                if not member.startswith("_") and (callable(found) or isinstance(found, property)):
                    parts.append(_documented(f"### {name}.{member}", member, found))
    return _joined(parts)


def exit_codes_page() -> str:
    """The exit codes of all commands, from the contract that bert_jax.command_line states."""
    rows = "\n".join(f"| {code} | {meaning} |" for code, meaning in exit_codes().items())
    return _joined(
        [
            "# Exit codes",
            "All commands end with one of these. Errors are one line on stderr.",
            f"| code | meaning |\n|---|---|\n{rows}",
            "A traceback, with exit code 1, is a bug. A scheduler may restart a run after 75 and 143: the same command "
            "resumes it.",
        ]
    )


PAGES: dict[str, Callable[[], str]] = {
    "commands": commands_page,
    "recipes_by_name": recipes_page,
    "config_keys": config_page,
    "python_reference": api_page,
    "exit_codes": exit_codes_page,
}


def help_text(name: str) -> str:
    """What `bert-jax NAME --help` prints in a terminal of 100 columns."""
    main_function = importlib.import_module(commands.MODULES[name]).main
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main_function(["--help"])
    return printed.getvalue()


def exit_codes() -> dict[int, str]:
    """The meaning of each exit code, from the list `CODE meaning; ...` in the docstring of bert_jax.command_line."""
    text = " ".join((command_line.__doc__ or "").split())
    listed = text.partition("Exit codes are a contract: ")[2].partition(". ")[0]
    pairs = (entry.partition(" ") for entry in listed.split("; "))
    return {int(code): meaning for code, _, meaning in pairs}


def _documented(heading: str, name: str, value: Any) -> str:
    text = inspect.getdoc(value) or ""
    if isinstance(value, property):
        returned = inspect.signature(value.fget).return_annotation if value.fget else ""
        declaration = f"{name}: {_annotation(returned)}"
    else:
        kind = "class " if inspect.isclass(value) else ""
        an_error = inspect.isclass(value) and issubclass(value, Exception)  # which nobody but the library makes
        declaration = f"{kind}{name}{'(Exception)' if an_error else _signature(value)}"
    return f"{heading}\n\n```python\n{declaration}\n```\n\n{_fenced(text)}"


def _signature(value: Any) -> str:
    """The signature, a parameter a line where it is long, with annotations as the source has them."""
    found = inspect.signature(value)
    shown = _UNPACKED.sub(r"Unpack[\1]", _PLACES.sub("", str(found).replace("'", '"')))
    if len(shown) <= 90:
        return shown
    inner, _, returned = shown[1:].rpartition(") -> ")
    parts = re.split(r", (?=\*|\w+(?::|=|$))", inner)
    return "(\n" + "".join(f"    {part},\n" for part in parts) + f") -> {returned}"


def _annotation(value: Any) -> str:
    return _PLACES.sub("", str(value)) if getattr(value, "__args__", ()) else value.__name__


def _table(keys: Sequence[Key]) -> str:
    rows = [
        f"| `{key.name}` | {_cell(key.type)} | {_cell(_shown(key.default))} | {_escaped(key.meaning)} |" for key in keys
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def _shown(value: Any) -> str:
    return "" if value in ("", ()) else str(value)


def _cell(text: str) -> str:
    return _escaped(f"`{text}`") if text else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _fenced(text: str) -> str:
    return f"```text\n{text.strip()}\n```" if text else ""


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
