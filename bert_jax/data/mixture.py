"""Mixtures: several data sets whose rows fill batches in given shares, without state or sampling (law 1).

`read_mixture` reads what a user writes, `Mixture.of` opens it, `RowShares` divides rows among the sources, and
`MixtureLoader` makes the batches. The rows of a phase are numbered in the order in which its steps read them. RowShares
says which source a number belongs to and how many rows of that source come before it, so a batch needs no state. Each
source is read as a run on it alone would read it: in its own epochs, in the same order and with the same masks.
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
from bert_jax.data.loader import LoaderTokenizer, PretrainingLoader, RowReader, StepBatches
from bert_jax.data.schedules import BatchSegment, StepSchedule
from bert_jax.data.shards import Dataset
from bert_jax.errors import UserError
from bert_jax.storage.remote import address_of

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class NamedFolder(NamedTuple):
    """A source of a mixture as the configuration has it."""

    name: str
    folder: str
    weight: float | None  # relative to the others; None: by the number of tokens


class MixtureSpec(NamedTuple):
    """The sources of a mixture, and the exponent of their numbers of tokens if they have no weights."""

    folders: tuple[NamedFolder, ...]
    alpha: float | None = None


def read_mixture(sources: Mapping[str, Any], key: str, alpha: float = 1.0) -> MixtureSpec:
    """Returns the sources of a configuration's mixture: {NAME: (DIR, SHARE)}, or {NAME: DIR} with shares by tokens.

    Args:
        key: The configuration key, for messages.
        alpha: The exponent of the numbers of tokens, if the sources have no shares.

    Raises:
        UserError: for an impossible name or share, and if only some of the sources have a share.
    """
    folders = [
        NamedFolder(name, *((source, None) if isinstance(source, str) else source)) for name, source in sources.items()
    ]
    for folder in folders:
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
    """Which source each row of an endless sequence belongs to, and its number among the rows of that source.

    Of the first n rows, the first source has n times its share, rounded. The other rows are divided among the other
    sources in the same way. Of any n consecutive rows, each of K sources therefore has n times its share within K - 1
    rows, and within (K - 1) / 2 if they are the first n; random draws would be off by about sqrt(n). Both questions
    take K integer operations for any n, so that a run can begin at any step.
    """

    weights: tuple[int, ...]  # positive; a share is a weight divided by their sum

    @classmethod
    def of(cls, weights: Sequence[float], names: Sequence[str], key: str) -> "RowShares":
        """The shares of positive, finite weights. Raises UserError, with the name, for one that is too small.

        key   the configuration key of the weights, for messages
        """
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
        """The share of each source in the rows; they sum to 1."""
        return tuple(weight / sum(self.weights) for weight in self.weights)

    def counts(self, rows: int) -> tuple[int, ...]:
        """How many of the first `rows` rows belong to each source."""
        counts: list[int] = []
        rest, total = rows, sum(self.weights)
        for weight in self.weights:
            counts.append(_rounded_share(rest, weight, total))
            rest, total = rest - counts[-1], total - weight
        return tuple(counts)

    def assign(self, numbers: Int64[np.ndarray, "R"]) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
        """The source of each row, and its number among the rows of that source. `numbers` are from 0."""
        sources, ordinals = np.zeros((2, *numbers.shape), np.int64)
        # `left` are the rows that no source has yet; `rest`, their numbers among such rows. A row belongs to the source
        # whose rounded share grows with it.
        left, rest, total = np.arange(len(numbers)), numbers, sum(self.weights)
        for source, weight in enumerate(self.weights):
            before = _rounded_share(rest, weight, total)
            taken = _rounded_share(rest + 1, weight, total) > before
            sources[left[taken]], ordinals[left[taken]] = source, before[taken]
            left, rest, total = left[~taken], (rest - before)[~taken], total - weight
        return sources, ordinals


@dataclass(frozen=True)
class LaneShares:
    """Which source each row belongs to if rows are dealt to lanes in turn, and every lane reads its own part of each.

    Row number n is row n // lanes of lane n mod lanes. Each lane has the shares, beginning at another place of their
    sequence, `spacing` rows after the lane before it: with as many rows of each lane in a batch, the rows of a batch
    are consecutive in the sequence, and so have the shares as closely as without lanes. One lane is RowShares.
    """

    shares: RowShares
    lanes: int = 1
    spacing: int = 1

    def counts(self, rows: int) -> Int64[np.ndarray, "K L"]:
        """How many of the first `rows` rows, a multiple of `lanes`, belong to each source, by lane."""
        ends = (lane * self.spacing + rows // self.lanes for lane in range(self.lanes))
        return (np.array([self.shares.counts(end) for end in ends], np.int64) - self._before).T

    def assign(self, numbers: Int64[np.ndarray, "R"]) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
        """The source of each row, and how many rows of that source the lane of the row has before it."""
        index, lane = np.divmod(numbers, self.lanes)
        sources, ordinals = self.shares.assign(index + lane * self.spacing)
        return sources, ordinals - self._before[lane, sources]

    @functools.cached_property
    def _before(self) -> Int64[np.ndarray, "L K"]:
        """How many rows of each source come before the rows of each lane in the sequence of the shares."""
        return np.array([self.shares.counts(lane * self.spacing) for lane in range(self.lanes)], np.int64)


def _rounded_share(rows: Number, weight: int, total: int) -> Number:
    """rows * weight / total, rounded to the nearest integer and half up, without a product that exceeds 64 bits."""
    wholes, rest = rows // total, rows % total
    return wholes * weight + (2 * rest * weight + total) // (2 * total)


class Source(NamedTuple):
    """A data set of a mixture."""

    name: str  # empty: the only data set of a phase that is not a mixture
    dataset: Dataset


class Mixture(NamedTuple):
    """Data sets with rows of one layout, and their shares of the rows of each batch.

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
        """The mixture of a specification, whose folders are opened as `datasets`; `key` is its configuration key.

        With alpha, the share of a source is proportional to its number of training tokens to the power alpha (Conneau
        et al. 2020, section 3.1). Raises UserError for sources that do not fit into one batch, that hold the same rows,
        or whose shares are too small.
        """
        names = [folder.name for folder in spec.folders]
        check_sources(names, datasets, key)
        if spec.alpha is None:
            weights = [folder.weight for folder in spec.folders if folder.weight is not None]
        else:
            tokens = [training_counts(dataset)["tokens"] for dataset in datasets]
            weights = [(count / max(*tokens, 1)) ** spec.alpha for count in tokens]
        shares = RowShares.of(weights, names, key)
        named = zip(shares.weights, names, datasets, strict=True)
        ordered = sorted(named, key=lambda source: (-source[0], source[2].fingerprint))
        sources = tuple(Source(name, dataset) for _, name, dataset in ordered)
        return cls(sources, RowShares(tuple(weight for weight, _, _ in ordered)))

    @property
    def dataset(self) -> Dataset:
        """The first data set, for what all of them share: vocabulary, length, objective and masking."""
        return self.sources[0].dataset

    @property
    def filled(self) -> float:
        """The share of positions that are not padding, by the manifests, in rows of the mixture's shares."""
        counts = [training_counts(source.dataset) for source in self.sources]
        shares = [part["tokens"] / max(part["rows"] * self.dataset.seq_len, 1) for part in counts]
        weights = self.shares.weights
        return sum(weight * share for weight, share in zip(weights, shares, strict=True)) / sum(weights)

    @property
    def named(self) -> bool:
        """Whether the sources have names."""
        return bool(self.sources[0].name)


