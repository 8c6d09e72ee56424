"""Builds examples with workers that read the text and write the shards themselves, wherever both are.

A job has three stages, each a list of names over which an engine (engines/) runs one function:

    list_range   reads a range of a source, writes its documents as text files, and lists their sizes and hashes
    build_unit   reads a unit's documents from the text files, and writes its rows and its record
    join_units   joins the rows of units into a shard (joining.py)

After the first stage, the process that runs the job splits the listed documents into units, as it splits text that it
reads itself (units.py): so the output has the same bytes with every engine, any number of workers, and any ranges. It
reads no text and no shard. Everything is in one folder, local or in a store, which workers reach by its address:

    job/lists/NUMBER.arrow      the documents in a range, and what it skipped: finished ranges, for a job that resumes
    job/text/NUMBER-FILE.arrow  the documents themselves; those for train and for eval are in different files
    job/plan/RUN/GROUP.json     which documents the units have
    job/units/NAME.json, .npy   the records (job.py): finished units
    job/joined/NAME.json        finished shards
    train, eval                 the shards
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from bert_jax.data.manifest import MANIFEST, PARTS, read_shard_table
from bert_jax.errors import UserError
from bert_jax.progress import Reporter
from bert_jax.storage.files import scratch_folder
from bert_jax.storage.remote import Folder, as_address, is_remote
from bert_jax.tokenization.tokenizer import Tokenizer
from data_prep import engines, joining, worker
from data_prep import job as jobs
from data_prep.build_options import Arguments
from data_prep.job import UnitRecord
from data_prep.readers import Omission, Refusal
from data_prep.readers.corpus import Corpus, Reading, Source, is_sampled, read_range, source_ranges
from data_prep.readers.datasets import TFDS_PREFIX
from data_prep.readers.ranges import Range
from data_prep.readers.text import folder as folder_refusal
from data_prep.units import Listed, Unit, UnusableCorpus, is_held_out, list_document
from data_prep.worker import TokenCache

LISTS, TEXT, PLAN, UNITS, JOINED = "job/lists", "job/text", "job/plan", "job/units", "job/joined"
FILE_BYTES = 8 << 20  # of text in a text file
GROUP = 256  # units in a file of the plan
_THREADS = 16  # that wait for a store


class Site(NamedTuple):
    """What a worker has to know about a job."""

    address: str
    run: str  # a unique name, because a worker may outlive the run
    arguments: Arguments
    ranges: tuple[tuple[Source, Range], ...]
    cache: TokenCache | None


# The first stage: ranges become text files and lists.


class _TextFile:
    """The documents that the next text file will hold."""

    def __init__(self) -> None:
        self.documents: list[bytes] = []
        self.bytes = self.number = 0


def list_range(site: Site, name: str) -> None:
    """On a worker: writes the text files and the list for the range with this number.

    Raises:
        Refusal: Input is unusable, and --on_error is fail.
    """
    source, span = site.ranges[int(name)]
    options, folder = site.arguments.options, Folder(site.address)
    filling = {part: _TextFile() for part in PARTS}
    listed: list[tuple[bytes, int, bytes, int]] = []  # digest, size, spaced digest, number of the text file
    refused, items, ended, files = Counter[str](), 0, False, itertools.count(2)
    filling["train"].number, filling["eval"].number = 0, 1

    def write(file: _TextFile) -> None:
        if file.documents:
            folder.write(f"{TEXT}/{name}-{file.number}.arrow", _arrow({"text": pa.array(file.documents, _BYTES)}, {}))
        file.documents, file.bytes, file.number = [], 0, next(files)

    reading = dataclasses.replace(options, workers=1)
    try:
        if source.folder:
            raise folder_refusal(source.path)
        for item in read_range(source.path, reading, span):
            items += 1
            if isinstance(item, bytes) and (not item or item.isspace()):
                item = Omission("empty_text")
            if isinstance(item, bytes):
                document = list_document(item, options.dedup, None)
                file = filling["eval" if is_held_out(document.digest, site.arguments.eval_fraction) else "train"]
                listed.append((document.digest, document.size, document.spaced_digest, file.number))
                file.documents.append(item)
                file.bytes += len(item)
                if file.bytes >= FILE_BYTES:
                    write(file)
            elif isinstance(item, Refusal) and options.on_error == "fail":
                raise item
            else:
                refused[item.reason] += 1
    except Refusal as refusal:
        if options.on_error == "fail":
            raise
        refused[refusal.reason] += 1
        items, ended = items + 1, True
    for file in filling.values():
        write(file)
    columns = zip(*listed, strict=True) if listed else ((),) * 4
    types = pa.binary(), pa.uint32(), pa.binary(), pa.uint32()
    arrays = {name: pa.array(column, kind) for name, column, kind in zip(_LISTED, columns, types, strict=True)}
    about = {"refused": refused, "items": items, "ended": ended}
    folder.write(f"{LISTS}/{name}.arrow", _arrow(arrays, about))  # last: it says that the text files are complete


_LISTED = ("digest", "size", "spaced_digest", "file")
_BYTES = pa.large_binary()


def _arrow(columns: dict[str, pa.Array], about: dict[str, Any]) -> bytes:
    table = pa.table(columns).replace_schema_metadata({"about": json.dumps(about)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _table(content: bytes) -> pa.Table:
    return pa.ipc.open_stream(content).read_all()


class ListedCorpus(Corpus):
    """A corpus whose documents workers have listed."""

    def open(self, site: Site) -> None:
        """Says where the lists are. Called before `texts`."""
        self._folder, self._ranges = Folder(site.address), site.ranges

    def texts(self) -> Iterator[Any]:
        """Yields what `Corpus.texts` does, with documents as Listed, whose places are (text file, index)."""
        for number in range(self.passes):
            if number:
                yield None
            names = [_name(index) for index, (source, _) in enumerate(self._ranges) if source.weight > number]
            lists = zip(names, fetched(self._folder, (f"{LISTS}/{name}.arrow" for name in names)), strict=True)
            for source, group in itertools.groupby(lists, lambda pair: self._ranges[int(pair[0])][0]):
                yield from self._listed(source, number, group)
                self.bytes_read += source.bytes

    def _listed(self, source: Source, number: int, lists: Iterable[tuple[str, bytes]]) -> Iterator[Listed]:
        share, items, ended = min(1.0, source.weight - number), 0, False
        for name, content in lists:
            if ended:  # an unusable rest of a file includes the later ranges
                continue
            table = _table(content)
            about = json.loads(table.schema.metadata[b"about"])
            items, ended = items + about["items"], about["ended"]
            if not number:
                self.refused.update(about["refused"])
            places = Counter[int]()
            for digest, size, spaced, file in zip(*(table[name].to_pylist() for name in _LISTED), strict=True):
                place = f"{name}-{file}", places[file]
                places[file] += 1
                if share == 1.0 or is_sampled(digest, share):
                    yield Listed(digest, size, spaced, place)
                elif not number:
                    self.refused["not_sampled"] += 1
        if not items:
            refusal = Refusal("empty_file", source.path, "no document in it", "Remove it from --input")
            if self.reading.on_error == "fail":
                raise refusal
            self.refused["empty_file"] += not number


def _name(number: int) -> str:
    return f"{number:06d}"


def fetched(folder: Folder, names: Iterable[str]) -> Iterator[bytes]:
    """Yields the content of files in their order. Several are read at the same time, and few are in memory."""
    pending: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        for name in names:
            pending.append(pool.submit(folder.read, name))
            if len(pending) > 2 * _THREADS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# The second stage: units become shards.

# By run, the temporary folder and the tokenizer's files. All units of a run have the same folder, because tokenizers
# are cached by path.
_known: dict[str, tuple[Path, dict[str, bytes]]] = {}
# Some runners give a process several units at once, but only one thread at a time may use a tokenizer.
_one_unit = threading.Lock()


def build_unit(site: Site, name: str) -> None:
    """On a worker: builds a unit in a temporary folder, and writes its shards and then its record to the job's folder.

    Args:
        name: The file of the plan, and the name of the unit.
    """
    folder = Folder(site.address)
    group, name = name.split()
    planned = _plan(site.address, site.run, group)[name]
    files = list(dict.fromkeys(file for file, _, _ in planned["runs"]))
    tables = dict(zip(files, fetched(folder, (f"{TEXT}/{file}.arrow" for file in files)), strict=True))
    texts = {file: _table(content)["text"].combine_chunks() for file, content in tables.items()}
    documents = (text for file, begin, end in planned["runs"] for text in texts[file][begin:end].to_pylist())
    unit = Unit(planned["part"], planned["number"], tuple(documents), planned["text_hash"])
    del tables, texts
    with _one_unit:
        if site.run not in _known:
            tokenizer = {file: folder.read(file) for file in folder.names("tokenizer")}
            _known[site.run] = Path(tempfile.gettempdir()) / f"bert_jax_{os.urandom(8).hex()}", tokenizer
        # The folder is removed after each unit, because nothing tells a worker that a job has ended.
        directory, tokenizer = _known[site.run]
        directory.mkdir(mode=0o700)
        try:
            for inner in (UNITS, "tokenizer", *PARTS):
                (directory / inner).mkdir(parents=True)
            for file, content in tokenizer.items():
                (directory / file).write_bytes(content)
            record = worker.build_unit(site.arguments, site.cache, directory, unit)
            # The record comes last: if it exists, so do the unit's other files.
            for file in (*(shard["name"] for shard in record.shards), f"{UNITS}/{name}.npy", f"{UNITS}/{name}.json"):
                folder.write(file, (directory / file).read_bytes())
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@functools.lru_cache(maxsize=2)
def _plan(address: str, run: str, group: str) -> dict[str, Any]:
    return dict(json.loads(Folder(address).read(f"{PLAN}/{run}/{group}.json")))


# The third stage: the rows of units become shards.


def join_units(site: Site, name: str) -> None:
    """On a worker: joins files of units in a temporary folder, and writes the shard and then its record.

    Args:
        name: The file of the plan, and the record.
    """
    folder = Folder(site.address)
    file, name = name.split()
    group = joining.Group(*_plan(site.address, site.run, file)[name])
    with tempfile.TemporaryDirectory(prefix="bert_jax_") as temporary:
        directory = Path(temporary)
        for inner in (UNITS, JOINED, *PARTS):
            (directory / inner).mkdir(parents=True)
        inputs = [entry["name"] for entry in group.inputs]
        for path, content in zip(inputs, fetched(folder, inputs), strict=True):
            (directory / path).write_bytes(content)
        shard = joining.join(directory, site.arguments.options.format, group)
        for path in (shard["name"], f"{JOINED}/{group.record}"):  # the record comes last
            folder.write(path, (directory / path).read_bytes())


def _runs(places: Iterable[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Joins places that follow one another: (text file, begin, end)."""
    runs: list[tuple[str, int, int]] = []
    for file, index in places:
        if runs and runs[-1][0] == file and runs[-1][2] == index:
            runs[-1] = (file, runs[-1][1], index + 1)
        else:
            runs.append((file, index, index + 1))
    return runs


