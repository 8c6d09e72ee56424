"""The folder of a job that a later run resumes: `DIR.incomplete` while it runs, with a record of each finished unit."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data.manifest import MANIFEST, Part
from bert_jax.errors import Stopped, UserError
from bert_jax.storage.files import incomplete_path, lock, read_json, refuse_existing, write_atomic
from data_prep import copy
from data_prep.units import Unit

# The folder of a job that a later run resumes: `DIR.incomplete` while it runs, and `DIR` once it is complete.
#
# DIR.incomplete/job/arguments.json   all that decides the output; only a run with equal arguments resumes the job
# DIR.incomplete/job/lock             held by the one process that may write here
# DIR.incomplete/job/units            a .json record for each finished unit, written after its other files


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

    A part of a job (build_parts.py) writes next to the others.
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


# The records of finished units in the folder of a job.
#
# DIR.incomplete/job/units/NAME.json   the record, written after the shards of the unit and NAME.npy
# DIR.incomplete/job/units/NAME.npy    counts of ids and of sequence lengths


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
        intact = record.text_hash == unit.text_hash and all(
            copy.sha256(path) == digest for path, digest in wanted.items()
        )
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None  # missing or damaged: the unit is built again
    return record if intact else None
