"""A model's choice of heads, which a checkpoint's config.json stores under `heads`."""

from dataclasses import asdict, dataclass, field
from typing import Any

from bert_jax.errors import UserError

VECTOR_POOLINGS = ("cls", "mean", "max", "last", "mean_sqrt_len_tokens", "weightedmean")  # for embeddings of texts
POOLINGS = ("cls", "mean", "max", "last", "attention_dot", "attention_additive")
BOUNDARIES = ("hidden", "networks")
CONTENTS = ("mean", "attention")
# to_json leaves these out if a model lacks them.
LATER_HEADS = ("replaced_tokens", "generator", "layer_mix", "hidden_projection", "named")


def pool_parts(pooling: str) -> list[str]:
    """The poolings whose vectors a pooling of texts concatenates: "cls + mean" has two."""
    return pooling.split(" + ")


@dataclass(frozen=True)
class SpanHeads:
    """The heads over all spans of up to `length` positions, or none if it is 0. See SpanVectors."""

    length: int = 0
    boundaries: str = "hidden"
    content: str = "mean"
    classes: int = 0  # 1: whether it is a span at all; more: its class, where class 0 is NULL
    relations: int = 0  # classes of a pair of spans, where class 0 is NULL

    def __post_init__(self) -> None:
        _check_choice("heads.spans.boundaries", self.boundaries, BOUNDARIES)
        _check_choice("heads.spans.content", self.content, CONTENTS)
        if self.length < 0 or (not self.length and (self.classes or self.relations)):
            raise UserError(
                f"heads.spans.length is {self.length}; give the length of the longest span, or leave out "
                "heads.spans.classes and heads.spans.relations"
            )


@dataclass(frozen=True)
class Heads:
    """A model's heads. Counts of outputs are 0 if it lacks the head.

    | field | the head |
    |---|---|
    | mlm, lm | predicts masked tokens; predicts the next token |
    | span_boundary | predicts masked tokens from the positions around their span (Joshi et al. 2020) with the MLM
      head's output matrix |
    | next_sentence | predicts whether B follows A, or the order of A and B |
    | pooling | makes one vector of a sequence, for classes and choices: cls, mean, max, last, attention_dot,
      attention_additive |
    | pooler | a dense layer over that vector (Pooler) |
    | classes | classes of a sequence; 1: a regression |
    | choices | scores the sequences of a question, one of which is right (multiple choice) |
    | tags | classes of each token; 1: a regression |
    | crf | makes each tag depend on its neighbors (a linear-chain CRF) |
    | question | the first and the last position of an answer |
    | spans | the heads over all spans up to a length |
    | replaced_tokens | tells whether each token was replaced (Clark et al. 2020) |
    | generator | the width of a smaller encoder that predicts masked tokens from the same embeddings, to replace them |
    | layer_mix | makes classes and tags read a learned mix of all layers instead of the last one (Peters et al. 2018) |
    | hidden_projection | the width of a teacher, to which training projects hidden states (HiddenProjection) |
    | named | further heads by their names in heads.HEADS, which an extension may add to |
    """

    mlm: bool = False
    lm: bool = False
    span_boundary: bool = False
    next_sentence: bool = False
    pooling: str = "cls"
    pooler: bool = False
    classes: int = 0
    choices: bool = False
    tags: int = 0
    crf: bool = False
    question: bool = False
    spans: SpanHeads = field(default_factory=SpanHeads)
    replaced_tokens: bool = False
    generator: int = 0
    layer_mix: bool = False
    hidden_projection: int = 0
    named: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_choice("heads.pooling", self.pooling, POOLINGS)
        # Other poolings make a vector without it, so that classes may do without a pooler.
        read_pooled = self.next_sentence or (self.pooling == "cls" and (self.classes or self.choices))
        if read_pooled and not self.pooler:
            raise UserError(
                "heads.next_sentence, and heads.classes and heads.choices with pooling=cls, read the pooled vector; "
                "set heads.pooler=True"
            )
        if self.classes and self.choices:
            raise UserError("heads.classes and heads.choices are two uses of one classifier; set only one of them")
        if self.lm and self.mlm:
            raise UserError("heads.lm and heads.mlm are both set; a model is either causal or bidirectional")
        if self.span_boundary and not self.mlm:
            raise UserError("heads.span_boundary uses the output matrix of the MLM head; set heads.mlm=True")
        # With one tag there is nothing to choose between.
        if self.crf and self.tags < 2:
            raise UserError(f"heads.crf needs two or more tags, got heads.tags={self.tags}")

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object of config.json and checkpoint metadata.

        It omits later heads that a model lacks, so that files without them stay as they were.
        """
        return {name: value for name, value in asdict(self).items() if value or name not in LATER_HEADS}


def _check_choice(field_name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"unknown {field_name} {value!r}; choose from {', '.join(known)}")
