"""Reads documents in a column or field of CSV, TSV, JSON lines, Parquet and Arrow files."""

import contextlib
import csv
import itertools
import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from typing import Any, cast

import pyarrow as pa

from bert_jax.storage.files import OnRead, field_separator, ignore_progress, naming_temporary, suffixes
from bert_jax.storage.remote import BinaryFile, first_line, open_file
from data_prep.readers import Item, Items, Refusal, check
from data_prep.readers import text as plain_text
from data_prep.readers.text import damaged, file_blocks, lines, refusals, too_long

# CSV, whose fields may be quoted (RFC 4180), and TSV, whose fields are never quoted.

_ADVICE = {
    ",": 'Quote fields that hold commas, quotes or line ends, and double their quotes: "so ""quoted"""',
    "\t": "Separate fields by one tab, without quotes",
}
# Bytes that are not UTF-8 pass through the csv module as these characters.
_ENCODING = "utf-8", "surrogateescape"


def table_documents(path: str, column: str, delimiter: str, on_read: OnRead = ignore_progress) -> Items:
    """Yields a table's documents: the rows' text in one column.

    Line ends may be LF, CRLF or CR; in quoted fields they become LF. Blank lines are skipped.

    Args:
        column: A name in the first line.
        delimiter: "," for CSV, a tab for TSV.

    Raises:
        Refusal: The table lacks the column, or a line or quoted field is too long.
    """
    tsv_lines = ((number, line) for number, line in _lines(path, on_read) if line and not line.isspace())
    rows = _csv_rows(path, on_read) if delimiter == "," else ((number, line.split("\t")) for number, line in tsv_lines)
    _, names = next(rows, (0, []))
    if isinstance(names, Refusal):
        raise names
    if names.count(column) != 1:
        count = f"{names.count(column)} columns are called" if column in names else "no column"
        columns = ", ".join(names)[:200].encode(*_ENCODING).decode("utf-8", "replace")
        problem = f"{count} {column!r}; the first line names the columns {columns or '(none)'}"
        raise Refusal("no_text_column", path, problem, "Use another --text_field")
    index = names.index(column)
    for number, fields in rows:
        if isinstance(fields, Refusal):
            yield fields
        elif len(fields) != len(names):
            problem = f"{len(fields)} fields, but the first line names {len(names)} columns"
            yield Refusal("bad_row", f"{path}, line {number}", problem, _ADVICE[delimiter])
        else:
            yield check(fields[index].encode(*_ENCODING), f"{path}, line {number}")


def _lines(path: str, on_read: OnRead) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines(file_blocks(path, on_read)), start=1):
        if line is None:
            raise too_long(f"{path}, line {number}")
        yield number, line.decode(*_ENCODING)


def _csv_rows(path: str, on_read: OnRead) -> Iterator[tuple[int, list[str] | Refusal]]:
    """Yields each row's first line number and its fields, or a Refusal for a row that is not CSV."""
    # The csv module refuses fields of more than 128 KiB by default.
    csv.field_size_limit(plain_text.MAX_DOCUMENT_BYTES)
    content = (f"{line}\n" for _, line in _lines(path, on_read))
    first = next(content, "")
    reader = csv.reader(itertools.chain([first], content), delimiter=field_separator(first), strict=True)
    while True:
        number = reader.line_num + 1
        place = f"{path}, line {number}"
        try:
            fields = next(reader, None)
        except csv.Error as error:
            # Such a field ends the file. After any other error, reading continues with the next row.
            if "field limit" in str(error):
                raise too_long(place) from None
            yield number, Refusal("bad_row", place, f"not CSV ({error})", _ADVICE[","])
            continue
        if fields is None:
            return
        if fields:
            yield number, fields


# JSON lines, and Parquet read in batches within bounded memory.
#
# JSON lines are parsed one by one, so that one bad line is one Refusal. pyarrow's JSON reader needs the same types in
# all lines, and gives up a whole block at the first bad one.

_BATCH_ROWS = 64
_PAGES_BYTES = 1 << 20  # read together from a column chunk
_TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
_ARRAY = re.compile(rb'\s*\[\s*(?:[{"]|$)')  # the first line of a JSON array of objects or texts
_JSON_KINDS = {type(None): "null", bool: "a truth value", list: "a list", dict: "a JSON object"}  # others: numbers


