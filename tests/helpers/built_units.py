"""Counts the units that jobs build in this process."""

from typing import Any

import pytest

from data_prep import worker
from data_prep.job import UnitRecord


def built_units(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets the name of every unit that is built."""
    names: list[str] = []
    original = worker.build_unit

    def counted(*arguments: Any) -> UnitRecord:
        names.append(arguments[-1].name)
        return original(*arguments)

    monkeypatch.setattr(worker, "build_unit", counted)
    return names
