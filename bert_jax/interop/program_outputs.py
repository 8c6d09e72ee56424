"""The outputs of exported programs as functions of parameters and inputs, for StableHLO and for ONNX.

A function has the inputs of a user: token ids, the attention mask and, depending on the model, token types. Batch size
and length may be symbolic.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Float, Int, Shaped

from bert_jax.config import ENCODERS
from bert_jax.interop.loaded_model import LoadedModel
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
from bert_jax.model.heads.pooling import pool_rows, unit_vectors
from bert_jax.model.heads.tag_scheme import scheme_of
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
        found = {"last": encoded.last}
        if loaded.heads.pooler:
            found["pooled"] = _sequence_vectors(model, rows, encoded)[:, 0]
        return _widened(found)

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
        found: Outputs = {}
        if loaded.heads.mlm or loaded.heads.lm:
            parts = {"mlm_logits" if loaded.heads.mlm else "lm_logits": encoded.last}
            if names := ENCODERS[loaded.model.encoder].logits:
                parts = dict(zip(names, jnp.split(encoded.last, len(names), axis=-1), strict=True))
            for name, vectors in parts.items():
                found[name] = vocabulary_logits(model, vectors)[..., : loaded.model.vocab_size]
        if loaded.heads.replaced_tokens:
            found["replaced_token_logits"] = replaced_token_logits(model, encoded.last)
        if loaded.heads.next_sentence:
            found["next_sentence_logits"] = next_sentence_logits(model, pool_vectors(model, encoded.last[:, :1]))[:, 0]
        if loaded.heads.classes or loaded.heads.choices:
            vectors = _sequence_vectors(model, rows, encoded)
            name = "class_logits" if loaded.heads.classes else "choice_logits"
            logits_of = class_logits if loaded.heads.classes else choice_logits
            found[name] = logits_of(model, vectors)[:, 0]
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
        return _widened(found)

    return compute


def has_predictions(heads: Heads) -> bool:
    """Returns whether a model has a head whose logits `predictions` returns."""
    sequence_heads = (heads.next_sentence, heads.classes, heads.choices)
    by_token = (heads.mlm, heads.lm, heads.replaced_tokens)
    return any((*by_token, *sequence_heads, heads.tags, heads.question, heads.spans.classes))


def _run(
    loaded: LoadedModel, parameters: Mapping[str, Array], inputs: Mapping[str, Array], runtime: Runtime
) -> tuple[Bert, Rows, Encoded]:
    # Parameters of another dtype are widened: norms and sums of embeddings are float32 in any case.
    wide = {path: value.astype(jnp.float32) for path, value in parameters.items()}
    model = bind(loaded.model, loaded.heads, paths.unflatten(wide), runtime)
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
