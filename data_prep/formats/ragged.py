"""Byte strings of many rows as one flat array and a length for each; records are assembled from them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Integer, Shaped, UInt8, UInt32
from bert_jax.checksum import TABLE

_LOWEST_INITIALISED = 4  # bytes: the size of the register, which starts as all ones


class Ragged(NamedTuple):
    """R byte strings, concatenated in `flat`."""

    flat: UInt8[np.ndarray, "bytes"]
    lengths: Integer[np.ndarray, "R"]

    def strings(self) -> list[bytes]:
        """The strings as a list."""
        whole, ends = self.flat.tobytes(), np.cumsum(self.lengths).tolist()
        return [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def fixed(values: Shaped[np.ndarray, "R *n"]) -> Ragged:
    """The bytes of each row of numbers in memory (these formats and all supported hosts are little-endian)."""
    count = len(values)
    rows = np.ascontiguousarray(values).reshape(count, -1).view(np.uint8).reshape(count, -1)
    return Ragged(rows.reshape(-1), np.full(count, rows.shape[1]))


def varints(values: Integer[np.ndarray, "R n"]) -> Ragged:
    """The n numbers of each row as protocol buffers' varints: 7 bits a byte, lowest first, 10 bytes if negative."""
    words = values.astype(np.int64).view(np.uint64)
    most = max(1, -(-int(words.max(initial=0)).bit_length() // 7))
    sizes = np.ones(words.shape, np.int64)
    for groups in range(1, most):
        sizes += words >= np.uint64(1 << 7 * groups)
    places = np.arange(most)
    groups_of_7 = (words[..., None] >> (7 * places).astype(np.uint64)).astype(np.uint8) & np.uint8(0x7F)
    groups_of_7 |= (places < sizes[..., None] - 1).astype(np.uint8) << np.uint8(7)
    return Ragged(groups_of_7[places < sizes[..., None]], sizes.sum(axis=1))


def concatenate(pieces: Sequence[Ragged | bytes], count: int) -> Ragged:
    """Concatenates the pieces of each of `count` rows; a plain byte string is the same in every row."""
    lengths = [np.full(count, len(piece)) if isinstance(piece, bytes) else piece.lengths for piece in pieces]
    totals = np.sum(lengths, axis=0)
    flat = np.empty(totals.sum(), np.uint8)
    begins = np.cumsum(totals) - totals
    for piece, size in zip(pieces, lengths, strict=True):
        if isinstance(piece, bytes):
            flat[begins[:, None] + np.arange(len(piece))] = np.frombuffer(piece, np.uint8)
        else:
            flat[np.repeat(begins - (np.cumsum(size) - size), size) + np.arange(size.sum())] = piece.flat
        begins = begins + size
    return Ragged(flat, totals)


def crc32c(strings: Ragged) -> UInt32[np.ndarray, "R"]:
    """The CRC-32C of each string of at least four bytes; all rows advance together, a byte at a time.

    Starting with a register of all ones is the same as starting with zeros and inverting the first four bytes, and
    leading zeros leave a register of zeros unchanged. So strings are padded in front and all end in the same step.
    """
    count, width = len(strings.lengths), int(strings.lengths.max(initial=0))
    if count and strings.lengths.min() < _LOWEST_INITIALISED:
        raise ValueError("crc32c needs strings of at least four bytes")
    inside: Bool[np.ndarray, "R W"] = np.arange(width) >= width - strings.lengths[:, None]
    aligned = np.zeros((count, width), np.uint8)
    aligned[inside] = strings.flat
    firsts = (width - strings.lengths)[:, None] + np.arange(_LOWEST_INITIALISED)
    aligned[np.arange(count)[:, None], firsts] ^= np.uint8(0xFF)
    register = np.zeros(count, np.uint32)
    for column in np.ascontiguousarray(aligned.T):
        register = TABLE[(register ^ column) & np.uint32(0xFF)] ^ (register >> np.uint32(8))
    return ~register
