"""Joins outputs of build_examples: the parts of a job that ran apart, or an output and what is added to it."""

import io
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data.manifest import PARTS, Part, read_manifest, read_unigram_counts
from bert_jax.data.shards import Corrupt, check_sizes, read_shard
from bert_jax.errors import UserError
from bert_jax.progress import Reporter, print_note
from bert_jax.storage.files import atomic_folder, refuse_inside, write_atomic
from bert_jax.tokenization import tokenizer
from data_prep import build_options, output_files, summary
from data_prep.job import UNIGRAMS
from data_prep.summary import output_lines
from data_prep.units import summarise

# The keys of a manifest that are those of one share, or are computed for the whole.
_OF_SHARE = frozenset(
    ("sources", "counts", "skipped_reading", "cleaning", "parts", "shards", "versions", "shares", "unigram_counts")
    + ("unit_bytes",)
)


def merge(inputs: Sequence[Path], output: Path, *, quiet: bool = True) -> dict[str, Any]:
    """Joins outputs as the command does, and returns the manifest.

    Raises UserError for outputs that were made with different options, that hold the same share, or whose job has other
    parts, and for an output that exists.
    """
    outputs = sorted(
        ((read_manifest(folder), folder) for folder in inputs),
        key=lambda each: build_options.manifest_shares(each[0])[0]["number"],
    )
    for folder in inputs:
        refuse_inside(output, folder)
    _check_alike(outputs)
    _check_shares(outputs)
    with (
        atomic_folder(output) as folder,
        Reporter("merging", sum(len(manifest["shards"]) for manifest, _ in outputs), ("shards",), quiet) as reporter,
    ):
        for part in PARTS:
            (folder / part).mkdir()
        shutil.copytree(outputs[0][1] / "tokenizer", folder / "tokenizer")
        buffer = io.BytesIO()
        np.save(buffer, sum(read_unigram_counts(source, manifest) for manifest, source in outputs))
        write_atomic(folder / UNIGRAMS, buffer.getvalue())
        lengths = {part: np.zeros(outputs[0][0]["seq_len"] + 1, np.int64) for part in PARTS}
        for manifest, source in outputs:
            check_sizes(source, manifest["shards"])
            for shard in manifest["shards"]:
                lengths[shard["name"].split("/")[0]] += _lengths(source / shard["name"], manifest["seq_len"])
                _link(source / shard["name"], folder / shard["name"])
                reporter.advance(1, 1)
        merged = _merged([manifest for manifest, _ in outputs], lengths)
        output_files.write_with_manifest(folder, merged)
    if not quiet:
        train, held_out = (merged["parts"][part]["rows"] for part in PARTS)
        print_note(f"{output}: {train} rows for training, {held_out} for evaluation, of {len(merged['shares'])} shares")
        for line in output_lines(output, merged, tokenizer.load(output / "tokenizer")):
            print_note(line)
    return merged


def _check_alike(outputs: Sequence[tuple[dict[str, Any], Path]]) -> None:
    first, place = outputs[0]
    if first["format"] != "arrow":
        raise UserError(f"{place} has {first['format']} shards, but only Arrow shards can be merged. Build it again")
    for manifest, folder in outputs[1:]:
        for key in sorted({*first, *manifest} - _OF_SHARE):
            same = first.get(key) == manifest.get(key)
            if key == "masking":  # a part whose text has no unspaced script states no rule for words
                same = first[key] | {"words": ""} == manifest[key] | {"words": ""}
            if not same:
                raise UserError(
                    f"{folder} and {place} differ in {key}: {manifest.get(key)} and {first.get(key)}. "
                    "Build all parts with the same options"
                )


