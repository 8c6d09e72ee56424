"""Files and documents: what is read, and what is said of what cannot be."""

import gzip
import lzma
import tracemalloc
from pathlib import Path

import pytest

from bert_jax.command import UserError
from data_prep.readers import documents, expand

TEXT = "one\ntwo\n\n \t\nthrée\n\n\nfour"
DOCUMENTS = ["one\ntwo", "thrée", "four"]


@pytest.mark.parametrize("suffix, compress", [(".txt", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_documents_are_the_same_however_compressed(tmp_path, suffix, compress):
    path = tmp_path / f"text{suffix}"
    path.write_bytes(compress(TEXT.encode()))
    assert list(documents(path)) == DOCUMENTS


@pytest.mark.parametrize("written", ["\ufeff" + TEXT, TEXT + "\n", "\n\n" + TEXT + "\n\n", TEXT.replace("\n", "\r\n")])
def test_line_ends_and_byte_order_marks_do_not_matter(tmp_path, written):
    path = tmp_path / "text.txt"
    path.write_bytes(written.encode())
    assert list(documents(path)) == DOCUMENTS


def test_only_line_feeds_end_a_line(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("a\x0bb\x0cc\x85d\u2028e\rf\ng".encode())
    assert list(documents(path)) == ["a\x0bb\x0cc\x85d\u2028e\rf\ng"]


def test_an_empty_file_has_no_documents(tmp_path):
    for text in ("", "\n", " \n\n"):
        (tmp_path / "text.txt").write_text(text)
        assert list(documents(tmp_path / "text.txt")) == []


def test_lines_across_read_blocks_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.readers.BUFFER_BYTES", 3)
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert list(documents(path)) == DOCUMENTS


def test_progress_adds_up_to_the_stored_size(tmp_path):
    path = tmp_path / "text.xz"
    path.write_bytes(lzma.compress(b"some words\n\n" * 300_000))
    read: list[int] = []
    assert sum(1 for _ in documents(path, on_read=read.append)) == 300_000
    assert sum(read) == path.stat().st_size


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "text.xz"
    path.write_bytes(lzma.compress(("words and words " * 20 + "\n\n").encode() * 60_000, preset=0))  # 19 MB of text
    tracemalloc.start()
    try:
        count = sum(1 for _ in documents(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 60_000
    assert peak < 6_000_000, f"{peak} bytes for a file of 19 MB"


def test_invalid_utf8_names_file_and_line(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"fine\n\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"latin\.txt, line 3: not UTF-8 \(byte 0xe9 in column 4\)"):
        list(documents(path))


@pytest.mark.parametrize("suffix, compress", [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_truncated_compressed_file_is_named(tmp_path, suffix, compress):
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(compress(TEXT.encode() * 100)[:-9])
    with pytest.raises(UserError, match=f"cut\\{suffix}: damaged compressed file"):
        list(documents(path))
    path.write_bytes(b"this is no compressed file")
    with pytest.raises(UserError, match="damaged compressed file"):
        list(documents(path))


def test_missing_file_folder_and_other_formats_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no such file: .*absent\.txt"):
        list(documents(tmp_path / "absent.txt"))
    with pytest.raises(UserError, match="is a folder where a text file was wanted"):
        list(documents(tmp_path))
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"\.parquet is not read"):
        list(documents(tmp_path / "rows.parquet"))


def test_expand_sorts_and_names_each_file_once(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "a[1].md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = expand(f"{tmp_path}/*.txt, {tmp_path}/**/*.txt,{tmp_path}/a[1].md")
    assert found == [Path(tmp_path / name) for name in ("a.txt", "a[1].md", "b.txt", "deep/c.txt")]


def test_file_of_several_names_counts_once(tmp_path):
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


def test_expand_refuses_what_matches_nothing(tmp_path):
    with pytest.raises(UserError, match=r"absent\*' matches no file"):
        expand(f"{tmp_path}/absent*")
    with pytest.raises(UserError, match="matches no file"):
        expand("")
    with pytest.raises(UserError, match="is a folder"):
        expand(str(tmp_path))
