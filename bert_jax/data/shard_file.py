"""The file format of a shard (docs/data_format.md): an Arrow IPC file with columns of fixed width, in blocks of rows.

A block is a record batch of BLOCK_BYTES at most, and has the same number of rows in all shards, except for the last
block of a shard. So the place of every row follows by arithmetic from the shard's number of rows and from the size of
Arrow's metadata (`Framing`), and a block is one range of bytes.
"""

import hashlib
import io
import itertools
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from bert_jax.array_types import Int64
from bert_jax.data.example import Rows
from bert_jax.storage.files import atomic_writer

# A store sends this much in about the time that it takes to answer. Larger blocks shuffle worse, and the bytes of a row
# lie on more pages of the disk. Changing the number changes shards and batches.
BLOCK_BYTES = 1 << 18
_ALIGNMENT = 8  # Arrow's columns begin at multiples of so many bytes
_ENTRY_BYTES = 24  # of a block in the footer (`Block` in Arrow's File.fbs)
_END_BYTES = 4096  # read from both ends of a file for its metadata, which takes 1.1 KB and 0.7 KB without entries
_MARK = b"\xff\xff\xff\xff"  # precedes the 4-byte length of a message

Number = TypeVar("Number", int, np.ndarray)
ReadRange = Callable[[int, int], bytes | memoryview]  # (offset, length) -> bytes


class WrittenShard(NamedTuple):
    """The manifest entry of a shard, without its name."""

    rows: int
    bytes: int
    sha256: str


class Corrupt(Exception):
    """A shard does not match its manifest. The message does not name the shard."""


def block_rows(row_bytes: int) -> int:
    """Returns the number of rows in a block, given the bytes of a row."""
    # A multiple of 8, so that only the last block of a shard needs padding to align its columns.
    return max(BLOCK_BYTES // row_bytes // _ALIGNMENT, 1) * _ALIGNMENT


def write_shard(path: Path, rows: Rows) -> WrittenShard:
    """Writes rows atomically to one Arrow IPC file. If it raises OSError, e.g. for a full disk, there is no file."""
    return join_rows(path, [rows])


def join_rows(path: Path, parts: Iterable[Rows]) -> WrittenShard:
    """Writes the rows of at least one part, in order, as `write_shard` does. Memory holds a part at a time."""
    blocks = _blocks(parts)
    first = next(blocks)
    count = 0
    with atomic_writer(path) as file:
        hashing = _Hashing(file)
        with pa.ipc.new_file(pa.PythonFile(hashing, "w"), first.schema) as writer:
            for block in itertools.chain([first], blocks):
                writer.write_batch(block)
                count += block.num_rows
    return WrittenShard(count, hashing.bytes, hashing.digest.hexdigest())


class _Hashing(io.RawIOBase):
    """Counts and hashes what is written to a file, so that no copy of a shard is in memory."""

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


def _blocks(parts: Iterable[Rows]) -> Iterator[pa.RecordBatch]:
    """Splits the rows of all parts, one after the other, into blocks. Without rows there is one empty block."""
    rest: dict[str, np.ndarray] = {}  # rows that fill no block yet
    wrote = False
    for rows in parts:
        columns = {name: values for name, values in rows._asdict().items() if values is not None}
        if rest and len(rest["input_ids"]):
            columns = {name: np.concatenate([rest[name], values]) for name, values in columns.items()}
        step = block_rows(sum(math.prod(values.shape[1:]) * values.itemsize for values in columns.values()))
        whole = len(columns["input_ids"]) // step * step
        for begin in range(0, whole, step):
            yield _record_batch(columns, begin, begin + step)
            wrote = True
        rest = {name: values[whole:] for name, values in columns.items()}
    if len(rest["input_ids"]) or not wrote:
        yield _record_batch(rest, 0, len(rest["input_ids"]))


def _record_batch(columns: Mapping[str, np.ndarray], begin: int, end: int) -> pa.RecordBatch:
    arrays, fields = [], []
    for name, column in columns.items():
        # Built from buffers, because pa.array() would import numpy.ma, which takes longer than writing the column.
        values = np.ascontiguousarray(column[begin:end])
        array = pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, [None, pa.py_buffer(values)])
        if values.ndim > 1:
            item = pa.field("item", array.type, nullable=False)
            array = pa.FixedSizeListArray.from_arrays(array, type=pa.list_(item, values.shape[1]))
        arrays.append(array)
        fields.append(pa.field(name, array.type, nullable=False))
    return pa.record_batch(arrays, schema=pa.schema(fields))


