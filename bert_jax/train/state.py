"""What training carries from step to step, and nothing else: no key, no clock, no data position."""

from typing import Any, NamedTuple

from jaxtyping import Array, Int


class TrainState(NamedTuple):
    """Parameters, optimizer state and step count. Data and randomness follow from the step (law 1)."""

    step: Int[Array, ""]
    params: dict[str, Any]  # nested by module: {"encoder": {"layers": ...}}; float32
    optimizer_state: Any
    average: dict[str, Any] | None  # moving average of the parameters; None: not kept (optimizer.ema_decay 0)
    skipped: Int[Array, ""]  # steps that made no update because their loss or gradient was not finite
