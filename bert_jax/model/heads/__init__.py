"""The heads on top of the encoder, by name: the one place where a head is listed.

A model has the heads that its `Heads` (config.py) choose; a head's name is also the first component of its parameters'
paths (`mlm_head/transform/kernel`). The modules are in basic.py (dense layers, pooling, a layer mix), tokens.py (token
logits) and structured.py (a CRF over tags, spans). An extension adds its own to HEADS.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import nnx
from jaxtyping import PRNGKeyArray

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model.heads.basic import (
    ANSWER_ENDS,
    HIDDEN_PROJECTION,
    NEXT_SENTENCE_CLASSES,
    AttentionPooling,
    Classifier,
    HiddenProjection,
    LayerMix,
    Pooler,
)
from bert_jax.model.heads.config import Heads
from bert_jax.model.heads.structured import CRF, SpanClassifier, SpanPairs, SpanVectors
from bert_jax.model.heads.tokens import Generator, LanguageModel, MaskedLanguageModel, ReplacedTokens, SpanBoundary
from bert_jax.model.runtime import Runtime


class Head(NamedTuple):
    """A head's module, and the function that decides whether a model has it.

    Attributes:
        module: called as module(config, *arguments, runtime=..., key=...).
        arguments: returns the arguments for the chosen heads; None if a model lacks the head. Without this function a
            model has the head if `Heads.named` lists its name, and there are no arguments.
    """

    module: Callable[..., nnx.Module]
    arguments: Callable[[Heads, ModelConfig], tuple[Any, ...] | None] | None = None


def _layer_mix(config: ModelConfig, *, runtime: Runtime, key: PRNGKeyArray) -> LayerMix:
    return LayerMix(config.layers + 1)


def has_pooler(heads: Heads, config: ModelConfig) -> bool:
    """Tells whether a model has a pooler; in ModernBERT heads that read single tokens also need its transform."""
    return heads.pooler or (config.pooler == "transform" and bool(heads.tags or heads.question))


# Names are parts of parameters' paths, and so of checkpoints. () means a head without arguments, None no head.
HEADS: dict[str, Head] = {
    "pooler": Head(Pooler, lambda heads, config: () if has_pooler(heads, config) else None),
    "pooling": Head(
        AttentionPooling, lambda heads, _: (heads.pooling,) if heads.pooling.startswith("attention") else None
    ),
    "mlm_head": Head(MaskedLanguageModel, lambda heads, _: () if heads.mlm else None),
    "lm_head": Head(LanguageModel, lambda heads, _: () if heads.lm else None),
    "span_boundary_head": Head(SpanBoundary, lambda heads, _: () if heads.span_boundary else None),
    "replaced_tokens_head": Head(ReplacedTokens, lambda heads, _: () if heads.replaced_tokens else None),
    "generator": Head(Generator, lambda heads, _: (heads.generator,) if heads.generator else None),
    "next_sentence_head": Head(Classifier, lambda heads, _: (NEXT_SENTENCE_CLASSES,) if heads.next_sentence else None),
    "layer_mix": Head(_layer_mix, lambda heads, _: () if heads.layer_mix else None),
    HIDDEN_PROJECTION: Head(
        HiddenProjection, lambda heads, _: (heads.hidden_projection,) if heads.hidden_projection else None
    ),
    # A choice is one score, so its classifier has one output.
    "classifier": Head(Classifier, lambda heads, _: (heads.classes or 1,) if heads.classes or heads.choices else None),
    "tagger": Head(Classifier, lambda heads, _: (heads.tags,) if heads.tags else None),
    "crf": Head(CRF, lambda heads, _: (heads.tags,) if heads.crf else None),
    "question_head": Head(Classifier, lambda heads, _: (ANSWER_ENDS,) if heads.question else None),
    "spans": Head(SpanVectors, lambda heads, _: (heads.spans,) if heads.spans.length else None),
    "span_classifier": Head(SpanClassifier, lambda heads, _: (heads.spans.classes,) if heads.spans.classes else None),
    "span_relations": Head(SpanPairs, lambda heads, _: (heads.spans.relations,) if heads.spans.relations else None),
}


def chosen_heads(heads: Heads, config: ModelConfig) -> dict[str, tuple[Callable[..., nnx.Module], tuple[Any, ...]]]:
    """Returns a model's heads by name: the module and its arguments.

    Raises:
        UserError: HEADS lacks a name.
    """
    if unknown := [name for name in heads.named if name not in HEADS]:
        raise UserError(
            f"unknown head {unknown[0]!r}; choose from {', '.join(HEADS)}, or import the file that adds it to "
            "bert_jax.model.heads.HEADS: --import FILE"
        )
    chosen = {}
    # In the table's order, whatever the order of the choices.
    for name, head in HEADS.items():
        named = () if name in heads.named else None
        arguments = named if head.arguments is None else head.arguments(heads, config)
        if arguments is not None:
            chosen[name] = (head.module, arguments)
    return chosen
