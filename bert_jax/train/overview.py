"""What is about to be trained, as a table: path, shape, dtype, sharding, decay, whether it learns."""

from typing import Any

import jax
import numpy as np

from bert_jax.model import paths
from bert_jax.train import rules


def parameter_table(params: dict[str, Any], trainable: dict[str, Any] | None) -> list[str]:
    """Lines of text, one a parameter, and a total. params are arrays with shardings; trainable as rules.trainable."""
    factors = paths.flatten(trainable) if trainable is not None else {}
    rows = [("parameter", "shape", "dtype", "sharding", "decay", "learns")]
    for path, value in paths.flatten(params).items():
        shape = " x ".join(map(str, value.shape))
        decay = "yes" if rules.first_match(rules.WEIGHT_DECAY_RULES, path) else "no"
        rows.append((path, shape, str(value.dtype), _sharding(value), decay, _learns(factors.get(path))))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = sum(value.size for value in jax.tree.leaves(params))
    return [*lines, f"{total:,} parameters, {total * 4 / 1e6:,.1f} MB in float32"]


def _sharding(value: jax.Array) -> str:
    if value.sharding.is_fully_replicated:
        return "replicated"
    return str(getattr(value.sharding, "spec", value.sharding))


def _learns(factor: Any) -> str:
    if factor is None or np.all(factor):
        return "yes"
    return f"last {int(np.sum(factor))}" if np.any(factor) else "no"
