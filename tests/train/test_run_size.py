"""Tests the warnings about the size of a run, and where they are printed."""

import dataclasses

import pytest

from bert_jax.config import PretrainConfig, from_flags
from bert_jax.train.run_size import few_positions, many_rows


@pytest.mark.parametrize(
    ("rows", "length", "devices", "warned"),
    [
        (256, 128, 256, True),  # 128 positions for each device
        (256, 128, 16, False),  # 2,048
        (256, 128, 17, True),
        (4, 16, 1, False),  # one device has nothing to share
        (2048, 512, 256, False),
    ],
)
def test_few_positions_for_each_device_are_named(rows: int, length: int, devices: int, warned: bool):
    line = few_positions(rows, length, devices)
    assert bool(line) == warned and "\n" not in line


def test_the_advice_for_few_positions_is_not_warned_about():
    assert "Use at most 16 devices, or batches of at least 4,096 rows" in few_positions(256, 128, 256)
    assert not few_positions(256, 128, 16) and not few_positions(4096, 128, 256)


BASE = from_flags(PretrainConfig, "bert_base")


@pytest.mark.parametrize(
    ("changes", "ratio"),
    [
        ({}, ""),
        ({"batch_size": 2048}, "8 times as many rows as the recipe bert_base. For as many, set --config.steps=125000"),
        ({"batch_size": 2048, "steps": 125_000}, ""),
        ({"batch_size": 512}, ""),
        ({"steps": 4_000_000}, "4 times as many rows"),
        # 10,000 steps of 256 and 990,000 of 2,048 rows
        ({"batch_schedule": {0: 256, 10_000: 2048}}, "7.93 times as many rows"),
        ({"steps": 0, "budget_minutes": 5.0, "batch_size": 2048}, ""),  # unknown
        ({"steps": 0, "tokens": 5e13}, ""),  # the recipe counts steps
    ],
)
def test_many_times_the_rows_of_the_recipe_are_named(changes: dict, ratio: str):
    line = many_rows(dataclasses.replace(BASE, **changes), BASE, "bert_base")
    assert (ratio in line) if ratio else line == ""


def test_many_times_the_tokens_of_the_recipe_are_named():
    recipe = dataclasses.replace(BASE, steps=0, tokens=1e9)
    assert not many_rows(dataclasses.replace(recipe, tokens=3e9), recipe, "own")
    line = many_rows(dataclasses.replace(recipe, tokens=1e10), recipe, "own")
    assert "10 times as many tokens as the recipe own. For as many, set --config.tokens=1e+09" in line
