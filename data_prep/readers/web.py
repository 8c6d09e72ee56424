"""Reads web archives (ISO 28500): the main text of pages in WARC, and the text in WET."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from bert_jax.errors import RunAgain
from bert_jax.storage.files import OnRead, ignore_progress
from bert_jax.storage.remote import first_line
from data_prep.readers import Item, Items, Omission, Refusal, check
from data_prep.readers import text as plain_text
from data_prep.readers.text import checked_blocks, damaged

_HTML = ("text/html", "application/xhtml+xml")
_TEXT = "text/plain"
_NOT_A_PAGE = Omission("not_a_page")
_READ_BYTES = 1 << 20
# The time to extract text grows with the square of the depth (4 s at 8,000), and some pages never close their elements.
# Browsers go to a depth of 512. Pages with few tags are not checked, because they cannot take long.
_DEEPEST = 1000
_FEW_TAGS = 4000
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)")
_NO_END_TAG = frozenset(
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr")
    + ("dd", "dt", "li", "option", "p", "td", "th", "tr")
    + ("circle", "ellipse", "line", "path", "polygon", "polyline", "rect", "stop", "use")
)


def archive_documents(path: str, on_read: OnRead = ignore_progress) -> Items:
    """Yields the documents in a WARC or WET file: the pages in its response, resource and conversion records.

    A page is HTML or plain text, and a response must have status 200; other such records are omitted. Other record
    types (requests, metadata, revisits) are not documents.

    Raises:
        Refusal: The file is not WARC, or is damaged.
    """
    from fastwarc.warc import ArchiveIterator

    stream = _Stream(checked_blocks(path, "warc", on_read))
    try:
        for number, record in enumerate(ArchiveIterator(stream, parse_http=False, stream_detect=False), start=1):
            item = _item(record, path, f"{path}, record {number}")
            if stream.error is None and item is not None:
                yield item
    except (OSError, Refusal) as error:
        if stream.error is not None:
            raise stream.error from None
        if isinstance(error, Refusal) or error.errno is not None:
            raise
        raise damaged(path, error) from None
    if stream.error is not None:
        raise stream.error


class _Stream:
    """Blocks as an open file. Their error ends the file and is kept, because fastwarc may hide it."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self.error: Refusal | RunAgain | None = None
        self._blocks = blocks
        self._rest = b""
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        try:
            self._rest = self._rest or next(self._blocks, b"")
        except (Refusal, RunAgain) as error:
            self.error = error
        piece = self._rest[:size] if size >= 0 else self._rest
        self._rest = self._rest[len(piece) :]
        self._position += len(piece)
        return piece

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        raise OSError("a stream of blocks has no other position")

    def close(self) -> None:
        pass


def _item(record: Any, path: str, place: str) -> Item | None:
    """Returns a record's document; None if its type has none. Raises Refusal if the file ends in the record."""
    from fastwarc.warc import WarcRecord, WarcRecordType

    length = record.content_length
    is_page = record.record_type in (WarcRecordType.response, WarcRecordType.resource, WarcRecordType.conversion)
    is_read = is_page and length <= plain_text.MAX_DOCUMENT_BYTES
    content = _read(record) if is_read else b""
    actual_length = len(content) if is_read else record.consume()
    if actual_length != length or not (record.headers.get("Content-Length") or "").isdigit():
        raise damaged(path, ValueError("truncated"))
    if not is_page:
        return None
    if not is_read:
        return plain_text.too_long(place)
    if not record.is_http:
        return _page(content, record.headers.get("Content-Type") or "", None, place)
    # The HTTP message gets a record of its own, because fastwarc cannot read the rest of an archive after a record
    # that it failed to decode.
    message = WarcRecord()
    message.init_headers(WarcRecordType.response)
    message.set_bytes_content(content)
    message.is_http = True
    try:
        message.parse_http(auto_decode="all")
        if message.http_headers.status_code != 200:
            return _NOT_A_PAGE
        body = _read(message)
    except OSError as error:
        problem = f"a page whose content cannot be decoded ({first_line(error)})"
        return Refusal("bad_page", place, problem, "Remove the record")
    return _page(body, message.http_content_type or "", message.http_charset or "", place)


def _read(record: Any) -> bytes:
    """Reads a record's content, but little more than a document may have."""
    content = bytearray()
    while len(content) <= plain_text.MAX_DOCUMENT_BYTES and (piece := record.reader.read(_READ_BYTES)):
        content += piece
    return bytes(content)


def _page(body: bytes, content_type: str, charset: str | None, place: str) -> Item:
    """Returns a page's document.

    `charset` is from the HTTP header: "" if it names none, and None if there is no header and text is UTF-8.
    """
    from resiliparse.extract.html2text import extract_plain_text

    kind = content_type.partition(";")[0].strip().lower()
    if kind not in (*_HTML, _TEXT):
        return _NOT_A_PAGE
    if len(body) > plain_text.MAX_DOCUMENT_BYTES:  # compression may hide any amount
        return plain_text.too_long(place)
    if kind == _TEXT:
        text = body if charset is None else _decoded(body, charset, is_html=False).encode("utf-8", "replace")
        return check(text.strip(), place)
    html = _decoded(body, charset or "", is_html=True)
    if _is_too_deep(html):
        return Refusal("bad_page", place, f"HTML that is nested deeper than {_DEEPEST}", "Remove the record")
    # The main content is the page without menus, forms, readers' comments and the like.
    main = extract_plain_text(html, main_content=True, alt_texts=False, list_bullets=False, comments=False)
    return check(main.encode("utf-8", "replace").strip(), place)


def _decoded(body: bytes, charset: str, is_html: bool) -> str:
    """Decodes a page in the HTTP header's character set, or else in the one that it names or looks like."""
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding

    if charset:
        with contextlib.suppress(LookupError):  # the header names no character set that exists
            return bytes_to_str(body, charset)
    return bytes_to_str(body, detect_encoding(body, from_html_meta=is_html) or "utf-8")


def _is_too_deep(html: str) -> bool:
    if html.count("<") < _FEW_TAGS:
        return False
    depth = 0
    for match in _TAG.finditer(html):
        if match[2].lower() not in _NO_END_TAG:
            depth = max(depth - 1, 0) if match[1] else depth + 1
            if depth > _DEEPEST:
                return True
    return False
