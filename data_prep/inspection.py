"""Checks an output from build-examples, and counts its rows for a report (docs/data_format.md).

From the top: PartStatistics counts a part's rows, `verify` checks every byte and row, and `document` makes the report.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from bert_jax.array_types import Int64, Integer
from bert_jax.data.example import Rows, unmasked_ids
from bert_jax.data.manifest import MANIFEST, PARTS, Part, read_manifest, read_shard_table, read_unigram_counts
from bert_jax.data.masking.masker import Masker
from bert_jax.data.masking.rule import MaskingRule
from bert_jax.data.shard_file import Corrupt, layout_problem
from bert_jax.data.shards import Dataset, check_sizes
from bert_jax.errors import UserError
from bert_jax.reporting import document as report
from bert_jax.reporting.document import Document, Excerpt, Fragment, Panel, Section, Table, percent
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.tokenizer import load as load_tokenizer
from data_prep import output_files
from data_prep.job import sum_counts
from data_prep.sequences import RANDOM_SEGMENT, segment_count
from data_prep.units import EVAL_KEY_BIT, summarise
from data_prep.worker import ROWS_PER_BATCH, mask_rows, row_batches

PROGRAM = "bert-jax inspect-shards"
REPLACEMENTS = ("[MASK]", "random", "kept")
NO_LABEL = -1
_LABELS = {"nsp": ("B is next", "B is random", "no label"), "sop": ("in order", "swapped", "no label")}
_REBUILD = "build the examples again"
_PAGE_ROWS = 6
_TOP_TOKENS = 20
# WordPiece vocabularies do not say which marks follow a word without a space.
_NO_SPACE_BEFORE = set(",.;:!?)]}%”’'…")
# Title, unit and axis of the histogram of each array of PartStatistics.
_HISTOGRAMS = {
    "lengths": ("Length of a sequence", "of sequences", "tokens"),
    "filled": ("Filled positions of a row", "of rows", "tokens"),
    "packed": ("Sequences in a row", "of rows", "sequences"),
    "predictions": ("Predictions in a sequence", "of sequences", "predictions"),
}


class PartStatistics:
    """Counts over a part's rows. Dynamic masks are taken from epoch 0."""

    def __init__(self, directory: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        self.max_predictions = manifest["masking"]["max_predictions"]
        self.rows = 0
        self.lengths = np.zeros(manifest["seq_len"] + 1, np.int64)  # sequences by tokens
        self.filled = np.zeros_like(self.lengths)  # rows by tokens, without padding
        self.packed = np.zeros(manifest["pack"] + 1, np.int64)  # rows by sequences
        self.labels = dict.fromkeys((0, 1, NO_LABEL), 0)  # sequences by next-sentence label
        self.predictions = np.zeros(self.max_predictions + 1, np.int64)  # sequences by predictions
        self.replaced = np.zeros(len(REPLACEMENTS), np.int64)  # predicted tokens by replacement
        self.unigrams = np.zeros(tokenizer.vocab_size, np.int64)  # tokens before masking, with special ones
        self.words = self.long_words = 0  # long: above the sequence's mask budget. 0 if the mask unit is token
        rule = MaskingRule.from_manifest(manifest["masking"])
        counts = read_unigram_counts(directory, manifest) if rule.random == "unigram" else None
        self.tokenizer, self.masker = tokenizer, Masker(tokenizer, rule, manifest["seed"], counts)

    def add(self, rows: Rows) -> None:
        """Counts stored rows.

        Raises:
            ValueError: A row has more predictions than fit.
        """
        lengths = rows.sequence_lengths.astype(np.int64)
        present = lengths > 0
        self.rows += len(lengths)
        self.lengths += np.bincount(lengths[present], minlength=len(self.lengths))
        self.filled += np.bincount(lengths.sum(axis=1), minlength=len(self.filled))
        self.packed += np.bincount(present.sum(axis=1), minlength=len(self.packed))
        for label in self.labels:
            self.labels[label] += int((rows.next_sentence_labels[present] == label).sum())
        original = unmasked_ids(rows)
        if self.masker.rule.unit != "token":
            words, long_words = self.masker.count_words(Rows(original, *rows[1:5]))
            self.words += words
            self.long_words += long_words
        filled = np.arange(rows.input_ids.shape[1]) < lengths.sum(axis=1)[:, None]
        self.unigrams += np.bincount(original[filled], minlength=len(self.unigrams))

        masked = rows if rows.masked_positions is not None else mask_rows(rows, self.masker, self.max_predictions)
        positions = masked.masked_positions.astype(np.int64)  # type: ignore[union-attr]
        real = np.arange(positions.shape[1]) < masked.masked_counts[:, None].astype(np.int64)  # type: ignore[index]
        row, column = np.nonzero(real)
        predicted, labels = positions[row, column], masked.masked_ids[row, column]  # type: ignore[index]
        seen = masked.input_ids[row, predicted]
        is_mask, is_label = seen == self.tokenizer.mask_id, seen == labels
        self.replaced += [int(is_mask.sum()), int((~is_mask & ~is_label).sum()), int((~is_mask & is_label).sum())]
        # A prediction belongs to the first sequence that ends after it. Infilling shortens sequences, so the ends come
        # from the masked rows.
        ends = np.cumsum(masked.sequence_lengths.astype(np.int64), axis=1)
        sequence = (ends[row] <= predicted[:, None]).sum(axis=1)
        counts = np.bincount(row * ends.shape[1] + sequence, minlength=ends.size)
        self.predictions += np.bincount(counts[present.reshape(-1)], minlength=len(self.predictions))

    @property
    def tokens(self) -> int:
        """Positions without padding."""
        return int(self.lengths @ np.arange(len(self.lengths)))

    @property
    def filled_share(self) -> float:
        return self.tokens / max(self.rows * (len(self.filled) - 1), 1)

    @property
    def ordinary_unigrams(self) -> Int64[np.ndarray, "V"]:
        """Token counts with 0 for special tokens, as in unigram_counts.npy."""
        counts = self.unigrams.copy()
        counts[list(self.tokenizer.special_ids)] = 0
        return counts

    @property
    def unknown_share(self) -> float:
        """Fraction of [UNK] in the text; 0 if it also begins and ends sequences, as in GPT-2's vocabulary."""
        unknown = int(self.unigrams[self.tokenizer.unk_id]) if self.tokenizer.has_unknown else 0
        return unknown / max(int(self.ordinary_unigrams.sum()) + unknown, 1)


def open_tokenizer(directory: Path, manifest: Mapping[str, Any]) -> Tokenizer:
    """Loads the tokenizer stored with the shards.

    Raises:
        UserError: The shards were made with another one.
    """
    tokenizer = load_tokenizer(directory / "tokenizer")
    if tokenizer.content_hash != manifest["tokenizer"]["hash"]:
        raise UserError(f"{directory / 'tokenizer'} is not the tokenizer that made the shards; copy it again")
    return tokenizer


def measure(
    directory: Path, part: Part, manifest: Mapping[str, Any], tokenizer: Tokenizer, on_rows: Callable[[int], None]
) -> PartStatistics:
    """Computes a part's statistics from its shards.

    Raises:
        UserError: A shard cannot be read.
    """
    dataset = Dataset(directory, part, manifest, read=output_files.reader(manifest))
    statistics = PartStatistics(directory, manifest, tokenizer)
    for shard in range(len(dataset.shards)):
        for rows in row_batches(dataset.shard_rows(shard)):
            statistics.add(rows)
            on_rows(len(rows.input_ids))
    return statistics


class Inspection(NamedTuple):
    """An output's manifest, tokenizer, and statistics by part."""

    manifest: dict[str, Any]
    tokenizer: Tokenizer
    statistics: dict[Part, PartStatistics]


def verify(directory: Path, progress: Callable[[int], None] = lambda size: None) -> Inspection:
    """Checks every byte in an output against its manifest and SHA256SUMS, and counts its rows.

    Args:
        directory: The output.
        progress: Called with byte counts, which add up to `bytes_to_verify`.

    Raises:
        UserError: Something does not match. The message describes the first damaged file, and counts the others.
    """
    manifest = read_manifest(directory)  # first, so that a folder that is no output is not reported as damaged
    listed = output_files.read_sums(directory)
    _raise_first(directory, output_files.find_damage(directory, listed, progress))
    shards = read_shard_table(directory, manifest)
    check_sizes(directory, shards)
    _check_totals(directory / MANIFEST, manifest)
    tokenizer = open_tokenizer(directory, manifest)
    read = output_files.reader(manifest)
    statistics: dict[Part, PartStatistics] = {part: PartStatistics(directory, manifest, tokenizer) for part in PARTS}
    key_ranges: list[tuple[int, int]] = []
    problems = {}
    for shard, name in enumerate(shards.names.tolist()):
        part = cast(Part, name.split("/")[0])
        try:
            if listed.get(name) != shards.sha256(shard):
                raise Corrupt(f"its sha256 is not that of {manifest['shards']['table']}")
            rows = read(directory / name)
            if problem := layout_problem(rows, int(shards.rows[shard]), manifest):
                raise Corrupt(problem)
            # A shard is large, so the arrays that the checks make are those of a batch.
            for number, batch in enumerate(row_batches(rows)):
                _check_rows(batch, manifest, tokenizer, number * ROWS_PER_BATCH)
            key_ranges += _key_ranges(part, rows)
            for batch in row_batches(rows):
                statistics[part].add(batch)
                if batch.masked_positions is not None:
                    # Static masks must be those that the seed gives.
                    text = Rows(unmasked_ids(batch), *batch[1:5])
                    again = mask_rows(text, statistics[part].masker, statistics[part].max_predictions)
                    if not all(map(np.array_equal, again, batch)):  # type: ignore[arg-type]
                        raise Corrupt("static masks that are not those of epoch 0")
        except (Corrupt, ValueError) as error:  # ValueError: the masker finds more predictions than fit
            problems[name] = str(error)
        progress(int(shards.bytes[shard]))
    _raise_first(directory, problems)
    for (_, last), (first, _) in itertools.pairwise(sorted(key_ranges)):
        if first <= last:
            raise UserError(f"sequence key {first} occurs twice in {directory}; {_REBUILD}")
    _check_counts(directory, manifest, statistics)
    return Inspection(manifest, tokenizer, statistics)


def bytes_to_verify(directory: Path) -> int:
    """Adds up the sizes that `verify` passes to `progress`: all files, and shards a second time."""
    sizes = {name: (directory / name).stat().st_size for name in output_files.listed_files(directory)}
    return sum(sizes.values()) + sum(size for name, size in sizes.items() if name.split("/")[0] in PARTS)


def _raise_first(directory: Path, problems: Mapping[str, str]) -> None:
    if problems:
        name, problem = next(iter(problems.items()))
        more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
        raise UserError(f"damaged {directory / name}: {problem}{more}; copy the folder again, or build it again")


def _check_rows(rows: Rows, manifest: Mapping[str, Any], tokenizer: Tokenizer, first: int = 0) -> None:
    """Raises Corrupt for the first violated guarantee in rows with the right layout, which begin with row `first`."""
    ids, labels, width = rows.input_ids, rows.next_sentence_labels, rows.input_ids.shape[1]
    lengths, firsts = rows.sequence_lengths.astype(np.int64), rows.first_segment_lengths.astype(np.int64)
    ends = np.cumsum(lengths, axis=1)
    present, filled, starts = lengths > 0, np.arange(width) < ends[:, -1:], ends - lengths
    row = np.arange(len(ids))[:, None]

    def differs(positions: Int64[np.ndarray, "R S"], token: int) -> np.ndarray:
        return present & (ids[row, np.clip(positions, 0, width - 1)] != token)

    # In GPT-2's vocabulary one token pads, and begins and ends sequences.
    own_padding = tokenizer.pad_id not in (tokenizer.cls_id, tokenizer.sep_id)
    pairs = segment_count(manifest["objective"]) == 2
    # A has [CLS], a token and [SEP], at least; B a token and [SEP].
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
            raise Corrupt(f"row {first + np.nonzero(violated)[0][0]} has {problem}")


def _key_ranges(part: Part, rows: Rows) -> list[tuple[int, int]]:
    """The first and last sequence key of each unit in a shard. Raises Corrupt for invalid keys."""
    keys = np.sort(rows.sequence_keys[rows.sequence_lengths > 0])
    # The high 32 bits of a key are the unit, whose highest bit is the part; the low 32 bits count its sequences.
    units = keys >> np.uint64(32)
    begins = np.flatnonzero(np.diff(units, prepend=np.uint64(0)) | (np.arange(len(keys)) == 0))
    ends = np.append(begins[1:], len(keys)) - 1
    # Only the first unit may begin with a later pairing, if the shard before it ends with an earlier one.
    gaps = np.diff(keys) != 1
    gaps[begins[1:] - 1] = keys[begins[1:]] & np.uint64((1 << 32) - 1) != 0
    in_eval = units & np.uint64(EVAL_KEY_BIT) > 0
    problems = {
        "sequence keys that do not count up by one": gaps.any(),
        f"sequence keys that are not those of {part}": (in_eval != (part == "eval")).any(),
    }
    for problem, applies in problems.items():
        if applies:
            raise Corrupt(problem)
    return list(zip(keys[begins].tolist(), keys[ends].tolist(), strict=True))


def _check_totals(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raises UserError unless the parts and the documents skipped in reading add up to the totals."""
    total, unread = manifest["counts"], manifest["skipped_reading"]
    addends = [*manifest["parts"].values(), {"documents": sum(unread.values()), "skipped": unread}]
    stated, held = sum_counts([total]), sum_counts(addends)
    for counts in (stated, held):
        counts.update(counts.pop("skipped"))
    for name in sorted(stated.keys() | held.keys()):
        if stated.get(name, 0) != held.get(name, 0):
            raise UserError(
                f"{path} states {stated.get(name, 0)} {name} in total, but {held.get(name, 0)} in the parts and in "
                f"reading; {_REBUILD}"
            )
    skipped = sum(total["skipped"].values())
    if total["documents"] != total["used"] + skipped:
        raise UserError(
            f"{path} states {total['documents']} documents, but {total['used']} used and {skipped} skipped ones; "
            f"{_REBUILD}"
        )


def _check_counts(directory: Path, manifest: Mapping[str, Any], statistics: Mapping[Part, PartStatistics]) -> None:
    """Raises UserError if the manifest or the unigram counts do not match the shards' statistics."""
    for part, measured in statistics.items():
        stated = manifest["parts"][part]
        held = {
            "sequences": int(measured.lengths.sum()),
            "rows": measured.rows,
            "tokens": measured.tokens,
            "predictions": int(measured.replaced.sum()),
            "filled": round(measured.filled_share, 6),
            "lengths": summarise(measured.lengths),
            "words": measured.words,
            "long_words": measured.long_words,
            "random_pairs": measured.labels[RANDOM_SEGMENT],
        }
        # The last three are stated only if the options of the job count them.
        for name, value in held.items():
            if name in stated and stated[name] != value:
                path = directory / MANIFEST
                raise UserError(
                    f"{path} states {stated[name]} {name} in {part}, but the shards hold {value}; {_REBUILD}"
                )
    if not np.array_equal(read_unigram_counts(directory, manifest), statistics["train"].ordinary_unigrams):
        counts = directory / manifest["unigram_counts"]
        raise UserError(f"{counts} does not hold the counts of the shards; {_REBUILD}")


def document(directory: Path, inspection: Inspection, verified: bool, rows: Sequence[Excerpt] = ()) -> Document:
    """Makes the report of inspect-shards.

    Args:
        verified: Whether every byte was checked.
        rows: Excerpts to show on the page.
    """
    manifest, tokenizer, statistics = inspection
    masking = manifest["masking"]
    filled = {part: held for part, held in statistics.items() if held.rows}
    masks = "that are stored" if masking["kind"] == "static" else "of epoch 0, as a loader chooses them"
    histograms = [
        report.Histogram(*title, {part: getattr(held, name) for part, held in filled.items()})
        for name, title in _HISTOGRAMS.items()
        if manifest["pack"] > 1 or name not in ("filled", "packed")  # a row of one sequence is as long as the sequence
    ]
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
            Section("Counts", [_counts(manifest, statistics, tokenizer.roles.unk_token)]),
            _cleaning(manifest),
            Section("Lengths and masks", [report.Charts(histograms)], f"Masks are those {masks}."),
            Section("Shares", [report.Panels(_shares(manifest, filled, tokenizer))]),
            Section("Rows", [report.Excerpts(rows)] if rows else [], legend if rows else "", page_only=True),
            Section("Most frequent tokens", [report.Panels(_top_tokens(filled, tokenizer))], "Without special tokens."),
            Section("How it was made", [report.Settings(_settings(manifest))]),
        ],
    )


