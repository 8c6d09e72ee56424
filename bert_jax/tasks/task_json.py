"""A task as the JSON values under `task` in the config.json of a workdir or an export.

The names, their order and the defaults are a file contract: FIRST, then the other options in the order of the kinds.
Every kind writes the options of all kinds that come with bert_jax, with the default for each option that it does not
have.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from bert_jax import config as config_lib
from bert_jax.command import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.tasks.registry import BUILT_IN, TASKS, kind_class
from bert_jax.tasks.task import Task

FIRST = ("name", "kind", "labels", "max_length", "metrics", "columns", "pooling", "choices")
# Where kinds differ in a default, that of the first kind is written for those without the option.
OPTIONS = {item.name: item.default for kind in (*BUILT_IN, *reversed(BUILT_IN)) for item in fields(kind)}
DEFAULTS: Mapping[str, Any] = {**dict.fromkeys(FIRST), **OPTIONS, "name": "", "kind": "", "columns": {}}


def to_json(task: Task) -> dict[str, Any]:
    """The JSON values of a task: those of DEFAULTS in their order, then further options of a user's own kind."""
    return {**DEFAULTS, "kind": task.kind, **asdict(task)}


def from_json(values: Mapping[str, Any]) -> Task:
    """The task of JSON values; options that its kind does not have are ignored.

    The class is that of the named task, which may refine its kind's, or else that of the kind.

    Raises UserError for an unknown kind, a missing name, or a value of another type.
    """
    if "kind" not in values:
        raise UserError("task.kind is missing; give the kind of the task, such as classification")
    named = TASKS.get(values.get("name", ""))
    kind = type(named.task) if named and named.task.kind == values["kind"] else kind_class(values["kind"])
    known = {item.name for item in fields(kind)}
    return config_lib.load(kind, {key: value for key, value in values.items() if key in known}, "task")


def task_of(loaded: LoadedModel) -> Task:
    """The task that a checkpoint was fine-tuned for, with rows of at most as many tokens as the model has positions.

    Raises UserError for a checkpoint that was not fine-tuned.
    """
    if not loaded.task:
        raise UserError("this checkpoint was not fine-tuned for a task; fine-tune it first: bert-jax finetune")
    task = from_json(loaded.task)
    task = replace(task, max_length=min(task.max_length, loaded.model.max_positions)).with_metrics()
    # A folder in Hugging Face format does not record the options of a task; the pooling is that of its heads.
    return task.with_pooling(loaded.heads.pooling)
