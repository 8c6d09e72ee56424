"""The format of an input file: by --input_format, by its name, and for text also by its first bytes.

A name with the suffix of another format is refused. So is a file with any other name whose first bytes are recognized
as another format; whatever else a name may be (`wiki_00`, `corpus.en`, `part-00000`), its file is text. A rare form of
another format is rather missed than true text refused.
"""

import csv
import importlib.util
import re
from collections.abc import Iterator
from pathlib import PurePath

from bert_jax.command import UserError, install_hint
from bert_jax.storage.compression import suffixes
from data_prep.readers import markup
from data_prep.readers.refusal import COMPRESSED, Refusal, looks_like_utf16

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
    if what := markup.recognize(lowered, cut):
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
