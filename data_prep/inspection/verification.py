"""Verifies the output of build_examples against its manifest: everything that can be checked without the text."""

import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from bert_jax.array_types import UInt64
from bert_jax.command import UserError
from bert_jax.data.example import Rows, unmasked_ids
from bert_jax.data.manifest import (
    COUNTED,
    COUNTED_IF_PRESENT,
    MANIFEST,
    PARTS,
    Part,
    read_manifest,
    read_unigram_counts,
)
from bert_jax.data.shards import Corrupt, check_sizes, layout_problem
from bert_jax.tokenizer import Tokenizer
from bert_jax.tokenizer import load as load_tokenizer
from data_prep import checksums, formats
from data_prep.fill import row_batches
from data_prep.inspection.row_checks import row_problems
from data_prep.inspection.statistics import PartStatistics, open_masker, with_masks
from data_prep.units import EVAL_KEY_BIT

_REBUILD = "build the examples again"


class Inspection(NamedTuple):
    """An output: its manifest, its tokenizer, and the statistics of its parts."""

    manifest: dict[str, Any]
    tokenizer: Tokenizer
    statistics: dict[Part, PartStatistics]


def verify(directory: Path, progress: Callable[[int], None] = lambda size: None) -> Inspection:
    """Reads every byte of an output and returns what it holds if everything matches its manifest and SHA256SUMS.

    `progress` is called with numbers of bytes: the size of each file when it is hashed, and that of each shard again
    when its rows have been checked. Raises UserError that names the first file that does not match, the reason, and
    how many others there are.
    """
    read_manifest(directory)  # a folder that is not a finished output gets another message than a damaged one
    listed = checksums.read(directory)
    _raise_first(directory, checksums.damage(directory, listed, progress))
    manifest = read_manifest(directory)
    check_sizes(directory, manifest["shards"])
    _check_totals(directory, manifest)
    tokenizer = open_tokenizer(directory, manifest)
    _check_vocabulary(directory / "tokenizer", tokenizer)
    verifier = _ShardVerifier(directory, manifest, tokenizer)
    problems = {}
    for shard in manifest["shards"]:
        if listed.get(shard["name"]) != shard["sha256"]:
            problems[shard["name"]] = f"its sha256 is not that of {MANIFEST}"
        elif problem := verifier.problem(directory / shard["name"], shard):
            problems[shard["name"]] = problem
        progress(shard["bytes"])
    _raise_first(directory, problems)
    verifier.check_counts()
    return Inspection(manifest, tokenizer, verifier.statistics)


def bytes_to_verify(directory: Path) -> int:
    """The sum of the numbers that `verify` passes to `progress`."""
    names = checksums.files(directory)
    sizes = {name: (directory / name).stat().st_size for name in names}
    return sum(sizes.values()) + sum(size for name, size in sizes.items() if name.split("/")[0] in PARTS)


