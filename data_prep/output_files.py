"""The files in an output: shards in the formats for `build-examples --format`, and SHA256SUMS (docs/data_format.md).

arrow   shards for training (bert_jax/data/shard_file.py)
tfds    a TensorFlow Datasets folder for other programs: ArrayRecord files, features.json and dataset_info.json.
        `tfds.builder_from_directory(DIR).as_data_source()` reads it. A record is a tf.train.Example with the columns
        of a row, each as one byte string (the TFDS encoding "bytes"). Neither direction needs TensorFlow.
"""

import dataclasses
import errno
import functools
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.data.example import Rows
from bert_jax.data.manifest import MANIFEST, PARTS, SHARD_TABLE, ShardTable
from bert_jax.data.shard_file import Corrupt, join_rows, read_shard, stored_columns, write_shard
from bert_jax.errors import UserError
from bert_jax.storage.files import MARKER, write_atomic
from bert_jax.storage.remote import Folder, as_address, is_remote

FORMATS = ("arrow", "tfds")
_COPIES = 16  # files that are copied to a store at the same time
SUMS = "SHA256SUMS"  # the hash of every file of an output, in the format of `sha256sum -c SHA256SUMS`
_SUM = re.compile(r"([0-9a-f]{64})  (\S.*)")
_COPY_AGAIN = "copy the folder again, or build it again"

# TFDS takes long to load, so functions import it when they are called.
_NAME = "bert_jax"
# Suffix of TFDS shards until all are written. TFDS numbers them without gaps, but some units write no shard.
_UNNUMBERED = ".unnumbered"
_OPTIONS = "group_size:1"  # as TFDS sets it: each record can be read by itself
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


def write(format: str, directory: Path, stem: str, rows: Rows) -> dict[str, Any]:
    """Writes the shard directory/stem (e.g. train/shard-00000), completely or not at all.

    Returns:
        The shard's entry in the table of shards.

    Raises:
        OSError: The file cannot be written.
    """
    if format == "arrow":
        return {"name": f"{stem}.arrow", **write_shard(directory / f"{stem}.arrow", rows)._asdict()}
    return {"name": stem + _UNNUMBERED, **_write_tfds(directory / (stem + _UNNUMBERED), rows)}


