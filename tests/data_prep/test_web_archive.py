"""Web archives: which records are documents, and what damage does."""

import bz2
import gzip
import uuid
import zlib

import pyarrow as pa
import pytest

from bert_jax.errors import UserError
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.readers import Omission
from data_prep.readers import text as plain_text
from data_prep.readers.corpus import Corpus, Reading, find_sources, read

fastwarc = pytest.importorskip("fastwarc.warc")
pytest.importorskip("resiliparse")

PAGE = """<!DOCTYPE html>
<html><head><title>Title of the page</title><style>p {{color: red}}</style><script>var x = 1;</script></head><body>
<nav><ul><li><a href="/">Home</a></li><li><a href="/more">More pages</a></li></ul></nav>
<main><article><h1>A heading</h1><p>{}</p><p>Bread &amp; butter, <b>in bold</b> and in <i>italics</i>, with enough words
that this is the main part of the page, and not a menu.</p></article></main>
<footer><p>Copyright, terms and conditions</p></footer></body></html>"""
FIRST = "Ein Café in Zürich ist die erste Zeile des Artikels, und ein Satz folgt auf den anderen, wie es sich gehört."


def record(kind: str, block: bytes, content_type: str, **headers: str) -> bytes:
    """A record by the specification, WARC/1.0."""
    fields = {
        "WARC-Type": kind,
        "WARC-Record-ID": f"<urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, str(block))}>",
        "WARC-Date": "2024-01-01T00:00:00Z",
        "WARC-Target-URI": "https://example.org/",
        "Content-Type": content_type,
        "Content-Length": str(len(block)),
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = ["WARC/1.0", *(f"{name}: {value}" for name, value in fields.items() if value)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + block + b"\r\n\r\n"


def response(
    body: bytes, content_type: str = "text/html; charset=utf-8", status: str = "200 OK", more: str = ""
) -> bytes:
    head = f"HTTP/1.1 {status}\r\nServer: x\r\nContent-Type: {content_type}\r\n{more}\r\n"
    return record("response", head.encode() + body, "application/http; msgtype=response")


def page(text: str = FIRST, encoding: str = "utf-8") -> bytes:
    return PAGE.format(text).encode(encoding)


def wet(text: str | bytes) -> bytes:
    return record("conversion", text if isinstance(text, bytes) else text.encode(), "text/plain")


INFO = record("warcinfo", b"software: by hand\r\n", "application/warc-fields")
REQUEST = record("request", b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n", "application/http; msgtype=request")
METADATA = record("metadata", b"fetchTimeMs: 12\r\n", "application/warc-fields")


def items(tmp_path, content: bytes, name: str = "a.warc") -> list:
    (tmp_path / name).write_bytes(content)
    return list(read(str(tmp_path / name)))


def zstd(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


@pytest.mark.parametrize(
    "suffix, compress", [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".zst", zstd)]
)
def test_wet_gives_the_text_of_each_record(tmp_path, suffix, compress):
    """Every record is compressed on its own, as in Common Crawl's files."""
    texts = ["Title\nOne line.\nAnother line.", "¿Qué? Sí.", "三。四。"]
    path = tmp_path / f"CC-MAIN-20240220211055-00000.warc.wet{suffix}"
    path.write_bytes(b"".join(map(compress, [INFO, *(wet(text + "\n") for text in texts)])))
    corpus = Corpus(find_sources(str(path)))
    assert list(corpus.documents()) == texts
    assert corpus.bytes_read == corpus.total_bytes == path.stat().st_size and not corpus.refused


def test_archives_that_fastwarc_writes_are_read(tmp_path):
    from fastwarc.stream_io import GzipWriter

    with open(tmp_path / "a.warc.gz", "wb") as file:
        writer = GzipWriter(file)
        for kind, content in (("warcinfo", b"x: y\r\n"), ("conversion", b"One text."), ("conversion", b"Another one.")):
            written = fastwarc.WarcRecord()
            written.init_headers(getattr(fastwarc.WarcRecordType, kind))
            written.headers["Content-Type"] = "text/plain"
            written.set_bytes_content(content)
            written.write(writer)
        writer.close()
    assert list(Corpus(find_sources(f"{tmp_path}/a.warc.gz")).documents()) == ["One text.", "Another one."]


def test_warc_gives_the_main_text_of_its_pages(tmp_path):
    (text,) = items(tmp_path, INFO + REQUEST + response(page()) + METADATA)
    lines = text.decode().split("\n")
    assert lines[0] == "A heading" and FIRST in lines
    assert "Bread & butter, in bold and in italics, with enough words" in text.decode()
    for left_out in ("Home", "More pages", "var x", "color", "Copyright", "<"):
        assert left_out not in text.decode()


@pytest.mark.parametrize(
    "body, content_type, more",
    [
        (page(), "text/html", ""),
        (page(encoding="latin-1"), "text/html; charset=ISO-8859-1", ""),
        (page(encoding="latin-1"), 'TEXT/HTML;charset="iso-8859-1"', ""),
        (page(encoding="latin-1").replace(b"<head>", b'<head><meta charset="latin1">'), "text/html", ""),
        (page(encoding="latin-1"), "application/xhtml+xml", ""),
        (page(), "text/html; charset=no-such-set", ""),
        (gzip.compress(page(), mtime=0), "text/html", "Content-Encoding: gzip\r\n"),
        (b"%x\r\n%s\r\n0\r\n\r\n" % (len(page()), page()), "text/html", "Transfer-Encoding: chunked\r\n"),
        (FIRST.encode("latin-1"), "text/plain; charset=latin-1", ""),
        (FIRST.encode(), "text/plain", ""),
    ],
)
def test_pages_of_any_encoding_give_the_same_text(tmp_path, body, content_type, more):
    (text,) = items(tmp_path, response(body, content_type, more=more))
    assert FIRST in text.decode()


def test_records_that_are_no_pages_are_omitted_and_counted(tmp_path):
    content = [
        response(page(), status="404 Not Found"),
        response(b"\x89PNG", "image/png"),
        response(b"{}", "application/json"),
        record("resource", b"\xff\xd8", "image/jpeg"),
        record("revisit", b"", "application/http; msgtype=response"),
        response(b"<html><body></body></html>"),
        record("resource", page(), "text/html"),
    ]
    *others, empty, text = items(tmp_path, b"".join([INFO, *content]))
    assert others == [Omission("not_a_page")] * 4 and empty == b"" and FIRST in text.decode()
    for on_error in ("fail", "skip"):
        corpus = Corpus(find_sources(f"{tmp_path}/a.warc"), Reading(on_error=on_error))
        assert len(list(corpus.documents())) == 1 and corpus.refused == {"not_a_page": 4, "empty_text": 1}


BAD = {
    "control_character": (wet("a\x07b"), r"a\.warc, record 3, byte 2|record 3: a control character"),
    "invalid_utf8": (wet(b"caf\xe9"), "record 3: not UTF-8"),
    "bad_page": (
        response(b"\x1f\x8bno gzip", more="Content-Encoding: gzip\r\n"),
        "record 3: a page whose content cannot be decoded",
    ),
    "document_too_long": (wet("x" * 3000), "record 3: a document of more than"),
    "document_too_long after decompression": (
        response(gzip.compress(b"x" * 3000), more="Content-Encoding: gzip\r\n"),
        "record 3: a document of more than",
    ),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_record_is_refused_and_the_rest_is_read(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(plain_text, "MAX_DOCUMENT_BYTES", 2000)
    content, message = BAD[reason]
    (tmp_path / "a.warc").write_bytes(INFO + wet("one") + content + wet("two") + response(page()))
    with pytest.raises(UserError, match=message):
        list(Corpus(find_sources(f"{tmp_path}/a.warc")).documents())
    one, refusal, two, text = items(tmp_path, (tmp_path / "a.warc").read_bytes())
    assert (one, two) == (b"one", b"two") and FIRST in text.decode()
    assert refusal.reason == reason.split()[0] and "\n" not in str(refusal)


@pytest.mark.parametrize("suffix, compress", [("", bytes), (".gz", gzip.compress)])
def test_an_archive_that_is_cut_anywhere_is_damaged(tmp_path, suffix, compress):
    """Except between two records of a plain file, where nothing tells that more should follow."""
    parts = [compress(part) for part in (INFO, wet("one"), REQUEST, wet("two"), response(page()))]
    whole = b"".join(parts)
    ends = {len(b"".join(parts[: number + 1])) - rest for number in range(5) for rest in range(5)}
    complete = items(tmp_path, whole, f"a.warc{suffix}")
    assert complete[:2] == [b"one", b"two"]
    for size in range(1, len(whole), 19):
        *texts, last = [None, *items(tmp_path, whole[:size], f"a.warc{suffix}")]
        if size in ends:
            continue
        assert getattr(last, "reason", "") in ("damaged_file", "other_format"), size
        assert (last.reason == "other_format") == (not suffix and size < 6)
        assert texts[1:] == complete[: len(texts) - 1]


LENGTHS = {"too small": -9, "too large": 40, "over several records": 2500, "none": None, "zero": 0}


@pytest.mark.parametrize("suffix, compress", [("", bytes), (".gz", gzip.compress)])
@pytest.mark.parametrize("wrong", LENGTHS)
def test_a_wrong_length_loses_nothing(tmp_path, wrong, suffix, compress):
    """The record ends where the next one begins; warcio and fastwarc lose the rest of the archive, or of the page."""
    change = LENGTHS[wrong]
    length = {"none": "", "zero": "0"}.get(wrong, str(len(page()) + (change or 0)))
    bad = record("resource", page(), "text/html", Content_Length=length)
    parts = [INFO, wet("one"), bad, wet("two"), REQUEST, response(page()), wet("three" * 500), wet("four")]
    one, text, two, same, three, four = items(tmp_path, b"".join(map(compress, parts)), f"a.warc{suffix}")
    assert (one, two, three, four) == (b"one", b"two", b"three" * 500, b"four") and text == same
    *_, last = items(tmp_path, b"".join(map(compress, [wet("one"), bad])), f"a.warc{suffix}")
    assert last == text if change in (-9, None, 0) else last.reason == "damaged_file"


def test_a_record_that_shows_another_one_is_whole(tmp_path):
    shown = "A record:\r\n\r\nWARC/1.0\r\nWARC-Type: response\r\n\r\nso."
    assert items(tmp_path, wet(shown) + wet("two")) == [shown.encode(), b"two"]


def test_lines_of_headers_may_end_in_lf(tmp_path):
    both = [wet("one"), response(page()), wet("two")]
    [_, text, _] = items(tmp_path, b"".join(both))
    http = (
        response(page()).replace(b"200 OK\r\nServer: x\r\n", b"200 OK\nServer: x\n").replace(b"8\r\n\r\n<", b"8\n\n<")
    )
    assert items(tmp_path, both[0] + http + both[2]) == [b"one", text, b"two"]
    lines = b"".join(both).replace(b"\r\n", b"\n")
    assert items(tmp_path, lines) == [b"one", text, b"two"]


def chunked(body: bytes, size: int = 100, extension: bytes = b"", end: bytes = b"0\r\n\r\n") -> bytes:
    pieces = [body[begin : begin + size] for begin in range(0, len(body), size)]
    return b"".join(b"%X%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces) + end


def deflated(body: bytes, format: int) -> bytes:
    compressor = zlib.compressobj(wbits=format)
    return compressor.compress(body) + compressor.flush()


BODIES = {
    "chunks with extensions": (chunked(page(), 99, b';name="a b"'), "Transfer-Encoding: chunked"),
    "chunks with spaces and trailers": (
        chunked(page(), 99, b"  ", b"0\r\nExpires: x\r\n\r\n"),
        "Transfer-Encoding: chunked",
    ),
    "chunks without the last one": (chunked(page(), 99, end=b""), "Transfer-Encoding: Chunked"),
    "chunks of gzip": (chunked(gzip.compress(page())), "Transfer-Encoding: chunked\r\nContent-Encoding: x-gzip"),
    "gzip as a transfer coding": (chunked(gzip.compress(page())), "Transfer-Encoding: gzip, chunked"),
    "gzip of several members": (gzip.compress(page()[:500]) + gzip.compress(page()[500:]), "Content-Encoding: gzip"),
    "deflate with zlib's header": (deflated(page(), 15), "Content-Encoding: deflate"),
    "deflate without header": (deflated(page(), -15), "Content-Encoding: deflate"),
    "brotli": (pa.Codec("brotli").compress(page(), asbytes=True), "Content-Encoding: br"),
    "zstd": (zstd(page()), "Content-Encoding: zstd"),
    "two codings": (deflated(gzip.compress(page()), 15), "Content-Encoding: gzip, deflate"),
    "a coding without effect": (page(), "Content-Encoding: identity, none, UTF-8"),
    **{f"decoded {coding}": (page(), f"Content-Encoding: {coding}") for coding in ("gzip", "deflate", "br", "zstd")},
    "decoded chunks": (page(), "Transfer-Encoding: chunked"),
    "decoded chunks of gzip": (gzip.compress(page()), "Transfer-Encoding: chunked\r\nContent-Encoding: gzip"),
    "folded header": (gzip.compress(page()), "Content-Encoding:\r\n  gzip"),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_any_coding_give_the_same_text(tmp_path, name):
    body, headers = BODIES[name]
    plain, text = items(tmp_path, response(page()) + response(body, more=f"{headers}\r\n"))
    assert text == plain


@pytest.mark.parametrize("body", [gzip.compress(page())[:-30], b"\x1f\x8b\x01", b"\0\1\2\3"])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bodies_that_cannot_be_decoded_are_refused(tmp_path, coding, body):
    refusal, two = items(tmp_path, response(body, more=f"Content-Encoding: {coding}\r\n") + wet("two"))
    assert refusal.reason == "bad_page" and two == b"two"


ITEMS = "".join(f"<li>Step {number} takes the bread from the oven to the board.</li>" for number in range(3))
MENU = "".join(f"<li><a href='/{number}'>Other page {number}</a></li>" for number in range(3))


@pytest.mark.parametrize(
    "before, after", [("", ""), ("<main>", "</main>"), ("<div><p>Bread.</p>", "</div>"), ("<h1>Bread</h1>", "")]
)
def test_lists_of_text_are_content_and_lists_of_links_are_menus(tmp_path, before, after):
    html = f"<html><body><ul>{MENU}</ul>{before}<ul>{ITEMS}</ul>{after}</body></html>"
    (text,) = items(tmp_path, response(html.encode()))
    assert [b"Step %d takes" % number in text for number in range(3)] == [True] * 3 and b"Other page" not in text


def test_pages_that_would_take_minutes_are_refused(tmp_path):
    bad = (b"<div>" * 100_000, b"<div>" * 3_000 + b"</div>" * 3_000, b"<font color=1>x" * 20_000)
    usual = b"<table>" + b"<tr><td><b>a</b><img src=x><p>b" * 3_000 + b"</table>"
    content = b"".join(response(b"<html><body>" + body) for body in (*bad, usual))
    *refusals, text = items(tmp_path, content + wet("one"))[:-1]
    assert [str(refusal).split(": ")[1] for refusal in refusals] == [
        "HTML that is nested deeper than 1000. Remove the record, or use --on_error skip"
    ] * 3
    assert isinstance(text, bytes)


def test_examples_are_built_from_web_text(tmp_path, sample_text, vocab_dir):
    documents = sample_text.read_text().split("\n\n")
    records = [INFO, *(part for text in documents for part in (REQUEST, wet(text)))]
    (tmp_path / "a.warc.wet.gz").write_bytes(b"".join(map(gzip.compress, records)))
    found = []
    for source in (sample_text, tmp_path / "a.warc.wet.gz"):
        output = tmp_path / f"out{len(found)}"
        manifest = build(BuildOptions(source, vocab_dir, output, 64, workers=1))
        found.append(manifest["shards"])
    assert found[0] == found[1]


def test_nothing_of_the_reader_keeps_the_whole_archive(tmp_path, monkeypatch):
    """The file is asked for in blocks, each when the records before it have been read."""
    (tmp_path / "a.warc").write_bytes(b"".join(wet(f"{number} " * 2000) for number in range(300)))
    asked: list[int] = []
    first = next(read(str(tmp_path / "a.warc"), on_read=asked.append))
    assert first.startswith(b"0 0") and sum(asked) < 400_000 < (tmp_path / "a.warc").stat().st_size
