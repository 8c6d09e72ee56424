"""Makes sharded training examples from text. Its options and their help are in data_prep/build_options.py."""

from collections.abc import Sequence
from pathlib import Path

from data_prep import build_options
from data_prep.build import build
from data_prep.processes import keep_freed
from data_prep.resumable import keeping_units


def main(arguments: Sequence[str]) -> None:
    options = build_options.parse(arguments)
    keep_freed()
    with keeping_units(Path(options.output)):
        build(options, quiet=False)
