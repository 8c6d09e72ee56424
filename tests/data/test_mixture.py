"""Mixtures: their text, the shares of rows, and sources that are read as a run on each alone reads them."""

import contextlib
import dataclasses
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streamed_outputs import assert_equal_after_kills, assert_rows_equal, edited, joined, picked, texts
from tiny_runs import RECIPE, TINY

from bert_jax.commands import pretrain
from bert_jax.config import CheckpointConfig, PretrainConfig, PretrainDataConfig
from bert_jax.data.example import Batch
from bert_jax.data.mixture import LaneShares, Mixture, MixtureSpec, NamedFolder, RowShares, read_mixture
from bert_jax.data.phases import PhasedLoader, open_held_out, open_phases
from bert_jax.data.schedules import batch_schedule
from bert_jax.data.shards import Dataset, open_dataset
from bert_jax.errors import UserError
from bert_jax.planning.compile import RowSpec
from bert_jax.train import metrics, orbax_io
from data_prep.build import build
from data_prep.build_options import BuildOptions

NAMES = ("large", "middle", "small")
STEPS = 36


@pytest.fixture(scope="module")
def folders(sample_text, vocab_dir, tmp_path_factory) -> dict[str, Path]:
    """Shards of the paragraphs of seven, three and two chapters, of 32 positions."""
    chapters = sample_text.read_text(encoding="utf-8").split("\n\n")
    made = {}
    for name, part in zip(NAMES, (slice(0, 7), slice(7, 10), slice(10, 12)), strict=True):
        directory = tmp_path_factory.mktemp(name)
        paragraphs = "\n".join(chapters[part]).split("\n")
        documents = ["\n".join(paragraphs[first : first + 4]) for first in range(0, len(paragraphs), 4)]
        (directory / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
        options = BuildOptions(
            str(directory / "text.txt"), vocab_dir, directory / "shards", 32, objective="nsp", eval_fraction=0.3
        )
        build(dataclasses.replace(options, workers=1))
        made[name] = directory / "shards"
    return made


def sources(folders: dict[str, Path], **shares: tuple[str, float]) -> dict[str, tuple[str, float]]:
    """The mixture of folders with these names and shares."""
    return {name: (str(folders[folder]), share) for name, (folder, share) in shares.items()}


def three(folders: dict[str, Path], one: float = 0.5, two: float = 0.3) -> dict[str, tuple[str, float]]:
    return sources(folders, one=("large", one), two=("middle", two), three=("small", 0.2))


def later_phases(folders: dict[str, Path]) -> dict[int, object]:
    """They read the sources in other shares and under other names, alone, and again in a mixture."""
    return {
        6: sources(folders, uno=("middle", 1.0), due=("large", 1.0)),
        13: str(folders["small"]),
        19: sources(folders, one=("large", 0.25), three=("small", 0.75)),
    }


def loader_of(mixture: dict, phases: dict | None = None, schedule: dict[int, int] | None = None) -> PhasedLoader:
    opened = open_phases(PretrainDataConfig(mixture=mixture, phases=phases or {}))
    schedule = schedule or {0: 16}
    vocabulary = opened[0].mixture.dataset.vocabulary()
    return PhasedLoader(opened, vocabulary, batches=batch_schedule(schedule, 0), seed=3)


RAMP = {0: 5, 4: 75, 11: 50}


def alone(dataset: Dataset, rows: int) -> Batch:
    """The first rows that a run on one data set reads."""
    return PhasedLoader.single(dataset, dataset.vocabulary(), batch_size=rows, seed=3).batch(0)


@pytest.fixture(scope="module")
def owners(folders) -> dict[bytes, str]:
    """The source of each row by its text."""
    datasets = {name: open_dataset(folder, "train") for name, folder in folders.items()}
    found = {text: name for name, each in datasets.items() for text in texts(alone(each, each.rows))}
    assert len(found) == sum(each.rows for each in datasets.values()), "two rows have the same text"
    return found


def test_each_source_is_read_as_a_run_on_it_alone_reads_it(folders, owners):
    """Across batch sizes and phases; rows are assigned to sources by their text."""
    loader = loader_of(three(folders), later_phases(folders), RAMP)
    everything = joined([loader.batch(step) for step in range(STEPS)])
    read = texts(everything)
    for name, folder in folders.items():
        dataset = open_dataset(folder, "train")
        mine = [row for row, text in enumerate(read) if owners[text] == name]
        assert len(mine) > dataset.rows, "no epoch ends within the test"
        assert_rows_equal(picked(everything, mine), alone(dataset, len(mine)))
        for epoch in range(len(mine) // dataset.rows):
            epoch_texts = {read[row] for row in mine[epoch * dataset.rows : (epoch + 1) * dataset.rows]}
            assert len(epoch_texts) == dataset.rows, f"epoch {epoch} repeats a row"


def test_a_restart_at_any_step_and_any_part_of_a_batch_read_the_same_rows(folders):
    whole = loader_of(three(folders), later_phases(folders), RAMP)
    batches = [whole.batch(step) for step in range(STEPS)]
    for start in (0, 5, 12, 18):
        again = loader_of(three(folders), later_phases(folders), RAMP)
        for step in range(start, start + 2):
            assert_rows_equal(again.batch(step), batches[step])
            assert not again.batch(step).input_ids.flags.writeable
            parts = [again.batch(step, slice(first, None, 3)) for first in range(3)]  # as three processes read it
            for first, part in enumerate(parts):
                assert_rows_equal(part, picked(batches[step], [*range(first, len(batches[step].input_ids), 3)]))
    assert len(whole.batch(0, slice(0, 0)).input_ids) == 0


def test_every_batch_has_the_shares_and_neither_order_nor_names_change_it(folders, owners):
    loader = loader_of(three(folders), schedule={0: 20})
    for step in range(12):
        found = [owners[text] for text in texts(loader.batch(step))]
        assert [found.count(name) for name in NAMES] == [10, 6, 4]
    other = loader_of(sources(folders, c=("small", 2.0), a=("large", 5.0), b=("middle", 3.0)), schedule={0: 20})
    assert_rows_equal(other.batch(7), loader.batch(7))


def test_alpha_raises_the_numbers_of_tokens_to_a_power(folders):
    opened = [open_dataset(folder, "train") for folder in folders.values()]
    tokens = np.array([each.gather(np.arange(each.rows)).sequence_lengths.sum(dtype=np.int64) for each in opened])
    for alpha in (0.0, 0.3, 1.0):
        by_tokens = {name: str(folder) for name, folder in folders.items()}
        mixture = Mixture.of(read_mixture(by_tokens, "data.mixture", alpha), opened, "data.mixture")
        found = dict(zip((one.name for one in mixture.sources), mixture.shares.fractions, strict=True))
        wanted = tokens**alpha / (tokens**alpha).sum()
        np.testing.assert_allclose([found[name] for name in NAMES], wanted, atol=1e-7)


def test_epochs_and_tokens_before_a_step_count_the_rows_of_all_phases(folders, owners):
    loader = loader_of(three(folders), later_phases(folders), RAMP)
    datasets = {name: open_dataset(folder, "train") for name, folder in folders.items()}
    named = (
        {"one": "large", "two": "middle", "three": "small"},
        {"uno": "middle", "due": "large"},
        {},
        {"one": "large", "three": "small"},
    )
    read, tokens = dict.fromkeys(NAMES, 0), 0.0
    for step in range(STEPS):
        names = named[loader.phase(max(step - 1, 0))]
        epochs = {shown: read[name] / datasets[name].rows for shown, name in names.items()}
        assert loader.epochs_before(step) == pytest.approx(epochs)
        assert loader.tokens_before(step) == pytest.approx(tokens)
        for text in texts(loader.batch(step)):
            read[owners[text]] += 1
            counts = datasets[owners[text]].manifest["parts"]["train"]
            tokens += counts["tokens"] / counts["rows"]


def test_the_start_of_a_run_reports_shares_and_the_epochs_that_it_will_read(folders):
    mixed = sources(folders, a=("large", 1.0), b=("small", 3.0))
    loader = loader_of(three(folders), {10: str(folders["small"]), 20: mixed}, {0: 20})
    rows = {name: open_dataset(folder, "train").rows for name, folder in folders.items()}
    first, last = loader.describe_mixtures(30)
    assert first == (
        f"data.mixture, shares of the rows, and epochs until step 10: one 50.00% ({100 / rows['large']:.2f} epochs), "
        f"two 30.00% ({60 / rows['middle']:.2f} epochs), three 20.00% ({40 / rows['small']:.2f} epochs)"
    )
    assert last.startswith("data.phases.20, shares of the rows, and epochs until step 30: b 75.00%")
    assert f"b 75.00% ({(40 + 200 + 150) / rows['small']:.2f} epochs)" in last
    assert loader.describe_mixtures()[1] == "data.phases.20, shares of the rows: b 75.00%, a 25.00%"
    assert [line.partition(",")[0] for line in loader.describe_mixtures(5)] == ["data.mixture"]


def test_epochs_count_from_the_step_at_which_the_data_changed(folders):
    mixed = sources(folders, a=("large", 1.0), b=("small", 3.0))
    loader = loader_of(three(folders), {10: str(folders["small"]), 20: mixed}, {0: 20})
    small = open_dataset(folders["small"], "train").rows
    assert loader.epochs_before(10, 5)["three"] == pytest.approx(20 / small)
    assert loader.epochs_before(30, 5)["b"] == pytest.approx((20 + 200 + 150) / small)
    assert loader.epochs_before(30, 25)["b"] == pytest.approx(75 / small)
    [line] = loader.describe_mixtures(30, 10)  # the first phase is over
    assert line.startswith("data.phases.20, shares of the rows, and epochs from step 10 until step 30: b 75.00%")
    assert f"b 75.00% ({(200 + 150) / small:.2f} epochs)" in line


def test_a_plan_of_a_mixture_has_the_rows_of_its_sources(folders):
    mixed = PretrainConfig(data=PretrainDataConfig(mixture=three(folders), phases={9: "nowhere"}))
    single = PretrainConfig(data=PretrainDataConfig(train=str(folders["small"])))
    rows = RowSpec.of(mixed, None, None)
    counts = [open_dataset(folders[name], "train").manifest["parts"]["train"] for name in ("large", "middle", "small")]
    filled = np.average([one["tokens"] / one["rows"] / 32 for one in counts], weights=(0.5, 0.3, 0.2))
    assert rows.filled == pytest.approx(filled) and 0 < filled < 1
    assert rows == dataclasses.replace(RowSpec.of(single, None, None), filled=rows.filled)
    with pytest.raises(UserError, match=r"--seq_len is 64, but .* has 32 positions in a row"):
        RowSpec.of(mixed, 64, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seq_len": 64}, r"two \(.*\) has --seq_len 64, but one \(.*\) has 32\. Build .* with the same --seq_len"),
        ({"objective": "sop"}, r"two \(.*\) has --objective sop, but one \(.*\) has nsp"),
        ({"tokenizer": {"hash": "0" * 64}}, r"two \(.*\) has the tokenizer 0{12}, but one"),
        ({"pack": 4}, r"two \(.*\) has --pack 4, but one \(.*\) has 1"),
        ({"masking": {"kind": "static"}}, r"two \(.*\) has --masking static, but one \(.*\) has dynamic"),
        ({"masking": {"rate": 0.3}}, r"has the masking rule .*rate 0\.3, .* but one .* with the same options of mask"),
        ({"masking": {"max_predictions": 9}}, r"has a maximum of predictions per row of 9, but one \(.*\) has "),
        ({}, r"data\.mixture names the same rows twice, as one and two \(.*\)\. Name them once"),
    ],
)
def test_sources_that_do_not_fit_into_one_batch_are_refused_in_one_line(folders, tmp_path, changes, said):
    other = edited(folders["large"], tmp_path / "other", **changes)
    flags = [f"--config={RECIPE}", f"--workdir={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=said) as caught:
        mixture = {"one": (str(folders["large"]), 0.5), "two": (str(other), 0.5)}
        pretrain.main([*flags, f"--config.data.mixture={mixture}"])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_sources_mix_whether_or_not_their_text_has_scripts_without_spaces(folders, tmp_path):
    marked = edited(folders["large"], tmp_path / "marked", masking={"unit": "word", "words": "scripts"})
    plain = edited(folders["small"], tmp_path / "plain", masking={"unit": "word"})
    tokens = [edited(one, tmp_path / one.name.upper(), masking={"unit": "token"}) for one in (marked, plain)]
    for one, two in ((marked, plain), tokens):
        [phase] = open_phases(PretrainDataConfig(mixture={"a": (str(one), 0.5), "b": (str(two), 0.5)}))
        assert len(phase.mixture.sources) == 2


BEST = "--config.checkpoint.best"
OTHER_TWO = "{{9: {{one: ('{large}', 1.0), two: ('{small}', 1.0)}}}}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--config.data.train={small}"], r"data\.train is .* and data\.mixture is .*; leave out one of them"),
        (
            ["--config.data.phases={{9: {{a: ('{large}', 1.0), b: '{middle}'}}}}"],
            r"phases\.9 has shares, but none for b",
        ),
        (["--config.data.phases={{9: {{a: ('{large}', 1.0), b: ('/nowhere', 1.0)}}}}"], "/nowhere"),
        (
            [f"{BEST}=eval_two/loss", "--config.data.phases={{9: '{small}'}}"],
            r"best=eval_two/loss compares .* but phases have different held-out rows",
        ),
        (
            [f"{BEST}=eval_ema_two/loss", "--config.optimizer.ema_decay=0.9", f"--config.data.phases={OTHER_TWO}"],
            r"best=eval_ema_two/loss compares .* but phases have different held-out rows",
        ),
    ],
)
def test_a_mistake_around_a_mixture_is_refused_in_one_line(folders, tmp_path, overrides, said):
    flags = [f"--config={RECIPE}", f"--workdir={tmp_path / 'run'}", f"--config.data.mixture={three(folders)}", *TINY]
    flags += ["--config.eval.every_steps=3"]
    with pytest.raises(UserError, match=said) as caught:
        pretrain.main([*flags, *(flag.format(**folders) for flag in overrides)])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


