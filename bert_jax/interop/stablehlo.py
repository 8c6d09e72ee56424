"""Exports a model as StableHLO programs with jax.export, which run without this package wherever JAX runs.

A program takes the parameters as its first argument, so it is small, and the programs of a model share
one file of tensors. Batch size and length are symbolic: one program serves every batch and every length
up to the model's number of positions.
"""

import dataclasses
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from bert_jax.command import UserError
from bert_jax.config import to_dict
from bert_jax.interop import sentence_transformers
from bert_jax.interop.folder_formats import PROGRAMS_FILE
from bert_jax.interop.huggingface import report
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.program_outputs import (
    ATTENTION,
    INPUTS,
    Program,
    has_predictions,
    hidden_states,
    input_names,
    predictions,
    symbolic_sizes,
    text_vectors,
)
from bert_jax.interop.safetensors_folder import save_tensors
from bert_jax.model.runtime import Runtime
from bert_jax.storage.local import atomic_folder, write_json
from bert_jax.tokenizer import Tokenizer

PARAMETERS_FILE, TOKENIZER = "parameters.safetensors", "tokenizer"
SUFFIX = ".stablehlo"
README_TEMPLATE = Path(__file__).with_name("stablehlo_readme.md")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


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


def _dtype(loaded: LoadedModel) -> str:
    return str(next(iter(loaded.params.values())).dtype)


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


def _default_prompt(vectors: Mapping[str, Any]) -> str:
    return str(vectors["prompts"].get(vectors["default_prompt_name"], "")) if vectors else ""


def _readme(loaded: LoadedModel, programs: Mapping[str, Any], vectors: Mapping[str, Any]) -> str:
    words = loaded.vocabulary
    values = {"segment_ids": "zeros", "tagged": "ones"}
    further = [name for name in input_names(loaded) if name in values]
    cls, sep = words.roles.cls_token, words.roles.sep_token
    framed = " ".join([cls, "a", *[sep] * words.between, "b", sep])
    pair = framed if words.adds_special_tokens else "a b, without special tokens"
    template = string.Template(README_TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(
        positions=loaded.model.max_positions,
        dtype=_dtype(loaded),
        platforms=", ".join(PLATFORMS),
        description=PROGRAMS_FILE,
        text=_quoted(f"{_default_prompt(vectors)}Some text."),
        vectors=_vectors_text(vectors),
        program=f"{list(programs)[-1]}{SUFFIX}",
        parameters=PARAMETERS_FILE,
        tokenizer=TOKENIZER,
        begin=f"{words.cls_id}, " if words.adds_special_tokens else "",
        end=f", {words.sep_id}" if words.adds_special_tokens else "",
        pair=pair,
        further="".join(f'    "{name}": np.{values[name]}((1, len(ids)), np.int32),\n' for name in further),
    )
