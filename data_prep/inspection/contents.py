"""What inspect_shards shows of an output: one document for the terminal and for the HTML page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.manifest import Part
from bert_jax.data.masking import MaskingRule
from bert_jax.data.shards import Dataset
from bert_jax.reporting.chart import Histogram, number, percent
from bert_jax.reporting.document import (
    Bar,
    Charts,
    Document,
    Excerpt,
    Excerpts,
    Panel,
    Panels,
    Section,
    Settings,
    Table,
    Tile,
)
from bert_jax.tokenizer import Tokenizer
from data_prep import formats
from data_prep.inspection.excerpts import excerpts
from data_prep.inspection.statistics import NO_LABEL, REPLACEMENTS, PartStatistics, open_masker, with_masks
from data_prep.inspection.verification import Inspection
from data_prep.lengths import summarise

PROGRAM = "data_prep.inspect_shards"
_LABELS = {
    "nsp": {0: "B is next", 1: "B is random"},
    "sop": {0: "in order", 1: "swapped"},
}
_PAGE_ROWS = 6
_TOKENS = 20

ByPart = Mapping[Part, PartStatistics]


def document(directory: Path, found: Inspection, verified: bool, rows: Sequence[Excerpt] = ()) -> Document:
    """Everything about the parts in `found`; `verified` says whether every byte was checked."""
    manifest, tokenizer = found.manifest, found.tokenizer
    filled = {part: statistics for part, statistics in found.statistics.items() if statistics.rows}
    return Document(
        title=directory.name,
        source=str(directory),
        program=PROGRAM,
        lines=[
            _kind(manifest),
            "Every byte was checked against the manifest." if verified else "Not checked; --verify checks every byte.",
        ],
        tiles=_tiles(manifest, found.statistics, tokenizer.roles.unk_token),
        sections=[
            Section("Counts", [_counts(manifest, found.statistics, tokenizer.roles.unk_token)]),
            _cleaning(manifest),
            Section("Lengths and masks", [Charts(_histograms(manifest, filled))], _mask_note(manifest)),
            Section("Shares", [Panels([*_labels(manifest, filled), *_replacements(filled, tokenizer)])]),
            Section("Rows", [Excerpts(rows)] if rows else [], _legend(manifest, tokenizer) if rows else "", True),
            Section("Most frequent tokens", [Panels(_tokens(filled, tokenizer))], "Without special tokens."),
            Section("How it was made", [Settings({"": _origin(manifest)})]),
            Section("Manifest", [Settings(_settings(manifest))], page_only=True),
        ],
    )


def label_names(manifest: Mapping[str, Any]) -> dict[int, str]:
    """The next-sentence labels of an objective in words."""
    return _LABELS.get(manifest["objective"], {}) | {NO_LABEL: "no label"}


def first_rows(dataset: Dataset, tokenizer: Tokenizer, count: int) -> list[Excerpt]:
    """The first rows of a part as they are stored: dynamic masks are not."""
    numbers = range(min(count, dataset.rows))
    rows = dataset.gather(np.arange(len(numbers)))
    return list(excerpts(rows, numbers, tokenizer, label_names(dataset.manifest)))


def page_rows(directory: Path, found: Inspection) -> list[Excerpt]:
    """Rows at even distances in the first part that has any, with the masks of epoch 0.

    Raises UserError for a shard that cannot be read.
    """
    part = next((part for part, statistics in found.statistics.items() if statistics.rows), None)
    if part is None:
        return []
    manifest, tokenizer = found.manifest, found.tokenizer
    dataset = Dataset(directory, part, manifest, formats.reader(manifest))
    numbers = np.unique(np.linspace(0, dataset.rows - 1, _PAGE_ROWS + 2).astype(np.int64)[1:-1])
    masker = open_masker(directory, manifest, tokenizer)
    rows = with_masks(dataset.gather(numbers), masker, dataset.max_predictions)
    return list(excerpts(rows, numbers.tolist(), tokenizer, label_names(manifest)))


def _kind(manifest: Mapping[str, Any]) -> str:
    masking, vocab_size = manifest["masking"], manifest["tokenizer"]["vocab_size"]
    return (
        f"Rows for pretraining: {manifest['objective']}, {manifest['seq_len']} tokens, "
        f"{masking['kind']} masks by {masking['unit']}, {vocab_size:,} tokens in the vocabulary"
    )


def _tiles(manifest: Mapping[str, Any], parts: ByPart, unk: str) -> list[Tile]:
    tiles = [
        Tile(f"{found.rows:,}", f"Rows for {'training' if part == 'train' else 'evaluation'}")
        for part, found in parts.items()
    ]
    tokens = sum(found.tokens for found in parts.values())
    predicted = sum(found.predicted for found in parts.values())
    positions = sum(found.positions for found in parts.values())
    unknown = sum(found.unknown for found in parts.values())
    text = sum(found.text_tokens for found in parts.values())
    size = sum(shard["bytes"] for shard in manifest["shards"] if shard["name"].split("/")[0] in parts)
    return [
        *tiles,
        Tile(number(tokens), "Tokens", f"{size / max(tokens, 1):.2f} bytes per token on disk"),
        Tile(percent(tokens / max(positions, 1)), "Positions filled", "the rest is padding"),
        Tile(percent(predicted / max(tokens, 1)), "Tokens predicted", f"{number(predicted)} per epoch"),
        Tile(percent(unknown / max(text, 1)), f"{unk} in the text", f"{unknown:,} tokens"),
    ]


def _counts(manifest: Mapping[str, Any], parts: ByPart, unk: str) -> Table:
    """Documents by what became of them, what the parts hold, and shares.

    Documents that were skipped when the text was read belong to no part: where both parts are shown, the column `all`
    counts them too.
    """
    stated = {str(part): manifest["parts"][part] for part in parts}
    with_all = stated | ({"all": manifest["counts"]} if len(parts) > 1 else {})
    reasons = sorted({reason for counts in with_all.values() for reason in counts["skipped"]})
    documents = [
        ["documents used", *(f"{counts['used']:,}" for counts in with_all.values())],
        *(
            [f"skipped: {reason}", *(f"{counts['skipped'].get(reason, 0):,}" for counts in with_all.values())]
            for reason in reasons
        ),
        ["documents in total", *(f"{counts['documents']:,}" for counts in with_all.values())],
    ]
    blank = [""] * (len(with_all) - len(stated))
    names = ("sentences", "source_tokens", "rows", "sequences", "tokens", "predictions")
    held = [[name.replace("_", " "), *(f"{counts[name]:,}" for counts in stated.values()), *blank] for name in names]
    shares = [
        [name, *(show(found) if found.rows else "" for found in parts.values()), *blank]
        for name, show in {
            "positions filled": lambda found: f"{found.tokens / max(found.positions, 1):.2%}",
            "tokens predicted": lambda found: f"{found.predicted / max(found.tokens, 1):.2%}",
            f"{unk} in the text": lambda found: f"{found.unknown / max(found.text_tokens, 1):.2%}",
            "words over the mask budget": lambda found: f"{found.long_words / found.words:.2%}" if found.words else "",
            "tokens in a sequence: mean": lambda found: f"{summarise(found.lengths)['mean']:.1f}",
            "tokens in a sequence: median": lambda found: f"{summarise(found.lengths)['median']}",
            "tokens in a sequence: 95th percentile": lambda found: f"{summarise(found.lengths)['p95']}",
        }.items()
    ]
    return Table(["", *with_all], [documents, held, shares])


def _cleaning(manifest: Mapping[str, Any]) -> Section:
    """What data_prep.clean did with the documents before the job: a group of rows for each of its reports."""
    groups, reports = [], manifest.get("cleaning", [])
    for report in reports:
        documents = report["documents"]
        counted = {
            "documents read": documents["read"],
            **{f"dropped: {reason}": count for reason, count in report["dropped"].items()},
            "documents kept": documents["kept"],
        }
        rows = [[name, f"{count:,}", percent(count / max(documents["read"], 1))] for name, count in counted.items()]
        unread = {f"unreadable: {reason}": count for reason, count in report["refused"].items()}
        lines = {"repeated lines removed": report["removed_lines"]} if report["removed_lines"] else {}
        groups.append([*rows, *([name, f"{count:,}", ""] for name, count in (lines | unread).items())])
    if not groups:
        return Section("Cleaning")
    named = ", ".join(report["report"] for report in reports)
    return Section(
        "Cleaning", [Table(["", "documents", "of those read"], groups)], f"By data_prep.clean, as in {named}."
    )


def _histograms(manifest: Mapping[str, Any], parts: ByPart) -> list[Histogram]:
    words = "tokens" if manifest["masking"]["unit"] == "token" else "words"

    titles = {
        "lengths": ("Length of a sequence", "of sequences", "tokens"),
        "filled": ("Filled positions of a row", "of rows", "tokens"),
        "packed": ("Sequences in a row", "of rows", "sequences"),
        "predictions": ("Predictions in a sequence", "of sequences", "predictions"),
        "runs": (f"Adjacent predicted {words}", "of runs", words),
    }
    return [
        Histogram(*title, {part: getattr(found, name) for part, found in parts.items()})
        for name, title in titles.items()
        if name != "packed" or manifest["pack"] > 1
    ]


def _mask_note(manifest: Mapping[str, Any]) -> str:
    static = manifest["masking"]["kind"] == "static"
    return f"Masks are those {'that are stored' if static else 'of epoch 0, as a loader chooses them'}."


def _labels(manifest: Mapping[str, Any], parts: ByPart) -> list[Panel]:
    """The next-sentence labels of the parts that have any."""
    names = label_names(manifest)
    return [
        _panel(part, "next sentence", [(names.get(label, str(label)), count) for label, count in found.labels.items()])
        for part, found in parts.items()
        if found.labels[NO_LABEL] < found.sequences
    ]


def _replacements(parts: ByPart, tokenizer: Tokenizer) -> list[Panel]:
    """What the model sees in the place of a predicted token, in the terms of the vocabulary."""
    names = (tokenizer.roles.mask_token, *REPLACEMENTS[1:])
    return [
        _panel(part, "a predicted token is shown as", list(zip(names, found.replaced.tolist(), strict=True)), True)
        for part, found in parts.items()
    ]


def _panel(part: Part, subtitle: str, counts: Sequence[tuple[str, int]], zeros: bool = False) -> Panel:
    total = max(sum(count for _, count in counts), 1)
    bars = [Bar(name, count / total, percent(count / total), number=count) for name, count in counts if count or zeros]
    return Panel(part, subtitle, bars)


def _tokens(parts: ByPart, tokenizer: Tokenizer) -> list[Panel]:
    panels = []
    for part, found in parts.items():
        top = found.most_frequent(tokenizer, _TOKENS)
        panels.append(
            Panel(part, "", [Bar(name, share / top[0][2], percent(share), number=count) for name, count, share in top])
        )
    return panels


def _legend(manifest: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    epoch = "" if manifest["masking"]["kind"] == "static" else " (in epoch 0)"
    return (
        f"Marked words are predicted{epoch}: on blue the model sees {tokenizer.roles.mask_token}, on orange the random "
        "token in small type, in a green frame the word itself. Rows are evenly spaced in the part, not hand-picked."
    )


def _origin(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What build_examples was asked for."""
    masking, tokenizer, shards = manifest["masking"], manifest["tokenizer"], manifest["shards"]
    case = "lower-cased" if tokenizer["lowercase"] else "cased"
    size = sum(source["bytes"] for source in manifest["sources"])
    shares = "/".join(f"{100 * share:g}" for share in MaskingRule.from_manifest(masking).split)
    masks = (
        f"{masking['kind']}, by {masking['unit']}, rate {masking['rate']}, at most {masking['max_predictions']} per "
        f"row, split {shares}"
    )
    return {
        "objective": f"{manifest['objective']}, rows of {manifest['seq_len']} tokens, pack {manifest['pack']}",
        "masking": masks,
        "tokenizer": f"{tokenizer['vocab_size']} tokens, {case}, {tokenizer['hash'][:12]}",
        "seed, pairings": f"{manifest['seed']}, {manifest['dupe_factor']} of each document",
        "sources": f"{len(manifest['sources'])} files, {size / 1e6:.1f} MB as stored",
        "shards": f"{len(shards)} {manifest['format']} files, {sum(shard['bytes'] for shard in shards) / 1e6:.1f} MB",
    }


def _settings(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    options = {
        name: value
        for name, value in manifest.items()
        if isinstance(value, str | int | float) and name not in ("schema_version", "unigram_counts")
    }
    groups = {name: manifest.get(name, {}) for name in ("masking", "tokenizer", "versions")}
    return {"options": options, **groups}
