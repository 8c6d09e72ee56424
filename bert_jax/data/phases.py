"""Pretraining in phases: other shards from a given step, of another length (128, then 512; Devlin et al. 2019, A.2).

A phase reads one data set, or a mixture of several (data/mixture.py). `PhasedLoader` returns the batch of any step;
`open_phases` and `open_held_out` open the shards that a configuration names, and `summarize` records them.
"""

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from bert_jax.config import PretrainConfig, PretrainDataConfig
from bert_jax.data import schedules
from bert_jax.data.example import Batch
from bert_jax.data.manifest import MANIFEST, PARTS, Part, parse_manifest
from bert_jax.data.mixture import DIGITS, Mixture, MixtureLoader, MixtureSpec, Source, read_mixture
from bert_jax.data.order import common_lanes
from bert_jax.data.schedules import StepSchedule, batch_segments
from bert_jax.data.shards import Dataset, check_trainable, local_copy, open_dataset, open_output
from bert_jax.data.streaming import StreamedDataset, open_streamed, window_caches
from bert_jax.errors import UserError
from bert_jax.storage.remote import address_of, is_remote
from bert_jax.tokenization.vocabulary import Vocabulary


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
    """The key of a mixture's source; the mixture's own key for a data set without a name."""
    return f"{key}.{name}" if name else key


class PhasedLoader:
    """Makes the batches of all phases (a train.run.Source).

    Raises:
      UserError: for phases with different tokenizers or kinds of sequences, and as DatasetLoader does.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        tokenizer: Vocabulary,
        *,
        batches: StepSchedule[int],
        seed: int,
        rates: StepSchedule[float] | None = None,
    ) -> None:
        _check_phases(phases)
        segments = batch_segments(batches, [phase.first for phase in phases])
        streamed = isinstance(phases[0].mixture.dataset, StreamedDataset)
        lanes = common_lanes(batches.values) if streamed else 1
        self._caches = window_caches([phase.mixture for phase in phases], lanes, seed)
        self._phases, self._reading = list(phases), 0
        self._loaders: list[MixtureLoader] = []
        self.changes = tuple(sorted(segment.first for part in segments for segment in part))
        # The rows of each data set that all phases so far read, by lane [L]. A later phase resumes there: within an
        # epoch no row is left out or repeated, whether phases read the data set alone or in mixtures.
        read: dict[str, np.ndarray] = {}
        for phase, part in zip(phases, segments, strict=True):
            fingerprints = [source.dataset.fingerprint for source in phase.mixture.sources]
            before = np.array([read.get(fingerprint, np.zeros(lanes, np.int64)) for fingerprint in fingerprints])
            loader = MixtureLoader(
                phase.mixture,
                tokenizer,
                segments=part,
                read=before,
                seed=seed,
                rates=rates,
                lanes=lanes,
                readers={fingerprint: cache.read for fingerprint, cache in self._caches.items()},
            )
            self._loaders.append(loader)
            if (end := part[-1].end) is not None:
                read |= zip(fingerprints, before + loader.rows_before(end), strict=True)

    @classmethod
    def single(
        cls,
        dataset: Dataset,
        tokenizer: Vocabulary,
        *,
        batch_size: int,
        seed: int,
        rates: StepSchedule[float] | None = None,
    ) -> "PhasedLoader":
        """Makes batches of one size from one data set."""
        batches = schedules.batch_schedule({}, batch_size)
        return cls([Phase(0, Mixture.single(dataset))], tokenizer, batches=batches, seed=seed, rates=rates)

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Identify every source's rows and masks, by configuration key."""
        return {
            source_key(phase.key, source.name): fingerprint
            for phase, loader in zip(self._phases, self._loaders, strict=True)
            for source, fingerprint in zip(phase.mixture.sources, loader.fingerprints, strict=True)
        }

    @property
    def shares(self) -> Mapping[str, float]:
        """Fraction of a phase's rows per named source, by configuration key."""
        return {
            source_key(phase.key, source.name): round(share, DIGITS)
            for phase in self._phases
            for source, share in zip(phase.mixture.sources, phase.mixture.shares.fractions, strict=True)
            if source.name
        }

    def phase(self, step: int) -> int:
        """The index of a step's phase."""
        return bisect.bisect_right(self._phases, step, key=lambda phase: phase.first) - 1

    def rows_at(self, step: int) -> int:
        """The number of rows of a step's global batch. Raises ValueError for a negative step."""
        return self._loaders[self.phase(step)].segment(step).rows

    def tokens_before(self, step: int) -> float:
        """The tokens that all earlier steps read: without padding, before infilling shortens the text.

        Every row counts as its data set's mean, by the manifest. So the number is a function of the step, and exact
        after whole epochs.
        """
        read = 0.0  # added in a loop, because sum() rounds differently from Python 3.12 on
        for dataset, rows in self._read_before(step):
            read += rows * dataset.counts["tokens"] / dataset.counts["rows"]
        return read

    def epochs_before(self, step: int, first: int = 0) -> Mapping[str, float]:
        """The epochs that the steps from `first` to before `step` read, by source of the latest step's mixture."""
        read: Counter[str] = Counter()
        for (dataset, rows), (_, earlier) in zip(self._read_before(step), self._read_before(first), strict=True):
            read[dataset.fingerprint] += rows - earlier
        mixture = self._phases[self.phase(max(step - 1, 0))].mixture
        return {name: read[dataset.fingerprint] / dataset.rows for name, dataset in mixture.sources if name}

    def _read_before(self, step: int) -> Iterator[tuple[Dataset, int]]:
        """The data set of every source of every phase, and how many of its rows all earlier steps read."""
        for phase, loader in zip(self._phases, self._loaders, strict=True):
            rows = loader.rows_before(step).sum(axis=1).tolist()
            yield from zip((source.dataset for source in phase.mixture.sources), rows, strict=True)

    def describe_mixtures(self, end: int = 0, first: int = 0) -> list[str]:
        """Describes every mixture in a line: its sources' shares, and their epochs at the end of the phase.

        Args:
          end: the step at which the run ends; 0: unknown.
          first: the step from which epochs count; phases that end earlier are left out.
        """
        lines = []
        # The step after each phase's last one; 0: unknown.
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
        """The global batch for `step`, or only the selected `rows` of it, which alone are then made.

        The arrays are read-only. Raises ValueError for a negative step.
        """
        phase = self.phase(step)
        if phase != self._reading:  # frees the windows of data sets that only the last phase read
            read = {source.dataset.fingerprint for source in self._phases[phase].mixture.sources}
            for fingerprint in self._caches.keys() - read:
                self._caches[fingerprint].release()
            self._reading = phase
        return self._loaders[phase].batch(step, rows)

    def close(self) -> None:
        """Ends the threads that load streamed rows. No batch may be requested afterwards."""
        for cache in self._caches.values():
            cache.close()


