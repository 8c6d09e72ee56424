"""Shards on disk: Arrow IPC files with columns of fixed width, and a manifest (docs/data_format.md).

`open_dataset` opens a part (train or eval) of a build-examples output as a `Dataset`. It reads only the table of
shards; a shard is memory-mapped, and its size checked, when one of its rows is first requested. `local_copy` copies
outputs from object stores, and `open_tfds` opens TFDS data sets without TensorFlow.
"""

import functools
import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa

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
from bert_jax.errors import UserError, install_hint
from bert_jax.storage.files import atomic_writer, wait_for_lock, write_atomic
from bert_jax.storage.remote import Folder, as_address, first_line, is_remote
from bert_jax.tokenization.vocabulary import Vocabulary
from bert_jax.tokenization.vocabulary import load as load_vocabulary

# The most shards that are mapped at once: well below Linux's limit of 65 530 mappings per process (vm.max_map_count).
MOST_MAPPED = 16_384

Reader = Callable[[Mapping[str, Any]], Callable[[Path], Rows]]


class WrittenShard(NamedTuple):
    """The manifest entry of a shard, without its name."""

    rows: int
    bytes: int
    sha256: str


class Corrupt(Exception):
    """A shard does not match its manifest. The message does not name the shard."""


def write_shard(path: Path, rows: Rows) -> WrittenShard:
    """Writes rows atomically to one Arrow IPC file. If it raises OSError, e.g. for a full disk, there is no file."""
    arrays, fields = [], []
    for name, values in rows._asdict().items():
        if values is None:
            continue
        # Built from buffers, because pa.array() would import numpy.ma, which takes longer than writing the column.
        buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
        array = pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, buffers)
        if values.ndim > 1:
            item = pa.field("item", array.type, nullable=False)
            array = pa.FixedSizeListArray.from_arrays(array, type=pa.list_(item, values.shape[1]))
        arrays.append(array)
        fields.append(pa.field(name, array.type, nullable=False))
    schema = pa.schema(fields)
    with atomic_writer(path) as file:
        hashing = _Hashing(file)
        with pa.ipc.new_file(pa.PythonFile(hashing, "w"), schema) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    return WrittenShard(len(rows.input_ids), hashing.bytes, hashing.digest.hexdigest())


