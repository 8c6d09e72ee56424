"""Joins outputs from build-examples: separately built parts, or an output and text added to it."""

import functools
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data.manifest import PARTS, Part, ShardTable, read_manifest, read_shard_table, read_unigram_counts
from bert_jax.data.shards import Corrupt, check_sizes, read_shard
from bert_jax.errors import UserError
from bert_jax.progress import Reporter, print_note
from bert_jax.storage.files import atomic_folder, refuse_inside, write_atomic
from bert_jax.tokenization import tokenizer
from data_prep import build_options, output_files, summary
from data_prep.job import UNIGRAMS, npy_bytes, sum_counts, sum_part
from data_prep.summary import output_lines

# Manifest keys that may differ between shares, or are computed again for the whole.
_OF_SHARE = {"sources", "counts", "skipped_reading", "cleaning", "parts", "shards", "versions", "shares"}
_OF_SHARE |= {"unigram_counts", "unit_bytes"}


def merge(inputs: Sequence[Path], output: Path, *, quiet: bool = True) -> dict[str, Any]:
    """Joins outputs as the command does, and returns the manifest.

    Raises:
        UserError: The inputs have different options, hold the same share or lack a part, or the output exists.
    """
    read = [(read_manifest(folder), folder) for folder in inputs]
    # In the order of their shares, so the result does not depend on the order of `inputs`.
    outputs = sorted(read, key=lambda pair: build_options.manifest_shares(pair[0])[0]["number"])
    for folder in inputs:
        refuse_inside(output, folder)
    _check_alike(outputs)
    _check_shares(outputs)
    count = sum(manifest["shards"]["count"] for manifest, _ in outputs)
    with atomic_folder(output) as folder, Reporter("merging", count, ("shards",), quiet) as reporter:
        for part in PARTS:
            (folder / part).mkdir()
        shutil.copytree(outputs[0][1] / "tokenizer", folder / "tokenizer")
        counts = (read_unigram_counts(source, manifest) for manifest, source in outputs)
        unigrams = functools.reduce(np.add, counts)  # one array at a time, since a vocabulary is large
        write_atomic(folder / UNIGRAMS, npy_bytes(unigrams))
        lengths = {part: np.zeros(outputs[0][0]["seq_len"] + 1, np.int64) for part in PARTS}
        tables = [read_shard_table(source, manifest) for manifest, source in outputs]
        for (manifest, source), table in zip(outputs, tables, strict=True):
            check_sizes(source, table)
            for name in table.names.tolist():
                path, target = source / name, folder / name
                lengths[name.split("/")[0]] += _lengths(path, manifest["seq_len"])
                try:
                    os.link(path.resolve(), target)  # resolved, because a symbolic link may be relative
                except OSError:  # another file system, or one without hard links
                    shutil.copyfile(path, target)
                reporter.advance(1, 1)
        merged = _merged([manifest for manifest, _ in outputs], lengths)
        output_files.write_with_manifest(folder, merged, _in_order(tables))
    if not quiet:
        train, held_out = (merged["parts"][part]["rows"] for part in PARTS)
        print_note(f"{output}: {train} rows for training, {held_out} for evaluation, of {len(merged['shares'])} shares")
        for line in output_lines(output, merged, tokenizer.load(output / "tokenizer")):
            print_note(line)
    return merged


def _check_alike(outputs: Sequence[tuple[dict[str, Any], Path]]) -> None:
    first, first_folder = outputs[0]
    if first["format"] != "arrow":
        raise UserError(
            f"{first_folder} has {first['format']} shards, but only Arrow shards can be merged. Build it again"
        )
    for manifest, folder in outputs[1:]:
        for key in sorted({*first, *manifest} - _OF_SHARE):
            same = first.get(key) == manifest.get(key)
            if key == "masking":  # a part without unspaced scripts states no rule for words
                same = first[key] | {"words": ""} == manifest[key] | {"words": ""}
            if not same:
                raise UserError(
                    f"{folder} and {first_folder} differ in {key}: {manifest.get(key)} and {first.get(key)}. "
                    "Build all parts with the same options"
                )


