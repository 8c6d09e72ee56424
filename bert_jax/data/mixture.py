"""Mixtures: several data sets fill batches in given shares, without state or sampling (law 1).

`read_mixture` checks the configuration's sources, `Mixture.of` joins the opened ones, `RowShares` divides rows among
them, and `MixtureLoader` makes the batches of a phase. From a row's number alone, RowShares tells its source and how
many rows of this source come before it, so a batch needs no state. A source is read as a run on it alone would read it:
in its own epochs, in the same order and with the same masks.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data.example import Batch
from bert_jax.data.loader import DatasetLoader, ReadRows
from bert_jax.data.schedules import BatchSegment, StepSchedule
from bert_jax.data.shards import Dataset
from bert_jax.errors import UserError
from bert_jax.storage.remote import address_of
from bert_jax.tokenization.vocabulary import Vocabulary

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class NamedFolder(NamedTuple):
    """A source of a mixture as the configuration has it."""

    name: str
    folder: str
    weight: float | None  # relative to the others; None: by the number of tokens


class MixtureSpec(NamedTuple):
    """A mixture as the user writes it. Without weights, `alpha` is the exponent for token counts."""

    folders: tuple[NamedFolder, ...]
    alpha: float | None = None


def read_mixture(sources: Mapping[str, Any], key: str, alpha: float = 1.0) -> MixtureSpec:
    """Returns the sources of a configuration's mixture: {NAME: (DIR, SHARE)}, or {NAME: DIR} with shares by tokens.

    Args:
        key: The configuration key, for messages.
        alpha: The exponent of the numbers of tokens, if the sources have no shares.

    Raises:
        UserError: for an impossible name, folder or share, and if only some of the sources have a share.
    """
    if not sources:
        raise UserError(f"{key} has no sources. Name at least one, such as {{wiki: ('DIR', 1)}}")
    folders = [
        NamedFolder(name, *((source, None) if isinstance(source, str) else source)) for name, source in sources.items()
    ]
    for folder in folders:
        if not folder.folder.strip():
            raise UserError(f"{key}: the folder of {folder.name} is empty. Name one")
        if not _NAME.fullmatch(folder.name):
            raise UserError(f"{key} has the name {folder.name!r}. Use letters, digits, _ and -, and a letter first")
        if folder.weight is not None and not 0 < folder.weight < math.inf:
            raise UserError(
                f"{key}: the share of {folder.name} is {folder.weight:g}. Use a positive number, or omit it"
            )
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
    """Assigns an endless sequence of rows to sources, and numbers them within their source.

    Of the first n rows, the first source gets n times its share, rounded. The other rows are divided among the other
    sources in the same way. So with K sources, any n consecutive rows are at most K - 1 rows away from the shares, and
    the first n rows (K - 1) / 2; random draws would be off by about sqrt(n). Both methods take K integer operations for
    any n, so a run can begin at any step.
    """

    weights: tuple[int, ...]  # positive; a share is a weight divided by their sum

    @classmethod
    def of(cls, weights: Sequence[float], names: Sequence[str], key: str) -> "RowShares":
        """The shares of positive, finite weights. Raises UserError, with the name, for one that is too small."""
        largest = max(weights)  # the sum of finite weights may be infinite
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
        """Each source's share of the rows; they sum to 1."""
        return tuple(weight / sum(self.weights) for weight in self.weights)

    def counts(self, rows: int) -> tuple[int, ...]:
        """Counts the first `rows` rows by source."""
        counts: list[int] = []
        rest, total = rows, sum(self.weights)
        for weight in self.weights:
            counts.append(_rounded_share(rest, weight, total))
            rest, total = rest - counts[-1], total - weight
        return tuple(counts)

    def assign(self, numbers: Int64[np.ndarray, "R"]) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
        """The source of each row, and the row's number within its source. `numbers` count from 0."""
        sources, ordinals = np.zeros((2, *numbers.shape), np.int64)
        # `left` indexes the rows that no source has yet, and `rest` numbers them among such rows. A row belongs to the
        # source whose rounded share grows with it.
        left, rest, total = np.arange(len(numbers)), numbers, sum(self.weights)
        for source, weight in enumerate(self.weights):
            before = _rounded_share(rest, weight, total)
            taken = _rounded_share(rest + 1, weight, total) > before
            sources[left[taken]], ordinals[left[taken]] = source, before[taken]
            left, rest, total = left[~taken], (rest - before)[~taken], total - weight
        return sources, ordinals


def _rounded_share(rows: Number, weight: int, total: int) -> Number:
    """rows * weight / total, rounded to the nearest integer and half up, without a product that exceeds 64 bits."""
    wholes, rest = rows // total, rows % total
    return wholes * weight + (2 * rest * weight + total) // (2 * total)


