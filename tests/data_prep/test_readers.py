"""Text, and JSON lines in files of any compression, intact, damaged and mutated."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import random
import re
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from streamed_outputs import interrupted

from bert_jax.errors import RunAgain, UserError
from bert_jax.storage import files, remote
from data_prep.readers import Refusal, check, text
from data_prep.readers.corpus import Corpus, Reading, Source, documents, expand, read

TEXT = "one\ntwo\n\n \t\nthrée\n\n\nfour"
DOCUMENTS = ["one\ntwo", "thrée", "four"]


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def xz(data: bytes) -> bytes:
    return lzma.compress(data, preset=0)


def bzip2(data: bytes) -> bytes:
    """In blocks of 100 kB, because nothing of an unfinished block can be read."""
    return bz2.compress(data, 1)


COMPRESSIONS = [("", bytes), (".bz2", bzip2), (".gz", gzip.compress), (".xz", xz), (".zst", zstd)]
DAMAGED = [case for case in COMPRESSIONS if case[0]]


def by_line(data: bytes) -> list[str]:
    """The documents of a text file as defined, computed line by line."""
    found: list[list[str]] = [[]]
    lines = data.decode().removeprefix("\ufeff").split("\n")
    for line in (line.removesuffix("\r") for line in lines):
        if line and not line.isspace():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(lines) for lines in found if lines]


@pytest.mark.parametrize("suffix, compress", COMPRESSIONS)
def test_documents_are_the_same_however_compressed(tmp_path, suffix, compress):
    path = tmp_path / f"text.txt{suffix}"
    path.write_bytes(compress(TEXT.encode()))
    assert list(documents(path)) == DOCUMENTS


@pytest.mark.parametrize("suffix, compress", DAMAGED)
def test_concatenated_compressed_files_are_read_as_one(tmp_path, suffix, compress):
    path = tmp_path / f"text{suffix}"
    path.write_bytes(compress(b"one\n\ntw") + compress(b"o\n\nthree"))
    assert list(documents(path)) == ["one", "two", "three"]


@pytest.mark.parametrize("written", ["\ufeff" + TEXT, TEXT + "\n", "\n\n" + TEXT + "\n\n", TEXT.replace("\n", "\r\n")])
def test_line_ends_and_byte_order_marks_do_not_matter(tmp_path, written):
    path = tmp_path / "text.txt"
    path.write_bytes(written.encode())
    assert list(documents(path)) == DOCUMENTS


def test_only_line_feeds_and_returns_end_a_line(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("a\x0bb\x0cc\x85d\u2028e\rf\ng".encode())
    assert list(documents(path)) == ["a\x0bb\x0cc\x85d\u2028e\nf\ng"]


def test_an_empty_file_has_no_documents(tmp_path):
    for content in ("", "\n", " \n\n"):
        (tmp_path / "text.txt").write_text(content)
        assert list(documents(tmp_path / "text.txt")) == []
        assert list(read(str(tmp_path / "text.txt"), Reading(document="file"))) == []


@given(st.text(alphabet="a\u00e9\u3000\n\n\n\r \t\u2028\x85\ufeff", max_size=40), st.integers(1, 9))
@example("a\t\u00e9\n\t", 1)
def test_documents_do_not_depend_on_the_size_of_blocks(tmp_path_factory, content, size):
    path = tmp_path_factory.getbasetemp() / "text.txt"
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", size)
        # auto refuses what looks like TSV
        found = [item.decode() for item in read(str(path), Reading(input_format="text"))]
    ends = re.sub(b"\r\n?", b"\n", content.encode().replace(b"\r\r\n", b"\r\n"))
    assert found == by_line(ends)


def test_every_white_space_of_python_makes_a_blank_line(tmp_path):
    path = tmp_path / "text.txt"
    spaces = [chr(code) for code in range(0x110000) if chr(code).isspace() and chr(code) != "\n"]
    for space in spaces:
        path.write_bytes(f"one\n{space}{space}\ntwo".encode())
        assert list(documents(path)) == ["one", "two"], hex(ord(space))
    path.write_bytes("one\n\u200b\ntwo".encode())
    assert list(documents(path)) == ["one\n\u200b\ntwo"]


def test_a_file_is_one_document_with_document_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\r\n")
    assert list(read(str(path), Reading(document="file"))) == [b"one\n\ntwo"]


@pytest.mark.parametrize("suffix, compress", COMPRESSIONS)
def test_progress_adds_up_to_the_stored_size(tmp_path, suffix, compress):
    path = tmp_path / f"text{suffix}"
    path.write_bytes(compress(b"some words\n\n" * 30_000))
    sizes: list[int] = []
    assert sum(1 for _ in documents(path, on_read=sizes.append)) == 30_000
    assert sum(sizes) == path.stat().st_size


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "text.xz"
    path.write_bytes(lzma.compress(("words and words " * 200 + "\n\n").encode() * 6_000, preset=0))  # 19 MB of text
    tracemalloc.start()
    try:
        count = sum(1 for _ in documents(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 6_000
    assert peak < 8_000_000, f"{peak} bytes for a file of 19 MB"


REFUSED = [
    (b"fine\n\ncaf\xe9\n", "invalid_utf8", r"line 3: not UTF-8 \(byte 0xe9 in column 4\)"),
    (b"fine\n\n\n\nsay\nno\xe9\n\n", "invalid_utf8", r"line 6: not UTF-8 \(byte 0xe9 in column 3\)"),
    (b"fine\n\nsay\nno\0thing\n\n", "nul_character", r"line 4: a NUL character \(column 3\)"),
    (b"\x1b[1mfine\n\n", "control_character", r"line 1: a control character, U\+001B \(column 1\)"),
    ("fine\n\n\n\u0080\x7f".encode(), "control_character", r"line 4: a control character, U\+007F \(column 3\)"),
]


@pytest.mark.parametrize("content, reason, message", REFUSED, ids=[case[1] for case in REFUSED])
def test_refusal_names_file_and_line_and_the_rest_is_read(tmp_path, content, reason, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"before\r\n\r\n" + content + b"\n\n\nafter")
    with pytest.raises(
        UserError, match=rf"bad\.txt, {re.sub(r'line (.)', lambda m: f'line {int(m[1]) + 2}', message)}"
    ):
        list(documents(path))
    refusals = [item for item in read(str(path)) if isinstance(item, Refusal)]
    texts = [item for item in read(str(path)) if isinstance(item, bytes)]
    assert [refusal.reason for refusal in refusals] == [reason]
    assert texts[0] == b"before" and texts[-1] == b"after" and len(texts) == 2 + content.startswith(b"fine")
    assert all("\n" not in str(refusal) for refusal in refusals)


@pytest.mark.parametrize(
    "suffix, compress", [COMPRESSIONS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in DAMAGED)]
)
def test_endless_lines_and_documents_are_dropped_within_bounded_memory(tmp_path, monkeypatch, suffix, compress):
    monkeypatch.setattr(text, "MAX_DOCUMENT_BYTES", 1 << 18)
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 16)
    path = tmp_path / f"long.txt{suffix}"
    endless = [b"word " * 100_000, b"line\n" * 100_000]
    path.write_bytes(compress(b"\n\n".join([b"one", endless[0], b"two", endless[1], b"three", b"x" * 500_000])))
    tracemalloc.start()
    try:
        found = list(read(str(path)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [item for item in found if isinstance(item, bytes)] == [b"one", b"two", b"three"]
    refusals = [item for item in found if isinstance(item, Refusal)]
    assert [refusal.reason for refusal in refusals] == ["document_too_long"] * 3
    assert [re.search(r"line \d+", str(refusal))[0] for refusal in refusals] == ["line 3", "line 7", "line 100011"]
    assert peak < 4 << 20, f"{peak} bytes"
    assert [item.reason for item in read(str(path), Reading(document="file"))] == ["document_too_long"]


@pytest.mark.parametrize("suffix, compress", DAMAGED)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9])
def test_truncated_compressed_file_is_named_and_read_up_to_the_end(tmp_path, monkeypatch, suffix, compress, kept):
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 16)
    path = tmp_path / f"cut.txt{suffix}"
    documents_there = [" ".join(f"document {number * 7919}" for _ in range(10)) for number in range(3_000)]
    whole = compress("\n\n".join(documents_there).encode())
    path.write_bytes(whole[: max(7, int(len(whole) * kept))])
    with pytest.raises(UserError, match=f"cut\\.txt\\{suffix}: damaged file"):
        list(documents(path))
    *texts, refusal = read(str(path))
    assert isinstance(refusal, Refusal) and refusal.reason == "damaged_file"
    assert texts == [text.encode() for text in documents_there[: len(texts)]]
    assert len(texts) > 2_000 * (kept - 0.1)
    path.write_bytes(b"this is no compressed file")
    with pytest.raises(UserError, match="damaged file"):
        list(documents(path))


def up_to_damage(stored: bytes, suffix: str) -> bytes:
    """The output of a decompressor that gets and returns one byte at a time."""
    found = bytearray()
    streams = {".bz2": bz2.BZ2Decompressor, ".gz": lambda: zlib.decompressobj(31), ".xz": lzma.LZMADecompressor}
    with contextlib.suppress(OSError, lzma.LZMAError, zlib.error):
        while stored:
            stream = streams[suffix]()
            while stored and not stream.eof:
                found += stream.decompress(stored[:1], 1)
                stored = stored[1:]
                while piece := b"" if stream.eof else stream.decompress(getattr(stream, "unconsumed_tail", b""), 1):
                    found += piece
    return bytes(found)


@pytest.mark.parametrize("suffix, compress", DAMAGED)
@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32))
def test_everything_before_damage_is_read_with_blocks_of_any_size(tmp_path_factory, suffix, compress, seed):
    generator = random.Random(seed)
    path = tmp_path_factory.getbasetemp() / f"harmed.txt{suffix}"
    first, second = ("".join(generator.choices("abc\n", k=generator.randint(0, 999))).encode() for _ in range(2))
    stored = bytearray(compress(first + b"\n\n") + compress(second))
    if generator.random() < 0.5:
        del stored[generator.randrange(1, len(stored)) :]
    else:
        stored[generator.randrange(len(stored))] ^= 1 << generator.randrange(8)
    path.write_bytes(stored)
    found = []
    for size in (1, generator.randint(2, 99), 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "BLOCK_BYTES", size)
            found.append([item if isinstance(item, bytes) else item.reason for item in read(str(path))])
    assert found[0] == found[1] == found[2]
    if suffix != ".zst" and found[0][-1:] == ["damaged_file"]:
        text, ends = up_to_damage(bytes(stored), suffix), b"\n\n"
        if not set(text) <= set(b"abc\n"):  # damage may also change the text, and a line of \x1f is a blank one
            return
        assert found[0][:-1] == [
            item if isinstance(item, bytes) else item.reason
            for part in text.split(ends)[:-1]
            if part.strip(b"\n")
            for item in [check(part.strip(b"\n"), "")]
        ]


@pytest.mark.parametrize("suffix, compress", DAMAGED)
def test_no_document_before_the_damage_of_a_large_file_is_lost(tmp_path, monkeypatch, suffix, compress):
    """Decompressors read far ahead here. The second stream is damaged and the first is intact."""
    generator = random.Random(0)
    texts = [generator.randbytes(600).hex() for _ in range(1_000)]
    path = tmp_path / f"large.txt{suffix}"
    path.write_bytes(compress("".join(f"{text}\n\n" for text in texts).encode()) + compress(b"cut short")[:8])
    assert path.stat().st_size > 500_000
    for size in (1 << 12, 1 << 14):
        monkeypatch.setattr(files, "BLOCK_BYTES", size)
        *found, refusal = read(str(path))
        assert refusal.reason == "damaged_file" and len(found) == len(texts)
    assert found == [text.encode() for text in texts]


def stored_as(name: str) -> bytes:
    """Random documents in the format of a file's name, more than 100 kB."""
    texts = [random.Random(number).randbytes(500).hex() for number in range(400)]
    sink = io.BytesIO()
    match name.partition(".")[2]:
        case "parquet":
            pq.write_table(pa.table({"text": texts}), sink, compression="none", use_dictionary=False)
        case "arrow":
            with pa.ipc.new_stream(sink, pa.schema({"text": pa.string()})) as writer:
                for first in range(0, 400, 100):
                    writer.write_batch(pa.record_batch({"text": texts[first : first + 100]}))
        case "jsonl":
            sink.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
        case "warc":
            for text in texts:
                head = f"WARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}"
                sink.write(f"WARC/1.0\r\n{head}\r\n\r\n{text}\r\n\r\n".encode())
        case "xml":
            pages = "".join(f"<page><revision><text>{text}</text></revision></page>" for text in texts)
            sink.write(f"<mediawiki>{pages}</mediawiki>".encode())
        case suffixes:
            sink.write(dict(COMPRESSIONS)[suffixes.removeprefix("txt")]("\n\n".join(texts).encode()))
    return sink.getvalue()


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.parametrize(
    "name", [*(f"a.txt{suffix}" for suffix, _ in COMPRESSIONS), "a.jsonl", "a.parquet", "a.arrow", "a.warc", "a.xml"]
)
def test_a_lost_connection_stops_the_job_and_is_no_damage(monkeypatch, name, on_error):
    if name == "a.warc":
        pytest.importorskip("resiliparse")
    stored, address = stored_as(name), f"s3://bucket/{name}"
    corpus = Corpus((Source(address, len(stored)),), Reading(on_error=on_error))
    first = 4 if name in ("a.parquet", "a.arrow") else 70_000  # pieces of these are read by one request each
    interrupted(stored, range(first, len(stored) - 1000), monkeypatch)
    with pytest.raises(RunAgain, match=rf"^{address}: .*connection was reset\. .*run the same command again$"):
        list(corpus.documents())
    assert not corpus.refused
    interrupted(stored, range(0), monkeypatch)
    assert len(list(corpus.documents())) == 400