def _counts(manifest: Mapping[str, Any], parts: Mapping[Part, PartStatistics], unk: str) -> Table:
    """Tabulates documents used and skipped, the parts' contents, and fractions."""
    # Documents skipped in reading belong to no part, so only the column `all` counts them.
    columns = {str(part): manifest["parts"][part] for part in parts}
    columns |= {"all": manifest["counts"]} if len(parts) > 1 else {}
    reasons = sorted({reason for counts in columns.values() for reason in counts["skipped"]})
    documents = {
        "documents used": [counts["used"] for counts in columns.values()],
        **{f"skipped: {reason}": [held["skipped"].get(reason, 0) for held in columns.values()] for reason in reasons},
        "documents in total": [counts["documents"] for counts in columns.values()],
    }
    names = ("sentences", "source_tokens", "rows", "sequences", "tokens", "predictions")
    contents = {name.replace("_", " "): [counts[name] for counts in columns.values()] for name in names}
    counted = [
        [[name, *(f"{count:,}" for count in row)] for name, row in group.items()] for group in (documents, contents)
    ]
    shares: dict[str, Callable[[PartStatistics], str]] = {
        "positions filled": lambda held: f"{held.filled_share:.2%}",
        "tokens predicted": lambda held: f"{held.replaced.sum() / max(held.tokens, 1):.2%}",
        f"{unk} in the text": lambda held: f"{held.unknown_share:.2%}",
        "words over the mask budget": lambda held: f"{held.long_words / held.words:.2%}" if held.words else "",
        "tokens in a sequence: mean": lambda held: f"{summarise(held.lengths)['mean']:.1f}",
        "tokens in a sequence: median": lambda held: f"{summarise(held.lengths)['median']}",
        "tokens in a sequence: 95th percentile": lambda held: f"{summarise(held.lengths)['p95']}",
    }
    blank = [""] * (len(columns) - len(parts))
    figures = [
        [name, *(show(held) if held.rows else "" for held in parts.values()), *blank] for name, show in shares.items()
    ]
    return Table(["", *columns], [*counted, figures])


