"""Documents in a column or field of CSV, TSV, JSON lines, Parquet and Arrow files."""

import contextlib
import csv
import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from typing import cast

import pyarrow as pa

from bert_jax.storage.files import OnRead, ignore_progress, suffixes
from bert_jax.storage.remote import BinaryFile, first_line, open_file
from data_prep.readers import Item, Items, Refusal, check
from data_prep.readers import text as plain_text
from data_prep.readers.text import damaged, file_blocks, numbered_lines, refusals, too_long

# Documents in a column of CSV, whose fields may be quoted (RFC 4180), and of TSV, whose fields are never quoted.


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


# Documents in a field of records: JSON lines, and Parquet read in batches within bounded memory.
#
# JSON lines are parsed one by one rather than by pyarrow's JSON reader, which needs the same types in every line and
# gives up a whole block at the first bad one: here one bad line is one Refusal.


_BATCH_ROWS = 64
_PAGES_BYTES = 1 << 20  # read together from a column chunk
_TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
_ARRAY = re.compile(rb'\s*\[\s*(?:[{"]|$)')  # the first line of a JSON array of objects or texts
_JSON_KINDS = {int: "number", float: "number", bool: "truth value", list: "list", dict: "JSON object"}


def jsonl_documents(path: str, field: str, on_read: OnRead = ignore_progress) -> Items:
    """The documents of a file with a JSON object in each line: the text of its `field`. Blank lines are skipped."""
    begun = False
    for number, line in numbered_lines(path, on_read):
        where = f"{path}, line {number}"
        if line is None:
            yield too_long(where)
        elif line and not line.isspace():
            if not begun and _ARRAY.match(line):
                advice = f"Convert it: jq -c '.[]' {shlex.quote(path)} > FILE.jsonl"
                yield Refusal("not_json", path, "a JSON array, not an object on each line", advice)
                return
            yield _json_document(line, field, where)
        begun = begun or line is None or bool(line.strip())


def _json_document(line: bytes, field: str, where: str) -> Item:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        return check(line, where)
    except RecursionError:
        return Refusal("not_json", where, "nested too deep to be parsed as JSON", "Correct the line")
    except json.JSONDecodeError as error:
        return Refusal("not_json", where, f"not JSON ({first_line(error)})", "Correct the line")
    except ValueError:  # int() refuses numbers of thousands of digits
        return Refusal("not_json", where, "JSON with a number that is too long to be parsed", "Correct the line")
    text = record.get(field) if isinstance(record, dict) else None
    if isinstance(record, dict) and field in record and not isinstance(text, str):
        return _not_text(where, field, "null" if text is None else f"a {_JSON_KINDS[type(text)]}")
    if not isinstance(text, str):
        return _no_text(where, field, list(record) if isinstance(record, dict) else [])
    try:
        return check(text.encode(), where)
    except UnicodeEncodeError:
        return Refusal("invalid_utf8", where, f"half of a surrogate pair in {field!r}", "Correct the line")


def parquet_documents(path: str, field: str, on_read: OnRead = ignore_progress) -> Items:
    """The documents of a Parquet file: the text of each row in column `field`.

    A compressed file is first decompressed into a temporary one, because Parquet is read from its end.
    """
    with opened(path) as file:
        yield from _parquet_rows(file, path, field, on_read)


@contextlib.contextmanager
def opened(path: str) -> Iterator[BinaryFile]:
    """Opens a file for pyarrow, decompressed, for reading at any position. Raises the errors of both as Refusal."""
    with refusals(path):
        try:
            if suffixes(path)[1]:
                with tempfile.TemporaryFile() as unpacked:
                    unpacked.writelines(file_blocks(path))
                    unpacked.seek(0)
                    yield cast(BinaryFile, unpacked)
            else:
                with contextlib.closing(open_file(path)) as file:
                    yield file
        except (pa.ArrowException, UnicodeDecodeError, OSError, MemoryError) as error:
            # Only errors of `open_file` have a number, not pyarrow's. A damaged length may ask for any memory.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise damaged(path, error) from None


