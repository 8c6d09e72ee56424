"""Reads the manifest of a build_examples output (docs/data_format.md) and its unigram counts."""

import math
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.errors import UserError
from bert_jax.storage.files import INCOMPLETE, incomplete_path, parse_json
from bert_jax.storage.remote import as_address, is_remote

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
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
_NAME = re.compile(r"((train|eval)/)?\w[\w.-]*")
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
    # At most 2**32 rows, because a sequence key has 32 bits for the ordinal in a work unit.
    "shards": [{"name": str, "rows": _Number(int, 0, 2**32), "bytes": _COUNT, "sha256": str}],
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
    for name in [manifest["unigram_counts"], *(shard["name"] for shard in manifest["shards"])]:
        if not _NAME.fullmatch(name):
            raise UserError(f"damaged {path}: {name!r} is not the name of a file in the folder. {AGAIN}")
    return manifest


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
