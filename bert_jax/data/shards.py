"""Data sets: the rows of all shards in a part of a build-examples output (docs/data_format.md).

`open_dataset` opens a part (train or eval) as a `Dataset`. It reads only the table of shards; a shard is opened, and
its size checked, when one of its rows is first requested. `local_copy` copies outputs from object stores, and
`open_tfds` opens TFDS data sets without TensorFlow.
"""

import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data.example import Rows
from bert_jax.data.manifest import (
    AGAIN,
    MANIFEST,
    PAIRS,
    PARTS,
    Part,
    ShardTable,
    parse_manifest,
    parse_shard_table,
    read_manifest,
    read_shard_table,
    read_unigram_counts,
)
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.data.ranges import RangeFiles, map_file, overlapping_values, size_problem
from bert_jax.data.shard_file import Corrupt, Framing, ShardLayout, layout_problem, value_problem
from bert_jax.errors import UserError, install_hint
from bert_jax.host import most_mappings, total_memory
from bert_jax.storage.files import wait_for_lock, write_atomic
from bert_jax.storage.remote import Folder, as_address, first_line, is_remote
from bert_jax.tokenization.vocabulary import Vocabulary
from bert_jax.tokenization.vocabulary import load as load_vocabulary

Reader = Callable[[Mapping[str, Any]], Callable[[Path], Rows]]


def check_sizes(directory: str | Path, shards: ShardTable) -> None:
    """Raises UserError for the first shard that is missing or has another size than in the table."""
    for name, stated in zip(shards.names.tolist(), shards.bytes.tolist(), strict=True):
        path = os.path.join(directory, name)  # pathlib is as slow as stat, which counts for thousands of shards
        if problem := size_problem(path, _size(path), stated):
            raise UserError(problem)


def open_dataset(path: str | os.PathLike[str], part: Part, reader: Reader | None = None) -> "Dataset":
    """Opens a part of an output folder DIR.

    Args:
        path: DIR, or DIR/train or DIR/eval, which overrides `part`.
        reader: Returns the function that reads the shards of a manifest (data_prep.output_files); None: Arrow shards.

    Raises:
        UserError: The folder is not a finished build_examples output, or the part has no rows.
    """
    directory = Path(os.path.abspath(path))
    if directory.name in PARTS and not (directory / MANIFEST).exists():
        part = "train" if directory.name == "train" else "eval"
        directory = directory.parent
    manifest = read_manifest(directory)
    dataset = Dataset(directory, part, manifest, read=reader(manifest) if reader else None)
    check_trainable(dataset, "arrow" if reader is None else manifest["format"])
    return dataset


def check_trainable(dataset: "Dataset", wanted: str = "arrow") -> None:
    """Raises UserError for shards in another format, and for a part without rows."""
    address, shard_format = as_address(dataset.directory), dataset.manifest["format"]
    if shard_format != wanted:
        raise UserError(
            f"{address} has {shard_format} shards, but training reads Arrow shards. Build the examples again without "
            "--format"
        )
    if not dataset.rows:
        flag = "raise --eval_fraction" if dataset.part == "eval" else "lower --eval_fraction or give more text"
        raise UserError(f"{address}/{dataset.part} has no rows. Build the examples again: {flag}")


