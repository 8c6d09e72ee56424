"""Documents in a field of records: JSON lines, and Parquet read in batches within bounded memory.

JSON lines are parsed one by one rather than by pyarrow's JSON reader, which needs the same types in every line and
gives up a whole block at the first bad one: here one bad line is one Refusal.
"""

import contextlib
import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from typing import cast

import pyarrow as pa

from bert_jax.storage.compression import OnRead, ignore_progress, suffixes
from bert_jax.storage.remote import BinaryFile, first_line, open_file
from data_prep.readers import plain_text
from data_prep.readers.file_blocks import damaged, file_blocks, refusals
from data_prep.readers.plain_text import numbered_lines, too_long
from data_prep.readers.refusal import Item, Items, Refusal, check

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
