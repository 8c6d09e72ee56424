"""Pretraining in phases: from a given step on, batches come from other shards (Devlin et al. 2019, A.2: longer rows).

A phase reads one data set, or a mixture of several (data/mixture.py). `PhasedLoader` returns the batch of any step.
`open_phases` and `open_held_out` open the shards in a configuration, and `summarize` records them.
"""

import bisect
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from bert_jax.config import MaskingConfig, PretrainConfig, PretrainDataConfig
from bert_jax.data import schedules
from bert_jax.data.example import Batch
from bert_jax.data.manifest import MANIFEST, PARTS, Part, parse_manifest, parse_shard_table
from bert_jax.data.mixture import DIGITS, Mixture, MixtureLoader, MixtureSpec, Source, read_mixture
from bert_jax.data.order import common_lanes
from bert_jax.data.schedules import StepSchedule, batch_segments
from bert_jax.data.shards import Dataset, check_trainable, local_copy, open_dataset, open_output
from bert_jax.data.streaming import open_streamed, window_caches
from bert_jax.errors import UserError
from bert_jax.progress import print_note
from bert_jax.storage.remote import as_address, is_remote
from bert_jax.tokenization.vocabulary import Vocabulary


class Phase(NamedTuple):
    """The shards that are read from step `first` on."""

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
        """The key under which the phase's held-out shards are recorded."""
        return f"data.eval.{self.first}" if self.first else "data.eval"


def source_key(key: str, name: str) -> str:
    """Returns the configuration key for a mixture's source, or for an unnamed data set."""
    return f"{key}.{name}" if name else key


class PhasedLoader:
    """Makes the batches of all phases (a train.run.Source).

    Raises:
        UserError: Phases have different tokenizers or kinds of sequences; also as DatasetLoader does.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        tokenizer: Vocabulary,
        *,
        batches: StepSchedule[int],
        seed: int,
        rates: StepSchedule[float] | None = None,
        masking: MaskingConfig | None = None,
    ) -> None:
        _check_phases(phases)
        segments = batch_segments(batches, [phase.first for phase in phases])
        # data.cache_bytes streams either all phases or none. They share one number of lanes, because a later phase
        # continues a data set lane by lane, and this number has to divide every phase's batches.
        streamed = phases[0].mixture.dataset.cache_bytes > 0
        lanes = common_lanes(batches.values) if streamed else 1
        self._caches = window_caches([phase.mixture for phase in phases], lanes, seed)
        # `_reading` is the phase of the latest batch.
        self._phases, self._reading = list(phases), 0
        self._loaders: list[MixtureLoader] = []
        self.changes = tuple(sorted(segment.first for part in segments for segment in part))
        # How many rows of each data set the phases so far read, by fingerprint and lane [L]. A later phase continues
        # there, so within an epoch no row is left out or repeated, whether phases read the data set alone or in
        # mixtures.
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
                masking=masking,
                lanes=lanes,
                readers={fingerprint: cache.read for fingerprint, cache in self._caches.items()},
            )
            self._loaders.append(loader)
            # Only the last phase has no end, and no phase continues from there.
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
        """Makes a loader for one phase, with batches of one size from one data set."""
        batches = schedules.batch_schedule({}, batch_size)
        return cls([Phase(0, Mixture.single(dataset))], tokenizer, batches=batches, seed=seed, rates=rates)

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Identify the rows and masks of all sources, and their order if they are streamed, by configuration key."""
        fingerprints = {
            source_key(phase.key, source.name): fingerprint
            for phase, loader in zip(self._phases, self._loaders, strict=True)
            for source, fingerprint in zip(phase.mixture.sources, loader.fingerprints, strict=True)
        }
        if self._caches:
            sizes = sorted((name, *cache.sizes) for name, cache in self._caches.items())
            fingerprints["data.cache_bytes"] = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()
        return fingerprints

    @property
    def shares(self) -> Mapping[str, float]:
        """Each named source's fraction of its phase's rows, by configuration key."""
        return {
            source_key(phase.key, source.name): round(share, DIGITS)
            for phase in self._phases
            for source, share in zip(phase.mixture.sources, phase.mixture.shares.fractions, strict=True)
            if source.name
        }

    def phase(self, step: int) -> int:
        """Returns the index of a step's phase."""
        # A phase begins at its first step, so bisect_right counts the phases that began at or before the step.
        return bisect.bisect_right(self._phases, step, key=lambda phase: phase.first) - 1

    def rows_at(self, step: int) -> int:
        """Returns how many rows a step's global batch has. Raises ValueError for a negative step."""
        return self._loaders[self.phase(step)].segment(step).rows

    def tokens_before(self, step: int) -> float:
        """Counts the tokens in all earlier steps: without padding, and before infilling shortens the text."""
        # A row counts as its data set's mean. So the count is a function of the step, and exact after whole epochs. It
        # is summed in a loop, because sum() rounds floats differently since Python 3.12.
        read = 0.0
        for dataset, rows in self._read_before(step):
            read += rows * dataset.counts["tokens"] / dataset.counts["rows"]
        return read

    def epochs_before(self, step: int, first: int = 0) -> Mapping[str, float]:
        """Returns how many epochs the steps from `first` to before `step` read, by source of the latest mixture."""
        # Phases may read one data set under different names, so rows are added up by fingerprint.
        read: Counter[str] = Counter()
        for (dataset, rows), (_, earlier) in zip(self._read_before(step), self._read_before(first), strict=True):
            read[dataset.fingerprint] += rows - earlier
        mixture = self._phases[self.phase(max(step - 1, 0))].mixture
        return {name: read[dataset.fingerprint] / dataset.rows for name, dataset in mixture.sources if name}

    def _read_before(self, step: int) -> Iterator[tuple[Dataset, int]]:
        """Yields every phase's data sets, and how many of their rows the phase reads before the step."""
        for phase, loader in zip(self._phases, self._loaders, strict=True):
            rows = loader.rows_before(step).sum(axis=1).tolist()
            yield from zip((source.dataset for source in phase.mixture.sources), rows, strict=True)

    def describe_mixtures(self, end: int = 0, first: int = 0) -> list[str]:
        """Describes every mixture in a line: its shares, and the epochs that its sources have at the phase's end.

        Args:
            end: The step at which the run ends; 0: unknown.
            first: The step from which epochs are counted. Phases that end earlier are left out.
        """
        lines = []
        # The step after the last one of every phase; 0: unknown.
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
        """Returns the global batch for `step`. The arrays are read-only.

        Args:
            rows: Selects rows of the batch; only these are made.

        Raises:
            ValueError: The step is negative.
        """
        phase = self.phase(step)
        # A new phase frees the windows of data sets that it does not read. Otherwise they would keep their memory.
        if phase != self._reading:
            read = {source.dataset.fingerprint for source in self._phases[phase].mixture.sources}
            for fingerprint in self._caches.keys() - read:
                self._caches[fingerprint].release()
            self._reading = phase
        return self._loaders[phase].batch(step, rows)

    def close(self) -> None:
        """Ends the threads that load streamed rows. Afterwards, no batch may be requested."""
        for cache in self._caches.values():
            cache.close()