class Dataset:
    """One part of a build_examples output, as lazily read rows. Threads may share it. `open_dataset` creates it.

    Shards on a disk that fit into memory together are mapped, so the system reads ahead and keeps what it read. From
    any other shard, only the bytes of the rows are read.

    Args:
        directory: A local folder with the manifest, the tokenizer and, unless there is another `address`, the shards.
        shards: The table of all shards; None: it is read from the directory.
        address: The folder or store that holds the shards.
        read: Reads shards if they are in another format than Arrow.
        cache_bytes: Memory of this process for the windows in which training reads rows; 0: it permutes all of them.
        memory: The bytes that shards may take in memory; None: half of the machine's memory.
    """

    def __init__(
        self,
        directory: Path,
        part: Part,
        manifest: Mapping[str, Any],
        *,
        shards: ShardTable | None = None,
        address: str = "",
        read: Callable[[Path], Rows] | None = None,
        cache_bytes: float = 0.0,
        memory: float | None = None,
    ) -> None:
        self.directory = directory
        self.address = address or as_address(directory)
        self.part, self.cache_bytes = part, cache_bytes
        self.manifest = dict(manifest)
        self.shards = (read_shard_table(directory, manifest) if shards is None else shards).part(part)
        self.counts: Mapping[str, Any] = manifest["parts"][part]  # such as rows and tokens
        self.labelled = manifest["objective"] in PAIRS  # whether sequences are labelled pairs
        self.seq_len: int = manifest["seq_len"]
        self.pack: int = manifest["pack"]
        self.max_predictions: int = manifest["masking"]["max_predictions"]
        self.static: bool = manifest["masking"]["kind"] == "static"
        self.masking = MaskingRule.from_manifest(manifest["masking"])
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.tokenizer_hash: str = manifest["tokenizer"]["hash"]
        self.layout = ShardLayout(manifest)
        # _ends[s] is the index of the first row after shard s. searchsorted with side="right" thus finds a row's shard,
        # and never finds an empty shard.
        self._ends = np.cumsum(self.shards.rows)
        self.rows = int(self._ends[-1]) if len(self.shards) else 0
        # The fingerprint identifies rows, not a place: a copy in another folder has the same one.
        hashes = map(self.shards.sha256, range(len(self.shards)))
        facts = zip(self.shards.names.tolist(), self.shards.rows.tolist(), hashes, strict=True)
        lines = "".join(f"{name} {rows} {sha256}\n" for name, rows, sha256 in facts)
        self.fingerprint = hashlib.sha256(lines.encode()).hexdigest()
        size, fits = int(self.shards.bytes.sum()), total_memory() / 2 if memory is None else memory
        if manifest["format"] == "arrow":
            read = None
        self._reads_whole = read is not None
        self.mapped = not is_remote(self.address) and size <= fits and len(self.shards) <= most_mappings() // 2
        # A read shard stays in memory, and a mapped one stays mapped.
        self._map = functools.cache(self._map_shard)
        self._values = functools.cache(functools.partial(self._read_whole, read) if read else self._map_values)
        self._framing: Framing | None = None  # of the first shard that is opened
        self._begins, self._headers = np.zeros((2, len(self.shards)), np.int64)  # _begins is 0 until it is opened

    @functools.cached_property
    def _files(self) -> RangeFiles:
        return RangeFiles(self.address)

    def gather(self, indices: Int64[np.ndarray, "R"], into: Rows | None = None) -> Rows:
        """Copies rows to contiguous columns, in the order of `indices`.

        Args:
            into: Columns of R rows that are filled and returned.

        Raises:
            IndexError: An index is outside [0, rows).
            UserError: A shard cannot be read.
        """
        if len(indices) and (indices.min() < 0 or indices.max() >= self.rows):
            raise IndexError(f"rows {indices.min()} to {indices.max()} are not all in [0, {self.rows})")
        rows = self.layout.allocate(len(indices)) if into is None else into
        # Every shard is visited once, from front to back. `order` holds the places of the ascending rows in the output.
        order = np.argsort(indices, kind="stable")
        shards = np.searchsorted(self._ends, indices[order], side="right")
        numbers, begins = np.unique(shards, return_index=True)
        local = indices[order] - (self._ends - self.shards.rows)[shards]
        columns = [column for column in rows if column is not None]
        if self._reads_whole:
            self._copy_mapped(columns, order, numbers, begins, [local] * len(columns))
        else:
            for shard in numbers[self._begins[numbers] == 0].tolist():
                self._open(shard)
            offsets = self.layout.offsets(self._begins[shards], self._headers[shards], self.shards.rows[shards], local)
            if self.mapped:
                self._copy_mapped(columns, order, numbers, begins, offsets)
            else:
                self._copy_ranges(columns, order, shards, offsets)
        # Only copied rows are checked, because a check of whole shards would read them from disk. After a problem, the
        # rows' shards are searched for the one to name.
        if value_problem(rows, self.manifest):
            for shard, picked in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True):
                some = Rows(*(column[picked] for column in columns))
                if problem := value_problem(some, self.manifest):
                    raise self._damaged(shard, problem)
        return rows

    def rows_in_blocks(self, numbers: Int64[np.ndarray, "R"]) -> Int64[np.ndarray, "R"]:
        """Returns the rows with these numbers if all full blocks are counted first, and then the rows after them.

        Without it, the blocks of all shards but the first would begin at any number.
        """
        full = self.shards.rows // self.layout.block_rows * self.layout.block_rows
        starts = self._ends - self.shards.rows
        counts, starts = np.concatenate([full, self.shards.rows - full]), np.concatenate([starts, starts + full])
        ends = np.cumsum(counts)
        piece = np.searchsorted(ends, numbers, side="right")
        return starts[piece] + numbers - (ends - counts)[piece]

    def _copy_mapped(
        self,
        columns: Sequence[np.ndarray],
        order: Int64[np.ndarray, "R"],
        numbers: Int64[np.ndarray, "N"],
        begins: Int64[np.ndarray, "N"],
        offsets: Sequence[Int64[np.ndarray, "R"]],
    ) -> None:
        """Copies rows from shards in memory. The rows of shard numbers[i] begin at begins[i] of `order`."""
        # A row of a column is copied as one value of so many bytes.
        targets = [
            np.ndarray((len(order),), f"V{width}", column)
            for column, width in zip(columns, self.layout.widths, strict=True)
        ]
        ends = np.append(begins, len(order))[1:]
        for shard, begin, end in zip(numbers.tolist(), begins.tolist(), ends.tolist(), strict=True):
            # With many shards, most contribute one row. numpy is 5 times as fast with a plain number as with an array.
            picked: Any = begin if end - begin == 1 else slice(begin, end)
            places = order[picked]
            for target, values, offset in zip(targets, self._values(shard), offsets, strict=True):
                target[places] = values[offset[picked]]

    def _copy_ranges(
        self,
        columns: Sequence[np.ndarray],
        order: Int64[np.ndarray, "R"],
        shards: Int64[np.ndarray, "R"],
        offsets: Sequence[Int64[np.ndarray, "R"]],
    ) -> None:
        """Reads rows from files. Consecutive rows of a block that stay together are one run, and read at once."""
        targets = [column.reshape(-1).view(np.uint8).data for column in columns]
        widths = self.layout.widths
        # In the first column, a row follows the row before it only within a block.
        apart = (np.diff(offsets[0]) != widths[0]) | (np.diff(order) != 1) | (np.diff(shards) != 0)
        runs = np.append(np.zeros(min(len(order), 1), np.int64), np.flatnonzero(apart) + 1)
        lengths = np.diff(np.append(runs, len(order))).tolist()
        starts = zip(*(offset[runs].tolist() for offset in offsets), strict=True)
        each = zip(shards[runs].tolist(), order[runs].tolist(), lengths, starts, strict=True)
        for shard, place, rows, begins in each:
            parts = [
                target[place * width : (place + rows) * width] for target, width in zip(targets, widths, strict=True)
            ]
            self._files.read_columns(*self._file(shard), parts, begins)

    def _open(self, shard: int) -> None:
        """Finds a shard's columns. Raises UserError if it is missing, has a wrong size or is damaged."""
        (name, size), rows = self._file(shard), int(self.shards.rows[shard])
        mapped, framing = self._map(shard) if self.mapped else None, self._framing

        def read(offset: int, length: int) -> memoryview:
            if mapped is not None:
                return mapped[offset : offset + length]
            return self._files.read(name, size, offset, length)

        # Shards by one version of pyarrow share their framing, which is then read once. Any other one is read, too.
        same = framing is not None and self.layout.file_bytes(rows, framing) == size
        if framing is None or not same or read(0, len(framing.schema)) != framing.schema:
            try:
                framing = self.layout.read_framing(read, rows, size)
            except Corrupt as error:
                raise self._damaged(shard, str(error)) from None
        self._framing = self._framing or framing
        # `_begins` comes last, because other threads take a shard as opened from then on.
        self._headers[shard] = framing.header
        self._begins[shard] = len(framing.schema)

    def _file(self, shard: int) -> tuple[str, int]:
        """Returns a shard's name and size."""
        return str(self.shards.names[shard]), int(self.shards.bytes[shard])

    def _map_shard(self, shard: int) -> memoryview:
        name, size = self._file(shard)
        return map_file(os.path.join(self.address, name), size)

    def _map_values(self, shard: int) -> list[np.ndarray]:
        return overlapping_values(self._map(shard), self.layout.widths)

    def _read_whole(self, read: Callable[[Path], Rows], shard: int) -> list[np.ndarray]:
        """Reads a shard in another format. Returns an array for each column: element i is the value of row i."""
        path, problem = self.directory / self.shards.names[shard], None
        try:
            rows = read(path)
            problem = layout_problem(rows, int(self.shards.rows[shard]), self.manifest)
        except Corrupt as error:
            problem = str(error)
        except FileNotFoundError:
            problem = "the file no longer exists"
        if problem:
            raise self._damaged(shard, problem)
        columns = (column for column in rows if column is not None)
        return [
            np.ndarray((len(column),), f"V{width}", np.ascontiguousarray(column))
            for column, width in zip(columns, self.layout.widths, strict=True)
        ]

    def _damaged(self, shard: int, problem: str) -> UserError:
        return UserError(
            f"damaged shard {self.address}/{self.shards.names[shard]}: {problem}. {AGAIN} "
            f"(to list all damage: bert-jax inspect-shards {self.address} --verify)"
        )

    def shard_rows(self, shard: int) -> Rows:
        """Returns a copy of a shard's rows. Raises UserError if it cannot be read."""
        end = int(self._ends[shard])
        return self.gather(np.arange(end - int(self.shards.rows[shard]), end))

    def close(self) -> None:
        """Interrupts threads that wait for their next attempt to read."""
        if "_files" in self.__dict__:
            self._files.close()

    def unigram_counts(self) -> Int64[np.ndarray, "V"]:
        """Reads how often every id occurs in the training rows. Raises UserError for a missing or damaged file."""
        return read_unigram_counts(self.directory, self.manifest)

    def vocabulary(self) -> Vocabulary:
        """Loads the vocabulary in the output folder. Raises UserError if it did not encode the shards."""
        path = self.directory / "tokenizer"
        loaded = load_vocabulary(path)
        if loaded.content_hash != self.tokenizer_hash:
            raise UserError(
                f"wrong tokenizer for the shards: {path} has hash {loaded.content_hash[:12]} instead of "
                f"{self.tokenizer_hash[:12]}. Restore the original tokenizer, or build the examples again"
            )
        return loaded


