"""Reads the manifest of a build_examples output (docs/data_format.md), its table of shards and its unigram counts."""

import functools
import hashlib
import math
import re
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from bert_jax.array_types import Int64, UInt8
from bert_jax.errors import UserError
from bert_jax.storage.files import INCOMPLETE, incomplete_path, parse_json
from bert_jax.storage.remote import as_address, is_remote

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
SHARD_TABLE = "shards.arrow"
# The keys of `counts` in the manifest, except `skipped`.
COUNTED = (
    *("documents", "used", "sentences", "source_tokens", "sequences", "rows", "tokens", "predictions"),
    "one_sentence",  # documents of one sentence
)

# left_out are source tokens in no sequence, summed over pairings. random_pairs (only with nsp) have a random B. Words
# are counted unless the masking unit is token; long_words exceed the mask budget of their sequence.
COUNTED_IF_PRESENT = ("left_out", "random_pairs", "words", "long_words")

# How data_prep makes sequences, and the ways that make labelled pairs of segments.
OBJECTIVES = ("nsp", "sop", "full_sentences", "doc_sentences", "single")
PAIRS = ("nsp", "sop")

# The keys of `corruption` in the manifest that are present only if they are above 0.
REARRANGED = ("permute_sentences", "rotate_documents")

Part = Literal["train", "eval"]
PARTS: tuple[Part, ...] = ("train", "eval")

# Names are joined to the folder's path, so a manifest must not be able to name a file outside of it.
_NAME = re.compile(r"\w[\w.-]*")
# All names of a table at once, each with a line end: a check of every name by itself takes ten times as long.
_SHARD_NAMES = re.compile(r"(?:(?:train|eval)/\w[\w.-]*+\n)*+")
AGAIN = "Copy the folder again, or build the examples again"


class _Number(NamedTuple):
    """A number from `least` to `most`, inclusive."""

    kind: type[int] | type[float]
    least: float
    most: float


class _Each(NamedTuple):
    """An object with any keys, whose values all have one layout."""

    inner: Any


class _Maybe(NamedTuple):
    """A value that may be missing."""

    inner: Any


# Bounds are inclusive; math.nextafter turns one into an exclusive bound.
_COUNT = _Number(int, 0, 2**63 - 1)  # numpy's int64
_SHARE = _Number(float, 0, 1)
_WIDTH = _Number(int, 1, 65535)  # positions in a row are uint16
_COUNTS: dict[str, Any] = dict.fromkeys(COUNTED, _COUNT) | {
    "skipped": _Each(_COUNT),
    **dict.fromkeys(COUNTED_IF_PRESENT, _Maybe(_COUNT)),
}
# The values that readers rely on, with their types. A list has one element: the type of all elements.
_LAYOUT = {
    "format": str,
    "objective": str,
    "seq_len": _WIDTH,
    "pack": _WIDTH,
    "masking": {
        "kind": str,
        "max_predictions": _Number(int, 0, 65535),
        "unit": str,
        "rate": _SHARE,
        "split": [_SHARE],
        "random": str,
        "reorder_rate": _SHARE,
        "ngram_max": _Number(int, 1, 65535),
        "span_p": _SHARE,
        "span_max": _Number(int, 1, 65535),
        "words": _Maybe(str),
    },
    "tokenizer": {"hash": str, "vocab_size": _Number(int, 1, 2**32), "lowercase": bool},
    "seed": _COUNT,
    "dupe_factor": _Number(int, 1, 1000),
    "eval_fraction": _Number(float, 0, math.nextafter(1, 0)),
    "short_seq_prob": _SHARE,
    "corruption": dict.fromkeys(("delete_rate", "insert_rate"), _Number(float, 0, 0.5))
    | dict.fromkeys(REARRANGED, _Maybe(_SHARE)),
    "unit_bytes": _Number(int, 1, 2**63 - 1),
    "sources": [{"path": str, "bytes": _COUNT, "weight": _Number(float, math.nextafter(0, 1), 1000)}],
    "reading": {"document": str, "text_field": str, "dedup": bool}
    | dict.fromkeys(("document_separator", "input_format", "newlines"), _Maybe(str)),
    "counts": _COUNTS,
    "skipped_reading": _Each(_COUNT),
    "cleaning": _Maybe(
        [
            {"report": str, "sha256": str, "removed_lines": _COUNT}
            | {name: {"read": _COUNT, "kept": _COUNT} for name in ("documents", "bytes")}
            | dict.fromkeys(("dropped", "refused"), _Each(_COUNT))
        ]
    ),
    "parts": dict.fromkeys(PARTS, _COUNTS | {"filled": _SHARE}),
    "unigram_counts": str,
    "shards": {"table": str, "sha256": str, "count": _COUNT, "bytes": _COUNT},
    "versions": _Each(str),
}


