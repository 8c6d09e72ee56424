"""Optimizers: the direction from the gradients, the learning rate from the step, and the average of the parameters.

  chains      the Optax chain that a configuration names, from gradients to the direction of descent, without a rate
  adam        Adam's moments, with and without bias correction
  trust       updates scaled by their tensor: LAMB, StableAdamW
  muon        orthogonalized momentum
  tensors     which axes of an array count tensors (layers; queries, keys, values) and which belong to a tensor
  factors     the factor of the learning rate and the weight decay of each parameter
  schedules   the learning rate: a function of the step and of the fraction of the run that is done (law 4)
  updates     the update of the parameters along the direction
  averages    the moving average of the parameters

Everything is a function of arrays, so it runs on any mesh: XLA reduces what is sharded over devices.
"""

from bert_jax.train.optim.averages import first_average, next_average
from bert_jax.train.optim.chains import OPTIMIZERS, add_decay, build
from bert_jax.train.optim.factors import Unfreezing, decays, factors_at, rate_factors, without_frozen
from bert_jax.train.optim.schedules import learning_rate
from bert_jax.train.optim.updates import apply_updates

__all__ = [
    "OPTIMIZERS",
    "Unfreezing",
    "add_decay",
    "apply_updates",
    "build",
    "decays",
    "factors_at",
    "first_average",
    "learning_rate",
    "next_average",
    "rate_factors",
    "without_frozen",
]
