"""Exports a model as StableHLO programs with jax.export, which run without this package wherever JAX runs.

The first half defines the programs (hidden_states, text_vectors, predictions) as functions of parameters and inputs;
onnx.py exports the same ones. `write`, in the second half, exports them to a folder. Parameters are an argument, so the
programs are small and share one file of tensors. Batch size and length are symbolic: one program serves every batch,
and every length up to the model's number of positions.
"""

import dataclasses
import json
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Float, Int, Shaped

from bert_jax.config import ENCODERS, to_dict
from bert_jax.errors import UserError
from bert_jax.interop import sentence_transformers
from bert_jax.interop.huggingface import PROGRAMS_FILE, report, save_tensors
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.bert import Bert, bind
from bert_jax.model.heads.basic import pool_rows, unit_vectors
from bert_jax.model.heads.config import Heads
from bert_jax.model.heads.structured import allowed_by, scheme_of
from bert_jax.model.outputs import (
    answer_logits,
    choice_logits,
    class_logits,
    next_sentence_logits,
    pool_vectors,
    replaced_token_logits,
    sequence_vectors,
    span_logits,
    span_vectors,
    tag_logits,
    task_states,
    vocabulary_logits,
)
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import Encoded
from bert_jax.storage.files import atomic_folder, write_json
from bert_jax.tokenization.tokenizer import Tokenizer

PARAMETERS_FILE, TOKENIZER = "parameters.safetensors", "tokenizer"
SUFFIX = ".stablehlo"
README_TEMPLATE = Path(__file__).with_name("stablehlo_readme.md")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

Outputs = dict[str, Shaped[Array, "..."]]
Program = Callable[[dict[str, Array], dict[str, Array]], Outputs]  # (parameters by path, inputs by name) -> outputs

# Of the runtime of programs: the only kernel that supports every platform and every length.
ATTENTION = "einsum"

INPUTS = {
    "input_ids": "token ids; any in padding",
    "attention_mask": "1 for a token, 0 for padding, which follows the tokens",
    "tagged": "1 for a slot that bears a tag, such as the first piece of each word",
    "segment_ids": "0 for [CLS], the first text and its [SEP], 1 for the second text and its [SEP]",
}


class Rows(NamedTuple):
    """The batch of a program: one sequence per row, starting at the first position."""

    input_ids: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    sequence_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]


def symbolic_sizes(loaded: LoadedModel) -> tuple:
    """Returns batch and length as symbols; the length is bounded by the model's positions."""
    return tuple(export.symbolic_shape("batch, length", constraints=[f"length <= {loaded.model.max_positions}"]))


def input_names(loaded: LoadedModel) -> list[str]:
    """Returns the names of the inputs that the programs of a model have, in their order."""
    left_out = {"segment_ids": loaded.model.segment_types < 2, "tagged": not loaded.heads.crf}
    return [name for name in INPUTS if not left_out.get(name)]


def hidden_states(loaded: LoadedModel, runtime: Runtime) -> Program:
    """Returns the program of `last` f32[B,T,D] and, if the model has a pooler, `pooled` f32[B,D]."""

    def compute(parameters: dict[str, Array], inputs: dict[str, Array]) -> Outputs:
        model, rows, encoded = _run(loaded, parameters, inputs, runtime)
        outputs = {"last": encoded.last}
        if loaded.heads.pooler:
            outputs["pooled"] = _sequence_vectors(model, rows, encoded)[:, 0]
        return _widened(outputs)

    return compute


def text_vectors(loaded: LoadedModel, runtime: Runtime, settings: Mapping[str, Any]) -> Program:
    """Returns the program of `last` f32[B,T,D] and of `vector` f32[B,W], that of a text as `embed` makes it by default.

    settings    pooling, normalize and, if W is not D, truncate_dim of a task of vectors; W is D without it
    """
    size = settings.get("truncate_dim") or None

    def compute(parameters: dict[str, Array], inputs: dict[str, Array]) -> Outputs:
        _, rows, encoded = _run(loaded, parameters, inputs, runtime)
        vector = pool_rows(settings["pooling"], encoded.last, rows.sequence_ids)
        vector = unit_vectors(vector) if settings["normalize"] else vector
        return _widened({"last": encoded.last, "vector": vector[:, :size]})

    return compute


