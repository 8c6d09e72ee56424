"""Exports a model as StableHLO programs with jax.export, which run wherever JAX runs, without this package.

The first half defines the programs (hidden_states, text_vectors, predictions); onnx.py exports the same ones. `write`,
in the second half, exports them to a folder. Parameters are an argument, so programs are small and share one file of
tensors. Batch size and length are symbolic unless they are given: programs accept any batch, and any length up to the
model's positions.
"""

import json
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Float, Int, Shaped

from bert_jax.config import to_dict
from bert_jax.errors import UserError
from bert_jax.interop import sentence_transformers
from bert_jax.interop.card_metadata import front_matter
from bert_jax.interop.huggingface import PROGRAMS_FILE, report
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.model_card import pipeline_tag
from bert_jax.interop.weights import save_tensors
from bert_jax.model import layers, outputs
from bert_jax.model.bert import Bert, bind
from bert_jax.model.heads.basic import pool_rows, unit_vectors
from bert_jax.model.heads.config import Heads
from bert_jax.model.heads.structured import allowed_by, recognize_scheme
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

ATTENTION = "einsum"  # the only kernel that supports every platform and every length

INPUTS = {
    "input_ids": "token ids; any in padding",
    "attention_mask": "1 for a token, 0 for padding, which follows the tokens",
    "tagged": "1 for a slot that bears a tag, such as the first piece of each word",
    "segment_ids": "0 for [CLS], the first text and its [SEP], 1 for the second text and its [SEP]",
}


class Rows(NamedTuple):
    """A program's batch: one sequence per row, from the first position on."""

    input_ids: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    sequence_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]


def symbolic_sizes(loaded: LoadedModel) -> tuple:
    """Batch and length as symbols, with the length bounded by the model's positions."""
    return tuple(export.symbolic_shape("batch, length", constraints=[f"length <= {loaded.model.max_positions}"]))


def input_names(loaded: LoadedModel) -> list[str]:
    """The inputs of a model's programs by name, in order."""
    left_out = {"segment_ids": loaded.model.segment_types < 2, "tagged": not loaded.heads.crf}
    return [name for name in INPUTS if not left_out.get(name)]


def _program(
    loaded: LoadedModel, runtime: Runtime, compute_outputs: Callable[[Bert, Rows, Encoded, dict[str, Array]], Outputs]
) -> Program:
    def compute(parameters: dict[str, Array], inputs: dict[str, Array]) -> Outputs:
        # Norms and sums of embeddings are float32, whatever the dtype of the parameters.
        wide = {path: value.astype(jnp.float32) for path, value in parameters.items()}
        model = bind(loaded.model, loaded.heads, layers.unflatten(wide), runtime)
        # A row is one sequence, 1 in sequence_ids; positions count its tokens.
        real = jnp.minimum(inputs["attention_mask"], 1)
        segments = inputs.get("segment_ids", jnp.zeros_like(real))
        rows = Rows(inputs["input_ids"], segments * real, real, (jnp.cumsum(real, axis=1) - 1) * real)
        encoded = model.encode(rows, all_layers=loaded.heads.layer_mix)
        values = compute_outputs(model, rows, encoded, inputs)
        return {
            name: value.astype(jnp.float32) if jnp.issubdtype(value.dtype, jnp.floating) else value
            for name, value in values.items()
        }

    return compute


def _sequence_vectors(model: Bert, rows: Rows, encoded: Encoded) -> Float[Array, "B 1 D"]:
    # A row's only sequence begins at position 0.
    states, first = outputs.task_states(model, encoded), jnp.zeros_like(rows.input_ids[:, :1])
    return outputs.sequence_vectors(model, states, rows.sequence_ids, first)


def hidden_states(loaded: LoadedModel, runtime: Runtime) -> Program:
    """A program with the outputs `last` f32[B,T,D] and, if the model has a pooler, `pooled` f32[B,D].

    `pooled` is the pooler's output for the sequence vector that heads.pooling selects, mostly [CLS].
    """

    def compute(model: Bert, rows: Rows, encoded: Encoded, inputs: dict[str, Array]) -> Outputs:
        pooled = {"pooled": _sequence_vectors(model, rows, encoded)[:, 0]} if loaded.heads.pooler else {}
        return {"last": encoded.last, **pooled}

    return _program(loaded, runtime, compute)


def text_vectors(loaded: LoadedModel, runtime: Runtime, settings: Mapping[str, Any]) -> Program:
    """A program with the outputs `last` f32[B,T,D] and `vector` f32[B,W], a text's vector as by `embed`.

    `settings` has an embedding task's pooling, normalize and, if W is not D, truncate_dim.
    """

    def compute(model: Bert, rows: Rows, encoded: Encoded, inputs: dict[str, Array]) -> Outputs:
        # sentence-transformers also cuts vectors last, so that a cut vector no longer has length 1.
        vector = pool_rows(settings["pooling"], encoded.last, rows.sequence_ids)
        vector = unit_vectors(vector) if settings["normalize"] else vector
        return {"last": encoded.last, "vector": vector[:, : settings.get("truncate_dim") or None]}

    return _program(loaded, runtime, compute)


