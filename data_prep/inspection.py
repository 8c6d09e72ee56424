"""What an output of build_examples holds, whether it is intact, and how both are shown (docs/data_format.md).

Read it from the top: PartStatistics counts the rows of a part; `verify` checks every byte and every row of an output,
and counts the rows; `document` is what inspect-shards shows.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from bert_jax.array_types import Int64, Integer, UInt64
from bert_jax.data.example import Rows, unmasked_ids
from bert_jax.data.manifest import (
    COUNTED,
    COUNTED_IF_PRESENT,
    MANIFEST,
    PAIRS,
    PARTS,
    Part,
    read_manifest,
    read_unigram_counts,
)
from bert_jax.data.masking.masker import Masker
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.data.shards import Corrupt, Dataset, check_sizes, layout_problem
from bert_jax.errors import UserError
from bert_jax.reporting.document import (
    Bar,
    Charts,
    Document,
    Excerpt,
    Excerpts,
    Fragment,
    Histogram,
    Panel,
    Panels,
    Section,
    Settings,
    Table,
    percent,
)
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.tokenizer import load as load_tokenizer
from data_prep import copy, formats
from data_prep.sequences import RANDOM_SEGMENT
from data_prep.units import EVAL_KEY_BIT, summarise
from data_prep.worker import mask_rows, row_batches

PROGRAM = "bert-jax inspect-shards"
REPLACEMENTS = ("[MASK]", "random", "kept")
NO_LABEL = -1
_LABELS = {"nsp": {0: "B is next", 1: "B is random"}, "sop": {0: "in order", 1: "swapped"}}
_REBUILD = "build the examples again"
_PAGE_ROWS = 6
_TOKENS = 20  # of the most frequent ones
# WordPiece vocabularies do not say which marks follow a word without a space.
_NO_SPACE_BEFORE = set(",.;:!?)]}%”’'…")


class PartStatistics:
    """Counts over the rows of one part, as passed to `add`. With dynamic masking the masks are those of epoch 0.

    rows, positions          number of rows, and of their positions
    lengths      i64[T+1]    sequences by their number of tokens
    filled       i64[T+1]    rows by their number of tokens that are not padding
    packed       i64[S+1]    rows by their number of sequences
    labels                   sequences by next-sentence label (0, 1, -1)
    predictions  i64[M+1]    sequences by their number of predicted tokens
    replaced     i64[3]      predicted tokens by what the model sees in their place: REPLACEMENTS
    unigrams     i64[V]      tokens before masking, special tokens included
    words, long_words        words, and those of them that are longer than the mask budget of their sequence; 0 where
                             single tokens are masked
    """

    def __init__(self, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        width, most = manifest["seq_len"], manifest["masking"]["max_predictions"]
        self.rows = self.positions = self.words = self.long_words = 0
        self.lengths, self.filled = np.zeros(width + 1, np.int64), np.zeros(width + 1, np.int64)
        self.packed = np.zeros(manifest["pack"] + 1, np.int64)
        self.labels = dict.fromkeys((0, 1, NO_LABEL), 0)
        self.predictions = np.zeros(most + 1, np.int64)
        self.replaced = np.zeros(len(REPLACEMENTS), np.int64)
        self.unigrams = np.zeros(tokenizer.vocab_size, np.int64)
        self._tokenizer, self._pairs = tokenizer, manifest["objective"] == "nsp"
        rule = MaskingRule.from_manifest(manifest["masking"]) if manifest["masking"]["unit"] != "token" else None
        self._word_counter = Masker(tokenizer, rule, 0) if rule else None

    def add(self, rows: Rows, masked: Rows) -> None:
        """Counts stored rows, and their masks in `masked` (the same rows, or those of `with_masks`)."""
        lengths = rows.sequence_lengths.astype(np.int64)
        present = lengths > 0
        self.rows += len(lengths)
        self.positions += rows.input_ids.size
        self.lengths += np.bincount(lengths[present], minlength=len(self.lengths))
        self.filled += np.bincount(lengths.sum(axis=1), minlength=len(self.filled))
        self.packed += np.bincount(present.sum(axis=1), minlength=len(self.packed))
        for label in self.labels:
            self.labels[label] += int((rows.next_sentence_labels[present] == label).sum())
        # Infilling shortens sequences, so the ends are those of the masked rows.
        self._add_masks(masked, np.cumsum(masked.sequence_lengths.astype(np.int64), axis=1), present)
        original = unmasked_ids(rows)
        if self._word_counter:
            words, long_words = self._word_counter.count_words(Rows(original, *rows[1:5]))
            self.words += words
            self.long_words += long_words
        filled = np.arange(rows.input_ids.shape[1]) < lengths.sum(axis=1)[:, None]
        self.unigrams += np.bincount(original[filled], minlength=len(self.unigrams))

    def _add_masks(self, rows: Rows, ends: Int64[np.ndarray, "R S"], present: np.ndarray) -> None:
        positions = rows.masked_positions.astype(np.int64)  # type: ignore[union-attr]
        real = np.arange(positions.shape[1]) < rows.masked_counts[:, None].astype(np.int64)  # type: ignore[index]
        row, column = np.nonzero(real)
        predicted, labels = positions[row, column], rows.masked_ids[row, column]  # type: ignore[index]
        seen = rows.input_ids[row, predicted]
        masked, kept = seen == self._tokenizer.mask_id, seen == labels
        self.replaced += [int(masked.sum()), int((~masked & ~kept).sum()), int((~masked & kept).sum())]

        sequence = (ends[row] <= predicted[:, None]).sum(axis=1)
        counts = np.bincount(row * ends.shape[1] + sequence, minlength=ends.size)
        self.predictions += np.bincount(counts[present.reshape(-1)], minlength=len(self.predictions))

    @property
    def tokens(self) -> int:
        """Positions that are not padding."""
        return int(self.lengths @ np.arange(len(self.lengths)))

    @property
    def predicted(self) -> int:
        return int(self.replaced.sum())

    @property
    def ordinary_unigrams(self) -> Int64[np.ndarray, "V"]:
        """Token counts in which special tokens are 0: what unigram_counts.npy holds for train."""
        counts = self.unigrams.copy()
        counts[list(self._tokenizer.special_ids)] = 0
        return counts

    @property
    def unknown(self) -> int:
        """The number of [UNK] in the text; 0 for a vocabulary whose [UNK] also begins and ends sequences."""
        return int(self.unigrams[self._tokenizer.unk_id]) if self._tokenizer.has_unknown else 0

    @property
    def text_tokens(self) -> int:
        """The tokens without [CLS], [SEP] and similar ones; [UNK] counts."""
        return int(self.ordinary_unigrams.sum()) + self.unknown

    @property
    def manifest_counts(self) -> dict[str, Any]:
        """What the manifest states about the rows of a part."""
        return {
            "sequences": int(self.lengths.sum()),
            "rows": self.rows,
            "tokens": self.tokens,
            "predictions": self.predicted,
            "filled": round(self.tokens / max(self.positions, 1), 6),
            "lengths": summarise(self.lengths),
            **({"words": self.words, "long_words": self.long_words} if self._word_counter else {}),
            **({"random_pairs": self.labels[RANDOM_SEGMENT]} if self._pairs else {}),
        }


def with_masks(rows: Rows, masker: Masker, max_predictions: int) -> Rows:
    """Rows with the masks of epoch 0: the stored ones of static masking, else those that a loader would choose."""
    return rows if rows.masked_positions is not None else mask_rows(rows, masker, max_predictions)


def open_masker(directory: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> Masker:
    """The masker of an output."""
    rule = MaskingRule.from_manifest(manifest["masking"])
    counts = read_unigram_counts(directory, manifest) if rule.random == "unigram" else None
    return Masker(tokenizer, rule, manifest["seed"], counts)


def open_tokenizer(directory: Path, manifest: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer stored with the shards. Raises UserError if the shards were made with another one."""
    tokenizer = load_tokenizer(directory / "tokenizer")
    if tokenizer.content_hash != manifest["tokenizer"]["hash"]:
        raise UserError(f"{directory / 'tokenizer'} is not the tokenizer that made the shards; copy it again")
    return tokenizer