def training_counts(dataset: Dataset) -> Mapping[str, Any]:
    """The counts of a data set's part in its manifest, such as rows and tokens."""
    return dataset.manifest["parts"][dataset.part]


def check_sources(names: Sequence[str], datasets: Sequence[Dataset], key: str) -> None:
    """Raises UserError, which names two sources, unless the rows of all sources fit into one batch and differ."""
    first = datasets[0]
    for number, dataset in enumerate(datasets[1:], 1):
        here, there = (f"{names[each]} ({address_of(datasets[each].directory)})" for each in (number, 0))
        for (what, option, value), (_, _, wanted) in zip(_layout(dataset), _layout(first), strict=True):
            if value != wanted:
                raise UserError(
                    f"{here} has {what} {value}, but {there} has {wanted}. Build all sources of {key} with the same "
                    f"{option}"
                )
        fingerprints = [other.fingerprint for other in datasets[:number]]
        if dataset.fingerprint in fingerprints:
            same = names[fingerprints.index(dataset.fingerprint)]
            raise UserError(
                f"{key} names the same rows twice, as {same} and {here}. Name them once, with the sum of the weights"
            )


def _layout(dataset: Dataset) -> tuple[tuple[str, str, Any], ...]:
    """What the rows of one batch share: in words, the option of build_examples, and the value."""
    manifest, masking = dataset.manifest, dataset.manifest["masking"]
    values = dataset.masking.to_manifest()
    values.pop("words", None)  # stated only if the text has scripts without spaces, and then it is always scripts
    rule = ", ".join(f"{name} {value}" for name, value in values.items())
    return (
        ("the tokenizer", "--tokenizer", dataset.tokenizer_hash[:12]),
        ("--seq_len", "--seq_len", dataset.seq_len),
        ("--objective", "--objective", manifest["objective"]),
        ("--pack", "--pack", dataset.pack),
        ("--masking", "--masking", masking["kind"]),
        ("the masking rule", "options of masking", rule),
        ("a maximum of predictions per row of", "options of masking", dataset.max_predictions),
    )


