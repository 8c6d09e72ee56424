"""TFRecord files of masked rows in the field layout of google-research/bert, create_pretraining_data.py.

    input_ids, input_mask, segment_ids                      int64[T]
    masked_lm_positions, masked_lm_ids, masked_lm_weights   int64[M], int64[M], float[M]
    next_sentence_labels                                    int64[1]; -1: no label

A record is framed as a u64 length, the masked CRC-32C of that, the bytes, and the masked CRC-32C of those
(tensorflow/core/lib/io/record_writer.h). TensorFlow is not used.
"""

import gzip
import hashlib
import io
import itertools
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.array_types import Float32, Int64
from bert_jax.checksum import crc32c_of_each, mask
from bert_jax.data.example import Rows
from bert_jax.data.shards import Corrupt, columns_of
from bert_jax.storage.local import write_atomic

_ENCODED_TOGETHER = 1 << 18  # tokens: bounds the memory of encoding and changes no byte
_LONGEST = 1 << 26  # bytes in a record: protects against a damaged length
_WIDEST = 65535  # tokens: the limit of the columns of lengths
_SHORTEST = 4  # bytes: the minimum for crc32c_of_each; an Example with these fields is far longer
_READ_TOGETHER = 2048  # records: bounds the memory of reading
_LENGTH, _SUM = struct.Struct("<Q"), struct.Struct("<I")
_HEADER_BYTES = _LENGTH.size + _SUM.size
_GZIP = b"\x1f\x8b"


class Examples(NamedTuple):
    """R examples in the layout of the original scripts."""

    input_ids: Int64[np.ndarray, "R T"]
    input_mask: Int64[np.ndarray, "R T"]
    segment_ids: Int64[np.ndarray, "R T"]
    masked_lm_positions: Int64[np.ndarray, "R M"]
    masked_lm_ids: Int64[np.ndarray, "R M"]
    masked_lm_weights: Float32[np.ndarray, "R M"]
    next_sentence_labels: Int64[np.ndarray, "R 1"]


