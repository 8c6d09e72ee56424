"""Looks into what build_examples wrote: figures, rows a person can read, and a check of every byte."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.bar import Bar
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bert_jax import command
from bert_jax.command import Parser, UserError
from bert_jax.data.example import Rows
from bert_jax.data.manifest import MANIFEST, PARTS, Part, read_manifest, read_unigram_counts
from bert_jax.data.shards import Dataset, check_sizes, open_dataset
from bert_jax.tokenizer import Tokenizer
from data_prep.audit import tokenizer_of, verify

DESCRIPTION = """\
Shows what data_prep.build_examples wrote, in figures; with --show as text; with --verify checks it.

  python -m data_prep.inspect_shards data/books_128
  python -m data_prep.inspect_shards data/books_128/eval --show 5
  python -m data_prep.inspect_shards data/books_128 --verify

--verify reads every byte, and exits with 2 and a line that names the file where something is not as it should be:
names, sizes and hashes; the rows (docs/data_format.md, guarantees 3, 4 and 7); static masks, drawn again; the counts
of rows, tokens and predictions, and the sums of all; unigram counts; sequence keys; the tokenizer. It has not the
text, so it takes the manifest's word for how many documents and sentences that had.
In --show, {[MASK]: cat} is a masked position of a static mask with what stood there; a dynamic mask is not stored.
"""

_LABELS = {0: "B is next", 1: "B is random", -1: "no label"}
_LENGTH_BINS = 8
_TOP_TOKENS = 12
_WIDTH = 100


def parts_of(path: Path) -> tuple[Path, tuple[Part, ...]]:
    """The output folder and the parts meant by DIR, DIR/train or DIR/eval."""
    if path.name in PARTS and not (path / MANIFEST).exists():
        return path.parent, ("train" if path.name == "train" else "eval",)
    return path, ("train", "eval")


def summary(directory: Path, parts: Sequence[Part] = ("train", "eval")) -> Iterator[Table]:
    """Tables of an output: what it is, counts by part, lengths, next-sentence balance, commonest tokens."""
    manifest = read_manifest(directory)
    check_sizes(directory, manifest["shards"])
    yield _about(directory, manifest)
    yield _counts(manifest, parts)
    for part in parts:
        dataset = Dataset(directory, part, manifest)
        if dataset.rows:
            yield _lengths(dataset)
    yield _tokens(directory, manifest)


def readable_rows(dataset: Dataset, tokenizer: Tokenizer, count: int) -> Iterator[str]:
    """The first rows of a part as text, a paragraph each: key, label in words, segments A and B."""
    rows = dataset.gather(np.arange(min(count, dataset.rows)))
    for row in range(len(rows.input_ids)):
        start = 0
        for sequence in np.flatnonzero(rows.sequence_lengths[row]):
            length = int(rows.sequence_lengths[row, sequence])
            first = int(rows.first_segment_lengths[row, sequence])
            key = int(rows.sequence_keys[row, sequence])
            label = _LABELS[int(rows.next_sentence_labels[row, sequence])]
            lines = [f"row {row}  key {key >> 32:#x}:{key & 0xFFFFFFFF}  {length} of {dataset.seq_len} slots  {label}"]
            segments = [("A", start, start + first), ("B", start + first, start + length)]
            for name, begin, end in segments:
                if begin < end:
                    text = _text(rows, row, begin, end, tokenizer)
                    lines.append(textwrap.fill(text, _WIDTH, initial_indent=f"  {name}: ", subsequent_indent=" " * 5))
            yield "\n".join(lines)
            start += length


def _text(rows: Rows, row: int, begin: int, end: int, tokenizer: Tokenizer) -> str:
    """Slots [begin, end) of a row as words; a masked one with the truth, as {[MASK]: cat}."""
    hidden = {}
    if rows.masked_positions is not None and rows.masked_ids is not None and rows.masked_counts is not None:
        real = int(rows.masked_counts[row])
        truths = tokenizer.tokens(rows.masked_ids[row, :real].tolist())
        hidden = dict(zip(rows.masked_positions[row, :real].tolist(), truths, strict=True))
    words: list[str] = []
    for slot, token in enumerate(tokenizer.tokens(rows.input_ids[row, begin:end].tolist()), start=begin):
        if slot in hidden:
            words.append(f"{{{token}: {hidden[slot]}}}")
        elif words and tokenizer.continuation[rows.input_ids[row, slot]] and slot - 1 not in hidden:
            words[-1] += token.removeprefix("##")
        else:
            words.append(token)
    return " ".join(words)


def _about(directory: Path, manifest: dict[str, Any]) -> Table:
    masking, tokenizer = manifest["masking"], manifest["tokenizer"]
    table = Table(title=str(directory), show_header=False, title_justify="left")
    table.add_row("objective", f"{manifest['objective']}, rows of {manifest['seq_len']} slots, pack {manifest['pack']}")
    table.add_row(
        "masking",
        f"{masking['kind']}, by {masking['unit']}, rate {masking['rate']}, at most {masking['max_predictions']} a row",
    )
    case = "lower-cased" if tokenizer["lowercase"] else "cased"
    table.add_row("tokenizer", f"{tokenizer['vocab_size']} tokens, {case}, {tokenizer['hash'][:12]}")
    table.add_row("seed, pairings", f"{manifest['seed']}, {manifest['dupe_factor']} of each document")
    size = sum(source["bytes"] for source in manifest["sources"])
    table.add_row("sources", f"{len(manifest['sources'])} files, {size / 1e6:.1f} MB as stored")
    shards = manifest["shards"]
    table.add_row("shards", f"{len(shards)} files, {sum(shard['bytes'] for shard in shards) / 1e6:.1f} MB")
    return table


def _counts(manifest: dict[str, Any], parts: Sequence[Part]) -> Table:
    table = Table(title="counts", title_justify="left")
    table.add_column("")
    for part in parts:
        table.add_column(part, justify="right")
    held = [manifest["parts"][part] for part in parts]
    for name in ("documents", "sentences", "source_tokens", "rows", "sequences", "tokens", "predictions"):
        table.add_row(name, *(f"{counts[name]:,}" for counts in held))
    for reason in sorted({reason for counts in held for reason in counts["skipped"]}):
        table.add_row(f"skipped: {reason}", *(f"{counts['skipped'].get(reason, 0):,}" for counts in held))
    slots = [counts["rows"] * manifest["seq_len"] for counts in held]
    filled = (f"{counts['tokens'] / whole:.1%}" if whole else "" for counts, whole in zip(held, slots, strict=True))
    table.add_row("slots filled", *filled)
    return table


def _lengths(dataset: Dataset) -> Table:
    """Lengths of sequences as a histogram, and what share of them is labelled what."""
    edges = np.linspace(0, dataset.seq_len, _LENGTH_BINS + 1).astype(np.int64)
    histogram = np.zeros(_LENGTH_BINS, np.int64)
    labels = dict.fromkeys(_LABELS, 0)
    for number in range(len(dataset.shards)):
        rows = dataset.shard_rows(number)
        present = rows.sequence_lengths > 0
        bins = np.searchsorted(edges, rows.sequence_lengths[present].astype(np.int64), side="left") - 1
        histogram += np.bincount(bins, minlength=_LENGTH_BINS)
        for label in labels:
            labels[label] += int((rows.next_sentence_labels[present] == label).sum())
    told = ", ".join(f"{_LABELS[label]} {count / histogram.sum():.1%}" for label, count in labels.items() if count)
    table = Table(title=f"{dataset.part}: lengths of sequences ({told})", title_justify="left")
    table.add_column("slots")
    table.add_column("sequences", justify="right")
    table.add_column("", width=40)
    for low, high, count in zip(edges[:-1], edges[1:], histogram, strict=True):
        table.add_row(f"{low + 1}-{high}", f"{count:,}", Bar(int(histogram.max()), 0, int(count), width=40))
    return table


def _tokens(directory: Path, manifest: dict[str, Any]) -> Table:
    unigrams = read_unigram_counts(directory, manifest)
    tokenizer = tokenizer_of(directory, manifest)
    table = Table(title="commonest tokens of train", title_justify="left", show_header=False)
    total = max(int(unigrams.sum()), 1)
    commonest = np.argsort(-unigrams, kind="stable")[:_TOP_TOKENS]
    for name, count in zip(tokenizer.tokens(commonest.tolist()), unigrams[commonest].tolist(), strict=True):
        table.add_row(name, f"{count:,}", f"{count / total:.2%}")
    return table


def main(arguments: Sequence[str]) -> None:
    parser = Parser("data_prep.inspect_shards", DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", help="the output of build_examples, or its train or eval")
    parser.add_argument("--verify", action="store_true", help="check all that the shards can tell; default: do not")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the first N rows as text; default 0")
    given = parser.parse_args(arguments)
    if given.show < 0:
        raise UserError(f"--show {given.show}; it must be at least 0")
    directory, parts = parts_of(Path(given.directory).absolute())
    console = Console(width=None if Console().is_terminal else _WIDTH)
    if given.verify:
        manifest = read_manifest(directory)
        stderr = Console(stderr=True)
        with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
            task = progress.add_task("verifying", total=manifest["counts"]["rows"])
            verify(directory, lambda rows: progress.advance(task, rows))
        shards, rows = len(manifest["shards"]), manifest["counts"]["rows"]
        console.print(f"{directory}: {shards} shards and {rows} rows are as the manifest says", soft_wrap=True)
    if given.show:
        dataset = open_dataset(directory, parts[0])
        for text in readable_rows(dataset, dataset.tokenizer(), given.show):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    if not given.verify and not given.show:
        for table in summary(directory, parts):
            console.print(table)


if __name__ == "__main__":
    command.run(main)