# Slow: training.


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_on_a_mixture_logs_its_sources_and_ends_bit_equal_after_kills(folders, tmp_path, monkeypatch, capsys):
    def train(name: str, **shares: float) -> dict:
        pace = ("steps=16", "log_every=1", "checkpoint.every_steps=3", "eval.every_steps=8", "batch_size=16")
        flags = [f"--config={RECIPE}", f"--workdir={tmp_path / name}", *TINY, *(f"--config.{one}" for one in pace)]
        phases = {9: sources(folders, one=("large", 0.25), three=("small", 0.75))}
        mixed = (f"--config.data.mixture={three(folders, **shares)}", f"--config.data.phases={phases}")
        pretrain.main([*flags, *mixed, "--config.checkpoint.best=eval_one/mlm_loss"])
        return json.loads((tmp_path / name / "result.json").read_text())

    whole = assert_equal_after_kills(train, (5, 11), tmp_path, monkeypatch)
    assert "data.mixture, shares of the rows, and epochs until step 9: one 50.00%" in capsys.readouterr().err

    lines = metrics.read_metrics(tmp_path / "whole")
    large = open_dataset(folders["large"], "train").rows
    assert [line["epochs/one"] for line in lines[:9]] == pytest.approx([8 * step / large for step in range(1, 10)])
    assert {name for name in lines[7] if name.endswith("/mlm_loss")} == {
        f"eval_{name}/mlm_loss" for name in ("one", "two", "three")
    }
    assert {name for name in lines[15] if name.endswith("/mlm_loss")} == {"eval_one/mlm_loss", "eval_three/mlm_loss"}
    by_source = [whole[f"eval_{name}/mlm_loss"] for name in ("one", "three")]
    assert min(by_source) < whole["eval_mlm_loss"] < max(by_source)

    configuration = orbax_io.read_meta(tmp_path / "whole" / "checkpoints" / "16")["meta"]["provenance"]
    kept = {key: value for key, value in configuration["configuration"].items() if key.startswith("data.")}
    assert kept["data.mixture.two.share"] == 0.3 and kept["data.phases.9.three.share"] == 0.75
    assert {key for key, value in kept.items() if str(value).startswith("fingerprint ")} == {
        *(f"data.mixture.{name}" for name in ("one", "two", "three")),
        *(f"data.phases.9.{name}" for name in ("one", "three")),
        *(f"data.eval.{name}" for name in ("one", "two", "three")),
        *(f"data.eval.9.{name}" for name in ("one", "three")),
    }
    with pytest.raises(UserError, match=r"data\.mixture\.one\.share: 0\.5 -> 0\.6; data\.mixture\.two\.share: 0\.3 ->"):
        train("whole", one=0.6, two=0.2)


