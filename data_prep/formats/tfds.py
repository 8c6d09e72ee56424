"""A TensorFlow Datasets folder: ArrayRecord files, features.json and dataset_info.json, without TensorFlow.

`tfds.builder_from_directory(DIR).as_data_source()` reads it. A record is a tf.train.Example with the columns of a
row, each as one byte string (the TFDS encoding "bytes"), so all records of a folder have the same length.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.array_types import Shaped, UInt8
from bert_jax.data.example import Rows
from bert_jax.data.manifest import PARTS
from bert_jax.data.shards import Corrupt, columns_of
from bert_jax.storage.local import write_atomic

NAME = "bert_jax"
UNNUMBERED = ".unnumbered"  # suffix of shards until their number is known, because TFDS numbers them without gaps
SUFFIX = "array_record"
_TEMPLATE = "{SPLIT}/shard-{SHARD_INDEX}.{FILEFORMAT}"
# The setting of TFDS: each record can be read by itself.
_OPTIONS = "group_size:1"
_FILES = ("dataset_info.json", "features.json")
_ABOUT = {
    "input_ids": "token ids; the pad id after the last sequence",
    "sequence_lengths": "slots of each sequence, [CLS] and [SEP]s counted; 0: there is no such sequence",
    "first_segment_lengths": "of those, the slots of segment A with [CLS] and its [SEP]",
    "next_sentence_labels": "0: B follows A; 1: it does not; -1: no label",
    "sequence_keys": "names of the sequences, no two alike",
    "masked_positions": "slots that are predicted, ascending; 0 in fillers",
    "masked_ids": "the ids that stood there; 0 in fillers",
    "masked_counts": "how many of them are real; the rest are fillers",
}


def write(path: Path, rows: Rows) -> dict[str, Any]:
    """Writes rows as one ArrayRecord file, completely or not at all. Raises OSError, as if the disk is full."""
    from array_record.python import array_record_module

    unfinished = path.with_name(path.name + ".tmp")
    try:
        writer = array_record_module.ArrayRecordWriter(str(unfinished), _OPTIONS)
        for record in _encode({name: column for name, column in rows._asdict().items() if column is not None}):
            writer.write(record)
        writer.close()
        content = unfinished.read_bytes()
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
    except RuntimeError as error:  # of the library, with the message of the operating system
        unfinished.unlink(missing_ok=True)
        raise _os_error(error, path) from error
    unfinished.replace(path)
    return {"rows": len(rows.input_ids), "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def reader(manifest: Mapping[str, Any]) -> Callable[[Path], Rows]:
    """A function that reads a shard. It raises Corrupt for a file whose records do not match the manifest."""
    wanted = columns_of(manifest)
    empty = {name: np.zeros((1, *shape), kind) for name, (shape, kind) in wanted.items()}
    full = {name: np.invert(column) for name, column in empty.items()}
    blank, other = (np.frombuffer(_encode(columns)[0], np.uint8) for columns in (empty, full))
    constant = blank == other  # the bytes that are not values: names and lengths
    order = sorted(empty)
    ends = np.cumsum([empty[name].nbytes for name in order])

    def read(path: Path) -> Rows:
        records = _records(path, len(blank))
        if not np.array_equal(records[:, constant], np.broadcast_to(blank[constant], (len(records), constant.sum()))):
            raise Corrupt("records with other features than the manifest's")
        payloads = dict(zip(order, np.split(records[:, ~constant], ends[:-1], axis=1), strict=True))
        columns = {
            name: np.ascontiguousarray(payloads[name]).view(kind).reshape(len(records), *shape)
            for name, (shape, kind) in wanted.items()
        }
        return Rows(**columns)

    return read


def finish(directory: Path, manifest: dict[str, Any]) -> None:
    """Writes dataset_info.json and features.json, and numbers the shards without gaps."""
    import tensorflow_datasets as tfds  # half a second

    template = tfds.core.ShardedFileTemplate(
        data_dir=directory, template=_TEMPLATE, dataset_name=NAME, filetype_suffix=SUFFIX
    )
    names, splits = [], []
    for part in PARTS:
        if shards := [shard for shard in manifest["shards"] if shard["name"].startswith(f"{part}/")]:
            split = tfds.core.SplitInfo(
                name=part,
                shard_lengths=[shard["rows"] for shard in shards],
                num_bytes=sum(shard["bytes"] for shard in shards),
                filename_template=template.replace(split=part),
            )
            splits.append(split)
            names += [str(path.relative_to(directory)) for path in split.filepaths]
    features = {
        name: tfds.features.Tensor(shape=shape, dtype=_stored_type(np.dtype(kind)), encoding="bytes", doc=_ABOUT[name])
        for name, (shape, kind) in columns_of(manifest).items()
    }
    info = tfds.core.DatasetInfo(
        builder=tfds.core.DatasetIdentity(
            name=NAME, version=tfds.core.Version("1.0.0"), data_dir=str(directory), module_name=""
        ),
        features=tfds.features.FeaturesDict(features),
        description=f"Rows of {manifest['seq_len']} slots for pretraining, {manifest['objective']}; see manifest.json.",
    )
    info.set_file_format(tfds.core.FileFormat.ARRAY_RECORD)
    info.set_splits(tfds.core.SplitDict(splits))
    info.write_to_directory(directory)
    for name in _FILES:  # written again, to be on disk before the manifest
        write_atomic(directory / name, (directory / name).read_bytes())
    for shard, name in zip(manifest["shards"], names, strict=True):
        (directory / shard["name"]).rename(directory / name)
        shard |= {"name": name, "stem": shard["name"].removesuffix(UNNUMBERED)}


def _stored_type(dtype: np.dtype) -> np.dtype:
    """int32 for uint32, which tf.io.decode_raw does not support; the bytes are equal, because ids are below 2**31."""
    return np.dtype(np.int32) if dtype == np.uint32 else dtype


def _encode(columns: Mapping[str, Shaped[np.ndarray, "R *n"]]) -> list[bytes]:
    from tensorflow_datasets.proto import tf_example_pb2  # importing it takes a quarter of a second

    records = []
    for row in range(len(columns["input_ids"])):
        example = tf_example_pb2.Example()
        for name, column in columns.items():
            example.features.feature[name].bytes_list.value.append(column[row].tobytes())
        records.append(example.SerializeToString(deterministic=True))
    return records


def _records(path: Path, length: int) -> UInt8[np.ndarray, "R n"]:
    from array_record.python import array_record_module

    if not path.exists():  # the library raises a plain RuntimeError for it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    try:
        opened = array_record_module.ArrayRecordReader(str(path))
        records = opened.read_all()
        opened.close()
    except RuntimeError as error:
        raise Corrupt(f"not an ArrayRecord file ({' '.join(str(error).split())})") from error
    if any(len(record) != length for record in records):
        raise Corrupt(f"records whose size is not the {length} bytes of the manifest")
    return np.frombuffer(b"".join(records), np.uint8).reshape(-1, length)


def _os_error(error: RuntimeError, path: Path) -> Exception:
    """The operating system's error behind an error of the library, or that error itself."""
    for number in errno.errorcode:
        if os.strerror(number) in str(error):
            return OSError(number, os.strerror(number), str(path))
    return error
