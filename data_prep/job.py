"""A job on disk: `DIR.incomplete` while it runs, which a later run of the same command resumes, and then `DIR`.

DIR.incomplete/job/arguments.json    all that decides the output; only a run with equal arguments resumes the job
DIR.incomplete/job/lock              held by the one process that may write here
DIR.incomplete/job/units/NAME.json   the record of a finished unit, written after its shards and NAME.npy
DIR.incomplete/job/units/NAME.npy    counts of ids and of sequence lengths
DIR.incomplete/tokenizer, train, eval, manifest.json, unigram_counts.npy, SHA256SUMS   as in DIR

`resumable_folder` and `keeping_units` serve clean as well as build-examples; records and `Job` are those of
build-examples.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import shutil
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

import bert_jax
from bert_jax.array_types import Int64
from bert_jax.data.manifest import MANIFEST, PARTS, REARRANGED, SCHEMA_VERSION, Part
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.errors import Stopped, UserError
from bert_jax.storage.files import incomplete_path, lock, read_json, refuse_existing, write_atomic
from bert_jax.tokenization.tokenizer import Tokenizer
from data_prep.build_options import Arguments, BuildOptions
from data_prep.output_files import sha256, write_with_manifest
from data_prep.units import Unit, UnusableCorpus, summarise

UNIGRAMS = "unigram_counts.npy"
_LIBRARIES = ("numpy", "pyarrow", "tokenizers", "sentencepiece", "array_record")
PARTS_SUFFIX = ".parts"


def unit_folder(directory: Path) -> Path:
    return directory / "job" / "units"


def finished_units(directory: Path) -> int:
    return len(list(unit_folder(directory).glob("*.json")))


@contextlib.contextmanager
def resumable_folder(output: Path, arguments: Mapping[str, Any]) -> Iterator[Path]:
    """Begins or resumes the job that makes an output, holds its lock, and yields its folder, `DIR.incomplete`.

    Raises UserError if the output exists, another job is writing it, or an earlier run that it would resume had other
    arguments (JSON values). An exception keeps the finished units, and removes a folder that holds none.
    """
    refuse_existing(output)
    directory = incomplete_path(output)
    if directory.exists() and not (directory / "job").exists():
        raise UserError(f"{directory} exists and is no unfinished output. Move it, or choose another --output")
    unit_folder(directory).mkdir(parents=True, exist_ok=True)
    with lock(directory / "job" / "lock"):
        try:
            refuse_existing(output)  # the previous holder of the lock may have finished
            check_arguments(directory, arguments, begun=finished_units(directory) > 0)
            yield directory
        finally:
            if directory.exists() and not finished_units(directory):
                shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def keeping_units(output: Path) -> Iterator[None]:
    """Turns SIGTERM into Stopped while a job runs, which keeps its finished units, and says how to resume it."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
        raise Stopped("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Stopped as stopped:
        begun = [incomplete_path(output), *sorted(parts_folder(output).glob("*-of-*"))]
        if kept_in := [one for one in begun if finished_units(one) or (one / MANIFEST).exists()]:
            where = kept_in[0] if kept_in[0] == begun[0] else parts_folder(output)
            kept = f"finished units are kept in {where}: run the same command again to resume"
            raise Stopped(f"{stopped}; {kept}") from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def complete(directory: Path, output: Path) -> None:
    """Gives the folder of a job its final name, and removes what only a resumed job needs."""
    directory.rename(output)
    _sync_folder(output.parent)
    shutil.rmtree(output / "job", ignore_errors=True)


def own_folders(output: Path) -> tuple[Path, ...]:
    """The folders in which the job that makes an output writes: a pattern may also match what an earlier run left.

    A part of a job (`build_parts`) writes next to the others.
    """
    around = (output.parent,) if output.parent.name.endswith(PARTS_SUFFIX) else ()
    of_parts = [folder for folder in (*around, parts_folder(output)) if (folder / "job" / "arguments.json").exists()]
    return incomplete_path(output), *of_parts


def parts_folder(output: Path) -> Path:
    """Where the parts of a job are until they are merged."""
    return output.with_name(output.name + PARTS_SUFFIX)


def check_arguments(directory: Path, arguments: Mapping[str, Any], begun: bool) -> None:
    """Stores the arguments (JSON values) of a new job; one that has `begun` holds finished work.

    Raises UserError if such a job was started with others.
    """
    path = directory / "job" / "arguments.json"
    if not begun:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(arguments, indent=1).encode())
        return
    try:
        before = read_json(path)
    except UserError:
        raise UserError(
            f"missing or damaged {path}, the arguments of the job; remove {directory} to start again"
        ) from None
    differing = [name for name in arguments if before.get(name) != arguments[name]]
    if differing:
        listed = ", ".join(
            name if isinstance(arguments[name], list) else f"{name} {before.get(name)}, now {arguments[name]}"
            for name in differing
        )
        raise UserError(
            f"{directory} was started with other arguments ({listed}); "
            "use the same ones to resume it, or remove that folder to start again"
        )


