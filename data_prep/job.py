"""A job on disk: `DIR.incomplete` while it runs, and then `DIR`. Running the same command again resumes it.

DIR.incomplete/job/arguments.json    everything that decides the output; only a run with equal arguments resumes the job
DIR.incomplete/job/lock              held by the one process that may write here
DIR.incomplete/job/units/NAME.json   the record for a finished unit, written after its other files
DIR.incomplete/job/units/NAME.npy    how often ids and sequence lengths occur
DIR.incomplete/job/units/NAME-K.arrow  the rows of its K-th pairing, until data_prep/joining.py joins them into a shard
DIR.incomplete/job/joined            records of joined shards
DIR.incomplete/tokenizer, train, eval, manifest.json, shards.arrow, unigram_counts.npy, SHA256SUMS   as in DIR

bert-jax clean shares the functions up to `check_arguments`; records and `Job` belong to build-examples.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple

import numpy as np

import bert_jax
from bert_jax.array_types import Int64
from bert_jax.data.manifest import MANIFEST, PARTS, REARRANGED, SCHEMA_VERSION, Part, ShardTable
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.errors import Stopped, UserError
from bert_jax.storage.files import incomplete_path, lock, read_json, refuse_existing, write_atomic
from bert_jax.storage.remote import Folder, as_address, is_remote
from bert_jax.tokenization.tokenizer import Tokenizer
from data_prep.build_options import Arguments
from data_prep.output_files import sha256, write_with_manifest
from data_prep.units import Unit, UnusableCorpus, summarise

UNIGRAMS = "unigram_counts.npy"
UNITS = "job/units"
_LIBRARIES = ("numpy", "pyarrow", "tokenizers", "sentencepiece", "array_record")
PARTS_SUFFIX = ".parts"


def unit_folder(directory: Path) -> Path:
    return directory / UNITS


def finished_units(directory: Path) -> int:
    return len(list(unit_folder(directory).glob("*.json")))


def _has_begun(directory: Path) -> bool:
    """Whether a job's folder has units, or lists of documents (cluster.py), that a later run uses."""
    return finished_units(directory) > 0 or any((directory / "job" / "lists").glob("*.arrow"))


def open_folder(directory: Path) -> IO[bytes]:
    """Creates or reopens a job's folder, and takes its lock, which the caller closes.

    Raises:
        UserError: Another job is writing to the folder, or no job made it.
    """
    if directory.exists() and not (directory / "job").exists():
        raise UserError(
            f"{directory} already exists and was not left by an interrupted run. Move it, or choose another --output"
        )
    unit_folder(directory).mkdir(parents=True, exist_ok=True)
    return lock(directory / "job" / "lock")


