"""Heads: modules on top of the encoder, chosen by `Heads` and listed by name in `HEADS`.

config          the choice of heads of a model
table           every head by name; an extension adds its own here
pooling         one vector of a sequence
classification  dense layers to logits: classes, scores, tags, both ends of an answer
language_model  logits of tokens: masked ones, next ones, those inside a span from its boundaries
replaced_tokens whether a token was replaced, and the generator of replacements
layer_mix       a learned mix of all layers, which other heads read
hidden_projection  hidden states in the width of a teacher
crf             a linear-chain conditional random field over tags
spans           vectors of all spans up to a length, their classes, and relations between them
"""

from bert_jax.model.heads.classification import Classifier
from bert_jax.model.heads.config import Heads, SpanHeads
from bert_jax.model.heads.crf import CRF
from bert_jax.model.heads.language_model import SPAN_PLACES
from bert_jax.model.heads.spans import ahead, choose_spans, possible_spans, take_spans
from bert_jax.model.heads.table import HEADS, Head

__all__ = [
    "CRF",
    "HEADS",
    "SPAN_PLACES",
    "Classifier",
    "Head",
    "Heads",
    "SpanHeads",
    "ahead",
    "choose_spans",
    "possible_spans",
    "take_spans",
]