# The process that runs the job.


@dataclass
class Cluster:
    """Runs the stages of an open job on an engine."""

    job: jobs.Job
    site: Site
    engine: engines.Engine

    def __post_init__(self) -> None:
        self._folder = Folder(self.site.address)
        self._sizes = self._folder.sizes()
        finished = [name for name in self._sizes if name.startswith(f"{UNITS}/") and name.endswith(".json")]
        self._finished: dict[str, UnitRecord] = {}
        for content in fetched(self._folder, finished):
            with contextlib.suppress(ValueError, TypeError):  # damaged: the unit is built again
                record = UnitRecord(**json.loads(content))
                self._finished[record.name] = record

    @property
    def resumed(self) -> int:
        return len(self._finished)

    def read(self, quiet: bool) -> None:
        """Runs the first stage for the ranges that no earlier run has finished."""
        names = [_name(number) for number in range(len(self.site.ranges))]
        missing = [name for name in names if f"{LISTS}/{name}.arrow" not in self._sizes]
        sizes = {name: span.end - span.begin for name, (_, span) in zip(names, self.site.ranges, strict=True)}
        with Reporter("reading", sum(sizes.values()), ("MB",), quiet) as reporter:
            reporter.skip(sum(sizes.values()) - sum(sizes[name] for name in missing))
            work = functools.partial(list_range, self.site)
            for name in self.engine.run(work, missing, lambda: self._names(LISTS, ".arrow")):
                reporter.advance(sizes[name], sizes[name] / 1e6)

    def _names(self, folder: str, suffix: str) -> set[str]:
        return {name[len(folder) + 1 : -len(suffix)] for name in self._folder.names(folder) if name.endswith(suffix)}

    def finished(self, unit: Unit) -> UnitRecord | None:
        """Returns a unit's record if an earlier run finished it on the same text, and its files have their sizes."""
        record = self._finished.get(unit.name)
        if record is None or record.text_hash != unit.text_hash:
            return None
        present = all(self._sizes.get(shard["name"]) == shard["bytes"] for shard in record.shards)
        if not present or f"{UNITS}/{unit.name}.npy" not in self._sizes:
            return None
        self._fetch_counts(unit.name)
        return record

    def run(self, units: Iterable[Unit]) -> Iterator[UnitRecord]:
        """Runs the second stage, and yields the records as they come."""
        items = []
        for group in itertools.count():
            chosen = list(itertools.islice(units, GROUP))
            if not chosen:
                break
            planned = {}
            for unit in chosen:
                planned[unit.name] = unit._asdict() | {"runs": _runs(unit.documents)}
                del planned[unit.name]["documents"]
            self._folder.write(f"{PLAN}/{self.site.run}/{group:05d}.json", json.dumps(planned).encode())
            items += [f"{group:05d} {name}" for name in planned]
        names = {item.split()[1]: item for item in items}
        self._forget(f"{UNITS}/{name}.json" for name in names)
        pending: set[Future[UnitRecord]] = set()

        def ended() -> set[str]:
            return {names[name] for name in self._names(UNITS, ".json") & names.keys()}

        with ThreadPoolExecutor(_THREADS) as pool:
            for item in self.engine.run(functools.partial(build_unit, self.site), items, ended):
                pending.add(pool.submit(self._fetch, item.split()[1]))
                done = {future for future in pending if future.done()}
                pending -= done
                yield from (future.result() for future in done)
            for future in pending:
                yield future.result()

    def join(self, groups: Sequence[joining.Group], quiet: bool) -> list[dict[str, Any]]:
        """Runs the third stage, and returns the entries of all shards in the table of shards."""
        names: dict[str, joining.Group] = {}
        for number, start in enumerate(range(0, len(groups), GROUP)):
            planned = {group.record: group for group in groups[start : start + GROUP]}
            self._folder.write(f"{PLAN}/{self.site.run}/shards-{number:05d}.json", json.dumps(planned).encode())
            names |= {f"shards-{number:05d} {record}": group for record, group in planned.items()}
        before = [path for path in self._sizes if path.startswith(f"{JOINED}/")]
        records = dict(zip(before, map(json.loads, fetched(self._folder, before)), strict=True))

        def is_finished(group: joining.Group) -> bool:
            record = records.get(f"{JOINED}/{group.record}")
            inputs = [[entry["name"], entry["sha256"]] for entry in group.inputs]
            # An earlier run may have joined other units, of another text.
            return (
                record is not None
                and record["inputs"] == inputs
                and self._sizes.get(record["shard"]["name"]) == record["shard"]["bytes"]
            )

        missing = [name for name, group in names.items() if not is_finished(group)]
        self._forget(f"{JOINED}/{names[name].record}" for name in missing)
        total = sum(entry["bytes"] for name in missing for entry in names[name].inputs)

        def ended() -> set[str]:
            present = self._names(JOINED, ".json")
            return {name for name, group in names.items() if group.record.removesuffix(".json") in present}

        with Reporter("joining shards", total, ("MB",), quiet) as reporter:
            for name in self.engine.run(functools.partial(join_units, self.site), missing, ended):
                size = sum(entry["bytes"] for entry in names[name].inputs)
                reporter.advance(size, size / 1e6)
        joined = fetched(self._folder, (f"{JOINED}/{group.record}" for group in names.values()))
        return [joining.JoinRecord(**json.loads(content)).shard for content in joined]

    def _forget(self, names: Iterable[str]) -> None:
        """Removes records by an earlier run on other text, which would say that something is finished."""
        for name in names:
            if name in self._sizes:
                self._folder.remove(name)

    def _fetch(self, name: str) -> UnitRecord:
        """Reads a unit's record, and copies its counts to the job's folder on this machine."""
        self._fetch_counts(name)
        return UnitRecord(**json.loads(self._folder.read(f"{UNITS}/{name}.json")))

    def _fetch_counts(self, name: str) -> None:
        if is_remote(self.site.address):
            path = jobs.unit_folder(self.job.directory) / f"{name}.npy"
            path.write_bytes(self._folder.read(f"{UNITS}/{name}.npy"))

    def publish(self, manifest: dict[str, Any]) -> None:
        """Completes an output in a store: copies the files that this machine made, the manifest last."""
        shards = set(read_shard_table(self.job.directory, manifest).names.tolist())
        for name in self._folder.names():
            if name.startswith(PARTS) and name not in shards:
                self._folder.remove(name)  # by an earlier run, on other text
        made = [path.relative_to(self.job.directory).as_posix() for path in self.job.directory.rglob("*")]
        for name in sorted(made, key=lambda name: name == MANIFEST):
            if (path := self.job.directory / name).is_file() and not name.startswith("job/"):
                self._folder.write(name, path.read_bytes())
        Folder(f"{self.site.address}/job").clear()


