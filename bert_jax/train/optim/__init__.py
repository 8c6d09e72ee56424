"""Optimizers, learning-rate schedules and the moving average of the parameters.

  chains      the Optax chain for config.optimizer, from gradients to an unscaled update direction; learning-rate
              factors and weight decays; the update; the moving average of the parameters; the learning rate as a
              function of the step and of the completed fraction of the run
  directions  the directions: Adam, LAMB's trust ratio, StableAdamW, and Muon

All are pure functions of arrays and work on any mesh: XLA inserts the reductions over sharded axes.
"""

from bert_jax.train.optim.chains import (
    OPTIMIZERS,
    add_decay,
    apply_updates,
    build,
    decays,
    first_average,
    learning_rate,
    next_average,
    overrides_weight_decay,
    rate_factors,
    warmup_warning,
    weight_decay_warning,
    with_token_shares,
)

__all__ = [
    "OPTIMIZERS",
    "add_decay",
    "apply_updates",
    "build",
    "decays",
    "first_average",
    "learning_rate",
    "next_average",
    "overrides_weight_decay",
    "rate_factors",
    "warmup_warning",
    "weight_decay_warning",
    "with_token_shares",
]
