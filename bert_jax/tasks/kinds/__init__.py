"""The kinds of tasks: a file each, and one table of them.

kind              what a kind has to say of itself
classification    a class, or a score (regression), of a text or a pair
choice            the right one of several texts that may follow a context
tagging           a tag for every word
token_regression  a number for every word
question          an answer that is a part of a context, or none
spans             spans of words, which may nest, and how they relate (span_rows, span_objective, span_guesses)
"""

from bert_jax.tasks.kinds.choice import Choice
from bert_jax.tasks.kinds.classification import Classification
from bert_jax.tasks.kinds.kind import Kind
from bert_jax.tasks.kinds.question import QuestionAnswering
from bert_jax.tasks.kinds.span import Spans
from bert_jax.tasks.kinds.tagging import Tagging
from bert_jax.tasks.kinds.token_regression import TokenRegression
from bert_jax.tasks.task import Task

__all__ = ["Kind", "kind_of"]

_KINDS: dict[str, Kind] = {
    "classification": Classification(),
    "regression": Classification(),
    "choice": Choice(),
    "tagging": Tagging(),
    "token_regression": TokenRegression(),
    "question": QuestionAnswering(),
    "spans": Spans(),
    "span_pairs": Spans(),
}


def kind_of(task: Task) -> Kind:
    """The kind of a task."""
    return _KINDS[task.kind]
