"""Writes a model as ONNX programs, next to config.json, tokenizer files and README.md, as programs of the Hub expect.

onnx/model.onnx             float32
onnx/model_quantized.onnx   int8

`write`, at the top, shows the steps: `convert` traces the model's outputs and converts them with jax2onnx,
`differences` compares a program with the model in onnxruntime, and `_quantize` rounds it to int8. `folded`, at the
end, first simplifies the traced function. Inputs and outputs have the names and dtypes of transformers. Only models
with a Hugging Face format are written, since users of such folders expect its config.json.
"""

import contextlib
import importlib.util
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jaxtyping import Array

from bert_jax.errors import UserError, install_hint
from bert_jax.interop import huggingface_export, model_card, sentence_transformers, stablehlo
from bert_jax.interop.huggingface import ONNX_FOLDER
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.stablehlo import Outputs, Program, input_names
from bert_jax.model.runtime import Runtime
from bert_jax.storage.files import atomic_folder

PACKAGES = ("jax2onnx", "onnx", "onnxruntime")
# ONNX 1.12 (2022) has all operators that a model needs, and every current runtime reads it.
OPSET, IR_VERSION = 17, 8
# By dtype. transformers.js, fastembed, optimum and the Hub have these names for the programs, and for the second file
# of a large one.
FILES = {"float32": "model.onnx", "int8": "model_quantized.onnx"}
DATA = "_data"
# Bytes of tensors in a file of at most 2 GiB (protobuf's limit); the rest is for the nodes.
TENSORS_LIMIT = 2**31 - 2**26

TOKEN_TYPES = {"segment_ids": "token_type_ids"}
# Names in bert_jax and in transformers; the logits of one head alone are `logits`.
_OUTPUTS = {"last": "last_hidden_state", "pooled": "pooler_output", "vector": "sentence_embedding"}
# The largest error of float32 outputs, relative to the largest value if this is above 1.
TOLERANCE = 1e-4
# Primitives that call a function, and their parameter that holds it. Custom derivatives are left out.
_CALLED = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}

# The model card's section on how to run the program.
_LOADING = f"""```python
import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
session = onnxruntime.InferenceSession("PATH/{ONNX_FOLDER}/FILE")
inputs = dict(tokenizer(["Some text.", "More text."], padding=True, return_tensors="np"))
outputs = dict(zip([one.name for one in session.get_outputs()], session.run(None, inputs)))
```

"""
_IN_BROWSER = """```js
import { pipeline } from "@huggingface/transformers";

const run = await pipeline("TASK", "PATH");
console.log(await run("Some text."));
```

"""
_DIFFERENCES = """Any batch size and length. Largest differences from bert_jax's outputs in float32 for random tokens:

| program | parameters | output | difference | largest value |
|---|---|---|---|---|"""


class Difference(NamedTuple):
    """The largest difference of a program's output from the model's, and the latter's largest absolute value."""

    error: float
    largest: float

    @property
    def relative(self) -> float:
        return self.error / max(1.0, self.largest)


