"""What is not plain text is never read as plain text, and nothing is written for it."""

import gzip
import io
import json
import random
import re
import sqlite3
import string
import subprocess
import sys
import tarfile
import wave
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_jax.commands.clean import CleanOptions, clean
from bert_jax.errors import UserError
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.readers.corpus import Corpus, Reading, find_sources, read
from data_prep.vocabulary import TokenizerOptions, train


def corpus(pattern: object, **reading: str) -> Corpus:
    return Corpus(find_sources(str(pattern)), Reading(**reading))


HTML = b"<!DOCTYPE html>\n<html><body><p>A page.</p></body></html>\n"
TABLE = pa.table({"text": ["one", "two"]})


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("word/document.xml", "<w:document/>")
    return file.getvalue()


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(__file__, "a.txt")
    return file.getvalue()


def sound() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, 8000, 0, "NONE", ""))
        written.writeframes(bytes(range(256)))
    return file.getvalue()


def numbers() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(1000))
    return file.getvalue()


def database(folder: Path) -> bytes:
    with sqlite3.connect(folder / "a.db") as connection:
        connection.execute("create table a (text)")
    connection.close()
    content = (folder / "a.db").read_bytes()
    (folder / "a.db").unlink()
    return content


def arrow(opening: object) -> bytes:
    sink = pa.BufferOutputStream()
    with opening(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return sink.getvalue().to_pybytes()


def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink)
    return sink.getvalue().to_pybytes()


def contents(folder: Path) -> dict[str, bytes]:
    """Content of other formats, by the words that describe it in the message."""
    return {
        "HTML": HTML,
        "HTML in lower case": b"\xef\xbb\xbf\n <!-- saved\npage -->\n<html lang='en'><head></head></html>",
        "HTML with an XML declaration": b'<?xml version="1.0"?>\n<!DOCTYPE html PUBLIC "-//W3C//DTD">\n<html></html>',
        "XML": b'<?xml version="1.0" encoding="utf-8"?>\n<TEI><text>x</text></TEI>',
        "HTML that begins with a title": b"<title>A page</title>\n<h1>A page</h1>\nSome <b>text</b> of it.\n",
        "HTML that begins with a script": b"<script type='module'>\nlet a = b < c;\n</script>\n<p>A page",
        "HTML that begins with a div": b"<!-- a --><div class='a'>\n<p>One<br>\n<p>Two</p></div>\n<hr>\n<p>End.</p>\n",
        "HTML that begins with a table": b"<table border=0>\n<tr><td>One<td>Two\n</table>\n",
        "HTML that begins with paragraphs": b"<p>A paragraph of some words.</p>\n" * 2500,
        "XML without a declaration": b"<books>\n<book id='1'>One</book>\n<book id='2'/>\n</books>\n",
        "XML of many roots": b"<DOC>\n<DOCNO> 1 </DOCNO>\n<TEXT>\nOne, two.\n</TEXT>\n</DOC>\n" * 2,
        "XML of one large root": b"<books>\n" + b"<book><title>A</title> Text.</book>\n" * 2500 + b"</books>\n",
        "XML of a feed": b'<rss version="2.0"><channel></channel></rss>',
        "a MediaWiki XML dump": b'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"></mediawiki>',
        "wikiextractor's <doc> markup": b'<doc id="12" url="https://a.org" title="A">\nA\n\nText.\n</doc>\n',
        "WARC": b"WARC/1.0\r\nWARC-Type: warcinfo\r\nContent-Length: 0\r\n\r\n\r\n\r\n",
        "JSON": b'{"id": 7, "text": "one"}\n{"id": 8, "text": "two"}\n',
        "JSON of one list": b'[\n {"text": "one"},\n {"text": "two"}\n]\n',
        "JSON of strings": b'[\n  "One, \\"two\\".",\n  "Three."\n]\n',
        "CSV": b'id,text\n1,"one, two"\n2,three\n',
        "CSV with a quoted line end": b'\xef\xbb\xbf"id","The text",n\r\n1,"one\r\ntwo",3\r\n2,four,5\r\n',
        "CSV with a ragged row": b"id,text\n1,one\n2,two,three\n3,four\n",
        "CSV with few ragged rows": b"id,text\n" + (b"1,one\n" * 19 + b"2,two,three\n") * 500,
        "CSV with other names": b"text (en),label/class\none,1\ntwo,2\n",
        "CSV with one row": b'text,label\n"One, two.",1\n',
        "CSV with spaces in quotes": b'text,label\n" One, two.",1\n" Three,\n four, five.",1\n" Six",2\n',
        "CSV with semicolons": b"id;text\n1;one, two\n2;three\n",
        "TSV": b"id\ttext\n1\tone, two\n2\tthree\n",
        "TSV with a carriage return": b"label\ttext\npos\tGreat\rbuy again\nneg\tbad\npos\tgood\n",
        "Parquet": parquet(),
        "Arrow": arrow(pa.ipc.new_stream),
        "Arrow file": arrow(pa.ipc.new_file),
        "ARC, the format before WARC": b"filedesc://a.arc 0.0.0.0 20040101000000 text/plain 77\n1 0 InternetArchive\n",
        "PDF": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n",
        "RTF": b"{\\rtf1\\ansi A text.}",
        "a zip archive, or an office document": zipped(),
        "an office document": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600),
        "an archive": tarred(),
        "an image": b"\x89PNG\r\n\x1a\n" + bytes(20),
        "sound or video": sound(),
        "a program": Path(sys.executable).resolve().read_bytes()[:3000],
        "a database": database(folder),
        "a NumPy array": numbers(),
        "binary data": random.Random(0).randbytes(5000),
    }


