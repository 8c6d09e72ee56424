"""The manifest of a build_examples output (docs/data_format.md), and the unigram counts beside it."""

import json
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.command import UserError
from bert_jax.files import INCOMPLETE, incomplete, is_remote, read_json

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
COUNTED = ("documents", "used", "sentences", "source_tokens", "sequences", "rows", "tokens", "predictions")

# The objectives whose sequences are labelled pairs of segments.
PAIRS = ("nsp", "sop")

Part = Literal["train", "eval"]
PARTS: tuple[Part, ...] = ("train", "eval")

_NAME = re.compile(r"((train|eval)/)?\w[\w.-]*")
_AGAIN = "copy the folder again, or build the examples again"
_COUNTS: dict[str, type] = {name: int for name in COUNTED if name != "used"} | {"skipped": dict}
# What every reader may count on: the kind of each value, and of each element of a list.
_LAYOUT = {
    "format": str,
    "imported": bool,
    "objective": str,
    "seq_len": int,
    "pack": int,
    "masking": {"kind": str, "unit": str, "rate": (int, float), "max_predictions": int},
    "tokenizer": {"hash": str, "vocab_size": int, "lowercase": bool},
    "seed": int,
    "dupe_factor": int,
    "sources": [{"path": str, "bytes": int}],
    "counts": _COUNTS,
    "parts": dict.fromkeys(PARTS, _COUNTS),
    "unigram_counts": str,
    "shards": [{"name": str, "rows": int, "bytes": int, "sha256": str}],
}


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a finished build_examples output. Raises UserError when there is none to be read."""
    path = directory / MANIFEST
    if is_remote(directory):
        raise UserError(
            f"{directory} is in an object store, and shards are read from a local disk; bring them here: "
            "python -m data_prep.copy_examples --input ADDRESS --output DIR (in pretraining, "
            "--config.data.cache_dir=DIR does so by itself)"
        )
    if directory.name.endswith(INCOMPLETE) or (not path.exists() and incomplete(directory).exists()):
        finished = directory.name.removesuffix(INCOMPLETE)
        raise UserError(
            f"{directory.parent / finished} is not finished ({finished}{INCOMPLETE} is there): "
            "run the same data_prep.build_examples command again, it goes on where it stopped"
        )
    if not path.exists():
        raise UserError(f"no {MANIFEST} in {directory}; give the output folder of data_prep.build_examples")
    return check_manifest(read_json(path), str(path))


def parse_manifest(content: bytes, place: str) -> dict[str, Any]:
    """The manifest in a file that lies elsewhere. Raises UserError, naming its place, for one that cannot be used."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not valid JSON ({error}). Make or fetch it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{place} is not a JSON object. Make or fetch it again")
    return check_manifest(values, place)


def check_manifest(manifest: dict[str, Any], path: str) -> dict[str, Any]:
    """The manifest with what early ones lack. Raises UserError for another version, and for a damaged one."""
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema_version {version!r}, this program reads {SCHEMA_VERSION}; "
            "build the examples again, or use the program version that wrote them"
        )
    manifest.setdefault("format", "arrow")  # the only one there was
    manifest.setdefault("imported", False)
    if problem := _problem(manifest, _LAYOUT, ""):
        raise UserError(f"damaged {path}: {problem}; {_AGAIN}")
    names = [shard[key] for shard in manifest["shards"] for key in ("name", "stem") if key in shard]
    for name in [manifest["unigram_counts"], *names]:
        if not _NAME.fullmatch(name):
            raise UserError(f"damaged {path}: {name!r} is no name of a file in the folder; {_AGAIN}")
    for counts in (manifest["counts"], *manifest["parts"].values()):
        counts.setdefault("used", counts["documents"] - sum(counts["skipped"].values()))  # the first ones had it not
    return manifest


def read_unigram_counts(directory: Path, manifest: Mapping[str, Any]) -> Int64[np.ndarray, "V"]:
    """How often each id stands in the rows of train. Raises UserError for a file that is missing or damaged."""
    path, size = directory / manifest["unigram_counts"], manifest["tokenizer"]["vocab_size"]
    try:
        counts = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"missing {path}; {_AGAIN}") from None
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:  # of a damaged header
        raise UserError(f"damaged {path} ({error}); {_AGAIN}") from error
    if not isinstance(counts, np.ndarray) or counts.dtype != np.int64 or counts.shape != (size,):
        raise UserError(f"damaged {path}: not int64[{size}], a count for each id; {_AGAIN}")
    return counts


def _problem(value: Any, layout: Any, where: str) -> str | None:
    """What of a value is missing or of another kind than the layout says, or None."""
    if isinstance(layout, dict):
        if not isinstance(value, dict):
            return f"{where} is no object"
        for key, inner in layout.items():
            name = f"{where}.{key}" if where else key
            if key not in value:
                return f"no {name}"
            if problem := _problem(value[key], inner, name):
                return problem
        return None
    if isinstance(layout, list):
        if not isinstance(value, list):
            return f"{where} is no list"
        problems = (_problem(element, layout[0], f"{where}[{i}]") for i, element in enumerate(value))
        return next((problem for problem in problems if problem), None)
    return None if isinstance(value, layout) else f"{where} is {value!r}"