def make_in_store(output: Path, last: str, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Makes an output, in a store by way of a local folder, and returns the result of `make`.

    The local folder is in TMPDIR, and its name follows from the address: so a job that was killed resumes there.

    Args:
        last: The file with the result as JSON, which is copied last and so marks a complete output.
        make: Makes the output in a folder that does not exist.

    Raises:
        UserError: The output exists in the store.
    """
    if not is_remote(output):
        return make(output)
    folder = Folder(as_address(output))
    if folder.read_if_present(last) is not None:
        raise UserError(f"output {folder.address} exists. Choose another --output, or remove it first")
    name = hashlib.blake2b(folder.address.encode(), digest_size=8).hexdigest()
    local = Path(tempfile.gettempdir()) / f"bert_jax-output-{name}" / output.name
    local.parent.mkdir(mode=0o700, exist_ok=True)
    result = json.loads((local / last).read_bytes()) if local.exists() else make(local)
    names = [path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()]

    def copy(name: str) -> None:
        with (local / name).open("rb") as file:
            folder.write(name, iter(functools.partial(file.read, 1 << 22), b""))

    with ThreadPoolExecutor(_COPIES) as pool:
        list(pool.map(copy, (name for name in names if name != last)))
    copy(last)
    shutil.rmtree(local.parent)
    return dict(result)


def join(format: str, directory: Path, stem: str, paths: Sequence[Path]) -> dict[str, Any]:
    """Writes the rows of several shards, in order, as the shard directory/stem, completely or not at all.

    Returns:
        The shard's entry in the table of shards.

    Raises:
        OSError: The file cannot be written.
    """
    if format != "arrow":
        return {"name": stem + _UNNUMBERED, **_write_records(directory / (stem + _UNNUMBERED), _records(paths))}
    name = f"{stem}.arrow"
    return {"name": name, **join_rows(directory / name, map(read_shard, paths))._asdict()}


def reader(manifest: Mapping[str, Any]) -> Callable[[Path], Rows]:
    """Returns the function that reads a shard, and raises Corrupt for a damaged file.

    Raises:
        UserError: The manifest states an unknown format.
    """
    if manifest["format"] not in FORMATS:
        raise UserError(f"unknown shard format {manifest['format']!r}; expected one of {', '.join(FORMATS)}")
    if manifest["format"] == "arrow":
        return read_shard
    columns = stored_columns(manifest)
    return lambda path: _read_tfds(path, columns)


def finish(directory: Path, manifest: Mapping[str, Any], shards: ShardTable) -> ShardTable:
    """Completes a tfds folder after its last shard and before manifest.json.

    Writes dataset_info.json and features.json, and numbers the shards without gaps.

    Returns:
        The shards with their final names.
    """
    if manifest["format"] == "arrow":
        return shards
    import tensorflow_datasets as tfds  # half a second

    template = tfds.core.ShardedFileTemplate(
        data_dir=directory,
        template="{SPLIT}/shard-{SHARD_INDEX}.{FILEFORMAT}",
        dataset_name=_NAME,
        filetype_suffix="array_record",
    )
    names, splits = [], []
    for part in PARTS:
        if len(chosen := shards.part(part)):
            split = tfds.core.SplitInfo(
                name=part,
                shard_lengths=chosen.rows.tolist(),
                num_bytes=int(chosen.bytes.sum()),
                filename_template=template.replace(split=part),
            )
            splits.append(split)
            names += [str(path.relative_to(directory)) for path in split.filepaths]
    features = {}
    for name, (shape, kind) in stored_columns(manifest).items():
        # tf.io.decode_raw does not support uint32. The bytes of int32 are equal, because ids are below 2**31.
        stored = np.dtype(np.int32 if np.dtype(kind) == np.uint32 else kind)
        features[name] = tfds.features.Tensor(shape=shape, dtype=stored, encoding="bytes", doc=_ABOUT[name])
    info = tfds.core.DatasetInfo(
        builder=tfds.core.DatasetIdentity(
            name=_NAME, version=tfds.core.Version("1.0.0"), data_dir=str(directory), module_name=""
        ),
        features=tfds.features.FeaturesDict(features),
        description=f"Rows of {manifest['seq_len']} slots for pretraining, {manifest['objective']}; see manifest.json.",
    )
    info.set_file_format(tfds.core.FileFormat.ARRAY_RECORD)
    info.set_splits(tfds.core.SplitDict(splits))
    info.write_to_directory(directory)
    # Written again with fsync: both files must be on disk before the manifest.
    for name in ("dataset_info.json", "features.json"):
        write_atomic(directory / name, (directory / name).read_bytes())
    for old, new in zip(shards.names, names, strict=True):
        (directory / old).rename(directory / new)
    return dataclasses.replace(shards, names=np.array(names, np.str_))


def _write_tfds(path: Path, rows: Rows) -> dict[str, Any]:
    from tensorflow_datasets.proto import tf_example_pb2

    columns = {name: column for name, column in rows._asdict().items() if column is not None}

    def records() -> Iterator[bytes]:
        for row in range(len(rows.input_ids)):
            example = tf_example_pb2.Example()
            for name, column in columns.items():
                example.features.feature[name].bytes_list.value.append(column[row].tobytes())
            yield example.SerializeToString(deterministic=True)

    return _write_records(path, records())


def _records(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yields the records of ArrayRecord files."""
    from array_record.python import array_record_module

    for path in paths:
        opened = array_record_module.ArrayRecordReader(str(path))
        yield from opened.read_all()
        opened.close()


def _write_records(path: Path, records: Iterable[bytes]) -> dict[str, Any]:
    from array_record.python import array_record_module

    count = 0
    unfinished = path.with_name(path.name + ".tmp")
    try:
        writer = array_record_module.ArrayRecordWriter(str(unfinished), _OPTIONS)
        for record in records:
            writer.write(record)
            count += 1
        writer.close()
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
    except RuntimeError as error:
        unfinished.unlink(missing_ok=True)
        # The library hides the operating system's error in its message. Callers handle that error, e.g. a full disk.
        for number in errno.errorcode:
            if os.strerror(number) in str(error):
                raise OSError(number, os.strerror(number), str(path)) from error
        raise
    unfinished.replace(path)
    return {"rows": count, "bytes": path.stat().st_size, "sha256": sha256(path)}


def _read_tfds(path: Path, columns: Mapping[str, tuple[tuple[int, ...], Any]]) -> Rows:
    from array_record.python import array_record_module
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_pb2

    if not path.exists():  # the library raises a plain RuntimeError for it
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    try:
        opened = array_record_module.ArrayRecordReader(str(path))
        records = opened.read_all()
        opened.close()
        examples = [tf_example_pb2.Example.FromString(record).features.feature for record in records]
    except (RuntimeError, DecodeError) as error:
        raise Corrupt(f"not an ArrayRecord file of examples ({' '.join(str(error).split())})") from error
    expected = {name: [np.dtype(kind).itemsize * math.prod(shape)] for name, (shape, kind) in columns.items()}
    for example in examples:
        sizes = {name: [len(value) for value in feature.bytes_list.value] for name, feature in example.items()}
        if sizes != expected:
            raise Corrupt(f"a record whose features have the sizes {sizes}, expected {expected}")
    arrays = {}
    for name, (shape, kind) in columns.items():
        values = b"".join(example[name].bytes_list.value[0] for example in examples)
        arrays[name] = np.frombuffer(values, kind).reshape(len(examples), *shape)
    return Rows(**arrays)


def write_with_manifest(directory: Path, manifest: dict[str, Any], shards: ShardTable) -> None:
    """Writes the format's own files, the table of shards, SHA256SUMS, and manifest.json last.

    A manifest marks a complete output. It gets the entry `shards`, with the hash of the table.
    """
    shards = finish(directory, manifest, shards)
    table = shards.encode()
    manifest["shards"] = shards.summary(table)
    write_atomic(directory / SHARD_TABLE, table)
    content = json.dumps(manifest, indent=1).encode() + b"\n"
    write_atomic(directory / SUMS, render_sums(directory, shards, content))
    write_atomic(directory / MANIFEST, content)


def render_sums(directory: Path, shards: ShardTable, content: bytes) -> bytes:
    """Makes SHA256SUMS for an output that lacks only manifest.json, which will hold `content`."""
    # The table has the shards' hashes, so only a few small files are read.
    digests = {name: shards.sha256(shard) for shard, name in enumerate(shards.names.tolist())}
    digests[MANIFEST] = hashlib.sha256(content).hexdigest()
    for name in listed_files(directory) - set(digests):
        digests[name] = sha256(directory / name)
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()


def read_sums(directory: Path) -> dict[str, str]:
    """Reads an output's hashes by name.

    Raises:
        UserError: The list is missing or damaged.
    """
    path = directory / SUMS
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"missing {path}; {_COPY_AGAIN}") from None
    return parse_sums(content, str(path))


