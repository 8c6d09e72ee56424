"""How much of a run is done: by steps, tokens or minutes, or by the log of an earlier run."""

import dataclasses
import itertools
import json
import time

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import AdamW, PretrainConfig, TrainConfig, WSDSchedule
from bert_jax.data.mixture import Mixture
from bert_jax.data.phases import Phase, PhasedLoader
from bert_jax.data.schedules import batch_schedule
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.train import distributed, optim
from bert_jax.train.clock import Clock, TokenLength, make_clock, read_fractions


def test_by_steps_the_fraction_is_exact():
    clock = Clock(steps=8, budget_minutes=0.0, log_every=100)
    assert [clock.read(step) for step in range(9)] == [step / 8 for step in range(9)]


def test_by_minutes_it_ends_on_time_and_stands_still_between_refreshes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock(steps=0, budget_minutes=12.0 / 60, log_every=1000)
    seen, step = [], 0
    while clock.read(step) < 1:
        seen.append((clock.fraction, clock.refreshed))
        step += 1
        now[0] += 0.03125
    assert 12.0 <= now[0] < 12.0 * 1.01 + 0.04
    changes = [later[1] for earlier, later in itertools.pairwise(seen) if later[0] != earlier[0]]
    assert changes and all(changes)
    assert seen[0] == (0.0, False)


def test_whichever_ends_first_ends_the_run():
    clock = Clock(steps=3, budget_minutes=60.0, log_every=1000)
    assert [clock.read(step) >= 1 for step in range(4)] == [False, False, False, True]


def test_the_record_of_a_run_is_followed(tmp_path):
    log = tmp_path / "metrics.jsonl"
    lines = [{"step": 2, "budget_fraction": 0.5}, {"step": 5, "budget_fraction": 1.0}]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    clock = Clock(steps=0, budget_minutes=9.0, log_every=1, replay=str(log))
    assert [clock.read(step) for step in range(6)] == [0, 0, 0.5, 0.5, 0.5, 1.0]
    sooner = Clock(steps=3, budget_minutes=9.0, log_every=1, replay=str(tmp_path))  # the workdir
    assert [sooner.read(step) for step in range(4)] == [0, 0, 0.5, 1.0] and sooner.refreshed


def test_the_log_of_a_run_in_a_store_is_read_from_its_segments(tmp_path):
    fractions = {2: 0.5, 8: 1.0}
    (tmp_path / "metrics").mkdir()
    lines = [json.dumps({"step": step, "budget_fraction": value}) for step, value in fractions.items()]
    (tmp_path / "metrics" / "000001-000000.jsonl").write_text("\n".join(lines) + "\n")
    assert read_fractions(str(tmp_path / "metrics.jsonl")) == fractions


def test_more_minutes_count_from_the_current_step_and_an_ended_run_continues():
    minutes = {"elapsed": 48.0, "start": 7, "fraction": 0.8}  # 48 of 60 seconds
    clock = Clock(steps=0, budget_minutes=4.0, log_every=1, **minutes)
    assert clock.read(7) == 0.8  # as the log has it
    assert clock.read(8) == pytest.approx(0.2, abs=0.01)
    ended = Clock(steps=0, budget_minutes=4.0, log_every=1, elapsed=60.0, start=9, fraction=1.0)
    assert ended.read(9) == pytest.approx(0.25, abs=0.01)
    assert Clock(steps=0, budget_minutes=1.0, log_every=1, elapsed=60.0, start=9, fraction=1.0).read(9) == 1.0
    # Also between two lines of the log, and soon after the start of a long budget.
    assert Clock(steps=20, budget_minutes=60.0, log_every=50, elapsed=5.0, start=10, fraction=1.0).read(10) == 0.5


def test_a_run_whose_end_has_changed_reads_the_clock_at_its_first_step():
    minutes = {"elapsed": 600.0, "start": 900, "fraction": 0.9, "changed": True}
    clock = Clock(steps=0, budget_minutes=60.0, log_every=50, **minutes)
    assert [(round(clock.read(step), 3), clock.refreshed) for step in (900, 901)] == [(0.167, True), (0.167, False)]
    assert Clock(steps=0, budget_minutes=5.0, log_every=50, **minutes).read(900) == 1.0
    meta = {"step": 900, "seconds": 600.0, "budget_fraction": 0.9}
    for steps, fraction in ((0, 0.9), (2000, 1 / 6)):
        there = {"configuration": {"steps": steps, "budget_minutes": 60.0, "budget_replay": ""}}
        config = TrainConfig(budget_minutes=60.0)
        assert make_clock(config, meta | {"provenance": there}).read(900) == pytest.approx(fraction, abs=1e-3)


