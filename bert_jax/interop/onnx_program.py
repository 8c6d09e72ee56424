"""Converts a model to an ONNX program with jax2onnx, and compares the program with the model in onnxruntime.

The program has the names and dtypes of inputs and outputs that transformers' models and tokenizers have.
"""

import contextlib
import importlib.util
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bert_jax.command import UserError, install_hint
from bert_jax.interop.constant_folding import folded
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.program_outputs import (
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

PACKAGES = ("jax2onnx", "onnx", "onnxruntime")
# ONNX 1.12, of 2022: new enough for everything that a model needs, and read by every runtime of today.
OPSET, IR_VERSION = 17, 8
# Bytes of tensors in one file, which may have 2 GiB (protobuf's limit); the rest is for the nodes.
TENSORS_LIMIT = 2**31 - 2**26

TOKEN_TYPES = {"segment_ids": "token_type_ids"}
# Names in bert_jax and in transformers; the logits of one head alone are `logits`.
_OUTPUTS = {"last": "last_hidden_state", "pooled": "pooler_output", "vector": "sentence_embedding"}


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


def named_outputs(loaded: LoadedModel, settings: Mapping[str, Any] | None = None) -> Program:
    """Returns the program of a model's outputs by their names in transformers.

    settings    of text_vectors, of a model that gives a vector of each text

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
        found = program(parameters, inputs)
        if "answer_logits" in found:
            return {"start_logits": found["answer_logits"][..., 0], "end_logits": found["answer_logits"][..., 1]}
        names = _OUTPUTS | ({"next_sentence_logits": "seq_relationship_logits"} if len(found) > 1 else {})
        return {names.get(name, "logits"): value for name, value in found.items()}

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
    given = {TOKEN_TYPES.get(name, name): value.astype(np.int64) for name, value in inputs.items()}
    got = dict(zip(names, session.run(names, given), strict=True))
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
