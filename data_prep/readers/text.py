"""Plain text, in the order of reading: the decompressed bytes of any file, with everything that is wrong with it as a
Refusal; the format of a file, by its name and first bytes; and the documents of text files.
"""

import contextlib
import csv
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import PurePath

from bert_jax.command_line import explain_os_error
from bert_jax.errors import RunAgain, UserError, install_hint
from bert_jax.storage.files import DamagedFile, OnRead, ignore_progress, read_blocks, suffixes
from bert_jax.storage.remote import failure, first_line, is_remote
from data_prep.readers import COMPRESSED, Items, Refusal, check, looks_like_utf16


def file_blocks(path: str, on_read: OnRead = ignore_progress) -> Iterator[bytes]:
    """A file's bytes, decompressed, block by block; `on_read` gets the number of stored bytes each block took.

    Raises Refusal if the file does not exist, cannot be read or is damaged; of a damaged file, everything before the
    damage is yielded first. Raises RunAgain if a store does not answer.
    """
    with refusals(path):
        yield from read_blocks(path, on_read)


def split_head(blocks: Iterator[bytes], size: int) -> tuple[bytes, Iterator[bytes]]:
    """At least `size` first bytes of a stream, or all of it, and the same stream from its beginning.

    What its blocks raise is raised where the returned stream comes to it.
    """
    head: list[bytes] = []
    error: Refusal | None = None
    try:
        while size > 0 and (block := next(blocks, b"")):
            head.append(block)
            size -= len(block)
    except Refusal as refusal:
        error = refusal

    def whole() -> Iterator[bytes]:
        yield from head
        if error is not None:
            raise error
        yield from blocks

    return b"".join(head), whole()


@contextlib.contextmanager
def refusals(path: str) -> Iterator[None]:
    """Raises what is wrong with a file as Refusal. A store that does not answer tells nothing of it: RunAgain."""
    try:
        yield
    except FileNotFoundError:
        raise Refusal("unreadable_file", path, "no such file", "Check --input") from None
    except IsADirectoryError:
        raise folder(path) from None
    except DamagedFile as error:
        raise damaged(path, error) from None
    except OSError as error:
        if isinstance(stopping := failure(path, error), RunAgain):
            raise stopping from None
        problem = (None if is_remote(path) else explain_os_error(error)) or first_line(error)
        what = f"cannot be read ({problem.rstrip('.')})"
        raise Refusal("unreadable_file", path, what, "Correct that") from None


def folder(path: str) -> Refusal:
    return Refusal("folder", path, "expected a file, got a folder", f"Name its files, for example '{path}/*.txt'")


def damaged(path: str, error: Exception) -> Refusal:
    problem = first_line(error)
    what = f"damaged file ({problem[:1].lower()}{problem[1:]})"
    return Refusal("damaged_file", path, what, "Download or create it again")


# Recognizes HTML and XML without a declaration: all of the text is inside of elements, which are closed.
#
# Tags alone prove nothing. Markdown and wikitext have elements of HTML, chats begin with <nick>, and text for language
# models has <s> and <unk>. They differ in text outside of the elements, or in tags that nothing closes.


# A page may begin with elements that say that it is one, whatever follows.
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


def recognize(text: bytes, cut: bool) -> str:
    """HTML, XML, or nothing for other text. The text is in lower case, and its end may be cut off."""
    if not _START.match(text):
        return ""
    text = _NO_ELEMENT.sub(b"", text).strip()
    if cut:
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
    """Whether all text is inside of elements that are closed, and whether one of them has an element inside.

    The last element may lack its end where the text is cut off, if it has no text of its own, as the root of a large
    file, or if most of the text is in the elements before it.
    """
    open_names: list[bytes] = []
    start = end = 0  # of the outermost element, and of the newest tag
    is_nested = has_text = False  # the outermost element has text of its own
    for tag in _TAG.finditer(text):
        is_text = bool(text[end : tag.start()].strip())
        if is_text and not open_names:
            return False, is_nested
        has_text |= is_text and len(open_names) == 1
        end = tag.end()
        closes, name, is_empty = tag.groups()
        if closes and name in open_names:
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
    return cut and (not has_text or start > len(text) / 2), is_nested


