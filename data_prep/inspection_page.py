"""What inspect_shards --html writes: the figures of an output, and some of its rows, as one HTML file."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.command import UserError
from bert_jax.data.manifest import MANIFEST, Part
from bert_jax.data.shards import Dataset
from bert_jax.reporting import page
from bert_jax.reporting.curves import Chart, Series, number, percent
from bert_jax.reporting.page import Bar, Tile
from bert_jax.tokenizer import Tokenizer
from data_prep import checksums, formats
from data_prep.audit import Verified
from data_prep.figures import NO_LABEL, Figures, binned, masked, masker_of
from data_prep.shown import Piece, Shown, shown_rows
from data_prep.tables import about, document_counts, label_names, replaced, top_tokens

_EXAMPLES = 6
_BINS = 32
_TOKENS = 20
_HEAD, _FOOTER = "<!DOCTYPE html>", "Drawn by data_prep.inspect_shards from "
_TAIL = 1 << 16  # bytes that hold the footer and the script behind it


def inspection_page(directory: Path, found: Verified, verified: bool) -> str:
    """The page of an output, or of the parts in `found`; it says whether every byte was checked.

    Raises UserError for a shard that cannot be read.
    """
    manifest, tokenizer = found.manifest, found.tokenizer
    figures = {part: one for part, one in found.figures.items() if one.rows}
    state = "Every byte was checked against the manifest." if verified else "Not checked; --verify checks every byte."
    header = f"<p>{page.text(_kind(manifest))}</p><p>{page.text(state)}</p>"
    sections = [
        page.tiles(_tiles(manifest, found.figures, tokenizer.roles.unk_token)),
        page.section("What became of the documents", _documents(manifest, list(found.figures))),
        page.section("Lengths and masks", page.chart_grid(_charts(manifest, figures)), _drawn(manifest)),
        page.section("Shares", _shares(manifest, figures, tokenizer)),
        page.section(
            "Rows", _examples(directory, manifest, tokenizer, figures), _legend(manifest, tokenizer.roles.mask_token)
        ),
        page.section("Commonest tokens", _tokens(figures, tokenizer), "Of the text, special tokens apart."),
        page.section("How it was made", page.settings(_settings(directory, manifest))),
        f"<footer>{_FOOTER}{page.text(directory)}.</footer>",
    ]
    return page.page(directory.name, header, sections)


def check_page(target: Path, directory: Path) -> None:
    """Raises UserError for a page that would lie in a finished output, or in place of what is no such page."""
    place = Path(os.path.realpath(target.parent)) / target.name
    inspected = Path(os.path.realpath(directory))
    for folder in (place, *place.parents):
        whole = folder == inspected or (folder / checksums.SUMS).exists()
        if whole and (folder / MANIFEST).exists():
            raise UserError(f"--html {target} is inside of {folder}, which never changes. Name a file beside it")
    if os.path.lexists(place) and not _is_page(place):
        raise UserError(f"--html {target} exists, and is no page of inspect_shards. Name another file, or remove it")


def _is_page(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(len(_HEAD))
        file.seek(max(path.stat().st_size - _TAIL, 0))
        return head == _HEAD.encode() and f"<footer>{_FOOTER}".encode() in file.read()


def _kind(manifest: Mapping[str, Any]) -> str:
    masking, vocab_size = manifest["masking"], manifest["tokenizer"]["vocab_size"]
    drawn_by = "another program" if manifest["imported"] else masking["unit"]
    return (
        f"Rows for pretraining: {manifest['objective']}, {manifest['seq_len']} slots, "
        f"{masking['kind']} masks by {drawn_by}, {vocab_size:,} tokens in the vocabulary"
    )


def _tiles(manifest: Mapping[str, Any], figures: Mapping[Part, Figures], unk: str) -> list[Tile]:
    tiles = [
        Tile(f"{found.rows:,}", f"Rows for {'training' if part == 'train' else 'evaluation'}")
        for part, found in figures.items()
    ]
    held = list(figures.values())
    tokens, predicted = sum(found.tokens for found in held), sum(found.predicted for found in held)
    slots = sum(found.rows for found in held) * manifest["seq_len"]
    unknown = sum(found.unknown for found in held)
    text = sum(found.text_tokens for found in held)
    size = sum(shard["bytes"] for shard in manifest["shards"] if shard["name"].split("/")[0] in figures)
    return [
        *tiles,
        Tile(number(tokens), "Tokens", f"{size / max(tokens, 1):.2f} bytes each on disk"),
        Tile(percent(tokens / max(slots, 1)), "Slots filled", "the rest is padding"),
        Tile(percent(predicted / max(tokens, 1)), "Tokens predicted", f"{number(predicted)} an epoch"),
        Tile(percent(unknown / max(text, 1)), f"{unk} in the text", f"{unknown:,} tokens"),
    ]


def _documents(manifest: Mapping[str, Any], parts: list[Part]) -> str:
    columns, rows = document_counts(manifest, parts)
    return page.table(["", *columns], rows)


def _charts(manifest: Mapping[str, Any], figures: Mapping[Part, Figures]) -> list[Chart]:
    words = "tokens" if manifest["masking"]["unit"] == "token" else "words"
    charts = [
        _histogram("Length of a sequence", "of sequences", "slots", {p: f.lengths for p, f in figures.items()}),
        _histogram("Filled slots of a row", "of rows", "slots", {p: f.filled for p, f in figures.items()}),
        _histogram("Predictions in a sequence", "of sequences", "predictions", _predictions(figures)),
        _histogram(f"Predicted {words} side by side", "of runs", words, {p: f.runs for p, f in figures.items()}),
    ]
    if manifest["pack"] > 1:
        packed = {part: found.packed for part, found in figures.items()}
        charts.insert(2, _histogram("Sequences in a row", "of rows", "sequences", packed))
    return [chart for chart in charts if chart.series]


def _predictions(figures: Mapping[Part, Figures]) -> dict[Part, Int64[np.ndarray, "..."]]:
    return {part: found.predictions for part, found in figures.items()}


def _histogram(title: str, unit: str, axis: str, counts: Mapping[Part, Int64[np.ndarray, "..."]]) -> Chart:
    """Shares by value, with the values that no part has left out at both ends; train and eval side by side."""
    counts = {part: values for part, values in counts.items() if values[1:].any()}
    present = [np.flatnonzero(values[1:]) + 1 for values in counts.values()]
    if not present:
        return Chart(title, unit, (), percent)
    last = max(int(values[-1]) for values in present)
    bins = {part: binned(values[: last + 1], _BINS) for part, values in counts.items()}
    series = tuple(
        Series(
            str(part),
            np.array([first for first, _, _ in found], np.float64),
            np.array([count / counts[part][1:].sum() for _, _, count in found], np.float64),
        )
        for part, found in bins.items()
    )
    width = max(1, -(-last // _BINS))
    return Chart(title, unit, series, percent, axis=axis, bar_width=width)


def _drawn(manifest: Mapping[str, Any]) -> str:
    kept = "as they are stored" if manifest["masking"]["kind"] == "static" else "as a loader draws them in epoch 0"
    return f"Masks are shown {kept}. Move a pointer over a chart to read it."


def _shares(manifest: Mapping[str, Any], figures: Mapping[Part, Figures], tokenizer: Tokenizer) -> str:
    """Labels, and what stands in the place of a predicted token, for each part."""
    names = label_names(manifest)
    labels = {
        part: [(names.get(label, str(label)), count) for label, count in found.labels.items() if count]
        for part, found in figures.items()
        if found.labels[NO_LABEL] < found.sequences
    }
    stands = {part: replaced(found, tokenizer) for part, found in figures.items()}
    panels = []
    for title, shares in (("next sentence", labels), ("a predicted token is shown as", stands)):
        for part, counts in shares.items():
            total = max(sum(count for _, count in counts), 1)
            bars = page.bar_list(Bar(name, count / total, percent(count / total)) for name, count in counts)
            panels.append(f"<div><h3>{page.text(part)} <span>{page.text(title)}</span></h3>{bars}</div>")
    return f'<div class="panels">{"".join(panels)}</div>'


def _tokens(figures: Mapping[Part, Figures], tokenizer: Tokenizer) -> str:
    panels = []
    for part, found in figures.items():
        top = top_tokens(found, tokenizer, _TOKENS)
        most = max((share for _, _, share in top), default=1.0)
        bars = page.bar_list(Bar(name, share / most, percent(share)) for name, _, share in top)
        panels.append(f"<div><h3>{page.text(part)}</h3>{bars}</div>")
    return f'<div class="panels">{"".join(panels)}</div>'


def _examples(
    directory: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer, figures: Mapping[Part, Figures]
) -> str:
    """Rows spread evenly over the first part that has any."""
    part = next(iter(figures), None)
    if part is None:
        return ""
    dataset = Dataset(directory, part, manifest, formats.reader(manifest))
    indices = np.unique(np.linspace(0, dataset.rows - 1, _EXAMPLES + 2).astype(np.int64)[1:-1])
    rows = masked(dataset.gather(indices), masker_of(directory, manifest, tokenizer), dataset.max_predictions)
    names = label_names(manifest)
    return "".join(_example(shown, int(indices[shown.row]), names) for shown in shown_rows(rows, tokenizer))


def _example(shown: Shown, row: int, names: Mapping[int, str]) -> str:
    label = "" if shown.label < 0 else f"{names.get(shown.label, shown.label)}"
    head = f"row {row:,} <span>{shown.slots} slots</span>"
    segments = "".join(f"<p><b>{name}</b>{''.join(map(_piece, pieces))}</p>" for name, pieces in shown.segments.items())
    return f'<div class="example"><h3><div>{head}</div><span>{page.text(label)}</span></h3>{segments}</div>'


def _piece(piece: Piece) -> str:
    space = "" if piece.joined else " "
    if piece.state == "plain":
        return space + page.text(piece.seen)
    if piece.state == "special":
        return f'{space}<span class="mask">{page.text(piece.seen)}</span>'
    seen = f" <small>{page.text(piece.seen)}</small>" if piece.state == "random" else ""
    return f'{space}<mark class="{piece.state}">{page.text(piece.truth)}{seen}</mark>'


def _legend(manifest: Mapping[str, Any], mask: str) -> str:
    kept = "" if manifest["masking"]["kind"] == "static" else " (epoch 0)"
    return (
        f"Marked words are predicted{kept}: on blue the model sees {mask}, on orange the random token in small type, "
        "in a green frame the word itself. Rows are spread evenly over the part; nothing was picked."
    )


def _settings(directory: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    options = {
        name: value
        for name, value in manifest.items()
        if isinstance(value, str | int | float) and name not in ("schema_version", "unigram_counts")
    }
    return {
        "output": dict(about(directory, manifest)[-2:]),
        "options": options,
        "masking": manifest["masking"],
        "tokenizer": manifest["tokenizer"],
        "versions": manifest.get("versions", {}),
    }
