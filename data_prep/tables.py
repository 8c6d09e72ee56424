"""What inspect_shards prints: what an output is, what became of the documents, and what the rows hold.

Names and tokens come from outside: the tables are for a console without markup.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from bert_jax.data.manifest import Part
from bert_jax.data.masking import MaskingRule
from bert_jax.tokenizer import Tokenizer
from data_prep.figures import NO_LABEL, REPLACEMENTS, Figures, binned
from data_prep.lengths import summarise

LABELS = {
    "nsp": {0: "B is next", 1: "B is random"},
    "sop": {0: "in order", 1: "swapped"},
}
_BINS = 8
_BAR = 40
_TOKENS = 12
_RUNS = 12


def tables(
    directory: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer, figures: Mapping[Part, Figures]
) -> Iterator[Table]:
    """The tables of an output, in reading order; `figures` are of the parts to be told of."""
    yield _two_columns(str(directory), about(directory, manifest))
    yield _counts(manifest, figures, tokenizer)
    for part, found in figures.items():
        if found.rows:
            yield _lengths(part, manifest, found)
            yield _masks(part, manifest, found, tokenizer)
    yield _tokens(figures, tokenizer)


def label_names(manifest: Mapping[str, Any]) -> dict[int, str]:
    """The next-sentence labels of an objective in words."""
    return LABELS.get(manifest["objective"], {}) | {NO_LABEL: "no label"}


def about(directory: Path, manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was asked of build_examples."""
    masking, tokenizer = manifest["masking"], manifest["tokenizer"]
    rule = MaskingRule.from_manifest(masking)
    case = "lower-cased" if tokenizer["lowercase"] else "cased"
    size = sum(source["bytes"] for source in manifest["sources"])
    shards = manifest["shards"]
    drawn = (
        f"{masking['kind']}, by {masking['unit']}, rate {masking['rate']}, "
        f"at most {masking['max_predictions']} a row, split {'/'.join(f'{100 * x:g}' for x in rule.split)}"
    )
    made = f"{manifest['seed']}, {manifest['dupe_factor']} of each document"
    if manifest["imported"]:
        share, most = f"{masking['rate']:.1%}", masking["max_predictions"]
        drawn = f"static, by another program: {share} of the slots, at most {most} a row"
        made = "unknown: the rows are imported"
    return [
        ("objective", f"{manifest['objective']}, rows of {manifest['seq_len']} slots, pack {manifest['pack']}"),
        ("masking", drawn),
        ("tokenizer", f"{tokenizer['vocab_size']} tokens, {case}, {tokenizer['hash'][:12]}"),
        ("seed, pairings", made),
        ("sources", f"{len(manifest['sources'])} files, {size / 1e6:.1f} MB as stored"),
        ("shards", f"{len(shards)} {manifest['format']} files, {sum(shard['bytes'] for shard in shards) / 1e6:.1f} MB"),
    ]


def document_counts(manifest: Mapping[str, Any], parts: Sequence[Part]) -> tuple[list[str], list[list[str]]]:
    """What became of every document: columns (the parts, and all of them with what reading left out), and rows.

    One part alone has no column of all.
    """
    columns = {str(part): manifest["parts"][part] for part in parts}
    if len(parts) > 1:
        columns["all"] = manifest["counts"]
    reasons = sorted({reason for counts in columns.values() for reason in counts["skipped"]})
    rows = [["documents used", *(f"{counts['used']:,}" for counts in columns.values())]]
    for reason in reasons:
        rows.append([f"skipped: {reason}", *(f"{counts['skipped'].get(reason, 0):,}" for counts in columns.values())])
    rows.append(["documents in all", *(f"{counts['documents']:,}" for counts in columns.values())])
    return list(columns), rows