def test_a_record_that_a_run_begins_to_follow_gives_its_first_fraction_too(tmp_path):
    log = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "budget_fraction": value} for step, value in ((2, 0.25), (6, 0.75), (8, 1.0))]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for start, found in ((1, [0.9, 0.25]), (4, [0.25, 0.25]), (6, [0.75, 0.75])):
        clock = Clock(0, 9.0, 100, start=start, fraction=0.9, replay=str(log), changed=True)
        assert [clock.read(step) for step in (start, start + 1)] == found
    with pytest.raises(UserError, match="begins after step 1, at which the run before it had ended"):
        Clock(0, 9.0, 100, start=1, fraction=1.0, replay=str(log), changed=True)
    same = Clock(0, 9.0, 100, start=4, fraction=0.25, replay=str(log))
    assert same.read(4) == 0.25 and not same.refreshed


def test_the_time_left_counts_from_the_first_step_which_compiles(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock(steps=100, budget_minutes=0.0, log_every=10)
    clock.read(0)
    now[0] += 300  # compiling
    clock.start_estimate()
    assert clock.remaining is None
    now[0] += 20
    clock.read(10)
    assert clock.remaining == pytest.approx(180)
    resumed = Clock(steps=100, budget_minutes=0.0, log_every=10, start=50, fraction=0.5, elapsed=9000.0)
    resumed.read(50)
    resumed.start_estimate()
    now[0] += 4
    resumed.read(60)
    assert resumed.remaining == pytest.approx(16)  # the pace before the restart does not count
    budget = Clock(steps=0, budget_minutes=10.0, log_every=10)
    now[0] += 150
    budget.read(10)
    assert budget.remaining == pytest.approx(450)
    either = Clock(steps=1000, budget_minutes=10.0, log_every=10)  # it ends by what comes first
    either.read(0)
    now[0] += 60
    either.start_estimate()
    for seconds, step, left in ((1, 1, 539), (9, 100, 90)):
        now[0] += seconds
        either.read(step)
        assert either.remaining == pytest.approx(left)


def test_several_processes_refresh_by_what_process_0_sent_a_step_before(monkeypatch):
    """Their own clocks, which differ, decide nothing: here 30 of 60 seconds have passed by process 0's clock."""
    sent = []

    def send_from_primary(seconds):
        sent.append(seconds)
        return np.float32(30)

    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr(distributed, "send_from_primary", send_from_primary)
    clock = Clock(steps=12, budget_minutes=1.0, log_every=5, elapsed=6.0)
    seen = [(clock.read(step), clock.refreshed, len(sent)) for step in range(7)]
    assert seen == [(0, False, 0)] * 4 + [(0, False, 1), (0.5, True, 1), (0.5, False, 1)]
    assert clock.agreed == 30 and sent[0] == pytest.approx(6.0, abs=1.0)
    assert clock.read(12) == 1.0  # the last step needs no clock


def test_several_processes_read_the_clock_of_the_checkpoint_if_the_run_had_ended_or_its_end_has_changed(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    clock = Clock(0, 60.0, 50, start=901, fraction=0.9, elapsed=600.0, changed=True)
    assert [clock.read(step) for step in (901, 902)] == pytest.approx([1 / 6, 1 / 6])
    assert Clock(0, 4.0, 50, elapsed=60.0, start=9, fraction=1.0).read(9) == 0.25


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (None, "no log in"),
        ('{"step": 1, "loss": 2.0}\n', "contains no budget_fraction"),
        ('{"step": 1, "budget_fraction": 0.5}\n{"step": 2, "budg', "ends at step 1 with 50% of its budget"),
    ],
    ids=["missing", "no fractions", "unfinished, with a torn last line"],
)
def test_a_log_that_gives_no_end_is_refused(tmp_path, log, message):
    if log is not None:
        (tmp_path / "metrics.jsonl").write_text(log)
    with pytest.raises(UserError, match=message):
        read_fractions(str(tmp_path / "metrics.jsonl"))


# Runs whose length, warmup and decay are counted in tokens.


@pytest.fixture(scope="module")
def parts(shards_dir):
    return [open_dataset(shards_dir, part) for part in ("train", "eval")]


def loader_of(parts, starts, schedule: dict[int, int]) -> PhasedLoader:
    phases = [Phase(first, Mixture.single(parts[number % 2])) for number, first in enumerate(starts)]
    return PhasedLoader(phases, parts[0].vocabulary(), batches=batch_schedule(schedule, 0), seed=3)


def mean_tokens(dataset) -> float:
    return float(dataset.gather(np.arange(dataset.rows)).sequence_lengths.sum()) / dataset.rows


