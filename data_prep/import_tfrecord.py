"""Imports TFRecord files of google-research/bert's create_pretraining_data.py, or of a script with its layout."""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax import tokenizer as tokenizers
from bert_jax.command import UserError
from bert_jax.data.example import Rows
from bert_jax.data.manifest import COUNTED, PAIRS, PARTS, SCHEMA_VERSION, Part
from bert_jax.data.shards import Corrupt
from bert_jax.progress import Reporter
from bert_jax.storage.local import write_atomic
from bert_jax.tokenizer import Tokenizer
from data_prep import formats, readers
from data_prep.fill import row_batches
from data_prep.formats import tfrecord
from data_prep.inspection.row_checks import OF_OBJECTIVE, row_problems
from data_prep.inspection.statistics import PartStatistics
from data_prep.job import UNIGRAMS, versions
from data_prep.units import EVAL_KEY_BIT

_SHARD_TOKENS = 1 << 23  # ids in a shard: 16 MB


def convert(
    inputs: dict[Part, str | None],
    tokenizer: str | Path,
    lowercase: bool | None,
    objective: str | None,
    folder: Path,
    format: str,
    quiet: bool,
) -> dict[str, Any]:
    """Writes the rows of each part's files as the shards, tokenizer and counts of a folder.

    Each file is a work unit; the keys of its sequences count from 0 in the order of the file. Returns the manifest,
    which is not written. Raises UserError for a file with another layout, rows of another tokenizer, or files of
    different widths.
    """
    loaded = tokenizers.load(tokenizer, lowercase)
    files = {part: _files(part, pattern) if pattern else [] for part, pattern in inputs.items()}
    trained = {os.path.realpath(path) for path in files["train"]}
    if both := [path for path in files["eval"] if os.path.realpath(path) in trained]:
        raise UserError(f"{both[0]} is in --input and in --eval_input; name it in only one of them")
    sources = {path: path.stat().st_size for part in PARTS for path in files[part]}
    manifest = _empty_manifest(loaded, format, objective, sources)
    loaded.save(folder / "tokenizer")
    unlabelled = objective is not None and objective not in PAIRS
    statistics: dict[Part, PartStatistics] = {}
    done = rows_done = 0
    with Reporter("importing", sum(sources.values()), ["rows"], quiet) as reporter:
        for part in PARTS:
            (folder / part).mkdir()
            number = 0
            for unit, path in enumerate(files[part]):
                # As in build_examples: the part is the highest bit of a key, so keys of the two parts never meet.
                first_key = (unit | (EVAL_KEY_BIT if part == "eval" else 0)) << 32
                for rows in _shards(path, manifest, loaded, first_key, unlabelled):
                    manifest["shards"].append(formats.write(format, folder, f"{part}/shard-{number:05d}", rows))
                    number += 1
                    found = statistics.setdefault(part, PartStatistics(manifest, loaded))
                    for some in row_batches(rows):
                        found.add(some, some)
                    rows_done += len(rows.input_ids)
                    reporter.update(done, rows_done)
                done += sources[path]
    if "train" not in statistics:
        raise UserError(f"no example in {inputs['train']}; name TFRecord files with examples")
    _fill_in(manifest, {part: statistics.get(part) or PartStatistics(manifest, loaded) for part in PARTS})
    buffer = io.BytesIO()
    np.save(buffer, statistics["train"].ordinary_unigrams)
    write_atomic(folder / UNIGRAMS, buffer.getvalue())
    return manifest


def _files(part: Part, pattern: str) -> list[Path]:
    try:
        return readers.expand(pattern)
    except UserError as error:
        raise readers.of_flag(error, "--eval_input" if part == "eval" else "--input") from None


