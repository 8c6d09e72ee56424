"""Mixtures: several data sets fill batches in given shares, without state or sampling (law 1).

`read_mixture` checks the configuration, `Mixture.of` joins the opened data sets, `RowShares` divides rows among them,
and `MixtureLoader` makes the batches of a phase. A source is read as a run on it alone would read it: in its own
epochs, in the same order and with the same masks.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.config import MaskingConfig
from bert_jax.data.example import Batch
from bert_jax.data.loader import DatasetLoader, ReadRows
from bert_jax.data.schedules import BatchSegment, StepSchedule
from bert_jax.data.shards import Dataset
from bert_jax.errors import UserError
from bert_jax.storage.remote import as_address
from bert_jax.tokenization.vocabulary import Vocabulary

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class NamedFolder(NamedTuple):
    """A source of a mixture in the configuration."""

    name: str
    folder: str
    weight: float | None  # relative to the other sources; None: by the number of tokens


class MixtureSpec(NamedTuple):
    """A mixture in the configuration. Sources without weights are weighted by token counts, raised to `alpha`."""

    folders: tuple[NamedFolder, ...]
    alpha: float | None = None


def read_mixture(sources: Mapping[str, Any], key: str, alpha: float = 1.0) -> MixtureSpec:
    """Reads a mixture: {NAME: (DIR, SHARE)}, or {NAME: DIR} with shares by tokens.

    Args:
        key: The configuration key, for errors.
        alpha: The exponent for token counts, if sources have no shares.

    Raises:
        UserError: A name, folder or share is impossible, or only some sources have a share.
    """
    if not sources:
        raise UserError(f"{key} has no sources. Name at least one, such as {{wiki: ('DIR', 1)}}")
    folders = [
        NamedFolder(name, *((source, None) if isinstance(source, str) else source)) for name, source in sources.items()
    ]
    for name, folder, weight in folders:
        too_small_or_large = weight is not None and not 0 < weight < math.inf
        for refused, problem in (
            (not folder.strip(), f"the folder of {name} is empty. Name one"),
            (not _NAME.fullmatch(name), f"invalid name {name!r}. Use letters, digits, _ and -, and a letter first"),
            (too_small_or_large, f"the share of {name} is {weight}. Use a positive number, or omit it"),
        ):
            if refused:
                raise UserError(f"{key}: {problem}")
    by_tokens = [folder.name for folder in folders if folder.weight is None]
    if by_tokens and len(by_tokens) < len(folders):
        raise UserError(
            f"{key} has shares, but none for {by_tokens[0]}. Give all sources a share, {{NAME: ('DIR', 0.5)}}, or none"
        )
    return MixtureSpec(tuple(folders), alpha if by_tokens else None)


DIGITS = 7  # of a share, so that 0.3 is exact
WHOLE = 10**DIGITS

Number = TypeVar("Number", int, np.ndarray)


@dataclass(frozen=True)
class RowShares:
    """Assigns an endless sequence of rows to K sources, and numbers every source's rows.

    Of the first n rows, the first source gets n times its share, rounded. The other sources divide the rest in the same
    way. So any n consecutive rows are at most K - 1 rows away from the shares; random draws would be off by about
    sqrt(n). Both methods take O(K) time for any n, so a run can begin at any step.
    """

    weights: tuple[int, ...]  # positive; a share is a weight divided by the sum of all weights

    @classmethod
    def of(cls, weights: Sequence[float], names: Sequence[str], key: str) -> "RowShares":
        """Returns the shares of positive, finite weights. Raises UserError for a share that is too small."""
        largest = max(weights)  # weights are divided by it first, because a sum of finite floats may be infinite
        total = sum(weight / largest for weight in weights)
        whole = tuple(round(weight / largest / total * WHOLE) for weight in weights)
        if 0 in whole:
            raise UserError(
                f"the share of {names[whole.index(0)]} in {key} is less than {1 / WHOLE:g} of the rows. Raise its "
                "weight, or leave it out"
            )
        return cls(whole)

    @property
    def fractions(self) -> tuple[float, ...]:
        """The sources' shares of the rows; they sum to 1."""
        return tuple(weight / sum(self.weights) for weight in self.weights)

    def counts(self, rows: int) -> tuple[int, ...]:
        """Counts the first `rows` rows by source."""
        counts: list[int] = []
        # Each source takes its share of the rows that sources before it left, so the counts always sum to `rows`.
        rest, total = rows, sum(self.weights)
        for weight in self.weights:
            counts.append(_rounded_share(rest, weight, total))
            rest, total = rest - counts[-1], total - weight
        return tuple(counts)

    def assign(self, numbers: Int64[np.ndarray, "R"]) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
        """Returns every row's source, and how many earlier rows have the same source."""
        sources, ordinals = np.zeros((2, *numbers.shape), np.int64)
        # `left` indexes the rows that have no source yet, and `rest` numbers them in the sequence of such rows. A row
        # belongs to a source if the source's rounded share grows with this row.
        left, rest, total = np.arange(len(numbers)), numbers, sum(self.weights)
        for source, weight in enumerate(self.weights):
            before = _rounded_share(rest, weight, total)
            taken = _rounded_share(rest + 1, weight, total) > before
            sources[left[taken]], ordinals[left[taken]] = source, before[taken]
            left, rest, total = left[~taken], (rest - before)[~taken], total - weight
        return sources, ordinals


