"""Documents in a column of CSV, whose fields may be quoted (RFC 4180), and of TSV, whose fields are never quoted."""

import csv
from collections.abc import Iterator

from bert_jax.storage.compression import OnRead, ignore_progress
from data_prep.readers import plain_text
from data_prep.readers.refusal import Items, Refusal, check

_ADVICE = {
    ",": 'Quote fields that hold commas, quotes or line ends, and double their quotes: "so ""quoted"""',
    "\t": "Separate fields by one tab, without quotes",
}
# Bytes that are not UTF-8 pass through the csv module as these characters.
_ENCODING = "utf-8", "surrogateescape"


def table_documents(path: str, column: str, delimiter: str, on_read: OnRead = ignore_progress) -> Items:
    """The documents of a table: the text of each row in `column`, a name in the first line.

    delimiter   "," for CSV, a tab for TSV

    Line ends may be LF or CRLF; those in quoted fields become LF. Blank lines are skipped. Raises Refusal for a table
    without the column, and for a line or quoted field that is too long.
    """
    rows = _csv_rows(path, on_read) if delimiter == "," else _tsv_rows(path, on_read)
    _, names = next(rows, (0, []))
    if isinstance(names, Refusal):
        raise names
    if names.count(column) != 1:
        found = f"{names.count(column)} columns are called" if column in names else "no column"
        columns = ", ".join(names)[:200].encode(*_ENCODING).decode("utf-8", "replace")
        what = f"{found} {column!r}; the first line names the columns {columns or '(none)'}"
        raise Refusal("no_text_column", path, what, "Use another --text_field")
    index = names.index(column)
    for number, fields in rows:
        if isinstance(fields, Refusal):
            yield fields
        elif len(fields) != len(names):
            what = f"{len(fields)} fields, but the first line names {len(names)} columns"
            yield Refusal("bad_row", f"{path}, line {number}", what, _ADVICE[delimiter])
        else:
            yield check(fields[index].encode(*_ENCODING), f"{path}, line {number}")


def _lines(path: str, on_read: OnRead) -> Iterator[tuple[int, str]]:
    for number, line in plain_text.numbered_lines(path, on_read):
        if line is None:
            raise plain_text.too_long(f"{path}, line {number}")
        yield number, line.decode(*_ENCODING)


def _tsv_rows(path: str, on_read: OnRead) -> Iterator[tuple[int, list[str] | Refusal]]:
    for number, line in _lines(path, on_read):
        if line and not line.isspace():
            yield number, line.split("\t")


def _csv_rows(path: str, on_read: OnRead) -> Iterator[tuple[int, list[str] | Refusal]]:
    """The rows with the numbers of their first lines; a Refusal in place of one that is not CSV."""
    csv.field_size_limit(plain_text.MAX_DOCUMENT_BYTES)
    reader = csv.reader((f"{line}\n" for _, line in _lines(path, on_read)), strict=True)
    while True:
        number = reader.line_num + 1
        where = f"{path}, line {number}"
        try:
            fields = next(reader, None)
        except csv.Error as error:
            if "field limit" in str(error):
                raise plain_text.too_long(where) from None
            yield number, Refusal("bad_row", where, f"not CSV ({error})", _ADVICE[","])
            continue
        if fields is None:
            return
        if fields:
            yield number, fields
