"""How parameters descend: a direction from gradients, a rate from the step, and the average of where they have been.

  chains      the Optax chain that a configuration names: gradients to the direction of descent, without a rate
  adam        Adam's moments, with and without the correction of their bias
  schedules   the rate: a function of the step and of the share of the run that is done (law 4)
  updates     parameters moved along the direction, each by a factor of its own
  averages    the moving average of parameters

Everything is a function of arrays, so it runs on any mesh: what is cut over devices is reduced by XLA.
"""

from bert_jax.train.optim.averages import check_decay, first_average, next_average
from bert_jax.train.optim.chains import build
from bert_jax.train.optim.schedules import learning_rate
from bert_jax.train.optim.updates import apply_updates

__all__ = ["apply_updates", "build", "check_decay", "first_average", "learning_rate", "next_average"]
