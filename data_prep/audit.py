"""Checks a build_examples output against its manifest: all that can be told without the text it was made of."""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from bert_jax.array_types import Int64, UInt64
from bert_jax.command import UserError
from bert_jax.data.example import Rows
from bert_jax.data.manifest import COUNTED, MANIFEST, PAIRS, PARTS, Part, read_manifest, read_unigram_counts
from bert_jax.data.shards import Corrupt, check_sizes, layout_problem
from bert_jax.tokenizer import Tokenizer
from bert_jax.tokenizer import load as load_tokenizer
from data_prep import checksums, formats
from data_prep.figures import Figures, masked, masker_of, pieces, truth
from data_prep.lengths import summarise

_EVAL_KEY = 1 << 63  # keys of eval have this bit, those of train have not


class Verified(NamedTuple):
    """An output that is as its manifest says, and what its parts hold."""

    manifest: dict[str, Any]
    tokenizer: Tokenizer
    figures: dict[Part, Figures]


def verify(directory: Path, progress: Callable[[int], None] = lambda size: None) -> Verified:
    """Reads every byte of an output, and returns what it holds when all is as its manifest and SHA256SUMS say.

    `progress` is called with bytes: each byte of a file counts once when it is hashed, and each of a shard once more
    when its rows have been looked at. Raises UserError naming the first file that is not as it should be and why, and
    how many more there are.
    """
    read_manifest(directory)  # tells a folder that is no finished output from one that is damaged
    listed = checksums.read(directory)
    _raise(directory, checksums.damage(directory, listed, progress))
    manifest = read_manifest(directory)
    shards = manifest["shards"]
    check_sizes(directory, shards)
    _check_sums(directory, manifest)
    tokenizer = tokenizer_of(directory, manifest)
    _check_vocabulary(directory / "tokenizer", tokenizer)
    counter = _Counter(directory, manifest, tokenizer)
    read = formats.reader(manifest)
    problems = {}
    for shard in shards:
        if listed.get(shard["name"]) != shard["sha256"]:
            problems[shard["name"]] = f"its sha256 is not that of {MANIFEST}"
        elif problem := _shard_problem(directory / shard["name"], read, shard, manifest, tokenizer, counter):
            problems[shard["name"]] = problem
        progress(shard["bytes"])
    _raise(directory, problems)
    counter.check(directory)
    return Verified(manifest, tokenizer, counter.figures)


def bytes_to_verify(directory: Path) -> int:
    """How many bytes `verify` will tell its `progress`."""
    names = checksums.files(directory)
    sizes = {name: (directory / name).stat().st_size for name in names}
    return sum(sizes.values()) + sum(size for name, size in sizes.items() if name.split("/")[0] in PARTS)


def _raise(directory: Path, problems: Mapping[str, str]) -> None:
    if problems:
        name, problem = next(iter(problems.items()))
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        raise UserError(f"damaged {directory / name}: {problem}{more}; copy the folder again, or build it again")