def check_installed() -> None:
    """Checks that the extra `onnx` is installed.

    Raises:
        UserError: A package is missing.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"--format onnx needs packages that are not installed ({', '.join(missing)}): {install_hint('onnx')}"
        )


def write(loaded: LoadedModel, directory: str | Path, dtype: str = "") -> dict[str, dict[str, Difference]]:
    """Writes programs to a new folder, and returns their differences by dtype and output.

    The folder appears complete or not at all, once the float32 program equals the model in onnxruntime. A model that
    was fine-tuned for vectors becomes a sentence-transformers folder with the output `sentence_embedding`.

    Args:
        loaded: The model.
        directory: The folder to create.
        dtype: The only one of FILES to write; empty for all.

    Raises:
        UserError: A package is missing, the folder exists, the model has no Hugging Face format or is one of multiple
            choice, or the program differs from the model by more than TOLERANCE.
    """
    check_installed()
    if loaded.heads.choices:
        raise UserError("--format onnx does not write models of multiple choice. Use --format hf or stablehlo")
    settings = None
    if loaded.task and loaded.task["kind"] == sentence_transformers.KIND:
        loaded, settings = huggingface_export.sentence_encoder(loaded)
    loaded = huggingface_export.without_span_boundary(loaded)
    huggingface_export.check(loaded)
    compute = named_outputs(loaded, settings)
    program = convert(loaded, compute)
    with atomic_folder(directory) as unfinished:
        measured = _write_programs(program, unfinished / ONNX_FOLDER, loaded, compute, [dtype] if dtype else FILES)
        rows = [
            f"| `{FILES[dtype]}` | {dtype} | {name} | {difference.error:.1e} | {difference.largest:.1e} |"
            for dtype, differences in measured.items()
            for name, difference in differences.items()
        ]
        pipeline = model_card.pipeline_tag(loaded)
        in_browser = "" if pipeline == "text-generation" else _IN_BROWSER.replace("TASK", pipeline)
        section = in_browser + _LOADING.replace("FILE", FILES[next(iter(measured))]) + "\n".join((_DIFFERENCES, *rows))
        loading = model_card.Loading("transformers.js", section, tags=("onnx",))
        count = sum(value.size for value in loaded.params.values())
        huggingface_export.write_description(loaded, unfinished, "float32", count, loading, settings)
    return measured


def _write_programs(
    program: Any, folder: Path, loaded: LoadedModel, compute: Program, dtypes: Iterable[str]
) -> dict[str, dict[str, Difference]]:
    """Writes a float32 program in each dtype, and returns differences by dtype and output."""
    folder.mkdir()
    in_two_files = sum(4 * math.prod(tensor.dims) for tensor in program.graph.initializer) > TENSORS_LIMIT
    # In the folder of the output, so that finished files are renamed and not copied.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        # The float32 program is compared in any case: it shows whether the conversion is right.
        plain = Path(scratch) / FILES["float32"]
        _save(program, plain, in_two_files)
        measured = {"float32": differences(plain, loaded, compute)}
        _check(measured["float32"], TOLERANCE, "and use --format stablehlo")
        if "int8" in dtypes:
            rounded = plain.with_name(FILES["int8"])
            _quantize(plain, rounded, in_two_files=in_two_files)
            measured["int8"] = differences(rounded, loaded, compute)
            # No bound on the error of 8 bits fits all models, so the model card states it.
            _check(measured["int8"], math.inf, "and use --dtype float32")
        for dtype in dtypes:
            for file in plain.parent.glob(f"{FILES[dtype]}*"):
                file.rename(folder / file.name)
    return {dtype: measured[dtype] for dtype in dtypes}


def _save(program: Any, file: Path, in_two_files: bool) -> None:
    import onnx  # only with the extra

    location = f"{file.name}{DATA}" if in_two_files else None
    onnx.save_model(program, file, save_as_external_data=in_two_files, location=location)


def _check(measured: Mapping[str, Difference], tolerance: float, advice: str) -> None:
    for name, difference in measured.items():
        # Not a number is refused, too; infinity is not below an infinite tolerance.
        if not (difference.relative <= tolerance and math.isfinite(difference.error)):
            raise UserError(
                f"the ONNX program's {name} differs from the model's by {difference.error:.1e} (largest value "
                f"{difference.largest:.1e}), so it is not written. Report this, {advice}"
            )


def named_outputs(loaded: LoadedModel, settings: Mapping[str, Any] | None = None) -> Program:
    """A program that returns a model's outputs by their names in transformers.

    Heads return `logits`, except `start_logits` and `end_logits` for answers, and `seq_relationship_logits` for next
    sentences next to another head. A model without heads returns `last_hidden_state`, and `pooler_output` if it has a
    pooler; with `settings` (as in text_vectors), `last_hidden_state` and `sentence_embedding`.
    """
    # Unrolled, so that each layer's parameters are constants of the program, which can be quantized.
    runtime = Runtime(attention=stablehlo.ATTENTION, layer_loop="unrolled", platform="cpu")
    if settings:
        program = stablehlo.text_vectors(loaded, runtime, settings)
    elif stablehlo.has_predictions(loaded.heads):
        program = stablehlo.predictions(loaded, runtime)
    else:
        program = stablehlo.hidden_states(loaded, runtime)

    def compute(parameters: dict[str, Array], inputs: dict[str, Array]) -> Outputs:
        outputs = program(parameters, inputs)
        if "answer_logits" in outputs:
            return {"start_logits": outputs["answer_logits"][..., 0], "end_logits": outputs["answer_logits"][..., 1]}
        names = _OUTPUTS | ({"next_sentence_logits": "seq_relationship_logits"} if len(outputs) > 1 else {})
        return {names.get(name, "logits"): value for name, value in outputs.items()}

    return compute


def convert(loaded: LoadedModel, compute: Program) -> Any:
    """Converts a program to an onnx.ModelProto: int64[batch, length] to float32, for any length that the model has."""
    import jax2onnx
    import onnx

    names = input_names(loaded)
    parameters = {path: jnp.asarray(value) for path, value in loaded.params.items()}

    def run(*inputs: Array) -> Outputs:
        return compute(parameters, dict(zip(names, inputs, strict=True)))

    shapes = [jax.ShapeDtypeStruct(stablehlo.symbolic_sizes(loaded), jnp.int32)] * len(names)
    traced, outputs = jax.make_jaxpr(run, return_shape=True)(*shapes)
    order = sorted(outputs)  # the order of the leaves of a dict
    with _quietly():
        program = jax2onnx.to_onnx(
            folded(traced),
            shapes,
            model_name="bert_jax",
            opset=OPSET,
            input_names=[TOKEN_TYPES.get(name, name) for name in names],
            output_names=order,
        )
    # The newest version, which jax2onnx writes, is refused by older runtimes.
    program.ir_version = IR_VERSION
    program.producer_name = "bert_jax"
    graph = program.graph
    # jax2onnx numbers symbols. Runtimes infer the shapes of intermediate values, and outputs get their sizes by name.
    del graph.value_info[:]
    for value, name in zip(graph.output, order, strict=True):
        del value.type.tensor_type.shape.dim[:]
        for size in outputs[name].shape:
            kind = {"dim_value": size} if isinstance(size, int) else {"dim_param": str(size)}
            value.type.tensor_type.shape.dim.add(**kind)
    # Inputs are int64, the dtype of tokenizers; JAX computes with int32.
    narrow = {value.name: f"{value.name}_int32" for value in graph.input}
    for node in graph.node:
        node.input[:] = [narrow.get(name, name) for name in node.input]
    for value in graph.input:
        value.type.tensor_type.elem_type = onnx.TensorProto.INT64
    casts = [onnx.helper.make_node("Cast", [wide], [name], to=onnx.TensorProto.INT32) for wide, name in narrow.items()]
    _replace(graph.node, [*casts, *graph.node])
    # jax2onnx writes matmuls as products plus 0 times a bias, but onnxruntime quantizes plain products only.
    for node in graph.node:
        values = {attribute.name: attribute.f or attribute.i for attribute in node.attribute}
        if node.op_type == "Gemm" and values == {"alpha": 1.0, "beta": 0.0}:
            node.op_type = "MatMul"
            del node.attribute[:], node.input[2:]
    # The removed biases would stay in the file.
    used = {name for node in graph.node for name in node.input}
    _replace(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in used])
    return program


def _replace(repeated: Any, values: list[Any]) -> None:
    """Sets a repeated field of a protobuf message, which allows no assignment."""
    del repeated[:]
    repeated.extend(values)


def _quantize(source: Path, target: Path, *, in_two_files: bool) -> None:
    """Rounds a program's matrices to int8; onnxruntime chooses the scales of activations per batch."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quietly():
        quantize_dynamic(
            source,
            target,
            per_channel=True,  # a scale for each column of a matrix
            # Weights use 7 of 8 bits: processors without instructions for 8-bit dot products would saturate, and give
            # other results (onnxruntime's guide to quantization).
            reduce_range=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=in_two_files,
        )
    if in_two_files:  # whose second file gets the name that other programs expect
        import onnx

        program = onnx.load_model(target)
        for file in target.parent.glob(f"{target.name}*"):
            file.unlink()
        _save(program, target, in_two_files)