def _empty_manifest(
    tokenizer: Tokenizer, format: str, objective: str | None, sources: dict[Path, int]
) -> dict[str, Any]:
    """The manifest before any row is read; the widths, the counts and maybe the objective are filled in later."""
    return {
        "schema_version": SCHEMA_VERSION,
        "format": format,
        "imported": True,
        "objective": objective,
        "seq_len": 0,
        "pack": 1,
        "masking": {"kind": "static", "unit": "token", "rate": 0.0, "max_predictions": 0},
        "tokenizer": {
            "hash": tokenizer.content_hash,
            "vocab_size": tokenizer.vocab_size,
            "lowercase": tokenizer.lowercase,
        },
        "seed": 0,
        "dupe_factor": 1,
        "sources": [{"path": str(path), "bytes": size} for path, size in sources.items()],
        "counts": {},
        "parts": {},
        "unigram_counts": UNIGRAMS,
        "shards": [],
        "versions": versions(),
    }


def _fill_in(manifest: dict[str, Any], statistics: dict[Part, PartStatistics]) -> None:
    """Fills in the counts of the rows. Rows say nothing of documents and sentences, whose counts are 0."""
    for part, found in statistics.items():
        manifest["parts"][part] = dict.fromkeys(COUNTED, 0) | {"skipped": {}} | found.manifest_counts
    parts = manifest["parts"].values()
    manifest["counts"] = {name: sum(counts[name] for counts in parts) for name in COUNTED} | {"skipped": {}}
    if not manifest["counts"]["predictions"]:
        raise UserError(f"no example of {manifest['sources'][0]['path']} has a masked position; mask them first")
    manifest["masking"]["rate"] = round(manifest["counts"]["predictions"] / manifest["counts"]["tokens"], 6)


def _shards(
    path: Path, manifest: dict[str, Any], tokenizer: Tokenizer, first_key: int, unlabelled: bool
) -> Iterator[Rows]:
    """The rows of a file, one shard at a time.

    unlabelled   whether the label of a single segment has no meaning: scripts that keep BERT's layout write 0
    """
    gathered: list[Rows] = []
    number = tokens = 0
    try:
        with path.open("rb") as file:
            for records in tfrecord.blocks(file):
                examples = tfrecord.parse(records, number)
                ids = np.where(examples.input_mask == 1, examples.input_ids, tokenizer.pad_id)
                examples = examples._replace(input_ids=ids)
                rows = tfrecord.to_rows(examples, np.dtype(tokenizer.id_dtype), first_key + number, number)
                if unlabelled:
                    single = rows.first_segment_lengths == rows.sequence_lengths
                    rows = rows._replace(next_sentence_labels=np.where(single, np.int8(-1), rows.next_sentence_labels))
                _check(rows, path, number, manifest, tokenizer)
                gathered.append(rows)
                number += len(records)
                tokens += rows.input_ids.size
                if tokens >= _SHARD_TOKENS:
                    yield _joined(gathered)
                    gathered, tokens = [], 0
    except Corrupt as error:
        raise UserError(f"{path}: {error}; copy or make it again") from error
    if gathered:
        yield _joined(gathered)


def _check(rows: Rows, path: Path, number: int, manifest: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Raises UserError for rows that cannot be used. The first rows of all determine the widths and the objective.

    number   of the first row in its file
    """
    assert rows.masked_positions is not None
    length, most = rows.input_ids.shape[1], rows.masked_positions.shape[1]
    if not manifest["seq_len"]:
        unlabelled = (rows.next_sentence_labels < 0).all()
        manifest["objective"] = manifest["objective"] or ("full_sentences" if unlabelled else "nsp")
        manifest["seq_len"], manifest["masking"]["max_predictions"] = length, most
    wanted = manifest["seq_len"], manifest["masking"]["max_predictions"]
    if (length, most) != wanted:
        raise UserError(
            f"{path}: examples of {length} tokens and {most} predictions, expected "
            f"{wanted[0]} and {wanted[1]}; convert files of different widths separately"
        )
    for problem, row in row_problems(rows, manifest, tokenizer):
        advice = "use the --tokenizer that made the files, or make them again"
        if problem in OF_OBJECTIVE:
            advice = f"the objective is {manifest['objective']}; use --objective if it is another, such as single"
        raise UserError(f"{path}: example {number + row} has {problem}; {advice}")


def _joined(gathered: list[Rows]) -> Rows:
    return Rows(*(np.concatenate(columns) for columns in zip(*gathered, strict=True)))