# The format of an input file: by --input_format, by its name, and for text also by its first bytes.
#
# A name with the suffix of another format is refused. So is a file with any other name whose first bytes are recognized
# as another format; whatever else a name may be (`wiki_00`, `corpus.en`, `part-00000`), its file is text. A rare form
# of another format is rather missed than true text refused.


FORMATS = ("text", "jsonl", "csv", "tsv", "parquet", "arrow", "warc", "mediawiki")
CHOICES = ("auto", *FORMATS)
SUPPORTED = (
    "plain text, .jsonl, .csv, .tsv, .parquet, .arrow, saved Hugging Face datasets, .warc, .wet, .xml of MediaWiki, "
    "each also .bz2 .gz .xz .zst"
)
HEAD_BYTES = 1 << 16  # enough to recognize a format
# The formats whose first bytes are checked, and what those bytes should be of.
CHECKED = {
    "text": "plain text",
    "warc": "WARC, whose first line is WARC/1.0 or 1.1",
    "mediawiki": "a MediaWiki XML dump",
}

_BY_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".warc": "warc",
    ".wet": "warc",
    ".xml": "mediawiki",
}
_DUMP_PART = re.compile(r"\.xml-p\d+p\d+")  # enwiki-20240101-pages-articles1.xml-p1p41242.bz2
# Not among them are those that are languages too, as in corpus.pt and corpus.so: there the content decides.
_OTHER_SUFFIXES = re.compile(
    r"\.(?:"
    r"[dmsx]?html?|atom|rss|svg|xsd|xslt?|pdf|djvu|epub|mobi|doc[mx]?|od[pst]|pptx?|rtf|xls[mx]?|"
    r"7z|iso|jar|lz|lz4|lzma|lzo|rar|snappy|tar|tbz2|tgz|txz|whl|z|zip|"
    r"bmp|gif|heic|ico|jpe?g|png|psd|tiff?|webp|aac|avi|flac|m4a|mkv|mov|mp3|mp4|mpe?g|og[gv]|opus|wav|webm|wm[av]|"
    r"array_record|avro|bin|ckpt|duckdb|feather|h5|hdf5|msgpack|np[yz]|onnx|pickle|pkl|pth|rds|"
    r"safetensors|sqlite3?|tfrecord|wat|class|dll|dylib|exe|pyc|wasm)"
)

_MAGIC = [
    # What the content is, the format that reads it, and the first bytes.
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
_CONTROLS = bytes([*range(9), *range(14, 32), 127])
_BINARY_BYTES, _BINARY_SHARE = 512, 0.05  # of random bytes, 11% are control characters; text has almost none
_COLUMN_NAME = re.compile(r'"?[^\W\d](?:[\w ./%&#-]|\([^()",;\t]*\)){0,63}"?')
_MOST_RAGGED = 0.1  # of the rows of a table, or one of three or more
_TABLES = [(",", "CSV", "csv"), ("\t", "TSV", "tsv"), (";", "CSV with semicolons", "")]

# The packages that a format needs, and the extra of bert_jax that has them.
_EXTRAS = {"warc": (("fastwarc", "resiliparse"), "warc"), "mediawiki": (("mwparserfromhell",), "wiki")}


def format_of(path: str, chosen: str = "auto") -> str:
    """The format of a file: the chosen one of FORMATS, or with "auto" that of its name.

    Raises Refusal for the name of a format that is not read.
    """
    if chosen != "auto":
        return chosen
    suffix = suffixes(path)[0].lower()
    if _DUMP_PART.fullmatch(suffix):
        return "mediawiki"
    last = PurePath(path).suffix.lower()
    for name in (last, suffix):
        if _OTHER_SUFFIXES.fullmatch(name):
            raise _other_format(path, f"{name} files are not supported")
    return _BY_SUFFIX.get(suffix, "text")


def check_installed(format: str) -> None:
    """Raises UserError if a format needs packages that are not installed."""
    packages, extra = _EXTRAS.get(format, ((), ""))
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"input in the format {format} needs {' and '.join(missing)}. Run {install_hint(extra)}")