def test_phases_that_read_the_same_sources_have_the_same_held_out_rows(folders):
    same = sources(folders, one=("small", 0.7), two=("large", 0.3))
    for phase, refused in ((same, False), (str(folders["middle"]), True)):
        mixture = sources(folders, one=("large", 0.7), two=("small", 0.3))
        data = PretrainDataConfig(mixture=mixture, phases={9: phase})
        config = PretrainConfig(data=data, checkpoint=CheckpointConfig(best="eval_loss"))
        with pytest.raises(UserError, match="differ") if refused else contextlib.nullcontext():
            assert len(open_held_out(config, open_phases(data))) == 2


@pytest.mark.parametrize(
    ("mixture", "folders", "alpha"),
    [
        ({"wiki": ("DIR", 0.5), "zh-Hant": ("gs://b/w", 7)}, [("wiki", "DIR", 0.5), ("zh-Hant", "gs://b/w", 7)], None),
        ({"de": "gs://b/de", "th": "2024"}, [("de", "gs://b/de", None), ("th", "2024", None)], 0.3),
    ],
)
def test_sources_have_names_folders_and_shares_or_one_alpha(mixture, folders, alpha):
    assert read_mixture(mixture, "data.mixture", 0.3) == MixtureSpec(tuple(NamedFolder(*one) for one in folders), alpha)


