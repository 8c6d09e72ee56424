"""Pretraining in phases: other shards from a given step, of another length (128, then 512; Devlin et al. 2019, A.2).

A phase reads one data set, or a mixture of several (mixture.py).
"""

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Int64
from bert_jax.command import UserError
from bert_jax.data import step_schedule
from bert_jax.data.batch_schedule import BatchSegment, batch_segments
from bert_jax.data.example import Batch
from bert_jax.data.loader import LoaderTokenizer
from bert_jax.data.mixture import Mixture, training_counts
from bert_jax.data.mixture_loader import MixtureLoader, lane_shares
from bert_jax.data.mixture_spec import is_mixture
from bert_jax.data.row_shares import DIGITS
from bert_jax.data.step_schedule import StepSchedule
from bert_jax.data.streamed_dataset import StreamedDataset, window_caches
from bert_jax.data.window_order import common_lanes
from bert_jax.storage.remote import address_of


class Phase(NamedTuple):
    """The shards that are read from step `first`."""

    first: int
    mixture: Mixture

    @property
    def key(self) -> str:
        """The configuration key that names the shards."""
        if self.first:
            return f"data.phases.{self.first}"
        return "data.mixture" if self.mixture.named else "data.train"

    @property
    def held_out_key(self) -> str:
        """The key of the held-out shards that are evaluated during the phase."""
        return f"data.eval.{self.first}" if self.first else "data.eval"


def source_key(key: str, name: str) -> str:
    """The key of a source of the mixture that another key names; that key itself for a data set without a name."""
    return f"{key}.{name}" if name else key


def parse_phases(first: str, phases: str) -> list[tuple[int, str]]:
    """The first step of each phase, and its folder or the text of its mixture. `first` is that of step 0.

    Raises UserError for invalid syntax.
    """
    if not phases:
        return [(0, first)]
    example = "900000:shards_512"
    schedule = step_schedule.parse(phases, "data.phases", _folder_or_mixture, example, first=1, commas=True)
    return [(0, first), *zip(schedule.steps, schedule.values, strict=True)]


def _folder_or_mixture(text: str) -> str:
    if not text.strip() or ("," in text and not is_mixture(text)):
        raise ValueError("no folder, or several without names")
    return text.strip()


def check_phases(phases: Sequence[Phase]) -> None:
    """Raises UserError unless all phases share the tokenizer and the kind of sequences of the first phase."""
    first = phases[0].mixture.dataset
    for phase in phases[1:]:
        dataset = phase.mixture.dataset
        where, there = f"{phase.key} ({address_of(dataset.directory)})", phases[0].key
        if dataset.tokenizer_hash != first.tokenizer_hash:
            raise UserError(
                f"{where} was built with a different tokenizer than {there} ({first.directory}). Build all phases "
                "with the same --tokenizer"
            )
        if dataset.labelled != first.labelled:
            labelled, unlabelled = (first, dataset) if first.labelled else (dataset, first)
            raise UserError(
                f"{where} and {there} need different objectives: {labelled.directory} has labelled pairs "
                f"({labelled.manifest['objective']}), {unlabelled.directory} has none "
                f"({unlabelled.manifest['objective']}). Build all phases with the same --objective"
            )


def rows_read(
    phases: Sequence[Phase], segments: Sequence[Sequence[BatchSegment]], lanes: int = 1
) -> list[Int64[np.ndarray, "K L"]]:
    """How many rows of each source [K] of each phase the phases before it read, by lane [L].

    If an earlier phase has read a data set, a later phase resumes it there: within an epoch no row is left out or
    repeated, whether the phases read it alone or in mixtures.
    """
    read: dict[str, np.ndarray] = {}
    found = []
    for phase, part in zip(phases, segments, strict=True):
        fingerprints = [source.dataset.fingerprint for source in phase.mixture.sources]
        none = np.zeros(lanes, np.int64)
        found.append(np.array([read.get(fingerprint, none) for fingerprint in fingerprints]))
        if (end := part[-1].end) is not None:
            rows = part[-1].before + (end - part[-1].first) * part[-1].rows
            counts = lane_shares(phase.mixture, part, lanes).counts(rows)
            for fingerprint, count in zip(fingerprints, counts, strict=True):
                read[fingerprint] = read.get(fingerprint, none) + count
    return found