@contextlib.contextmanager
def open_job(output: Path, arguments: Arguments, tokenizer: Tokenizer) -> Iterator[jobs.Job]:
    """Begins or resumes a job whose output is in a store, with a temporary folder for the files made on this machine.

    Two jobs with one output do no harm: both write the same bytes.

    Raises:
        UserError: The output exists, or an earlier run had other arguments.
    """
    address = as_address(output)
    folder = Folder(address)
    if folder.read_if_present(MANIFEST) is not None:
        raise UserError(f"output {address} exists. Choose another --output, or remove it first")
    jobs.check_stored_arguments(folder, arguments.to_json())
    with scratch_folder() as scratch, jobs.open_job(scratch / output.name, arguments, tokenizer) as job:
        for path in (job.directory / "tokenizer").iterdir():
            folder.write(f"tokenizer/{path.name}", path.read_bytes())
        try:
            yield job._replace(output=output)
        except UnusableCorpus:
            Folder(f"{address}/job").clear()  # a later run can use nothing of it
            raise


def ranges(sources: Iterable[Source], reading: Reading) -> tuple[tuple[Source, Range], ...]:
    """Divides the sources into ranges. Asks a store only for the beginnings of large .gz files."""

    def elsewhere(source: Source) -> Source:
        # Workers have other current folders.
        is_local = not is_remote(source.path) and not source.path.startswith(TFDS_PREFIX)
        return source._replace(path=os.path.abspath(source.path)) if is_local else source

    return tuple((elsewhere(source), span) for source in sources for span in source_ranges(source, reading))
