"""Writes a model as an ONNX program for onnxruntime: a folder of model.onnx, config.json, tokenizer files, README.md.

`write` is the entry point, at the top, and shows the steps: `convert` traces the model's outputs and converts them with
jax2onnx, `differences` compares the program with the model in onnxruntime, and `quantize` rounds it to int8. `folded`,
at the end, simplifies the traced function first. Inputs and outputs have the names and dtypes of transformers. Only
models that have a Hugging Face format are written, since users of such folders expect its config.json.
"""

import contextlib
import importlib.util
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jaxtyping import Array

from bert_jax.errors import UserError, install_hint
from bert_jax.interop import huggingface_export, sentence_transformers
from bert_jax.interop.huggingface import ONNX_FILE
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.stablehlo import (
    ATTENTION,
    Outputs,
    Program,
    has_predictions,
    hidden_states,
    input_names,
    predictions,
    symbolic_sizes,
    text_vectors,
)
from bert_jax.model.runtime import Runtime
from bert_jax.storage.files import atomic_folder

PACKAGES = ("jax2onnx", "onnx", "onnxruntime")
# ONNX 1.12, of 2022: new enough for everything that a model needs, and read by every runtime of today.
OPSET, IR_VERSION = 17, 8
# Bytes of tensors in one file, which may have 2 GiB (protobuf's limit); the rest is for the nodes.
TENSORS_LIMIT = 2**31 - 2**26

TOKEN_TYPES = {"segment_ids": "token_type_ids"}
# Names in bert_jax and in transformers; the logits of one head alone are `logits`.
_OUTPUTS = {"last": "last_hidden_state", "pooled": "pooler_output", "vector": "sentence_embedding"}
# Of the outputs of float32, relative to the largest of them if that is above 1.
TOLERANCE = 1e-4
# The parameter that holds the function of a call, by primitive. Derivatives that a call defines are left out.
_CALLED = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


_LOADING = f"""```python
import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
session = onnxruntime.InferenceSession("PATH/{ONNX_FILE}")
inputs = dict(tokenizer(["Some text.", "More text."], padding=True, return_tensors="np"))
outputs = dict(zip([one.name for one in session.get_outputs()], session.run(None, inputs)))
```

"""
_DIFFERENCES = """any batch size and length. Largest differences from bert_jax's outputs in float32 for random tokens:

| output | difference | largest value |
|---|---|---|"""


class Difference(NamedTuple):
    """The largest difference of an output from the model's, and the largest absolute value of the model's."""

    error: float
    largest: float

    @property
    def relative(self) -> float:
        return self.error / max(1.0, self.largest)


def check_installed() -> None:
    """Raises UserError if a package of the extra `onnx` is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"--format onnx needs packages that are not installed ({', '.join(missing)}): {install_hint('onnx')}"
        )


def write(loaded: LoadedModel, directory: str | Path, dtype: str = "float32") -> dict[str, Difference]:
    """Writes a program to a new folder, which appears complete or not at all, and returns its differences by output.

    dtype is float32 or int8. The float32 program is compared with the model in onnxruntime before the folder appears.
    A model that was fine-tuned for vectors is written as a sentence-transformers folder with the output
    `sentence_embedding`. Raises UserError if a package is missing, the folder exists, the program differs from the
    model by more than TOLERANCE, and for a model that has no Hugging Face format or is one of multiple choice.
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
        file = unfinished / (ONNX_FILE if dtype == "float32" else "float32.onnx")
        in_two_files = save(program, file)
        measured = differences(file, loaded, compute)
        _check(measured)
        if dtype == "int8":
            quantize(file, unfinished / ONNX_FILE, in_two_files=in_two_files)
            for written in unfinished.glob(f"{file.name}*"):
                written.unlink()
            measured = differences(unfinished / ONNX_FILE, loaded, compute)
            _check_finite(measured)
        parameters = sum(value.size for value in loaded.params.values())
        loading = _loading(dtype, measured)
        huggingface_export.write_description(loaded, unfinished, "float32", parameters, loading, settings)
    return measured