def open_tokenizer(directory: Path, manifest: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer stored with the shards. Raises UserError if the shards were made with another one."""
    tokenizer = load_tokenizer(directory / "tokenizer")
    if tokenizer.content_hash != manifest["tokenizer"]["hash"]:
        raise UserError(f"{directory / 'tokenizer'} is not the tokenizer that made the shards; copy it again")
    return tokenizer


def _raise_first(directory: Path, problems: Mapping[str, str]) -> None:
    if problems:
        name, problem = next(iter(problems.items()))
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        raise UserError(f"damaged {directory / name}: {problem}{more}; copy the folder again, or build it again")


class _ShardVerifier:
    """Checks shards one by one, computes the statistics of the parts, and compares them with the manifest."""

    def __init__(self, directory: Path, manifest: dict[str, Any], tokenizer: Tokenizer) -> None:
        self.statistics: dict[Part, PartStatistics] = {part: PartStatistics(manifest, tokenizer) for part in PARTS}
        self._directory, self._manifest, self._tokenizer = directory, manifest, tokenizer
        self._read = formats.reader(manifest)
        self._masker = open_masker(directory, manifest, tokenizer)
        self._key_ranges: list[tuple[int, int]] = []

    def problem(self, path: Path, shard: Mapping[str, Any]) -> str | None:
        """What is wrong with a shard; None for one that is added to the statistics."""
        try:
            rows = self._read(path)
        except Corrupt as error:
            return str(error)
        if problem := layout_problem(rows, shard["rows"], self._manifest):
            return problem
        for problem, row in row_problems(rows, self._manifest, self._tokenizer):
            return f"row {row} has {problem}"
        part = cast(Part, shard["name"].split("/")[0])
        return self._key_problem(part, rows.sequence_keys[rows.sequence_lengths > 0]) or self._add(part, rows)

    def _add(self, part: Part, rows: Rows) -> str | None:
        """Adds rows to the statistics, with masks recomputed from the seed. Stored masks must equal these."""
        most = self._manifest["masking"]["max_predictions"]
        for batch in row_batches(rows):
            try:
                unmasked = Rows(unmasked_ids(batch), *batch[1:5])
                computed = with_masks(unmasked, self._masker, most)
            except ValueError as error:
                return str(error)
            if batch.masked_positions is not None and not _equal(computed, batch):
                return "static masks that are not those of epoch 0"
            self.statistics[part].add(batch, computed)
        return None

    def _key_problem(self, part: str, keys: UInt64[np.ndarray, "K"]) -> str | None:
        if not len(keys):
            return None
        keys = np.sort(keys)
        first, last = int(keys[0]), int(keys[-1])
        if (np.diff(keys) != 1).any():
            return "sequence keys that do not count up by one"
        if first >> 32 != last >> 32:
            return "sequence keys of two work units"
        if bool(first >> 32 & EVAL_KEY_BIT) != (part == "eval"):
            return f"sequence keys that are not those of {part}"
        self._key_ranges.append((first, last))
        return None

    def check_counts(self) -> None:
        """Raises UserError for a repeated sequence key, and where the manifest does not match the statistics."""
        for (_, last), (first, _) in itertools.pairwise(sorted(self._key_ranges)):
            if first <= last:
                raise UserError(f"sequence key {first} occurs twice in {self._directory}; {_REBUILD}")
        path = self._directory / MANIFEST
        for part, found in self.statistics.items():
            stated = self._manifest["parts"][part]
            for name, value in found.manifest_counts.items():
                if stated.get(name, value) != value:
                    raise UserError(
                        f"{path} states {stated[name]} {name} in {part}, but the shards hold {value}; {_REBUILD}"
                    )
        unigrams = self.statistics["train"].ordinary_unigrams
        if not np.array_equal(read_unigram_counts(self._directory, self._manifest), unigrams):
            counts = self._directory / self._manifest["unigram_counts"]
            raise UserError(f"{counts} does not hold the counts of the shards; {_REBUILD}")


def _equal(rows: Rows, others: Rows) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(rows, others, strict=True))  # type: ignore[arg-type]


def _check_totals(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Raises UserError where a total of the manifest is not the sum over its parts and over what reading skipped."""
    path = directory / MANIFEST
    unread = manifest.get("skipped_reading", {})
    total, parts = manifest["counts"], [manifest["parts"][part] for part in PARTS]
    names = (*COUNTED, *(name for name in COUNTED_IF_PRESENT if name in total))
    stated, *addends = [{name: counts.get(name, 0) for name in names} | counts["skipped"] for counts in (total, *parts)]
    addends.append(unread | {"documents": sum(unread.values())})
    for name in sorted({name for counts in (stated, *addends) for name in counts}):
        found = [counts.get(name, 0) for counts in addends]
        if stated.get(name, 0) != sum(found):
            raise UserError(
                f"{path} states {stated.get(name, 0)} {name} in total, but {' + '.join(map(str, found))} in the parts "
                f"and in reading; {_REBUILD}"
            )
    if total["documents"] != total["used"] + sum(total["skipped"].values()):
        raise UserError(
            f"{path} states {total['documents']} documents, but {total['used']} used and "
            f"{sum(total['skipped'].values())} skipped ones; {_REBUILD}"
        )


def _check_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    """Raises UserError when a vocabulary file, which other programs read, does not match tokenizer.json."""
    with tempfile.TemporaryDirectory() as written:
        tokenizer.save(written)
        for file in Path(written).iterdir():
            if file.suffix in (".txt", ".model") or file.name == "vocab.json":
                stored = folder / file.name
                if not stored.is_file() or stored.read_bytes() != file.read_bytes():
                    raise UserError(
                        f"{stored} does not hold the tokens of the tokenizer next to it; copy the folder again"
                    )