def arguments(folder: Path, name: str, vocab_dir: Path, **options: object) -> dict[str, object]:
    return {
        "input": folder / name,
        "tokenizer": vocab_dir,
        "output": folder / "out",
        "seq_len": 64,
        "workers": 1,
    } | options


def test_content_of_other_formats_is_refused_under_any_name(tmp_path):
    for number, (kind, content) in enumerate(contents(tmp_path).items()):
        qualifier = r" (in lower|with (?!semicolons)|without|that begins|of (a feed|one|many|strings)|file$).*"
        what = re.sub(qualifier, "", kind)
        for name in (("a.txt", "wiki_00", "part-00000", "corpus.en")[number % 4], "a.txt.gz"):
            folder = tmp_path / f"{number} {name}"
            folder.mkdir()
            (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
            with pytest.raises(UserError) as raised:
                corpus(folder / name)
            message = str(raised.value)
            assert f"{name}: the content is {what}" in message and "\n" not in message, message
            assert "--input_format" in message and "plain text, .jsonl, .csv" in message
            skipping = corpus(folder / name, on_error="skip")
            assert list(skipping.texts()) == [] and skipping.refused == {"other_format": 1}, kind


OTHER_NAMES = (
    "a.html a.htm.gz A.HTML a.pdf a.docx a.xlsx a.pptx a.odt a.rtf a.zip a.tar.gz a.tgz "
    "a.7z a.png a.jpg a.mp4 a.epub a.npz a.pkl a.sqlite a.wat.gz a.safetensors a.tfrecord"
)


@pytest.mark.parametrize("name", OTHER_NAMES.split())
def test_names_of_other_formats_are_refused_whatever_is_in_them(tmp_path, name):
    (tmp_path / name).write_bytes(b"This is text.")
    message = r"(?i)a\.\w+(\.gz)?: \.\w+ files are not supported \(supported: plain text, .*\Z"
    with pytest.raises(UserError, match=message):
        corpus(tmp_path / name)


TEXTS = {
    "lines that begin with tags of HTML": b"<p align='center'>A readme\n\n<!-- and so on -->",
    "quotes and brackets": b'{ he said } "and so on": [1]\n\n"A, b", c\n',
    "commas in every line": b"Roses are red, violets are blue\nSugar is sweet, and so are you\nOne, two\n",
    "a list": b"- one, two\n- three, four\n- five, six\n",
    "words with tabs": b"\tone\ttwo\n\tthree\tfour\n\tfive\tsix\n",
    "a carriage return in a line": b"Emma,Austen\nA line\rof, two\nmore\n",
    "code": b"import csv,json\nx = {1: 2}\nprint(x, x)\n",
    "a heart": b"<3 you\n\n<3 <3\n",
    "unknown words": b"<unk> of the <unk> </unk>\n" * 3000,
    "marked sentences": b"<s> The <unk> of it . </s>\n" * 3000,
    "a chat": b"<nick> hello\n<bob> hi, nick\n<nick> </3 <b>bold</b>\n" * 2000,
    "turns of a dialogue": b"<user>Hello</user>\n<model>Hi</model>\n" * 3,
    "thoughts and an answer": b"<think>\nOne <b>two</b>.\n</think>\nAn answer.\n",
    "Markdown that begins with HTML": b'<div align="center">\n<img src="a.png"><h1>A</h1>\n</div>\n\nA *readme*.\n',
    "Markdown with an open tag": b'<h1 align="center">A</h1>\n\n<p align="center">\n\nA <b>readme</b> of it.\n' * 2000,
    "wikitext": b"<noinclude>{{doc}}<br/></noinclude>\n'''A''' is [[b]].<ref>C <i>d</i></ref>\n\n<poem>a</poem>\n",
    "a link": b"<https://a.org> is a page.\n\n<a@b.org>, <c@d.org>\n",
    "one comma in each line": b"Yes,sir\nHe came, he saw\nOne, two\nThree, four\n" * 100,
    "one comma in each of two lines": b"Harbour,boats\nIt was quiet, and the boats came home.\n",
    "one semicolon in each line": b"He came; he saw\nThey came; they saw\nOne; two\n",
    "a list of names": b"London, England\nParis, France\nRome, Italy\n",
    "LaTeX": b"\\documentclass{article}\n\\begin{document}\n$a < b, c > d$\n\\end{document}\n",
    "code of a function": b"foo(a,b)\nbar(c,d)\n",
    "code of a class": b"template<class T>\nclass A : B<T> {};\n",
    "code of a page": b"<?php get_header(); ?>\n<div>\n<p>A</p>\n</div>\n",
    "a list of links": b'["A"] is a letter, and ["B"], too\n\n[1] A book\n',
    "control characters": b"a\0b " * 100,
    "UTF-16": "one\n\ntwo".encode("utf-16") * 200,
    "Latin-1": "caf\u00e9 \u00fcber \u00e4u\u00dfern\n".encode("latin-1") * 100,
    "a word like a magic number": b"PARTY WARCRAFT BZhello GIFted RIFF MZ Id3",
}


@pytest.mark.parametrize("content", TEXTS.values(), ids=TEXTS)
def test_text_is_not_taken_for_another_format(tmp_path, content):
    (tmp_path / "wiki_00").write_bytes(content)
    corpus(tmp_path / "wiki_00")
    assert "other_format" not in [getattr(item, "reason", "") for item in read(str(tmp_path / "wiki_00"))]


@pytest.mark.parametrize("name", ["wiki_00", "corpus.en", "part-00000", "a.txt", "notes.md", "text.2024-01-01"])
def test_files_of_any_other_name_are_text(tmp_path, name):
    (tmp_path / name).write_bytes(b"One.\n\nTwo.\n")
    assert list(corpus(tmp_path / name).documents()) == ["One.", "Two."]


def test_a_language_is_no_format(tmp_path):
    """Parallel corpora are named so: corpus.pt is Portuguese as often as it is a file of PyTorch."""
    codes = {f"{first}{second}" for first in string.ascii_lowercase for second in string.ascii_lowercase}
    codes -= {"gz", "xz", "lz"}  # compression, and no languages
    for code in codes:
        (tmp_path / f"corpus.{code}").write_bytes(b"One.\n")
    assert len(list(corpus(tmp_path / "*").documents())) == len(codes)


def test_sample_text_and_the_code_of_this_project_are_text():
    root = Path(__file__).parent.parent.parent
    patterns = f"{root}/data_prep/sample/books/*.txt.xz,{root}/data_prep/**/*.py,{root}/tests/*.py,{root}/docs/*.md"
    assert len(corpus(patterns).sources) > 50


@pytest.mark.parametrize(
    ("name", "chosen", "content", "documents"),
    [
        ("records", "jsonl", b'{"text": "one"}\n', ["one"]),
        ("page.html", "text", HTML, [HTML.decode().strip()]),
        ("table.txt", "csv", b"id,text\n1,one\n2,two\n", ["one", "two"]),
        ("table.csv", "auto", b'id;text\n1;"one, or; so"\n2;two\n', ["one, or; so", "two"]),
    ],
)
def test_the_format_is_decided_by_hand(tmp_path, name, chosen, content, documents):
    (tmp_path / name).write_bytes(content)
    assert list(corpus(tmp_path / name, input_format=chosen).documents()) == documents


def test_files_whose_name_promises_another_format_are_refused(tmp_path):
    pytest.importorskip("resiliparse")
    pytest.importorskip("mwparserfromhell")
    for name, message in {
        "a.xml": "the content is not a MediaWiki XML dump",
        "a.warc": "the content is not WARC",
        "a.wet": "the content is not WARC",
        "a.parquet": "damaged file",
        "a.arrow": "damaged file",
        "a.csv": "no column 'text'; the first line names the columns This is text.",
        "a.tsv": "no column 'text'; the first line names the columns This is text.",
    }.items():
        (tmp_path / name).write_bytes(b"This is text.")
        with pytest.raises(UserError, match=re.escape(f"{name}: {message}")):
            list(corpus(tmp_path / name).documents())


@pytest.mark.parametrize(
    "format, packages, extra", [("warc", "resiliparse", "warc"), ("mediawiki", "mwparserfromhell", "wiki")]
)
def test_missing_packages_are_named_with_their_extra(tmp_path, monkeypatch, format, packages, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "a").write_bytes(b"x")
    message = rf"^input in the format {format} needs {packages}\. Run pip install .*\[{extra}\]'$"
    for on_error in ("fail", "skip"):
        with pytest.raises(UserError, match=message):
            corpus(tmp_path / "a", input_format=format, on_error=on_error)


def test_nothing_is_written_for_input_that_is_refused(tmp_path, sample_text, vocab_dir):
    """Also if the file comes after text of many units, which would be finished by then."""
    pytest.importorskip("resiliparse")
    pytest.importorskip("mwparserfromhell")
    (tmp_path / "a.txt").write_bytes(sample_text.read_bytes())
    for name, message in {
        "z": "HTML",
        "z.html": r"\.html files",
        "z.xml": "not a MediaWiki",
        "z.warc": "not WARC",
    }.items():
        (tmp_path / name).write_bytes(HTML)
        with pytest.raises(UserError, match=message):
            build(BuildOptions(**arguments(tmp_path, "*", vocab_dir, unit_mb=0.01)))
        with pytest.raises(UserError, match=message):
            train(TokenizerOptions(f"{tmp_path}/*", tmp_path / "vocab", 500))
        with pytest.raises(UserError, match=message):
            clean(CleanOptions(f"{tmp_path}/*", tmp_path / "cleaned", workers=1))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", name]
        (tmp_path / name).unlink()


def test_a_command_refuses_in_one_line(tmp_path, vocab_dir):
    (tmp_path / "a.html").write_bytes(HTML)
    command = ["build-examples", f"--input={tmp_path}/a.html", f"--output={tmp_path}/out", f"--tokenizer={vocab_dir}"]
    run = subprocess.run([sys.executable, "-m", "bert_jax", *command, "--seq_len=64"], capture_output=True, text=True)
    assert run.returncode == 2
    assert re.fullmatch(r"error: \S+a\.html: \.html files are not supported .*\n", run.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_a_chosen_format_is_in_the_manifest(tmp_path, sample_text, vocab_dir):
    documents = sample_text.read_text().split("\n\n")
    (tmp_path / "records").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    manifest = build(BuildOptions(**arguments(tmp_path, "records", vocab_dir, input_format="jsonl")))
    assert manifest["reading"]["input_format"] == "jsonl"
    assert manifest["counts"]["documents"] == len(documents)
    plain = build(BuildOptions(**arguments(tmp_path, "", vocab_dir, input=sample_text, output=tmp_path / "plain")))
    assert "input_format" not in plain["reading"]
    assert plain["shards"] == manifest["shards"]


def test_remote_text_is_checked_when_it_is_read(tmp_path, monkeypatch):
    """Its first bytes cost a request, so that a job of many files does not ask for them before it begins."""
    (tmp_path / "z").write_bytes(HTML)
    monkeypatch.setattr("data_prep.readers.corpus.is_remote", lambda path: True)
    corpus = Corpus(find_sources(f"{tmp_path}/z"))
    with pytest.raises(UserError, match="z: the content is HTML"):
        list(corpus.documents())
