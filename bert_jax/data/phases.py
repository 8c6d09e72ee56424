"""Pretraining in phases: other shards from a given step, of another length (128, then 512; Devlin et al. 2019, A.2).

A phase reads one data set, or a mixture of several (data/mixture.py). `open_phases` and `open_held_out` open what a
configuration names; `PhasedLoader` returns the batch of any step.
"""

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from bert_jax.array_types import Int64
from bert_jax.config import PretrainConfig, PretrainDataConfig
from bert_jax.data import schedules
from bert_jax.data.example import Batch
from bert_jax.data.loader import LoaderTokenizer
from bert_jax.data.manifest import MANIFEST, PARTS, Part, parse_manifest
from bert_jax.data.mixture import (
    DIGITS,
    Mixture,
    MixtureLoader,
    MixtureSpec,
    Source,
    lane_shares,
    read_mixture,
    training_counts,
)
from bert_jax.data.order import common_lanes
from bert_jax.data.schedules import BatchSegment, StepSchedule, batch_segments
from bert_jax.data.shards import Dataset, check_arrow, check_has_rows, local_copy, open_dataset, open_output
from bert_jax.data.streaming import StreamedDataset, open_streamed, window_caches
from bert_jax.errors import UserError
from bert_jax.storage.remote import address_of, is_remote


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
    read: dict[str, np.ndarray] = {}  # by fingerprint, by all phases so far
    before = []
    for phase, part in zip(phases, segments, strict=True):
        fingerprints = [source.dataset.fingerprint for source in phase.mixture.sources]
        none = np.zeros(lanes, np.int64)
        before.append(np.array([read.get(fingerprint, none) for fingerprint in fingerprints]))
        if (end := part[-1].end) is not None:
            rows = part[-1].before + (end - part[-1].first) * part[-1].rows
            counts = lane_shares(phase.mixture, part, lanes).counts(rows)
            for fingerprint, count in zip(fingerprints, counts, strict=True):
                read[fingerprint] = read.get(fingerprint, none) + count
    return before


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
        return {
            source.name: (read[source.dataset.fingerprint] - earlier[source.dataset.fingerprint]) / source.dataset.rows
            for source in mixture.sources
            if source.name
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
        # The step after the last one of each phase; 0: unknown.
        stops = [min(phase.first, end) if end else phase.first for phase in self._phases[1:]] + [end]
        for phase, stop in zip(self._phases, stops, strict=True):
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

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Batch:
        """The global batch of a step, or only the selected `rows` of it. Raises ValueError for a negative step."""
        phase = self.phase(step)
        if phase != self._reading:  # the windows of data sets that only the last phase read are of no use now
            read = {source.dataset.fingerprint for source in self._phases[phase].mixture.sources}
            for fingerprint in self._caches.keys() - read:
                self._caches[fingerprint].release()
            self._reading = phase
        return self._loaders[phase].batch(step, rows)

    def close(self) -> None:
        """Ends the threads that load streamed rows. No batch may be requested afterwards."""
        for cache in self._caches.values():
            cache.close()


# Opens the shards that a pretraining configuration names: those of each phase, and those held out.


def open_phases(config: PretrainDataConfig, *, only_manifests: bool = False) -> list[Phase]:
    """Opens the training shards of all phases; with `only_manifests`, without the rows of those in a store.

    Raises UserError for keys that are missing or invalid, shards that cannot be read, and sources that cannot be mixed.
    """
    if config.train and config.mixture:
        raise UserError(
            f"data.train is {config.train} and data.mixture is {config.mixture}; leave out one of them, because a "
            "mixture names all of its shards"
        )
    if not (config.train or config.mixture):
        raise UserError(
            "data.train is not set; set --config.data.train=DIR to the output folder of bert-jax build-examples, or "
            "--config.data.mixture to several of them"
        )
    sources: dict[int, str | MixtureSpec] = {}
    for first, source in {0: config.mixture or config.train, **later_phases(config)}.items():
        is_mixture = not isinstance(source, str)
        sources[first] = read_mixture(source, _mixture_key(first), config.mixture_alpha) if is_mixture else source
    parts: tuple[Part, ...] = ("train",) if config.eval else PARTS

    def opened(folder: str) -> Dataset:
        if only_manifests:
            return _described(folder) if is_remote(folder) else open_dataset(folder, "train")
        if config.cache_bytes:
            return open_streamed(folder, config.cache_bytes, config.cache_dir, not config.eval, _log)
        if config.cache_dir and not config.eval:
            output, part = open_output(folder)
            folder = output.address if part == "train" else folder  # its held-out rows are copied, too
        return open_dataset(_local(folder, config, parts), "train")

    phases = []
    for first, source in sources.items():
        if isinstance(source, str):
            mixture = Mixture.single(opened(source))
        else:
            mixture = Mixture.of(source, [opened(named.folder) for named in source.folders], _mixture_key(first))
        phases.append(Phase(first, mixture))
    return phases


def _described(address: str) -> Dataset:
    """Shards in a store, of which only the manifest is read: they have no rows and no tokenizer."""
    output, part = open_output(address)
    manifest = parse_manifest(output.read(MANIFEST), f"{output.address}/{MANIFEST}")
    dataset = Dataset(Path(output.address), part or "train", manifest)
    check_arrow(dataset.directory, manifest)
    check_has_rows(dataset)
    return dataset


def later_phases(config: PretrainDataConfig) -> dict[int, Any]:
    """Returns data.phases by step, ascending. Raises UserError for one at step 0."""
    if not config.phases:
        return {}
    phases = schedules.read_steps(config.phases, "data.phases", "{900000: 'shards_512'}", first=1)
    return dict(zip(phases.steps, phases.values, strict=True))


def _mixture_key(first: int) -> str:
    return f"data.phases.{first}" if first else "data.mixture"


def open_held_out(config: PretrainConfig, phases: Sequence[Phase]) -> list[tuple[Source, ...]]:
    """Opens the held-out rows of each phase: data.eval, or if it is not set, those of each source that has any.

    Raises UserError for shards that cannot be read, and if checkpoint.best needs rows that a phase lacks, or that
    differ from those of another phase.
    """
    held_out = [_held_out(config, phase) for phase in phases]
    for phase, sources in zip(phases, held_out, strict=True):
        if config.checkpoint.best and not sources:
            where = f"{phase.key} ({address_of(phase.mixture.dataset.directory)})"
            raise UserError(
                f"checkpoint.best={config.checkpoint.best}, but {where} has no held-out part to evaluate; set "
                "one by --config.data.eval, or do not set checkpoint.best"
            )
    name, slash, _ = config.checkpoint.best.removeprefix("eval_").partition("/")  # of one source of a mixture
    if not any(source.name == name for sources in held_out for source in sources):
        name = name.removeprefix("ema_")
    folders = {
        frozenset(source.dataset.directory for source in sources if not slash or source.name == name)
        for sources in held_out
    }
    if config.checkpoint.best and len(folders) > 1:
        raise UserError(
            f"checkpoint.best={config.checkpoint.best} compares evaluations of the whole run, but the held-out rows of "
            "data.phases differ; name those of all phases by --config.data.eval, or do not set checkpoint.best"
        )
    return held_out


def _held_out(config: PretrainConfig, phase: Phase) -> tuple[Source, ...]:
    """Opens data.eval, without a name, or the held-out part of each source for which build_examples kept one."""
    if not config.data.eval:
        return tuple(
            Source(source.name, open_dataset(source.dataset.directory, "eval"))
            for source in phase.mixture.sources
            if source.dataset.manifest["parts"]["eval"]["rows"]
        )
    held_out = open_dataset(_local(config.data.eval, config.data, ("eval",)), "eval")
    if held_out.tokenizer_hash != phase.mixture.dataset.tokenizer_hash:
        raise UserError(
            f"data.eval={config.data.eval} was built with a different tokenizer than {phase.key} "
            f"({address_of(phase.mixture.dataset.directory)}); build both with the same --tokenizer"
        )
    return (Source("", held_out),)


def _local(folder: str, config: PretrainDataConfig, parts: Sequence[Part]) -> str:
    """Returns the folder, or its local copy if data.cache_dir is set."""
    if not config.cache_dir:
        return folder
    return local_copy(folder, config.cache_dir, parts, _log)


def _log(line: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(line)


# What config.json of a pretraining run records of its shards: enough to describe them without the shards.

FILES = 20  # names of input files that are recorded of each source


def summarize(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Returns a record of each source of each phase, as JSON values.

    name, from_step and share say when and how often its rows are read. The other keys are those of the manifest
    (docs/data_format.md), with the counts of the training part, and the last part of each path: folders say where
    files were, and not what they held.
    """
    return [
        {"name": source.name or _last_part(source.dataset.directory), "from_step": phase.first, "share": share}
        | _content(source.dataset)
        for phase in phases
        for source, share in zip(phase.mixture.sources, phase.mixture.shares.fractions, strict=True)
    ]


def _content(dataset: Dataset) -> dict[str, Any]:
    manifest, counts = dataset.manifest, training_counts(dataset)
    masking = manifest["masking"]
    files = [_last_part(source["path"]) for source in manifest["sources"]]
    return {
        "documents": counts["documents"],
        "tokens": counts["tokens"],
        "rows": counts["rows"],
        "held_out_documents": manifest["parts"]["eval"]["documents"],
        "seq_len": manifest["seq_len"],
        "objective": manifest["objective"],
        "masking": {name: masking[name] for name in ("kind", "unit", "rate")},
        "input_files": len(files),
        "input": files[:FILES],
        "input_bytes": sum(source["bytes"] for source in manifest["sources"]),
    }


def _last_part(path: object) -> str:
    return PurePath(str(path)).name