def row_problems(rows: Rows, manifest: dict[str, Any], tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """What is wrong with rows of the right layout, and the first row that has it (docs/data_format.md, guarantees)."""
    ids, length = rows.input_ids, rows.input_ids.shape[1]
    lengths = rows.sequence_lengths.astype(np.int64)
    firsts, labels = rows.first_segment_lengths.astype(np.int64), rows.next_sentence_labels
    present = lengths > 0
    ends = np.cumsum(lengths, axis=1)
    pairs = manifest["objective"] in PAIRS
    in_range = np.clip(ends - 1, 0, length - 1)
    starts = np.clip(ends - lengths, 0, length - 1)
    row = np.arange(len(ids))[:, None]
    filled = np.arange(length) < ends[:, -1:]
    # The original scripts may put any id in place of a token, the pad id too.
    before = truth(rows) if manifest["imported"] else ids
    # In GPT-2's vocabulary one token pads, and begins and ends sequences.
    own_padding = tokenizer.pad_id not in (tokenizer.cls_id, tokenizer.sep_id)
    splits = np.clip(ends - lengths + firsts - 1, 0, length - 1)
    checks = {
        "an id outside of the vocabulary": (ids >= tokenizer.vocab_size).any(axis=1),
        "sequences longer than the row": ends[:, -1] > length,
        "no sequence": ~present[:, 0],
        "a sequence that does not begin with [CLS]": (present & (ids[row, starts] != tokenizer.cls_id)).any(axis=1),
        "a sequence that does not end with [SEP]": (present & (ids[row, in_range] != tokenizer.sep_id)).any(axis=1),
        "a segment A that does not end with [SEP]": (present & (ids[row, splits] != tokenizer.sep_id)).any(axis=1),
        "padding before the end of a sequence": ((before == tokenizer.pad_id) & filled & own_padding).any(axis=1),
        "ids after the last sequence": ((ids != tokenizer.pad_id) & ~filled).any(axis=1),
        "segment lengths that do not fit": (
            present & ((firsts < 3) | (firsts > lengths - 2 if pairs else firsts != lengths))
        ).any(axis=1),
        "a next-sentence label out of place": (
            present & ((labels != 0) & (labels != 1) if pairs else labels != -1)
        ).any(axis=1),
    }
    if rows.masked_positions is not None:
        never = tokenizer.special_ids
        if manifest["imported"]:  # they may predict [UNK]
            never = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
        checks |= _mask_checks(rows, tokenizer.vocab_size, never, ends[:, -1])
    for problem, bad in checks.items():
        if bad.any():
            yield problem, int(np.flatnonzero(bad)[0])


def _mask_checks(
    rows: Rows, vocab_size: int, never: tuple[int, ...], ends: Int64[np.ndarray, "R"]
) -> dict[str, np.ndarray]:
    assert rows.masked_positions is not None and rows.masked_ids is not None and rows.masked_counts is not None
    positions, counts = rows.masked_positions.astype(np.int64), rows.masked_counts.astype(np.int64)
    real = np.arange(positions.shape[1]) < counts[:, None]
    special = np.isin(rows.masked_ids, never)
    return {
        "a masked position outside of the sequences": (real & (positions >= ends[:, None])).any(axis=1),
        "masked positions that do not ascend": (real[:, 1:] & (np.diff(positions, axis=1) <= 0)).any(axis=1),
        "more predictions than fit": counts > positions.shape[1],
        "a special token that is predicted": (real & special).any(axis=1),
        "a masked id outside of the vocabulary": (rows.masked_ids >= vocab_size).any(axis=1),
        "a filler that is not 0": (~real & ((positions != 0) | (rows.masked_ids != 0))).any(axis=1),
    }


def _shard_problem(
    path: Path,
    read: formats.ReadShard,
    shard: dict[str, Any],
    manifest: dict[str, Any],
    tokenizer: Tokenizer,
    counter: "_Counter",
) -> str | None:
    try:
        rows = read(path)
    except Corrupt as error:
        return str(error)
    if problem := layout_problem(rows, shard["rows"], manifest):
        return problem
    for problem, row in row_problems(rows, manifest, tokenizer):
        return f"row {row} has {problem}"
    return counter.add(cast(Part, shard["name"].split("/")[0]), rows)


class _Counter:
    """Counts again what the manifest says, and sees that no sequence key comes twice."""

    def __init__(self, directory: Path, manifest: dict[str, Any], tokenizer: Tokenizer) -> None:
        self.figures: dict[Part, Figures] = {part: Figures(manifest, tokenizer) for part in PARTS}
        self._manifest = manifest
        self._masker = masker_of(directory, manifest, tokenizer)
        self._key_ranges: list[tuple[int, int]] = []

    def add(self, part: Part, rows: Rows) -> str | None:
        if problem := self._key_problem(part, rows.sequence_keys[rows.sequence_lengths > 0]):
            return problem
        most = self._manifest["masking"]["max_predictions"]
        for some in pieces(rows):
            try:
                drawn = masked(Rows(truth(some), *some[1:5]), self._masker, most) if self._masker else some
            except ValueError as error:
                return str(error)
            if some.masked_positions is not None and not _equal(drawn, some):
                return "static masks that are not those of epoch 0"
            self.figures[part].add(drawn)
        return None

    def _key_problem(self, part: str, keys: UInt64[np.ndarray, "K"]) -> str | None:
        if not len(keys):
            return None
        keys = np.sort(keys)
        if (np.diff(keys) != 1).any():
            return "sequence keys that do not count up by one"
        if keys[0] >> np.uint64(32) != keys[-1] >> np.uint64(32):
            return "sequence keys of two work units"
        if (int(keys[0]) >= _EVAL_KEY) != (part == "eval"):
            return f"sequence keys that are not those of {part}"
        self._key_ranges.append((int(keys[0]), int(keys[-1])))
        return None

    def check(self, directory: Path) -> None:
        """Raises UserError where the manifest's counts are not what was counted."""
        ranges = sorted(self._key_ranges)
        for (_, last), (first, _) in itertools.pairwise(ranges):
            if first <= last:
                raise UserError(f"sequence key {first} comes twice in {directory}; build the examples again")
        for part, figures in self.figures.items():
            said = self._manifest["parts"][part]
            for name, counted in {
                "sequences": figures.sequences,
                "rows": figures.rows,
                "tokens": figures.tokens,
                "predictions": figures.predicted,
            }.items():
                if said[name] != counted:
                    raise UserError(
                        f"{directory / MANIFEST} says {said[name]} {name} in {part}, the shards hold {counted}; "
                        "build the examples again"
                    )
            share = round(figures.filled_share, 6)
            if said.get("filled", share) != share:
                raise UserError(
                    f"{directory / MANIFEST} says that {said['filled']} of the slots of {part} are filled, and {share} "
                    "are; build the examples again"
                )
            if said.get("lengths", summarise(figures.lengths)) != summarise(figures.lengths):
                raise UserError(
                    f"the lengths of {part} in {directory / MANIFEST} are not those of the shards; build again"
                )
        unigrams = self.figures["train"].ordinary_unigrams
        if not np.array_equal(read_unigram_counts(directory, self._manifest), unigrams):
            path = directory / self._manifest["unigram_counts"]
            raise UserError(f"{path} is not what the shards hold; build the examples again")


def _equal(rows: Rows, others: Rows) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(rows, others, strict=True))  # type: ignore[arg-type]