def _cleaning(manifest: Mapping[str, Any]) -> Section:
    """Tabulates documents dropped and kept by bert-jax clean before the job, with a group of rows per report."""
    groups, cleanings = [], manifest.get("cleaning", [])
    for cleaning in cleanings:
        read = cleaning["documents"]["read"]
        counted = {"documents read": read}
        counted |= {f"dropped: {reason}": count for reason, count in cleaning["dropped"].items()}
        counted["documents kept"] = cleaning["documents"]["kept"]
        others = {"repeated lines removed": cleaning["removed_lines"]} if cleaning["removed_lines"] else {}
        others |= {f"unreadable: {reason}": count for reason, count in cleaning["refused"].items()}
        rows = [[name, f"{count:,}", percent(count / max(read, 1))] for name, count in counted.items()]
        groups.append(rows + [[name, f"{count:,}", ""] for name, count in others.items()])
    if not groups:
        return Section("Cleaning")
    note = f"By bert-jax clean, as in {', '.join(cleaning['report'] for cleaning in cleanings)}."
    return Section("Cleaning", [Table(["", "documents", "of those read"], groups)], note)


def _shares(manifest: Mapping[str, Any], parts: Mapping[Part, PartStatistics], tokenizer: Tokenizer) -> list[Panel]:
    """Charts next-sentence labels, and what the model sees in place of predicted tokens."""
    panels, shown = [], (tokenizer.roles.mask_token, *REPLACEMENTS[1:])
    if names := _LABELS.get(manifest["objective"]):
        for part, held in parts.items():
            labels = [(names[label], count) for label, count in held.labels.items() if count]
            total = int(held.lengths.sum())
            panels.append(Panel(part, "next sentence", _bars(labels, total, total)))
    for part, held in parts.items():
        total = max(int(held.replaced.sum()), 1)
        replaced = zip(shown, held.replaced.tolist(), strict=True)
        panels.append(Panel(part, "a predicted token is shown as", _bars(replaced, total, total)))
    return panels