def read_manifest(directory: Path) -> dict[str, Any]:
    """Reads the manifest of a finished build_examples output.

    Raises:
        UserError: The output is remote, unfinished or missing, or its manifest is invalid.
    """
    path = directory / MANIFEST
    if is_remote(directory):
        raise UserError(
            f"{as_address(directory)} is in an object store, but shards are read from a local disk. Copy them: "
            "bert-jax copy-examples --input ADDRESS --output DIR (for pretraining, "
            "--config.data.cache_dir=DIR copies them, and with --config.data.cache_bytes=8e9 streams them)"
        )
    if directory.name.endswith(INCOMPLETE) or (not path.exists() and incomplete_path(directory).exists()):
        finished = directory.name.removesuffix(INCOMPLETE)
        raise UserError(
            f"{directory.parent / finished} is not finished: {finished}{INCOMPLETE} exists. Run the same "
            "bert-jax build-examples command again; it resumes where it stopped"
        )
    # Nothing was ever written here: neither a finished output nor an unfinished one next to it.
    if not path.exists():
        raise UserError(f"no {MANIFEST} in {directory}. Give the output folder of bert-jax build-examples")
    return parse_manifest(path.read_bytes(), str(path))


def parse_manifest(content: bytes, path: str) -> dict[str, Any]:
    """Parses a manifest. Raises UserError, which names `path`, if it is invalid or has another version."""
    # The version comes first, because another version may have another layout.
    manifest = parse_json(content, path)
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema_version {version!r}, but this version of bert_jax reads {SCHEMA_VERSION}. "
            "Build the examples again, or use the version that wrote them"
        )
    if problem := _problem(manifest, _LAYOUT, ""):
        raise UserError(f"damaged {path}: {problem}. {AGAIN}")
    for name in (manifest["unigram_counts"], manifest["shards"]["table"]):
        if not _NAME.fullmatch(name):
            raise UserError(f"damaged {path}: {name!r} is not the name of a file in the folder. {AGAIN}")
    return manifest


_SHA256 = pa.binary(32)
_TABLE_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("sha256", _SHA256, nullable=False),
    ]
)


@dataclass(frozen=True, eq=False)
class ShardTable:
    """The shards of an output or of one part, in order. An output with 3 TB of text has tens of thousands of shards."""

    names: np.ndarray  # [n] of str, such as train/shard-00000.arrow
    rows: Int64[np.ndarray, "n"]
    bytes: Int64[np.ndarray, "n"]
    digests: UInt8[np.ndarray, "n 32"]  # sha256

    @staticmethod
    def of_entries(entries: Iterable[Mapping[str, Any]]) -> "ShardTable":
        """Makes a table of shards given by name, rows, bytes and sha256 (hexadecimal)."""
        entries = list(entries)
        digests = b"".join(bytes.fromhex(entry["sha256"]) for entry in entries)
        return ShardTable(
            np.array([entry["name"] for entry in entries], np.str_),
            np.array([entry["rows"] for entry in entries], np.int64),
            np.array([entry["bytes"] for entry in entries], np.int64),
            np.frombuffer(digests, np.uint8).reshape(-1, 32),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, part: Part) -> "ShardTable":
        """Selects the shards of one part."""
        return self.select(np.strings.startswith(self.names, f"{part}/"))

    def select(self, index: np.ndarray) -> "ShardTable":
        """Selects shards by a mask, or puts them in the order of their numbers."""
        return ShardTable(self.names[index], self.rows[index], self.bytes[index], self.digests[index])

    def sha256(self, shard: int) -> str:
        """A shard's hash in hexadecimal digits."""
        return self.digests[shard].tobytes().hex()

    def encode(self) -> bytes:
        """Encodes the table as an Arrow IPC file with one record batch."""
        digests = pa.Array.from_buffers(_SHA256, len(self), [None, pa.py_buffer(self.digests.tobytes())])
        columns = [pa.array(self.names.tolist(), pa.string()), pa.array(self.rows), pa.array(self.bytes), digests]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, _TABLE_SCHEMA) as writer:
            writer.write_batch(pa.record_batch(columns, schema=_TABLE_SCHEMA))
        return sink.getvalue().to_pybytes()

    def summary(self, content: bytes) -> dict[str, Any]:
        """The manifest's entry for the table, which `content` encodes."""
        digest = hashlib.sha256(content).hexdigest()
        return {"table": SHARD_TABLE, "sha256": digest, "count": len(self), "bytes": int(self.bytes.sum())}