def write(path: Path, rows: Rows) -> dict[str, Any]:
    """Writes unpacked rows with static masks as one file, completely or not at all.

    The layout has no field for sequence keys, so the manifest gets the first one; the keys of a shard are consecutive.
    """
    keys = rows.sequence_keys[:, 0]
    assert rows.sequence_keys.shape[1] == 1 and (np.diff(keys) == 1).all(), "keys of a shard count up by one"
    step = max(1, _ENCODED_TOGETHER // rows.input_ids.shape[1])
    parts: list[bytes] = []
    for start in range(0, len(keys), step):
        examples = to_examples(Rows(*(column[start : start + step] for column in rows if column is not None)))
        parts += frames(serialize(examples))
    content = b"".join(parts)
    write_atomic(path, content)
    return {
        "rows": len(keys),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "first_sequence_key": int(keys[0]) if len(keys) else 0,
    }


def reader(manifest: Mapping[str, Any]) -> Callable[[Path], Rows]:
    """A function that reads a shard and restores its keys. It raises Corrupt for any other file."""
    columns = {name: (shape, np.dtype(kind)) for name, (shape, kind) in columns_of(manifest).items()}
    id_dtype = columns["input_ids"][1]
    first_keys = {shard["name"]: shard.get("first_sequence_key", 0) for shard in manifest["shards"]}

    def read(path: Path) -> Rows:
        with path.open("rb") as file:
            records = list(itertools.chain.from_iterable(blocks(file)))
        if not records:
            return Rows(**{name: np.empty((0, *shape), dtype) for name, (shape, dtype) in columns.items()})
        return to_rows(parse(records), id_dtype, first_keys[f"{path.parent.name}/{path.name}"])

    return read


def to_examples(rows: Rows) -> Examples:
    """Unpacked rows with static masks in the layout of the original scripts."""
    assert rows.masked_positions is not None and rows.masked_ids is not None and rows.masked_counts is not None
    columns = np.arange(rows.input_ids.shape[1])
    filled = columns < rows.sequence_lengths
    real = np.arange(rows.masked_positions.shape[1]) < rows.masked_counts[:, None]
    return Examples(
        input_ids=rows.input_ids.astype(np.int64),
        input_mask=filled.astype(np.int64),
        segment_ids=(filled & (columns >= rows.first_segment_lengths)).astype(np.int64),
        masked_lm_positions=rows.masked_positions.astype(np.int64),
        masked_lm_ids=rows.masked_ids.astype(np.int64),
        masked_lm_weights=real.astype(np.float32),
        next_sentence_labels=rows.next_sentence_labels.astype(np.int64),
    )


def to_rows(examples: Examples, id_dtype: np.dtype, first_key: int, before: int = 0) -> Rows:
    """The rows of examples, with consecutive keys from first_key; masked positions are sorted.

    before   the number of examples of the file that precede these, for messages
    Raises Corrupt, with the number of the example, for one that is not a valid row.
    """
    count, width = examples.input_ids.shape
    if width > _WIDEST:
        raise Corrupt(f"examples of {width} tokens; a row has at most {_WIDEST}")
    columns = np.arange(width)
    lengths = examples.input_mask.sum(axis=1)
    filled = columns < lengths[:, None]
    firsts = (filled & (examples.segment_ids == 0)).sum(axis=1)
    weights = examples.masked_lm_weights
    real = weights == 1
    # Rows have their masked positions in order with fillers last, whatever the order in the file.
    order = np.argsort(np.where(real, examples.masked_lm_positions, width), axis=1, kind="stable")
    positions, ids, real = (
        np.take_along_axis(column, order, axis=1)
        for column in (examples.masked_lm_positions * real, examples.masked_lm_ids * real, real)
    )

    def outside(values: np.ndarray, end: Any) -> np.ndarray:
        return (values < 0) | (values >= end)

    ids_end = np.iinfo(id_dtype).max + 1
    checks = {
        "an input_mask that is not ones and then zeros": (examples.input_mask != filled) | (lengths < 1)[:, None],
        "segment_ids that are not zeros and then ones": examples.segment_ids != (filled & (columns >= firsts[:, None])),
        "an id outside of the vocabulary": np.hstack([outside(examples.input_ids, ids_end), outside(ids, ids_end)]),
        "a masked position outside of the sequence": real & outside(positions, lengths[:, None]),
        "a masked position twice": real[:, 1:] & (np.diff(positions, axis=1) == 0),
        "masked_lm_weights other than 0 and 1": ~np.isin(weights, (0, 1)),
        "a next_sentence_label other than 0, 1 and -1": ~np.isin(examples.next_sentence_labels, (-1, 0, 1)),
    }
    for problem, bad in checks.items():
        if bad.any():
            raise Corrupt(f"example {before + np.nonzero(bad)[0][0]} has {problem}")
    return Rows(
        input_ids=examples.input_ids.astype(id_dtype),
        sequence_lengths=lengths[:, None].astype(np.uint16),
        first_segment_lengths=firsts[:, None].astype(np.uint16),
        next_sentence_labels=examples.next_sentence_labels.astype(np.int8),
        sequence_keys=np.arange(first_key, first_key + count, dtype=np.uint64)[:, None],
        masked_positions=positions.astype(np.uint16),
        masked_ids=ids.astype(id_dtype),
        masked_counts=real.sum(axis=1).astype(np.uint16),
    )


def serialize(examples: Examples) -> list[bytes]:
    """Each example as the bytes of a tf.train.Example, with its features in the order of their names."""
    from tensorflow_datasets.proto import tf_example_pb2  # importing it takes a quarter of a second

    columns = {name: values.tolist() for name, values in examples._asdict().items()}
    records = []
    for row in range(len(examples.input_ids)):
        example = tf_example_pb2.Example()
        for name, values in columns.items():
            feature = example.features.feature[name]
            values_of = feature.float_list if name == "masked_lm_weights" else feature.int64_list
            values_of.value.extend(values[row])
        records.append(example.SerializeToString(deterministic=True))
    return records


def frames(records: Sequence[bytes]) -> list[bytes]:
    """Records of at least four bytes with their frames, as in a file."""
    lengths = [_LENGTH.pack(len(record)) for record in records]
    length_sums, record_sums = (
        [_SUM.pack(mask(crc)) for crc in crc32c_of_each(strings).tolist()] for strings in (lengths, records)
    )
    return [b"".join(pieces) for pieces in zip(lengths, length_sums, records, record_sums, strict=True)]


def blocks(file: io.BufferedIOBase) -> Iterator[list[bytes]]:
    """The records of a TFRecord file, plain or gzipped, in batches. Raises Corrupt for any other file."""
    begin = file.read(len(_GZIP))
    file.seek(0)
    opened = gzip.GzipFile(fileobj=file) if begin == _GZIP else file
    number = 0
    try:
        while framed := list(itertools.islice(_framed(opened), _READ_TOGETHER)):
            records = [frame[_HEADER_BYTES : -_SUM.size] for frame in framed]
            for index, (found, expected) in enumerate(zip(framed, frames(records), strict=True), start=number):
                if found != expected:
                    raise Corrupt(f"record {index} does not have its checksum")
            number += len(framed)
            yield records
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Corrupt(f"a damaged gzip file ({error})") from error


def parse(records: list[bytes], before: int = 0) -> Examples:
    """Parses serialized Examples; next_sentence_labels may be missing and are then -1.

    before   the number of records of the file that precede these, for messages
    Raises Corrupt for a record that is not an Example, lacks a field, or has a field of another length than the first.
    """
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_pb2  # importing it takes a quarter of a second

    columns: dict[str, list[np.ndarray]] = {name: [] for name in Examples._fields}
    for number, record in enumerate(records, start=before):
        try:
            features = tf_example_pb2.Example.FromString(record).features.feature
        except DecodeError as error:
            raise Corrupt(f"record {number} is not a tf.train.Example ({error})") from error
        for name, column in columns.items():
            value: Any = [-1]
            if name in features:
                value = features[name].int64_list.value
                if name == "masked_lm_weights":
                    value = features[name].float_list.value or value
            elif name != "next_sentence_labels":
                raise Corrupt(f"record {number} has no {name}")
            column.append(np.array(value, np.float32 if name == "masked_lm_weights" else np.int64))
            if len(column[-1]) != len(column[0]):
                raise Corrupt(f"record {number} has {len(value)} {name}, but record {before} has {len(column[0])}")
    examples = Examples(**{name: np.stack(column) for name, column in columns.items()})
    _check_widths(examples, before)
    return examples


def _check_widths(examples: Examples, number: int) -> None:
    """Raises Corrupt for fields of the first record whose lengths do not fit together."""
    for like, names in {
        "input_ids": ("input_mask", "segment_ids"),
        "masked_lm_positions": ("masked_lm_ids", "masked_lm_weights"),
    }.items():
        wanted = getattr(examples, like).shape[1]
        for name in names:
            if (got := getattr(examples, name).shape[1]) != wanted:
                raise Corrupt(f"record {number} has {got} {name} and {wanted} {like}")
    if examples.next_sentence_labels.shape[1] != 1:
        raise Corrupt(f"record {number} has {examples.next_sentence_labels.shape[1]} next_sentence_labels, not one")


def _framed(file: io.BufferedIOBase) -> Iterator[bytes]:
    """The records of a file with their frames, unchecked."""
    while header := file.read(_HEADER_BYTES):
        if len(header) < _HEADER_BYTES:
            raise Corrupt("the file ends within a record")
        (length,) = _LENGTH.unpack_from(header)
        if not _SHORTEST <= length <= _LONGEST:
            raise Corrupt(f"a record of {length} bytes: not a TFRecord file of examples, or a damaged one")
        rest = file.read(length + _SUM.size)
        if len(rest) < length + _SUM.size:
            raise Corrupt("the file ends within a record")
        yield header + rest
