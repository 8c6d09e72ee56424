"""Reads plain text. In order: any file's decompressed bytes, recognition of formats, and documents in text files."""

import contextlib
import csv
import errno
import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import PurePath

from bert_jax.command_line import explain_os_error
from bert_jax.errors import RunAgain, UserError, install_hint
from bert_jax.storage.files import DamagedFile, OnRead, ignore_progress, read_blocks, suffixes
from bert_jax.storage.remote import failure, first_line, is_remote
from data_prep.readers import COMPRESSED, CONTROLS, Items, Refusal, check, looks_like_utf16


def file_blocks(path: str, on_read: OnRead = ignore_progress) -> Iterator[bytes]:
    """Reads a file's decompressed bytes, block by block; `on_read` gets the blocks' stored sizes.

    Raises:
        Refusal: The file does not exist, cannot be read or is damaged. Everything before the damage is yielded first.
        RunAgain: A store does not answer.
    """
    with refusals(path):
        yield from read_blocks(path, on_read)


@contextlib.contextmanager
def refusals(path: str) -> Iterator[None]:
    """Turns a file's errors into Refusal, or into RunAgain if a store does not answer: the file may be fine."""
    try:
        yield
    except FileNotFoundError:
        raise Refusal("unreadable_file", path, "no such file", "Check --input") from None
    except IsADirectoryError:
        raise folder(path) from None
    except DamagedFile as error:
        raise damaged(path, error) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # a disk for temporary files is full, and this file may be fine
        if isinstance(stopping := failure(path, error), RunAgain):
            raise stopping from None
        problem = (None if is_remote(path) else explain_os_error(error)) or first_line(error)
        raise Refusal("unreadable_file", path, f"cannot be read ({problem.rstrip('.')})", "Correct that") from None


def folder(path: str) -> Refusal:
    return Refusal("folder", path, "expected a file, got a folder", f"Name its files, for example '{path}/*.txt'")


def damaged(path: str, error: Exception) -> Refusal:
    problem = first_line(error)
    problem = f"damaged file ({problem[:1].lower()}{problem[1:]})"
    return Refusal("damaged_file", path, problem, "Download or create it again")


# HTML and XML without a declaration: all text is inside elements, and they are closed.
#
# Tags alone prove nothing. Markdown and wikitext have HTML elements, chats begin with <nick>, and text for language
# models has <s> and <unk>. But these have text outside the elements, or tags that nothing closes.
# A page may begin with elements that identify it as one, whatever follows.
_PAGE = re.compile(
    rb"<title>[^<]*</title>\s*<|<(script|style)\b[^<>]*>.*?</\1>|<(?:meta|link|base)\s[^<>]*=[^<>]*>", re.DOTALL
)
# HTML by the name of the first element alone; elements of other names are XML only if they have elements inside.
_HTML = frozenset(
    b"address article aside blockquote center dd div dl dt fieldset figure footer form frameset h1 h2 h3 h4 h5 h6 "
    b"header li main nav noscript ol p pre section span table tbody td th thead tr ul".split()
)
_VOID = frozenset(b"area base br col embed frame hr img input link meta param source track wbr".split())
_START = re.compile(rb"<(?:[a-z_]|!--)")
_NO_ELEMENT = re.compile(rb"<!--.*?-->|<!\[cdata\[.*?\]\]>|<[?!][^<>]*>", re.DOTALL)
_TAG = re.compile(rb"<(/?)([a-z_][\w.:-]*)(?:\s[^<>]*?)?(/?)>")


def _recognize_markup(text: bytes, cut: bool) -> str:
    """Returns HTML, XML, or "" for other text. The text is in lower case; if `cut`, it may end anywhere."""
    if not _START.match(text):
        return ""
    text = _NO_ELEMENT.sub(b"", text).strip()
    if cut:
        # The last tag may be incomplete.
        text = text[: max(text.rfind(b"<"), 0)]
    first = _TAG.match(text)
    if first is None:
        return ""
    if _PAGE.match(text):
        return "HTML"
    is_html = first[2] in _HTML
    is_markup, is_nested = _structure(text, cut)
    return ("HTML" if is_html else "XML") if is_markup and (is_html or is_nested) else ""