def predictions(loaded: LoadedModel, runtime: Runtime) -> Program:
    """A program that returns all heads' logits.

    mlm_logits, lm_logits              f32[B,T,V] without the vocabulary's padding rows; for ELMo forward_lm_logits and
                                       backward_lm_logits, for the next and the previous token
    replaced_token_logits              f32[B,T]
    next_sentence_logits, class_logits, choice_logits   f32[B,2], f32[B,C], f32[B]
    tag_logits, answer_logits          f32[B,T,C], f32[B,T,2]
    tags                               i32[B,T], the best path of a CRF
    span_logits                        f32[B,T,K,C] for the spans of 1 to K positions that begin at a position
    """
    heads = loaded.heads

    def compute(model: Bert, rows: Rows, encoded: Encoded, inputs: dict[str, Array]) -> Outputs:
        last = encoded.last
        logits: Outputs = {}
        if heads.mlm or heads.lm:
            # An encoder with two directions has states and logits for both, side by side.
            names = loaded.model.encoder.logits or ("mlm_logits" if heads.mlm else "lm_logits",)
            parts = jnp.split(last, len(names), axis=-1) if len(names) > 1 else [last]
            for name, states in zip(names, parts, strict=True):
                logits[name] = outputs.vocabulary_logits(model, states)[..., : loaded.model.vocab_size]
        if heads.replaced_tokens:
            logits["replaced_token_logits"] = outputs.replaced_token_logits(model, last)
        if heads.next_sentence:
            pooled = outputs.pool_vectors(model, last[:, :1])
            logits["next_sentence_logits"] = outputs.next_sentence_logits(model, pooled)[:, 0]
        if heads.classes:
            logits["class_logits"] = outputs.class_logits(model, _sequence_vectors(model, rows, encoded))[:, 0]
        elif heads.choices:
            logits["choice_logits"] = outputs.choice_logits(model, _sequence_vectors(model, rows, encoded))[:, 0]
        if heads.tags:
            logits["tag_logits"] = outputs.tag_logits(model, outputs.task_states(model, encoded))
        if heads.crf:
            tagged = (inputs["tagged"] > 0) & (rows.sequence_ids > 0)
            allowed = allowed_by(recognize_scheme(loaded.task["labels"]) if loaded.task else None)
            logits["tags"], _ = model.head("crf").decode(logits["tag_logits"], tagged, rows.sequence_ids, allowed)
        if heads.spans.classes:
            logits["span_logits"] = outputs.span_logits(model, outputs.span_vectors(model, last))
        if heads.question:
            logits["answer_logits"] = outputs.answer_logits(model, last)
        return logits

    return _program(loaded, runtime, compute)


def has_predictions(heads: Heads) -> bool:
    """Whether `predictions` returns logits for a model."""
    by_token = (heads.mlm, heads.lm, heads.replaced_tokens, heads.tags, heads.question, heads.spans.classes)
    return any((*by_token, heads.next_sentence, heads.classes, heads.choices))