def _check(measured: Mapping[str, Difference]) -> None:
    for name, one in measured.items():
        if not one.relative <= TOLERANCE:  # also where it is not a number
            raise UserError(
                f"the ONNX program's {name} differs from the model's by {one.error:.1e} (largest value "
                f"{one.largest:.1e}), so it is not written. Report this, and use --format stablehlo"
            )


def _check_finite(measured: Mapping[str, Difference]) -> None:
    """8 bits have no error that all models keep; the description says what it is."""
    for name, one in measured.items():
        if not math.isfinite(one.error):
            raise UserError(
                f"in int8, the ONNX program's {name} is not finite, so it is not written. Report this, and use "
                "--dtype float32"
            )


def _loading(dtype: str, measured: Mapping[str, Difference]) -> str:
    """Returns the section of the model card that shows how to run the program."""
    rows = (f"| {name} | {one.error:.1e} | {one.largest:.1e} |" for name, one in measured.items())
    return _LOADING + "\n".join((f"Parameters are {dtype}; {_DIFFERENCES}", *rows))


def named_outputs(loaded: LoadedModel, settings: Mapping[str, Any] | None = None) -> Program:
    """Returns the program of a model's outputs by their names in transformers; settings are those of text_vectors.

    A head has `logits`; one of answers has `start_logits` and `end_logits`, and next sentence prediction next to
    another head has `seq_relationship_logits`. A model without heads has `last_hidden_state`, and `pooler_output` if it
    has a pooler; one with settings has `last_hidden_state` and `sentence_embedding`.
    """
    # Unrolled, so that each layer's parameters are constants of the program, which can be quantized.
    runtime = Runtime(attention=ATTENTION, layer_loop="unrolled", platform="cpu")
    if settings:
        program = text_vectors(loaded, runtime, settings)
    else:
        program = (predictions if has_predictions(loaded.heads) else hidden_states)(loaded, runtime)

    def compute(parameters: dict[str, Array], inputs: dict[str, Array]) -> Outputs:
        outputs = program(parameters, inputs)
        if "answer_logits" in outputs:
            return {"start_logits": outputs["answer_logits"][..., 0], "end_logits": outputs["answer_logits"][..., 1]}
        names = _OUTPUTS | ({"next_sentence_logits": "seq_relationship_logits"} if len(outputs) > 1 else {})
        return {names.get(name, "logits"): value for name, value in outputs.items()}

    return compute


def convert(loaded: LoadedModel, compute: Program) -> Any:
    """Returns the program as an onnx.ModelProto: any batch size, any length up to the model's positions.

    Inputs are int64[batch, length], outputs float32.
    """
    import jax2onnx

    names = input_names(loaded)
    parameters = {path: jnp.asarray(value) for path, value in loaded.params.items()}

    def run(*inputs: Array) -> Outputs:
        return compute(parameters, dict(zip(names, inputs, strict=True)))

    shapes = [jax.ShapeDtypeStruct(symbolic_sizes(loaded), jnp.int32)] * len(names)
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
    program.ir_version = IR_VERSION
    program.producer_name = "bert_jax"
    del program.graph.value_info[:]  # numbered symbols; a runtime infers these shapes itself
    for value, name in zip(program.graph.output, order, strict=True):
        _set_shape(value, outputs[name].shape)
    _widen_inputs(program.graph)
    _simplify_products(program.graph)
    return program


def save(program: Any, path: Path) -> bool:
    """Writes a program to a file, or its tensors to a second one if they do not fit the first, and returns whether."""
    import onnx

    in_two_files = sum(4 * math.prod(tensor.dims) for tensor in program.graph.initializer) > TENSORS_LIMIT
    if in_two_files:
        onnx.save_model(program, path, save_as_external_data=True, location=f"{path.name}.data")
    else:
        onnx.save_model(program, path)
    return in_two_files


