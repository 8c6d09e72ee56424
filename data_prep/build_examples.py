"""Builds pretraining examples from text: `build` for notebooks, `bert-jax build-examples` for a terminal."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.storage.local import refuse_existing
from data_prep import build_options, shares
from data_prep.build_options import BuildOptions
from data_prep.build_parts import build_parts, build_share
from data_prep.memory import keep_freed
from data_prep.resumable import keeping_units


def build(options: BuildOptions, *, quiet: bool = True) -> dict[str, Any]:
    """Builds the examples as the command does, and returns the manifest.

    With more than one worker, call it under `if __name__ == "__main__"` in a script, as multiprocessing requires.
    Raises UserError for a mistake in the options or the input; finished units are kept for the next call.
    """
    parts = shares.parse(options.part)
    if len(parts) == 1:
        return build_share(options, quiet=quiet)
    output = Path(os.path.abspath(options.output))
    refuse_existing(output)
    return build_parts(options, output, parts, quiet=quiet)


def main(arguments: Sequence[str]) -> None:
    options = build_options.parse(arguments)
    keep_freed()
    with keeping_units(Path(options.output)):
        build(options, quiet=False)
