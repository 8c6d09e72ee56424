"""CRC-32C, which TensorFlow puts behind everything that it writes, of buffers of any size by numpy."""

from collections.abc import Sequence

import numpy as np

from bert_jax.array_types import Shaped, UInt8, UInt32

# The generator of CRC-32C (Castagnoli 1993), bits reversed: RFC 3720, appendix B.4.
_CASTAGNOLI = 0x82F63B78
_ONES = 0xFFFFFFFF
_LANES = 1 << 14  # so many pieces of a buffer advance together, a byte at a time
BLOCK_BYTES = 1 << 24  # bytes taken at a time
_REGISTER_BYTES = 4


def _table() -> UInt32[np.ndarray, "256"]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & np.uint32(1), np.uint32(_CASTAGNOLI), np.uint32(0))
    return table


# What the low byte of a register becomes, once it is shifted out.
TABLE = _table()


def crc32c(buffer: bytes | Shaped[np.ndarray, "..."]) -> int:
    """The CRC-32C of bytes, or of an array's as they lie in memory.

    A register is a linear function of its start and of the bytes, so pieces are done by themselves, from zero, and
    joined by what so many bytes of zeros make of the register before them.
    """
    flat = np.frombuffer(buffer, np.uint8) if isinstance(buffer, bytes) else np.ascontiguousarray(buffer)
    flat = flat.reshape(-1).view(np.uint8)
    register = np.array([_ONES], np.uint32)
    for start in range(0, len(flat), BLOCK_BYTES):
        block = flat[start : start + BLOCK_BYTES]
        register = _advance(register, _zeros(len(block))) ^ _from_zero(block)
    return int(register[0]) ^ _ONES


def crc32c_of_each(strings: Sequence[bytes]) -> UInt32[np.ndarray, "R"]:
    """The CRC-32C of each string of at least four bytes; all strings advance together, a byte at a time.

    Starting with a register of all ones is the same as starting with zeros and inverting the first four bytes, and
    leading zeros leave a register of zeros unchanged. So strings are padded in front and all end in the same step.
    """
    lengths = np.array([len(string) for string in strings], np.int64)[:, None]
    count, width = len(strings), int(lengths.max(initial=0))
    if count and lengths.min() < _REGISTER_BYTES:
        raise ValueError(f"crc32c_of_each needs strings of at least {_REGISTER_BYTES} bytes")
    aligned = np.zeros((count, width), np.uint8)
    aligned[np.arange(width) >= width - lengths] = np.frombuffer(b"".join(strings), np.uint8)
    aligned[np.arange(count)[:, None], width - lengths + np.arange(_REGISTER_BYTES)] ^= np.uint8(0xFF)
    registers = np.zeros(count, np.uint32)
    for column in np.ascontiguousarray(aligned.T):
        registers = TABLE[registers.astype(np.uint8) ^ column] ^ (registers >> np.uint32(8))
    return ~registers


def mask(crc: int) -> int:
    """A checksum as TensorFlow stores it (tensorflow/core/lib/hash/crc32c.h)."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _ONES


def _from_zero(block: UInt8[np.ndarray, "n"]) -> UInt32[np.ndarray, "1"]:
    lanes = 1 << min(_LANES, max(1, len(block) // 64)).bit_length() - 1
    width = -(-len(block) // lanes)
    pieces = np.zeros(lanes * width, np.uint8)  # zeros before the bytes leave a register of zeros as it is
    pieces[lanes * width - len(block) :] = block
    registers = np.zeros(lanes, np.uint32)
    for column in np.ascontiguousarray(pieces.reshape(lanes, width).T):
        registers = TABLE[registers.astype(np.uint8) ^ column] ^ (registers >> np.uint32(8))
    behind = _zeros(width)
    while len(registers) > 1:
        registers = _advance(registers[::2], behind) ^ registers[1::2]
        behind = _advance(behind, behind)
    return registers


def _zeros(count: int) -> UInt32[np.ndarray, "32"]:
    """What count bytes of zeros make of a register, by what they make of each of its bits."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power = TABLE[bits & np.uint32(0xFF)] ^ (bits >> np.uint32(8))  # of one byte
    whole = bits
    while count:
        if count & 1:
            whole = _advance(whole, power)
        power = _advance(power, power)
        count >>= 1
    return whole


def _advance(registers: UInt32[np.ndarray, "n"], matrix: UInt32[np.ndarray, "32"]) -> UInt32[np.ndarray, "n"]:
    """The product of a matrix over GF(2), by columns, with each register."""
    total = np.zeros(len(registers), np.uint32)
    for bit, column in enumerate(matrix):
        total ^= np.where(registers >> np.uint32(bit) & np.uint32(1), column, np.uint32(0))
    return total
