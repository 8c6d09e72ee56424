"""Exports a model in the format of other software, or writes it in bert_jax format, which is a workdir."""

from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.interop import huggingface_export, onnx, peft_export, stablehlo
from bert_jax.interop.loaded_model import LoadedModel, part_of, with_target_scale
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.storage.files import atomic_folder, refuse_existing
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.vocabulary import TOKENIZER
from bert_jax.train.workdir import WorkdirConfig, write_config, write_params

FORMATS = ("hf", "orbax", "stablehlo", "onnx", "peft", "sentence_transformers")
FLOATS = ("float32", "bfloat16")
# Those of --dtype by format. The others have no choice.
DTYPES = {"hf": FLOATS, "sentence_transformers": FLOATS, "stablehlo": FLOATS, "onnx": ("float32", "int8")}


def export(
    checkpoint: str | Path,
    output: str | Path,
    format: str = "hf",
    average: str = "",
    part: str = "",
    base: str = "",
    dtype: str = "",
) -> LoadedModel:
    """Exports a checkpoint; the output folder appears complete or not at all. average: see open_checkpoint.

    part selects the discriminator or the generator of a model that has both (config.objective=replaced_tokens); the
    orbax format holds both unless it is given. base is the Hugging Face folder that adapters in peft's format refer to
    (default: the run's init_from). dtype is one of DTYPES[format]; empty for the default that `--help` describes.
    Raises UserError for an unknown format, dtype or part, an output that exists, and a checkpoint that cannot be
    opened.
    """
    _check_options(output, format, dtype)  # before the checkpoint is read
    if base and format != "peft":
        raise UserError(f"--base is {base}, but --format {format} writes a whole model. Omit --base")
    return export_loaded(
        open_checkpoint(checkpoint, average, merged=format != "peft"), output, format, part, dtype, base
    )


def export_loaded(
    loaded: LoadedModel, output: str | Path, format: str = "hf", part: str = "", dtype: str = "", base: str = ""
) -> LoadedModel:
    """Exports a model that has been opened, as `export` does, and returns it as it was written.

    With format peft, its adapters must not be merged.
    """
    _check_options(output, format, dtype)
    if part or (loaded.heads.generator and format != "orbax"):
        loaded = part_of(loaded, part or "discriminator")
    if format != "orbax":
        loaded = with_target_scale(loaded)
    if format in ("hf", "sentence_transformers"):
        rounded = loaded.rounded(dtype) if dtype else loaded
        writer = huggingface_export.write if format == "hf" else huggingface_export.write_sentence_transformer
        writer(rounded, output)
    elif format == "stablehlo":
        stablehlo.write(loaded, output, dtype or "float32")
    elif format == "onnx":
        onnx.write(loaded, output, dtype or "float32")
    elif format == "peft":
        peft_export.write(loaded, output, base)
    else:
        with atomic_folder(output) as unfinished:
            write(loaded, unfinished)
    return loaded


def _check_options(output: str | Path, format: str, dtype: str) -> None:
    """Raises UserError for an unknown format or dtype, an output that exists, and missing packages."""
    if format not in FORMATS:
        raise UserError(f"unknown --format {format}; choose from {', '.join(FORMATS)}")
    known = DTYPES.get(format, ())
    if dtype and dtype not in known:
        choices = f"choose from {', '.join(known)}" if known else "it has no choice of dtype. Omit --dtype"
        raise UserError(f"--dtype is {dtype}, which --format {format} does not write; {choices}")
    if format == "onnx":
        onnx.check_installed()
    refuse_existing(Path(output))


def write(loaded: LoadedModel, directory: Path) -> None:
    """Writes a model as the workdir of a run at step 0, with parameters and no optimizer state."""
    directory.mkdir(parents=True, exist_ok=True)
    write_params(directory, 0, loaded.params)
    Tokenizer(loaded.vocabulary.spec).save(directory / TOKENIZER)
    kind = "pretraining" if loaded.task is None else "finetuning"
    write_config(
        directory,
        WorkdirConfig(
            loaded.model,
            loaded.heads,
            kind,
            training=loaded.training,
            task=loaded.task,
            dtype=loaded.dtype,
            data=loaded.data,
        ),
    )