def _check_phases(phases: Sequence[Phase]) -> None:
    """Raises UserError for a phase whose tokenizer or kind of sequences differs from the first phase's."""

    def traits(phase: Phase) -> tuple[tuple[str, str], ...]:
        dataset = phase.mixture.dataset
        pairs = "labelled pairs" if dataset.labelled else "sequences without labels"
        return ("--tokenizer", f"tokenizer {dataset.tokenizer_hash[:12]}"), ("--objective", pairs)

    for phase in phases[1:]:
        for (flag, got), (_, wanted) in zip(traits(phase), traits(phases[0]), strict=True):
            if got != wanted:
                this, first = (f"{one.key} ({as_address(one.mixture.dataset.directory)})" for one in (phase, phases[0]))
                raise UserError(f"{this} has {got}, but {first} has {wanted}. Build all phases with the same {flag}")


def open_phases(config: PretrainDataConfig, *, only_manifests: bool = False) -> list[Phase]:
    """Opens all phases' training shards.

    Args:
        only_manifests: Whether to read nothing but manifests and tables of shards if these are in a store.

    Raises:
        UserError: A key is missing or invalid, shards are unreadable, or sources cannot be mixed.
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
    # All sources are checked before any folder is opened, because opening may copy shards for hours.
    sources: dict[str, tuple[int, str | MixtureSpec]] = {}
    for first, source in {0: config.mixture or config.train, **later_phases(config)}.items():
        key = f"data.phases.{first}" if first else "data.mixture" if config.mixture else "data.train"
        if isinstance(source, str) and not source.strip():
            raise UserError(f"{key} is empty. Name a folder, or a mixture of several")
        spec = source if isinstance(source, str) else read_mixture(source, key, config.mixture_alpha)
        for name, folder in [("", spec)] if isinstance(spec, str) else [named[:2] for named in spec.folders]:
            _check_part(folder, "train", source_key(key, name), config)
        sources[key] = first, spec

    def opened(folder: str) -> Dataset:
        # A plan needs nothing but the manifest and the table of shards, so no shard is copied from the store for it.
        if only_manifests and is_remote(folder):
            output, part = open_output(folder)
            manifest = parse_manifest(output.read(MANIFEST), f"{output.address}/{MANIFEST}")
            table = manifest["shards"]["table"]
            shards = parse_shard_table(output.read(table), manifest, f"{output.address}/{table}")
            dataset = Dataset(Path(output.address), part or "train", manifest, shards=shards)
            check_trainable(dataset)
            return dataset
        if only_manifests:
            return open_dataset(folder, "train")
        if config.cache_bytes:
            return open_streamed(folder, config.cache_bytes, config.cache_dir, not config.eval, print_note)
        # Held-out rows are opened later, from the training data set's folder, so they are copied with it. With
        # data.eval, that folder has its own copy.
        if config.cache_dir and not config.eval:
            output, part = open_output(folder)
            folder = output.address if part == "train" else folder  # so the held-out rows are copied, too
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
    """Returns data.phases by ascending step. Raises UserError for a phase at step 0."""
    if not config.phases:
        return {}
    phases = schedules.read_steps(config.phases, "data.phases", "{900000: 'shards_512'}", first=1)
    return dict(zip(phases.steps, phases.values, strict=True))


def open_held_out(config: PretrainConfig, phases: Sequence[Phase]) -> list[tuple[Source, ...]]:
    """Opens every phase's held-out rows: data.eval, or the held-out parts of the phase's own sources.

    Raises:
        UserError: Shards are unreadable, or checkpoint.best needs rows that a phase lacks or that differ by phase.
    """
    held_out = [_held_out(config, phase) for phase in phases]
    best = config.checkpoint.best
    if not best:
        return held_out
    for phase, sources in zip(phases, held_out, strict=True):
        if not sources:
            raise UserError(
                f"checkpoint.best={best}, but {phase.key} ({as_address(phase.mixture.dataset.directory)}) has no "
                "held-out part to evaluate; set one by --config.data.eval, or do not set checkpoint.best"
            )
    # eval_NAME/METRIC or eval_ema_NAME/METRIC is the metric of one source of a mixture. NAME may begin with ema_.
    name, slash, _ = best.removeprefix("eval_").partition("/")
    if not any(source.name == name for sources in held_out for source in sources):
        name = name.removeprefix("ema_")
    folders = {
        frozenset(source.dataset.directory for source in sources if not slash or source.name == name)
        for sources in held_out
    }
    if len(folders) > 1:
        raise UserError(
            f"checkpoint.best={best} compares evaluations of the whole run, but phases have different held-out rows; "
            "name the rows for all phases by --config.data.eval, or do not set checkpoint.best"
        )
    return held_out


def _held_out(config: PretrainConfig, phase: Phase) -> tuple[Source, ...]:
    """Opens data.eval, or the held-out parts of all sources that have one."""
    if not config.data.eval:
        return tuple(
            Source(name, open_dataset(dataset.directory, "eval"))
            for name, dataset in phase.mixture.sources
            if dataset.manifest["parts"]["eval"]["rows"]
        )
    _check_part(config.data.eval, "eval", "data.eval", config.data)
    held_out = open_dataset(_local(config.data.eval, config.data, ("eval",)), "eval")
    if held_out.tokenizer_hash != phase.mixture.dataset.tokenizer_hash:
        raise UserError(
            f"data.eval={config.data.eval} was built with a different tokenizer than {phase.key} "
            f"({as_address(phase.mixture.dataset.directory)}); build both with the same --tokenizer"
        )
    return (Source("", held_out),)


def _check_part(folder: str, wanted: Part, key: str, config: PretrainDataConfig) -> None:
    """Refuses DIR/eval for training and DIR/train for evaluation, unless data.any_part is set."""
    part = None if config.any_part else open_output(folder if is_remote(folder) else os.path.abspath(folder))[1]
    if part not in (None, wanted):
        rows = "held out for evaluation" if part == "eval" else "for training"
        raise UserError(
            f"{key} is {folder}, whose rows are {rows}. Name the folder above it, which has both parts, or set "
            "--config.data.any_part=true if you mean this one"
        )


def _local(folder: str, config: PretrainDataConfig, parts: Sequence[Part]) -> str:
    """Returns the folder, or its local copy if data.cache_dir is set."""
    return local_copy(folder, config.cache_dir, parts, print_note) if config.cache_dir else folder


FILES = 20  # input files of a source that config.json lists


def summarize(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Describes every source for config.json, as JSON values.

    `name`, `from_step` and `share` tell when and how often its rows are read. The other values come from the manifest
    (docs/data_format.md), with the counts of the training part. Paths are cut to file names.
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
                "input": [source_name(source["path"]) for source in manifest["sources"][:FILES]],
                "input_bytes": sum(source["bytes"] for source in manifest["sources"]),
            }
            records.append(record)
    return records


def source_name(path: str) -> str:
    """A file's name; with its data set if that is public, on the Hugging Face Hub."""
    name = PurePath(path).name
    hub = re.match(r"hf://datasets/([^/@]+/[^/@]+)", path)
    return f"hf:{hub[1]}/{name}" if hub else name
