"""The learning rate: a function of the step and of the share of the run that is done.

So a run that is measured in minutes and one that is measured in steps go through the same code (law 4).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bert_jax.command import UserError
from bert_jax.config import OptimizerConfig


def learning_rate(
    config: OptimizerConfig, step: Int[Array, ""], fraction: Float[Array, ""], peak: Float[Array, ""] | None = None
) -> Float[Array, ""]:
    """The peak times the smaller of a ramp and a schedule, which ends at config.final_share of the peak.

    The peak is config.learning_rate unless one is given.
    With warmup_steps the ramp is (step + 1) / warmup_steps and the schedule runs from the run's beginning, as in
    google-research/bert, optimization.py. That one replaces the first steps by the ramp, which begins with a step at
    rate 0; the smaller of the two leaves no jump at the ramp's end, and this ramp begins a step further on. With
    warmup_share the ramp takes that share of the run, and the schedule runs over what is left, as in fairseq
    (polynomial_decay) and transformers (get_linear_schedule_with_warmup).

    linear    1 - x, x the share of the schedule that is done
    cosine    (1 + cos(pi x)) / 2 (Loshchilov and Hutter 2017, equation 5, without restarts)
    wsd       1 until the last decay_share of the run, then 1 - sqrt(x), x the share of that which is done (Hu et al.
              2024, section 4; the fall as of Haegele et al. 2024, section 3)
    constant  1
    inverse_sqrt  sqrt(w / s) after s steps, w of them of warmup, or after so many shares of the run (Vaswani et al.
              2017, section 5.3, whose peak is (d_model w)^-0.5): it depends on no end, and falls towards final_share
    """
    if config.warmup_share > 0:
        ramp = fraction / config.warmup_share
        done = jnp.clip((fraction - config.warmup_share) / (1.0 - config.warmup_share), 0.0, 1.0)
    else:
        ramp, done = (step + 1) / max(config.warmup_steps, 1), fraction
    if config.schedule == INVERSE_SQRT:
        done = jnp.maximum(ramp, 1.0)
    elif config.schedule == "wsd":
        done = jnp.clip((fraction - (1.0 - config.decay_share)) / config.decay_share, 0.0, 1.0)
    level = config.final_share + (1.0 - config.final_share) * SHAPES[config.schedule](done)
    highest = config.learning_rate if peak is None else peak
    return (highest * jnp.clip(jnp.minimum(ramp, level), 0.0, 1.0)).astype(jnp.float32)


INVERSE_SQRT = "inverse_sqrt"

# From 1 down to 0, by the share of the schedule that is done; inverse_sqrt by how often the warmup has gone by.
SHAPES: dict[str, Callable[[Float[Array, ""]], Float[Array, ""]]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
    "wsd": lambda done: 1.0 - jnp.sqrt(done),
    "constant": jnp.ones_like,
    INVERSE_SQRT: lambda done: done**-0.5,
}


def check_schedule(config: OptimizerConfig) -> None:
    """Raises UserError for a schedule that there is not, or a number out of its range."""
    if config.schedule not in SHAPES:
        raise UserError(f"optimizer.schedule is {config.schedule!r}; use {', '.join(SHAPES)}")
    ranges = (
        ("learning_rate", config.learning_rate >= 0, "0 or more"),
        ("warmup_steps", config.warmup_steps >= 0, "0 or more"),
        ("warmup_share", 0 <= config.warmup_share < 1, "0 or a share below 1, as 0.06"),
        ("decay_share", 0 < config.decay_share <= 1, "a share over 0 and up to 1, as 0.1"),
        ("final_share", 0 <= config.final_share <= 1, "a share from 0 to 1"),
    )
    for name, fits, wanted in ranges:
        if not fits:
            raise UserError(f"optimizer.{name} is {getattr(config, name)}; use {wanted}")
    if config.schedule == INVERSE_SQRT and config.warmup_share <= 0 and config.warmup_steps <= 0:
        raise UserError(
            "optimizer.schedule=inverse_sqrt falls by how often the warmup has gone by, and there is none; set "
            "--config.optimizer.warmup_steps, or warmup_share"
        )
    if config.warmup_share > 0 and config.warmup_steps > 0:
        raise UserError(
            f"optimizer.warmup_steps is {config.warmup_steps} and optimizer.warmup_share {config.warmup_share}; "
            "give one of them and set the other to 0"
        )
