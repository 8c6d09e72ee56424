"""What a model is fine-tuned for: the part of a fine-tuned checkpoint's config.json under `task`."""

from dataclasses import dataclass, field

from bert_jax.command import UserError
from bert_jax.model.heads.choice import POOLINGS
from bert_jax.tasks.reading import Columns

KINDS = ("classification", "regression", "tagging")  # what there is of each stands in bert_jax/tasks/kinds


@dataclass(frozen=True)
class Task:
    """A task of one of KINDS. Options that a kind does not read stay as they are by default.

    Raises UserError for a kind or an option that there is not.
    """

    name: str
    kind: str  # one of KINDS
    labels: tuple[str, ...] = ()  # by id; empty for regression, and until the training file was read
    max_length: int = 128
    metrics: tuple[str, ...] = ()  # the first chooses between seeds; see bert_jax/tasks/metrics.py
    columns: Columns = field(default_factory=Columns)
    pooling: str = "cls"  # how one vector is made of a text (bert_jax/model/heads/pooling.py); not for tagging

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"task.kind is {self.kind!r}; use {', '.join(KINDS)}")
        if self.pooling not in POOLINGS:
            raise UserError(f"task.pooling is {self.pooling!r}; use {', '.join(POOLINGS)}")
        if self.pooling != "cls" and self.kind == "tagging":
            raise UserError(f"task.pooling is {self.pooling!r}, but tags are read from each token; leave it out")

    @property
    def classes(self) -> int:
        """Width of the head: 1 for regression."""
        return 1 if self.kind == "regression" else len(self.labels)