def _check_phases(phases: Sequence[Phase]) -> None:
    """Raises UserError unless all phases share the tokenizer and the kind of sequences of the first phase."""
    first = phases[0].mixture.dataset
    for phase in phases[1:]:
        dataset = phase.mixture.dataset
        this, that = f"{phase.key} ({address_of(dataset.directory)})", phases[0].key
        if dataset.tokenizer_hash != first.tokenizer_hash:
            raise UserError(
                f"{this} was built with a different tokenizer than {that} ({first.directory}). Build all phases "
                "with the same --tokenizer"
            )
        if dataset.labelled != first.labelled:
            labelled, unlabelled = (first, dataset) if first.labelled else (dataset, first)
            raise UserError(
                f"{this} and {that} need different objectives: {labelled.directory} has labelled pairs "
                f"({labelled.manifest['objective']}), {unlabelled.directory} has none "
                f"({unlabelled.manifest['objective']}). Build all phases with the same --objective"
            )


def open_phases(config: PretrainDataConfig, *, only_manifests: bool = False) -> list[Phase]:
    """Opens the training shards of all phases; with `only_manifests`, no rows of shards in a store.

    Raises UserError for missing or invalid keys, unreadable shards, and sources that cannot be mixed.
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
    # All sources are checked before any folder is opened, which may copy shards.
    sources: dict[str, tuple[int, str | MixtureSpec]] = {}
    for first, source in {0: config.mixture or config.train, **later_phases(config)}.items():
        key = f"data.phases.{first}" if first else "data.mixture"
        if isinstance(source, str) and not source.strip():
            raise UserError(f"{key} is empty. Name a folder, or a mixture of several")
        spec = source if isinstance(source, str) else read_mixture(source, key, config.mixture_alpha)
        sources[key] = first, spec

    def opened(folder: str) -> Dataset:
        if only_manifests and is_remote(folder):
            output, part = open_output(folder)
            manifest = parse_manifest(output.read(MANIFEST), f"{output.address}/{MANIFEST}")
            dataset = Dataset(Path(output.address), part or "train", manifest)
            check_trainable(dataset)
            return dataset
        if only_manifests:
            return open_dataset(folder, "train")
        if config.cache_bytes:
            return open_streamed(folder, config.cache_bytes, config.cache_dir, not config.eval, _log)
        if config.cache_dir and not config.eval:
            output, part = open_output(folder)
            folder = output.address if part == "train" else folder  # its held-out rows are copied, too
        return open_dataset(_local(folder, config, ("train",) if config.eval else PARTS), "train")

    phases = []
    for key, (first, source) in sources.items():
        if isinstance(source, str):
            mixture = Mixture.single(opened(source))
        else:
            mixture = Mixture.of(source, [opened(named.folder) for named in source.folders], key)
        phases.append(Phase(first, mixture))
    return phases


def later_phases(config: PretrainDataConfig) -> dict[int, Any]:
    """Returns data.phases by step, ascending. Raises UserError for one at step 0."""
    if not config.phases:
        return {}
    phases = schedules.read_steps(config.phases, "data.phases", "{900000: 'shards_512'}", first=1)
    return dict(zip(phases.steps, phases.values, strict=True))


def open_held_out(config: PretrainConfig, phases: Sequence[Phase]) -> list[tuple[Source, ...]]:
    """Opens every phase's held-out rows: data.eval, or if it is not set, the sources' own.

    Raises UserError for unreadable shards, and if checkpoint.best needs rows that a phase lacks or that differ between
    phases.
    """
    held_out = [_held_out(config, phase) for phase in phases]
    best = config.checkpoint.best
    if not best:
        return held_out
    for phase, sources in zip(phases, held_out, strict=True):
        if not sources:
            raise UserError(
                f"checkpoint.best={best}, but {phase.key} ({address_of(phase.mixture.dataset.directory)}) has no "
                "held-out part to evaluate; set one by --config.data.eval, or do not set checkpoint.best"
            )
    name, slash, _ = best.removeprefix("eval_").partition("/")  # with a slash: of one source of a mixture
    if not any(source.name == name for sources in held_out for source in sources):
        name = name.removeprefix("ema_")
    folders = {
        frozenset(source.dataset.directory for source in sources if not slash or source.name == name)
        for sources in held_out
    }
    if len(folders) > 1:
        raise UserError(
            f"checkpoint.best={best} compares evaluations of the whole run, but the held-out rows of data.phases "
            "differ; name those of all phases by --config.data.eval, or do not set checkpoint.best"
        )
    return held_out


def _held_out(config: PretrainConfig, phase: Phase) -> tuple[Source, ...]:
    """Opens data.eval, without a name, or the held-out parts of all sources that have one."""
    if not config.data.eval:
        return tuple(
            Source(name, open_dataset(dataset.directory, "eval"))
            for name, dataset in phase.mixture.sources
            if dataset.manifest["parts"]["eval"]["rows"]
        )
    held_out = open_dataset(_local(config.data.eval, config.data, ("eval",)), "eval")
    if held_out.tokenizer_hash != phase.mixture.dataset.tokenizer_hash:
        raise UserError(
            f"data.eval={config.data.eval} was built with a different tokenizer than {phase.key} "
            f"({address_of(phase.mixture.dataset.directory)}); build both with the same --tokenizer"
        )
    return (Source("", held_out),)


def _local(folder: str, config: PretrainDataConfig, parts: Sequence[Part]) -> str:
    """The folder, or its local copy if data.cache_dir is set."""
    return local_copy(folder, config.cache_dir, parts, _log) if config.cache_dir else folder


def _log(line: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(line)


FILES = 20  # input files of a source that are named in config.json


def summarize(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Records every source as JSON values: enough to describe the shards in config.json without them.

    name, from_step and share say when and how often its rows are read. The other keys are the manifest's
    (docs/data_format.md), with the counts of the training part. Of paths, only the last part is recorded: folders say
    where files were, not their content.
    """
    records = []
    for phase in phases:
        for (name, dataset), share in zip(phase.mixture.sources, phase.mixture.shares.fractions, strict=True):
            manifest, counts = dataset.manifest, dataset.counts
            record = {
                "name": name or dataset.directory.name,
                "from_step": phase.first,
                "share": share,
                "documents": counts["documents"],
                "tokens": counts["tokens"],
                "rows": counts["rows"],
                "held_out_documents": manifest["parts"]["eval"]["documents"],
                "seq_len": manifest["seq_len"],
                "objective": manifest["objective"],
                "masking": {name: manifest["masking"][name] for name in ("kind", "unit", "rate")},
                "input_files": len(manifest["sources"]),
                "input": [PurePath(source["path"]).name for source in manifest["sources"][:FILES]],
                "input_bytes": sum(source["bytes"] for source in manifest["sources"]),
            }
            records.append(record)
    return records