@pytest.mark.parametrize("name", ["a.txt.gz", "a.parquet", "a.arrow"])
def test_damage_of_a_file_in_a_store_is_refused(monkeypatch, name):
    interrupted(stored_as(name)[:-100], range(0), monkeypatch)
    corpus = Corpus((Source(f"s3://bucket/{name}", 1),), Reading(on_error="skip"))
    list(corpus.documents())
    assert corpus.refused == {"damaged_file": 1}


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("none"),
        PermissionError(13, "google::cloud::Status(PERMISSION_DENIED)"),
        OSError("AWS Error ACCESS_DENIED during HeadObject operation: No response body."),
    ],
)
def test_a_file_in_a_store_that_cannot_be_opened_is_refused(monkeypatch, error):
    def refuse(address: str) -> None:
        raise error

    monkeypatch.setattr(remote, "open_store", refuse)
    for name in ("a.txt", "a.parquet"):
        corpus = Corpus((Source(f"s3://bucket/{name}", 1),), Reading(on_error="skip"))
        assert not list(corpus.documents()) and corpus.refused == {"unreadable_file": 1}


def test_missing_file_folder_and_other_formats_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"absent\.txt: no such file"):
        list(documents(tmp_path / "absent.txt"))
    with pytest.raises(UserError, match="expected a file, got a folder"):
        list(documents(tmp_path))
    (tmp_path / "text.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"\.zip files are not supported"):
        list(documents(tmp_path / "text.zip"))


def test_expand_sorts_and_names_each_file_once(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "a[1].md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = expand(f"{tmp_path}/*.txt, {tmp_path}/**/*.txt,{tmp_path}/a[1].md")
    assert found == [Path(tmp_path / name) for name in ("a.txt", "a[1].md", "b.txt", "deep/c.txt")]


def test_file_with_several_names_counts_once(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "deep").mkdir()
    (tmp_path / "link.txt").symlink_to("a.txt")
    assert expand(f"{tmp_path}/a.txt,{tmp_path}/deep/../a.txt,{tmp_path}/*.txt") == [tmp_path / "a.txt"]


def test_comma_may_be_part_of_a_name(tmp_path):
    folder = tmp_path / "a, b"
    folder.mkdir()
    (folder / "one.txt").write_text("x")
    assert expand(f"{folder}/one.txt") == expand(f"{folder}/*.txt") == [folder / "one.txt"]
    names = [tmp_path / f"{number:0100d}.txt" for number in range(60)]
    for name in names:
        name.write_text("x")
    assert expand(",".join(map(str, names))) == names, "longer together than a path may be"


def test_expand_refuses_a_pattern_that_matches_nothing(tmp_path):
    with pytest.raises(UserError, match=r"absent\*' matches no file"):
        expand(f"{tmp_path}/absent*")
    with pytest.raises(UserError, match="matches no file"):
        expand("")
    with pytest.raises(UserError, match="expected a file, got a folder"):
        expand(str(tmp_path))


def test_lines_are_numbered_after_blank_ones_of_a_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n---\n\n\ntwo\ncaf\xe9\n")
    (refusal,) = [item for item in read(str(path), Reading(document_separator="---")) if isinstance(item, Refusal)]
    assert "line 6: not UTF-8" in str(refusal)


@pytest.mark.parametrize("text", ['[{"text": "a"}]', '\n[\n  {"text": "a"},\n  {"text": "b"}\n]\n'])
def test_an_array_of_json_is_refused_as_a_whole(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    (refusal,) = read(str(path))
    assert "a JSON array, not an object on each line. Convert it: jq -c '.[]'" in str(refusal)


FUZZER = Path(__file__).parent.parent / "tools" / "fuzz_readers.py"


@pytest.mark.parametrize("inputs, builds", [(300, 2), pytest.param(3000, 20, marks=pytest.mark.slow)])
def test_mutated_input_is_used_or_refused_in_one_line(vocab_dir: Path, inputs: int, builds: int) -> None:
    """In a process of its own, so that a crash of a library is seen too."""
    arguments = [f"--inputs={inputs}", f"--builds={builds}", f"--tokenizer={vocab_dir}"]
    run = subprocess.run(
        [sys.executable, "-W", "error", FUZZER, *arguments], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    counts = json.loads(run.stdout)
    assert {"damaged_file", "invalid_utf8", "not_json", "no_text_field", "duplicate"} < set(counts)
    assert counts["used"] > inputs / 2, "too little is left to be used for this to mean much"


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\r\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 16])
def test_line_ends_of_any_kind_separate_lines_and_documents(tmp_path, monkeypatch, end, size):
    monkeypatch.setattr(files, "BLOCK_BYTES", size)
    text = "One.\nMore\u2028of it.\n\n\nTwo.\n \n\nThree.\n"
    for name, content in {
        "a.txt": text,
        "a.jsonl": '{"text": "One.\\nMore\u2028of it."}\n{"text": "Two."}\n\n{"text": "Three."}\n',
        "a.csv": 'id,text\n1,"One.\nMore\u2028of it."\n2,Two.\n3,Three.\n',
        "a.tsv": "id\ttext\n1\tOne. More\u2028of it.\n2\tTwo.\n3\tThree.\n",
    }.items():
        (tmp_path / name).write_text(content.replace("\n", end), newline="", encoding="utf-8")
        first = "One. More\u2028of it." if name == "a.tsv" else "One.\nMore\u2028of it."
        assert list(read(f"{tmp_path}/{name}")) == [first.encode(), b"Two.", b"Three."], name


def test_files_of_mixed_line_ends_are_read_as_python_reads_them():
    """Except CRCRLF, which is one line end that was converted twice."""
    generator = random.Random(1)
    for _ in range(2000):
        content = "".join(generator.choices(["a", "b ", "\r", "\n", "\r\n"], k=generator.randint(1, 12)))
        wanted = io.StringIO(re.sub("\r\r\n", "\r\n", content), newline=None).read()
        cut = generator.randint(0, len(content))
        blocks = iter([content[:cut].encode(), content[cut:].encode()])
        assert b"\n".join(text.lines(blocks)) == wanted.encode().removesuffix(b"\n"), repr(content)