def _check_shares(outputs: Sequence[tuple[dict[str, Any], Path]]) -> None:
    """Raises UserError unless each number occurs once, and all parts of a divided job are there."""
    holders: dict[int, Path] = {}
    parts: dict[tuple[int, str], set[int]] = {}
    unit_bytes: dict[int, Path] = {}  # of the parts of the divided job
    for manifest, folder in outputs:
        for share in build_options.manifest_shares(manifest):
            number = share["number"]
            if number in holders:
                free = 1 + max(each["number"] for held, _ in outputs for each in build_options.manifest_shares(held))
                raise UserError(
                    f"{holders[number]} and {folder} are both share {number}. Build one of them with --part +{free}"
                )
            holders[number] = folder
            if share["of"]:
                parts.setdefault((share["of"], share["corpus"]), set()).add(number)
                unit_bytes.setdefault(manifest["unit_bytes"], folder)
    if len(parts) > 1:
        raise UserError(
            f"{outputs[0][1]} and others are parts of jobs with other files, weights or another number of parts. Give "
            "all parts the same --input, --weights and N"
        )
    if len(unit_bytes) > 1:
        (size, one), (other_size, other) = list(unit_bytes.items())[:2]
        raise UserError(f"{one} and {other} have units of {size} and {other_size} bytes. Give all parts one --unit_mb")
    for (of, _), numbers in parts.items():
        missing = [f"{number}/{of}" for number in range(of) if number not in numbers]
        if missing:
            listed = ", ".join(missing[:5]) + (", ..." if missing[5:] else "")
            raise UserError(f"--input lacks the parts {listed}. Build them, or name their folders")


def _lengths(path: Path, seq_len: int) -> Int64[np.ndarray, " n"]:
    """How many sequences of a shard have 0, 1, ..., T tokens, without the empty places of its rows."""
    try:
        lengths = read_shard(path).sequence_lengths
    except Corrupt as error:
        raise UserError(f"{path} is damaged ({error}). Copy it again, or build the part again") from error
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= seq_len:
        raise UserError(f"{path} is damaged (the length of a sequence is not 0 to {seq_len}). Copy it again")
    return np.bincount(lengths[lengths > 0], minlength=seq_len + 1)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)  # of a link, the file: a relative one would lead nowhere from there
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _merged(manifests: Sequence[dict[str, Any]], lengths: dict[Part, Int64[np.ndarray, " n"]]) -> dict[str, Any]:
    """The manifest of one job that had made all shares."""
    parts: dict[str, Any] = {}
    for part in PARTS:
        held = _sum(manifest["parts"][part] for manifest in manifests)
        positions = held["rows"] * manifests[0]["seq_len"]
        held["filled"] = round(held["tokens"] / positions, 6) if positions else 0.0
        parts[part] = held | {"lengths": summarise(lengths[part])}
    by_number: dict[int, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for manifest in manifests:
        sources = iter(manifest["sources"])
        for share in build_options.manifest_shares(manifest):
            by_number[share["number"]] = share, list(itertools.islice(sources, share["sources"]))
    every = [shard for manifest in manifests for shard in manifest["shards"]]
    skipped: Counter[str] = Counter()
    for manifest in manifests:
        skipped.update(manifest["skipped_reading"])
    cleaning = summary.merged(manifest.get("cleaning", []) for manifest in manifests)
    return manifests[0] | {
        # A part whose text has no script without spaces between words states no rule for words.
        "masking": next((each for each in manifests if each["masking"].get("words")), manifests[0])["masking"],
        "sources": [source for number in sorted(by_number) for source in by_number[number][1]],
        "counts": _sum(manifest["counts"] for manifest in manifests),
        "skipped_reading": dict(sorted(skipped.items())),
        **({"cleaning": cleaning} if cleaning else {}),
        "parts": parts,
        "unigram_counts": UNIGRAMS,
        "shards": sorted(every, key=_place),
        "shares": [by_number[number][0] for number in sorted(by_number)],
    }


def _place(shard: Mapping[str, Any]) -> tuple[int, int]:
    """What orders shards: the part, and the number in the name, train/shard-00012.arrow."""
    part, _, name = shard["name"].partition("/")
    return PARTS.index(part), int(name.partition(".")[0].rpartition("-")[2])


def _sum(counts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sums of counts, and of the documents skipped for each reason; other values are left out."""
    total: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for each in counts:
        total.update({name: value for name, value in each.items() if isinstance(value, int)})
        skipped.update(each["skipped"])
    return {**total, "skipped": dict(sorted(skipped.items()))}
