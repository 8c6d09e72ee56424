"""Ranges of files: read one after another, they give the documents of the whole file, wherever the cuts are."""

import gzip
import importlib.util
import itertools
import json
import random
import struct
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.readers import Refusal, ranges
from data_prep.readers.corpus import Reading, Source, read, read_range, source_ranges
from data_prep.readers.ranges import Range


def bgzip(content: bytes, block_bytes: int = 300) -> bytes:
    """Compresses as bgzip does (SAM specification, 4.1), in small blocks."""
    stored = b""
    for start in [*range(0, len(content), block_bytes), len(content)]:
        block = content[start : start + block_bytes]
        compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
        deflated = compressor.compress(block) + compressor.flush()
        head = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x06\0BC\x02\0" + struct.pack("<H", len(deflated) + 25)
        stored += head + deflated + struct.pack("<II", zlib.crc32(block), len(block))
    return stored


def shown(item: object) -> object:
    """A document, or the reason why it is left out."""
    return item if isinstance(item, bytes) else item.reason  # type: ignore[attr-defined]


def check(path: Path, reading: Reading, generator: random.Random, tries: int = 10) -> None:
    size = path.stat().st_size
    whole = [shown(item) for item in read(str(path), reading)]
    assert whole
    for _ in range(tries):
        cuts = sorted({0, size, *(generator.randrange(size + 1) for _ in range(generator.randrange(9)))})
        parts: list[object] = []
        for begin, end in itertools.pairwise(cuts):
            try:
                parts += map(shown, read_range(str(path), reading, Range(begin, end, size)))
            except Refusal as refusal:
                parts.append(refusal.reason)
                break
        assert parts == whole, (path, cuts)


def documents(generator: random.Random, line_end: str) -> list[str]:
    """Documents with a byte-order mark here and there, as in files that were joined."""

    def line() -> str:
        return generator.choice(["", "\ufeff"]) + f"w{generator.randrange(99)} " * generator.randrange(1, 9)

    return [line_end.join(line() for _ in range(generator.randrange(1, 5))) for _ in range(40)]


@pytest.mark.parametrize("seed", range(8))
def test_ranges_of_text_give_its_documents(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    line_end = ["\n", "\r\n", "\r\r\n", "\r"][seed % 4]
    separator = ["", "---"][seed // 4]
    text = generator.choice(["", "\ufeff", "\n\n"])
    for document in documents(generator, line_end):
        blank = generator.choice(["", " ", "\t ", "\u3000"])
        between = f"{blank.strip()}{separator} " if separator else blank
        text += document + line_end + (between + line_end) * generator.randrange(1, 3)
    content = text.encode() + generator.choice([b"", b"caf\xe9", b"\n\nc\0\n\nlast"])
    reading = Reading(document_separator=separator, workers=1)
    (tmp_path / "plain.txt").write_bytes(content)
    (tmp_path / "blocks.txt.gz").write_bytes(bgzip(content))
    for name in ("plain.txt", "blocks.txt.gz"):
        check(tmp_path / name, reading, generator)


@pytest.mark.parametrize("seed", range(3))
def test_ranges_of_records_give_their_documents(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    texts = documents(generator, "\n")
    lines = "".join(json.dumps({"text": text}) + generator.choice(["\n", "\r\n", "\n\n", "x\n"]) for text in texts)
    (tmp_path / "plain.jsonl").write_bytes(lines.encode())
    (tmp_path / "blocks.jsonl.gz").write_bytes(bgzip(lines.encode()))
    (tmp_path / "array.jsonl").write_text("[\n" + lines)
    table = pa.table({"id": range(40), "text": [*texts[:-1], None]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=generator.randrange(1, 15))
    for name in ("plain.jsonl", "blocks.jsonl.gz", "array.jsonl", "rows.parquet"):
        check(tmp_path / name, Reading(workers=1), generator)


@pytest.mark.skipif(importlib.util.find_spec("resiliparse") is None, reason="needs the extra: pip install '.[warc]'")
@pytest.mark.parametrize("damage", [False, True])
def test_ranges_of_archives_give_their_documents(tmp_path: Path, damage: bool) -> None:
    generator = random.Random(1)
    stored = b""
    for text in documents(generator, "\n"):
        body = text.encode() * generator.choice([1, 90])
        head = b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\n"
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        record = head + body + b"\r\n\r\n"
        # A record in two members belongs to the range in which it begins.
        halves = [record[:50], record[50:]] if generator.random() < 0.2 else [record]
        stored += b"".join(gzip.compress(half) for half in halves)
    if damage:
        stored = stored[: len(stored) // 2] + b"damage" + stored[len(stored) // 2 + 6 :]
    (tmp_path / "a.warc.gz").write_bytes(stored)
    check(tmp_path / "a.warc.gz", Reading(workers=1), generator, tries=40)


def test_damage_ends_a_file_where_it_is(tmp_path: Path) -> None:
    generator = random.Random(2)
    content = "\n\n".join(documents(generator, "\n")).encode()
    stored = bgzip(content)
    block = stored.index(b"\x1f\x8b\x08\x04", len(stored) // 2)
    data = stored[: block + 60] + b"\xff\xff\xff\xff" + stored[block + 64 :]
    (tmp_path / "a.txt.gz").write_bytes(data)
    check(tmp_path / "a.txt.gz", Reading(workers=1), generator, tries=30)
    (tmp_path / "b.txt.gz").write_bytes(stored[:-70])
    check(tmp_path / "b.txt.gz", Reading(workers=1), generator)
    # A damaged head is found by the range before it, even if the next range would search behind it.
    (tmp_path / "c.txt.gz").write_bytes(stored[:block] + b"\0" + stored[block + 1 :])
    for cut in (block - 1, block, block + 1):
        with pytest.raises(Refusal, match="damaged file"):
            for span in (Range(0, cut, len(stored)), Range(cut, len(stored), len(stored))):
                list(read_range(str(tmp_path / "c.txt.gz"), Reading(workers=1), span))


def test_only_formats_with_borders_are_divided(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ranges, "RANGE_BYTES", 100)
    (tmp_path / "a.txt.gz").write_bytes(bgzip(b"x" * 1000, 50))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(random.Random(0).randbytes(999)))

    def count(name: str, **reading: str) -> int:
        path = tmp_path / name
        divided = source_ranges(Source(str(path), path.stat().st_size if path.exists() else 999), Reading(**reading))
        assert divided[0].begin == 0 and divided[-1].end == divided[-1].size
        assert all(left.end == right.begin for left, right in itertools.pairwise(divided))
        return len(divided)

    assert count("a.txt") == count("a.jsonl") == count("a.parquet") == count("a.warc.gz") == 9
    assert count("a.txt.gz") > 1 and count("b.txt.gz") == 1
    assert count("a.csv") == count("a.txt.xz") == count("a.warc") == count("a.xml") == count("a.arrow") == 1
    assert count("a.txt", document="file") == count("a.pdf") == 1
