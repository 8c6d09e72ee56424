"""Reads TensorFlow checkpoints in format V2 without TensorFlow.

PREFIX.index is a sorted table of names in LevelDB's format (leveldb/doc/table_format.md). Each value is
a protocol buffer that says where the tensor is (tensorflow/core/protobuf/tensor_bundle.proto).
PREFIX.data-00000-of-00001 and so on hold the raw tensors. All checksums of both are verified.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from bert_jax.checksum import crc32c, mask
from bert_jax.command import UserError

INDEX = ".index"
_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48  # bytes: two handles and the magic number
_TRAILER = 5  # bytes after a block: compression, checksum
# tensorflow/core/framework/types.proto; model parameters have no other types.
_DTYPES = {1: np.dtype(np.float32), 14: np.dtype(ml_dtypes.bfloat16), 19: np.dtype(np.float16)}


class _Entry(NamedTuple):
    """The location of a tensor; dtype is TensorFlow's number."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    sliced: bool


class TensorBundle:
    """The tensors of a checkpoint by name, each read on access as float32.

    Raises UserError for a damaged file and a missing part and, on access, for a tensor that is not of
    floats or is stored in slices.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index = prefix.with_name(prefix.name + INDEX)
        try:
            entries = dict(_table(index.read_bytes()))
            header = _message(entries.pop(b""))
            self._shards = int(header.get(1, [1])[0])
            self._entries = {name.decode(): _entry(value) for name, value in entries.items()}
        except (KeyError, IndexError, ValueError, struct.error) as error:
            raise UserError(
                f"{index} is damaged or not a TensorFlow checkpoint ({error}). Download it again"
            ) from error
        if header.get(2, [0])[0]:
            raise UserError(f"{index} was written on a big-endian machine. Save it again on a little-endian one")

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if entry.sliced or entry.dtype not in _DTYPES:
            problem = "is stored in slices" if entry.sliced else f"has TensorFlow type {entry.dtype}"
            raise UserError(
                f"{self.prefix}: tensor {name} {problem}; expected an unsliced tensor of float32, bfloat16 or half"
            )
        file = self.prefix.with_name(f"{self.prefix.name}.data-{entry.shard:05d}-of-{self._shards:05d}")
        if not file.exists():
            raise UserError(f"{file} is missing; {self.prefix.name}{INDEX} refers to it. Download it too")
        dtype = _DTYPES[entry.dtype]
        stored = np.fromfile(file, np.uint8, entry.size, offset=entry.offset)
        whole = len(stored) == entry.size == dtype.itemsize * int(np.prod(entry.shape))
        if not whole or mask(crc32c(stored)) != entry.checksum:
            raise UserError(f"{file} is damaged: the checksum of tensor {name} does not match. Download it again")
        return stored.view(dtype).reshape(entry.shape).astype(np.float32)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape


def _table(file: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields keys and values of a sorted table, which consists of blocks and a block with their positions."""
    if len(file) < _FOOTER or struct.unpack("<Q", file[-8:])[0] != _MAGIC:
        raise ValueError("it does not end with the footer of a table")
    (_, _, start, size), _ = _varints(file, len(file) - _FOOTER, 4)
    for _, handle in _block(file, start, size):
        (start, size), _ = _varints(handle, 0, 2)
        yield from _block(file, start, size)


def _block(file: bytes, start: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yields keys and values of one block. A key is stored as the length shared with the previous key, and the rest."""
    compression, checksum = struct.unpack("<BI", file[start + size : start + size + _TRAILER])
    if mask(crc32c(file[start : start + size + 1])) != checksum:
        raise ValueError("the checksum of a block does not match")
    if compression:
        raise ValueError("a block is compressed, which TensorFlow never writes")
    content = file[start : start + size]
    restarts = struct.unpack("<I", content[-4:])[0]
    position, end, key = 0, size - 4 * (restarts + 1), b""
    while position < end:
        (shared, rest, length), position = _varints(content, position, 3)
        key = key[:shared] + content[position : position + rest]
        position += rest + length
        yield key, content[position - length : position]


def _entry(message: bytes) -> _Entry:
    fields = _message(message)
    dimensions = [_message(size) for size in _message(fields.get(2, [b""])[0]).get(2, [])]
    dtype, shard, offset, size, checksum = (int(fields.get(number, [0])[0]) for number in (1, 3, 4, 5, 6))
    shape = tuple(int(dimension.get(1, [0])[0]) for dimension in dimensions)
    return _Entry(dtype, shape, shard, offset, size, checksum, sliced=7 in fields)


def _message(content: bytes) -> dict[int, list[Any]]:
    """Returns the fields of a protocol buffer by number: integers, or bytes for length-delimited fields."""
    fields: dict[int, list[Any]] = {}
    position = 0
    while position < len(content):
        (tag,), position = _varints(content, position, 1)
        number, kind = tag >> 3, tag & 7
        value: Any
        if kind == 0:
            (value,), position = _varints(content, position, 1)
        elif kind == 2:
            (length,), position = _varints(content, position, 1)
            value, position = content[position : position + length], position + length
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            value, position = int.from_bytes(content[position : position + width], "little"), position + width
        else:
            raise ValueError(f"unknown wire type {kind}")
        fields.setdefault(number, []).append(value)
    return fields


def _varints(content: bytes, position: int, count: int) -> tuple[list[int], int]:
    """Returns variable-length integers (7 bits per byte, lowest first) and the position after them."""
    numbers = []
    for _ in range(count):
        number = shift = 0
        while True:
            byte = content[position]
            number |= (byte & 0x7F) << shift
            position, shift = position + 1, shift + 7
            if byte < 0x80:
                break
        numbers.append(number)
    return numbers, position