@pytest.mark.parametrize(
    ("mixture", "said"),
    [
        ({}, "has no sources"),
        ({"wiki": " "}, "the folder of wiki is empty"),
        ({"wi=ki": "DIR"}, "invalid name 'wi=ki'"),
        ({"wiki": ("DIR", 0.5), "books": "OTHER"}, "has shares, but none for books"),
        ({"wiki": ("DIR", 0.5), "books": ("OTHER", 0.0)}, "the share of books is 0.0. Use a positive number"),
        ({"wiki": ("DIR", 0.5), "books": ("OTHER", -1)}, "the share of books is -1"),
        ({"wiki": ("DIR", float("nan"))}, "the share of wiki is nan"),
    ],
)
def test_an_invalid_mixture_is_refused_in_one_line(mixture, said):
    with pytest.raises(UserError) as caught:
        read_mixture(mixture, "data.phases.9")
    assert said in str(caught.value) and str(caught.value).startswith("data.phases.9") and "\n" not in str(caught.value)


some_weights = st.lists(st.integers(1, 1000), min_size=1, max_size=6).map(tuple)
ROWS = 120


@given(some_weights)
def test_every_row_is_the_next_one_of_its_source(weights):
    """By going through the rows: a counter for each source."""
    shares = RowShares(weights)
    sources, ordinals = shares.assign(np.arange(ROWS))
    read = [0] * len(weights)
    for number, (source, ordinal) in enumerate(zip(sources.tolist(), ordinals.tolist(), strict=True)):
        assert shares.counts(number) == tuple(read)
        assert ordinal == read[source]
        read[source] += 1


