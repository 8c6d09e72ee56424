"""Makes the batches of a phase from the data sets of its mixture (law 1).

The rows of a phase are numbered in the order in which its steps read them. RowShares says which source a number belongs
to and how many rows of that source come before it, so a batch needs no state. Each source is read as a run on it alone
would read it: in its own epochs, in the same order and with the same masks.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.data.batch_schedule import BatchSegment
from bert_jax.data.example import Batch
from bert_jax.data.loader import LoaderTokenizer, PretrainingLoader, RowReader
from bert_jax.data.mixture import Mixture
from bert_jax.data.row_shares import LaneShares
from bert_jax.data.step_batches import StepBatches
from bert_jax.data.step_schedule import StepSchedule


class MixtureLoader:
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
        dataset = mixture.dataset
        self._steps = StepBatches(segments, dataset.seq_len, str(dataset.directory), self._rows, lanes)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprints of the rows and masks of each source."""
        return tuple(loader.fingerprint for loader in self._loaders)

    def rows_at(self, step: int) -> int:
        """The number of rows of a step's global batch. Raises ValueError for a step outside the segments."""
        return self._steps.rows_at(step)

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Batch:
        """The global batch of a step, or only the selected `rows` of it. Raises ValueError as `rows_at` does."""
        return self._steps.batch(step, rows)

    def counts_before(self, step: int) -> tuple[int, ...]:
        """How many rows of each source the steps of the segments before this one read."""
        return tuple(self._shares.counts(self._steps.rows_before(step)).sum(axis=1).tolist())

    def _rows(self, numbers: Int64[np.ndarray, "R"], steps: Int64[np.ndarray, "R"]) -> Batch:
        sources, ordinals = self._shares.assign(numbers)
        lane = numbers % self._shares.lanes
        ordinals = (self._read[sources, lane] + ordinals) * self._shares.lanes + lane
        ahead = numbers.size > 1  # a run reads a single row to learn the shape of a later batch
        if len(self._loaders) == 1 or not numbers.size:
            return self._loaders[0].rows(ordinals, steps, ahead)
        order = np.argsort(sources, kind="stable")
        ends = np.cumsum(np.bincount(sources, minlength=len(self._loaders)))
        made = [
            loader.rows(ordinals[some], steps[some], ahead)
            for loader, some in zip(self._loaders, np.split(order, ends[:-1]), strict=True)
            if some.size
        ]
        places = np.argsort(order, kind="stable")  # of the rows in the order of `numbers`
        fields = zip(*made, strict=True)
        return Batch(*(None if parts[0] is None else np.concatenate(parts)[places] for parts in fields))


def lane_shares(mixture: Mixture, segments: Sequence[BatchSegment], lanes: int) -> LaneShares:
    """The shares of a mixture in the lanes of some segments, closest in the batches of the first of them."""
    return LaneShares(mixture.shares, lanes, segments[0].rows // lanes)
