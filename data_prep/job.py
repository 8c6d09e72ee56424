"""A build_examples job on disk: `DIR.incomplete` while it runs, and `DIR` once it is complete.

DIR.incomplete/job/arguments.json   everything that decides the bytes; only a run with equal arguments resumes the job
DIR.incomplete/job/lock             held by the one process that may write here
DIR.incomplete/job/units/NAME.json  the record of a finished unit, written after its shards and NAME.npy (unigram
                                    counts and sequence lengths)
DIR.incomplete/tokenizer, train, eval, manifest.json, unigram_counts.npy, SHA256SUMS   as in DIR
"""

import dataclasses
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np

import bert_jax
from bert_jax.array_types import Int64
from bert_jax.command import UserError
from bert_jax.data.example import max_predictions
from bert_jax.data.manifest import COUNTED, PARTS, SCHEMA_VERSION, Part
from bert_jax.data.masking import MaskingRule, ReplacementShares
from bert_jax.storage.local import incomplete_path, lock, read_json, refuse_existing, write_atomic
from bert_jax.tokenizer import Tokenizer
from data_prep import checksums, formats
from data_prep.lengths import summarise
from data_prep.readers import Source
from data_prep.sentences import RULE_VERSION
from data_prep.units import Unit, UnusableCorpus

UNIGRAMS = "unigram_counts.npy"
_LIBRARIES = ("numpy", "pyarrow", "tokenizers", "sentencepiece", "array_record")


@dataclass(frozen=True)
class Arguments:
    """Everything that decides the bytes of the shards, as stored in arguments.json."""

    objective: str
    seq_len: int
    masking: str  # dynamic or static
    mask_unit: str
    mask_rate: float
    mask_split: tuple[float, float, float]  # [MASK], random, kept
    random_tokens: str
    reorder_rate: float
    dupe_factor: int
    pack: int
    format: str
    eval_fraction: float
    short_seq_prob: float
    delete_rate: float
    insert_rate: float
    seed: int
    unit_bytes: int
    tokenizer_hash: str
    sources: tuple[Source, ...]
    text_field: str = "text"
    document: str = "blank_line"
    dedup: bool = False
    sentence_rule: int = RULE_VERSION
    schema_version: int = SCHEMA_VERSION

    @property
    def rule(self) -> MaskingRule:
        return MaskingRule(
            self.mask_unit,
            float(self.mask_rate),
            ReplacementShares(*self.mask_split),
            self.random_tokens,
            float(self.reorder_rate),
        )

    @property
    def max_predictions(self) -> int:
        return max_predictions(self.seq_len, self.pack, self.mask_rate, self.reorder_rate)

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))


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


def unit_folder(directory: Path) -> Path:
    return directory / "job" / "units"


def finished_units(directory: Path) -> int:
    return len(list(unit_folder(directory).glob("*.json")))


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