@given(some_weights, st.integers(0, ROWS), st.integers(0, ROWS))
def test_any_consecutive_rows_have_the_shares_within_a_row_for_each_other_source(weights, first, count):
    shares, others = RowShares(weights), len(weights) - 1
    wanted = np.array([Fraction(weight, sum(weights)) for weight in weights])
    from_the_first = np.array(shares.counts(count)) - wanted * count
    assert max(abs(from_the_first)) <= Fraction(others, 2)
    sources, _ = shares.assign(np.arange(first, first + count))
    assert max(abs(np.bincount(sources, minlength=others + 1) - wanted * count)) <= others


@given(some_weights, st.integers(1, 9), st.integers(1, 5))
def test_every_lane_has_the_shares_and_numbers_its_own_rows(weights, lanes, spacing):
    """By going through the rows, with a counter for each source in each lane; batches have `spacing` rows of a lane."""
    shares = LaneShares(RowShares(weights), lanes, spacing)
    wanted = np.array([Fraction(weight, sum(weights)) for weight in weights])
    numbers = np.arange(lanes * spacing * 4)
    sources, ordinals = shares.assign(numbers)
    read = np.zeros((len(weights), lanes), int)
    for number, source, ordinal in zip(numbers.tolist(), sources.tolist(), ordinals.tolist(), strict=True):
        if number % lanes == 0:
            np.testing.assert_array_equal(shares.counts(number), read)
        if number % (lanes * spacing) == 0:  # a whole number of batches, each of which has its shares
            batch = np.bincount(sources[number : number + lanes * spacing], minlength=len(weights))
            assert max(abs(batch - wanted * lanes * spacing)) <= len(weights) - 1
        assert ordinal == read[source, number % lanes]
        read[source, number % lanes] += 1
    np.testing.assert_array_equal(RowShares(weights).assign(numbers), LaneShares(RowShares(weights)).assign(numbers))


