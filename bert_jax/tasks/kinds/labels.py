"""Labels as files write them, to ids."""

from bert_jax.command import UserError
from bert_jax.tasks.example import Split
from bert_jax.tasks.task import Task


def check_label(task: Task, split: Split, line: int, label: str) -> int:
    """The id of a label. Raises UserError, with file and line, for one that is not in the task's set."""
    if label in task.labels:
        return task.labels.index(label)
    shown = ", ".join(map(repr, task.labels[:20])) + (" ..." if len(task.labels) > 20 else "")
    raise UserError(
        f"{split.path} line {line}: label {label!r} is not one of the task's: {shown}. "
        "Correct the line or the column (task.label), or add the label to the training file"
    )