def jsonl_documents(
    path: str,
    field: str,
    on_read: OnRead = ignore_progress,
    blocks: Iterator[bytes] | None = None,
    is_first: bool = True,
) -> Items:
    """Yields the documents in JSON lines: the objects' text in `field`. Skips blank lines.

    Args:
        blocks: The content, if it is only a part of the file.
        is_first: Whether the content is the file's beginning.

    Raises:
        Refusal: The file is a JSON array.
    """
    for number, line in enumerate(lines(file_blocks(path, on_read) if blocks is None else blocks), start=1):
        place = f"{path}, line {number}"
        if line is None:
            yield too_long(place)
        elif not line or line.isspace():
            continue
        elif is_first and _ARRAY.match(line):
            advice = f"Convert it: jq -c '.[]' {shlex.quote(path)} > FILE.jsonl"
            raise Refusal("not_json", path, "a JSON array, not an object on each line", advice)
        else:
            yield _json_document(line, field, place)
        is_first = False


def _json_document(line: bytes, field: str, place: str) -> Item:
    problem = ""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        return check(line, place)
    except RecursionError:
        problem = "nested too deep to be parsed as JSON"
    except json.JSONDecodeError as error:
        problem = f"not JSON ({first_line(error)})"
    except ValueError:  # int() refuses numbers of thousands of digits
        problem = "JSON with a number that is too long to be parsed"
    if problem:
        return Refusal("not_json", place, problem, "Correct the line")
    fields = record if isinstance(record, dict) else {}
    text = fields.get(field)
    if isinstance(text, str):
        try:
            return check(text.encode(), place)
        except UnicodeEncodeError:
            return Refusal("invalid_utf8", place, f"half of a surrogate pair in {field!r}", "Correct the line")
    if field in fields:
        return _not_text(place, field, _JSON_KINDS.get(type(text), "a number"))
    listed = f"; its fields are {', '.join(fields)[:200]}" if fields else ""
    problem = f"expected a JSON object with text in {field!r}{listed}"
    return Refusal("no_text_field", place, problem, "Use another --text_field")


def parquet_documents(
    path: str, field: str, on_read: OnRead = ignore_progress, span: tuple[int, int] | None = None
) -> Items:
    """Yields a Parquet file's documents: the rows' text in column `field`.

    Args:
        span: Reads only the row groups whose first byte is in [begin, end) of the file.
    """
    with _open(path) as file:
        stored = file.seek(0, 2)
        file.seek(0)
        import pyarrow.parquet as pq  # slow: it loads the libraries of all object stores

        with pq.ParquetFile(file, buffer_size=_PAGES_BYTES, page_checksum_verification=True) as table:
            _check_column(path, table.schema_arrow, field)
            groups = [table.metadata.row_group(index) for index in range(table.num_row_groups)]
            inside = [n for n, group in enumerate(groups) if span is None or span[0] <= _first_byte(group) < span[1]]
            rows = max(table.metadata.num_rows, 1)
            number = sum(group.num_rows for group in groups[: min(inside, default=0)])
            for batch in table.iter_batches(_BATCH_ROWS, inside, columns=[field]) if inside else ():
                yield from _column_documents(batch.column(0), path, field, number)
                number += batch.num_rows
                # Only one column is read, so progress follows the rows and not the bytes.
                on_read(stored * number // rows - stored * (number - batch.num_rows) // rows)


def _first_byte(group: Any) -> int:
    """Returns where a row group begins in its file."""
    columns = [group.column(index) for index in range(group.num_columns)]
    return min(column.dictionary_page_offset or column.data_page_offset for column in columns)


@contextlib.contextmanager
def _open(path: str) -> Iterator[BinaryFile]:
    """Opens a file for pyarrow, and raises all errors as Refusal."""
    with refusals(path):
        try:
            # Parquet is read from its end, so a compressed file is first decompressed into a temporary one.
            if suffixes(path)[1]:
                with tempfile.TemporaryFile() as unpacked:
                    with naming_temporary():
                        unpacked.writelines(file_blocks(path))
                        unpacked.seek(0)
                    yield cast(BinaryFile, unpacked)
            else:
                with contextlib.closing(open_file(path)) as file:
                    yield file
        except (pa.ArrowException, UnicodeDecodeError, OSError, MemoryError) as error:
            # Errors of `open_file` have a number, pyarrow's have none. MemoryError: a damaged length asks for any size.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise damaged(path, error) from None


def _check_column(path: str, schema: pa.Schema, field: str) -> None:
    """Raises Refusal unless a table has exactly one column with this name, and text in it."""
    if schema.names.count(field) > 1:
        problem = f"{schema.names.count(field)} columns are called {field!r}"
        raise Refusal("no_text_column", path, problem, "Rename them, use another --text_field")
    columns = ", ".join(f"{name} ({kind})" for name, kind in zip(schema.names, schema.types, strict=True))
    if field not in schema.names:
        problem = f"no text column {field!r}; the columns are {columns[:200]}"
        raise Refusal("no_text_column", path, problem, "Use another --text_field")
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        kind = kind.value_type
    if kind not in _TEXT_TYPES:
        problem = f"expected text in column {field!r}, got {kind}; the columns are {columns[:200]}"
        raise Refusal("no_text_column", path, problem, "Convert it to text, use another --text_field")


def _column_documents(column: pa.Array, path: str, field: str, rows_before: int) -> Items:
    """Yields the documents in a column that follows `rows_before` rows."""
    if pa.types.is_dictionary(column.type):
        if column.type.value_type in (pa.string_view(), pa.binary_view()):  # pyarrow does not decode these
            values = column.dictionary.cast(pa.large_binary())
            column = pa.DictionaryArray.from_arrays(column.indices, values)
        column = column.dictionary_decode()
    elif pa.types.is_run_end_encoded(column.type):
        import pyarrow.compute as pc

        values = column.values.cast(pa.large_binary())
        column = pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(column.run_ends, values))
    # As bytes, because pyarrow raises for text that is not UTF-8, and `check` refuses just that value.
    for number, text in enumerate(column.cast(pa.large_binary()).to_pylist(), start=rows_before + 1):
        place = f"{path}, row {number}"
        if text is None:
            yield _not_text(place, field, "null")
        else:
            yield too_long(place) if len(text) > plain_text.MAX_DOCUMENT_BYTES else check(text, place)


