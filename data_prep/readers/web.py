"""Reads web archives (ISO 28500): the main text of pages in WARC, and the text in WET."""

import contextlib
import re
import zlib
from collections.abc import Iterator
from typing import Any

from bert_jax.storage.files import OnRead, ignore_progress
from bert_jax.storage.remote import first_line
from data_prep.readers import CONTROLS, Item, Items, Omission, Refusal, check
from data_prep.readers import text as plain_text
from data_prep.readers.text import checked_blocks, damaged

_HTML = ("text/html", "application/xhtml+xml")
_TEXT = "text/plain"
_NOT_A_PAGE = Omission("not_a_page")
_MENU_DEPTH = 3  # resiliparse's is_main_content_node
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


def archive_documents(path: str, on_read: OnRead = ignore_progress, blocks: Iterator[bytes] | None = None) -> Items:
    """Yields the documents in a WARC or WET file: the pages in its response, resource and conversion records.

    A page is HTML or plain text, and a response must have status 200; other such records are omitted. Other record
    types (requests, metadata, revisits) are not documents.

    Args:
        blocks: The content, if it is only a part of the file.

    Raises:
        Refusal: The file is not WARC, or is damaged.
    """
    blocks = checked_blocks(path, "warc", on_read) if blocks is None else blocks
    for number, (headers, content) in enumerate(_records(path, blocks), start=1):
        place = f"{path}, record {number}"
        content_type = headers.get("content-type", "")
        if headers.get("warc-type", "").lower() not in ("response", "resource", "conversion"):
            continue
        if content is None:
            yield plain_text.too_long(place)
        elif _kind(content_type) == "application/http":
            yield _http_page(content, place)
        else:
            yield _page(content, content_type, None, place)


# Records (ISO 28500). In many archives some Content-Length is wrong, and lines of headers end in LF alone.

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_NEXT_RECORD = re.compile(rb"(?<=\n)WARC/\d\.\d+[ \t]*\r?\n(?=WARC-|Content-)")
_LONGEST_MATCH = 64  # more bytes than both patterns match


class _Buffer:
    """The part of a file that was read but is not used yet."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self.content = bytearray()
        self._blocks = blocks

    def fill(self, size: int) -> bool:
        """Reads until there are `size` bytes; False if the file has fewer."""
        while len(self.content) < size:
            block = next(self._blocks, b"")
            if not block:
                return False
            self.content += block
        return True

    def find(self, pattern: re.Pattern[bytes], begin: int) -> tuple[int, int] | None:
        """Finds a pattern's place within the size of a document."""
        last = begin + plain_text.MAX_DOCUMENT_BYTES
        while begin < last:
            if match := pattern.search(self.content, begin):
                return match.span()
            # A match may begin in what has been read already, and end in the next block.
            begin = max(begin, len(self.content) - _LONGEST_MATCH)
            if not self.fill(len(self.content) + 1):
                break
        return None

    def skip(self, size: int) -> bool:
        while size > len(self.content):
            size -= len(self.content)
            self.content.clear()
            if not self.fill(1):
                return False
        del self.content[:size]
        return True


def _records(path: str, blocks: Iterator[bytes]) -> Iterator[tuple[dict[str, str], bytes | None]]:
    """Yields records' headers and content; the content is None if it is too long for a document."""
    buffer = _Buffer(blocks)
    truncated = damaged(path, ValueError("truncated"))
    while buffer.fill(1):
        if buffer.content[:1] in (b"\r", b"\n"):
            del buffer.content[:1]
            continue
        head = buffer.find(_HEAD_END, 0)
        if head is None or not buffer.content.startswith(b"WARC/"):
            raise truncated
        begin = head[1]
        headers = _headers(bytes(buffer.content[:begin]))
        stated = headers.get("content-length", "")
        length = int(stated) if re.fullmatch("[0-9]{1,18}", stated) else None
        # Content of this length is skipped block by block, and never in memory as a whole.
        if length is not None and length > plain_text.MAX_DOCUMENT_BYTES:
            yield headers, None
            if not buffer.skip(begin + length):
                raise truncated
            continue
        end = begin + (length or 0)
        is_whole = buffer.fill(end)
        buffer.fill(end + _LONGEST_MATCH)
        # After a correct length comes the next record, or nothing at the end of the file.
        following = bytes(buffer.content[end : end + _LONGEST_MATCH]).lstrip(b"\r\n")
        if length is None or not is_whole or not b"WARC/".startswith(following[:5]):
            # The length is wrong. The record ends where the next one begins, or at the end of a file that is complete.
            if place := buffer.find(_NEXT_RECORD, begin):
                end = place[0]
            elif is_whole and len(buffer.content) < end + plain_text.MAX_DOCUMENT_BYTES:
                end = len(buffer.content)
                if not buffer.content.endswith((b"\n\n", b"\n\r\n")):
                    raise truncated
            else:
                raise truncated
        yield headers, bytes(buffer.content[begin:end])
        del buffer.content[:end]