def _structure(text: bytes, cut: bool) -> tuple[bool, bool]:
    """Returns whether all text is inside closed elements, and whether an element contains another one."""
    open_names: list[bytes] = []
    start = end = 0  # where the outermost element begins, and where the newest tag ends
    is_nested = has_text = False  # has_text: the outermost element has text of its own
    for tag in _TAG.finditer(text):
        is_text = bool(text[end : tag.start()].strip())
        if is_text and not open_names:
            return False, is_nested
        has_text |= is_text and len(open_names) == 1
        end = tag.end()
        closes, name, is_empty = tag.groups()
        if closes and name in open_names:
            # It also closes inner elements that lack their end.
            depth = len(open_names) - 1 - open_names[::-1].index(name)
            is_nested |= depth > 0
            del open_names[depth:]
        elif not closes and is_empty:
            is_nested |= bool(open_names)
        elif not closes and name not in _VOID:
            if not open_names:
                start, has_text = tag.start(), False
            open_names.append(name)
    if not open_names:
        return not text[end:].strip(), is_nested
    # In a cut text, the last element may lack its end if it has no text of its own, like a large file's root, or if
    # the elements before it have most of the text.
    return cut and (not has_text or start > len(text) / 2), is_nested


# A file's format follows from --input_format or its name. Suffixes of unsupported formats are refused. Files with any
# other name (`wiki_00`, `corpus.en`, `part-00000`) are text, unless their first bytes are recognized as another format.
# It is better to miss a rare form of another format than to refuse text.

FORMATS = ("text", "jsonl", "csv", "tsv", "parquet", "arrow", "warc", "mediawiki")
CHOICES = ("auto", *FORMATS)
SUPPORTED = (
    "plain text, .jsonl, .csv, .tsv, .parquet, .arrow, saved Hugging Face datasets, .warc, .wet, .xml of MediaWiki, "
    "each also .bz2 .gz .xz .zst"
)
HEAD_BYTES = 1 << 16  # enough to recognize a format
# Formats checked by their first bytes: these would be read wrongly, or fail late. Parsers check the others.
CHECKED = {
    "text": "plain text",
    "warc": "WARC, whose first line is WARC/1.0 or 1.1",
    "mediawiki": "a MediaWiki XML dump",
}

_BY_SUFFIX = {f".{format}": format for format in ("jsonl", "csv", "tsv", "parquet", "arrow", "warc")} | {
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".wet": "warc",
    ".xml": "mediawiki",
}
_DUMP_PART = re.compile(r"\.xml-p\d+p\d+")  # enwiki-20240101-pages-articles1.xml-p1p41242.bz2
# Without suffixes that are also languages, as in corpus.pt and corpus.so: for them the content decides.
_OTHER_SUFFIXES = re.compile(
    r"\.(?:"
    r"[dmsx]?html?|atom|rss|svg|xsd|xslt?|pdf|djvu|epub|mobi|doc[mx]?|od[pst]|pptx?|rtf|xls[mx]?|"
    r"7z|iso|jar|lz|lz4|lzma|lzo|rar|snappy|tar|tbz2|tgz|txz|whl|z|zip|"
    r"bmp|gif|heic|ico|jpe?g|png|psd|tiff?|webp|aac|avi|flac|m4a|mkv|mov|mp3|mp4|mpe?g|og[gv]|opus|wav|webm|wm[av]|"
    r"array_record|avro|bin|ckpt|duckdb|feather|h5|hdf5|msgpack|np[yz]|onnx|pickle|pkl|pth|rds|"
    r"safetensors|sqlite3?|tfrecord|wat|class|dll|dylib|exe|pyc|wasm)"
)

