"""Opening any CHECKPOINT, and starting a new run from one."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from bert_jax import tokenizer as tokenizer_lib
from bert_jax.command import UserError
from bert_jax.config import ModelConfig
from bert_jax.interop import averaged, huggingface, original_bert, stablehlo
from bert_jax.interop.family import ARCHITECTURE_FIELDS
from bert_jax.interop.loaded import Loaded, check_vocabulary
from bert_jax.interop.weights import refuse_pickle
from bert_jax.model import paths
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads import Heads
from bert_jax.storage.local import INCOMPLETE, read_json
from bert_jax.tokenizer import Tokenizer
from bert_jax.train import distributed
from bert_jax.train.early_stop import selected_step
from bert_jax.train.run import RESULT_FILE
from bert_jax.train.workdir import CHECKPOINTS, CONFIG_FILE, WorkdirConfig, read_config, write_config, write_params

__all__ = ["InitialParams", "Loaded", "check_architecture", "initial_params", "open_checkpoint", "write_workdir"]

# ModernBERT has one dense layer and norm before whichever head there is: fine-tuning goes on from that of pretraining.
_BEFORE_HEADS = {"pooler/dense": "mlm_head/transform", "pooler/norm": "mlm_head/norm"}

# What they say has a meaning by the labels of their task alone.
_LABEL_HEADS = ("classifier", "tagger", "crf", "question_head", "span_classifier", "span_relations")


class InitialParams(NamedTuple):
    """What a new run starts from: parameters to copy by path, and the paths that are drawn afresh."""

    params: dict[str, np.ndarray]
    fresh: tuple[str, ...]


def open_checkpoint(path: str | Path, average: str = "") -> Loaded:
    """Opens a CHECKPOINT: a workdir, a step in it, what convert or export wrote, or a Hugging Face folder.

    average is of a workdir: `ema`, `last:K` (averaged.read_params), or empty for the parameters as they are. Raises
    UserError when there is none, when it is half-written or damaged, and for all that `huggingface.read`
    refuses.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"no checkpoint at {path}. Name a workdir, a step in it, or a Hugging Face folder")
    refuse_pickle(path)
    if not path.is_dir():
        raise UserError(f"{path} is a file; a checkpoint is a folder (a workdir, a step in it, a Hugging Face folder)")
    if path.name.endswith(INCOMPLETE):
        raise UserError(f"{path} is half-written. Run the command that was writing it again")
    step = None
    if path.absolute().parent.name == CHECKPOINTS and path.name.isdecimal():
        path, step = path.absolute().parent.parent, int(path.name)
    if (path / stablehlo.DESCRIPTION_FILE).exists():
        raise UserError(f"{path} holds StableHLO programs, not a checkpoint. Name the one that they were made of")
    if original_bert.is_original(path):
        raise UserError(
            f"{path} is in the layout of Google's TensorFlow code. Convert it once: python -m bert_jax.convert "
            f"--input {path} --output DIR"
        )
    if step is None and not _is_workdir(path):
        if average:
            raise UserError(f"{path} holds one set of weights; --average is of a workdir. Leave it out")
        return huggingface.read(path)
    return _open_workdir(path, step, average)


def check_architecture(got: ModelConfig, wanted: ModelConfig, origin: str = "the checkpoint") -> None:
    """Raises UserError when a checkpoint's parameters are not those of the architecture wanted, naming the field."""
    for name in ARCHITECTURE_FIELDS:
        if getattr(got, name) != getattr(wanted, name):
            raise UserError(
                f"{origin} is of another architecture: {name} is {getattr(got, name)}, the configuration wants "
                f"{getattr(wanted, name)}. Change config.model, or init_from another checkpoint"
            )


