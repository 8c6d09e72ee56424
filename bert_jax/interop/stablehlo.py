"""Exports a model as StableHLO programs with jax.export, which run without this package wherever JAX runs.

A program takes the parameters as its first argument, so it is small, and the programs of a model share
one file of tensors. Batch size and length are symbolic: one program serves every batch and every length
up to the model's number of positions.
"""

import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Float, Int, Shaped

from bert_jax.command import UserError
from bert_jax.config import to_dict
from bert_jax.interop.folder_formats import PROGRAMS_FILE
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.safetensors_folder import save_tensors
from bert_jax.model import paths
from bert_jax.model.bert import Bert, Encoded, bind
from bert_jax.model.head_outputs import (
    next_sentence_logits,
    pool_vectors,
    replaced_token_logits,
    vocabulary_logits,
)
from bert_jax.model.heads import Heads
from bert_jax.model.heads.crf import allowed_by
from bert_jax.model.heads.tag_scheme import scheme_of
from bert_jax.model.recurrent import by_direction
from bert_jax.model.runtime import Runtime
from bert_jax.model.task_outputs import (
    answer_logits,
    choice_logits,
    class_logits,
    sequence_vectors,
    span_logits,
    span_vectors,
    tag_logits,
    task_states,
)
from bert_jax.storage.local import atomic_folder, write_json
from bert_jax.tokenizer import Tokenizer

PARAMETERS_FILE, TOKENIZER = "parameters.safetensors", "tokenizer"
SUFFIX = ".stablehlo"
README_TEMPLATE = Path(__file__).with_name("stablehlo_readme.md")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

Outputs = dict[str, Shaped[Array, "..."]]
Program = Callable[[dict[str, Array], dict[str, Array]], Outputs]  # (parameters by path, inputs by name) -> outputs