def predictions(loaded: LoadedModel, runtime: Runtime) -> Program:
    """Returns the program of the logits of each head; stablehlo.write lists them."""

    def compute(parameters: dict[str, Array], inputs: dict[str, Array]) -> Outputs:
        model, rows, encoded = _run(loaded, parameters, inputs, runtime)
        logits: Outputs = {}
        if loaded.heads.mlm or loaded.heads.lm:
            parts = {"mlm_logits" if loaded.heads.mlm else "lm_logits": encoded.last}
            if names := ENCODERS[loaded.model.encoder].logits:
                parts = dict(zip(names, jnp.split(encoded.last, len(names), axis=-1), strict=True))
            for name, vectors in parts.items():
                logits[name] = vocabulary_logits(model, vectors)[..., : loaded.model.vocab_size]
        if loaded.heads.replaced_tokens:
            logits["replaced_token_logits"] = replaced_token_logits(model, encoded.last)
        if loaded.heads.next_sentence:
            logits["next_sentence_logits"] = next_sentence_logits(model, pool_vectors(model, encoded.last[:, :1]))[:, 0]
        if loaded.heads.classes or loaded.heads.choices:
            vectors = _sequence_vectors(model, rows, encoded)
            name, head = ("class_logits", class_logits) if loaded.heads.classes else ("choice_logits", choice_logits)
            logits[name] = head(model, vectors)[:, 0]
        if loaded.heads.tags:
            logits["tag_logits"] = tag_logits(model, task_states(model, encoded))
        if loaded.heads.crf:
            tagged = (inputs["tagged"] > 0) & (rows.sequence_ids > 0)
            allowed = allowed_by(scheme_of(loaded.task["labels"]) if loaded.task else None)
            logits["tags"], _ = model.head("crf").decode(logits["tag_logits"], tagged, rows.sequence_ids, allowed)
        if loaded.heads.spans.classes:
            logits["span_logits"] = span_logits(model, span_vectors(model, encoded.last))
        if loaded.heads.question:
            logits["answer_logits"] = answer_logits(model, encoded.last)
        return _widened(logits)

    return compute


def has_predictions(heads: Heads) -> bool:
    """Returns whether a model has a head whose logits `predictions` returns."""
    by_token = (heads.mlm, heads.lm, heads.replaced_tokens, heads.tags, heads.question, heads.spans.classes)
    return any((*by_token, heads.next_sentence, heads.classes, heads.choices))


def _run(
    loaded: LoadedModel, parameters: Mapping[str, Array], inputs: Mapping[str, Array], runtime: Runtime
) -> tuple[Bert, Rows, Encoded]:
    # Parameters of another dtype are widened: norms and sums of embeddings are float32 in any case.
    wide = {path: value.astype(jnp.float32) for path, value in parameters.items()}
    model = bind(loaded.model, loaded.heads, layers.unflatten(wide), runtime)
    real = jnp.minimum(inputs["attention_mask"], 1)
    segments = inputs.get("segment_ids", jnp.zeros_like(real))
    rows = Rows(inputs["input_ids"], segments * real, real, (jnp.cumsum(real, axis=1) - 1) * real)
    return model, rows, model.encode(rows, all_layers=loaded.heads.layer_mix)


def _widened(outputs: Outputs) -> Outputs:
    """Returns outputs with the dtype float32, except integers."""
    return {
        name: value.astype(jnp.float32) if jnp.issubdtype(value.dtype, jnp.floating) else value
        for name, value in outputs.items()
    }


def _sequence_vectors(model: Bert, rows: Rows, encoded: Encoded) -> Float[Array, "B 1 D"]:
    return sequence_vectors(
        model, task_states(model, encoded), rows.sequence_ids, jnp.zeros_like(rows.input_ids[:, :1])
    )


def write(loaded: LoadedModel, directory: str | Path, dtype: str = "float32") -> None:
    """Writes the programs of a model to a new folder, which appears complete or not at all.

    dtype is that of the stored parameters and of the matmuls: float32 or bfloat16. Outputs are float32.

    hidden_states.stablehlo returns `last` f32[B,T,D] and, if the model has a pooler, `pooled` f32[B,D]:
    the pooler's output for the sequence vector that heads.pooling selects, mostly that of [CLS].
    predictions.stablehlo, written if there are heads, returns the logits of each: `mlm_logits` or
    `lm_logits` f32[B,T,V] without the padding rows of the vocabulary (of ELMo `forward_lm_logits` and
    `backward_lm_logits`, of the next and of the previous token), `replaced_token_logits` f32[B,T],
    `next_sentence_logits` f32[B,2], `class_logits` f32[B,C], `choice_logits` f32[B], `tag_logits` f32[B,T,C],
    `answer_logits` f32[B,T,2], `span_logits` f32[B,T,K,C] for the spans of 1 to K positions that begin at each
    position; for a CRF also `tags` i32[B,T], its best path. text_vectors.stablehlo, written if the model was fine-tuned
    for vectors, returns `vector` f32[B,W] and `last`. `jax.export.deserialize` reads all. programs.json lists inputs,
    outputs and parameters in order, and the settings of vectors.

    Raises UserError if the folder exists, and for a model of relations, whose spans are chosen outside of
    the model.
    """
    if loaded.heads.spans.relations:
        raise UserError("a model with heads.spans.relations has no StableHLO programs; export it with --format orbax")
    runtime = Runtime(attention=ATTENTION, compute_dtype=dtype, platform="cpu")  # the same on every machine
    programs = {"hidden_states": hidden_states(loaded, runtime)}
    if has_predictions(loaded.heads):
        programs["predictions"] = predictions(loaded, runtime)
    vectors = _vector_settings(loaded)
    if vectors:
        programs["text_vectors"] = text_vectors(loaded, runtime, vectors)
    params = {path: value.astype(jnp.dtype(dtype)) for path, value in loaded.params.items()}
    loaded = dataclasses.replace(loaded, params=params)
    with atomic_folder(directory) as unfinished:
        descriptions = {}
        for name, compute in programs.items():
            exported = _export(compute, loaded)
            (unfinished / f"{name}{SUFFIX}").write_bytes(exported.serialize())
            descriptions[name] = {"file": f"{name}{SUFFIX}"} | _describe(exported)
        save_tensors(loaded.params, unfinished / PARAMETERS_FILE)
        Tokenizer(loaded.vocabulary.spec).save(unfinished / TOKENIZER)
        write_json(unfinished / PROGRAMS_FILE, _folder_description(loaded, descriptions, vectors))
        (unfinished / "README.md").write_text(_readme(loaded, descriptions, vectors), encoding="utf-8")


