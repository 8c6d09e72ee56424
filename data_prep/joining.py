"""Joins the rows of finished units into shards, the second stage of a build-examples job.

Units are small, so that they fit into memory and little is lost when a job stops. Shards are large, because a process
that trains on terabytes maps or opens each of them. A shard takes whole files of units, in order, until it has
TARGET_BYTES, so the sizes of the units alone decide the borders of shards.

DIR.incomplete/job/joined/PART-NUMBER.json is the record of a shard, written after the shard and before the files of its
units are removed.
"""

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.errors import RunAgain
from bert_jax.progress import Reporter
from bert_jax.storage.files import write_atomic
from data_prep import output_files, processes
from data_prep.job import UnitRecord, sync_folder, unit_folder

# Between 64 MB, which keeps 3 TB of text at about 10,000 shards, and 256 MB, which a worker holds in memory.
TARGET_BYTES = 128 << 20


class Group(NamedTuple):
    """A shard to write, and the files of units that it joins."""

    stem: str  # train/shard-00000; the number is that of the first file
    inputs: list[dict[str, Any]]  # name, rows, bytes, sha256

    @property
    def record(self) -> str:
        return f"{self.stem.replace('/shard', '')}.json"


class JoinRecord(NamedTuple):
    """A finished shard's results."""

    inputs: list[list[str]]  # name and sha256 of the joined files
    shard: dict[str, Any]  # name, rows, bytes, sha256: as in the table of shards


def plan(records: Sequence[UnitRecord], dupe_factor: int) -> list[Group]:
    """Groups the files of units, in order, into shards of TARGET_BYTES or a little more, or less at a part's end."""
    groups: list[Group] = []
    size, part = 0, ""
    for record in records:
        for dupe, file in enumerate(record.shards):
            if record.part != part or size >= TARGET_BYTES:
                stem = f"{record.part}/shard-{record.number * dupe_factor + dupe:05d}"
                groups.append(Group(stem, []))
                size, part = 0, record.part
            groups[-1].inputs.append(file)
            size += file["bytes"]
    return groups


def joined_files(directory: Path) -> dict[str, str]:
    """The sha256 of the files, by name, whose rows are in an intact shard of an earlier run."""
    return {name: digest for record in _records(directory) for name, digest in record.inputs}


def join_units(
    directory: Path, format: str, groups: Sequence[Group], workers: int, quiet: bool
) -> list[dict[str, Any]]:
    """Joins the groups that no earlier run joined, removes the files of their units, and returns all shards.

    Args:
        directory: The job's folder.
        workers: Number of processes; 0: one per core.

    Raises:
        RunAgain: An earlier run joined units whose neighbours have changed since then.
    """
    _folder(directory).mkdir(exist_ok=True)
    finished = {record.shard["name"].partition(".")[0]: record for record in _records(directory)}
    shards = {
        group.stem: finished[group.stem].shard
        for group in groups
        if group.stem in finished and finished[group.stem].inputs == _names(group)
    }
    waiting = [group for group in groups if group.stem not in shards]
    _check_inputs(directory, waiting)
    total = sum(file["bytes"] for group in waiting for file in group.inputs)
    # A small job is not worth the start of processes.
    workers = (workers or processes.cores()) if total > 2 * TARGET_BYTES else 1
    made = processes.map_in_order(functools.partial(join, directory, format), waiting, workers, processes.KILLED)
    with Reporter("joining shards", total, ("MB",), quiet) as reporter:
        for group, shard in zip(waiting, made, strict=True):
            shards[group.stem] = shard
            reporter.advance(shard["bytes"], shard["bytes"] / 1e6)
    return [shards[group.stem] for group in groups]


def join(directory: Path, format: str, group: Group) -> dict[str, Any]:
    """Writes one shard and its record, removes the files that it joins, and returns its entry in the table of shards.

    Any process may call it, again after a kill: until the record is written, all inputs exist.
    """
    paths = [directory / file["name"] for file in group.inputs]
    shard = output_files.join(format, directory, group.stem, paths)
    sync_folder((directory / group.stem).parent)
    record = JoinRecord(_names(group), shard)
    write_atomic(_folder(directory) / group.record, json.dumps(record._asdict()).encode())
    sync_folder(_folder(directory))
    for path in paths:
        path.unlink()
    return shard


def _names(group: Group) -> list[list[str]]:
    return [[file["name"], file["sha256"]] for file in group.inputs]


def _folder(directory: Path) -> Path:
    return directory / "job" / "joined"


def _records(directory: Path) -> Iterator[JoinRecord]:
    """Yields the records of intact shards."""
    for path in sorted(_folder(directory).glob("*.json")):
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
            record = JoinRecord(**json.loads(path.read_text(encoding="utf-8")))
            if output_files.sha256(directory / record.shard["name"]) == record.shard["sha256"]:
                yield record


def _check_inputs(directory: Path, groups: Sequence[Group]) -> None:
    """Raises RunAgain if an input no longer exists.

    A text that changed between two runs moves the borders of shards. Units of a shard that is no longer wanted are then
    built again.
    """
    present = set(os.listdir(unit_folder(directory)))
    missing = [file["name"] for group in groups for file in group.inputs if Path(file["name"]).name not in present]
    if missing:
        for path in _folder(directory).glob("*.json"):
            path.unlink()
        raise RunAgain(
            f"--input has changed since an earlier run joined {len(missing)} of its units into shards. Run the same "
            "command again; it builds them again"
        )
