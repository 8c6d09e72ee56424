"""Which heads a model has: what a checkpoint's config.json stores under `heads`."""

from dataclasses import dataclass, field

from bert_jax.command import UserError

POOLINGS = ("cls", "mean", "max", "attention_dot", "attention_additive")
BOUNDARIES = ("hidden", "networks")
CONTENTS = ("mean", "attention")


@dataclass(frozen=True)
class SpanHeads:
    """Heads over all spans of up to `length` slots; 0: none. How a span becomes a vector: spans.py.

    Raises UserError for a choice that there is not, or heads over spans of no length.
    """

    length: int = 0
    boundaries: str = "hidden"  # hidden: the hidden states of the first and the last slot; networks: one for each
    content: str = "mean"  # mean, or attention over the slots between
    classes: int = 0  # 1: is it a span at all; more: its class, of which 0 is NULL
    relations: int = 0  # classes of a pair of spans, of which 0 is NULL

    def __post_init__(self) -> None:
        _one_of("heads.spans.boundaries", self.boundaries, BOUNDARIES)
        _one_of("heads.spans.content", self.content, CONTENTS)
        if self.length < 0 or (not self.length and (self.classes or self.relations)):
            raise UserError(
                f"heads.spans.length is {self.length}; give the slots of the longest span, or leave out "
                "heads.spans.classes and heads.spans.relations"
            )


@dataclass(frozen=True)
class Heads:
    """Which heads a model has. Counts of outputs are 0 for none.

    | field | the head |
    |---|---|
    | mlm, lm | predicts masked tokens; the next token |
    | span_boundary | predicts masked tokens from the slots around their span (Joshi et al. 2020), by mlm's matrix |
    | next_sentence | whether B follows A, or the order of A and B |
    | pooling | how one vector is made of a sequence, for classes and choices: cls, mean, max, attention_dot,
      attention_additive |
    | pooler | a layer over that vector (Pooler) |
    | classes | of a sequence; 1: a regression |
    | choices | a score for each sequence, among which one is right (multiple choice) |
    | tags | of each token; 1: a regression |
    | crf | tags depend on those beside them (a linear chain) |
    | question | where an answer begins and ends |
    | spans | of all spans up to a length |

    Raises UserError for a choice that there is not, and for a head without the one that it stands on.
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

    def __post_init__(self) -> None:
        _one_of("heads.pooling", self.pooling, POOLINGS)
        read_pooled = self.next_sentence or (self.pooling == "cls" and (self.classes or self.choices))
        if read_pooled and not self.pooler:
            raise UserError(
                "heads.next_sentence, and heads.classes and heads.choices with pooling=cls, read the pooled vector; "
                "set heads.pooler=True"
            )
        if self.classes and self.choices:
            raise UserError("heads.classes and heads.choices are two uses of one classifier; set one of them")
        if self.lm and self.mlm:
            raise UserError("heads.lm and heads.mlm are both set; a model reads left to right or it does not")
        if self.span_boundary and not self.mlm:
            raise UserError("heads.span_boundary predicts by the matrix of the MLM head; set heads.mlm=True")
        if self.crf and self.tags < 2:
            raise UserError(f"heads.crf stands on two or more tags, got heads.tags={self.tags}")


def _one_of(field_name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{field_name} is {value!r}; use one of: {', '.join(known)}")