def _vector_settings(loaded: LoadedModel) -> dict[str, Any]:
    """Returns how a model makes vectors of texts: the keys of text_vectors, max_length, and those of
    config_sentence_transformers.json; nothing if it was not fine-tuned for vectors.

    Reports a pooling that no program computes.
    """
    task = loaded.task
    if not task or task["kind"] != sentence_transformers.KIND:
        return {}
    if not sentence_transformers.has_known_pooling(task):
        report(f"there is no program of the pooling of its vectors, left out: {task['pooling']}")
        return {}
    own = {name: task[name] for name in ("pooling", "normalize", "max_length")}
    return own | sentence_transformers.written_settings(task)


def _export(compute: Program, loaded: LoadedModel) -> export.Exported:
    sizes = symbolic_sizes(loaded)
    parameters = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in loaded.params.items()}
    inputs = {name: jax.ShapeDtypeStruct(sizes, jnp.int32) for name in input_names(loaded)}
    # Unused arguments are kept so that all programs of a folder have the same signature.
    return export.export(jax.jit(compute, keep_unused=True), platforms=PLATFORMS)(parameters, inputs)


def _describe(exported: export.Exported) -> dict[str, Any]:
    """Returns inputs and outputs by name, in the order of the program's signature."""
    (_, inputs), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return {
        "inputs": [_tensor(name, aval) | {"meaning": INPUTS[name]} for name, aval in inputs.items()],
        "outputs": [_tensor(name, aval) for name, aval in outputs.items()],
    }


def _tensor(name: str, aval: Any) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else str(size) for size in aval.shape]
    return {"name": name, "dtype": str(aval.dtype), "shape": shape}


def _folder_description(loaded: LoadedModel, programs: Mapping[str, Any], vectors: Mapping[str, Any]) -> dict[str, Any]:
    words = loaded.vocabulary
    return {
        "programs": programs,
        "platforms": list(PLATFORMS),
        "parameters": [_tensor(path, value) for path, value in sorted(loaded.params.items())],
        "model": to_dict(loaded.model),
        "special_ids": {role: words.id_of(token) for role, token in words.roles._asdict().items()},
        "labels": list(loaded.task["labels"]) if loaded.task else [],
        "jax": jax.__version__,
    } | ({"vectors": vectors} if vectors else {})


def _vectors_text(vectors: Mapping[str, Any]) -> str:
    """Returns the paragraph of README.md on the vectors of texts; nothing without settings of vectors."""
    if not vectors:
        return ""
    steps = [f"pooled ({vectors['pooling']})"]
    if vectors["normalize"]:
        steps.append("divided by its length")
    if size := vectors.get("truncate_dim"):
        steps.append(f"cut to its first {size} dimensions")
    named = ", ".join(f"{name} {_quoted(text)}" for name, text in vectors["prompts"].items() if text) or "none"
    return (
        f"`vector` is that of a text: {', '.join(steps)}. With its prompt, a text has at most {vectors['max_length']} "
        f"tokens; prompts: {named}. `{PROGRAMS_FILE}` has these settings as `vectors`.\n\n"
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _readme(loaded: LoadedModel, programs: Mapping[str, Any], vectors: Mapping[str, Any]) -> str:
    words = loaded.vocabulary
    prompt = vectors["prompts"].get(vectors["default_prompt_name"], "") if vectors else ""
    values = {"segment_ids": "zeros", "tagged": "ones"}
    further = [name for name in input_names(loaded) if name in values]
    cls, sep = words.roles.cls_token, words.roles.sep_token
    framed = " ".join([cls, "a", *[sep] * words.between, "b", sep])
    pair = framed if words.adds_special_tokens else "a b, without special tokens"
    template = string.Template(README_TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(
        positions=loaded.model.max_positions,
        dtype=next(iter(loaded.params.values())).dtype,
        platforms=", ".join(PLATFORMS),
        description=PROGRAMS_FILE,
        text=_quoted(f"{prompt}Some text."),
        vectors=_vectors_text(vectors),
        program=f"{list(programs)[-1]}{SUFFIX}",
        parameters=PARAMETERS_FILE,
        tokenizer=TOKENIZER,
        begin=f"{words.cls_id}, " if words.adds_special_tokens else "",
        end=f", {words.sep_id}" if words.adds_special_tokens else "",
        pair=pair,
        further="".join(f'    "{name}": np.{values[name]}((1, len(ids)), np.int32),\n' for name in further),
    )