# Local copies of shards in an object store or on a slow disk. Runs share them.
#
# Training maps shards into memory, so they must be on a local disk. A copy is in CACHE/NAME-HASH, with the manifest's
# hash, so an output that was built again gets another folder. Hashes are checked while files are copied. Later, only
# sizes are checked.

_PARALLEL_FILES = 32  # because a store takes a while to answer a request


def local_copy(address: str, cache_dir: str, parts: Sequence[Part], log: Callable[[str], object]) -> str:
    """Copies missing files to the cache, and returns the folder there that replaces `address`.

    A process waits while another process copies the same output. After a failure, the next call continues with the
    missing files.

    Args:
        address: An output of build_examples, or its train/ or eval/ folder: gs://, s3:// or a local path.
        parts: The parts to copy; train/ or eval/ at the end of the address overrides them. The tokenizer and the
            unigram counts are always copied.
        log: Gets a line if anything is copied.

    Raises:
        UserError: The address cannot be read or holds no finished output, a file differs from the manifest, or
            cache_dir is not on a local disk.
        OSError: The disk is full.
    """
    if is_remote(cache_dir):
        raise UserError(f"data.cache_dir={cache_dir} is in an object store; choose a folder on a local disk")
    source, chosen = open_output(address)
    content = source.read(MANIFEST)
    manifest = parse_manifest(content, f"{source.address}/{MANIFEST}")
    name = source.address.rsplit("/", 1)[-1]
    folder = Path(os.path.abspath(cache_dir)) / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as lock:
        if not wait_for_lock(lock):
            raise UserError(f"data.cache_dir={cache_dir} is on a file system without locks; choose one on a local disk")
        # The lock makes processes that share the cache wait here. They then find the files of the first one.
        table_name = manifest["shards"]["table"]
        table_content = source.read(table_name)
        table = parse_shard_table(table_content, manifest, f"{source.address}/{table_name}")
        chosen_shards = [table.part(part) for part in ((chosen,) if chosen else parts)]
        hashes = {name: shards.sha256(i) for shards in chosen_shards for i, name in enumerate(shards.names.tolist())}
        # A name from a store must not lead out of the cache.
        others = {name: size for name, size in source.sizes("tokenizer").items() if ".." not in name.split("/")}
        sizes = {
            name: size
            for shards in chosen_shards
            for name, size in zip(shards.names.tolist(), shards.bytes.tolist(), strict=True)
        }
        sizes |= others | {manifest["unigram_counts"]: source.size(manifest["unigram_counts"])}
        # A file with the right size is complete, because write_atomic renames a file only once it is whole.
        missing = [name for name, size in sizes.items() if _size(folder / name) != size]

        def fetch(name: str) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / name, source.verified_blocks(name, hashes.get(name), sizes[name]))

        if missing:
            megabytes = sum(sizes[name] for name in missing) / 1e6
            log(f"copying {len(missing)} files of {source.address} to {folder} ({megabytes:,.1f} MB)")
        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            list(pool.map(fetch, missing))
        # The manifest comes last, because a folder with a manifest counts as complete.
        if not (folder / MANIFEST).exists():
            write_atomic(folder / table_name, table_content)
            write_atomic(folder / MANIFEST, content)
    return str(folder / chosen) if chosen else str(folder)