@given(some_weights, st.integers(0, 10**15), st.integers(1, 20))
def test_rows_far_away_are_those_that_exact_arithmetic_gives(weights, first, count):
    shares, numbers = RowShares(weights), np.arange(first, first + count)
    sources, ordinals = shares.assign(numbers)
    for number, source, ordinal in zip(numbers.tolist(), sources.tolist(), ordinals.tolist(), strict=True):
        before, after = (exact_counts(weights, rows) for rows in (number, number + 1))
        assert shares.counts(number) == before
        assert [later - earlier for earlier, later in zip(before, after, strict=True)] == [
            int(other == source) for other in range(len(before))
        ]
        assert before[source] == ordinal


def exact_counts(weights: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """The rows of each source: its part of what the sources before it leave, rounded half up."""
    found: list[int] = []
    for number, weight in enumerate(weights):
        part = Fraction((rows - sum(found)) * weight, sum(weights[number:]))
        found.append(int(part + Fraction(1, 2)))
    return tuple(found)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_after_ten_thousand_steps_the_shares_are_met_within_a_thousandth(batch_size):
    weights = [0.5, 0.3, 0.1999, 0.0001]
    shares = RowShares.of(weights, "abcd", "data.mixture")
    rows = 10_000 * batch_size
    sources, _ = shares.assign(np.arange(rows))
    np.testing.assert_allclose(np.bincount(sources, minlength=4) / rows, weights, rtol=0, atol=1e-3)


def test_weights_are_relative_and_decimal_shares_are_exact():
    for weights in ([0.5, 0.3, 0.2], [5.0, 3.0, 2.0], [5e307, 3e307, 2e307]):
        assert RowShares.of(weights, "abc", "data.mixture").fractions == (0.5, 0.3, 0.2)


def test_a_share_that_would_vanish_is_refused_by_name():
    with pytest.raises(UserError, match=r"the share of rare in data\.mixture is less than 1e-07 of the rows"):
        RowShares.of([1.0, 1e-9], ("common", "rare"), "data.mixture")
