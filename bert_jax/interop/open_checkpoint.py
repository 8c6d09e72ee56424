"""Opens any CHECKPOINT that a command accepts.

`open_checkpoint` recognizes the format. `read_workdir` reads bert_jax format, a workdir, and `read_params` a step's
parameters or an average. huggingface.py and peft.py read the other formats.
"""

import contextlib
import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np

import bert_jax.lineage  # noqa: F401 (adds the encoders before the Transformer, so that their checkpoints open, too)
from bert_jax.config.options import Checked, option
from bert_jax.errors import UserError
from bert_jax.interop import huggingface, peft
from bert_jax.interop.huggingface import ONNX_FOLDER, PROGRAMS_FILE
from bert_jax.interop.loaded_model import MOVING_AVERAGE, LoadedModel, load_vocabulary
from bert_jax.interop.original_bert import is_original_bert
from bert_jax.interop.weights import has_weights
from bert_jax.model import layers, lora
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.basic import HIDDEN_PROJECTION
from bert_jax.storage.files import INCOMPLETE, refuse_pickle
from bert_jax.storage.location import (
    Location,
    absolute,
    check_access,
    local_folder,
    location,
    model_address,
    named_folder,
    read_json,
    store_errors,
)
from bert_jax.tokenization.vocabulary import TOKENIZER
from bert_jax.train import workdir as workdir_lib
from bert_jax.train.orbax_io import AVERAGE, PARAMS
from bert_jax.train.run import RESULT_FILE
from bert_jax.train.run_record import read_starts
from bert_jax.train.workdir import CHECKPOINTS, CONFIG_FILE, read_config, selected_step

FLAG = "--average"


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Checked):
    """The model that a command opens."""

    checkpoint: str = option(
        help="a workdir, a step in it, an export, a Hugging Face folder, or hf:NAME", metavar="CHECKPOINT"
    )
    average: str = option(
        "",
        "a moving average, or the mean of the last K checkpoints; default none",
        metavar="ema|last:K",
    )


def open_checkpoint(
    path: str | PurePath, average: str = "", merged: bool = True, average_key: str = FLAG
) -> LoadedModel:
    """Opens a workdir, a step in it, a folder written by convert or export, a Hugging Face folder, or peft adapters.

    Args:
        path: The checkpoint; hf:NAME or hf:ORG/NAME is a model on the Hugging Face Hub, kept in the Hub's cache.
        average: `ema` or `last:K` reads an average of a workdir's parameters (read_params); empty for none.
        merged: Whether to merge a workdir's LoRA adapters into its matrices; peft adapters always are.
        average_key: The name of `average` in errors.

    Raises:
        UserError: There is no checkpoint, it is incomplete or damaged, or a reader refuses it (huggingface.read,
            peft.read).
    """
    # A name on the Hub opens as the folder in its cache, but messages and model cards show the name.
    named = named_folder(path)
    if named is not path:
        return dataclasses.replace(
            open_checkpoint(named, average, merged, average_key), origin=str(model_address(path))
        )
    path = location(path)
    check_access(path)
    if isinstance(path, Path):
        refuse_pickle(path)
    with store_errors(path, f"read {path}"):
        problem = ""
        if not path.exists():
            problem = f"no checkpoint at {path}. Give a workdir, a step in it, a Hugging Face folder, or hf:NAME"
        elif not path.is_dir():
            problem = f"{path} is a file; a checkpoint is a folder (a workdir, a step in it, a Hugging Face folder)"
        elif path.name.endswith(INCOMPLETE):
            problem = f"{path} is incomplete. Run the command that was writing it again"

    # A workdir's step is recognized by its place. Buckets hold workdirs only, since the libraries that read the other
    # formats need local files.
    step = None
    if absolute(path).parent.name == CHECKPOINTS and path.name.isdecimal():
        path, step = absolute(path).parent.parent, int(path.name)
    if problem := problem or _not_a_checkpoint(path, step):
        raise UserError(problem)

    # Adapter folders have no config.json. In other folders, only the Hugging Face format has a model_type there, or
    # weights next to it.
    adapters = isinstance(path, Path) and peft.is_adapter_folder(path)
    if (
        not isinstance(path, Path)
        or step is not None
        or not (adapters or has_weights(path) or "model_type" in read_json(path / CONFIG_FILE))
    ):
        return read_workdir(path, step, average, merged, average_key)
    if average:
        raise UserError(f"{path} holds a single set of weights, not a workdir. Omit {average_key}")
    return peft.read(path) if adapters else huggingface.read(path)