def _rounded_share(rows: Number, weight: int, total: int) -> Number:
    """Rounds rows * weight / total, half up."""
    # The product of all rows and the weight could exceed 64 bits. Now both factors are at most about 10**DIGITS.
    wholes, rest = rows // total, rows % total
    return wholes * weight + (2 * rest * weight + total) // (2 * total)


@dataclass(frozen=True)
class LaneShares:
    """Assigns rows to sources if every lane reads its own part of every source. With one lane, this is RowShares.

    All lanes follow the sequence of `shares`, but a lane starts `spacing` rows after the lane before it. If a batch has
    `spacing` rows per lane, its rows are consecutive in the sequence. So it has the shares as closely as without lanes.
    """

    shares: RowShares
    lanes: int = 1
    spacing: int = 1

    def counts(self, rows: int) -> Int64[np.ndarray, "K L"]:
        """Counts the first `rows` rows, a multiple of `lanes`, by source and lane."""
        # A lane starts at lane * spacing in the sequence. The rows before that place are none of its own.
        ends = (lane * self.spacing + rows // self.lanes for lane in range(self.lanes))
        return (np.array([self.shares.counts(end) for end in ends], np.int64) - self._before).T

    def assign(self, numbers: Int64[np.ndarray, "R"]) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
        """Returns every row's source, and how many earlier rows in its lane have the same source."""
        row, lane = np.divmod(numbers, self.lanes)
        sources, ordinals = self.shares.assign(row + lane * self.spacing)
        return sources, ordinals - self._before[lane, sources]

    @functools.cached_property
    def _before(self) -> Int64[np.ndarray, "L K"]:
        """Counts every source's rows before a lane's start in the sequence of `shares`."""
        # A cached property writes to __dict__, not by setattr, so a frozen dataclass may have one.
        return np.array([self.shares.counts(lane * self.spacing) for lane in range(self.lanes)], np.int64)


class Source(NamedTuple):
    """A data set in a mixture."""

    name: str  # empty if the phase reads one data set that is no mixture
    dataset: Dataset


class Mixture(NamedTuple):
    """Data sets whose rows have one layout, with their shares of a batch, largest share first."""

    sources: tuple[Source, ...]
    shares: RowShares

    @classmethod
    def single(cls, dataset: Dataset) -> "Mixture":
        """Returns a mixture that is a single data set without a name."""
        return cls((Source("", dataset),), RowShares((1,)))

    @classmethod
    def of(cls, spec: MixtureSpec, datasets: Sequence[Dataset], key: str) -> "Mixture":
        """Mixes data sets.

        Without weights, a share is proportional to the data set's training tokens to the power `spec.alpha` (Conneau et
        al. 2020, section 3.1).

        Args:
            datasets: The opened folders of `spec`.
            key: The configuration key, for errors.

        Raises:
            UserError: Rows of two sources do not fit into one batch or are the same, or a share is too small.
        """
        names = [folder.name for folder in spec.folders]
        _check_sources(names, datasets, key)
        if spec.alpha is None:
            weights = [folder.weight for folder in spec.folders if folder.weight is not None]
        else:
            # Counts are scaled to at most 1 first, so that no exponent makes a power overflow. The 1 avoids a division
            # by 0.
            tokens = [dataset.counts["tokens"] for dataset in datasets]
            weights = [(count / max(*tokens, 1)) ** spec.alpha for count in tokens]
        shares = RowShares.of(weights, names, key)
        # Sorted, so that the order and the names in the configuration do not change batches. RowShares rounds the first
        # share only once, so the largest share comes first.
        named = zip(shares.weights, names, datasets, strict=True)
        ordered = sorted(named, key=lambda source: (-source[0], source[2].fingerprint))
        sources = tuple(Source(name, dataset) for _, name, dataset in ordered)
        return cls(sources, RowShares(tuple(weight for weight, _, _ in ordered)))

    @property
    def dataset(self) -> Dataset:
        """The first data set. Vocabulary, length, objective and masking are the same in all of them."""
        return self.sources[0].dataset

    @property
    def filled(self) -> float:
        """Mean share of positions that are not padding, according to the manifests."""
        counts = [source.dataset.counts for source in self.sources]
        shares = [part["tokens"] / max(part["rows"] * self.dataset.seq_len, 1) for part in counts]
        weights = self.shares.weights
        return sum(weight * share for weight, share in zip(weights, shares, strict=True)) / sum(weights)

    @property
    def named(self) -> bool:
        """Whether the sources have names."""
        return bool(self.sources[0].name)


def _check_sources(names: Sequence[str], datasets: Sequence[Dataset], key: str) -> None:
    """Raises UserError for two sources whose rows do not fit into one batch, or are the same."""

    def layout(dataset: Dataset) -> tuple[tuple[str, str, Any], ...]:
        """Properties that all rows in a batch must share: name, option of build_examples, and value."""
        rule = dataset.masking.to_manifest()
        rule.pop("words", None)  # present only if the text has scripts without spaces, and then always "scripts"
        options = "options of masking"
        return (
            ("the tokenizer", "--tokenizer", dataset.tokenizer_hash[:12]),
            ("--seq_len", "--seq_len", dataset.seq_len),
            ("--objective", "--objective", dataset.manifest["objective"]),
            ("--pack", "--pack", dataset.pack),
            ("--masking", "--masking", dataset.manifest["masking"]["kind"]),
            ("the masking rule", options, ", ".join(f"{name} {value}" for name, value in rule.items())),
            ("a maximum of predictions per row of", options, dataset.max_predictions),
        )

    for number, dataset in enumerate(datasets[1:], 1):
        this, first = (f"{names[index]} ({as_address(datasets[index].directory)})" for index in (number, 0))
        for (words, option, value), (_, _, wanted) in zip(layout(dataset), layout(datasets[0]), strict=True):
            # Comparing with the first source is enough, because equality is transitive.
            if value != wanted:
                raise UserError(
                    f"{this} has {words} {value}, but {first} has {wanted}. Build all sources of {key} with the same "
                    f"{option}"
                )
        fingerprints = [other.fingerprint for other in datasets[:number]]
        if dataset.fingerprint in fingerprints:
            same = names[fingerprints.index(dataset.fingerprint)]
            raise UserError(
                f"{key} names the same rows twice, as {same} and {this}. Name them once, with the sum of the weights"
            )


# If steps are requested in order, so many positions are made together. So numpy's calls cost little even if batches
# have few rows. The number changes no batch.
_BLOCK_POSITIONS = 1 << 18


class _Block(NamedTuple):
    """The latest batches: the picked rows of the steps from `first` to before `end`, concatenated."""

    first: int
    end: int
    picked: Int64[np.ndarray, "K"]
    made: Any


class MixtureLoader:
    """Makes the batches of one phase from a mixture.

    Args:
        segments: The phase's steps and their batch sizes.
        read: How many rows earlier phases read, by source [K] and lane [L].
        lanes: A divisor of all batch sizes; 1 unless rows are streamed.
        readers: Read streamed sources, by fingerprint.

    Raises:
        UserError: As DatasetLoader does.
    """

    def __init__(
        self,
        mixture: Mixture,
        tokenizer: Vocabulary,
        *,
        segments: Sequence[BatchSegment],
        read: Int64[np.ndarray, "K L"],
        seed: int,
        rates: StepSchedule[float] | None,
        masking: MaskingConfig | None,
        lanes: int,
        readers: Mapping[str, ReadRows],
    ) -> None:
        self._segments, self._read, self._mixture = segments, read, mixture
        # `spacing` fits the batches of the first segment, so these have the shares most closely.
        self._shares = LaneShares(mixture.shares, lanes, segments[0].rows // lanes)
        self._loaders = [
            DatasetLoader(
                dataset, tokenizer, seed=seed, rates=rates, masking=masking, read=readers.get(dataset.fingerprint)
            )
            for _, dataset in mixture.sources
        ]
        self._block = _Block(-1, -1, np.zeros(0, np.int64), None)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Identify the rows and masks of the sources."""
        return tuple(loader.fingerprint for loader in self._loaders)

    def segment(self, step: int) -> BatchSegment:
        """Returns the step's segment. Raises ValueError for a step outside of the phase."""
        for segment in self._segments:
            if segment.contains(step):
                return segment
        raise ValueError(f"no batch of {self._mixture.dataset.directory} is assigned to step {step}")

    def rows_before(self, step: int) -> Int64[np.ndarray, "K L"]:
        """Counts the rows that the phase's earlier steps read, by source and lane."""
        return self._shares.counts(sum(segment.rows * segment.steps_before(step) for segment in self._segments))

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Batch:
        """Returns the global batch for `step`, or only the selected `rows` of it. The arrays are read-only."""
        segment, block = self.segment(step), self._block
        picked = np.arange(segment.rows, dtype=np.int64)[slice(None) if rows is None else rows]
        # Training, which always picks the same rows, finds most steps in the block. Any other request makes one step.
        same = np.array_equal(block.picked, picked)
        if not (same and block.first <= step < block.end):
            # If steps are requested in order, several steps are made together, up to the end of the segment.
            positions = self._mixture.dataset.seq_len * picked.size
            steps = max(1, _BLOCK_POSITIONS // max(1, positions)) if same and step == block.end else 1
            end = step + steps if segment.end is None else min(step + steps, segment.end)
            block = self._block = _Block(step, end, picked, self._make(segment, np.arange(step, end), picked))
            for field in block.made:
                if field is not None:
                    field.flags.writeable = False  # later calls return views of the same arrays
        begin = (step - block.first) * picked.size
        return Batch(*(field if field is None else field[begin : begin + picked.size] for field in block.made))

    def _make(self, segment: BatchSegment, steps: Int64[np.ndarray, "n"], picked: Int64[np.ndarray, "K"]) -> Batch:
        """Makes the picked rows of consecutive steps, concatenated."""
        lanes = self._shares.lanes
        # (step, row) -> number. A process loads consecutive rows of a batch. For it to read few lanes, the batch holds
        # one lane after another, while numbers are dealt to lanes in turn. In a batch of 8 rows in 4 lanes, row 5 is
        # row 1 of lane 2, so it has the batch's number 1 * 4 + 2 = 6. With one lane, row 5 has the number 5.
        lane, row_in_lane = np.divmod(picked, segment.rows // lanes)
        in_batch = row_in_lane * lanes + lane
        numbers = segment.before + (steps[:, None] - segment.first) * segment.rows + in_batch
        numbers, steps = numbers.reshape(-1), np.repeat(steps, picked.size)
        # number -> (source, ordinal). The source's earlier rows in this lane are from earlier phases or from this one.
        # Every source deals its ordinals to lanes in turn, too, so the lane's row n has the ordinal n * lanes + lane.
        sources, in_source = self._shares.assign(numbers)
        lane = numbers % lanes
        ordinals = (self._read[sources, lane] + in_source) * lanes + lane
        ahead = numbers.size > 1  # a run reads a single row to learn the shape of a later batch
        if len(self._loaders) == 1 or not numbers.size:
            return self._loaders[0].rows(ordinals, steps, ahead)
        # Rows are sorted by source, so that every loader makes its rows in one call. Then they return to their places.
        order = np.argsort(sources, kind="stable")
        ends = np.cumsum(np.bincount(sources, minlength=len(self._loaders)))
        made = [
            loader.rows(ordinals[rows], steps[rows], ahead)
            for loader, rows in zip(self._loaders, np.split(order, ends[:-1]), strict=True)
            if rows.size
        ]
        # `places` is the inverse of `order`: row i of the batch is row places[i] of the concatenated parts.
        places = np.argsort(order, kind="stable")
        fields = zip(*made, strict=True)
        return Batch(*(None if parts[0] is None else np.concatenate(parts)[places] for parts in fields))