def _top_tokens(parts: Mapping[Part, PartStatistics], tokenizer: Tokenizer) -> list[Panel]:
    panels = []
    for part, held in parts.items():
        counts = held.ordinary_unigrams
        top = [token for token in np.argsort(-counts, kind="stable")[:_TOP_TOKENS].tolist() if counts[token]]
        named = zip(tokenizer.tokens(top), counts[top].tolist(), strict=True)
        panels.append(Panel(part, "", _bars(named, int(counts.sum()), int(counts.max()))))
    return panels


def _bars(counts: Iterable[tuple[str, int]], total: int, longest: int) -> list[report.Bar]:
    return [report.Bar(name, count / longest, percent(count / total), number=count) for name, count in counts]


def _settings(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    options = {
        name: value
        for name, value in manifest.items()
        if isinstance(value, str | int | float) and name not in ("schema_version", "unigram_counts")
    }
    for name, count, size in (
        ("sources", len(manifest["sources"]), sum(file["bytes"] for file in manifest["sources"])),
        ("shards", manifest["shards"]["count"], manifest["shards"]["bytes"]),
    ):
        options[name] = f"{count} files, {size / 1e6:.1f} MB"
    return {"": options, **{name: manifest[name] for name in ("masking", "tokenizer", "versions")}}


def page_rows(directory: Path, inspection: Inspection) -> list[Excerpt]:
    """Samples evenly spaced rows from the first part that has any, with the masks of epoch 0."""
    manifest, tokenizer, statistics = inspection
    for part, held in statistics.items():
        if held.rows:
            dataset = Dataset(directory, part, manifest, read=output_files.reader(manifest))
            numbers = np.unique(np.linspace(0, dataset.rows - 1, _PAGE_ROWS + 2).astype(np.int64)[1:-1]).tolist()
            return list(excerpts(dataset, tokenizer, numbers, held.masker))
    return []


def excerpts(
    dataset: Dataset, tokenizer: Tokenizer, numbers: Sequence[int], masker: Masker | None = None
) -> Iterator[Excerpt]:
    """Yields the sequences in some rows, as text with labels for masked tokens.

    Args:
        numbers: The rows.
        masker: Masks rows without static masks, as in epoch 0.

    Raises:
        UserError: A shard cannot be read.
    """
    rows = dataset.gather(np.array(numbers, np.int64))
    if masker and rows.masked_positions is None:
        rows = mask_rows(rows, masker, dataset.max_predictions)
    names = _LABELS.get(dataset.manifest["objective"], ("no label",) * 3)
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
                label=names[label],
                paragraphs={
                    segment: list(_fragments(rows.input_ids[row], predicted, first, last, tokenizer))
                    for segment, first, last in (("A", start, middle), ("B", middle, end))
                    if first < last
                },
            )
            start = end