_MAGIC = [
    # The content, the format that reads it, and the first bytes.
    ("WARC", "warc", re.compile(rb"WARC/\d")),
    ("ARC, the format before WARC", "", re.compile(rb"filedesc://\S+ \d")),
    ("Parquet", "parquet", re.compile(rb"PAR1")),
    ("Arrow", "arrow", re.compile(rb"ARROW1\0\0|\xff\xff\xff\xff...\0", re.DOTALL)),
    ("PDF", "", re.compile(rb"%PDF-")),
    ("PostScript", "", re.compile(rb"%!PS")),
    ("RTF", "", re.compile(rb"\{\\rtf\d")),
    ("a zip archive, or an office document", "", re.compile(rb"PK(?:\x03\x04|\x05\x06)")),
    ("an office document", "", re.compile(rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")),
    ("an archive", "", re.compile(rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|.{257}ustar", re.DOTALL)),
    ("an image", "", re.compile(rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|II\*\0|MM\0\*", re.DOTALL)),
    ("sound or video", "", re.compile(rb"RIFF....(?:WAVE|AVI )|OggS\0|fLaC\0|ID3[\2-\4]\0|....ftyp", re.DOTALL)),
    ("a program", "", re.compile(rb"\x7fELF|[\xce\xcf]\xfa\xed\xfe|MZ[^\n]\0")),
    ("a database", "", re.compile(rb"SQLite format 3\0")),
    ("a NumPy array", "", re.compile(rb"\x93NUMPY")),
]
_MARKUP = [
    ("a MediaWiki XML dump", "mediawiki", re.compile(rb"(?:<\?xml[^>]*>\s*)?<mediawiki[\s>]")),
    ("HTML", "", re.compile(rb"(?><\?xml[^>]*>|<!--.*?-->|\s)*+<(?:!doctype\s+html|html|head|body)\b", re.DOTALL)),
    ("XML", "", re.compile(rb"<\?xml\s|<!doctype\s|<(?:rss|feed|svg|tei|corpus)(?:\s[^<>]*)?>")),
    ("wikiextractor's <doc> markup (its option --json leaves it out)", "", re.compile(rb"<doc\s[^<>]*\bid=[^<>]*>")),
    ("JSON", "jsonl", re.compile(rb'\[?\s*\{\s*"(?:[^"\\\n]|\\.)*"\s*:\s*["\d\[{tfn-]')),
    ("JSON", "", re.compile(rb'\[\s*"(?:[^"\\\n]|\\.)*"\s*(?:,\s*"|\]\s*\Z)')),
]
_BINARY_BYTES, _BINARY_SHARE = 512, 0.05  # 11% of random bytes are control characters, and almost none in text
_COLUMN_NAME = re.compile(r'"?[^\W\d](?:[\w ./%&#-]|\([^()",;\t]*\)){0,63}"?')
_MOST_RAGGED = 0.1  # of a table's rows, or one of three or more
_TABLES = [(",", "CSV", "csv"), ("\t", "TSV", "tsv"), (";", "CSV with semicolons", "")]

# The packages that a format needs, and the extra of bert_jax that has them.
_EXTRAS = {"warc": (("resiliparse",), "warc"), "mediawiki": (("mwparserfromhell",), "wiki")}


def format_by_name(path: str, chosen: str = "auto") -> str:
    """Returns a file's format, one of FORMATS: the chosen one or, if that is "auto", the one its name implies.

    Raises:
        Refusal: The name implies an unsupported format.
    """
    if chosen != "auto":
        return chosen
    suffix = suffixes(path)[0].lower()
    if _DUMP_PART.fullmatch(suffix):
        return "mediawiki"
    for name in (PurePath(path).suffix.lower(), suffix):
        if _OTHER_SUFFIXES.fullmatch(name):
            raise _other_format(path, f"{name} files are not supported")
    return _BY_SUFFIX.get(suffix, "text")


def check_installed(format: str) -> None:
    """Checks that a format's packages are installed.

    Raises:
        UserError: Some are missing.
    """
    packages, extra = _EXTRAS.get(format, ((), ""))
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"input in the format {format} needs {' and '.join(missing)}. Run {install_hint(extra)}")


def checked_blocks(
    path: str, format: str, on_read: OnRead = ignore_progress, blocks: Iterator[bytes] | None = None
) -> Iterator[bytes]:
    """Reads a file as `file_blocks` does, or passes on the blocks of its beginning, after a check of its first bytes.

    Args:
        format: One of CHECKED.

    Raises:
        Refusal: The first bytes do not fit the format.
    """
    blocks = file_blocks(path, on_read) if blocks is None else blocks
    head: list[bytes] = []
    error: Refusal | None = None  # for damage in the first blocks, left to the returned iterator
    try:
        while sum(map(len, head)) < HEAD_BYTES and (block := next(blocks, b"")):
            head.append(block)
    except Refusal as refusal:
        error = refusal
    content, actual = _recognize(b"".join(head)) if head else ("", format)
    if format != "text" and actual != format:
        raise _other_format(path, f"the content is not {CHECKED[format]}")
    if format == "text" and content:
        advice = {"advice": f"Give --input_format {actual}"} if actual else {}
        raise _other_format(path, f"the content is {content}, not plain text", **advice)

    def whole() -> Iterator[bytes]:
        yield from head
        if error is not None:
            raise error
        yield from blocks

    return whole()


def _other_format(
    path: str, problem: str, advice: str = "Convert it, or choose a format with --input_format"
) -> Refusal:
    return Refusal("other_format", path, f"{problem} (supported: {SUPPORTED})", advice)


def _recognize(head: bytes) -> tuple[str, str]:
    """Recognizes the kind of content and the format that reads it, if any; both are empty for text."""
    head = head[:HEAD_BYTES]
    text, cut = head.removeprefix(BYTE_ORDER_MARK).lstrip(), len(head) == HEAD_BYTES
    lowered = text.lower()
    # The first bytes of binary formats come before any white space; markup may follow some.
    for table, start in ((_MAGIC, head), (_MARKUP, lowered)):
        for content, format, pattern in table:
            if pattern.match(start):
                return content, format
    if content := _recognize_markup(lowered, cut):
        return content, ""
    for delimiter, content, format in _TABLES:
        if _is_table(text, delimiter, cut):
            return content, format
    controls = len(head) - len(head.translate(None, CONTROLS))
    is_text = controls < _BINARY_SHARE * len(head) or len(head) < _BINARY_BYTES
    is_text |= looks_like_utf16(head) or head.startswith(tuple(COMPRESSED))  # `check` gives better advice on these
    return ("", "") if is_text else ("binary data", "")


def _is_table(head: bytes, delimiter: str, cut: bool) -> bool:
    """Whether text, which may be cut, is a header with column names and then rows with as many fields."""
    lines = [f"{line}\n" for line in re.split("\r\n?|\n", head.decode("utf-8", "replace"))]
    names = lines[0].strip().split(delimiter)
    # A line of prose also has commas, but seldom only distinct short parts that begin with a letter.
    if len(names) < 2 or len(set(names)) < len(names) or not all(map(_COLUMN_NAME.fullmatch, names)):
        return False
    quotes = None if delimiter == "\t" else '"'
    row_lines: list[str] = []  # of the current row

    def following() -> Iterator[str]:
        for line in lines[1:]:
            row_lines.append(line)
            yield line

    are_ragged = []
    for row in csv.reader(following(), delimiter=delimiter, quotechar=quotes):
        written = "".join(row_lines)
        row_lines.clear()
        # Outside quotes, a comma before a space is punctuation.
        is_prose = delimiter != "\t" and f"{delimiter} " in written and '"' not in written
        if row:
            are_ragged.append(len(row) != len(names) or is_prose)
    if cut:  # the last row may be incomplete
        are_ragged = are_ragged[:-1]
    most = max(1, _MOST_RAGGED * len(are_ragged)) if len(are_ragged) > 2 else 0
    return bool(are_ragged) and sum(are_ragged) <= most


# Documents in text files, separated by blank lines or by another line, or one per file.

# A document is held in memory, so one that never ends (a file without blank lines) is refused.
MAX_DOCUMENT_BYTES = 1 << 26
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# The characters of str.isspace(), in UTF-8.
_SPACE = rb"[\t-\r\x1c-\x1f ]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
_BLANK = re.compile(rb"(?:" + _SPACE + rb")*+")


_RETURNS = re.compile(rb"\r+\n?")


def _line_feeds(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Writes all line ends as LF: CR (old Macs), CRLF, and CRCRLF (text that was converted twice)."""

    def feeds(match: re.Match[bytes]) -> bytes:
        return b"\n" * (len(match[0]) - match[0].endswith(b"\n"))

    begun = b""  # returns at the end of a block, which belong to what follows
    for block in blocks:
        block = begun + block
        begun = block[len(block.rstrip(b"\r")) :]
        if b"\r" in block:
            block = block[: len(block) - len(begun)].replace(b"\r\n", b"\n")
        yield _RETURNS.sub(feeds, block) if b"\r" in block else block
    yield _RETURNS.sub(feeds, begun)


def lines(blocks: Iterator[bytes]) -> Iterator[bytes | None]:
    """Splits a file's blocks into lines, without line ends (LF, CRLF or CR) and byte-order mark.

    Unicode's other line ends, such as U+2028, are white space in a line, as for Python's files.

    None replaces a line with more than MAX_DOCUMENT_BYTES.
    """
    begun: list[bytes] = []  # pieces of a line whose end has not been read yet
    size, mark = 0, BYTE_ORDER_MARK  # `mark` becomes empty after the first line
    for block in _line_feeds(blocks):
        first, *others = block.split(b"\n")
        if others:
            line = b"".join((*begun, first)).removeprefix(mark)
            yield None if size > MAX_DOCUMENT_BYTES else line
            begun, size, mark = [], 0, b""
            first = others.pop()
            yield from others
        size += len(first)
        begun.append(first)
        if size > MAX_DOCUMENT_BYTES:
            begun = []  # frees the pieces; `size` still says that the line is too long
    if size > MAX_DOCUMENT_BYTES:
        yield None
    elif rest := b"".join(begun).removeprefix(mark):
        yield rest


def text_documents(
    path: str,
    on_read: OnRead = ignore_progress,
    *,
    whole_file: bool = False,
    separator: str = "",
    any_content: bool = False,
    blocks: Iterator[bytes] | None = None,
) -> Items:
    """Yields a text file's documents, one at a time, without the lines between them.

    Lines lose their line end (LF, CRLF or CR) and nothing else; lines of white space count as blank. Memory holds one
    document.

    Args:
        whole_file: Makes the file one document.
        separator: The line that separates documents, with any white space around it; "" for blank lines.
        any_content: Reads a file even if its first bytes belong to another format.
        blocks: The content, if it is only a part of the file.

    Raises:
        Refusal: The file is truncated (its unfinished document is not yielded), or in another format.
    """
    if blocks is None:
        blocks = file_blocks(path, on_read) if any_content else checked_blocks(path, "text", on_read)
    between = separator.strip().encode()

    def separates(numbered: tuple[int, bytes | None]) -> bool:
        line = numbered[1]
        if line is None or whole_file:
            return False
        return line.strip() == between if between else _BLANK.fullmatch(line) is not None

    for is_between, numbered in itertools.groupby(enumerate(lines(blocks), start=1), separates):
        if not is_between:
            yield from _document(path, numbered)


def _document(path: str, numbered: Iterator[tuple[int, bytes | None]]) -> Items:
    """Yields the document in some lines, unless it is blank."""
    text, first, is_long = bytearray(), 0, False
    for number, line in numbered:
        first = first or number
        if is_long or line is None or len(text) + len(line) > MAX_DOCUMENT_BYTES:
            is_long = True
            text.clear()  # the remaining lines are read, but not kept
        else:
            text += line + b"\n"
    document = bytes(text).strip(b"\n")
    if is_long:
        yield too_long(f"{path}, line {first}", in_lines=True)
    elif not _BLANK.fullmatch(document):
        # Blank lines before the document are not part of it.
        yield check(document, path, first + len(text) - len(text.lstrip(b"\n")))


def too_long(place: str, in_lines: bool = False) -> Refusal:
    """Refuses a long document; in_lines: lines separate the file's documents."""
    advice = "Divide it into several"
    if in_lines:
        advice = "Separate the documents of the file by blank lines, or name the line that does (--document_separator)"
    return Refusal("document_too_long", place, f"a document of more than {MAX_DOCUMENT_BYTES >> 20} MiB", advice)
