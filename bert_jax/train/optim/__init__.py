"""How parameters descend: a direction from gradients, a rate from the step, and the average of where they have been.

  chains      the Optax chain that a configuration names: gradients to the direction of descent, without a rate
  adam        Adam's moments, with and without the correction of their bias
  trust       updates measured by their tensor: LAMB, StableAdamW
  muon        momentum made orthogonal
  tensors     which axes of an array count tensors (layers; queries, keys, values) and which are a tensor's own
  factors     what each parameter has of its own: a factor of the rate, a weight decay
  schedules   the rate: a function of the step and of the share of the run that is done (law 4)
  updates     parameters moved along the direction
  averages    the moving average of parameters

Everything is a function of arrays, so it runs on any mesh: what is cut over devices is reduced by XLA.
"""

from bert_jax.train.optim.averages import first_average, next_average
from bert_jax.train.optim.chains import build
from bert_jax.train.optim.factors import Unfreezing, decays, factors_at, rate_factors, without_frozen
from bert_jax.train.optim.schedules import learning_rate
from bert_jax.train.optim.updates import apply_updates

__all__ = [
    "Unfreezing",
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
