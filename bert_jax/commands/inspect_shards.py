"""Shows what build_examples wrote: statistics, rows as text, and an HTML page; and verifies every byte."""

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_jax.config.options import Checked, at_least, option, parse
from bert_jax.data.manifest import MANIFEST, PARTS, Part, read_manifest
from bert_jax.data.shards import check_sizes, open_dataset
from bert_jax.errors import UserError
from bert_jax.progress import Reporter
from bert_jax.reporting import page
from bert_jax.reporting.document import excerpt_text, open_console, print_document
from bert_jax.storage.files import write_atomic
from data_prep import output_files
from data_prep.inspection import (
    PROGRAM,
    Inspection,
    bytes_to_verify,
    document,
    excerpts,
    measure,
    open_tokenizer,
    page_rows,
    verify,
)

DESCRIPTION = """\
Shows what bert-jax build-examples wrote: statistics; with --show rows as text; with --html a page; with --verify
whether it is intact.

  bert-jax inspect-shards data/books_128
  bert-jax inspect-shards data/books_128/eval --show 5
  bert-jax inspect-shards data/books_128 --verify --html books_128.html

--verify reads every byte. If something does not match, it exits with code 2 and a line that names the file and the
reason. It checks names, sizes and hashes of all files; the rows (docs/data_format.md, guarantees 3, 4 and 7); static
masks, which it recomputes; counts of rows, tokens and predictions, and their totals; that each document was used or has
a reason why not; unigram counts; sequence keys; and the tokenizer.
In the output of --show, {[MASK]: cat} is a masked position of a static mask and its label; dynamic masks are not
stored.
"""


def parts_of(path: Path) -> tuple[Path, tuple[Part, ...]]:
    """The output folder and the parts that DIR, DIR/train or DIR/eval names."""
    if path.name in PARTS and not (path / MANIFEST).exists():
        return path.parent, ("train" if path.name == "train" else "eval",)
    return path, ("train", "eval")


def inspect(directory: Path, parts: Sequence[Part] = PARTS, verified: bool = False, quiet: bool = True) -> Inspection:
    """The manifest, tokenizer and statistics of an output; if `verified`, after checking every byte.

    Raises UserError for a folder that is not a finished output, and for the first file that does not match.
    """
    manifest = read_manifest(directory)  # first, because bytes_to_verify lists all files of what may be any folder
    if verified:
        with Reporter("verifying", bytes_to_verify(directory), ["MB"], quiet) as reporter:
            found = verify(directory, lambda size: reporter.advance(size, size / 1e6))
        return found._replace(statistics={part: found.statistics[part] for part in parts})
    check_sizes(directory, manifest["shards"])
    tokenizer = open_tokenizer(directory, manifest)
    rows = sum(manifest["parts"][part]["rows"] for part in parts)
    with Reporter("counting", rows, ["rows"], quiet) as reporter:
        statistics = {
            part: measure(directory, part, manifest, tokenizer, lambda rows: reporter.advance(rows, rows))
            for part in parts
        }
    return Inspection(manifest, tokenizer, statistics)


def check_page(target: Path, directory: Path) -> None:
    """Raises UserError for a page in no folder, or inside of a finished output, which must not change."""
    if not target.parent.is_dir():
        raise UserError(f"--html {target}: no folder {target.parent}. Create it, or choose another file")
    place, inspected = Path(os.path.realpath(target)), Path(os.path.realpath(directory))
    for folder in (place, *place.parents):
        if (folder / MANIFEST).exists() and (folder == inspected or (folder / output_files.SUMS).exists()):
            raise UserError(f"--html {target} is inside of {folder}, which must not change; name a file outside of it")


@dataclass(frozen=True)
class Options(Checked):
    """The flags of the command."""

    directory: str = option(
        help="the output of build-examples, or its train or eval folder", metavar="DIR", positional="1"
    )
    verify: bool = option(False, "check every byte; default: only names and sizes")
    show: int = option(0, "print the first N rows as text", metavar="N", valid=at_least(0))
    html: Path | None = option(None, "write the statistics and some rows to this HTML file", metavar="FILE")


def main(arguments: Sequence[str]) -> None:
    options = parse(PROGRAM, DESCRIPTION, Options, arguments)
    directory, parts = parts_of(Path(options.directory).absolute())
    if options.html:
        check_page(options.html.absolute(), directory)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the terminal's encoding lacks are shown as \u20ac, and non-text bytes of a path as \udcff.
        sys.stdout.reconfigure(errors="backslashreplace")
    console = open_console()
    if options.verify or options.html or not options.show:
        found = inspect(directory, parts, options.verify, quiet=False)
        if options.verify or not options.html:
            print_document(document(directory, found, options.verify), console)
        if options.verify:
            shards, rows = len(found.manifest["shards"]), found.manifest["counts"]["rows"]
            console.print(f"{directory}: {shards} shards and {rows} rows match the manifest", soft_wrap=True)
        if options.html:
            html = page.render(document(directory, found, options.verify, page_rows(directory, found)))
            write_atomic(options.html.absolute(), html.encode(errors="backslashreplace"))
            console.print(str(options.html), soft_wrap=True, highlight=False)
    if options.show:
        dataset = open_dataset(directory, parts[0], output_files.reader)
        tokenizer = open_tokenizer(directory, dataset.manifest)
        for row in excerpts(dataset, tokenizer, range(min(options.show, dataset.rows))):
            console.print(excerpt_text(row), highlight=False, soft_wrap=True)