def _check_sums(directory: Path, manifest: dict[str, Any]) -> None:
    """Raises UserError where the manifest's counts are not the sums of its parts' and of what reading skipped."""
    unread = manifest.get("skipped_reading", {})
    whole, parts = manifest["counts"], [manifest["parts"][part] for part in PARTS]
    skipped = [*(part["skipped"] for part in parts), unread]
    for name, said, found in [
        *((name, whole[name], [part[name] for part in parts]) for name in COUNTED if name != "documents"),
        ("documents", whole["documents"], [*(part["documents"] for part in parts), sum(unread.values())]),
        *(
            (reason, whole["skipped"].get(reason, 0), [counted.get(reason, 0) for counted in skipped])
            for reason in sorted({reason for counted in (whole["skipped"], *skipped) for reason in counted})
        ),
    ]:
        if said != sum(found):
            raise UserError(
                f"{directory / MANIFEST} says {said} {name} in all, and {' + '.join(map(str, found))} in the parts and "
                "in reading; build the examples again"
            )
    if whole["documents"] != whole["used"] + sum(whole["skipped"].values()):
        raise UserError(
            f"{directory / MANIFEST} says {whole['documents']} documents, {whole['used']} of them used and "
            f"{sum(whole['skipped'].values())} skipped; build the examples again"
        )


def _check_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    """Raises UserError when one of a tokenizer's files, which other programs read, is not of the others."""
    with tempfile.TemporaryDirectory() as written:
        tokenizer.save(written)
        for file in Path(written).iterdir():
            if file.suffix in (".txt", ".model") or file.name == "vocab.json":
                beside = folder / file.name
                if not beside.is_file() or beside.read_bytes() != file.read_bytes():
                    raise UserError(
                        f"{beside} does not hold the tokens of the tokenizer beside it; copy the folder again"
                    )


def tokenizer_of(directory: Path, manifest: dict[str, Any]) -> Tokenizer:
    """The tokenizer kept with the shards. Raises UserError when it is not the one that made them."""
    tokenizer = load_tokenizer(directory / "tokenizer")
    if tokenizer.content_hash != manifest["tokenizer"]["hash"]:
        raise UserError(f"{directory / 'tokenizer'} is not the tokenizer that made the shards; copy it again")
    return tokenizer
