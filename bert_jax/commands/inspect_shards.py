"""Shows the output of build-examples: statistics, rows as text, and an HTML page; and verifies every byte."""

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_jax.config.options import Checked, at_least, option, parse
from bert_jax.data.manifest import MANIFEST, PARTS, Part, read_manifest, read_shard_table
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
Shows the output of bert-jax build-examples: statistics, with --show rows as text, with --html a page; --verify checks
whether it is intact.

  bert-jax inspect-shards data/books_128
  bert-jax inspect-shards data/books_128/eval --show 5
  bert-jax inspect-shards data/books_128 --verify --html books_128.html

--verify reads every byte. If something does not match, it exits with code 2 and a line with the file and the reason. It
checks names, sizes and hashes of all files, the rows (docs/data_format.md, guarantees 3, 4 and 7), static masks, which
it recomputes, all counts, sequence keys, the tokenizer, and that unused documents have a reason.
In the output of --show, {[MASK]: cat} is a position of a static mask and its label; dynamic masks are not stored.
"""


def named_parts(path: Path) -> tuple[Path, tuple[Part, ...]]:
    """Returns the output folder, and the parts, that DIR, DIR/train or DIR/eval means."""
    # A finished output may be called train or eval itself.
    if path.name in PARTS and not (path / MANIFEST).exists():
        return path.parent, ("train" if path.name == "train" else "eval",)
    return path, ("train", "eval")


def inspect(directory: Path, parts: Sequence[Part] = PARTS, verified: bool = False, quiet: bool = True) -> Inspection:
    """Returns an output's manifest, tokenizer and statistics; if `verified`, after checking every byte.

    Raises:
        UserError: The folder is not a finished output, or a file does not match.
    """
    manifest = read_manifest(directory)  # first, because bytes_to_verify lists all files, and this may be any folder
    if verified:
        with Reporter("verifying", bytes_to_verify(directory), ["MB"], quiet) as reporter:
            whole = verify(directory, lambda size: reporter.advance(size, size / 1e6))
        return whole._replace(statistics={part: whole.statistics[part] for part in parts})
    check_sizes(directory, read_shard_table(directory, manifest))
    tokenizer = open_tokenizer(directory, manifest)
    rows = sum(manifest["parts"][part]["rows"] for part in parts)
    with Reporter("counting", rows, ["rows"], quiet) as reporter:
        statistics = {
            part: measure(directory, part, manifest, tokenizer, lambda rows: reporter.advance(rows, rows))
            for part in parts
        }
    return Inspection(manifest, tokenizer, statistics)


def check_page(target: Path, directory: Path) -> None:
    """Raises UserError for a page in no folder, or inside a finished output, which must not change."""
    if not target.parent.is_dir():
        raise UserError(f"--html {target}: no folder {target.parent}. Create it, or choose another file")
    place, inspected = Path(os.path.realpath(target)), Path(os.path.realpath(directory))
    for folder in (place, *place.parents):
        # Files of other programs have the manifest's name, too, so another folder needs the file of sums as well.
        if (folder / MANIFEST).exists() and (folder == inspected or (folder / output_files.SUMS).exists()):
            raise UserError(f"--html {target} is inside {folder}, which must not change; name a file outside it")


@dataclass(frozen=True)
class Options(Checked):
    directory: str = option(
        help="the output of build-examples, or its train or eval folder", metavar="DIR", positional="1"
    )
    verify: bool = option(False, "check every byte; default: only names and sizes")
    show: int = option(0, "print the first N rows as text", metavar="N", valid=at_least(0))
    html: Path | None = option(None, "write the statistics and some rows to this HTML file", metavar="FILE")


def main(arguments: Sequence[str]) -> None:
    options = parse(PROGRAM, DESCRIPTION, Options, arguments)
    directory, parts = named_parts(Path(options.directory).absolute())
    if options.html:
        check_page(options.html.absolute(), directory)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the terminal's encoding lacks are shown as \u20ac, and non-text bytes of a path as \udcff.
        sys.stdout.reconfigure(errors="backslashreplace")
    console = open_console()
    if options.verify or options.html or not options.show:
        inspection = inspect(directory, parts, options.verify, quiet=False)
        if options.verify or not options.html:
            print_document(document(directory, inspection, options.verify), console)
        if options.verify:
            shards, rows = inspection.manifest["shards"]["count"], inspection.manifest["counts"]["rows"]
            console.print(f"{directory}: {shards} shards and {rows} rows match the manifest", soft_wrap=True)
        if options.html:
            shown = document(directory, inspection, options.verify, page_rows(directory, inspection))
            write_atomic(options.html.absolute(), page.render(shown).encode(errors="backslashreplace"))
            console.print(str(options.html), soft_wrap=True, highlight=False)
    if options.show:
        dataset = open_dataset(directory, parts[0], output_files.reader)
        tokenizer = open_tokenizer(directory, dataset.manifest)
        for row in excerpts(dataset, tokenizer, range(min(options.show, dataset.rows))):
            console.print(excerpt_text(row), highlight=False, soft_wrap=True)
