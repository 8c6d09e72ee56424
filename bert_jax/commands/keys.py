"""Lists the configuration keys, with type, default and meaning."""

import re
import shutil
import textwrap
from collections.abc import Sequence

import bert_jax.lineage  # noqa: F401 (adds its encoders to the choices)
from bert_jax import command_line
from bert_jax.config import FinetuneConfig, PretrainConfig
from bert_jax.config.options import Key, keys
from bert_jax.errors import UserError

DESCRIPTION = """Lists the keys that --config.KEY=VALUE sets, with type, default and meaning.

  bert-jax keys                     all of them
  bert-jax keys learning_rate       those whose name or meaning has this text (a regular expression)
  bert-jax keys '^task\\.crf'

Keys of one command alone are marked [pretrain] or [finetune]. A recipe may have other defaults. In model.*, None keeps
the value of model.preset.
"""

CONFIGS = {"pretrain": PretrainConfig, "finetune": FinetuneConfig}


def matches(pattern: str) -> dict[Key, list[str]]:
    """Returns the keys whose name or meaning matches, and the commands that have them with this default.

    Raises UserError for a pattern that is not a regular expression.
    """
    try:
        expression = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UserError(f"PATTERN is {pattern!r}, which is not a regular expression: {error}") from None
    commands: dict[Key, list[str]] = {}
    for command, config in CONFIGS.items():
        for key in keys(config()):
            if expression.search(key.name) or expression.search(key.meaning):
                commands.setdefault(key, []).append(command)
    return commands


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("bert-jax keys", DESCRIPTION)
    parser.add_argument("pattern", nargs="?", default="", metavar="PATTERN", help="a regular expression")
    pattern = parser.parse_args(list(arguments)).pattern
    listed = matches(pattern)
    if not listed:
        raise UserError(f"no key or meaning matches {pattern!r}. `bert-jax keys` lists all")
    width = shutil.get_terminal_size().columns
    for key, commands in sorted(listed.items()):
        only = "" if len(commands) == len(CONFIGS) else f"   [{commands[0]}]"
        print(f"{key.name}: {key.type} = {key.default!r}{only}")
        print(textwrap.fill(key.meaning, width, initial_indent="    ", subsequent_indent="    "))