@dataclass(frozen=True)
class LaneShares:
    """Assigns rows to sources if rows are dealt to lanes in turn, and every lane reads its own part of a source.

    Row number n is row n // lanes of lane n mod lanes. All lanes follow the sequence of the shares, but a lane begins
    `spacing` rows after the lane before it. If a batch has `spacing` rows per lane, its rows are consecutive in the
    sequence, and so have the shares as closely as without lanes. One lane is RowShares.
    """

    shares: RowShares
    lanes: int = 1
    spacing: int = 1

    def counts(self, rows: int) -> Int64[np.ndarray, "K L"]:
        """Counts the first `rows` rows, a multiple of `lanes`, by source and lane."""
        ends = (lane * self.spacing + rows // self.lanes for lane in range(self.lanes))
        return (np.array([self.shares.counts(end) for end in ends], np.int64) - self._before).T

    def assign(self, numbers: Int64[np.ndarray, "R"]) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
        """The source of each row, and how many rows of that source its lane reads before it."""
        index, lane = np.divmod(numbers, self.lanes)
        sources, ordinals = self.shares.assign(index + lane * self.spacing)
        return sources, ordinals - self._before[lane, sources]

    @functools.cached_property
    def _before(self) -> Int64[np.ndarray, "L K"]:
        """How many rows of a source come before a lane's first row in the sequence of the shares."""
        return np.array([self.shares.counts(lane * self.spacing) for lane in range(self.lanes)], np.int64)


class Source(NamedTuple):
    """A data set in a mixture."""

    name: str  # empty: the only data set of a phase that is not a mixture
    dataset: Dataset


class Mixture(NamedTuple):
    """Data sets whose rows have one layout, and their shares of a batch.

    The largest share comes first, so that batches do not depend on the order or the names in which a mixture is
    written, and counts are closest to the shares (RowShares).
    """

    sources: tuple[Source, ...]
    shares: RowShares

    @classmethod
    def single(cls, dataset: Dataset) -> "Mixture":
        """One data set, without a name."""
        return cls((Source("", dataset),), RowShares((1,)))

    @classmethod
    def of(cls, spec: MixtureSpec, datasets: Sequence[Dataset], key: str) -> "Mixture":
        """Mixes `datasets`, the opened folders of `spec`, which the configuration key `key` names.

        With alpha, a source's share is proportional to its training tokens to the power alpha (Conneau et al. 2020,
        section 3.1).

        Raises:
          UserError: for sources that do not fit into one batch or hold the same rows, and for too small shares.
        """
        names = [folder.name for folder in spec.folders]
        _check_sources(names, datasets, key)
        if spec.alpha is None:
            weights = [folder.weight for folder in spec.folders if folder.weight is not None]
        else:
            tokens = [dataset.counts["tokens"] for dataset in datasets]
            weights = [(count / max(*tokens, 1)) ** spec.alpha for count in tokens]
        shares = RowShares.of(weights, names, key)
        named = zip(shares.weights, names, datasets, strict=True)
        ordered = sorted(named, key=lambda source: (-source[0], source[2].fingerprint))
        sources = tuple(Source(name, dataset) for _, name, dataset in ordered)
        return cls(sources, RowShares(tuple(weight for weight, _, _ in ordered)))

    @property
    def dataset(self) -> Dataset:
        """The first data set, for all that the sources share: vocabulary, length, objective and masking."""
        return self.sources[0].dataset

    @property
    def filled(self) -> float:
        """The mean share of positions without padding, by the manifests."""
        counts = [source.dataset.counts for source in self.sources]
        shares = [part["tokens"] / max(part["rows"] * self.dataset.seq_len, 1) for part in counts]
        weights = self.shares.weights
        return sum(weight * share for weight, share in zip(weights, shares, strict=True)) / sum(weights)

    @property
    def named(self) -> bool:
        """Whether the sources have names."""
        return bool(self.sources[0].name)


def _check_sources(names: Sequence[str], datasets: Sequence[Dataset], key: str) -> None:
    """Raises UserError, which names two sources, unless the rows of all sources fit into one batch and differ."""

    def layout(dataset: Dataset) -> tuple[tuple[str, str, Any], ...]:
        """The properties that all rows of a batch share: name, option of build_examples, and value."""
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
        this, first = (f"{names[index]} ({address_of(datasets[index].directory)})" for index in (number, 0))
        for (words, option, value), (_, _, wanted) in zip(layout(dataset), layout(datasets[0]), strict=True):
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


# Positions that are made together if steps are requested in order: numpy's calls then cost little even for batches of
# a few rows. The number changes no batch.
_BLOCK_POSITIONS = 1 << 18


class _Block(NamedTuple):
    """The latest batches: the picked rows of consecutive steps, concatenated."""

    first: int
    end: int
    picked: Int64[np.ndarray, "K"]
    rows: Any


class MixtureLoader:
    """Makes the batches of one phase from a mixture.

    Args:
      segments: the steps and their batch sizes.
      read: how many rows earlier phases read, by source [K] and lane [L].
      lanes: a divisor of all batch sizes; 1 unless rows are streamed. Rows of one lane follow one another in a batch,
        so that a process, which loads consecutive rows, reads few lanes.
      readers: read streamed sources, by fingerprint.

    Raises:
      UserError: as DatasetLoader does.
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
        lanes: int,
        readers: Mapping[str, ReadRows],
    ) -> None:
        self._segments, self._read, self._mixture = segments, read, mixture
        # The shares are met most closely in batches of the first segment.
        self._shares = LaneShares(mixture.shares, lanes, segments[0].rows // lanes)
        self._loaders = [
            DatasetLoader(dataset, tokenizer, seed=seed, rates=rates, read=readers.get(dataset.fingerprint))
            for _, dataset in mixture.sources
        ]
        self._block = _Block(-1, -1, np.zeros(0, np.int64), None)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Identify the sources' rows and masks."""
        return tuple(loader.fingerprint for loader in self._loaders)

    def segment(self, step: int) -> BatchSegment:
        """The step's segment. Raises ValueError for a step without one, such as a negative step."""
        for segment in self._segments:
            if segment.contains(step):
                return segment
        raise ValueError(f"no batch of {self._mixture.dataset.directory} is assigned to step {step}")

    def rows_before(self, step: int) -> Int64[np.ndarray, "K L"]:
        """How many rows the phase's earlier steps read, by source and lane."""
        return self._shares.counts(sum(segment.rows * segment.steps_before(step) for segment in self._segments))

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Batch:
        """The global batch for `step`, or only the selected `rows` of it. The arrays are read-only."""
        segment, block = self.segment(step), self._block
        picked = np.arange(segment.rows, dtype=np.int64)[slice(None) if rows is None else rows]
        same = np.array_equal(block.picked, picked)
        if not (same and block.first <= step < block.end):
            # If steps are requested in order, several steps are made together, up to the end of the segment.
            positions = self._mixture.dataset.seq_len * picked.size
            steps = max(1, _BLOCK_POSITIONS // max(1, positions)) if same and step == block.end else 1
            end = step + steps if segment.end is None else min(step + steps, segment.end)
            block = self._block = _Block(step, end, picked, self._batches(segment, np.arange(step, end), picked))
        begin = (step - block.first) * picked.size
        return Batch(*(field if field is None else field[begin : begin + picked.size] for field in block.rows))

    def _batches(self, segment: BatchSegment, steps: Int64[np.ndarray, "n"], picked: Int64[np.ndarray, "K"]) -> Batch:
        """The picked rows of consecutive steps, concatenated."""
        # Rows are grouped by lane in a batch, but dealt to the lanes in turn by number.
        lane, place = np.divmod(picked, segment.rows // self._shares.lanes)
        within = place * self._shares.lanes + lane  # `picked` itself with one lane
        numbers = segment.before + (steps[:, None] - segment.first) * segment.rows + within
        made = self._rows(numbers.reshape(-1), np.repeat(steps, picked.size))
        for field in made:
            if field is not None:
                field.flags.writeable = False
        return made

    def _rows(self, numbers: Int64[np.ndarray, "R"], steps: Int64[np.ndarray, "R"]) -> Batch:
        """The rows with these numbers among all that the phase reads."""
        sources, ordinals = self._shares.assign(numbers)
        lane = numbers % self._shares.lanes
        ordinals = (self._read[sources, lane] + ordinals) * self._shares.lanes + lane
        ahead = numbers.size > 1  # a run reads a single row to learn the shape of a later batch
        if len(self._loaders) == 1 or not numbers.size:
            return self._loaders[0].rows(ordinals, steps, ahead)
        # Each loader makes its rows at once; then they return to the order of `numbers`.
        order = np.argsort(sources, kind="stable")
        ends = np.cumsum(np.bincount(sources, minlength=len(self._loaders)))
        made = [
            loader.rows(ordinals[rows], steps[rows], ahead)
            for loader, rows in zip(self._loaders, np.split(order, ends[:-1]), strict=True)
            if rows.size
        ]
        places = np.argsort(order, kind="stable")
        fields = zip(*made, strict=True)
        return Batch(*(None if parts[0] is None else np.concatenate(parts)[places] for parts in fields))