class Job:
    """The folder of a running job: a context manager that holds its lock.

    Entering raises UserError if the output exists, another job is writing it, or an earlier run that it would resume
    had other arguments. Leaving by an exception keeps the finished units and removes a folder that holds none; after
    UnusableCorpus it removes everything, because no later run can use it.
    """

    def __init__(self, output: Path, arguments: Arguments, tokenizer: Tokenizer) -> None:
        self.output = output
        self.directory = incomplete_path(output)
        self.arguments = arguments
        self.tokenizer = tokenizer
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> "Job":
        refuse_existing(self.output)
        if self.directory.exists() and not (self.directory / "job").exists():
            raise UserError(f"{self.directory} exists and is no unfinished output. Move it, or choose another --output")
        for folder in (unit_folder(self.directory), *(self.directory / part for part in PARTS)):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.directory / "job" / "lock")
        try:
            refuse_existing(self.output)  # the previous holder of the lock may have finished
            self._check_arguments()
            self.tokenizer.save(self.directory / "tokenizer")
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, UnusableCorpus):
            shutil.rmtree(unit_folder(self.directory), ignore_errors=True)
        self._leave()

    def finished(self, unit: Unit) -> UnitRecord | None:
        """The record of a unit if an earlier run finished it on the same text and all of its files are intact."""
        noted = unit_folder(self.directory) / f"{unit.name}.json"
        try:
            record = UnitRecord(**json.loads(noted.read_text(encoding="utf-8")))
            wanted = {self.directory / shard["name"]: shard["sha256"] for shard in record.shards}
            wanted[noted.with_suffix(".npy")] = record.counted
            # Names and sizes are not enough: after a power failure they may be right and the content lost.
            intact = record.text_hash == unit.text_hash and all(
                checksums.sha256(path) == digest for path, digest in wanted.items()
            )
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None  # damaged, or from another version: the unit is built again
        return record if intact else None

    def finish(self, records: Iterable[UnitRecord], skipped: Counter[str]) -> dict[str, Any]:
        """Writes the unigram counts and then the manifest, and renames the folder. Returns the manifest.

        skipped   number of documents that are in no unit, by reason
        """
        records = sorted(records, key=lambda record: (PARTS.index(record.part), record.name))
        vocab_size = self.tokenizer.vocab_size
        counted = {part: np.zeros(vocab_size + self.arguments.seq_len + 1, np.int64) for part in PARTS}
        for record in records:
            counted[record.part] += np.load(unit_folder(self.directory) / f"{record.name}.npy")
        buffer = io.BytesIO()
        np.save(buffer, counted["train"][:vocab_size])
        write_atomic(self.directory / UNIGRAMS, buffer.getvalue())
        lengths = {part: counts[vocab_size:] for part, counts in counted.items()}
        manifest = _manifest(self.arguments, self.tokenizer, records, skipped, lengths)
        formats.FORMATS[self.arguments.format]().finish(self.directory, manifest)
        self._remove_strays({shard["name"] for shard in manifest["shards"]})
        checksums.write_with_manifest(self.directory, manifest)
        self.directory.rename(self.output)
        _sync_folder(self.output.parent)
        shutil.rmtree(self.output / "job", ignore_errors=True)
        return manifest

    def _check_arguments(self) -> None:
        path = self.directory / "job" / "arguments.json"
        wanted = self.arguments.to_json()
        if not finished_units(self.directory):
            write_atomic(path, json.dumps(wanted, indent=1).encode())
            return
        try:
            begun = read_json(path)
        except UserError:
            raise UserError(
                f"missing or damaged {path}, the arguments of the job; remove {self.directory} to start again"
            ) from None
        differing = [name for name in wanted if begun.get(name) != wanted[name]]
        if differing:
            listed = ", ".join(
                name if isinstance(wanted[name], list) else f"{name} {begun.get(name)}, now {wanted[name]}"
                for name in differing
            )
            raise UserError(
                f"{self.directory} was started with other arguments ({listed}); "
                "use the same ones to resume it, or remove that folder to start again"
            )

    def _remove_strays(self, names: set[str]) -> None:
        """Removes what a killed worker left unfinished."""
        for part in PARTS:
            for path in (self.directory / part).iterdir():
                if f"{part}/{path.name}" not in names:
                    path.unlink()

    def _leave(self) -> None:
        if self.directory.exists() and not finished_units(self.directory):
            shutil.rmtree(self.directory, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def versions() -> dict[str, str]:
    """The versions of everything that can change the bytes of the output."""
    libraries = {library: importlib.metadata.version(library) for library in _LIBRARIES}
    return {"python": platform.python_version(), "bert_jax": bert_jax.__version__, **libraries}


def _manifest(
    arguments: Arguments,
    tokenizer: Tokenizer,
    records: list[UnitRecord],
    skipped: Counter[str],
    lengths: Mapping[Part, Int64[np.ndarray, "n"]],
) -> dict[str, Any]:
    """The content of manifest.json, as described in docs/data_format.md."""
    parts = {part: _sum_counts(record for record in records if record.part == part) for part in PARTS}
    for part, held in parts.items():
        slots = held["rows"] * arguments.seq_len
        held["filled"] = round(held["tokens"] / slots, 6) if slots else 0.0
        held["lengths"] = summarise(lengths[part])
    counts = _sum_counts(records)
    counts["documents"] += skipped.total()
    counts["skipped"] = dict(sorted((skipped + Counter(counts["skipped"])).items()))
    return {
        "schema_version": SCHEMA_VERSION,
        "format": arguments.format,
        "imported": False,
        "objective": arguments.objective,
        "seq_len": arguments.seq_len,
        "pack": arguments.pack,
        "masking": {
            "kind": arguments.masking,
            "max_predictions": arguments.max_predictions,
            **arguments.rule.to_manifest(),
        },
        "tokenizer": {
            "hash": tokenizer.content_hash,
            "vocab_size": tokenizer.vocab_size,
            "lowercase": tokenizer.lowercase,
        },
        "seed": arguments.seed,
        "dupe_factor": arguments.dupe_factor,
        "eval_fraction": arguments.eval_fraction,
        "short_seq_prob": arguments.short_seq_prob,
        "corruption": {"delete_rate": arguments.delete_rate, "insert_rate": arguments.insert_rate},
        "unit_bytes": arguments.unit_bytes,
        "sources": [
            {"path": source.path, "bytes": source.bytes, "weight": source.weight} for source in arguments.sources
        ],
        "reading": {"document": arguments.document, "text_field": arguments.text_field, "dedup": arguments.dedup},
        "counts": counts,
        "skipped_reading": dict(sorted(skipped.items())),
        "parts": parts,
        "unigram_counts": UNIGRAMS,
        "shards": [shard for record in records for shard in record.shards],
        "versions": versions(),
    }


def _sum_counts(records: Iterable[UnitRecord]) -> dict[str, Any]:
    total: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
    skipped: Counter[str] = Counter()
    for record in records:
        total.update(record.counts)
        skipped.update(record.skipped)
    return {**total, "skipped": dict(sorted(skipped.items()))}


def _sync_folder(folder: Path) -> None:
    """Makes a rename in the folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
