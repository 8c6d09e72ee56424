"""Opens the shards that a pretraining configuration names: those of each phase, and those held out."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bert_jax.command import UserError
from bert_jax.config import PretrainConfig, PretrainDataConfig
from bert_jax.data.manifest import MANIFEST, PARTS, Part, parse_manifest
from bert_jax.data.mixture import Mixture, Source
from bert_jax.data.mixture_spec import MixtureSpec, is_mixture, parse_mixture
from bert_jax.data.phases import Phase, parse_phases
from bert_jax.data.shard_cache import local_copy, open_output
from bert_jax.data.shards import Dataset, check_arrow, check_has_rows, open_dataset
from bert_jax.data.streamed_dataset import open_streamed
from bert_jax.storage.remote import address_of, is_remote


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
    specs: list[tuple[int, str, MixtureSpec | None]] = []
    for first, text in parse_phases(config.mixture or config.train, config.phases):
        mixed = is_mixture(text) if first else bool(config.mixture)
        specs.append((first, text, parse_mixture(text, _mixture_key(first)) if mixed else None))
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
    for first, text, spec in specs:
        if spec is None:
            mixture = Mixture.single(opened(text))
        else:
            mixture = Mixture.of(spec, [opened(each.folder) for each in spec.folders], _mixture_key(first))
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
    if not any(one.name == name for sources in held_out for one in sources):
        name = name.removeprefix("ema_")
    folders = {
        frozenset(one.dataset.directory for one in sources if not slash or one.name == name) for sources in held_out
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
        kept = [source for source in phase.mixture.sources if source.dataset.manifest["parts"]["eval"]["rows"]]
        return tuple(Source(source.name, open_dataset(source.dataset.directory, "eval")) for source in kept)
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