def test_tokens_before_a_step_are_those_of_its_rows_on_average(parts):
    """Compares with a sum over steps, with means that are counted in the shards, not read from the manifest."""
    starts, schedule = (0, 6, 13, 19), {0: 3, 4: 24, 11: 15}
    loader, rows = loader_of(parts, starts, schedule), batch_schedule(schedule, 0)
    total, means = 0.0, [mean_tokens(part) for part in parts]
    for step in range(40):
        assert loader.tokens_before(step) == pytest.approx(total, rel=1e-12)
        total += rows.at(step) * means[sum(first <= step for first in starts[1:]) % 2]


def test_after_whole_epochs_the_count_is_what_was_read(parts):
    train = parts[0]
    loader = loader_of(parts[:1], (0,), {0: train.rows})
    read = sum(int((loader.batch(step).sequence_ids > 0).sum()) for step in range(3))
    assert loader.tokens_before(3) == read


@hypothesis.given(
    st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(lambda counts: counts[-1] > 0), st.floats(0.5, 3000)
)
def test_the_steps_of_a_length_are_the_first_that_read_it(counts, tokens):
    def before(step: int) -> float:  # after the listed steps, each reads as many as the last
        return float(sum(counts[:step]) + max(0, step - len(counts)) * counts[-1])

    length = TokenLength(tokens, before)
    steps = next(step for step in range(1, 10_000) if before(step) >= tokens)
    assert length.steps == steps
    clock = Clock(steps=0, budget_minutes=0.0, log_every=100, length=length)
    fractions = [clock.read(step) for step in range(steps + 1)]
    assert fractions == [min(1.0, before(step) / tokens) for step in range(steps + 1)]
    assert fractions[-1] == 1.0 > fractions[-2]


def test_warmup_and_decay_are_counted_in_tokens_while_the_batch_grows():
    def before(step: int) -> int:
        return sum(64 if s < 40 else 256 for s in range(step))

    total, warmup, decay, final = before(100), 1_000, 5_000, 0.1
    written = AdamW(
        learning_rate=2.0, schedule=WSDSchedule(warmup_steps=0, warmup_tokens=1e3, decay_tokens=5e3, final_share=final)
    )
    config = optim.with_token_shares(written, float(total))
    length = TokenLength(float(total), lambda step: float(before(step)))
    for step in range(length.steps + 1):
        tokens = before(step)
        level = final + (1 - final) * (1 - np.sqrt(max(0, tokens - (total - decay)) / decay))
        rate = optim.learning_rate(config, jnp.int32(step), jnp.float32(length.share(step)))
        np.testing.assert_allclose(rate, 2.0 * min(1.0, tokens / warmup, level), rtol=1e-4, atol=1e-5)
    shares = WSDSchedule(0, 1_000 / total, 0.0, final, 5_000 / total, 0.0)
    assert config == dataclasses.replace(written, schedule=shares)


def test_without_tokens_the_optimizer_and_its_program_are_as_written():
    config = AdamW(schedule=WSDSchedule(warmup_steps=3))
    assert optim.with_token_shares(config, 0.0) == config

    def program(config):
        return str(jax.make_jaxpr(lambda step, done: optim.learning_rate(config, step, done))(3, 0.5))

    assert program(optim.with_token_shares(config, 100.0)) == program(config)


@pytest.mark.parametrize(
    ("changes", "tokens", "said"),
    [
        ({"decay_tokens": 5.0}, 0.0, r"optimizer\.schedule\.decay_tokens is set, .*--config\.tokens=N"),
        ({"decay_tokens": 11.0}, 10.0, r"decay_tokens is 11, more than the run has; use at most 10"),
        ({"warmup_tokens": -1.0}, 10.0, r"optimizer\.schedule\.warmup_tokens is -1\.0"),
        ({"warmup_tokens": float("nan")}, 10.0, r"optimizer\.schedule\.warmup_tokens is nan"),
        ({"warmup_steps": 5, "warmup_tokens": 1.0}, 10.0, r"only one of them can be used"),
    ],
)
def test_token_counts_that_do_not_fit_are_refused(changes, tokens, said):
    with pytest.raises(UserError, match=said):
        optim.with_token_shares(AdamW(schedule=WSDSchedule(**{"warmup_steps": 0} | changes)), tokens)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": 1e6}, r"config\.tokens is 1e\+06, but config\.steps is 1000000, too; .*--config\.steps=0"),
        ({"tokens": 1e6, "steps": 0, "budget_minutes": 3.0}, r"--config\.budget_minutes=0"),
        ({"tokens": -1.0, "steps": 0}, r"config\.tokens is -1\.0"),
        ({"tokens": float("inf"), "steps": 0}, r"config\.tokens is inf"),
    ],
)
def test_a_run_has_one_length(changes, said):
    with pytest.raises(UserError, match=said):
        PretrainConfig(**changes)