def _not_a_checkpoint(path: Location, step: int | None) -> str:
    """Describes a folder that holds something else; empty if it may be a checkpoint."""
    if not isinstance(path, Path):
        if step is None and not (path / CHECKPOINTS).is_dir():
            return f"{path} is not a workdir with checkpoints. Copy a checkpoint of another kind to a disk"
        return ""
    # Exports of programs come first, since some of them have a config.json, too.
    if (path / PROGRAMS_FILE).exists():
        return f"{path} holds StableHLO programs, not a checkpoint. Give the one they were exported from"
    if list((path / ONNX_FOLDER).glob("*.onnx")) and not list(path.glob("*.safetensors")):
        return f"{path} holds ONNX programs, not a checkpoint. Give the one that they were exported from"
    if is_original_bert(path):
        return f"{path} is in Google's TensorFlow layout. Convert it once: bert-jax convert --input {path} --output DIR"
    configured = (path / CONFIG_FILE).exists() or peft.is_adapter_folder(path)
    if not configured and (path / CHECKPOINTS).is_dir():
        return f"{path} has checkpoints but no {CONFIG_FILE}. Give the workdir that they belong to"
    return ""


def read_workdir(
    workdir: Location, step: int | None = None, average: str = "", merged: bool = True, average_key: str = FLAG
) -> LoadedModel:
    """Reads a workdir's model at a step: by default the newest, or the best if the run stopped early.

    The projection to a teacher's width is left out. Other arguments are as in open_checkpoint.

    Raises:
        UserError: There is no such checkpoint, or parameters, config.json and tokenizer do not agree.
    """
    config = read_config(workdir)
    selected = selected_step(workdir)
    if step is None and (step := selected) is None:
        raise UserError(f"no checkpoint in {workdir}: none has been saved yet. Train first, or give another folder")
    params = read_params(workdir, step, average, average_key)
    model = config.model
    # Compared before use, because Flax would report a wrong shape in a stack trace.
    expected = {path: leaf.shape for path, leaf in layers.flatten(abstract_params(model, config.heads)).items()}
    shapes = {path: value.shape for path, value in params.items()}
    for path in sorted(expected.keys() | shapes.keys()):
        if expected.get(path) != shapes.get(path):
            raise UserError(
                f"{workdir}: parameter {path} is {shapes.get(path, 'missing')}, but config.json expects "
                f"{expected.get(path, 'none')}. Was config.json changed or copied from another workdir?"
            )
    words = load_vocabulary(local_folder(workdir / TOKENIZER), model)
    heads = dataclasses.replace(config.heads, hidden_projection=0)  # only training has a teacher
    params = {path: value for path, value in params.items() if path.split(layers.SEPARATOR)[0] != HIDDEN_PROJECTION}
    # Other commands compute with whole matrices; only the export of adapters needs both parts.
    if merged:
        model, params = lora.merge(model, params)
    # result.json describes the selected step without averaging. Only the model card uses it, so a run without results
    # or a damaged file is no error.
    metrics: dict[str, object] = {}
    if step == selected and not average:
        with contextlib.suppress(OSError, ValueError):
            metrics = dict(json.loads((workdir / RESULT_FILE).read_text(encoding="utf-8")))
    return LoadedModel(
        model,
        heads,
        params,
        words,
        config.task,
        step,
        dtype=config.dtype,
        origin=str(workdir),
        training=config.training,
        data=config.data,
        metrics=metrics,
        starts=read_starts(workdir),
        average=average,
    )


def read_params(workdir: Location, step: int, average: str, key: str = FLAG) -> dict[str, np.ndarray]:
    """Reads a workdir's parameters at a step, or an average, by path.

    Args:
        workdir: The workdir.
        step: The step, or the last one that `last:K` includes.
        average: Empty for the step's own parameters; `ema` for the moving average that the run kept; `last:K` for the
            mean of the K newest checkpoints (Junczys-Dowmunt et al. 2016, section 3; Vaswani et al. 2017, section 6.1,
            use 5).
        key: The name of `average` in errors.

    Raises:
        UserError: `average` is unknown, the run kept no moving average or fewer than K checkpoints, or a checkpoint is
            damaged.
    """
    if average in ("", MOVING_AVERAGE):
        return workdir_lib.read_params(workdir, step, AVERAGE if average else PARAMS)
    match = re.fullmatch(r"last:([1-9]\d*)", average)
    count = int(match[1]) if match else 0
    steps = [saved for saved in workdir_lib.saved_steps(workdir) if saved <= step]
    if not 1 <= count <= len(steps):
        raise UserError(
            f"{key} is {average}, but {workdir} has {len(steps)} checkpoints up to step {step}: {steps}. "
            f"Use last:{len(steps)}, or keep more checkpoints in the run: --config.checkpoint.keep={count}"
            if match
            else f"unknown {key} {average!r}; use {MOVING_AVERAGE}, or last:K such as last:5"
        )
    # One checkpoint is in memory at a time, next to the sum in float64.
    sums: dict[str, np.ndarray] = {}
    for saved in steps[-count:]:
        for path, value in workdir_lib.read_params(workdir, saved).items():
            sums[path] = np.add(sums.get(path, 0.0), value, dtype=np.float64)
    # np.asarray, because numpy makes scalars of sums without axes.
    return {path: np.asarray(total / count, np.float32) for path, total in sums.items()}