class PhasedLoader:
    """The batches of all phases. The loader of its phase makes the batch of each step."""

    def __init__(
        self,
        phases: Sequence[Phase],
        tokenizer: LoaderTokenizer,
        *,
        batches: StepSchedule[int],
        seed: int,
        rates: StepSchedule[float] | None = None,
    ) -> None:
        """Raises UserError as PretrainingLoader and check_phases do."""
        check_phases(phases)
        segments = batch_segments(batches, [phase.first for phase in phases])
        streamed = isinstance(phases[0].mixture.dataset, StreamedDataset)
        lanes = common_lanes(batches.values) if streamed else 1
        self._caches = window_caches([phase.mixture for phase in phases], lanes, seed)
        self._loaders = [
            MixtureLoader(
                phase.mixture,
                tokenizer,
                segments=part,
                read=read,
                seed=seed,
                rates=rates,
                lanes=lanes,
                readers=self._caches,
            )
            for phase, part, read in zip(phases, segments, rows_read(phases, segments, lanes), strict=True)
        ]
        self._phases, self._reading = list(phases), 0
        self.changes = tuple(sorted(segment.first for part in segments for segment in part))

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """The fingerprint of the rows and masks of each source of each phase, by configuration key."""
        return {
            source_key(phase.key, source.name): fingerprint
            for phase, loader in zip(self._phases, self._loaders, strict=True)
            for source, fingerprint in zip(phase.mixture.sources, loader.fingerprints, strict=True)
        }

    @property
    def shares(self) -> Mapping[str, float]:
        """The share of each named source of each phase in the rows of its batches, by configuration key."""
        return {
            source_key(phase.key, source.name): round(share, DIGITS)
            for phase in self._phases
            for source, share in zip(phase.mixture.sources, phase.mixture.shares.fractions, strict=True)
            if source.name
        }

    def phase(self, step: int) -> int:
        """The index of the phase of a step."""
        return bisect.bisect_right(self._phases, step, key=lambda phase: phase.first) - 1

    def rows_at(self, step: int) -> int:
        """The number of rows of a step's global batch. Raises ValueError for a negative step."""
        return self._loaders[self.phase(step)].rows_at(step)

    def tokens_before(self, step: int) -> float:
        """The tokens of the text that all steps before this one read: without padding, before infilling shortens it.

        Each row counts as many tokens as the rows of its data set have on average, by its manifest. The number is
        therefore a function of the step, and equals what was read wherever a whole number of epochs was read.
        """
        read = 0.0
        for phase, loader in zip(self._phases, self._loaders, strict=True):
            for source, rows in zip(phase.mixture.sources, loader.counts_before(step), strict=True):
                counts = training_counts(source.dataset)
                read += rows * counts["tokens"] / counts["rows"]
        return read

    def epochs_before(self, step: int, first: int = 0) -> Mapping[str, float]:
        """The epochs that the steps from `first` to before this one read, by the name of each source of the latest
        step's mixture."""
        read, earlier = self._rows_before(step), self._rows_before(first)
        mixture = self._phases[self.phase(max(step - 1, 0))].mixture
        found = {source.name: source.dataset for source in mixture.sources if source.name}
        return {
            name: (read[dataset.fingerprint] - earlier[dataset.fingerprint]) / dataset.rows
            for name, dataset in found.items()
        }

    def _rows_before(self, step: int) -> Mapping[str, int]:
        """The rows that all steps before this one read, by the fingerprint of their data set."""
        read: Counter[str] = Counter()
        for phase, loader in zip(self._phases, self._loaders, strict=True):
            for source, rows in zip(phase.mixture.sources, loader.counts_before(step), strict=True):
                read[source.dataset.fingerprint] += rows
        return read

    def describe_mixtures(self, end: int = 0, first: int = 0) -> list[str]:
        """A line for each phase that is a mixture: the shares of its sources, and the epochs at the end of the phase.

        end     the step at which the run ends; 0: unknown
        first   the first step that epochs count; phases that end before it are left out
        """
        lines = []
        for phase, stop in zip(self._phases, self._stops(end), strict=True):
            if not phase.mixture.named or (stop and stop <= max(phase.first, first)):
                continue
            epochs = self.epochs_before(stop, first) if stop else {}
            sources = [
                f"{source.name} {share:.2%}" + (f" ({epochs[source.name]:.2f} epochs)" if epochs else "")
                for source, share in zip(phase.mixture.sources, phase.mixture.shares.fractions, strict=True)
            ]
            since = f"from step {first:,} " if first else ""
            until = f", and epochs {since}until step {stop:,}" if stop else ""
            lines.append(f"{phase.key}, shares of the rows{until}: {', '.join(sources)}")
        return lines

    def _stops(self, end: int) -> list[int]:
        """The step after the last one of each phase in a run that ends at `end`; 0: unknown."""
        stops = [phase.first for phase in self._phases[1:]]
        return [*(min(stop, end) if end else stop for stop in stops), end]

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Batch:
        """The global batch of a step, or only the selected `rows` of it. Raises ValueError for a negative step."""
        phase = self.phase(step)
        if phase != self._reading:
            read = {source.dataset.fingerprint for source in self._phases[phase].mixture.sources}
            for fingerprint in self._caches.keys() - read:
                self._caches[fingerprint].release()
            self._reading = phase
        return self._loaders[phase].batch(step, rows)

    def close(self) -> None:
        """Ends the threads that load streamed rows. No batch may be requested afterwards."""
        for cache in self._caches.values():
            cache.close()
