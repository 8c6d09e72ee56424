"""A model as programs in StableHLO, by jax.export: run anywhere JAX runs, without this package.

A program takes the parameters as its first argument, so it is small, and the programs of a model share one file of
tensors. Rows and slots are symbolic: one program serves every batch and every length that the model has positions for.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Float, Int, Shaped

from bert_jax.command import UserError
from bert_jax.config import to_dict
from bert_jax.interop.loaded import Loaded
from bert_jax.interop.weights import save
from bert_jax.model import paths
from bert_jax.model.bert import Bert, Encoded, bind
from bert_jax.model.head_outputs import (
    answer_logits,
    choice_logits,
    class_logits,
    next_sentence_logits,
    pool_vectors,
    sequence_vectors,
    span_logits,
    span_vectors,
    tag_logits,
    vocabulary_logits,
)
from bert_jax.model.heads import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.storage.local import atomic_folder, write_json

DESCRIPTION_FILE, PARAMETERS_FILE, TOKENIZER = "programs.json", "parameters.safetensors", "tokenizer"
SUFFIX = ".stablehlo"
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

Outputs = dict[str, Shaped[Array, "..."]]
Program = Callable[[dict[str, Array], dict[str, Array]], Outputs]  # of parameters by path and inputs by name

_INPUTS = {
    "input_ids": "token ids; any in padding",
    "attention_mask": "1 for a token, 0 for padding, which follows the tokens",
    "tagged": "1 for a slot that bears a tag, such as the first piece of each word",
    "segment_ids": "0 for [CLS], the first text and its [SEP], 1 for the second text and its [SEP]",
}


class _Rows(NamedTuple):
    """The batch of a program: one sequence a row, from its first slot on."""

    input_ids: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    sequence_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]


def write(loaded: Loaded, directory: str | Path) -> None:
    """Writes the programs of a model in a new folder, which appears whole or not at all. All is float32.

    hidden_states.stablehlo gives `last` f32[B,T,D], and `pooled` f32[B,D] where the model has a pooler:
    its output over what heads.pooling makes of the sequence, which is [CLS] in most.
    predictions.stablehlo, where it has heads, gives the logits of each: `mlm_logits` or `lm_logits` f32[B,T,V] without
    the rows that pad the vocabulary, `next_sentence_logits` f32[B,2], `class_logits` f32[B,C], `choice_logits` f32[B],
    `tag_logits` f32[B,T,C], `answer_logits` f32[B,T,2], `span_logits` f32[B,T,K,C] of the spans of 1 to K slots that
    begin at each slot; and of a CRF `tags` i32[B,T], its best path.
    Both are what `jax.export.deserialize` takes; programs.json names inputs, outputs and parameters in their order.

    Raises UserError when the folder exists, and for a model of relations, which are between spans chosen elsewhere.
    """
    if loaded.heads.spans.relations:
        raise UserError("a model with heads.spans.relations has no StableHLO programs; export it with --format orbax")
    programs = {"hidden_states": _hidden_states(loaded)}
    if _heads_that_predict(loaded.heads):
        programs["predictions"] = _predictions(loaded)
    with atomic_folder(directory) as unfinished:
        said = {}
        for name, compute in programs.items():
            exported = _export(compute, loaded)
            (unfinished / f"{name}{SUFFIX}").write_bytes(exported.serialize())
            said[name] = {"file": f"{name}{SUFFIX}"} | _described(exported)
        save(loaded.params, unfinished / PARAMETERS_FILE)
        loaded.tokenizer.save(unfinished / TOKENIZER)
        write_json(unfinished / DESCRIPTION_FILE, _folder_description(loaded, said))
        (unfinished / "README.md").write_text(_readme(loaded, said), encoding="utf-8")


def _export(compute: Program, loaded: Loaded) -> export.Exported:
    constraint = f"length <= {loaded.model.max_positions}"
    batch, length = export.symbolic_shape("batch, length", constraints=[constraint])
    parameters = {path: jax.ShapeDtypeStruct(value.shape, jnp.float32) for path, value in loaded.params.items()}
    inputs = {name: jax.ShapeDtypeStruct((batch, length), jnp.int32) for name in _input_names(loaded)}
    # Unused arguments stay, so that all programs of a folder are called alike.
    return export.export(jax.jit(compute, keep_unused=True), platforms=PLATFORMS)(parameters, inputs)


def _input_names(loaded: Loaded) -> list[str]:
    left_out = {"segment_ids": loaded.model.segment_types < 2, "tagged": not loaded.heads.crf}
    return [name for name in _INPUTS if not left_out.get(name)]


def _hidden_states(loaded: Loaded) -> Program:
    def hidden_states(parameters: dict[str, Array], inputs: dict[str, Array]) -> Outputs:
        model, rows, encoded = _run(loaded, parameters, inputs)
        found = {"last": encoded.last}
        return found | {"pooled": _sequence_vectors(model, rows, encoded)[:, 0]} if loaded.heads.pooler else found

    return hidden_states


def _predictions(loaded: Loaded) -> Program:
    def predictions(parameters: dict[str, Array], inputs: dict[str, Array]) -> Outputs:
        model, rows, encoded = _run(loaded, parameters, inputs)
        found: Outputs = {}
        if loaded.heads.mlm or loaded.heads.lm:
            name = "mlm_logits" if loaded.heads.mlm else "lm_logits"
            found[name] = vocabulary_logits(model, encoded.last)[..., : loaded.model.vocab_size]
        if loaded.heads.next_sentence:
            found["next_sentence_logits"] = next_sentence_logits(model, pool_vectors(model, encoded.last[:, :1]))[:, 0]
        if loaded.heads.classes or loaded.heads.choices:
            vectors = _sequence_vectors(model, rows, encoded)
            name = "class_logits" if loaded.heads.classes else "choice_logits"
            compute = class_logits if loaded.heads.classes else choice_logits
            found[name] = compute(model, vectors)[:, 0]
        if loaded.heads.tags:
            found["tag_logits"] = tag_logits(model, encoded.last)
        if loaded.heads.crf:
            tagged = (inputs["tagged"] > 0) & (rows.sequence_ids > 0)
            found["tags"], _ = model.head("crf").decode(found["tag_logits"], tagged, rows.sequence_ids)
        if loaded.heads.spans.classes:
            found["span_logits"] = span_logits(model, span_vectors(model, encoded.last))
        if loaded.heads.question:
            found["answer_logits"] = answer_logits(model, encoded.last)
        return found

    return predictions


def _heads_that_predict(heads: Heads) -> bool:
    of_sequences = (heads.next_sentence, heads.classes, heads.choices)
    return any((heads.mlm, heads.lm, *of_sequences, heads.tags, heads.question, heads.spans.classes))


def _run(loaded: Loaded, parameters: dict[str, Array], inputs: Mapping[str, Array]) -> tuple[Bert, _Rows, Encoded]:
    # einsum: the one kernel of every platform and every length.
    model = bind(loaded.model, loaded.heads, paths.unflatten(parameters), Runtime(attention="einsum"))
    real = jnp.minimum(inputs["attention_mask"], 1)
    segments = inputs.get("segment_ids", jnp.zeros_like(real))
    rows = _Rows(inputs["input_ids"], segments * real, real, (jnp.cumsum(real, axis=1) - 1) * real)
    return model, rows, model.encode(rows)


def _sequence_vectors(model: Bert, rows: _Rows, encoded: Encoded) -> Float[Array, "B 1 D"]:
    return sequence_vectors(model, encoded.last, rows.sequence_ids, jnp.zeros_like(rows.input_ids[:, :1]))


def _described(exported: export.Exported) -> dict[str, Any]:
    """Inputs and outputs by name, in the order in which the program takes and gives them."""
    (_, inputs), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    return {
        "inputs": [_tensor(name, aval) | {"meaning": _INPUTS[name]} for name, aval in inputs.items()],
        "outputs": [_tensor(name, aval) for name, aval in outputs.items()],
    }


def _tensor(name: str, aval: Any) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else str(size) for size in aval.shape]
    return {"name": name, "dtype": str(aval.dtype), "shape": shape}


def _folder_description(loaded: Loaded, programs: Mapping[str, Any]) -> dict[str, Any]:
    words = loaded.tokenizer
    return {
        "programs": programs,
        "platforms": list(PLATFORMS),
        "parameters": [_tensor(path, value) for path, value in sorted(loaded.params.items())],
        "model": to_dict(loaded.model),
        "special_ids": {role: words.id_of(token) for role, token in words.roles._asdict().items()},
        "labels": list(loaded.task["labels"]) if loaded.task else [],
        "jax": jax.__version__,
    }


def _readme(loaded: Loaded, programs: Mapping[str, Any]) -> str:
    words, name = loaded.tokenizer, list(programs)[-1]
    others = [name for name in _input_names(loaded) if name in ("segment_ids", "tagged")]
    values = {"segment_ids": "zeros", "tagged": "ones"}
    further = [f'    "{name}": np.{values[name]}((1, len(ids)), np.int32),' for name in others]
    lines = [
        "import jax",
        "import numpy as np",
        "import tokenizers",
        "from safetensors.numpy import load_file",
        "",
        f'program = jax.export.deserialize(open("{name}{SUFFIX}", "rb").read())',
        f'parameters = load_file("{PARAMETERS_FILE}")',
        f'words = tokenizers.Tokenizer.from_file("{TOKENIZER}/tokenizer.json")',
        f'ids = [{words.cls_id}, *words.encode("Some text.", add_special_tokens=False).ids, {words.sep_id}]',
        "inputs = {",
        '    "input_ids": np.array([ids], np.int32),',
        *further,
        '    "attention_mask": np.ones((1, len(ids)), np.int32),',
        "}",
        "outputs = jax.jit(program.call)(parameters, inputs)",
        "print({name: value.shape for name, value in outputs.items()})",
    ]
    return "\n".join(
        [
            "# Programs in StableHLO",
            "",
            f"Any batch, any length up to {loaded.model.max_positions}; float32; {', '.join(PLATFORMS)}. "
            f"`{DESCRIPTION_FILE}` has every input, output and parameter in order. To run one, with jax, flatbuffers, "
            "safetensors and tokenizers:",
            "",
            "```python",
            *lines,
            "```",
            "",
            f"A pair of texts is {words.roles.cls_token} a {words.roles.sep_token} b {words.roles.sep_token} in every "
            "vocabulary here; rows are filled up at the end.",
            "",
            "`program.mlir_module()` is the text of it. Each new shape is compiled once, so pad to few lengths. What "
            "of the outputs a jitted caller leaves unused is not computed.",
            "",
        ]
    )