def open_output(address: str) -> tuple[Folder, Part | None]:
    """Returns the build_examples output at an address, and the part if the address ends in train/ or eval/."""
    output = Folder(address)
    # An output folder may itself be called train; its manifest shows that it is one.
    parent, _, last = output.address.rpartition("/")
    if last in PARTS and output.read_if_present(MANIFEST) is None:
        return Folder(parent), "train" if last == "train" else "eval"
    return output, None


def _size(path: str | Path) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


# Data sets that TensorFlow Datasets (TFDS) has prepared, opened without TensorFlow: tfds:NAME[:SPLIT].
#
# NAME is a TFDS name ("wikipedia/20230601.en:1.0.0", "glue/mrpc") or the folder of a prepared version. SPLIT is "train"
# by default, and may be a slice ("train[:10%]").

_NAME = re.compile(r"tfds:(?P<name>[^:]+(?::(?:\d+|\*)\.(?:\d+|\*)\.(?:\d+|\*))?)(?::(?P<split>[^:]+(?:\[[^\]]*\])?))?")


def open_tfds(address: str) -> tuple[Any, str]:
    """Returns the TFDS builder and the split for an address.

    Raises:
        UserError: The address is invalid, the split is unknown, or the data set is not prepared on this machine or
            needs TensorFlow to be read.
    """
    import tensorflow_datasets as tfds  # its import takes seconds

    match = _NAME.fullmatch(address)
    if match is None:
        raise UserError(f"{address} is not of the form tfds:NAME[:SPLIT], such as tfds:wikipedia/20230601.en:train")
    name, split = match["name"], match["split"] or "train"
    try:
        if name.startswith(("/", "./", "../", "~")):
            builder = tfds.builder_from_directory(name)
        else:
            # TFDS reads the variable only at import, which would ignore a later change.
            builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=os.environ.get("TFDS_DATA_DIR"))
    except Exception as error:
        raise UserError(
            f"{address} is not prepared on this machine ({first_line(error)}). Preparing needs TensorFlow: run "
            f"{install_hint('tensorflow')}, then tfds build NAME --file_format=array_record, and set TFDS_DATA_DIR to "
            "the folder with the prepared data"
        ) from None
    if builder.info.file_format not in builder.info.file_format.with_random_access():
        raise UserError(
            f"{address} is prepared as {builder.info.file_format.value}, which only TensorFlow can read. "
            "Prepare it again with --file_format=array_record"
        )
    try:
        builder.info.splits[split]
    except (KeyError, ValueError):
        known = ", ".join(builder.info.splits)
        raise UserError(f"{address}: unknown split {split}; choose from {known}") from None
    return builder, split