def read_shard(path: Path) -> Rows:
    """Reads a whole shard as read-only columns. A shard of one block is memory-mapped, without a file staying open.

    Raises:
        Corrupt: The file is not an Arrow IPC file, whose columns are the fields of Rows.
    """
    try:
        # The buffers keep the mapping alive after the file is closed.
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            blocks = [_read_block(reader, index) for index in range(reader.num_record_batches)]
    # A missing file is an OSError, too, but not a corrupt shard. Callers report it in other words.
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: contradictory sizes
        raise _not_arrow(error) from error
    if not blocks:
        raise Corrupt("it has no record batch")
    if len(blocks) == 1:
        return blocks[0]
    names = [name for name, values in blocks[0]._asdict().items() if values is not None]
    return Rows(**{name: np.concatenate([getattr(block, name) for block in blocks]) for name in names})


def _read_block(reader: pa.RecordBatchFileReader, index: int) -> Rows:
    """Returns a block's columns as views of the file."""
    columns = {}
    batch = reader.get_batch(index)
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
    # Columns with a default are present only with static masks. layout_problem compares them with the manifest.
    needed = [name for name in Rows._fields if name not in Rows._field_defaults]
    if missing := [name for name in needed if name not in columns]:
        raise Corrupt(f"column {missing[0]} is missing")
    if unknown := [name for name in columns if name not in Rows._fields]:
        raise Corrupt(f"unknown column {unknown[0]}")
    return Rows(**columns)


def _not_arrow(error: Exception | str) -> Corrupt:
    return Corrupt(f"not an Arrow IPC file ({' '.join(str(error).split())})")


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


class Framing(NamedTuple):
    """A shard's bytes outside of columns. Shards by one version of pyarrow share them."""

    schema: bytes  # the beginning of the file
    header: int  # bytes before each block
    footer: int  # bytes after the last block, without the entries of blocks


