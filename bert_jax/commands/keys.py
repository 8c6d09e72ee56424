"""Lists the configuration keys, with type, default and meaning."""

import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import bert_jax.lineage  # noqa: F401 (adds its encoders to the choices)
from bert_jax.config import FinetuneConfig, PretrainConfig
from bert_jax.config.loading import KEYS, OTHER_WORDS
from bert_jax.config.options import Key, keys, option, parse
from bert_jax.errors import UserError

DESCRIPTION = """Lists the keys that --config.KEY=VALUE sets, with type, default and meaning.

  bert-jax keys                     all keys
  bert-jax keys learning_rate       keys whose name or meaning matches this regular expression
  bert-jax keys '^task\\.crf'
  bert-jax keys num_train_epochs    the key that a word of another library, or a short flag, means

Keys that only one command has are marked [pretrain] or [finetune]. A recipe may have other defaults. In model.*, None
keeps the value of model.preset.
"""

CONFIGS = {"pretrain": PretrainConfig, "finetune": FinetuneConfig}


def matches(pattern: str) -> list[tuple[Key, str]]:
    """Returns the keys whose name or meaning matches, by name, and the only command that has them (empty: both)."""
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UserError(f"PATTERN is {pattern!r}, which is not a regular expression: {error}") from None
    by_command = {command: keys(config(), every_kind=True) for command, config in CONFIGS.items()}
    listed = []
    for command, own in by_command.items():
        others = [key for other, theirs in by_command.items() if other != command for key in theirs]
        for key in own:
            if not (expression.search(key.name) or expression.search(key.meaning)):
                continue
            # Keys are equal if type, default and meaning are, too; otherwise each command's own is listed.
            if key not in others:
                listed.append((key, command))
            elif command == next(iter(CONFIGS)):  # a key of both is listed once
                listed.append((key, ""))
    return sorted(listed, key=lambda match: (match[0].name, match[1]))


@dataclass(frozen=True)
class Options:
    pattern: str = option("", "a regular expression", metavar="PATTERN", positional="?")


def main(arguments: Sequence[str]) -> None:
    pattern = parse("bert-jax keys", DESCRIPTION, Options, arguments).pattern
    pattern = pattern.removeprefix("--").removeprefix("config.")
    listed = matches(pattern)
    if not listed and (meant := {**OTHER_WORDS, **KEYS}.get(pattern, "")):
        if meant.startswith("--"):
            raise UserError(f"{pattern} is no key here, but the flag {meant}: see bert-jax pretrain --help")
        listed = matches(f"^{re.escape(meant)}$")
    if not listed:
        raise UserError(f"no key or meaning matches {pattern!r}. `bert-jax keys` lists all")
    width = shutil.get_terminal_size().columns
    for key, command in listed:
        print(f"{key.name}: {key.type} = {key.default!r}" + (f"   [{command}]" if command else ""))
        print(textwrap.fill(key.meaning, width, initial_indent="    ", subsequent_indent="    "))