def differences(path: Path, loaded: LoadedModel, compute: Program) -> dict[str, Difference]:
    """Measures by name how far a file's outputs are from the model's, for random tokens in rows of three lengths."""
    import onnxruntime

    # Rows with padding, and a length that is no power of two, show a mask or a size that was fixed by mistake.
    generator = np.random.default_rng(0)
    longest = min(13, loaded.model.max_positions)
    real = np.arange(longest) < np.array([longest, longest // 2 + 1, 3])[:, None]
    inputs = {"input_ids": generator.integers(0, loaded.model.vocab_size, real.shape), "attention_mask": real}
    if "segment_ids" in input_names(loaded):
        inputs["segment_ids"] = real & (np.arange(longest) >= longest // 3)
    narrow = {name: value.astype(np.int32) for name, value in inputs.items()}
    expected = jax.device_get(jax.jit(compute)(dict(loaded.params), narrow))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    wide = {TOKEN_TYPES.get(name, name): value.astype(np.int64) for name, value in inputs.items()}
    got = dict(zip(names, session.run(names, wide), strict=True))
    measured = {}
    for name in sorted(expected):
        ours, theirs = expected[name], got[name]
        measured[name] = Difference(np.inf, 0.0)
        if ours.shape == theirs.shape:
            # Padding does not count in outputs by token, [B, T, ...].
            ours, theirs = (value[real] if value.shape[:2] == real.shape else value for value in (ours, theirs))
            measured[name] = Difference(float(np.abs(theirs - ours).max()), float(np.abs(ours).max()))
    return measured


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hides the warnings of converters, which are about their own steps."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def folded(traced: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Computes everything that needs no argument at trace time, e.g. the slices of stacked layers.

    The model's parameters must be constants of the traced function. Calls are inlined.
    """
    return lambda *arguments: _evaluate(traced.jaxpr, traced.consts, arguments)


def _evaluate(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        primitive = equation.primitive
        if primitive.name in _CALLED:
            # Inlined, so that constants within the call are folded, too.
            called = equation.params[_CALLED[primitive.name]]
            results: Sequence[Any] = _evaluate(called.jaxpr, called.consts, operands)
        else:
            # A constant has no traced operand and no symbolic size.
            sizes = [size for variable in equation.outvars for size in getattr(variable.aval, "shape", ())]
            traced = any(isinstance(operand, jax.core.Tracer) for operand in operands)
            constant = not traced and all(isinstance(size, int) for size in sizes)
            with jax.ensure_compile_time_eval() if constant else contextlib.nullcontext():
                results = primitive.bind(*operands, **equation.params)
            results = results if primitive.multiple_results else [results]
        values |= zip(equation.outvars, results, strict=True)
    return [read(variable) for variable in jaxpr.outvars]