def _sync_folder(folder: Path) -> None:
    """Makes a rename in the folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class UnitRecord(NamedTuple):
    """The results of a finished unit. Its part and number are in its name and in the names of its shards."""

    name: str  # "train-00000"
    text_hash: str
    counts: dict[str, int]  # COUNTED
    skipped: dict[str, int]  # documents, by reason
    shards: list[dict[str, Any]]  # name, rows, bytes, sha256: as in the manifest
    counted: str = ""  # sha256 of NAME.npy, once that is written

    @property
    def part(self) -> Part:
        return "eval" if self.name.startswith("eval-") else "train"

    @property
    def number(self) -> int:
        return int(self.name.rpartition("-")[2])


def write_record(
    directory: Path, record: UnitRecord, unigrams: Int64[np.ndarray, "V"], lengths: Int64[np.ndarray, "n"]
) -> UnitRecord:
    """Marks a unit as finished, after its shards are on disk. Returns the record as it was written.

    unigrams, lengths   how often each id occurs in its rows, and how many of its sequences have 0, 1, ..., T tokens
    """
    buffer = io.BytesIO()
    np.save(buffer, np.concatenate([unigrams, lengths]))
    counted = buffer.getvalue()
    write_atomic(unit_folder(directory) / f"{record.name}.npy", counted)
    record = record._replace(counted=hashlib.sha256(counted).hexdigest())
    write_atomic(unit_folder(directory) / f"{record.name}.json", json.dumps(record._asdict()).encode())
    return record


def read_record(directory: Path, unit: Unit) -> UnitRecord | None:
    """The record of a unit if an earlier run finished it on the same text and all of its files are intact."""
    path = unit_folder(directory) / f"{unit.name}.json"
    try:
        record = UnitRecord(**json.loads(path.read_text(encoding="utf-8")))
        wanted = {directory / shard["name"]: shard["sha256"] for shard in record.shards}
        wanted[path.with_suffix(".npy")] = record.counted
        # Names and sizes are not enough: after a power failure they may be right and the content lost.
        intact = record.text_hash == unit.text_hash and all(sha256(path) == digest for path, digest in wanted.items())
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None  # missing or damaged: the unit is built again
    return record if intact else None


@contextlib.contextmanager
def open_job(output: Path, arguments: Arguments, tokenizer: Tokenizer) -> Iterator["Job"]:
    """Begins or resumes a job, and holds its lock.

    Raises UserError if the output exists, another job is writing it, or an earlier run that it would resume had other
    arguments. An exception keeps the finished units and removes a folder that holds none; UnusableCorpus removes
    everything, because no later run can use it.
    """
    with resumable_folder(output, arguments.to_json()) as directory:
        for part in PARTS:
            (directory / part).mkdir(exist_ok=True)
        # An attempt that was killed before its first unit may have left a tokenizer of another kind.
        shutil.rmtree(directory / "tokenizer", ignore_errors=True)
        _of_shards(tokenizer).save(directory / "tokenizer")
        try:
            yield Job(output, directory, arguments, tokenizer)
        except UnusableCorpus:
            shutil.rmtree(unit_folder(directory), ignore_errors=True)
            raise


def _of_shards(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer that encodes texts as the sequences of shards, which always have special tokens.

    Those of a published GPT-2 have none; a model that is trained on its shards sees them, and keeps this tokenizer.
    """
    if tokenizer.adds_special_tokens:
        return tokenizer
    spec: Any = tokenizer.spec
    return Tokenizer(dataclasses.replace(spec, adds_special_tokens=True))