class _Hashing(io.RawIOBase):
    """Counts and hashes what is written to a file, so that no second copy of a shard is in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.bytes, self.digest = 0, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, content: Any, /) -> int:
        self.digest.update(content)
        self._file.write(content)
        self.bytes += len(content)
        return len(content)

    def tell(self) -> int:
        return self.bytes


def read_shard(source: Path | pa.NativeFile) -> Rows:
    """Reads a shard as read-only columns, without copying: a file on disk is memory-mapped. No file stays open.

    Raises:
        Corrupt: The file is not an Arrow IPC file with one record batch, whose columns are the fields of Rows.
    """
    columns = {}
    try:
        # The buffers keep the mapping alive after the file is closed.
        with pa.memory_map(str(source)) if isinstance(source, Path) else source as file:
            reader = pa.ipc.open_file(file)
            if reader.num_record_batches != 1:
                raise Corrupt(f"{reader.num_record_batches} record batches instead of one")
            batch = reader.get_batch(0)
        batch.validate()  # checks buffer sizes, because pyarrow would abort the process for some mismatches
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            if array.null_count:
                raise Corrupt(f"column {name} contains nulls")
            if pa.types.is_fixed_size_list(array.type):
                # flatten() would import pyarrow.compute, which takes longer than mapping a hundred shards.
                flat = array.values.to_numpy(zero_copy_only=True)
                # `values` ignores the list array's own offset and length.
                flat = flat.reshape(-1, array.type.list_size)[array.offset : array.offset + len(array)]
            elif pa.types.is_integer(array.type):
                flat = array.to_numpy(zero_copy_only=True)
            else:
                raise Corrupt(f"column {name} is {array.type} instead of integers in a fixed-size list")
            columns[name] = flat
    # A missing file is an OSError, too, but not a corrupt shard. Callers report it in other words.
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: contradictory sizes
        raise Corrupt(f"not an Arrow IPC file ({' '.join(str(error).split())})") from error
    # Columns with a default are present only with static masks. layout_problem compares them with the manifest.
    needed = [name for name in Rows._fields if name not in Rows._field_defaults]
    if missing := [name for name in needed if name not in columns]:
        raise Corrupt(f"column {missing[0]} is missing")
    if unknown := [name for name in columns if name not in Rows._fields]:
        raise Corrupt(f"unknown column {unknown[0]}")
    return Rows(**columns)


def check_sizes(directory: str | Path, shards: ShardTable) -> None:
    """Raises UserError for the first shard that is missing or has another size than in the table."""
    for name, stated in zip(shards.names.tolist(), shards.bytes.tolist(), strict=True):
        path = os.path.join(directory, name)  # pathlib is as slow as stat, which counts for thousands of shards
        if problem := size_problem(path, _size(path), stated):
            raise UserError(problem)


def size_problem(path: str, size: int | None, stated: int) -> str | None:
    """Describes a shard that is missing (`size` is None) or has another size than the stated one, or returns None."""
    if size is None:
        return f"missing shard {path}. {AGAIN}"
    if size != stated:
        return f"truncated or changed shard {path}: it has {size} bytes instead of {stated}. {AGAIN}"
    return None


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
    dataset = Dataset(directory, part, manifest, reader(manifest) if reader else read_shard)
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
    """One part of a build_examples output, as lazily read rows. `open_dataset` creates it."""

    def __init__(
        self,
        directory: Path,
        part: Part,
        manifest: Mapping[str, Any],
        read: Callable[[Path], Rows] = read_shard,
    ) -> None:
        self.directory = directory
        self.part = part
        self.manifest = dict(manifest)
        self.shards = read_shard_table(directory, manifest).part(part)
        self.counts: Mapping[str, Any] = manifest["parts"][part]  # such as rows and tokens
        self.labelled = manifest["objective"] in PAIRS  # whether sequences are labelled pairs
        self.seq_len: int = manifest["seq_len"]
        self.pack: int = manifest["pack"]
        self.max_predictions: int = manifest["masking"]["max_predictions"]
        self.static: bool = manifest["masking"]["kind"] == "static"
        self.masking = MaskingRule.from_manifest(manifest["masking"])
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.tokenizer_hash: str = manifest["tokenizer"]["hash"]
        # _ends[s] is the index of the first row after shard s. searchsorted with side="right" thus finds a row's shard,
        # and never finds an empty shard.
        self._ends = np.cumsum(self.shards.rows)
        self.rows = int(self._ends[-1]) if len(self.shards) else 0
        # The fingerprint identifies rows, not a place: a copy in another folder has the same one.
        hashes = map(self.shards.sha256, range(len(self.shards)))
        facts = zip(self.shards.names.tolist(), self.shards.rows.tolist(), hashes, strict=True)
        lines = "".join(f"{name} {rows} {sha256}\n" for name, rows, sha256 in facts)
        self.fingerprint = hashlib.sha256(lines.encode()).hexdigest()
        self._read = read
        self._columns = functools.lru_cache(MOST_MAPPED)(self._map)

    def gather(self, indices: Int64[np.ndarray, "R"]) -> Rows:
        """Copies rows to contiguous columns, in the order of `indices`.

        Raises:
            IndexError: An index is outside [0, rows).
            UserError: A shard cannot be read.
        """
        if len(indices) and (indices.min() < 0 or indices.max() >= self.rows):
            raise IndexError(f"rows {indices.min()} to {indices.max()} are not all in [0, {self.rows})")
        # Every shard is visited once. `order` sorts the places in the output by shard, and `owners` holds their shards.
        owners = np.searchsorted(self._ends, indices, side="right")
        first = self._columns(int(owners[0]) if len(indices) else 0)
        out = [np.empty((len(indices), *column.shape[1:]), column.dtype) for column in first]
        order = np.argsort(owners, kind="stable")
        numbers, begins = np.unique(owners[order], return_index=True)
        ends = np.append(begins, len(order))[1:]
        for shard, begin, end in zip(numbers.tolist(), begins.tolist(), ends.tolist(), strict=True):
            # With many shards, most contribute one row. numpy is 5 times as fast with a plain number as with an array.
            places: Any = int(order[begin]) if end - begin == 1 else order[begin:end]
            local = indices[places] - (self._ends[shard] - self.shards.rows[shard])
            for target, column in zip(out, self._columns(shard), strict=True):
                target[places] = column[local]
        # Only trailing fields of Rows can be absent (the static masks), so the columns in order are its first
        # arguments.
        rows = Rows(*out)
        # Only copied rows are checked, because a check of whole shards would read them from disk. After a problem, the
        # rows' shards are searched for the one to name.
        if value_problem(rows, self.manifest):
            for shard in numbers.tolist():  # the damaged one raises an error with its name
                self.shard_rows(shard)
        return rows

    def shard_rows(self, shard: int) -> Rows:
        """Returns a shard's rows, memory-mapped. Raises UserError if it cannot be read."""
        rows = Rows(*self._columns(shard))
        if problem := value_problem(rows, self.manifest):
            raise _damaged(self.directory / self.shards.names[shard], problem)
        return rows

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

    def _map(self, shard: int) -> list[np.ndarray]:
        """Maps a shard's columns, in the order of Rows."""
        path = self.directory / self.shards.names[shard]
        if wrong_size := size_problem(str(path), _size(path), int(self.shards.bytes[shard])):
            raise UserError(wrong_size)
        try:
            rows = self._read(path)
            problem = layout_problem(rows, int(self.shards.rows[shard]), self.manifest)
        except Corrupt as error:
            problem = str(error)
        except FileNotFoundError:
            problem = "the file no longer exists"
        if problem:
            raise _damaged(path, problem)
        # Later calls reuse the mapping. layout_problem has made sure that all shards have the same columns.
        return [column for column in rows if column is not None]