def write(
    loaded: LoadedModel, directory: str | Path, dtype: str = "float32", shape: tuple[int, int] | None = None
) -> None:
    """Writes a model's programs to a new folder, which appears complete or not at all.

    These are hidden_states.stablehlo; predictions.stablehlo, if there are heads; text_vectors.stablehlo, if the model
    was fine-tuned for vectors. The functions of these names describe the outputs, and `jax.export.deserialize` reads
    the files. programs.json lists inputs, outputs and parameters in order, and the vectors' settings.

    Args:
        loaded: The model.
        directory: The folder to create.
        dtype: float32 or bfloat16, in which parameters are stored and matmuls computed; outputs are float32.
        shape: The only batch size and length of the programs, for compilers without symbolic sizes; None for any.

    Raises:
        UserError: The folder exists, the model has fewer positions, or it has relations, whose spans are chosen outside
            of the model.
    """
    if loaded.heads.spans.relations:
        raise UserError("a model with heads.spans.relations has no StableHLO programs; export it with --format orbax")
    if shape and shape[1] > loaded.model.max_positions:
        raise UserError(f"--shape has length {shape[1]}, but the model has {loaded.model.max_positions} positions")
    runtime = Runtime(attention=ATTENTION, compute_dtype=dtype, platform="cpu")  # the same on every machine
    programs = {"hidden_states": hidden_states(loaded, runtime)}
    if has_predictions(loaded.heads):
        programs["predictions"] = predictions(loaded, runtime)
    vectors: dict[str, Any] = {}
    if (task := loaded.task) and task["kind"] == sentence_transformers.KIND:
        if sentence_transformers.has_known_pooling(task):
            vectors = {name: task[name] for name in ("pooling", "normalize", "max_length")}
            # Prompts are for the caller: a program sees ids only.
            vectors |= sentence_transformers.written_settings(task)
            programs["text_vectors"] = text_vectors(loaded, runtime, vectors)
        else:
            report(f"there is no program of the pooling of its vectors, left out: {task['pooling']}")
    # Exporting needs shapes only; the values go into the file.
    params = {path: value.astype(jnp.dtype(dtype)) for path, value in loaded.params.items()}
    parameters = {path: jax.ShapeDtypeStruct(value.shape, value.dtype) for path, value in params.items()}
    # All programs share one batch and one length, so their inputs have the same symbols.
    sizes, words = shape or symbolic_sizes(loaded), loaded.vocabulary
    inputs = {name: jax.ShapeDtypeStruct(sizes, jnp.int32) for name in input_names(loaded)}
    description: dict[str, Any] = {
        "programs": {},
        "platforms": list(PLATFORMS),
        "parameters": [_describe_tensor(path, value) for path, value in sorted(params.items())],
        "model": to_dict(loaded.model),
        "special_ids": {role: words.token_id(token) for role, token in words.roles._asdict().items()},
        "labels": list(loaded.task["labels"]) if loaded.task else [],
        "jax": jax.__version__,
    } | ({"vectors": vectors} if vectors else {})
    with atomic_folder(directory) as unfinished:
        for name, compute in programs.items():
            # Unused arguments are kept so that all programs of a folder have the same signature.
            jitted = jax.jit(compute, keep_unused=True)
            exported = export.export(jitted, platforms=PLATFORMS)(parameters, inputs)
            (unfinished / f"{name}{SUFFIX}").write_bytes(exported.serialize())
            (_, arguments), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
            results = jax.tree.unflatten(exported.out_tree, exported.out_avals)
            description["programs"][name] = {
                "file": f"{name}{SUFFIX}",
                "inputs": [_describe_tensor(key, aval) | {"meaning": INPUTS[key]} for key, aval in arguments.items()],
                "outputs": [_describe_tensor(key, aval) for key, aval in results.items()],
            }
        save_tensors(params, unfinished / PARAMETERS_FILE)
        Tokenizer(words.spec).save(unfinished / TOKENIZER)
        write_json(unfinished / PROGRAMS_FILE, description)
        name = Path(loaded.origin).name or "model"
        metadata = front_matter(loaded, "jax", pipeline_tag(loaded), ["stablehlo", "bert_jax"], name)
        readme = f"{metadata}\n\n{_readme(loaded, dtype, list(programs)[-1], vectors, shape)}"
        (unfinished / "README.md").write_text(readme, encoding="utf-8")


def _describe_tensor(name: str, aval: Any) -> dict[str, Any]:
    shape = [size if isinstance(size, int) else str(size) for size in aval.shape]
    return {"name": name, "dtype": str(aval.dtype), "shape": shape}


def _readme(
    loaded: LoadedModel, dtype: str, program: str, vectors: Mapping[str, Any], shape: tuple[int, int] | None
) -> str:
    """Renders README.md, which shows how to run `program`."""
    words, longest = loaded.vocabulary, loaded.model.max_positions

    # Texts stand in Python code, which can read a JSON string.
    def quoted(text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    prompt, paragraph = "", ""
    if vectors:
        prompt = vectors["prompts"].get(vectors["default_prompt_name"], "")
        steps = [f"pooled ({vectors['pooling']})"]
        if vectors["normalize"]:
            steps.append("divided by its length")
        if size := vectors.get("truncate_dim"):
            steps.append(f"cut to its first {size} dimensions")
        named = ", ".join(f"{name} {quoted(text)}" for name, text in vectors["prompts"].items() if text) or "none"
        paragraph = (
            f"`vector` is that of a text: {', '.join(steps)}. With its prompt, a text has at most "
            f"{vectors['max_length']} tokens; prompts: {named}. `{PROGRAMS_FILE}` has these settings as `vectors`.\n\n"
        )
    values = {"segment_ids": "zeros", "tagged": "ones"}
    further = [name for name in input_names(loaded) if name in values]
    begin, end, pair = "", "", "a b, without special tokens"
    if words.adds_special_tokens:
        begin, end = f"{words.cls_id}, ", f", {words.sep_id}"
        cls, sep = words.roles.cls_token, words.roles.sep_token
        pair = " ".join([cls, "a", *[sep] * words.between, "b", sep])
    return string.Template(README_TEMPLATE.read_text(encoding="utf-8")).substitute(
        sizes=f"Batches of {shape[0]} x {shape[1]}" if shape else f"Any batch size, any length up to {longest}",
        hint=f"pad to {shape[1]}, and fill the batch up"
        if shape
        else "each new shape is compiled once, so pad to few lengths",
        dtype=dtype,
        platforms=", ".join(PLATFORMS),
        description=PROGRAMS_FILE,
        text=quoted(f"{prompt}Some text."),
        vectors=paragraph,
        program=f"{program}{SUFFIX}",
        parameters=PARAMETERS_FILE,
        tokenizer=TOKENIZER,
        begin=begin,
        end=end,
        pair=pair,
        further="".join(f'    "{name}": np.{values[name]}((1, len(ids)), np.int32),\n' for name in further),
    )
