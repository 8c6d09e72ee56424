"""Compressed files of several streams: reading gives all of their content, or an error."""

import bz2
import errno
import gzip
import io
import itertools
import lzma
import random
import shutil
import subprocess
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streamed_outputs import interrupted

from bert_jax.storage.files import SUFFIXES, DamagedFile, decompressed, read_blocks

COMPRESS = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: pa.Codec("zstd").compress(content, asbytes=True),
}


class Shorter(io.BytesIO):
    """A file that returns a few bytes at a time, as a store may."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 7, 7))


def content(stored: bytes, suffix: str, file: type[io.BytesIO] = io.BytesIO, size: int = -1) -> bytes | None:
    """The content of a file; None if it is damaged."""
    with decompressed(file(stored), suffix, 1 if size > 0 else 1 << 16) as opened:
        try:
            return b"".join(iter(lambda: opened.read(size), b""))
        except DamagedFile:
            return None


def content_by_xz(stored: bytes) -> bytes | None:
    run = subprocess.run(["xz", "-dc"], input=stored, capture_output=True)
    return None if run.returncode else run.stdout


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("file, size", [(io.BytesIO, -1), (io.BytesIO, 3), (Shorter, 1000)])
def test_concatenated_streams_are_all_read(suffix, file, size):
    pieces = [b"", b"one ", b"two " * 40_000, b"", b"three"]
    stored = b"".join(map(COMPRESS[suffix], pieces))
    assert content(stored, suffix, file, size) == b"".join(pieces)


@pytest.mark.skipif(shutil.which("xz") is None, reason="xz is what this is compared with")
@pytest.mark.parametrize("padding", [*itertools.product([0, 3, 4, 1 << 17], repeat=3)], ids=str)
def test_padding_of_xz_is_accepted_where_the_xz_tool_accepts_it(padding):
    first, between, last = (bytes(size) for size in padding)
    stored = first + lzma.compress(b"one ") + between + lzma.compress(b"two") + last
    assert content(stored, ".xz") == content_by_xz(stored)
    assert (content(stored, ".xz") == b"one two") == (padding[0] == padding[1] % 4 == padding[2] % 4 == 0)


@pytest.mark.skipif(shutil.which("xz") is None, reason="xz is what this is compared with")
@given(st.integers(0, 1 << 32))
def test_damaged_xz_is_found_where_the_xz_tool_finds_it(seed):
    generator = random.Random(seed)
    stored = bytearray()
    for _ in range(generator.randint(1, 3)):
        stored += lzma.compress(generator.randbytes(generator.randint(0, 9)) * 9)
        stored += bytes(generator.choice([0, 0, 1, 4, 8]))
    match generator.randrange(4):
        case 0:
            stored[generator.randrange(len(stored))] ^= 1 << generator.randrange(8)
        case 1:
            del stored[generator.randrange(1, len(stored)) :]
        case 2:
            stored += generator.randbytes(generator.randint(1, 9))
    assert content(bytes(stored), ".xz") == content_by_xz(stored), bytes(stored).hex()


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_any_flipped_byte_of_a_later_stream_is_reported_or_changes_nothing(suffix):
    """It changes nothing in the time stamp of a .gz header, or in a limit of .xz that the text does not reach."""
    first, second = (COMPRESS[suffix](text * 9) for text in (b"one ", b"two "))
    detected = 0
    for place in range(len(second)):
        for flip in (1, 0x80, 0xFF):
            flipped = bytearray(second)
            flipped[place] ^= flip
            found = content(first + flipped, suffix)
            assert found in (None, b"one " * 9 + b"two " * 9), (place, flip)
            detected += found is None
    assert detected > 0.6 * 3 * len(second)
    for size in range(1, len(second)):
        assert content(first + second[:size], suffix) is None, size


def test_padding_and_garbage_of_gz_are_treated_as_python_does():
    first, second = gzip.compress(b"one "), gzip.compress(b"two")
    for stored in (b"", first + bytes(5) + second + bytes(70_000), first + b"garbage", bytes(4) + first, first[:5]):
        try:
            wanted = gzip.decompress(stored)
        except (OSError, EOFError):
            wanted = None
        assert content(stored, ".gz") == wanted


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_lost_connection_is_no_damage(monkeypatch, suffix):
    stored = COMPRESS[suffix](random.Random(0).randbytes(200_000))
    address = f"s3://bucket/a.txt{suffix}"
    interrupted(stored, range(90_000, len(stored)), monkeypatch)
    with pytest.raises(OSError, match="NETWORK_CONNECTION") as caught:
        list(read_blocks(address))
    assert caught.value.errno == errno.EIO
    interrupted(stored[:90_000], range(0), monkeypatch)
    with pytest.raises(DamagedFile):
        list(read_blocks(address))
    interrupted(stored, range(0), monkeypatch)
    assert b"".join(read_blocks(address)) == random.Random(0).randbytes(200_000)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_is_bounded_by_a_block(suffix):
    stored = COMPRESS[suffix](bytes(1 << 26))
    tracemalloc.start()
    try:
        with decompressed(io.BytesIO(stored), suffix) as opened:
            assert sum(len(block) for block in iter(lambda: opened.read(1 << 20), b"")) == 1 << 26
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 24, f"{peak} bytes, of which the dictionary of .xz takes 8 MiB"