def _damaged(path: Path, problem: str) -> UserError:
    return UserError(
        f"damaged shard {as_address(path)}: {problem}. {AGAIN} "
        f"(to list all damage: bert-jax inspect-shards {as_address(path.parent.parent)} --verify)"
    )


def value_problem(rows: Rows, manifest: Mapping[str, Any]) -> str | None:
    """Describes an invalid value in the rows, or returns None.

    This is a quick check of every batch. `bert-jax inspect-shards DIR --verify` checks much more.
    """
    vocab_size, length = manifest["tokenizer"]["vocab_size"], manifest["seq_len"]
    # There may be no rows: initial=0 gives every maximum a value.
    total = rows.sequence_lengths.sum(axis=1, dtype=np.int64).max(initial=0)
    checks = [
        (rows.input_ids.max(initial=0) >= vocab_size, f"an id outside of the vocabulary of {vocab_size}"),
        (total > length, f"sequences longer than the row of {length} positions"),
        ((rows.first_segment_lengths > rows.sequence_lengths).any(), "a segment longer than its sequence"),
        (rows.next_sentence_labels.max(initial=0) > 1, "a next-sentence label over 1"),
    ]
    if rows.masked_ids is not None and rows.masked_positions is not None:
        checks += [
            (rows.masked_ids.max(initial=0) >= vocab_size, f"a masked id outside of the vocabulary of {vocab_size}"),
            (
                rows.masked_positions.max(initial=0) >= length,
                f"a masked position outside of the row of {length} positions",
            ),
        ]
    return next((problem for invalid, problem in checks if invalid), None)


def stored_columns(manifest: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns the columns (docs/data_format.md) by name: the shape and dtype of a row's values."""
    length, pack = manifest["seq_len"], manifest["pack"]
    ids = "uint16" if manifest["tokenizer"]["vocab_size"] <= 1 << 16 else "uint32"
    columns: dict[str, tuple[tuple[int, ...], str]] = {
        "input_ids": ((length,), ids),
        "sequence_lengths": ((pack,), "uint16"),
        "first_segment_lengths": ((pack,), "uint16"),
        "next_sentence_labels": ((pack,), "int8"),
        "sequence_keys": ((pack,), "uint64"),
    }
    if manifest["masking"]["kind"] == "static":
        most = manifest["masking"]["max_predictions"]
        columns |= {
            "masked_positions": ((most,), "uint16"),
            "masked_ids": ((most,), ids),
            "masked_counts": ((), "uint16"),
        }
    return columns


def layout_problem(rows: Rows, count: int, manifest: Mapping[str, Any]) -> str | None:
    """Describes the first column of a shard with a wrong shape or dtype, or returns None."""
    wanted = {name: ((count, *shape), kind) for name, (shape, kind) in stored_columns(manifest).items()}
    for name, values in rows._asdict().items():
        got = None if values is None else (values.shape, str(values.dtype))
        if got != wanted.get(name):
            return f"column {name} is {got}, but the manifest requires {wanted.get(name)}"
    return None


# Local copies of shards in an object store or on a slow disk. Runs share them.
#
# Training maps shards into memory, so they must be on a local disk. A copy is in CACHE/NAME-HASH, with the manifest's
# hash, so an output that was built again gets another folder. Hashes are checked while files are copied. Later, only
# sizes are checked.

_PARALLEL_FILES = 8  # because a store takes a while to answer a request


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
        others = [name for name in source.names("tokenizer") if ".." not in name.split("/")]
        sizes = {
            name: size
            for shards in chosen_shards
            for name, size in zip(shards.names.tolist(), shards.bytes.tolist(), strict=True)
        }
        sizes |= {name: source.size(name) for name in [*others, manifest["unigram_counts"]]}
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
