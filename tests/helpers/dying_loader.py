"""A loader of training batches that ends its run at a step, as a killed process does."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from streamed_outputs import assert_same_parameters

from bert_jax import pretraining
from bert_jax.data.example import Batch
from bert_jax.data.phases import PhasedLoader


class Killed(Exception):
    """Simulates the end of the process."""


class DyingLoader(PhasedLoader):
    """Raises Killed where the batch of step `end` is loaded. Set it for PhasedLoader in bert_jax.pretraining."""

    end = -1

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> Batch:
        one_row = isinstance(rows, slice) and rows == slice(0, 1)
        if step == self.end and not one_row:  # start-up reads one row for the shapes of later batches
            raise Killed
        return super().batch(step, rows)


def assert_equal_after_kills(
    train: Callable[[str], dict], ends: Sequence[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict:
    """Trains whole, then killed at the steps `ends`: equal in bits. Returns the result of the whole run.

    `train` pretrains in a workdir of this name in `folder`, and returns its result.
    """
    monkeypatch.setattr(pretraining, "PhasedLoader", DyingLoader)
    whole = train("whole")
    for end in ends:
        monkeypatch.setattr(DyingLoader, "end", end)
        with pytest.raises(Killed):
            train("killed")
    monkeypatch.setattr(DyingLoader, "end", -1)
    assert {**train("killed"), "seconds": 0} == {**whole, "seconds": 0}
    assert_same_parameters(folder / "whole", folder / "killed")
    return whole