class Job(NamedTuple):
    """A job that holds the lock of its folder, as `open_job` yields it."""

    output: Path
    directory: Path
    arguments: Arguments
    tokenizer: Tokenizer

    def finish(
        self, records: Iterable[UnitRecord], skipped: Counter[str], cleaning: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Writes the unigram counts and then the manifest, and renames the folder. Returns the manifest.

        skipped    number of documents that are in no unit, by reason
        cleaning   what bert-jax clean reported of the text (summary.py)
        """
        records = sorted(records, key=lambda record: (PARTS.index(record.part), record.number))
        options, vocab_size = self.arguments.options, self.tokenizer.vocab_size
        counted = {part: np.zeros(vocab_size + options.seq_len + 1, np.int64) for part in PARTS}
        for record in records:
            counted[record.part] += np.load(unit_folder(self.directory) / f"{record.name}.npy")
        buffer = io.BytesIO()
        np.save(buffer, counted["train"][:vocab_size])
        write_atomic(self.directory / UNIGRAMS, buffer.getvalue())
        lengths = {part: counts[vocab_size:] for part, counts in counted.items()}
        rule = options.rule
        text = (counted["train"] + counted["eval"])[:vocab_size]
        if not text[self.tokenizer.unspaced].any():
            rule = dataclasses.replace(rule, words="spaces")  # the same words, and the manifest of before the choice
        manifest = _manifest(self.arguments, rule, self.tokenizer, records, skipped, lengths, cleaning)
        self._remove_strays({shard["name"] for shard in manifest["shards"]})
        write_with_manifest(self.directory, manifest)
        complete(self.directory, self.output)
        return manifest

    def _remove_strays(self, names: set[str]) -> None:
        """Removes what a killed worker left unfinished."""
        for part in PARTS:
            for path in (self.directory / part).iterdir():
                if f"{part}/{path.name}" not in names:
                    path.unlink()


def versions() -> dict[str, str]:
    """The versions of everything that can change the bytes of the output."""
    libraries = {library: importlib.metadata.version(library) for library in _LIBRARIES}
    return {"python": platform.python_version(), "bert_jax": bert_jax.__version__, **libraries}


def _manifest(
    arguments: Arguments,
    rule: MaskingRule,
    tokenizer: Tokenizer,
    records: list[UnitRecord],
    skipped: Counter[str],
    lengths: Mapping[Part, Int64[np.ndarray, "n"]],
    cleaning: list[dict[str, Any]],
) -> dict[str, Any]:
    """The content of manifest.json, as described in docs/data_format.md."""
    options = arguments.options
    parts = {part: _sum_counts((record for record in records if record.part == part), options) for part in PARTS}
    for part, held in parts.items():
        positions = held["rows"] * options.seq_len
        held["filled"] = round(held["tokens"] / positions, 6) if positions else 0.0
        held["lengths"] = summarise(lengths[part])
    counts = _sum_counts(records, options)
    # Documents that gave no unit were read as well, so that all counts add up to those of the corpus.
    counts["documents"] += skipped.total()
    counts["skipped"] = dict(sorted((skipped + Counter(counts["skipped"])).items()))
    return {
        "schema_version": SCHEMA_VERSION,
        "format": options.format,
        "objective": options.objective,
        "seq_len": options.seq_len,
        "pack": options.pack,
        "masking": {
            "kind": options.masking,
            "max_predictions": options.max_predictions,
            **rule.to_manifest(),
        },
        "tokenizer": {
            "hash": tokenizer.content_hash,
            "vocab_size": tokenizer.vocab_size,
            "lowercase": tokenizer.lowercase,
        },
        "seed": options.seed,
        "dupe_factor": options.dupe_factor,
        "eval_fraction": options.eval_fraction,
        "short_seq_prob": arguments.short_seq_prob,
        "corruption": {"delete_rate": options.delete_rate, "insert_rate": options.insert_rate}
        | {name: share for name in REARRANGED if (share := getattr(options, name))},
        "unit_bytes": arguments.unit_bytes,
        "sources": [
            {"path": source.path, "bytes": source.bytes, "weight": source.weight} for source in arguments.sources
        ],
        "reading": {"document": options.document, "text_field": options.text_field, "dedup": options.dedup}
        | ({"document_separator": options.document_separator} if options.document_separator else {})
        | ({"input_format": options.input_format} if options.input_format != "auto" else {})
        | ({"newlines": options.newlines} if options.newlines != "join" else {}),
        "counts": counts,
        "skipped_reading": dict(sorted(skipped.items())),
        **({"cleaning": cleaning} if cleaning else {}),
        "parts": parts,
        "unigram_counts": UNIGRAMS,
        "shards": [shard for record in records for shard in record.shards],
        "versions": versions(),
        **({"shares": [_share(arguments, counts["documents"] - skipped.total())]} if options.part else {}),
    }


def _share(arguments: Arguments, documents: int) -> dict[str, Any]:
    """The entry of the job's share (data_prep/build_options.py); documents are those in units."""
    return {
        "number": arguments.share.number,
        "of": arguments.share.of,
        "corpus": arguments.corpus_hash if arguments.share.of else "",
        "sources": len(arguments.sources),
        "documents": documents,
        "versions": versions(),
    }


def _sum_counts(records: Iterable[UnitRecord], options: BuildOptions) -> dict[str, Any]:
    total: Counter[str] = Counter(dict.fromkeys(options.counted, 0))
    skipped: Counter[str] = Counter()
    for record in records:
        total.update(record.counts)
        skipped.update(record.skipped)
    return {**total, "skipped": dict(sorted(skipped.items()))}