def quantize(source: Path, target: Path, *, in_two_files: bool) -> None:
    """Writes the program with its matrices in int8; onnxruntime chooses the scales of activations for each batch.

    Each column of a matrix has its own scale. Weights use 7 of the 8 bits, so that processors without instructions for
    8-bit dot products do not saturate, and give the same results as others (onnxruntime's guide to quantization).
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quietly():
        quantize_dynamic(
            source,
            target,
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=in_two_files,
        )


def differences(path: Path, loaded: LoadedModel, compute: Program) -> dict[str, Difference]:
    """Returns how far the outputs of a file are from the model's, by name, for random tokens in rows of three lengths.

    Of outputs of tokens, padding does not count.
    """
    import onnxruntime

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
    return {name: _difference(got[name], expected[name], real) for name in sorted(expected)}


def _difference(got: np.ndarray, expected: np.ndarray, real: np.ndarray) -> Difference:
    if got.shape != expected.shape:
        return Difference(np.inf, 0.0)
    if expected.shape[:2] == real.shape:
        got, expected = got[real], expected[real]
    return Difference(float(np.abs(got - expected).max()), float(np.abs(expected).max()))


def _set_shape(value: Any, shape: Sequence[Any]) -> None:
    del value.type.tensor_type.shape.dim[:]
    for size in shape:
        dimension = value.type.tensor_type.shape.dim.add()
        if isinstance(size, int):
            dimension.dim_value = size
        else:
            dimension.dim_param = str(size)


def _widen_inputs(graph: Any) -> None:
    """Makes the inputs int64, the dtype of tokenizers; JAX computes with int32."""
    import onnx

    narrow = {value.name: f"{value.name}_int32" for value in graph.input}
    for node in graph.node:
        node.input[:] = [narrow.get(name, name) for name in node.input]
    for value in graph.input:
        value.type.tensor_type.elem_type = onnx.TensorProto.INT64
    casts = [onnx.helper.make_node("Cast", [wide], [name], to=onnx.TensorProto.INT32) for wide, name in narrow.items()]
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _simplify_products(graph: Any) -> None:
    """Replaces jax2onnx's products plus 0 times a bias by plain ones, the only form that onnxruntime quantizes."""
    for node in graph.node:
        values = {attribute.name: attribute.f or attribute.i for attribute in node.attribute}
        if node.op_type == "Gemm" and values == {"alpha": 1.0, "beta": 0.0}:
            node.op_type = "MatMul"
            del node.attribute[:], node.input[2:]
    used = {name for node in graph.node for name in node.input}
    tensors = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(tensors)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Leaves out the warnings of converters, which are about their own steps."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def folded(traced: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns the function that was traced, which computes at trace time what it can, such as the slice of each layer.

    A model's parameters must be constants of the traced function. Calls are inlined.
    """
    return lambda *arguments: _evaluate(traced.jaxpr, traced.consts, arguments)


def _evaluate(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        if equation.primitive.name in _CALLED:
            called = equation.params[_CALLED[equation.primitive.name]]
            results: Sequence[Any] = _evaluate(called.jaxpr, called.consts, operands)
        elif _is_constant(equation, operands):
            with jax.ensure_compile_time_eval():
                results = _apply(equation.primitive, operands, equation.params)
        else:
            results = _apply(equation.primitive, operands, equation.params)
        values |= zip(equation.outvars, results, strict=True)
    return [read(variable) for variable in jaxpr.outvars]


def _is_constant(equation: Any, operands: Sequence[Any]) -> bool:
    """Returns whether nothing in an equation is traced, and no size of its results is symbolic."""
    sizes = [size for variable in equation.outvars for size in getattr(variable.aval, "shape", ())]
    return all(isinstance(size, int) for size in sizes) and not any(
        isinstance(operand, jax.core.Tracer) for operand in operands
    )


def _apply(primitive: Any, operands: Sequence[Any], options: Mapping[str, Any]) -> Sequence[Any]:
    results = primitive.bind(*operands, **options)
    return results if primitive.multiple_results else [results]