def read_shard_table(directory: Path, manifest: Mapping[str, Any]) -> ShardTable:
    """Reads the table of an output's shards.

    Raises:
        UserError: The file is missing, or is not the one that the manifest describes.
    """
    path = directory / manifest["shards"]["table"]
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"missing {path}. {AGAIN}") from None
    return parse_shard_table(content, manifest, str(path))


def parse_shard_table(content: bytes, manifest: Mapping[str, Any], path: str) -> ShardTable:
    """Parses a table of shards. Raises UserError, which names `path`, if it does not match the manifest."""
    stated = manifest["shards"]
    if hashlib.sha256(content).hexdigest() != stated["sha256"]:
        raise UserError(f"damaged {path}: its sha256 is not that of {MANIFEST}. {AGAIN}")
    table = _parse_table(content)
    if isinstance(table, str):
        raise UserError(f"damaged {path}: {table}. {AGAIN}")
    return table


# A process opens several parts of an output, and each of them reads the table.
@functools.lru_cache(maxsize=4)
def _parse_table(content: bytes) -> ShardTable | str:
    """Returns the table, or describes what is wrong with it."""
    try:
        reader = pa.ipc.open_file(pa.BufferReader(content))
        if reader.schema != _TABLE_SCHEMA or reader.num_record_batches != 1:
            return "it is not a table of name, rows, bytes and sha256 in one record batch"
        batch = reader.get_batch(0)
        batch.validate(full=True)
        names = batch.column(0).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        return f"not an Arrow IPC file ({' '.join(str(error).split())})"
    # A name with a line end in it would pass as two names.
    lines = "".join(f"{name}\n" for name in names)
    if not _SHARD_NAMES.fullmatch(lines) or lines.count("\n") != len(names):
        name = next(name for name in names if not _SHARD_NAMES.fullmatch(f"{name}\n") or "\n" in name)
        return f"{name!r} is not the name of a file in the folder"
    rows, sizes = (batch.column(index).to_numpy() for index in (1, 2))
    # At most 2**32 rows, because a sequence key has 32 bits for the ordinal in a work unit.
    if ((rows < 0) | (rows > 2**32) | (sizes < 0)).any():
        return "a shard has an impossible number of rows or bytes"
    digests = np.frombuffer(batch.column(3).buffers()[1], np.uint8, 32 * len(rows)).reshape(-1, 32)
    return ShardTable(np.array(names, np.str_), rows, sizes, digests)


def read_unigram_counts(directory: Path, manifest: Mapping[str, Any]) -> Int64[np.ndarray, "V"]:
    """Reads how often every id occurs in the training rows. Raises UserError for a missing or damaged file."""
    path, size = directory / manifest["unigram_counts"], manifest["tokenizer"]["vocab_size"]
    try:
        counts = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"missing {path}. {AGAIN}") from None
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:  # from a damaged header
        raise UserError(f"damaged {path} ({error}). {AGAIN}") from error
    if not isinstance(counts, np.ndarray) or counts.dtype != np.int64 or counts.shape != (size,):
        raise UserError(f"damaged {path}: not an int64[{size}] array of counts. {AGAIN}")
    return counts


def _problem(value: Any, layout: Any, path: str) -> str | None:
    """Describes the first value that is missing or does not match the layout, or returns None."""
    match layout:
        case _Maybe(inner):
            return _problem(value, inner, path)
        case _Number(kind, least, most):
            # In Python, True is an int. In JSON, 1 may stand for 1.0.
            number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
            return None if number and least <= value <= most else f"{path} is {value!r}"
        # Unknown keys pass, so that a manifest may gain keys without a new version.
        case dict() | _Each():
            if not isinstance(value, dict):
                return f"{path} is not an object"
            inner = dict.fromkeys(value, layout.inner) if isinstance(layout, _Each) else layout
            for key, wanted in inner.items():
                name = f"{path}.{key}" if path else key
                if key in value:
                    if problem := _problem(value[key], wanted, name):
                        return problem
                elif not isinstance(wanted, _Maybe):
                    return f"{name} is missing"
            return None
        case list():
            if not isinstance(value, list):
                return f"{path} is not a list"
            problems = (_problem(element, layout[0], f"{path}[{i}]") for i, element in enumerate(value))
            return next((problem for problem in problems if problem), None)
    return None if isinstance(value, layout) else f"{path} is {value!r}"
