"""Joins the shards of jobs that ran apart, or adds new text to an output."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_jax.config.options import option, parse
from bert_jax.data.manifest import MANIFEST
from bert_jax.errors import UserError
from bert_jax.storage.remote import find_files
from data_prep.merge import merge
from data_prep.output_files import make_in_store

DESCRIPTION = """\
Joins outputs of bert-jax build-examples.

Parts of one job may run on different machines at the same time, on their shares of the files (I: 0 to 15):

  bert-jax build-examples --part $I/16 --input 'text/*.xz' --tokenizer vocab --output parts/$I ...
  bert-jax merge-shards --input 'parts/*' --output data/books

The result is that of one job with --part all/16, byte for byte. More text, at the cost of the new text alone:

  bert-jax build-examples --part +16 --input 'more/*.xz' --tokenizer data/books/tokenizer --output more ...
  bert-jax merge-shards --input data/books,more --output data/books_2

The new part has its own number (+16); all other options are as in the first output, whose rows, sequence keys and
held-out documents stay as they are. The manifest lists the shares. Shards are linked, or copied if the file system
cannot link. --dedup compares documents of one share only; bert-jax clean compares all.
"""


def folders(pattern: str) -> list[Path]:
    """Returns the outputs that match comma-separated patterns. Raises UserError for a pattern without one."""
    listed: list[Path] = []
    for part in filter(None, map(str.strip, pattern.split(","))):
        # A pattern such as parts/* may also match folders of jobs that have not ended.
        matches = [Path(match.path) for match in find_files(part) if (Path(match.path) / MANIFEST).exists()]
        if not matches:
            raise UserError(f"--input {part!r} matches no output of build_examples, which has a {MANIFEST}")
        listed += matches
    return list(dict.fromkeys(listed))  # in order, without repetitions


@dataclass(frozen=True)
class Options:
    input: str = option(help="outputs, or patterns, separated by commas", metavar="DIRS")
    output: str = option(help="the folder to create", metavar="DIR")


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax merge-shards", DESCRIPTION, Options, arguments)
    inputs = folders(options.input)
    make_in_store(Path(os.path.abspath(options.output)), MANIFEST, lambda folder: merge(inputs, folder, quiet=False))