def _parquet_rows(file: BinaryFile, path: str, field: str, on_read: OnRead) -> Items:
    stored = file.seek(0, 2)
    file.seek(0)
    import pyarrow.parquet as pq  # slow: it loads the libraries of all object stores

    with pq.ParquetFile(file, buffer_size=_PAGES_BYTES, page_checksum_verification=True) as table:
        schema = table.schema_arrow
        check_column(path, schema, field)
        rows, number = max(table.metadata.num_rows, 1), 0
        for batch in table.iter_batches(_BATCH_ROWS, columns=[field]):
            yield from column_documents(batch.column(0), path, field, number)
            number += batch.num_rows
            on_read(stored * number // rows - stored * (number - batch.num_rows) // rows)


def check_column(path: str, schema: pa.Schema, field: str) -> None:
    """Raises Refusal unless a table has one column with this name, and text in it."""
    if schema.names.count(field) > 1:
        what = f"{schema.names.count(field)} columns are called {field!r}"
        raise Refusal("no_text_column", path, what, "Rename them, use another --text_field")
    if field not in schema.names or _value_type(schema.field(field).type) not in _TEXT_TYPES:
        columns = ", ".join(f"{name} ({kind})" for name, kind in zip(schema.names, schema.types, strict=True))
        raise Refusal(
            "no_text_column",
            path,
            f"no text column {field!r}; the columns are {columns[:200]}",
            "Use another --text_field",
        )


def column_documents(column: pa.Array, path: str, field: str, rows_before: int) -> Items:
    """The documents in the values of a column, after `rows_before` rows of a file."""
    for number, text in enumerate(_texts(column), start=rows_before + 1):
        where = f"{path}, row {number}"
        if text is None:
            yield _not_text(where, field, "null")
        else:
            yield too_long(where) if len(text) > plain_text.MAX_DOCUMENT_BYTES else check(text, where)


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _texts(column: pa.Array) -> list[bytes | None]:
    """The values of a column as bytes; the caller checks whether they are UTF-8."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return cast(list[bytes | None], column.cast(pa.large_binary()).to_pylist())


def _not_text(where: str, field: str, found: str) -> Refusal:
    advice = "Correct the record, use another --text_field"
    return Refusal("no_text_field", where, f"expected text in {field!r}, got {found}", advice)


def _no_text(where: str, field: str, fields: list[str]) -> Refusal:
    found = f"; its fields are {', '.join(fields)[:200]}" if fields else ""
    what = f"expected a JSON object with text in {field!r}{found}"
    return Refusal("no_text_field", where, what, "Use another --text_field")


# Documents in a column of an Arrow file: the stream format, as in saved Hugging Face datasets, or the file format.


# Both from the Arrow columnar format, "IPC Streaming Format" and "IPC File Format".
_FILE_MAGIC = b"ARROW1\0\0"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def arrow_documents(path: str, field: str, on_read: OnRead = ignore_progress) -> Items:
    """The documents of an Arrow file: the text of each row in column `field`. Holds one record batch in memory.

    A stream without its end mark is damaged, because pyarrow does not report one that ends between two batches.
    """
    with opened(path) as file:
        stored, reported, rows = file.seek(0, 2), 0, 0
        for batch in _batches(file, path, field):
            yield from column_documents(_valid(batch.column(0)), path, field, rows)
            rows += batch.num_rows
            position = min(file.tell(), stored)
            on_read(max(position - reported, 0))
            reported = max(position, reported)
        on_read(stored - reported)


def _valid(column: pa.Array) -> pa.Array:
    """The column, once its offsets and indices are known to be inside of it: the format has no checksums.

    Text that may not be UTF-8 becomes bytes, because a value that is not is no damage, but one refused document.
    """
    column.validate()
    as_bytes = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(column.type)
    if as_bytes is not None:
        column = column.view(as_bytes)
    column.validate(full=True)
    return column


def _batches(file: BinaryFile, path: str, field: str) -> Iterator[pa.RecordBatch]:
    file.seek(0)
    is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    opening = pa.ipc.open_file if is_file else pa.ipc.open_stream
    file.seek(0)
    schema = opening(file).schema
    check_column(path, schema, field)
    only = pa.ipc.IpcReadOptions(included_fields=[schema.names.index(field)])
    file.seek(0)
    reader = opening(file, options=only)
    if is_file:
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        return
    yield from reader
    file.seek(-len(_END_OF_STREAM), 2)
    if file.read(len(_END_OF_STREAM)) != _END_OF_STREAM:
        raise damaged(path, ValueError("truncated: the mark of the end is missing"))