def measure(
    directory: Path, part: Part, manifest: Mapping[str, Any], tokenizer: Tokenizer, on_rows: Callable[[int], None]
) -> PartStatistics:
    """The statistics of a part, computed from its shards. Raises UserError for a shard that cannot be read."""
    dataset = Dataset(directory, part, manifest, formats.reader(manifest))
    statistics, masker = PartStatistics(manifest, tokenizer), open_masker(directory, manifest, tokenizer)
    for shard in range(len(dataset.shards)):
        for rows in row_batches(dataset.shard_rows(shard)):
            statistics.add(rows, with_masks(rows, masker, dataset.max_predictions))
            on_rows(len(rows.input_ids))
    return statistics


class Inspection(NamedTuple):
    """An output: its manifest, its tokenizer, and the statistics of its parts."""

    manifest: dict[str, Any]
    tokenizer: Tokenizer
    statistics: dict[Part, PartStatistics]


def verify(directory: Path, progress: Callable[[int], None] = lambda size: None) -> Inspection:
    """Reads every byte of an output and returns what it holds if everything matches its manifest and SHA256SUMS.

    Args:
        directory: The output.
        progress: Called with numbers of bytes, which add up to `bytes_to_verify`.

    Raises:
        UserError: Something does not match. The message names the first file, the reason, and how many others there
            are.
    """
    read_manifest(directory)  # a folder that is not a finished output gets another message than a damaged one
    listed = copy.read(directory)
    _raise_first(directory, copy.damage(directory, listed, progress))
    manifest = read_manifest(directory)
    check_sizes(directory, manifest["shards"])
    _check_totals(directory / MANIFEST, manifest)
    tokenizer = open_tokenizer(directory, manifest)
    statistics: dict[Part, PartStatistics] = {part: PartStatistics(manifest, tokenizer) for part in PARTS}
    masker, read = open_masker(directory, manifest, tokenizer), formats.reader(manifest)
    key_ranges: list[tuple[int, int]] = []
    problems = {}
    for shard in manifest["shards"]:
        part = cast(Part, shard["name"].split("/")[0])
        try:
            if listed.get(shard["name"]) != shard["sha256"]:
                raise Corrupt(f"its sha256 is not that of {MANIFEST}")
            rows = read(directory / shard["name"])
            if problem := layout_problem(rows, shard["rows"], manifest):
                raise Corrupt(problem)
            for problem, row in row_problems(rows, manifest, tokenizer):
                raise Corrupt(f"row {row} has {problem}")
            key_ranges += _key_range(part, np.sort(rows.sequence_keys[rows.sequence_lengths > 0]))
            _add(statistics[part], rows, masker, manifest["masking"]["max_predictions"])
        except Corrupt as error:
            problems[shard["name"]] = str(error)
        progress(shard["bytes"])
    _raise_first(directory, problems)
    for (_, last), (first, _) in itertools.pairwise(sorted(key_ranges)):
        if first <= last:
            raise UserError(f"sequence key {first} occurs twice in {directory}; {_REBUILD}")
    _check_counts(directory, manifest, statistics)
    return Inspection(manifest, tokenizer, statistics)


