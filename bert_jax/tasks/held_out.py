"""Holds out a part of the training file if the user names no dev file (task.dev_share).

A keyed hash of the text decides. So a resumed run, all seeds and settings in a sweep, and reports hold out the same
rows, and equal texts are never on both sides.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bert_jax import config as config_lib
from bert_jax.config import TaskConfig
from bert_jax.tasks import registry
from bert_jax.tasks.labels import NamedLabelsTask
from bert_jax.tasks.rows import Split
from bert_jax.tasks.task import Task

KEY = b"bert_jax dev_share"
TEXTS = ("context", "text", "start", "texts", "words")  # fields of items: the first that has content is the text
FEW = 100  # rows below which a metric is rough: the standard error of an accuracy of 0.8 is 0.04


def indices(task: Task, train: Split[Any], share: float) -> list[int]:
    """Chooses the items to hold out, about this share, in file order; none if there are too few texts.

    A class keeps at least one row to train on.

    Args:
        task: A task that has no labels yet, or all labels in the file.
    """
    groups: dict[str, list[int]] = defaultdict(list)  # by text
    for index, item in enumerate(train.items):
        groups[_text(item)].append(index)
    wanted = max(round(share * len(train.items)), 1)
    labels = [_labels(task, train, item) for item in train.items]
    left = Counter(label for item in labels for label in item)
    held_out: list[int] = []
    # Groups of equal texts in the order of their hashes. One that does not fit is passed over, and the next one is
    # tried.
    for text in sorted(groups, key=_hash):
        if len(held_out) >= wanted:
            break
        group = groups[text]
        taken = Counter(label for index in group for label in labels[index])
        # A text that is repeated very often stays, unless it fits.
        size = len(held_out) + len(group)
        fits = size <= max(wanted, len(train.items) // 2) and size < len(train.items)
        if fits and all(left[label] > count for label, count in taken.items()):
            held_out += group
            left -= taken
    return sorted(held_out)


def split(task: Task, train: Split[Any], share: float) -> tuple[Split[Any], Split[Any] | None, str]:
    """Returns the rows to train on, the held-out ones (None: there are none), and a line for the user."""
    count, advice = len(train.items), "name a file with --config.task.dev"
    if not share:
        return train, None, f"warning: no dev file, and task.dev_share=0: nothing is measured; {advice}"
    chosen = indices(task, train, share)
    if not chosen:
        return train, None, f"warning: no dev file, and {train.path} has too few texts to hold some out; {advice}"
    rest = sorted({*range(count)} - {*chosen})
    rough = ", but so few make rough metrics" if len(chosen) < FEW else ""
    line = (
        f"no dev file: {len(chosen):,} of the {count:,} examples of {train.path}, chosen by a hash of their text, are "
        f"held out and measured{rough}; task.dev_share=0 trains on all"
    )
    # Skipped lines and remarks belong to the file, and are reported once.
    dev = replace(train, items=tuple(train.items[index] for index in chosen), left_out=0, remarks=())
    return replace(train, items=tuple(train.items[index] for index in rest)), dev, line


def of_run(training: Mapping[str, Any]) -> tuple[Path, list[int]]:
    """Returns a run's training file, by its configuration, and the items held out of it (none with a dev file).

    Raises:
        UserError: The run has no task, or its files cannot be read.
    """
    config = config_lib.load(TaskConfig, dict(training.get("task") or {}), "task")
    task, files = registry.resolve(config)
    if "dev" in files or not config.dev_share:
        return files["train"], []
    # As in training, where labels are not renamed yet.
    return files["train"], indices(task, registry.read(task, files["train"]), config.dev_share)


def _text(item: Any) -> str:
    """Returns an item's text; texts that differ only in case and white space are equal."""
    contents = [getattr(item, name) for name in TEXTS if hasattr(item, name)] or [repr(item)]  # of an extension
    content = next(filter(None, contents), "")
    return " ".join((content if isinstance(content, str) else " ".join(content)).casefold().split())


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=KEY, digest_size=16).digest()


def _labels(task: Task, train: Split[Any], item: Any) -> set[str]:
    return task.labels_in(replace(train, items=(item,))) if isinstance(task, NamedLabelsTask) else set()