def parse_sums(content: bytes, place: str) -> dict[str, str]:
    """Parses a SHA256SUMS file into hashes by name.

    Raises:
        UserError: The file is damaged. The message names it as `place`.
    """
    sums = {}
    for number, line in enumerate(content.decode(errors="replace").removesuffix("\n").split("\n"), 1):
        match = _SUM.fullmatch(line)
        if not match or "\ufffd" in line:  # the latter replaces bytes that are not text
            raise UserError(f"damaged {place}: line {number} is not a hash and a name; {_COPY_AGAIN}")
        if match[2].startswith("/") or ".." in match[2].split("/"):
            raise UserError(f"damaged {place}: {match[2]} is outside of the folder; copy it again from the original")
        sums[match[2]] = match[1]
    return sums


def find_damage(directory: Path, listed: Mapping[str, str], on_read: Callable[[int], None]) -> dict[str, str]:
    """Reads every byte, and returns damaged files with their problems. `on_read` gets file sizes.

    Unlisted files are a problem in folders (train, eval, ...), where a reader might take them for shards. Next to the
    manifest they may be a user's notes.
    """
    files = listed_files(directory)
    problems: dict[str, str] = {}
    for name, digest in listed.items():
        if name not in files:
            problems[name] = f"it is missing, and {SUMS} lists it"
        else:
            if sha256(directory / name) != digest:
                problems[name] = f"its sha256 is not that of {SUMS}"
            on_read((directory / name).stat().st_size)
    for name, path in sorted(_paths(directory)):
        link = path.is_symlink()
        if path.is_dir() and not link:
            known = name in PARTS or any(path.iterdir())  # a part may have no rows
        else:
            known = name in listed or ("/" not in name and path.is_file() and not link)
        if not known:
            problems[name] = f"{SUMS} does not list it"
    if MANIFEST not in listed:
        problems.setdefault(SUMS, f"it does not list {MANIFEST}")
    return problems


def listed_files(directory: Path) -> set[str]:
    """Names the files that SHA256SUMS lists: all except itself and files left by an unfinished job."""
    return {name for name, path in _paths(directory) if path.is_file()}


def _paths(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yields files and folders by name, except SHA256SUMS and files left by an unfinished job."""
    for path in directory.rglob("*"):
        name = path.relative_to(directory).as_posix()
        if name not in (SUMS, MARKER) and name.split("/")[0] != "job":
            yield name, path


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