_INPUTS = {
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


def write(loaded: LoadedModel, directory: str | Path) -> None:
    """Writes the programs of a model to a new folder, which appears complete or not at all. All is float32.

    hidden_states.stablehlo returns `last` f32[B,T,D] and, if the model has a pooler, `pooled` f32[B,D]:
    the pooler's output for the sequence vector that heads.pooling selects, mostly that of [CLS].
    predictions.stablehlo, written if there are heads, returns the logits of each: `mlm_logits` or
    `lm_logits` f32[B,T,V] without the padding rows of the vocabulary (of two directions `forward_lm_logits` and
    `backward_lm_logits`, of the next and of the previous token), `replaced_token_logits` f32[B,T],
    `next_sentence_logits` f32[B,2], `class_logits` f32[B,C], `choice_logits` f32[B], `tag_logits` f32[B,T,C],
    `answer_logits` f32[B,T,2], `span_logits` f32[B,T,K,C] for the spans of 1 to K positions that begin at each
    position; for a CRF also `tags` i32[B,T], its best path. `jax.export.deserialize` reads both. programs.json lists
    inputs, outputs and parameters in order.

    Raises UserError if the folder exists, and for a model of relations, whose spans are chosen outside of
    the model.
    """
    if loaded.heads.spans.relations:
        raise UserError("a model with heads.spans.relations has no StableHLO programs; export it with --format orbax")
    programs = {"hidden_states": _hidden_states(loaded)}
    if _has_predictions(loaded.heads):
        programs["predictions"] = _predictions(loaded)
    with atomic_folder(directory) as unfinished:
        descriptions = {}
        for name, compute in programs.items():
            exported = _export(compute, loaded)
            (unfinished / f"{name}{SUFFIX}").write_bytes(exported.serialize())
            descriptions[name] = {"file": f"{name}{SUFFIX}"} | _describe(exported)
        save_tensors(loaded.params, unfinished / PARAMETERS_FILE)
        Tokenizer(loaded.vocabulary.spec).save(unfinished / TOKENIZER)
        write_json(unfinished / PROGRAMS_FILE, _folder_description(loaded, descriptions))
        (unfinished / "README.md").write_text(_readme(loaded, descriptions), encoding="utf-8")


def _export(compute: Program, loaded: LoadedModel) -> export.Exported:
    constraint = f"length <= {loaded.model.max_positions}"
    batch, length = export.symbolic_shape("batch, length", constraints=[constraint])
    parameters = {path: jax.ShapeDtypeStruct(value.shape, jnp.float32) for path, value in loaded.params.items()}
    inputs = {name: jax.ShapeDtypeStruct((batch, length), jnp.int32) for name in _input_names(loaded)}
    # Unused arguments are kept so that all programs of a folder have the same signature.
    return export.export(jax.jit(compute, keep_unused=True), platforms=PLATFORMS)(parameters, inputs)


def _input_names(loaded: LoadedModel) -> list[str]:
    left_out = {"segment_ids": loaded.model.segment_types < 2, "tagged": not loaded.heads.crf}
    return [name for name in _INPUTS if not left_out.get(name)]


def _hidden_states(loaded: LoadedModel) -> Program:
    def hidden_states(parameters: dict[str, Array], inputs: dict[str, Array]) -> Outputs:
        model, rows, encoded = _run(loaded, parameters, inputs)
        found = {"last": encoded.last}
        return found | {"pooled": _sequence_vectors(model, rows, encoded)[:, 0]} if loaded.heads.pooler else found

    return hidden_states


def _predictions(loaded: LoadedModel) -> Program:
    def predictions(parameters: dict[str, Array], inputs: dict[str, Array]) -> Outputs:
        model, rows, encoded = _run(loaded, parameters, inputs)
        found: Outputs = {}
        if loaded.heads.mlm or loaded.heads.lm:
            parts = {"mlm_logits" if loaded.heads.mlm else "lm_logits": encoded.last}
            if loaded.model.directions > 1:
                parts = dict(zip(("forward_lm_logits", "backward_lm_logits"), by_direction(encoded.last), strict=True))
            for name, vectors in parts.items():
                found[name] = vocabulary_logits(model, vectors)[..., : loaded.model.vocab_size]
        if loaded.heads.replaced_tokens:
            found["replaced_token_logits"] = replaced_token_logits(model, encoded.last)
        if loaded.heads.next_sentence:
            found["next_sentence_logits"] = next_sentence_logits(model, pool_vectors(model, encoded.last[:, :1]))[:, 0]
        if loaded.heads.classes or loaded.heads.choices:
            vectors = _sequence_vectors(model, rows, encoded)
            name = "class_logits" if loaded.heads.classes else "choice_logits"
            compute = class_logits if loaded.heads.classes else choice_logits
            found[name] = compute(model, vectors)[:, 0]
        if loaded.heads.tags:
            found["tag_logits"] = tag_logits(model, task_states(model, encoded))
        if loaded.heads.crf:
            tagged = (inputs["tagged"] > 0) & (rows.sequence_ids > 0)
            allowed = allowed_by(scheme_of(loaded.task["labels"]) if loaded.task else None)
            found["tags"], _ = model.head("crf").decode(found["tag_logits"], tagged, rows.sequence_ids, allowed)
        if loaded.heads.spans.classes:
            found["span_logits"] = span_logits(model, span_vectors(model, encoded.last))
        if loaded.heads.question:
            found["answer_logits"] = answer_logits(model, encoded.last)
        return found

    return predictions


def _has_predictions(heads: Heads) -> bool:
    sequence_heads = (heads.next_sentence, heads.classes, heads.choices)
    by_token = (heads.mlm, heads.lm, heads.replaced_tokens)
    return any((*by_token, *sequence_heads, heads.tags, heads.question, heads.spans.classes))


def _run(loaded: LoadedModel, parameters: dict[str, Array], inputs: Mapping[str, Array]) -> tuple[Bert, Rows, Encoded]:
    # einsum is the only kernel that supports every platform and every length.
    model = bind(loaded.model, loaded.heads, paths.unflatten(parameters), Runtime(attention="einsum"))
    real = jnp.minimum(inputs["attention_mask"], 1)
    segments = inputs.get("segment_ids", jnp.zeros_like(real))
    rows = Rows(inputs["input_ids"], segments * real, real, (jnp.cumsum(real, axis=1) - 1) * real)
    return model, rows, model.encode(rows, all_layers=loaded.heads.layer_mix)


def _sequence_vectors(model: Bert, rows: Rows, encoded: Encoded) -> Float[Array, "B 1 D"]:
    return sequence_vectors(
        model, task_states(model, encoded), rows.sequence_ids, jnp.zeros_like(rows.input_ids[:, :1])
    )


def _describe(exported: export.Exported) -> dict[str, Any]:
    """Returns inputs and outputs by name, in the order of the program's signature."""
    (_, inputs), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return {
        "inputs": [_tensor(name, aval) | {"meaning": _INPUTS[name]} for name, aval in inputs.items()],
        "outputs": [_tensor(name, aval) for name, aval in outputs.items()],
    }


def _tensor(name: str, aval: Any) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else str(size) for size in aval.shape]
    return {"name": name, "dtype": str(aval.dtype), "shape": shape}


def _folder_description(loaded: LoadedModel, programs: Mapping[str, Any]) -> dict[str, Any]:
    words = loaded.vocabulary
    return {
        "programs": programs,
        "platforms": list(PLATFORMS),
        "parameters": [_tensor(path, value) for path, value in sorted(loaded.params.items())],
        "model": to_dict(loaded.model),
        "special_ids": {role: words.id_of(token) for role, token in words.roles._asdict().items()},
        "labels": list(loaded.task["labels"]) if loaded.task else [],
        "jax": jax.__version__,
    }


def _readme(loaded: LoadedModel, programs: Mapping[str, Any]) -> str:
    words = loaded.vocabulary
    values = {"segment_ids": "zeros", "tagged": "ones"}
    further = [name for name in _input_names(loaded) if name in values]
    cls, sep = words.roles.cls_token, words.roles.sep_token
    framed = " ".join([cls, "a", *[sep] * words.between, "b", sep])
    pair = framed if words.adds_special_tokens else "a b, without special tokens"
    template = string.Template(README_TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(
        positions=loaded.model.max_positions,
        platforms=", ".join(PLATFORMS),
        description=PROGRAMS_FILE,
        program=f"{list(programs)[-1]}{SUFFIX}",
        parameters=PARAMETERS_FILE,
        tokenizer=TOKENIZER,
        begin=f"{words.cls_id}, " if words.adds_special_tokens else "",
        end=f", {words.sep_id}" if words.adds_special_tokens else "",
        pair=pair,
        further="".join(f'    "{name}": np.{values[name]}((1, len(ids)), np.int32),\n' for name in further),
    )
