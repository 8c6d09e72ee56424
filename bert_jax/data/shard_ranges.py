"""Reads pieces of consecutive rows of shards by ranges of bytes, without the rest of the files.

Every column of a shard has rows of a fixed width and begins at a multiple of 8 bytes (docs/data_format.md), so the
place of a row follows from the number of rows of the shard and from the sizes of what precedes and follows the columns,
which is the same in all shards that the same version wrote. Those sizes are read from the first shard. A shard whose
total size differs from what they imply is opened by itself. What a range cannot show is the hash of its file.
"""

import functools
import math
import mmap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from bert_jax.array_types import Int64
from bert_jax.command import UserError
from bert_jax.data.example import Rows
from bert_jax.data.manifest import Part
from bert_jax.data.shards import Corrupt, columns_of, layout_problem, parse_shard, value_problem
from bert_jax.storage.ranges import RangeFiles
from bert_jax.storage.remote import Folder

_ALIGNMENT = 8  # of the columns in a file, in bytes
_END_BYTES = 4096  # of a file that hold its metadata, at its beginning and at its end: 1.1 and 0.7 KB
_AGAIN = "Copy the folder again, or build the examples again"


class Piece(NamedTuple):
    """Consecutive rows of one shard."""

    shard: int
    first: int  # row in the shard
    rows: int


class _Column(NamedTuple):
    """A column of the rows."""

    shape: tuple[int, ...]  # of the values of a row
    kind: np.dtype[Any]
    width: int  # of a row, in bytes


class _Framing(NamedTuple):
    """The bytes of a shard that are no rows."""

    before: int  # the first column
    total: int  # without the columns and what aligns them


class ShardRanges:
    """The shards of a part, wherever they are. Threads may share it.

    address   the output of build_examples that the manifest is of: a folder, or in a store
    Raises UserError for a shard that is missing or has another size than in the manifest.
    """

    def __init__(self, address: str, part: Part, manifest: Mapping[str, Any]) -> None:
        self.address = address
        self.shards: list[dict[str, Any]] = [
            shard for shard in manifest["shards"] if shard["name"].startswith(f"{part}/")
        ]
        self._manifest = manifest
        self._columns = {
            name: _Column(shape, np.dtype(kind), math.prod(shape) * np.dtype(kind).itemsize)
            for name, (shape, kind) in columns_of(manifest).items()
        }
        self.row_bytes = sum(column.width for column in self._columns.values())
        self._ends = np.cumsum([shard["rows"] for shard in self.shards], dtype=np.int64)
        _check_sizes(address, part, self.shards)
        self._files = RangeFiles(address)
        self._framing_of = functools.cache(self._read_framing)

    def allocate(self, rows: int) -> Rows:
        """Space for so many rows."""
        return Rows(**{name: np.empty((rows, *each.shape), each.kind) for name, each in self._columns.items()})

    def pieces(self, begin: int, rows: int) -> Iterator[Piece]:
        """Consecutive rows of the part, shard by shard."""
        shard = int(np.searchsorted(self._ends, begin, side="right"))
        while rows:
            left = int(self._ends[shard]) - begin
            taken = min(left, rows)
            if taken:  # a shard may be empty
                yield Piece(shard, self.shards[shard]["rows"] - left, taken)
            begin, rows, shard = begin + taken, rows - taken, shard + 1

    def read(self, piece: Piece, into: Rows) -> None:
        """Reads a piece into arrays of as many rows. Raises UserError for a shard that cannot be read or is damaged."""
        name = self.shards[piece.shard]["name"]
        places = self._places(piece.shard)
        for column, (shape, kind, width) in self._columns.items():
            content = self._files.read(name, places[column] + piece.first * width, piece.rows * width)
            getattr(into, column)[:] = np.frombuffer(content, kind).reshape(piece.rows, *shape)
        if problem := value_problem(into, self._manifest):
            raise self._damaged(name, problem)

    def gather(self, numbers: Int64[np.ndarray, "R"]) -> Rows:
        """Single rows of the part, in the given order, each read by itself."""
        rows = self.allocate(len(numbers))
        for place, number in enumerate(numbers.tolist()):
            for piece in self.pieces(number, 1):
                self.read(piece, slice_rows(rows, place, place + 1))
        return rows

    def close(self) -> None:
        """Ends waiting for another attempt at a range."""
        self._files.close()

    def _places(self, shard: int) -> dict[str, int]:
        """The position in the file of each column of a shard."""
        rows, framing = self.shards[shard]["rows"], self._framing
        if self._columns_bytes(rows) + framing.total != self.shards[shard]["bytes"]:
            framing = self._framing_of(shard)
        return self._place_columns(rows, framing.before)

    def _place_columns(self, rows: int, position: int) -> dict[str, int]:
        places = {}
        for name, column in self._columns.items():
            places[name] = position
            position += _aligned(rows * column.width)
        return places

    def _columns_bytes(self, rows: int) -> int:
        return sum(_aligned(rows * column.width) for column in self._columns.values())

    @functools.cached_property
    def _framing(self) -> _Framing:
        return self._framing_of(0)

    def _read_framing(self, shard: int) -> _Framing:
        """What precedes and follows the columns of a shard, from the beginning and the end of its file.

        Arrow parses a file of the shard's size in memory, whose rows are zeros that take no space.
        """
        entry = self.shards[shard]
        name, size, rows = entry["name"], entry["bytes"], entry["rows"]
        end = min(_END_BYTES, size)
        memory = mmap.mmap(-1, size)
        memory[:end] = self._files.read(name, 0, end)
        memory[size - end :] = self._files.read(name, size - end, end)
        buffer = pa.py_buffer(memory)
        try:
            parsed = parse_shard(pa.BufferReader(buffer))
            problem = layout_problem(parsed, rows, self._manifest)
        except Corrupt as error:
            problem = str(error)
        if problem:
            raise self._damaged(name, problem)
        found = {
            column: getattr(parsed, column).__array_interface__["data"][0] - buffer.address for column in self._columns
        }
        before = min(found.values())
        if found != self._place_columns(rows, before):
            raise UserError(
                f"the columns of {self.address}/{name} are not in the order of docs/data_format.md, so its rows cannot "
                "be read by ranges; leave out data.cache_bytes"
            )
        return _Framing(before, size - self._columns_bytes(rows))

    def _damaged(self, name: str, problem: str) -> UserError:
        return UserError(f"damaged shard {self.address}/{name}: {problem}. {_AGAIN}")


def slice_rows(rows: Rows, begin: int, end: int) -> Rows:
    """Views of consecutive rows."""
    return Rows(**{name: column[begin:end] for name, column in rows._asdict().items() if column is not None})


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _check_sizes(address: str, part: Part, shards: list[dict[str, Any]]) -> None:
    """Raises UserError for the first shard that is missing or whose size differs from the manifest."""
    sizes = Folder(address).sizes(part)
    for shard in shards:
        size = sizes.get(shard["name"])
        if size is None:
            raise UserError(f"missing shard {address}/{shard['name']}. {_AGAIN}")
        if size != shard["bytes"]:
            raise UserError(
                f"truncated or changed shard {address}/{shard['name']}: it has {size} bytes instead of "
                f"{shard['bytes']}. {_AGAIN}"
            )
