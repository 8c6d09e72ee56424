"""What stands on the encoder: each head a module, chosen by `Heads`.

choice          which heads a model has
pooling         one vector for a sequence
classification  classes, scores, tags, the ends of an answer: dense layers to logits
vocabulary      tokens: masked, next, or those between the boundaries of a span
chain           a linear-chain CRF over tags
spans           vectors of all spans up to a length, what a span is, and how two of them relate
"""

from bert_jax.model.heads.chain import LinearChain
from bert_jax.model.heads.choice import Heads, SpanHeads
from bert_jax.model.heads.classification import ANSWER_ENDS, NEXT_SENTENCE_CLASSES, Classifier, Network
from bert_jax.model.heads.pooling import AttentionPooling, Pooler, pool_sequences
from bert_jax.model.heads.spans import (
    SpanClassifier,
    SpanPairs,
    SpanVectors,
    ahead,
    choose_spans,
    possible_spans,
    take_spans,
)
from bert_jax.model.heads.vocabulary import SPAN_PLACES, LanguageModel, MaskedLanguageModel, SpanBoundary

__all__ = [
    "ANSWER_ENDS",
    "NEXT_SENTENCE_CLASSES",
    "SPAN_PLACES",
    "AttentionPooling",
    "Classifier",
    "Heads",
    "LanguageModel",
    "LinearChain",
    "MaskedLanguageModel",
    "Network",
    "Pooler",
    "SpanBoundary",
    "SpanClassifier",
    "SpanHeads",
    "SpanPairs",
    "SpanVectors",
    "ahead",
    "choose_spans",
    "pool_sequences",
    "possible_spans",
    "take_spans",
]
