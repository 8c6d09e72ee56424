"""What a model is fine-tuned for: the part of a fine-tuned checkpoint's config.json under `task`."""

from dataclasses import dataclass, field, replace

from bert_jax.command import UserError
from bert_jax.model.heads.config import POOLINGS
from bert_jax.tasks.reading import Columns
from bert_jax.train.losses import ClassCosts

KINDS = (  # bert_jax/tasks/kinds
    *("classification", "regression", "choice", "tagging", "token_regression", "question"),
    *("spans", "span_pairs"),
)
POOLED = ("classification", "regression", "choice")  # read one vector of each text; the others read tokens


@dataclass(frozen=True)
class Task:
    """A task of one of KINDS. Options that a kind does not read stay as they are by default.

    Raises UserError for a kind or an option that there is not.
    """

    name: str
    kind: str  # one of KINDS
    labels: tuple[str, ...] = ()  # by id; empty for regression, and until the training file was read
    max_length: int = 128
    metrics: tuple[str, ...] = ()  # the first chooses between seeds; see bert_jax/tasks/metric_functions.py
    columns: Columns = field(default_factory=Columns)
    pooling: str = "cls"  # how one vector is made of a text (bert_jax/model/heads/pooling.py); for POOLED
    choices: str = ""  # the columns of the choices, parted by commas, or one that holds a list; for choice
    class_weights: str = ""  # balanced, or LABEL=WEIGHT,...; empty: each class weighs 1 in the loss
    class_weight_values: tuple[float, ...] = ()  # what came of it on the training file, by label id
    label_smoothing: float = 0.0  # the share of the uniform distribution in the truth (Szegedy et al. 2016, section 7)
    label_subwords: str = "first"  # which pieces of a word learn its tag: first, all (kinds/tagging.py)
    decode: str = "first"  # what a word's tag is read from: its first piece, or the mean of all its pieces
    crf: bool = False  # tags depend on those beside them
    max_query_length: int = 64  # of a question, in pieces
    doc_stride: int = 128  # from one window of a long context to the next, in pieces
    n_best: int = 20  # answers that are kept of a question
    max_answer_length: int = 30  # in pieces
    unanswerable: bool = False  # whether questions may have no answer (SQuAD 2.0)
    null_threshold: float | None = None  # such a question's probability of none is above it; None: as on dev
    max_span: int = 0  # words of the longest span that is looked for; 0: until the training file was read
    span_scores: str = "binary"  # yes or no to each type of a span, or one of its classes, of which one is none
    threshold: float = 0.0  # the probability from which a span is one; 0: until it is calibrated on dev
    relations_between: str = "predicted"  # spans (learnt, too), or given ones
    relation_labels: tuple[str, ...] = ()  # by id - 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"task.kind is {self.kind!r}; use {', '.join(KINDS)}")
        if self.pooling not in POOLINGS:
            raise UserError(f"task.pooling is {self.pooling!r}; use {', '.join(POOLINGS)}")
        if self.pooling != "cls" and not self.pooled:
            raise UserError(f"task.pooling is {self.pooling!r}, but {self.kind} reads each token; leave it out")
        if self.class_weights and self.kind not in ("classification", "tagging"):
            raise UserError(f"task.class_weights is for classification and tagging, not for {self.kind}; leave it out")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"task.label_smoothing is {self.label_smoothing}; use 0 (none) or a share below 1, as 0.1")
        if self.label_smoothing and self.kind not in ("classification", "choice", "tagging"):
            raise UserError(
                f"task.label_smoothing is for classification, choice and tagging, not for {self.kind}; leave it out"
            )
        if self.crf and (self.class_weights or self.label_smoothing):
            raise UserError(
                "task.class_weights and task.label_smoothing are of a cross-entropy by word, and task.crf has none; "
                "leave out one or the other"
            )
        if self.choices and self.kind != "choice":
            raise UserError(f"task.choices is for multiple choice, not for {self.kind}; leave it out")
        _one_of("task.label_subwords", self.label_subwords, ("first", "all"))
        _one_of("task.decode", self.decode, ("first", "mean"))
        if self.decode == "mean" and self.label_subwords == "first":
            raise UserError(
                "task.decode=mean reads all pieces of a word, of which task.label_subwords=first trains the first "
                "only; add --config.task.label_subwords=all"
            )
        if self.crf and self.label_subwords == "all":
            raise UserError("task.crf runs over the words' first pieces; leave out task.label_subwords=all")
        _one_of("task.span_scores", self.span_scores, ("binary", "classes"))
        _one_of("task.relations_between", self.relations_between, ("predicted", "given"))
        if self.max_span < 0 or not 0 <= self.threshold < 1:
            raise UserError(
                f"task.max_span is {self.max_span} and task.threshold {self.threshold}; use words, 0 or more, and a "
                "probability below 1 (0: what the training file has; what is best on dev)"
            )
        if self.null_threshold is not None and (self.kind != "question" or not 0 <= self.null_threshold <= 1):
            raise UserError(
                f"task.null_threshold is {self.null_threshold}; use a probability, 0 to 1, for questions, or leave it "
                "out for what is best on dev"
            )
        if self.kind != "tagging" and (self.crf, self.label_subwords, self.decode) != (False, "first", "first"):
            raise UserError(f"task.label_subwords, task.decode and task.crf are for tagging, not for {self.kind}")
        for name in ("max_query_length", "doc_stride", "n_best", "max_answer_length"):
            if getattr(self, name) < 1:
                raise UserError(f"task.{name} is {getattr(self, name)}; use 1 or more")

    @property
    def pooled(self) -> bool:
        """Whether one vector of each text is read, made by pooling, and not every token."""
        return self.kind in POOLED

    @property
    def pairs_are_given(self) -> bool:
        """Whether the spans between which relations are looked for are part of the input."""
        return self.kind == "span_pairs" and self.relations_between == "given"

    @property
    def costs(self) -> ClassCosts:
        """What the classes cost where it is learnt."""
        return ClassCosts(self.class_weight_values, self.label_smoothing)

    @property
    def measured(self) -> "Task":
        """The task as it is measured: plain cross-entropy, so that losses of runs with other costs compare."""
        return replace(self, class_weights="", class_weight_values=(), label_smoothing=0.0)

    @property
    def classes(self) -> int:
        """Width of the head: 1 where it gives a number."""
        return len(self.labels) if self.kind in ("classification", "tagging") else 1


def _one_of(field_name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{field_name} is {value!r}; use one of: {', '.join(known)}")
