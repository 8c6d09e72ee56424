"""Looks into what build_examples wrote: figures, rows a person can read, a page, and a check of every byte."""

import io
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from bert_jax import command
from bert_jax.command import Parser, UserError
from bert_jax.data.manifest import MANIFEST, PARTS, Part, read_manifest
from bert_jax.data.shards import Dataset, check_sizes, open_dataset
from bert_jax.progress import Reporter
from bert_jax.storage.local import write_atomic
from bert_jax.tokenizer import Tokenizer
from data_prep import formats
from data_prep.audit import Verified, bytes_to_verify, tokenizer_of, verify
from data_prep.figures import measure
from data_prep.inspection_page import check_page, inspection_page
from data_prep.recount import recount, source_corpus
from data_prep.shown import plain_text, shown_rows
from data_prep.tables import label_names, tables

DESCRIPTION = """\
Shows what data_prep.build_examples wrote, in figures; with --show as text; with --html as a page; with --verify
checks it.

  python -m data_prep.inspect_shards data/books_128
  python -m data_prep.inspect_shards data/books_128/eval --show 5
  python -m data_prep.inspect_shards data/books_128 --verify --html books_128.html

--verify reads every byte, and exits with 2 and a line that names the file and the reason where something is not as it
should be: names, sizes and hashes of all files; the rows (docs/data_format.md, guarantees 3, 4 and 7); static masks,
drawn again; the counts of rows, tokens and predictions, and the sums of all; that each document was used or has a
reason why not; unigram counts; sequence keys; the tokenizer.
With --source it also reads the text again, where the manifest says it was, and counts its documents by what became of
each: in train, in eval, or skipped and why.
In --show, {[MASK]: cat} is a masked position of a static mask with what stood there; a dynamic mask is not stored.
"""

_WIDTH = 100


def parts_of(path: Path) -> tuple[Path, tuple[Part, ...]]:
    """The output folder and the parts meant by DIR, DIR/train or DIR/eval."""
    if path.name in PARTS and not (path / MANIFEST).exists():
        return path.parent, ("train" if path.name == "train" else "eval",)
    return path, ("train", "eval")


def inspect(directory: Path, parts: Sequence[Part] = PARTS, verified: bool = False, quiet: bool = True) -> Verified:
    """What an output holds: manifest, tokenizer, and figures of the parts; checked in every byte when `verified`.

    Raises UserError for a folder that is no finished output, and for the first file that is not as it should be.
    """
    manifest = read_manifest(directory)  # before all files of what may be any folder are looked for
    if verified:
        with Reporter("verifying", bytes_to_verify(directory), ["MB"], quiet) as reporter:
            done = 0

            def read(size: int) -> None:
                nonlocal done
                done += size
                reporter.update(done, done / 1e6)

            found = verify(directory, read)
        return found._replace(figures={part: found.figures[part] for part in parts})
    check_sizes(directory, manifest["shards"])
    tokenizer = tokenizer_of(directory, manifest)
    figures = {}
    with Reporter("counting", sum(manifest["parts"][part]["rows"] for part in parts), ["rows"], quiet) as reporter:
        counted = 0

        def count(rows: int) -> None:
            nonlocal counted
            counted += rows
            reporter.update(counted, counted)

        for part in parts:
            figures[part] = measure(directory, part, manifest, tokenizer, count)
    return Verified(manifest, tokenizer, figures)


def _recounted(directory: Path, found: Verified) -> int:
    corpus = source_corpus(directory, found.manifest)
    with Reporter("reading the text again", corpus.total_bytes, ["MB"]) as reporter:
        return recount(
            directory, found.manifest, corpus, lambda: reporter.update(corpus.bytes_read, corpus.bytes_read / 1e6)
        )


def readable_rows(dataset: Dataset, tokenizer: Tokenizer, count: int) -> Iterator[str]:
    """The first rows of a part as text, a paragraph a sequence: key, label in words, segments A and B."""
    names = label_names(dataset.manifest)
    for shown in shown_rows(dataset.gather(np.arange(min(count, dataset.rows))), tokenizer):
        lines = [
            f"row {shown.row}  key {shown.key >> 32:#x}:{shown.key & 0xFFFFFFFF}  "
            f"{shown.slots} of {dataset.seq_len} slots  {names.get(shown.label, shown.label)}"
        ]
        for name, pieces in shown.segments.items():
            text = plain_text(pieces)
            lines.append(textwrap.fill(text, _WIDTH, initial_indent=f"  {name}: ", subsequent_indent=" " * 5))
        yield "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = Parser("data_prep.inspect_shards", DESCRIPTION)
    add = parser.add_argument
    add("directory", metavar="DIR", help="the output of build_examples, or its train or eval")
    add("--verify", action="store_true", help="check all that the shards can tell; default: do not")
    add("--source", action="store_true", help="with --verify: count the documents of the text again; default: do not")
    add("--show", type=int, default=0, metavar="N", help="print the first N rows as text; default 0")
    add("--html", type=Path, metavar="FILE", help="draw the figures and some rows as one HTML file; default: do not")
    given = parser.parse_args(arguments)
    if given.source and not given.verify:
        raise UserError("--source is for --verify; give both")
    if given.show < 0:
        raise UserError(f"--show {given.show}; it must be at least 0")
    directory, parts = parts_of(Path(given.directory).absolute())
    if given.html:
        check_page(given.html.absolute(), directory)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the terminal's encoding has not is shown as \u20ac, and a byte of a path that is no text as \udcff.
        sys.stdout.reconfigure(errors="backslashreplace")
    # Paths, tokens and texts are shown as they are: brackets are no markup, and :cat: is no emoji.
    console = Console(width=None if Console().is_terminal else _WIDTH, markup=False, emoji=False)
    if given.verify or given.html or not given.show:
        found = inspect(directory, parts, given.verify, quiet=False)
        if given.verify or not given.html:
            for table in tables(directory, *found):
                console.print(table)
        if given.verify:
            shards, rows = len(found.manifest["shards"]), found.manifest["counts"]["rows"]
            console.print(f"{directory}: {shards} shards and {rows} rows are as the manifest says", soft_wrap=True)
        if given.source:
            console.print(f"{_recounted(directory, found)} documents of the text are accounted for", soft_wrap=True)
        if given.html:
            page = inspection_page(directory, found, given.verify)
            write_atomic(given.html.absolute(), page.encode(errors="backslashreplace"))
            console.print(str(given.html), soft_wrap=True, highlight=False)
    if given.show:
        dataset = open_dataset(directory, parts[0], formats.reader)
        for text in readable_rows(dataset, dataset.tokenizer(), given.show):
            console.print(text, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    command.run(main)
