"""The configuration of distillation: a student learns from the outputs and hidden states of a teacher."""

import math
from dataclasses import dataclass, fields

from bert_jax.command import UserError

HIDDEN_LOSSES = ("cosine", "mse")
POSITIONS = ("masked", "all")
LAST, UNIFORM = "last", "uniform"
# The keys of each term, which have no effect where its weight is 0.
_OF_TERMS = {"soft_weight": ("temperature", "positions"), "hidden_weight": ("hidden_loss", "layers")}

Pairs = tuple[tuple[int, int], ...]  # (layer of the student, layer of the teacher); 0: the embeddings


@dataclass(frozen=True)
class DistillConfig:
    """What a student learns from a teacher, and the weights of the parts of its loss.

    The loss is hard_weight times the loss without a teacher, plus soft_weight times the soft term, plus hidden_weight
    times the hidden term (bert_jax/train/objectives/distilled.py defines both). Raises UserError for values out of
    range.
    """

    teacher: str = ""  # any checkpoint; empty: no distillation
    temperature: float = 2.0  # of both softmaxes of the soft term
    soft_weight: float = 1.0  # of the term that compares outputs with the teacher's
    hard_weight: float = 1.0  # of the loss without a teacher
    hidden_weight: float = 0.0  # of the term that compares hidden states; 0: they are not compared
    hidden_loss: str = "cosine"  # of hidden states: cosine (DistilBERT), mse (TinyBERT)
    # The hidden states that are compared: last; uniform, the embeddings and each layer of the student with every Nth of
    # the teacher; or STUDENT:TEACHER,... such as 1:2,2:4,3:6, counted from 1, where 0 are the embeddings.
    layers: str = LAST
    positions: str = "masked"  # of pretraining: the soft term at masked positions, or at all

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise UserError(f"distill.temperature is {self.temperature}. Use a number above 0, such as 2")
        for name in ("soft_weight", "hard_weight", "hidden_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"distill.{name} is {getattr(self, name)}. Use a weight such as 1, or 0 for none")
        for name, known in (("hidden_loss", HIDDEN_LOSSES), ("positions", POSITIONS)):
            if getattr(self, name) not in known:
                raise UserError(f"unknown distill.{name} {getattr(self, name)!r}; choose from {', '.join(known)}")

    def check_unused(self) -> None:
        """Raises UserError for keys that have no effect, and for a teacher from which nothing is learned.

        This is a check of the configuration that is trained: a sweep may set the weight that a key needs.
        """
        defaults = {one.name: one.default for one in fields(self)}
        changed = [name for name, default in defaults.items() if getattr(self, name) != default]
        if not self.teacher:
            if changed:
                raise UserError(
                    f"distill.{changed[0]} is {getattr(self, changed[0])}, but distill.teacher is not set. Name the "
                    "checkpoint of the teacher with --config.distill.teacher=CHECKPOINT"
                )
            return
        if not self.soft_weight and not self.hidden_weight:
            raise UserError(
                "distill.soft_weight and distill.hidden_weight are both 0, so nothing is learned from distill.teacher. "
                "Set one of them, or omit distill.teacher"
            )
        for weight, names in _OF_TERMS.items():
            unused = [name for name in names if name in changed]
            if unused and not getattr(self, weight):
                name = unused[0]
                raise UserError(
                    f"distill.{name} is {getattr(self, name)}, which has no effect with distill.{weight}=0. Set the "
                    f"weight, or leave distill.{name} at {defaults[name]}"
                )

    def pairs(self, student: int, teacher: int) -> Pairs:
        """The hidden states to compare, for a student and a teacher with so many layers; none without hidden_weight.

        Raises UserError for `layers` that name a layer that does not exist, or cannot be read.
        """
        if not self.hidden_weight:
            return ()
        if self.layers == LAST:
            return ((student, teacher),)
        if self.layers == UNIFORM:
            if teacher % student:
                raise UserError(
                    f"distill.layers is {UNIFORM}, but the teacher's {teacher} layers are no multiple of the student's "
                    f"{student}. Name the pairs, such as --config.distill.layers={student}:{teacher}"
                )
            return tuple((layer, layer * teacher // student) for layer in range(student + 1))
        found = []
        for part in self.layers.split(","):
            ends = [end.strip() for end in part.split(":")]
            if len(ends) != 2 or not all(end.isdecimal() for end in ends):
                raise UserError(
                    f"distill.layers is {self.layers!r}; use {LAST}, {UNIFORM}, or STUDENT:TEACHER,... such as "
                    f"{student}:{teacher}"
                )
            found.append((int(ends[0]), int(ends[1])))
            for whose, layer, layers in zip(("student", "teacher"), found[-1], (student, teacher), strict=True):
                if layer > layers:
                    raise UserError(
                        f"distill.layers names layer {layer} of the {whose}, which has {layers}. Use 1 to {layers}, or "
                        "0 for the embeddings"
                    )
        return tuple(found)