@contextlib.contextmanager
def resumable_folder(output: Path, arguments: Mapping[str, Any]) -> Iterator[Path]:
    """Begins or resumes a job, holds its lock, and yields its folder, `DIR.incomplete`.

    An exception keeps the finished units, and removes a folder that holds none.

    Raises:
        UserError: The output exists, another job is writing it, or an earlier run had other arguments (JSON values).
    """
    refuse_existing(output)
    directory = incomplete_path(output)
    with open_folder(directory):
        try:
            refuse_existing(output)  # the previous holder of the lock may have finished
            check_arguments(directory, arguments, begun=_has_begun(directory))
            yield directory
        finally:
            if directory.exists() and not _has_begun(directory):
                shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def keeping_units(output: Path) -> Iterator[None]:
    """Turns SIGTERM into Stopped while a job runs; the message says how to resume it."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
        raise Stopped("no unit was finished; run the same command again")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Stopped:
        if is_remote(output):
            raise Stopped(f"finished units of {as_address(output)} are kept; run the same command again") from None
        for folder in (incomplete_path(output), *parts_folder(output).glob("*-of-*")):
            if finished_units(folder) or (folder / MANIFEST).exists():
                place = folder if folder == incomplete_path(output) else parts_folder(output)
                raise Stopped(f"finished units are kept in {place}; run the same command again to resume") from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def complete(directory: Path, output: Path) -> None:
    """Gives a job's folder its final name, and removes the files needed only to resume."""
    directory.rename(output)
    sync_folder(output.parent)
    shutil.rmtree(output / "job", ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flushes the names of files in a folder to disk, so that new ones survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def own_folders(output: Path) -> tuple[Path, ...]:
    """Lists the folders in which a job writes, or an earlier run wrote."""
    # A part (`build_parts`) is written next to the others, so its parent holds their files, too.
    parent = (output.parent,) if output.parent.name.endswith(PARTS_SUFFIX) else ()
    parts = [folder for folder in (*parent, parts_folder(output)) if (folder / "job" / "arguments.json").exists()]
    return incomplete_path(output), *parts


def parts_folder(output: Path) -> Path:
    """Returns the folder for parts until they are merged."""
    return output.with_name(output.name + PARTS_SUFFIX)


def check_arguments(directory: Path, arguments: Mapping[str, Any], begun: bool) -> None:
    """Stores a new job's arguments, or compares them with those stored when the job began.

    Args:
        arguments: JSON values.
        begun: Whether the folder has finished work, which other arguments would make useless.

    Raises:
        UserError: The arguments differ, or the stored ones are unreadable.
    """
    path = directory / "job" / "arguments.json"
    if not begun:
        write_atomic(path, json.dumps(arguments, indent=1).encode())
        return
    try:
        before = read_json(path)
    except UserError:
        raise UserError(
            f"missing or damaged {path}, the arguments of the job; remove {directory} to start again"
        ) from None
    _compare_arguments(before, arguments, str(directory))


def check_stored_arguments(folder: Folder, arguments: Mapping[str, Any]) -> None:
    """As `check_arguments`, for a job in a store.

    Raises:
        UserError: The arguments differ.
    """
    if (content := folder.read_if_present("job/arguments.json")) is not None:
        _compare_arguments(json.loads(content), arguments, folder.address)
    else:
        folder.write("job/arguments.json", json.dumps(arguments, indent=1).encode())


def _compare_arguments(before: Mapping[str, Any], arguments: Mapping[str, Any], place: str) -> None:
    differing = [
        name if isinstance(value, list) else f"{name} {before.get(name)}, now {value}"
        for name, value in arguments.items()
        if before.get(name) != value
    ]
    if differing:
        raise UserError(
            f"{place} was started with other arguments ({', '.join(differing)}); "
            "use the same ones to resume it, or remove that folder to start again"
        )


class UnitRecord(NamedTuple):
    """A finished unit's results."""

    name: str  # its part and number: "train-00000"
    text_hash: str
    counts: dict[str, int]  # COUNTED
    skipped: dict[str, int]  # documents, by reason
    shards: list[dict[str, Any]]  # its files of rows: name, rows, bytes, sha256
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
    """Marks a unit as finished after its rows are on disk, and returns the record as written.

    Args:
        unigrams: How often each id occurs in the unit's rows.
        lengths: How many sequences have 0, 1, ..., T tokens.
    """
    content = npy_bytes(np.concatenate([unigrams, lengths]))
    write_atomic(unit_folder(directory) / f"{record.name}.npy", content)
    # The record comes last: if it exists, so do the unit's other files.
    record = record._replace(counted=hashlib.sha256(content).hexdigest())
    write_atomic(unit_folder(directory) / f"{record.name}.json", json.dumps(record._asdict()).encode())
    return record


def npy_bytes(array: Int64[np.ndarray, "n"]) -> bytes:
    """Encodes an array as an .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def read_record(directory: Path, unit: Unit, joined: Mapping[str, str]) -> UnitRecord | None:
    """Returns a unit's record if an earlier run finished it on the same text and its files are intact.

    Args:
        joined: The sha256, by name, of files of rows that an intact shard replaces (data_prep/joining.py).
    """
    path = unit_folder(directory) / f"{unit.name}.json"
    try:
        record = UnitRecord(**json.loads(path.read_text(encoding="utf-8")))
        files = [file for file in record.shards if joined.get(file["name"]) != file["sha256"]]
        digests = {directory / file["name"]: file["sha256"] for file in files}
        digests[path.with_suffix(".npy")] = record.counted
        # Names and sizes are not enough: after a power failure they may be right and the content lost.
        intact = record.text_hash == unit.text_hash and all(sha256(file) == digest for file, digest in digests.items())
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None  # missing or damaged: the unit is built again
    return record if intact else None


@contextlib.contextmanager
def open_job(output: Path, arguments: Arguments, tokenizer: Tokenizer) -> Iterator["Job"]:
    """Begins or resumes a job as `resumable_folder` does. UnusableCorpus removes its units, which no later run can use.

    Raises:
        UserError: As `resumable_folder`.
    """
    with resumable_folder(output, arguments.to_json()) as directory:
        for part in PARTS:
            (directory / part).mkdir(exist_ok=True)
        # An attempt that was killed before its first unit may have left a tokenizer of another kind.
        shutil.rmtree(directory / "tokenizer", ignore_errors=True)
        stored = tokenizer
        if not tokenizer.adds_special_tokens:
            # Rows always have special tokens, but some tokenizers, e.g. the published GPT-2, add none. A model trained
            # on these shards keeps the stored tokenizer, so that one must add them.
            spec: Any = tokenizer.spec
            stored = Tokenizer(dataclasses.replace(spec, adds_special_tokens=True))
        stored.save(directory / "tokenizer")
        try:
            yield Job(output, directory, arguments, tokenizer)
        except UnusableCorpus:
            for folder in ("units", "lists"):
                shutil.rmtree(directory / "job" / folder, ignore_errors=True)
            raise


class Job(NamedTuple):
    """An open job, from `open_job`."""

    output: Path
    directory: Path
    arguments: Arguments
    tokenizer: Tokenizer

    def finish(
        self,
        records: Sequence[UnitRecord],
        shards: ShardTable,
        skipped: Counter[str],
        cleaning: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """Writes the unigram counts and the manifest, renames the folder, and returns the manifest.

        Args:
            records: The records of all units, in order.
            shards: Their joined rows.
            skipped: How many documents are in no unit, by reason.
            cleaning: The reports of bert-jax clean on the text (summary.py).
        """
        options, vocab_size = self.arguments.options, self.tokenizer.vocab_size
        # By index: V unigram counts, then T + 1 counts of sequences by length.
        counted = {part: np.zeros(vocab_size + options.seq_len + 1, np.int64) for part in PARTS}
        for record in records:
            counted[record.part] += np.load(unit_folder(self.directory) / f"{record.name}.npy")
        write_atomic(self.directory / UNIGRAMS, npy_bytes(counted["train"][:vocab_size]))
        lengths = {part: counts[vocab_size:] for part, counts in counted.items()}
        rule = options.rule
        # Without unspaced scripts both rules give the same words, and the manifest states the simpler one.
        if not (counted["train"] + counted["eval"])[:vocab_size][self.tokenizer.unspaced].any():
            rule = dataclasses.replace(rule, words="spaces")
        manifest = _manifest(self.arguments, rule, self.tokenizer, records, skipped, lengths, cleaning)
        # A killed worker may have left files behind.
        names = set(shards.names.tolist())
        for part in PARTS:
            for path in (self.directory / part).iterdir():
                if f"{part}/{path.name}" not in names:
                    path.unlink()
        write_with_manifest(self.directory, manifest, shards)
        if not is_remote(self.output):
            complete(self.directory, self.output)
        return manifest


def versions() -> dict[str, str]:
    """Lists the versions of all software that can change the output's bytes."""
    libraries = {library: importlib.metadata.version(library) for library in _LIBRARIES}
    return {"python": platform.python_version(), "bert_jax": bert_jax.__version__, **libraries}


def sum_counts(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds up whole numbers, and skipped documents by reason; drops other values."""
    total, skipped = Counter[str](), Counter[str]()
    for addend in counts:
        total.update({name: value for name, value in addend.items() if isinstance(value, int)})
        skipped.update(addend["skipped"])
    return {**total, "skipped": dict(sorted(skipped.items()))}


def sum_part(counts: Iterable[Mapping[str, Any]], lengths: Int64[np.ndarray, "n"]) -> dict[str, Any]:
    """Adds up a part's counts. `lengths[n]` is the number of sequences with n tokens."""
    total = sum_counts(counts)
    positions = total["rows"] * (len(lengths) - 1)
    filled = round(total["tokens"] / positions, 6) if positions else 0.0
    return total | {"filled": filled, "lengths": summarise(lengths)}


def _manifest(
    arguments: Arguments,
    rule: MaskingRule,
    tokenizer: Tokenizer,
    records: Sequence[UnitRecord],
    skipped: Counter[str],
    lengths: Mapping[Part, Int64[np.ndarray, "n"]],
    cleaning: list[dict[str, Any]],
) -> dict[str, Any]:
    """Makes manifest.json (docs/data_format.md), without keys that do not apply to the job."""
    options, share = arguments.options, arguments.share
    zeros: dict[str, Any] = dict.fromkeys(options.counted, 0) | {"skipped": {}}
    counted = [(record.part, record.counts | {"skipped": record.skipped}) for record in records]
    in_units = sum_counts([zeros, *(counts for _, counts in counted)])
    # Documents in no unit were read as well: with them, the counts add up to the whole corpus.
    counts = sum_counts([in_units, {"documents": skipped.total(), "skipped": skipped}])
    shares = {
        "number": share.number,
        "of": share.of,
        "corpus": arguments.corpus_hash if share.of else "",
        "sources": len(arguments.sources),
        "documents": in_units["documents"],
        "versions": versions(),
    }
    # Keys with these values are left out, as are the keys of unused options below.
    usual = {"document_separator": "", "input_format": "auto", "newlines": "join"}
    return {
        "schema_version": SCHEMA_VERSION,
        "format": options.format,
        "objective": options.objective,
        "seq_len": options.seq_len,
        "pack": options.pack,
        "masking": {"kind": options.masking, "max_predictions": options.max_predictions, **rule.to_manifest()},
        "tokenizer": {
            "hash": tokenizer.content_hash,
            "vocab_size": tokenizer.vocab_size,
            "lowercase": tokenizer.lowercase,
        },
        "seed": options.seed,
        "dupe_factor": options.dupe_factor,
        "eval_fraction": arguments.eval_fraction,
        "short_seq_prob": arguments.short_seq_prob,
        "corruption": {"delete_rate": options.delete_rate, "insert_rate": options.insert_rate}
        | {name: rate for name in REARRANGED if (rate := getattr(options, name))},
        "unit_bytes": arguments.unit_bytes,
        "sources": [{"path": path, "bytes": size, "weight": weight} for path, size, weight, _ in arguments.sources],
        "reading": {"document": options.document, "text_field": options.text_field, "dedup": options.dedup}
        | {name: value for name in usual if (value := getattr(options, name)) != usual[name]},
        "counts": counts,
        "skipped_reading": dict(sorted(skipped.items())),
        **({"cleaning": cleaning} if cleaning else {}),
        "parts": {
            part: sum_part([zeros, *(counts for of, counts in counted if of == part)], lengths[part]) for part in PARTS
        },
        "unigram_counts": UNIGRAMS,
        "versions": versions(),
        **({"shares": [shares]} if options.part else {}),
    }