def _not_text(place: str, field: str, value: str) -> Refusal:
    advice = "Correct the record, use another --text_field"
    return Refusal("no_text_field", place, f"expected text in {field!r}, got {value}", advice)


# Arrow: the stream format, as in saved Hugging Face data sets, or the file format.

# Both from the Arrow columnar format, "IPC Streaming Format" and "IPC File Format".
_FILE_MAGIC = b"ARROW1\0\0"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def arrow_documents(path: str, field: str, on_read: OnRead = ignore_progress) -> Items:
    """Yields an Arrow file's documents: the rows' text in column `field`. Memory holds one record batch."""
    with _open(path) as file:
        stored, reported, rows = file.seek(0, 2), 0, 0
        for batch in _batches(file, path, field):
            # The format has no checksums, so offsets and indices may point outside the column. Text becomes bytes
            # before the full check, because text that is not UTF-8 is not damage, but one refused document.
            column = batch.column(0)
            column.validate()
            as_bytes = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}.get(column.type)
            column = column if as_bytes is None else column.view(as_bytes)
            column.validate(full=True)
            yield from _column_documents(column, path, field, rows)
            rows += batch.num_rows
            position = min(file.tell(), stored)
            on_read(max(position - reported, 0))
            reported = max(position, reported)
        on_read(stored - reported)


def _batches(file: BinaryFile, path: str, field: str) -> Iterator[pa.RecordBatch]:
    # Three reads from the start: the format, then the schema, then the one column that is needed.
    file.seek(0)
    is_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    open_arrow = pa.ipc.open_file if is_file else pa.ipc.open_stream
    file.seek(0)
    schema = open_arrow(file).schema
    _check_column(path, schema, field)
    only = pa.ipc.IpcReadOptions(included_fields=[schema.names.index(field)])
    file.seek(0)
    reader = open_arrow(file, options=only)
    if is_file:
        yield from map(reader.get_batch, range(reader.num_record_batches))
        return
    yield from reader
    # pyarrow does not report a stream that was cut between two batches.
    file.seek(-len(_END_OF_STREAM), 2)
    if file.read(len(_END_OF_STREAM)) != _END_OF_STREAM:
        raise damaged(path, ValueError("truncated: the mark of the end is missing"))
