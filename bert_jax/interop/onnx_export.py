"""Writes a model as an ONNX program for onnxruntime: a folder of model.onnx, config.json, tokenizer files, README.md.

Such folders are written for the models that the Hugging Face format holds, since their users expect its config.json.
"""

import math
from collections.abc import Mapping
from pathlib import Path

from bert_jax.command import UserError
from bert_jax.interop import huggingface_export, onnx_program, sentence_transformers
from bert_jax.interop.folder_formats import ONNX_FILE
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.onnx_program import Difference
from bert_jax.storage.local import atomic_folder

# Of the outputs of float32, relative to the largest of them if that is above 1.
TOLERANCE = 1e-4


def write(loaded: LoadedModel, directory: str | Path, dtype: str = "float32") -> dict[str, Difference]:
    """Writes a program to a new folder, which appears complete or not at all, and returns its differences by output.

    dtype is float32 or int8. The float32 program is compared with the model in onnxruntime before the folder appears.
    A model that was fine-tuned for vectors is written as a sentence-transformers folder with the output
    `sentence_embedding`. Raises UserError if a package is missing, the folder exists, the program differs from the
    model by more than TOLERANCE, and for a model that has no Hugging Face format or is one of multiple choice.
    """
    onnx_program.check_installed()
    if loaded.heads.choices:
        raise UserError("--format onnx does not write models of multiple choice. Use --format hf or stablehlo")
    settings = None
    if loaded.task and loaded.task["kind"] == sentence_transformers.KIND:
        loaded, settings = huggingface_export.sentence_encoder(loaded)
    loaded = huggingface_export.without_span_boundary(loaded)
    huggingface_export.check(loaded)
    compute = onnx_program.named_outputs(loaded, settings)
    program = onnx_program.convert(loaded, compute)
    with atomic_folder(directory) as unfinished:
        file = unfinished / (ONNX_FILE if dtype == "float32" else "float32.onnx")
        in_two_files = onnx_program.save(program, file)
        found = onnx_program.differences(file, loaded, compute)
        _check(found)
        if dtype == "int8":
            onnx_program.quantize(file, unfinished / ONNX_FILE, in_two_files=in_two_files)
            for written in unfinished.glob(f"{file.name}*"):
                written.unlink()
            found = onnx_program.differences(unfinished / ONNX_FILE, loaded, compute)
            _check_finite(found)
        parameters = sum(value.size for value in loaded.params.values())
        loading = _loading(dtype, found)
        huggingface_export.write_description(loaded, unfinished, "float32", parameters, loading, settings)
    return found


def _check(found: Mapping[str, Difference]) -> None:
    for name, one in found.items():
        if not one.relative <= TOLERANCE:  # also where it is not a number
            raise UserError(
                f"the ONNX program's {name} differs from the model's by {one.error:.1e} (largest value "
                f"{one.largest:.1e}), so it is not written. Report this, and use --format stablehlo"
            )


def _check_finite(found: Mapping[str, Difference]) -> None:
    """8 bits have no error that all models keep; the description says what it is."""
    for name, one in found.items():
        if not math.isfinite(one.error):
            raise UserError(
                f"in int8, the ONNX program's {name} is not finite, so it is not written. Report this, and use "
                "--dtype float32"
            )


def _loading(dtype: str, found: Mapping[str, Difference]) -> str:
    rows = [f"| {name} | {one.error:.1e} | {one.largest:.1e} |" for name, one in found.items()]
    return "\n".join(
        [
            "```python",
            "import onnxruntime",
            "from transformers import AutoTokenizer",
            "",
            'tokenizer = AutoTokenizer.from_pretrained("PATH")',
            f'session = onnxruntime.InferenceSession("PATH/{ONNX_FILE}")',
            'inputs = dict(tokenizer(["Some text.", "More text."], padding=True, return_tensors="np"))',
            "outputs = dict(zip([one.name for one in session.get_outputs()], session.run(None, inputs)))",
            "```",
            "",
            f"Parameters are {dtype}; any batch size and length. Largest differences from bert_jax's outputs in "
            "float32 for random tokens:",
            "",
            "| output | difference | largest value |",
            "|---|---|---|",
            *rows,
        ]
    )