def check_head(path: str, head: bytes, format: str) -> None:
    """Raises Refusal if the first bytes of a file (HEAD_BYTES, or all of them) are not those of its format.

    Only what else would be read wrongly or late is checked: text, web archives and dumps of wikis.
    """
    if format not in CHECKED or not head:
        return
    what, found = _recognize(head)
    if format == "text" and found:
        raise _other_format(path, f"the content is {what}, not plain text", f"Give --input_format {found}")
    if format == "text" and what:
        raise _other_format(path, f"the content is {what}, not plain text")
    if format != "text" and found != format:
        raise _other_format(path, f"the content is not {CHECKED[format]}")


def _other_format(path: str, what: str, advice: str = "Convert it, or choose a format with --input_format") -> Refusal:
    return Refusal("other_format", path, f"{what} (supported: {SUPPORTED})", advice)


def _recognize(head: bytes) -> tuple[str, str]:
    """What the content is, and the format that reads it, if one does; both are empty for text."""
    head = head[:HEAD_BYTES]
    for what, format, start in _MAGIC:
        if start.match(head):
            return what, format
    text, cut = head.removeprefix(b"\xef\xbb\xbf").lstrip(), len(head) == HEAD_BYTES
    lowered = text.lower()
    for what, format, start in _MARKUP:
        if start.match(lowered):
            return what, format
    if what := recognize(lowered, cut):
        return what, ""
    for delimiter, what, format in _TABLES:
        if _is_table(text, delimiter, cut):
            return what, format
    controls = len(head) - len(head.translate(None, _CONTROLS))
    is_text = controls < _BINARY_SHARE * len(head) or len(head) < _BINARY_BYTES
    return ("", "") if is_text or looks_like_utf16(head) or head.startswith(COMPRESSED) else ("binary data", "")


def _is_table(head: bytes, delimiter: str, cut: bool) -> bool:
    """Whether text, whose end may be cut off, is a header of column names, and rows with as many fields.

    A comma before a space is punctuation, except in quotes.
    """
    lines = [f"{line}\n" for line in head.decode("utf-8", "replace").split("\n")]
    names = lines[0].strip().split(delimiter)
    if len(names) < 2 or len(set(names)) < len(names) or not all(map(_COLUMN_NAME.fullmatch, names)):
        return False
    quotes = None if delimiter == "\t" else '"'
    consumed: list[str] = []  # of the current row

    def following() -> Iterator[str]:
        for line in lines[1:]:
            consumed.append(line)
            yield line.replace("\r", " ")  # csv refuses a carriage return inside of a line

    are_ragged = []
    for row in csv.reader(following(), delimiter=delimiter, quotechar=quotes):
        written = "".join(consumed)
        consumed.clear()
        is_prose = delimiter != "\t" and f"{delimiter} " in written and '"' not in written
        if row:
            are_ragged.append(len(row) != len(names) or is_prose)
    if cut:
        are_ragged = are_ragged[:-1]
    most = max(1, _MOST_RAGGED * len(are_ragged)) if len(are_ragged) > 2 else 0
    return bool(are_ragged) and sum(are_ragged) <= most


# Text files: documents separated by blank lines or by another line, or one document per file.


# A document is kept in memory, so one that never ends (a file without blank lines) is refused.
MAX_DOCUMENT_BYTES = 1 << 26
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# The characters for which str.isspace() is true, in UTF-8.
_SPACE = rb"[\t-\r\x1c-\x1f ]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
_BLANK = re.compile(rb"(?:" + _SPACE + rb")*+")

