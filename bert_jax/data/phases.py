"""Pretraining in phases: other shards from a given step, of another length (128, then 512; Devlin et al. 2019, A.2)."""

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.command import UserError
from bert_jax.data import step_schedule
from bert_jax.data.batch_schedule import batch_segments
from bert_jax.data.example import Batch
from bert_jax.data.loader import LoaderTokenizer, PretrainingLoader
from bert_jax.data.shards import Dataset
from bert_jax.data.step_schedule import StepSchedule


class Phase(NamedTuple):
    """The shards that are read from step `first`."""

    first: int
    dataset: Dataset

    @property
    def key(self) -> str:
        """The configuration key that names the shards."""
        return f"data.phases.{self.first}" if self.first else "data.train"

    @property
    def held_out_key(self) -> str:
        """The key of the held-out shards that are evaluated during the phase."""
        return f"data.eval.{self.first}" if self.first else "data.eval"


def parse_phases(train: str, phases: str) -> list[tuple[int, str]]:
    """The first step and the folder of each phase, data.train first. Raises UserError for invalid syntax."""
    if not phases:
        return [(0, train)]
    schedule = step_schedule.parse(phases, "data.phases", _folder, "900000:shards_512", first=1)
    return [(0, train), *zip(schedule.steps, schedule.values, strict=True)]


def _folder(text: str) -> str:
    if not text.strip():
        raise ValueError("no folder")
    return text.strip()


def check_phases(phases: Sequence[Phase]) -> None:
    """Raises UserError unless all phases share the tokenizer and the kind of sequences of the first phase."""
    first = phases[0].dataset
    for phase in phases[1:]:
        where = f"{phase.key} ({phase.dataset.directory})"
        if phase.dataset.tokenizer_hash != first.tokenizer_hash:
            raise UserError(
                f"{where} was built with a different tokenizer than data.train ({first.directory}). Build all phases "
                "with the same --tokenizer"
            )
        if phase.dataset.labelled != first.labelled:
            labelled, unlabelled = (first, phase.dataset) if first.labelled else (phase.dataset, first)
            raise UserError(
                f"{where} and data.train need different objectives: {labelled.directory} has labelled pairs "
                f"({labelled.manifest['objective']}), {unlabelled.directory} has none "
                f"({unlabelled.manifest['objective']}). Build all phases with the same --objective"
            )


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
        read = batch_segments(batches, [(phase.first, phase.dataset.fingerprint) for phase in phases])
        self._loaders = [
            PretrainingLoader(phase.dataset, tokenizer, batch_size=part[0].rows, seed=seed, rates=rates, segments=part)
            for phase, part in zip(phases, read, strict=True)
        ]
        self._phases = list(phases)
        self.changes = tuple(sorted(segment.first for part in read for segment in part))

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """The fingerprint of each phase's rows and masks, by the configuration key that names them."""
        return {phase.key: loader.fingerprint for phase, loader in zip(self._phases, self._loaders, strict=True)}

    def phase(self, step: int) -> int:
        """The index of the phase of a step."""
        return bisect.bisect_right(self._phases, step, key=lambda phase: phase.first) - 1

    def rows_at(self, step: int) -> int:
        """The number of rows of a step's global batch. Raises ValueError for a negative step."""
        return self._loaders[self.phase(step)].rows_at(step)

    def tokens_before(self, step: int) -> float:
        """The tokens that all steps before this one read, padding excluded.

        Each row counts as many tokens as the rows of its data set have on average, by its manifest. The number is
        therefore a function of the step, and equals what was read wherever a whole number of epochs was read.
        """
        read = 0.0
        for phase, loader in zip(self._phases, self._loaders, strict=True):
            counts = phase.dataset.manifest["parts"][phase.dataset.part]
            rows = sum(segment.rows * segment.steps_before(step) for segment in loader.segments)
            read += rows * counts["tokens"] / counts["rows"]
        return read

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Batch:
        """The global batch of a step, or only the selected `rows` of it. Raises ValueError for a negative step."""
        return self._loaders[self.phase(step)].batch(step, rows)