def _two_columns(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _counts(manifest: Mapping[str, Any], figures: Mapping[Part, Figures], tokenizer: Tokenizer) -> Table:
    table = Table(title="counts", title_justify="left")
    table.add_column("")
    columns, documents = document_counts(manifest, list(figures))
    for column in columns:
        table.add_column(column, justify="right")
    for row in documents:
        table.add_row(*row)
    table.add_section()
    held = [manifest["parts"][part] for part in figures]
    for name in ("sentences", "source_tokens", "rows", "sequences", "tokens", "predictions"):
        table.add_row(name, *(f"{counts[name]:,}" for counts in held))
    table.add_section()
    for name, shares in {
        "slots filled": [found.filled_share for found in figures.values()],
        "predicted, of tokens": [found.predicted / max(found.tokens, 1) for found in figures.values()],
        f"{tokenizer.roles.unk_token}, of the text": [
            found.unknown / max(found.text_tokens, 1) for found in figures.values()
        ],
    }.items():
        rows = [found.rows for found in figures.values()]
        table.add_row(name, *(f"{share:.2%}" if some else "" for share, some in zip(shares, rows, strict=True)))
    return table


def _lengths(part: Part, manifest: Mapping[str, Any], figures: Figures) -> Table:
    """Lengths of sequences as a histogram, and what share of them is labelled what."""
    names = label_names(manifest)
    told = ", ".join(
        f"{names.get(label, label)} {count / figures.sequences:.1%}" for label, count in figures.labels.items() if count
    )
    found = summarise(figures.lengths)
    middle = f"mean {found['mean']:.1f}, median {found['median']}, 95% up to {found['p95']}"
    table = Table(title=f"{part}: lengths of sequences: {middle} ({told})", title_justify="left")
    table.add_column("slots")
    table.add_column("sequences", justify="right")
    table.add_column("", width=_BAR)
    _add_bars(table, binned(figures.lengths, _BINS))
    if len(figures.packed) > 2:
        table.add_section()
        table.add_row(Text("in a row", "dim"), Text("rows", "dim"))
        _add_bars(table, binned(figures.packed, _BINS))
    return table


def replaced(figures: Figures, tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """Predicted tokens by what stands in their place, in the words of the vocabulary."""
    names = (tokenizer.roles.mask_token, *REPLACEMENTS[1:])
    return list(zip(names, figures.replaced.tolist(), strict=True))


def _masks(part: Part, manifest: Mapping[str, Any], figures: Figures, tokenizer: Tokenizer) -> Table:
    """How many predictions a sequence has, how many words stand side by side, and what stands in their place."""
    drawn = "" if manifest["masking"]["kind"] == "static" else ", as epoch 0 draws them"
    total = max(figures.predicted, 1)
    told = ", ".join(f"{name} {count / total:.1%}" for name, count in replaced(figures, tokenizer))
    table = Table(title=f"{part}: masks{drawn} ({told})", title_justify="left")
    table.add_column("predictions")
    table.add_column("sequences", justify="right")
    table.add_column("", width=_BAR)
    _add_bars(table, binned(_trimmed(figures.predictions), _BINS))
    if figures.predictions[0]:
        table.add_row("none", f"{figures.predictions[0]:,}")
    table.add_section()
    words = "tokens" if manifest["masking"]["unit"] == "token" else "words"
    table.add_row(Text(f"{words} side by side", "dim"), Text("runs", "dim"))
    _add_bars(table, binned(_trimmed(figures.runs), _RUNS))
    return table


def _tokens(figures: Mapping[Part, Figures], tokenizer: Tokenizer) -> Table:
    table = Table(title="commonest tokens", title_justify="left")
    tops = [top_tokens(found, tokenizer, _TOKENS) for found in figures.values()]
    for part in figures:
        table.add_column(part)
        table.add_column("count", justify="right")
        table.add_column("share", justify="right")
    for line in itertools.zip_longest(*tops):
        told = (("", "", "") if top is None else (top[0], f"{top[1]:,}", f"{top[2]:.2%}") for top in line)
        table.add_row(*itertools.chain.from_iterable(told))
    return table


def top_tokens(figures: Figures, tokenizer: Tokenizer, most: int) -> list[tuple[str, int, float]]:
    """The commonest tokens of the text: name, count, share."""
    counts = figures.ordinary_unigrams
    total = max(int(counts.sum()), 1)
    top = np.argsort(-counts, kind="stable")[:most]
    return [
        (name, int(counts[token]), counts[token] / total)
        for name, token in zip(tokenizer.tokens(top.tolist()), top.tolist(), strict=True)
        if counts[token]
    ]


def _trimmed(counts: np.ndarray) -> np.ndarray:
    """Without the empty end."""
    return counts[: int(np.flatnonzero(counts).max(initial=1)) + 1]


class _Bar(Bar):
    """A bar that a terminal of any encoding can show."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.ascii_only:
            yield Segment("#" * round(self.end / self.size * _BAR))
        else:
            yield from super().__rich_console__(console, options)


def _add_bars(table: Table, bins: list[tuple[int, int, int]]) -> None:
    most = max(count for _, _, count in bins)
    for first, last, count in bins:
        name = str(first) if first == last else f"{first}-{last}"
        table.add_row(name, f"{count:,}", _Bar(max(most, 1), 0, count, width=_BAR))
