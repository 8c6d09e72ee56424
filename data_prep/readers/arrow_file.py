"""Documents in a column of an Arrow file: the stream format, as in saved Hugging Face datasets, or the file format."""

from collections.abc import Iterator

import pyarrow as pa

from bert_jax.storage.compression import OnRead, ignore_progress
from bert_jax.storage.remote import BinaryFile
from data_prep.readers.file_blocks import damaged
from data_prep.readers.json_and_parquet import check_column, column_documents, opened
from data_prep.readers.refusal import Items

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
