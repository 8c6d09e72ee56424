"""Learning-rate schedules as functions of the step and of the completed fraction of the run.

Because a schedule depends on the fraction, runs limited by minutes, tokens and steps share the same code.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bert_jax.config import OptimizerConfig
from bert_jax.errors import UserError


def learning_rate(config: OptimizerConfig, step: Int[Array, ""], fraction: Float[Array, ""]) -> Float[Array, ""]:
    """Returns the learning rate of a step: the peak times the smaller of a warmup ramp and a decaying schedule.

    `step` is the number of completed steps, and `fraction` the completed fraction of the run, from 0 to 1. The peak is
    config.learning_rate, and the schedule ends at config.final_share of it.

    With warmup_steps, the ramp is (step + 1) / warmup_steps and the schedule starts with the run, as in
    google-research/bert, optimization.py. Two details differ from that file, which replaces the schedule by the ramp
    during warmup and whose first step has rate 0: taking the minimum avoids a jump at the end of the ramp, and this
    ramp is one step ahead. With warmup_share, the ramp takes that share of the run and the schedule runs over the rest,
    as in fairseq (polynomial_decay) and transformers (get_linear_schedule_with_warmup).

    The schedules, where x is the completed share of the schedule:

      linear        1 - x
      cosine        (1 + cos(pi x)) / 2 (Loshchilov and Hutter 2017, equation 5, without restarts)
      wsd           1 until the last decay_share of the run, then 1 - sqrt(x), where x is the completed share of that
                    last part (Hu et al. 2024, section 4; decay shape of Haegele et al. 2024, section 3). Warmup does
                    not shift the decay.
      constant      1
      inverse_sqrt  sqrt(w / s) after s steps with w warmup steps, or the same with shares of the run for warmup_share
                    (Vaswani et al. 2017, section 5.3, whose peak is (d_model w)^-0.5). With warmup_steps it does not
                    depend on the length of the run. It decays towards final_share.
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
    highest = config.learning_rate
    return (highest * jnp.clip(jnp.minimum(ramp, level), 0.0, 1.0)).astype(jnp.float32)


INVERSE_SQRT = "inverse_sqrt"

# Each shape maps the completed share of the schedule to a level from 1 down to 0; inverse_sqrt takes the elapsed time
# in units of the warmup instead.
SHAPES: dict[str, Callable[[Float[Array, ""]], Float[Array, ""]]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
    "wsd": lambda done: 1.0 - jnp.sqrt(done),
    "constant": jnp.ones_like,
    INVERSE_SQRT: lambda done: done**-0.5,
}


def check_schedule(config: OptimizerConfig) -> None:
    """Raises UserError for an unknown schedule, a value outside its range or without effect, or conflicting warmups."""
    if config.schedule not in SHAPES:
        raise UserError(f"unknown optimizer.schedule {config.schedule!r}; choose from {', '.join(SHAPES)}")
    ranges = (
        ("learning_rate", config.learning_rate >= 0, "0 or more"),
        ("warmup_steps", config.warmup_steps >= 0, "0 or more"),
        ("warmup_share", 0 <= config.warmup_share < 1, "0 or a share below 1, such as 0.06"),
        ("decay_share", 0 < config.decay_share <= 1, "a share above 0 and up to 1, such as 0.1"),
        ("final_share", 0 <= config.final_share <= 1, "a share from 0 to 1"),
    )
    for name, fits, wanted in ranges:
        if not fits:
            raise UserError(f"optimizer.{name} is {getattr(config, name)}; use {wanted}")
    if config.decay_share != OptimizerConfig.decay_share and config.schedule != "wsd":
        raise UserError(
            f"optimizer.decay_share is {config.decay_share}, which is for optimizer.schedule=wsd, but the schedule is "
            f"{config.schedule}. Omit it"
        )
    if config.final_share > 0 and config.schedule == "constant":
        raise UserError(
            f"optimizer.final_share is {config.final_share}, but optimizer.schedule=constant ends at the peak rate. "
            "Set --config.optimizer.final_share=0, or another schedule"
        )
    if config.schedule == INVERSE_SQRT and config.warmup_share <= 0 and config.warmup_steps <= 0:
        raise UserError(
            "optimizer.schedule=inverse_sqrt decays relative to the length of the warmup, but no warmup is configured; "
            "set --config.optimizer.warmup_steps or --config.optimizer.warmup_share"
        )
    if config.warmup_share > 0 and config.warmup_steps > 0:
        raise UserError(
            f"optimizer.warmup_steps is {config.warmup_steps} and optimizer.warmup_share is {config.warmup_share}; "
            "only one of them can be used, so set the other to 0"
        )


def warmup_warning(config: OptimizerConfig, steps: int) -> str:
    """Returns a warning if a run of this many steps (0: unknown) ends within its warmup; otherwise an empty text."""
    if not 0 < steps < config.warmup_steps:
        return ""
    return (
        f"warning: optimizer.warmup_steps is {config.warmup_steps}, but the run has {steps} steps, so the learning "
        "rate never reaches its peak. Set --config.optimizer.warmup_steps to less, or to 0 with "
        "--config.optimizer.warmup_share=0.06"
    )


def with_token_shares(config: OptimizerConfig, tokens: float) -> OptimizerConfig:
    """Turns warmup_tokens and decay_tokens into shares of a run of `tokens` tokens (0: it ends by steps or minutes).

    A run that ends by tokens counts its completed fraction in tokens, so its schedule is one of shares. Raises
    UserError for token counts that do not fit the run or the schedule.
    """
    counts = {name: getattr(config, name) for name in ("warmup_tokens", "decay_tokens")}
    for name, count in counts.items():
        if not 0 <= count < float("inf"):
            raise UserError(f"optimizer.{name} is {count}; use a number of tokens, or 0 for none")
        if count and not tokens:
            raise UserError(
                f"optimizer.{name} is set, but the length of the run is not counted in tokens. Set "
                "--config.tokens=N --config.steps=0 (pretraining), or use shares: optimizer.warmup_share, decay_share"
            )
        if count > tokens:
            raise UserError(f"optimizer.{name} is {count:g}, more than the run has; use at most {tokens:g}")
    if config.warmup_tokens and (config.warmup_steps > 0 or config.warmup_share > 0):
        raise UserError(
            f"optimizer.warmup_tokens is {config.warmup_tokens:g}, but optimizer.warmup_steps is {config.warmup_steps} "
            f"and optimizer.warmup_share is {config.warmup_share}; only one of them can be used, so set the others to 0"
        )
    if config.decay_tokens and config.schedule != "wsd":
        raise UserError(
            f"optimizer.decay_tokens is the decay of optimizer.schedule=wsd, but the schedule is {config.schedule}"
        )
    changes = {name.replace("tokens", "share"): count / tokens for name, count in counts.items() if count}
    return dataclasses.replace(config, **changes)