def initial_params(
    loaded: Loaded, model: ModelConfig, heads: Heads, tokenizer: Tokenizer, task: Mapping[str, Any] | None = None
) -> InitialParams:
    """The parameters of a checkpoint that a run of this model, these heads and this tokenizer starts from.

    A head that the checkpoint lacks, or has for another number of classes, is drawn afresh, which one line on
    stderr says; so are all heads of labels where `task` (its `kind` and `labels`) is not what the checkpoint was
    fine-tuned for. Raises UserError for another architecture or another tokenizer.
    """
    origin = loaded.origin or "the checkpoint"
    check_architecture(loaded.model, model, origin)
    if loaded.tokenizer.content_hash != tokenizer.content_hash:
        raise UserError(
            f"{origin} was trained with another tokenizer than the data of this run. Build the data with "
            f"--tokenizer={origin}, or init_from another checkpoint"
        )
    wanted = paths.flatten(abstract_params(model, heads))
    held = dict(loaded.params)
    if model.pooler == "transform":
        for folder, source in _BEFORE_HEADS.items():
            beside = {path: value for path, value in held.items() if path.startswith(source + paths.SEPARATOR)}
            held = {path.replace(source, folder): value for path, value in beside.items()} | held
    why = "not in it"
    if task and loaded.task and _learnt(task) != _learnt(loaded.task):
        held = {path: value for path, value in held.items() if path.split(paths.SEPARATOR)[0] not in _LABEL_HEADS}
        labels = ", ".join(loaded.task.get("labels") or ["scores"])
        why = f"not in it, or for its own task ({loaded.task['name']}: {labels:.80})"
    found = {path: value for path, value in held.items() if path in wanted and wanted[path].shape == value.shape}
    fresh = tuple(path for path in wanted if path not in found)
    if fresh:
        Console(stderr=True, quiet=not distributed.is_primary()).print(
            f"starting from {origin}; {why}, so drawn afresh: {', '.join(fresh)}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    return InitialParams(found, fresh)


def _learnt(task: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    return task["kind"], tuple(task.get("labels") or ())


def write_workdir(loaded: Loaded, directory: Path) -> None:
    """Writes a checkpoint as the workdir of a run that has not begun, step 0, parameters only."""
    directory.mkdir(parents=True, exist_ok=True)
    write_params(directory, 0, loaded.params)
    loaded.tokenizer.save(directory / "tokenizer")
    kind = "pretraining" if loaded.task is None else "finetuning"
    write_config(
        directory,
        WorkdirConfig(loaded.model, loaded.heads, kind, training=loaded.training, task=loaded.task, dtype=loaded.dtype),
    )


def _is_workdir(path: Path) -> bool:
    """Whether config.json is one of ours; both kinds of folder have one."""
    file = path / CONFIG_FILE
    if not file.exists() and (path / CHECKPOINTS).is_dir():
        raise UserError(f"{path} has checkpoints but no {CONFIG_FILE}. Name the workdir that they are of")
    return "model_type" not in read_json(file)


def _open_workdir(workdir: Path, step: int | None, average: str) -> Loaded:
    config = read_config(workdir)
    if step is None and (step := selected_step(workdir)) is None:
        raise UserError(f"no checkpoint in {workdir}: none was saved yet. Train, or name another folder")
    params = averaged.read_params(workdir, step, average)
    _check_params(params, config.model, config.heads, workdir)
    words = tokenizer_lib.load(workdir / "tokenizer")
    check_vocabulary(workdir, words, config.model)
    return Loaded(
        config.model,
        config.heads,
        params,
        words,
        config.task,
        step,
        dtype=config.dtype,
        origin=str(workdir),
        training=config.training,
        metrics={} if average else _result(workdir),  # they are of the parameters as they are
        average=average,
    )


def _check_params(params: Mapping[str, np.ndarray], model: ModelConfig, heads: Heads, workdir: Path) -> None:
    wanted = {path: leaf.shape for path, leaf in paths.flatten(abstract_params(model, heads)).items()}
    got = {path: value.shape for path, value in params.items()}
    for path in sorted(set(wanted) | set(got)):
        if wanted.get(path) != got.get(path):
            raise UserError(
                f"{workdir}: parameter {path} is {got.get(path, 'missing')}, config.json wants "
                f"{wanted.get(path, 'none')}. Was config.json changed, or taken from another workdir?"
            )


def _result(workdir: Path) -> dict[str, object]:
    """result.json, where the run has ended."""
    try:
        return dict(json.loads((workdir / RESULT_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}  # only the model card tells of it


def describe(loaded: Loaded) -> str:
    """One line of what a checkpoint is, for the end of a command."""
    plain = Heads()
    heads = [
        item.name for item in dataclasses.fields(Heads) if getattr(loaded.heads, item.name) != getattr(plain, item.name)
    ]
    model = loaded.model
    average = f"; average {loaded.average}" if loaded.average else ""
    return (
        f"{huggingface.title(loaded)}, {model.layers} layers x {model.width}, vocabulary {model.vocab_size}, "
        f"{model.max_positions} positions; heads: {', '.join(heads) or 'none'}{average}"
    )