def _headers(head: bytes) -> dict[str, str]:
    """Returns the headers by lower-case name; the first of several with one name."""
    headers: dict[str, str] = {}
    text = re.sub(r"\r?\n[ \t]+", " ", head.decode("utf-8", "replace"))  # a line may be continued on the next one
    # In reverse, so that the first of several equal names is stored last.
    for line in reversed(re.split(r"\r?\n", text)[1:]):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers


# HTTP messages (RFC 9112). Many crawlers store bodies decoded, but with the headers of the encoded ones.

_STATUS = re.compile(rb"HTTP/\d(?:\.\d)? +(\d{3})\b")
_CHUNK = re.compile(rb"[ \t]*([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([^\s;\"',]+)", re.IGNORECASE)


def _http_page(content: bytes, place: str) -> Item:
    head_end = _HEAD_END.search(content)
    begin = head_end.end() if head_end else len(content)
    status = _STATUS.match(content)
    headers = _headers(content[:begin])
    content_type = headers.get("content-type", "")
    if status is None or status[1] != b"200" or _kind(content_type) not in (*_HTML, _TEXT):
        return _NOT_A_PAGE
    body = content[begin:]
    codings = f"{headers.get('content-encoding', '')},{headers.get('transfer-encoding', '')}".lower().split(",")
    try:
        # Codings are listed in the order in which they were applied, and transfer codings come after content codings.
        for coding in reversed(codings):
            body = _without_coding(body, coding.strip())
    except (zlib.error, OSError, ValueError) as error:
        problem = f"a page whose content cannot be decoded ({first_line(error)})"
        return Refusal("bad_page", place, problem, "Remove the record")
    charset = _CHARSET.search(content_type)
    return _page(body, content_type, charset[1] if charset else "", place)


def _without_coding(body: bytes, coding: str) -> bytes:
    """Decodes a body, but little more of it than a document may have.

    Raises:
        ValueError, OSError, zlib.error: It is neither in this coding nor text.
    """
    size = plain_text.MAX_DOCUMENT_BYTES + 1
    try:
        match coding:
            case "chunked":
                return _joined_chunks(body)
            case "gzip" | "x-gzip":
                return _inflated(body, 16 + zlib.MAX_WBITS, size)
            case "deflate":  # RFC 9110 means zlib's format, but many servers leave its header out
                with contextlib.suppress(zlib.error):
                    return _inflated(body, zlib.MAX_WBITS, size)
                return _inflated(body, -zlib.MAX_WBITS, size)
            case "br" | "zstd":
                import pyarrow as pa

                name = "brotli" if coding == "br" else coding
                return bytes(pa.CompressedInputStream(pa.BufferReader(body), name).read(size))
    except (zlib.error, OSError):
        # Text has no control characters, so a body without them was decoded by the crawler.
        if len(body.translate(None, CONTROLS)) != len(body):
            raise
    return body  # no coding that changes it, or it is decoded already


def _inflated(body: bytes, format: int, size: int) -> bytes:
    content = b""
    while True:
        decompressor = zlib.decompressobj(format)
        content += decompressor.decompress(body, size - len(content))
        if not decompressor.eof and len(content) < size:
            raise zlib.error("truncated")
        body = decompressor.unused_data
        if len(content) >= size or not body.startswith(b"\x1f\x8b"):  # gzip may have several members
            return content


def _joined_chunks(body: bytes) -> bytes:
    chunks: list[bytes] = []
    position = 0
    while position < len(body):  # a body that was cut has no last chunk
        chunk = _CHUNK.match(body, position)
        size = int(chunk[1], 16) if chunk else 0
        end = chunk.end() + size if chunk else 0
        line_end = re.compile(rb"\r?\n|\Z").match(body, end) if end <= len(body) else None
        if chunk is None or (size and line_end is None and (end <= len(body) or not chunks)):
            if not chunks:
                return body  # decoded already
            raise ValueError("a chunk without its size")
        if not size:
            break
        chunks.append(body[chunk.end() : end])
        position = line_end.end() if line_end else end
    return b"".join(chunks)


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _page(body: bytes, content_type: str, charset: str | None, place: str) -> Item:
    """Returns a page's document.

    `charset` is from the HTTP header: "" if it names none, and None if there is no header and text is UTF-8.
    """
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    kind = _kind(content_type)
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
    tree = HTMLTree.parse(html)
    _keep_lists(tree)
    main = extract_plain_text(tree, main_content=True, alt_texts=False, list_bullets=False, comments=False)
    return check(main.encode("utf-8", "replace").strip(), place)


def _keep_lists(tree: Any) -> None:
    """Lowers lists of text to where resiliparse does not take them for menus, as it does all just below <body>."""
    for unordered in tree.body.query_selector_all("body > ul, body > * > ul") if tree.body else ():
        links = sum(len(link.text) for link in unordered.query_selector_all("a"))
        # A list whose text is mostly links is a menu.
        if 2 * links < len(unordered.text):
            for _ in range(_MENU_DEPTH):
                division = tree.create_element("div")
                unordered.parent.replace_child(division, unordered)
                division.append_child(unordered)


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