def _check_shares(outputs: Sequence[tuple[dict[str, Any], Path]]) -> None:
    """Raises UserError unless share numbers are unique and a divided job has all its parts."""
    holders: dict[int, Path] = {}
    parts: dict[tuple[int, str], set[int]] = {}
    unit_bytes: dict[int, Path] = {}  # unit sizes of the divided job, each with a part that has it
    for manifest, folder in outputs:
        for share in build_options.manifest_shares(manifest):
            number = share["number"]
            if number in holders:
                free = 1 + max(held["number"] for other, _ in outputs for held in build_options.manifest_shares(other))
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
        (size, folder), (other_size, other) = list(unit_bytes.items())[:2]
        raise UserError(
            f"{folder} and {other} have units of {size} and {other_size} bytes. Give all parts one --unit_mb"
        )
    for (of, _), numbers in parts.items():
        missing = [f"{number}/{of}" for number in range(of) if number not in numbers]
        if missing:
            listed = ", ".join(missing[:5]) + (", ..." if missing[5:] else "")
            raise UserError(f"--input lacks the parts {listed}. Build them, or name their folders")


def _lengths(path: Path, seq_len: int) -> Int64[np.ndarray, " n"]:
    """Counts a shard's sequences with 0, 1, ..., T tokens, without empty places."""
    try:
        lengths = read_shard(path).sequence_lengths
    except Corrupt as error:
        raise UserError(f"{path} is damaged ({error}). Copy it again, or build the part again") from error
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= seq_len:
        raise UserError(f"{path} is damaged (the length of a sequence is not 0 to {seq_len}). Copy it again")
    return np.bincount(lengths[lengths > 0], minlength=seq_len + 1)


def _in_order(tables: Sequence[ShardTable]) -> ShardTable:
    """Joins tables, and sorts them by part and by the number in a name: train/shard-00012.arrow."""
    joined = ShardTable(*(np.concatenate(columns) for columns in zip(*map(_columns, tables), strict=True)))

    def place(name: str) -> tuple[int, int]:
        # As text, 100000 would precede 99999.
        part, _, rest = name.partition("/")
        return PARTS.index(part), int(rest.partition(".")[0].rpartition("-")[2])

    places = [place(name) for name in joined.names.tolist()]
    return joined.select(np.array(sorted(range(len(places)), key=places.__getitem__), np.int64))


def _columns(table: ShardTable) -> tuple[np.ndarray, ...]:
    return table.names, table.rows, table.bytes, table.digests


def _merged(manifests: Sequence[dict[str, Any]], lengths: dict[Part, Int64[np.ndarray, " n"]]) -> dict[str, Any]:
    """Makes the manifest that one job for all shares would write."""
    by_number: dict[int, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for manifest in manifests:
        sources = iter(manifest["sources"])
        for share in build_options.manifest_shares(manifest):
            by_number[share["number"]] = share, list(itertools.islice(sources, share["sources"]))
    skipped: Counter[str] = Counter()
    for manifest in manifests:
        skipped.update(manifest["skipped_reading"])  # unlike a sum of Counters, this keeps counts of 0
    cleaning = summary.merged(manifest.get("cleaning", []) for manifest in manifests)

    return manifests[0] | {
        # The rule for unspaced scripts, if any part has them.
        "masking": next((held for held in manifests if held["masking"].get("words")), manifests[0])["masking"],
        "sources": [source for number in sorted(by_number) for source in by_number[number][1]],
        "counts": sum_counts(manifest["counts"] for manifest in manifests),
        "skipped_reading": dict(sorted(skipped.items())),
        **({"cleaning": cleaning} if cleaning else {}),
        "parts": {part: sum_part((held["parts"][part] for held in manifests), lengths[part]) for part in PARTS},
        "unigram_counts": UNIGRAMS,
        "shares": [by_number[number][0] for number in sorted(by_number)],
    }