class ShardLayout:
    """Computes where the rows of a data set are in its shards."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self._manifest = manifest
        self.columns = {name: (shape, np.dtype(kind)) for name, (shape, kind) in stored_columns(manifest).items()}
        self.widths = [math.prod(shape) * kind.itemsize for shape, kind in self.columns.values()]  # bytes per row
        self.row_bytes = sum(self.widths)
        self.block_rows = block_rows(self.row_bytes)

    def allocate(self, rows: int) -> Rows:
        """Allocates arrays for so many rows."""
        return Rows(**{name: np.empty((rows, *shape), kind) for name, (shape, kind) in self.columns.items()})

    def blocks(self, rows: int) -> int:
        """Counts the blocks in a shard with so many rows. An empty shard has one block without rows."""
        return max(-(-rows // self.block_rows), 1)

    def file_bytes(self, rows: int, framing: Framing) -> int:
        """Returns the size of a shard."""
        before = self.blocks(rows) - 1
        last = sum(_aligned(width * (rows - before * self.block_rows)) for width in self.widths)
        entries = _ENTRY_BYTES * (before + 1)
        return self._block_begin(before, len(framing.schema), framing.header) + last + framing.footer + entries

    def offsets(
        self,
        schema: Int64[np.ndarray, "R"],
        header: Int64[np.ndarray, "R"],
        shard_rows: Int64[np.ndarray, "R"],
        rows: Int64[np.ndarray, "R"],
    ) -> list[Int64[np.ndarray, "R"]]:
        """Returns where the values of rows are in their shards, by column.

        Args:
            schema: The bytes of the schema in each row's shard (Framing).
            header: The bytes of a header there.
            shard_rows: The number of rows there.
            rows: The rows to find, from the beginning of their shards.
        """
        block = rows // self.block_rows
        inside = rows - block * self.block_rows
        in_block = np.minimum(shard_rows - block * self.block_rows, self.block_rows)
        begin = self._block_begin(block, schema, header)
        offsets = []
        for width in self.widths:
            offsets.append(begin + inside * width)
            begin = begin + _aligned(width * in_block)
        return offsets

    def read_framing(self, read: ReadRange, rows: int, size: int) -> Framing:
        """Reads a shard's framing, and checks that its rows are where `offsets` finds them.

        Args:
            read: Reads bytes of the shard.
            rows: The shard's number of rows.
            size: Its number of bytes.

        Raises:
            Corrupt: The file is no shard, or its layout is not that of the manifest.
        """
        # Only the ends of the file and the header of its last block are read. Arrow then parses a file of the full size
        # in memory, whose rows are zeros. The kernel does not allocate pages that are never written.
        blocks = self.blocks(rows)
        end = min(_END_BYTES, size)
        tail = min(_END_BYTES + _ENTRY_BYTES * blocks, size)
        memory = mmap.mmap(-1, max(size, 1))
        memory[:end] = read(0, end)
        memory[size - tail : size] = read(size - tail, tail)
        # Two messages begin the file: the schema, after 8 bytes that name the format, and the header of block 0.
        places, messages = [8], []
        for _ in range(2):
            if memory[places[-1] : places[-1] + 4] != _MARK:
                raise _not_arrow("no message at its beginning")
            messages.append(8 + int.from_bytes(memory[places[-1] + 4 : places[-1] + 8], "little"))
            places.append(places[-1] + messages[-1])
            if places[-1] + 8 > end:
                raise _not_arrow("metadata of another size")
        framing = Framing(bytes(memory[: places[1]]), messages[1], 0)
        framing = framing._replace(footer=size - self.file_bytes(rows, framing))
        last = self._block_begin(blocks - 1, len(framing.schema), framing.header)
        if framing.footer < 0 or last > size:
            raise Corrupt(f"{size} bytes are too few for {rows} rows")
        memory[last - framing.header : last] = read(last - framing.header, framing.header)
        self._check_blocks(pa.py_buffer(memory), framing, rows)
        return framing

    def _check_blocks(self, file: pa.Buffer, framing: Framing, rows: int) -> None:
        """Raises Corrupt if the first or the last block is not where it should be."""
        blocks = self.blocks(rows)
        try:
            reader = pa.ipc.open_file(pa.BufferReader(file))
            if reader.num_record_batches != blocks:
                raise Corrupt(f"{reader.num_record_batches} record batches instead of {blocks}")
            for block in sorted({0, blocks - 1}):
                begin = block * self.block_rows
                parsed = _read_block(reader, block)
                if problem := layout_problem(parsed, min(rows - begin, self.block_rows), self._manifest):
                    raise Corrupt(problem)
                places = (np.array([place]) for place in (len(framing.schema), framing.header, rows, begin))
                wanted = [int(offset[0]) + file.address for offset in self.offsets(*places)]
                addresses = [getattr(parsed, name).__array_interface__["data"][0] for name in self.columns]
                if rows and addresses != wanted:
                    raise Corrupt("columns in another order than that of docs/data_format.md")
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _not_arrow(error) from error

    def _block_begin(self, block: Number, schema: Number, header: Number) -> Number:
        return schema + header + block * (self.block_rows * self.row_bytes + header)


def _aligned(size: Number) -> Number:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


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