def bytes_to_verify(directory: Path) -> int:
    """The sum of the numbers that `verify` passes to `progress`: each file once, and each shard again for its rows."""
    sizes = {name: (directory / name).stat().st_size for name in copy.files(directory)}
    return sum(sizes.values()) + sum(size for name, size in sizes.items() if name.split("/")[0] in PARTS)


def _raise_first(directory: Path, problems: Mapping[str, str]) -> None:
    if problems:
        name, problem = next(iter(problems.items()))
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        raise UserError(f"damaged {directory / name}: {problem}{more}; copy the folder again, or build it again")


def row_problems(rows: Rows, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """The guarantees that rows of the right layout violate, each with the first row that violates it."""
    ids, labels, width = rows.input_ids, rows.next_sentence_labels, rows.input_ids.shape[1]
    lengths, firsts = rows.sequence_lengths.astype(np.int64), rows.first_segment_lengths.astype(np.int64)
    ends = np.cumsum(lengths, axis=1)
    present, filled, starts = lengths > 0, np.arange(width) < ends[:, -1:], ends - lengths
    row = np.arange(len(ids))[:, None]

    def differs(positions: Int64[np.ndarray, "R S"], token: int) -> np.ndarray:
        return present & (ids[row, np.clip(positions, 0, width - 1)] != token)

    # In GPT-2's vocabulary one token pads, and begins and ends sequences.
    own_padding = tokenizer.pad_id not in (tokenizer.cls_id, tokenizer.sep_id)
    pairs = manifest["objective"] in PAIRS
    wrong_length = (firsts < 3) | (firsts > lengths - 2 if pairs else firsts != lengths)
    wrong_label = (labels != 0) & (labels != 1) if pairs else labels != NO_LABEL
    checks = {
        "an id outside of the vocabulary": ids >= tokenizer.vocab_size,
        "sequences longer than the row": ends[:, -1] > width,
        "no sequence": ~present[:, 0],
        "a sequence that does not begin with [CLS]": differs(starts, tokenizer.cls_id),
        "a sequence that does not end with [SEP]": differs(ends - 1, tokenizer.sep_id),
        "padding before the end of a sequence": (ids == tokenizer.pad_id) & filled & own_padding,
        "ids after the last sequence": (ids != tokenizer.pad_id) & ~filled,
        "a segment A that does not end with [SEP]": differs(starts + firsts - 1, tokenizer.sep_id),
        "segment lengths that do not fit": present & wrong_length,
        "an invalid next-sentence label": present & wrong_label,
    }
    if rows.masked_positions is not None and rows.masked_ids is not None and rows.masked_counts is not None:
        positions, counts = rows.masked_positions.astype(np.int64), rows.masked_counts.astype(np.int64)
        real = np.arange(positions.shape[1]) < counts[:, None]
        checks |= {
            "a masked position outside of the sequences": real & (positions >= ends[:, -1:]),
            "masked positions that do not ascend": real[:, 1:] & (np.diff(positions, axis=1) <= 0),
            "more predictions than fit": counts > positions.shape[1],
            "a special token that is predicted": real & np.isin(rows.masked_ids, tokenizer.special_ids),
            "a masked id outside of the vocabulary": rows.masked_ids >= tokenizer.vocab_size,
            "a filler that is not 0": ~real & ((positions != 0) | (rows.masked_ids != 0)),
        }
    for problem, violated in checks.items():
        if violated.any():
            yield problem, int(np.nonzero(violated)[0][0])


def _key_range(part: Part, keys: UInt64[np.ndarray, "K"]) -> list[tuple[int, int]]:
    """The first and the last of a shard's sorted sequence keys, if it has any. Raises Corrupt for invalid keys."""
    if not len(keys):
        return []
    first, last = int(keys[0]), int(keys[-1])
    if (np.diff(keys) != 1).any():
        raise Corrupt("sequence keys that do not count up by one")
    if first >> 32 != last >> 32:
        raise Corrupt("sequence keys of two work units")
    if bool(first >> 32 & EVAL_KEY_BIT) != (part == "eval"):
        raise Corrupt(f"sequence keys that are not those of {part}")
    return [(first, last)]


def _add(statistics: PartStatistics, rows: Rows, masker: Masker, max_predictions: int) -> None:
    """Adds rows to the statistics. Raises Corrupt for stored masks that are not those that the seed gives."""
    for batch in row_batches(rows):
        text = Rows(unmasked_ids(batch), *batch[1:5])
        try:
            masked = with_masks(text, masker, max_predictions)
        except ValueError as error:
            raise Corrupt(str(error)) from error
        equal = (np.array_equal(one, other) for one, other in zip(masked, batch, strict=True))  # type: ignore[arg-type]
        if batch.masked_positions is not None and not all(equal):
            raise Corrupt("static masks that are not those of epoch 0")
        statistics.add(batch, masked)


def _check_totals(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raises UserError where a total of the manifest is not the sum over its parts and over what reading skipped."""
    unread, total = manifest["skipped_reading"], manifest["counts"]
    names = (*COUNTED, *(name for name in COUNTED_IF_PRESENT if name in total))
    held = [total, *(manifest["parts"][part] for part in PARTS)]
    stated, *addends = [{name: counts.get(name, 0) for name in names} | counts["skipped"] for counts in held]
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


def _check_counts(directory: Path, manifest: Mapping[str, Any], statistics: Mapping[Part, PartStatistics]) -> None:
    """Raises UserError where the manifest or the unigram counts do not match the statistics of the shards."""
    for part, found in statistics.items():
        stated = manifest["parts"][part]
        for name, value in found.manifest_counts.items():
            if stated.get(name, value) != value:
                raise UserError(
                    f"{directory / MANIFEST} states {stated[name]} {name} in {part}, but the shards hold {value}; "
                    f"{_REBUILD}"
                )
    if not np.array_equal(read_unigram_counts(directory, manifest), statistics["train"].ordinary_unigrams):
        counts = directory / manifest["unigram_counts"]
        raise UserError(f"{counts} does not hold the counts of the shards; {_REBUILD}")


def document(directory: Path, found: Inspection, verified: bool, rows: Sequence[Excerpt] = ()) -> Document:
    """Everything about the parts in `found`; `verified` says whether every byte was checked."""
    manifest, tokenizer = found.manifest, found.tokenizer
    masking, unk = manifest["masking"], tokenizer.roles.unk_token
    filled = {part: statistics for part, statistics in found.statistics.items() if statistics.rows}
    masks = "that are stored" if masking["kind"] == "static" else "of epoch 0, as a loader chooses them"
    legend = (
        f"Marked words are predicted: on blue the model sees {tokenizer.roles.mask_token}, on orange the random "
        "token in small type, in a green frame the word itself. Rows are evenly spaced in the part, not hand-picked."
    )
    return Document(
        title=directory.name,
        source=str(directory),
        program=PROGRAM,
        lines=[
            f"Rows for pretraining: {manifest['objective']}, {manifest['seq_len']} tokens, {masking['kind']} masks by "
            f"{masking['unit']}, {manifest['tokenizer']['vocab_size']:,} tokens in the vocabulary",
            "Every byte was checked against the manifest." if verified else "Not checked; --verify checks every byte.",
        ],
        sections=[
            Section("Counts", [_counts(manifest, found.statistics, unk)]),
            _cleaning(manifest),
            Section("Lengths and masks", [Charts(_histograms(manifest, filled))], f"Masks are those {masks}."),
            Section("Shares", [Panels(_shares(manifest, filled, tokenizer))]),
            Section("Rows", [Excerpts(rows)] if rows else [], legend if rows else "", page_only=True),
            Section("Most frequent tokens", [Panels(_tokens(filled, tokenizer))], "Without special tokens."),
            Section("How it was made", [Settings(_settings(manifest))]),
        ],
    )


def _counts(manifest: Mapping[str, Any], parts: Mapping[Part, PartStatistics], unk: str) -> Table:
    """Documents by what became of them, what the parts hold, and shares.

    Documents that were skipped when the text was read belong to no part: where both parts are shown, the column `all`
    counts them too.
    """
    columns = {str(part): manifest["parts"][part] for part in parts}
    columns |= {"all": manifest["counts"]} if len(parts) > 1 else {}
    reasons = sorted({reason for counts in columns.values() for reason in counts["skipped"]})
    documents = {
        "documents used": [counts["used"] for counts in columns.values()],
        **{f"skipped: {reason}": [each["skipped"].get(reason, 0) for each in columns.values()] for reason in reasons},
        "documents in total": [counts["documents"] for counts in columns.values()],
    }
    names = ("sentences", "source_tokens", "rows", "sequences", "tokens", "predictions")
    held = {name.replace("_", " "): [counts[name] for counts in columns.values()] for name in names}
    counted = [[[name, *(f"{count:,}" for count in row)] for name, row in group.items()] for group in (documents, held)]
    shown: dict[str, Callable[[PartStatistics], str]] = {
        "positions filled": lambda found: f"{found.tokens / max(found.positions, 1):.2%}",
        "tokens predicted": lambda found: f"{found.predicted / max(found.tokens, 1):.2%}",
        f"{unk} in the text": lambda found: f"{found.unknown / max(found.text_tokens, 1):.2%}",
        "words over the mask budget": lambda found: f"{found.long_words / found.words:.2%}" if found.words else "",
        "tokens in a sequence: mean": lambda found: f"{summarise(found.lengths)['mean']:.1f}",
        "tokens in a sequence: median": lambda found: f"{summarise(found.lengths)['median']}",
        "tokens in a sequence: 95th percentile": lambda found: f"{summarise(found.lengths)['p95']}",
    }
    blank = [""] * (len(columns) - len(parts))
    figures = [
        [name, *(show(found) if found.rows else "" for found in parts.values()), *blank] for name, show in shown.items()
    ]
    return Table(["", *columns], [*counted, figures])


def _cleaning(manifest: Mapping[str, Any]) -> Section:
    """What data_prep.cleaning.job did with the documents before the job: a group of rows for each of its reports."""
    groups, reports = [], manifest.get("cleaning", [])
    for report in reports:
        read = report["documents"]["read"]
        counted = {"documents read": read}
        counted |= {f"dropped: {reason}": count for reason, count in report["dropped"].items()}
        counted["documents kept"] = report["documents"]["kept"]
        others = {"repeated lines removed": report["removed_lines"]} if report["removed_lines"] else {}
        others |= {f"unreadable: {reason}": count for reason, count in report["refused"].items()}
        rows = [[name, f"{count:,}", percent(count / max(read, 1))] for name, count in counted.items()]
        groups.append(rows + [[name, f"{count:,}", ""] for name, count in others.items()])
    if not groups:
        return Section("Cleaning")
    note = f"By data_prep.cleaning.job, as in {', '.join(report['report'] for report in reports)}."
    return Section("Cleaning", [Table(["", "documents", "of those read"], groups)], note)


def _histograms(manifest: Mapping[str, Any], parts: Mapping[Part, PartStatistics]) -> list[Histogram]:
    titles = {
        "lengths": ("Length of a sequence", "of sequences", "tokens"),
        "filled": ("Filled positions of a row", "of rows", "tokens"),
        "packed": ("Sequences in a row", "of rows", "sequences"),
        "predictions": ("Predictions in a sequence", "of sequences", "predictions"),
    }
    return [
        Histogram(*title, {part: getattr(found, name) for part, found in parts.items()})
        for name, title in titles.items()
        if manifest["pack"] > 1 or name not in ("filled", "packed")  # rows of one sequence are as long as it
    ]


def label_names(manifest: Mapping[str, Any]) -> dict[int, str]:
    """The next-sentence labels of an objective in words."""
    return _LABELS.get(manifest["objective"], {}) | {NO_LABEL: "no label"}


def _shares(manifest: Mapping[str, Any], parts: Mapping[Part, PartStatistics], tokenizer: Tokenizer) -> list[Panel]:
    """The next-sentence labels of pairs, and what the model sees in the place of a predicted token."""
    names, shown = label_names(manifest), (tokenizer.roles.mask_token, *REPLACEMENTS[1:])
    panels: list[tuple[Part, str, dict[str, int]]] = []
    if manifest["objective"] in PAIRS:
        for part, found in parts.items():
            labels = {names[label]: count for label, count in found.labels.items() if count}
            panels.append((part, "next sentence", labels))
    for part, found in parts.items():
        replaced = dict(zip(shown, found.replaced.tolist(), strict=True))
        panels.append((part, "a predicted token is shown as", replaced))
    return [Panel(part, title, _bars(counts, max(sum(counts.values()), 1))) for part, title, counts in panels]


def _bars(counts: Mapping[str, int], total: int) -> list[Bar]:
    return [Bar(name, count / total, percent(count / total), number=count) for name, count in counts.items()]


def _tokens(parts: Mapping[Part, PartStatistics], tokenizer: Tokenizer) -> list[Panel]:
    panels = []
    for part, found in parts.items():
        counts = found.ordinary_unigrams
        top = [token for token in np.argsort(-counts, kind="stable")[:_TOKENS].tolist() if counts[token]]
        bars = [
            Bar(name, counts[token] / counts[top[0]], percent(counts[token] / counts.sum()), number=int(counts[token]))
            for name, token in zip(tokenizer.tokens(top), top, strict=True)
        ]
        panels.append(Panel(part, "", bars))
    return panels


def _settings(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What build_examples was asked for, and what it ran with."""
    options = {
        name: value
        for name, value in manifest.items()
        if isinstance(value, str | int | float) and name not in ("schema_version", "unigram_counts")
    }
    for name in ("sources", "shards"):
        size = sum(each["bytes"] for each in manifest[name])
        options[name] = f"{len(manifest[name])} files, {size / 1e6:.1f} MB"
    return {"": options, **{name: manifest[name] for name in ("masking", "tokenizer", "versions")}}


def excerpts(
    dataset: Dataset, tokenizer: Tokenizer, numbers: Sequence[int], masker: Masker | None = None
) -> Iterator[Excerpt]:
    """Every sequence of the rows with these numbers, as text with the label of each masked token.

    With a masker, rows without stored masks have those of epoch 0. Raises UserError for a shard that cannot be read.
    """
    rows, names = dataset.gather(np.array(numbers, np.int64)), label_names(dataset.manifest)
    rows = with_masks(rows, masker, dataset.max_predictions) if masker else rows
    for row, number in enumerate(numbers):
        predicted: dict[int, int] = {}
        if rows.masked_positions is not None and rows.masked_ids is not None and rows.masked_counts is not None:
            real = int(rows.masked_counts[row])
            positions, ids = rows.masked_positions[row, :real].tolist(), rows.masked_ids[row, :real].tolist()
            predicted = dict(zip(positions, ids, strict=True))
        start = 0
        for sequence, length in enumerate(rows.sequence_lengths[row].astype(int).tolist()):
            if not length:
                continue
            middle, end = start + int(rows.first_segment_lengths[row, sequence]), start + length
            key, label = int(rows.sequence_keys[row, sequence]), int(rows.next_sentence_labels[row, sequence])
            yield Excerpt(
                heading=f"row {number:,}",
                detail=f"key {key >> 32:#x}:{key & 0xFFFFFFFF}, {length} of {dataset.seq_len} tokens",
                label=names.get(label, str(label)),
                paragraphs={
                    segment: list(_fragments(rows.input_ids[row], predicted, first, last, tokenizer))
                    for segment, first, last in (("A", start, middle), ("B", middle, end))
                    if first < last
                },
            )
            start = end


def page_rows(directory: Path, found: Inspection) -> list[Excerpt]:
    """Rows at even distances in the first part that has any, with the masks of epoch 0."""
    manifest, tokenizer = found.manifest, found.tokenizer
    for part, statistics in found.statistics.items():
        if statistics.rows:
            dataset = Dataset(directory, part, manifest, formats.reader(manifest))
            numbers = np.unique(np.linspace(0, dataset.rows - 1, _PAGE_ROWS + 2).astype(np.int64)[1:-1]).tolist()
            return list(excerpts(dataset, tokenizer, numbers, open_masker(directory, manifest, tokenizer)))
    return []


def _fragments(
    ids: Integer[np.ndarray, "T"], predicted: Mapping[int, int], first: int, last: int, tokenizer: Tokenizer
) -> Iterator[Fragment]:
    """The positions [first, last), in runs of one kind: tokens are decoded together, so that words are whole."""
    special = set(tokenizer.special_ids)

    def kind_of(position: int) -> str:
        seen = int(ids[position])
        if position not in predicted:
            return "special" if seen in special else "plain"
        return "masked" if seen == tokenizer.mask_id else "kept" if seen == predicted[position] else "random"

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens).strip().removeprefix("##")

    for kind, run in itertools.groupby(range(first, last), kind_of):
        positions = list(run)
        begin = positions[0]
        seen = [int(ids[position]) for position in positions]
        labels = [predicted.get(position, token) for position, token in zip(positions, seen, strict=True)]
        label = decode(labels)
        # After [CLS] or [SEP] a new word begins; after [MASK] and [UNK] the same word may continue.
        joined = begin > first and int(ids[begin - 1]) not in special - {tokenizer.mask_id, tokenizer.unk_id}
        joined = joined and bool(tokenizer.continuation[labels[0]] or (label and label[0] in _NO_SPACE_BEFORE))
        yield Fragment(label if seen == labels else decode(seen), kind, label, joined)  # type: ignore[arg-type]
