"""Training objectives as named terms of a loss.

  objective          the interface, and the loss and metrics that follow from terms and counts
  language_modeling  masked tokens, next sentences and span boundaries (BERT); next tokens (GPT)
  diffusion          masked tokens at random rates, weighted to a bound on the likelihood
  replaced_tokens    which tokens a generator replaced
  distilled          any of these or of the tasks, with a teacher
  pretraining        the table of pretraining objectives, and the one that a configuration and its shards ask for; also
                     next tokens in some phases of a run, masked tokens in others

The objectives of fine-tuning are in bert_jax/tasks.
"""

from bert_jax.train.objectives.diffusion import DiffusionObjective
from bert_jax.train.objectives.distilled import DistilledMaskedLM, DistilledObjective
from bert_jax.train.objectives.language_modeling import CausalLMObjective, MaskedLMObjective
from bert_jax.train.objectives.objective import (
    Counts,
    Likelihood,
    Objective,
    Term,
    Terms,
    extended_batch,
    means,
    total_loss,
)
from bert_jax.train.objectives.pretraining import OBJECTIVES, PhasedObjective, pretraining_objective
from bert_jax.train.objectives.replaced_tokens import ReplacedTokensObjective

__all__ = [
    "OBJECTIVES",
    "CausalLMObjective",
    "Counts",
    "DiffusionObjective",
    "DistilledMaskedLM",
    "DistilledObjective",
    "Likelihood",
    "MaskedLMObjective",
    "Objective",
    "PhasedObjective",
    "ReplacedTokensObjective",
    "Term",
    "Terms",
    "extended_batch",
    "means",
    "pretraining_objective",
    "total_loss",
]