def _fragments(
    ids: Integer[np.ndarray, "T"], predicted: Mapping[int, int], first: int, last: int, tokenizer: Tokenizer
) -> Iterator[Fragment]:
    """Yields the positions [first, last) in runs of one kind. Decoding a whole run keeps its words together."""
    special = set(tokenizer.special_ids)

    def kind(position: int) -> str:
        token = int(ids[position])
        if position not in predicted:
            return "special" if token in special else "plain"
        return "masked" if token == tokenizer.mask_id else "kept" if token == predicted[position] else "random"

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens).strip().removeprefix("##")

    for run_kind, run in itertools.groupby(range(first, last), kind):
        positions = list(run)
        begin = positions[0]
        shown = ids[positions].tolist()
        labels = [predicted.get(position, token) for position, token in zip(positions, shown, strict=True)]
        label = decode(labels)
        # After [CLS] or [SEP] a new word begins; after [MASK] and [UNK] the same word may continue.
        joined = begin > first and int(ids[begin - 1]) not in special - {tokenizer.mask_id, tokenizer.unk_id}
        joined = joined and bool(tokenizer.continuation[labels[0]] or (label and label[0] in _NO_SPACE_BEFORE))
        yield Fragment(label if shown == labels else decode(shown), run_kind, label, joined)  # type: ignore[arg-type]