Ends = Callable[[bytes], object]  # whether a line ends the document before it


def numbered_lines(path: str, on_read: OnRead = ignore_progress) -> Iterator[tuple[int, bytes | None]]:
    """The numbers, from 1, and the lines of a file, without line ends (LF or CRLF) and byte-order mark.

    None replaces a line of more than MAX_DOCUMENT_BYTES. Raises Refusal as `file_blocks` does.
    """
    return enumerate(_lines(file_blocks(path, on_read)), start=1)


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes | None]:
    begun: list[bytes] = []  # the pieces of a line whose end has not been read yet
    size, mark = 0, BYTE_ORDER_MARK
    for block in blocks:
        first, *others = block.split(b"\n")
        if others:
            line = b"".join((*begun, first)).removeprefix(mark)
            yield None if size > MAX_DOCUMENT_BYTES else line.removesuffix(b"\r")
            begun, size, mark = [], 0, b""
            first = others.pop()
            for line in others:
                yield line.removesuffix(b"\r")
        size += len(first)
        begun.append(first)
        if size > MAX_DOCUMENT_BYTES:
            begun = []
    if size > MAX_DOCUMENT_BYTES:
        yield None
    elif rest := b"".join(begun).removeprefix(mark):
        yield rest.removesuffix(b"\r")


class _Document:
    """A document whose end has not been read yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._text = bytearray()
        self._too_long = False
        self._line = 0  # the number of its first line

    def add(self, number: int, line: bytes | None) -> None:
        """Adds a line. The text of a document that is too long is dropped."""
        self._line = self._line or number
        self._too_long |= line is None or len(self._text) + len(line) > MAX_DOCUMENT_BYTES
        if self._too_long:
            self._text.clear()
        elif line is not None:
            self._text += line + b"\n"

    def end(self) -> Items:
        """Yields the document, unless it is blank, and prepares for the next one."""
        raw, line = bytes(self._text), self._line
        text = raw.strip(b"\n")
        line += len(raw) - len(raw.lstrip(b"\n"))  # blank lines before it are no part of it
        if self._too_long:
            yield too_long(f"{self._path}, line {line}", in_lines=True)
        elif not _BLANK.fullmatch(text):
            yield check(text, self._path, line)
        self._text.clear()
        self._too_long, self._line = False, 0


def ends(document: str = "blank_line", separator: str = "") -> Ends:
    """The rule of a Reading for the lines that separate documents. White space around a separator does not matter."""
    if document == "file":
        return lambda line: False
    if separator:
        wanted = separator.strip().encode()
        return lambda line: line.strip() == wanted
    return _BLANK.fullmatch


def text_documents(
    path: str, on_read: OnRead = ignore_progress, ends: Ends = _BLANK.fullmatch, any_content: bool = False
) -> Items:
    """The documents of a text file, one at a time, without the lines that separate them.

    Lines lose their line end (LF or CRLF) and nothing else; lines of only white space count as blank. Memory is that
    of the longest document. A truncated file raises Refusal, which stands for the unfinished document too. So does a
    file whose first bytes are those of another format, unless any_content.
    """
    blocks = file_blocks(path, on_read)
    if not any_content:
        head, blocks = split_head(blocks, HEAD_BYTES)
        check_head(path, head, "text")
    document = _Document(path)
    for number, line in enumerate(_lines(blocks), start=1):
        if line is None or not ends(line):
            document.add(number, line)
        else:
            yield from document.end()
    yield from document.end()


def too_long(where: str, in_lines: bool = False) -> Refusal:
    """The refusal of a long document; in_lines: of a file in which lines separate documents."""
    advice = "Divide it into several"
    if in_lines:
        advice = "Separate the documents of the file by blank lines, or name the line that does (--document_separator)"
    return Refusal("document_too_long", where, f"a document of more than {MAX_DOCUMENT_BYTES >> 20} MiB", advice)
