"""Warnings about the size of a run: too few positions for each device, and many times the recipe's rows."""

from bert_jax.config import PretrainConfig
from bert_jax.data.schedules import batch_schedule

# Per parameter and step, a device computes 6 FLOPs for each position, and moves about 28 bytes for the update of Adam
# (float32 parameter, gradient and two moments) and 8 for the sum of gradients. With the peaks of a v5e chip (197
# TFLOP/s, 819 GB/s, 200 GB/s between chips), both together take as long as 2,400 positions; on an H100, 4,300.
FEW_POSITIONS = 2048
MANY_TIMES = 4  # a longer run than the recipe's may be meant; eight times was a batch size changed without its steps


def few_positions(rows: int, length: int, devices: int) -> str:
    """Returns a warning if devices have too few positions of a batch; else ""."""
    positions = rows * length / devices
    if devices == 1 or positions >= FEW_POSITIONS:
        return ""
    enough = max(rows * length // FEW_POSITIONS, 1)
    count = f"{enough} devices" if enough > 1 else "1 device"
    return (
        f"warning: {rows:,} rows of {length} positions are {positions:,.0f} positions for each of {devices} devices, "
        f"so most of a step is the update and the sum of gradients. Use at most {count}, or batches of at "
        f"least {-(-FEW_POSITIONS * devices // length):,} rows"
    )


def many_rows(config: PretrainConfig, recipe: PretrainConfig, name: str) -> str:
    """Returns a warning if a run reads many times the rows, or the tokens, of its recipe; else ""."""
    if config.tokens and recipe.tokens:
        ratio, key, value = config.tokens / recipe.tokens, "tokens", f"{recipe.tokens:g}"
    elif config.steps and recipe.steps:
        rows, usual = (_rows(each) for each in (config, recipe))
        ratio, key, value = rows / usual, "steps", f"{max(round(config.steps * usual / rows), 1)}"
    else:
        return ""
    if ratio < MANY_TIMES:
        return ""
    unit = "tokens" if key == "tokens" else "rows"
    return (
        f"warning: the run reads {ratio:.3g} times as many {unit} as the recipe {name}. For as many, set "
        f"--config.{key}={value}"
    )


def _rows(config: PretrainConfig) -> int:
    """Returns the rows that all steps read."""
    schedule = batch_schedule(config.batch_schedule, config.batch_size)
    ends = (*schedule.steps[1:], config.steps)
    pairs = zip(schedule.steps, ends, schedule.values, strict=True)
    return sum(rows * max(min(end, config.steps) - first, 0) for first, end, rows in pairs)
