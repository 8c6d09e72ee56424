"""Opens any CHECKPOINT that a command accepts."""

import dataclasses
from pathlib import Path, PurePath

import bert_jax.lineage  # noqa: F401 (its encoders are part of the package, so their checkpoints open)
from bert_jax.command import UserError
from bert_jax.interop import bert_jax_format, checkpoint_average, huggingface, peft
from bert_jax.interop.folder_formats import ONNX_FILE, PROGRAMS_FILE, is_original_bert
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.storage.hub_models import named_folder
from bert_jax.storage.local import INCOMPLETE
from bert_jax.storage.location import Location, absolute, location, read_json, store_errors
from bert_jax.storage.pickles import refuse_pickle
from bert_jax.storage.stores import check_access
from bert_jax.train.workdir import CHECKPOINTS, CONFIG_FILE


def open_checkpoint(
    path: str | PurePath, average: str = "", merged: bool = True, average_key: str = checkpoint_average.FLAG
) -> LoadedModel:
    """Opens a workdir, a step in it, a folder written by convert or export, a Hugging Face folder, or adapters of peft.

    hf:NAME or hf:ORG/NAME is a model of the Hugging Face Hub, whose files are kept in its cache.

    LoRA's adapters are merged, except those of a workdir where `merged` is false.

    average selects an average of a workdir's parameters: `ema` or `last:K` (checkpoint_average.read_params); the empty
    string reads the parameters themselves. Errors name it by average_key. Raises UserError if there is no checkpoint,
    if it is incomplete or damaged, and whenever `huggingface.read` or `peft.read` does.
    """
    named = named_folder(path)
    if named is not path:
        return dataclasses.replace(open_checkpoint(named, average, merged, average_key), origin=str(path))
    path = location(path)
    check_access(path)
    with store_errors(path, f"read {path}"):
        found = path.exists()
    if not found:
        raise UserError(f"no checkpoint at {path}. Give a workdir, a step in it, a Hugging Face folder, or hf:NAME")
    if isinstance(path, Path):
        refuse_pickle(path)
    if not path.is_dir():
        raise UserError(f"{path} is a file; a checkpoint is a folder (a workdir, a step in it, a Hugging Face folder)")
    if path.name.endswith(INCOMPLETE):
        raise UserError(f"{path} is incomplete. Run the command that was writing it again")
    step = None
    if absolute(path).parent.name == CHECKPOINTS and path.name.isdecimal():
        path, step = absolute(path).parent.parent, int(path.name)
    if not isinstance(path, Path):
        if step is None and not (path / CHECKPOINTS).is_dir():
            raise UserError(f"{path} is not a workdir with checkpoints. Copy a checkpoint of another kind to a disk")
        return bert_jax_format.read(path, step, average, merged, average_key)
    if (path / PROGRAMS_FILE).exists():
        raise UserError(f"{path} holds StableHLO programs, not a checkpoint. Give the one they were exported from")
    if (path / ONNX_FILE).exists() and not list(path.glob("*.safetensors")):
        raise UserError(f"{path} holds an ONNX program, not a checkpoint. Give the one that it was exported from")
    if is_original_bert(path):
        raise UserError(
            f"{path} is in Google's TensorFlow layout. Convert it once: bert-jax convert --input {path} --output DIR"
        )
    if step is not None or (not peft.is_adapter_folder(path) and _is_workdir(path)):
        return bert_jax_format.read(path, step, average, merged, average_key)
    if average:
        raise UserError(f"{path} holds a single set of weights, not a workdir. Omit {average_key}")
    return peft.read(path) if peft.is_adapter_folder(path) else huggingface.read(path)


def _is_workdir(path: Location) -> bool:
    """Returns whether config.json is in bert_jax format; the Hugging Face format has a model_type."""
    file = path / CONFIG_FILE
    if not file.exists() and (path / CHECKPOINTS).is_dir():
        raise UserError(f"{path} has checkpoints but no {CONFIG_FILE}. Give the workdir that they belong to")
    return "model_type" not in read_json(file)