class MixtureLoader(StepBatches):
    """The batches of the steps of some segments, with rows of all sources of a mixture.

    read     how many rows of each source [K] earlier phases read in each lane [L]
    lanes    divides the number of rows of all batches; 1 unless rows are streamed
    readers  read the rows of streamed sources, by fingerprint
    Raises UserError as PretrainingLoader does.
    """

    def __init__(
        self,
        mixture: Mixture,
        tokenizer: LoaderTokenizer,
        *,
        segments: Sequence[BatchSegment],
        read: Int64[np.ndarray, "K L"],
        seed: int,
        rates: StepSchedule[float] | None = None,
        lanes: int = 1,
        readers: Mapping[str, RowReader],
    ) -> None:
        super().__init__(segments, mixture.dataset.seq_len, str(mixture.dataset.directory), lanes)
        self._read = read
        self._shares = lane_shares(mixture, segments, lanes)
        datasets = [source.dataset for source in mixture.sources]
        rows = segments[0].rows
        self._loaders = [
            PretrainingLoader(
                each, tokenizer, batch_size=rows, seed=seed, rates=rates, reader=readers.get(each.fingerprint)
            )
            for each in datasets
        ]

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprints of the rows and masks of each source."""
        return tuple(loader.fingerprint for loader in self._loaders)

    def counts_before(self, step: int) -> tuple[int, ...]:
        """How many rows of each source the steps of the segments before this one read."""
        return tuple(self._shares.counts(self.rows_before(step)).sum(axis=1).tolist())

    def rows(self, numbers: Int64[np.ndarray, "R"], steps: Int64[np.ndarray, "R"], ahead: bool = True) -> Batch:
        """The rows with these numbers among all that the phase reads, from the data sets of its mixture."""
        sources, ordinals = self._shares.assign(numbers)
        lane = numbers % self._shares.lanes
        ordinals = (self._read[sources, lane] + ordinals) * self._shares.lanes + lane
        ahead &= numbers.size > 1  # a run reads a single row to learn the shape of a later batch
        if len(self._loaders) == 1 or not numbers.size:
            return self._loaders[0].rows(ordinals, steps, ahead)
        # Each loader makes its rows at once; then they return to the order of `numbers`.
        order = np.argsort(sources, kind="stable")
        ends = np.cumsum(np.bincount(sources, minlength=len(self._loaders)))
        made = [
            loader.rows(ordinals[some], steps[some], ahead)
            for loader, some in zip(self._loaders, np.split(order, ends[:-1]), strict=True)
            if some.size
        ]
        places = np.argsort(order, kind="stable")
        fields = zip(*made, strict=True)
        return Batch(*(None if parts[0] is None else np.concatenate(parts)[places] for parts in fields))


def lane_shares(mixture: Mixture, segments: Sequence[BatchSegment], lanes: int) -> LaneShares:
    """The shares of a mixture in the lanes of some segments, closest in the batches of the first of them."""
    return LaneShares(mixture.shares, lanes, segments[0].rows // lanes)
