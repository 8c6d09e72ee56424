"""Exports models to other software's formats, and converts them to bert_jax format, a workdir."""

import re
from dataclasses import replace
from pathlib import Path

from bert_jax.errors import UserError
from bert_jax.interop import huggingface, huggingface_export, onnx, original_bert, peft, stablehlo
from bert_jax.interop.loaded_model import LoadedModel, select_part, with_target_scale
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.storage.files import atomic_folder, refuse_existing
from bert_jax.storage.location import named_folder
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.vocabulary import TOKENIZER
from bert_jax.train.workdir import WorkdirConfig, write_config, write_params

FORMATS = ("hf", "orbax", "stablehlo", "onnx", "peft", "sentence_transformers")
FLOATS = ("float32", "bfloat16")
# The choices of --dtype by format; the other formats have none.
DTYPES = {"hf": FLOATS, "sentence_transformers": FLOATS, "stablehlo": FLOATS, "onnx": ("float32", "int8")}


def export(
    checkpoint: str | Path,
    output: str | Path,
    format: str = "hf",
    average: str = "",
    part: str = "",
    base: str = "",
    dtype: str = "",
    language: str = "",
    license: str = "",
    shape: str = "",
) -> LoadedModel:
    """Exports a checkpoint; the output folder appears complete or not at all.

    Args:
        checkpoint: As in open_checkpoint, like `average`.
        output: The folder to create.
        format: One of FORMATS.
        part: The discriminator or the generator, if the model has both (config.objective=replaced_tokens). By default
            the orbax format holds both, and others the discriminator.
        base: The Hugging Face folder that peft adapters refer to; empty for the run's init_from.
        dtype: One of DTYPES[format]; empty for the default that `--help` describes.
        language: For the model card: codes of languages, such as tr or tr,en; empty for those of the base model.
        license: For the model card: the Hub's name of a license, such as apache-2.0; empty for that of the base model.
        shape: For stablehlo: the batch size and length of the programs, such as 8x128; empty for any.

    Raises:
        UserError: An option is unknown, the output exists, or the checkpoint cannot be opened.
    """
    # Reading a checkpoint can take minutes, so wrong options are refused first.
    _check_options(output, format, dtype, base, shape)
    loaded = open_checkpoint(checkpoint, average, merged=format != "peft")
    return export_loaded(with_card(loaded, language, license), output, format, part, dtype, base, shape)


def with_card(loaded: LoadedModel, language: str = "", license: str = "") -> LoadedModel:
    """Sets the languages (codes, such as tr,en) and the license in a model's card; empty texts change nothing."""
    codes = [code.strip() for code in language.split(",") if code.strip()]
    given = {"language": codes[0] if len(codes) == 1 else codes, "license": license}
    return replace(loaded, card={**loaded.card, **{key: value for key, value in given.items() if value}})


def export_loaded(
    loaded: LoadedModel,
    output: str | Path,
    format: str = "hf",
    part: str = "",
    dtype: str = "",
    base: str = "",
    shape: str = "",
) -> LoadedModel:
    """Exports an opened model, as `export` does, and returns it as written. For peft, its adapters must be unmerged."""
    _check_options(output, format, dtype, base, shape)
    # Only bert_jax format can hold both parts; the discriminator is the part to fine-tune.
    if part or (loaded.heads.generator and format != "orbax"):
        loaded = select_part(loaded, part or "discriminator")
    if format == "orbax":
        with atomic_folder(output) as unfinished:
            write(loaded, unfinished)
        return loaded
    # Other programs know no scale of targets, so the last layer includes it.
    loaded = with_target_scale(loaded)
    if format == "stablehlo":
        stablehlo.write(loaded, output, dtype or "float32", _sizes(shape) if shape else None)
    elif format == "onnx":
        onnx.write(loaded, output, dtype)
    elif format == "peft":
        peft.write(loaded, output, base)
    else:
        writer = huggingface_export.write if format == "hf" else huggingface_export.write_sentence_transformer
        writer(loaded.rounded(dtype) if dtype else loaded, output)
    return loaded


def _sizes(shape: str) -> tuple[int, int]:
    """Reads 8x128; 0 x 0 if it is something else."""
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
    return (int(sizes[1]), int(sizes[2])) if sizes else (0, 0)


def _check_options(output: str | Path, format: str, dtype: str, base: str, shape: str) -> None:
    known = DTYPES.get(format, ())
    choices = f"choose from {', '.join(known)}" if known else "it has no choice of dtype. Omit --dtype"
    for refused, message in (
        (format not in FORMATS, f"unknown --format {format}; choose from {', '.join(FORMATS)}"),
        (dtype and dtype not in known, f"--dtype is {dtype}, which --format {format} does not write; {choices}"),
        (shape and format != "stablehlo", f"--shape is {shape}, but only --format stablehlo has it. Omit --shape"),
        (shape and not _sizes(shape)[0], f"--shape is {shape}; expected batch size and length, such as 8x128"),
        (base and format != "peft", f"--base is {base}, but --format {format} writes a whole model. Omit --base"),
    ):
        if refused:
            raise UserError(message)
    if format == "onnx":
        onnx.check_installed()
    refuse_existing(Path(output))


def convert(folder: str | Path, output: str | Path) -> LoadedModel:
    """Converts a Hugging Face or Google folder, or hf:NAME; the output folder appears complete or not at all.

    Raises:
        UserError: The output exists, or the folder cannot be read (named_folder, huggingface.read, original_bert.read).
    """
    path = Path(named_folder(folder))
    with atomic_folder(output) as unfinished:
        loaded = original_bert.read(path) if original_bert.is_original_bert(path) else huggingface.read(path)
        write(loaded, unfinished)
    return loaded


def write(loaded: LoadedModel, directory: Path) -> None:
    """Writes a model as a workdir at step 0, with parameters and without optimizer state."""
    directory.mkdir(parents=True, exist_ok=True)
    # config.json comes last: without it the folder is no workdir.
    write_params(directory, 0, loaded.params)
    Tokenizer(loaded.vocabulary.spec).save(directory / TOKENIZER)
    config = WorkdirConfig(
        model=loaded.model,
        heads=loaded.heads,
        kind="pretraining" if loaded.task is None else "finetuning",
        training=loaded.training,
        task=loaded.task,
        dtype=loaded.dtype,
        data=loaded.data,
    )
    write_config(directory, config)
