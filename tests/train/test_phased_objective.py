"""Runs in phases of next tokens and masked tokens: the losses, every border of a run, its logs and its evaluations."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_checkpoints import odd_config, random_tree
from streamed_outputs import DyingLoader, Killed
from tiny_batches import lay, random_sequence
from tiny_runs import RECIPE, ROOT, TINY
from tiny_runs import untimed_log as log

from bert_jax import config as config_lib
from bert_jax import pretraining
from bert_jax.commands import pretrain
from bert_jax.config import CheckpointConfig, Phases, PretrainConfig
from bert_jax.data import schedules
from bert_jax.data.example import Batch
from bert_jax.data.schedules import batch_schedule, mask_rates
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.lineage import BiLSTM
from bert_jax.model import bert, layers, sizes
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.reporting import report
from bert_jax.tasks import evaluation
from bert_jax.train import metrics, optim
from bert_jax.train.clock import TokenLength
from bert_jax.train.metric_accumulator import MetricAccumulator
from bert_jax.train.objectives import OBJECTIVES, MaskedLMObjective, PhasedObjective, means, pretraining_objective
from bert_jax.train.objectives.language_modeling import unmasked
from bert_jax.train.objectives.pretraining import MaskedTokenBatch, NextTokenBatch, ShardTraits
from bert_jax.train.orbax_io import read_meta
from bert_jax.train.workdir import latest_step
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.sequences import OF_TRAINING

WORDS = 40
CONFIG = odd_config(vocab_size=WORDS, layers=1)
OBJECTIVE = PhasedObjective(schedules.StepSchedule((0, 3), ("causal", "mlm")))


def packed_batch(rows: int = 4) -> Batch:
    lengths = [(9, 13) if number % 2 else (17,) for number in range(rows)]
    made = [[random_sequence(length, WORDS, 100 * row + length) for length in of] for row, of in enumerate(lengths)]
    return jax.tree.map(jnp.asarray, lay(made, 24, 5))


@pytest.fixture(scope="module")
def params() -> dict:
    return jax.tree.map(jnp.asarray, random_tree(bert.abstract_params(CONFIG, OBJECTIVE.heads)))


def loss_of(objective, config, params, batch) -> jax.Array:
    terms = objective.apply(objective.bind(config, params, Runtime()), batch, None)
    return means(terms, objective.counts(batch))["loss"]


@pytest.mark.slow
def test_a_causal_phase_predicts_each_token_from_its_prefix(params):
    """A bidirectional layer that gets only a prefix, in a row of its own, has the last state that a causal one has.

    That holds for one layer, whose keys are embeddings.
    """
    batch, total, count = packed_batch(), 0.0, 0
    text = np.asarray(unmasked(batch))
    pairs = [
        (row, start, end)
        for row, sequences in enumerate(np.asarray(batch.sequence_ids))
        for number in range(1, sequences.max() + 1)
        for start in [int(np.flatnonzero(sequences == number)[0])]
        for end in range(start + 1, int(np.flatnonzero(sequences == number)[-1]) + 1)
    ]
    prefixes = np.zeros((4, len(pairs), 24), np.int32)  # ids, segments, sequences, positions
    for index, (row, start, end) in enumerate(pairs):
        prefixes[0, index, : end - start] = text[row, start:end]
        prefixes[1, index, : end - start] = batch.segment_ids[row, start:end]
        prefixes[2, index, : end - start] = 1
        prefixes[3, index, : end - start] = np.arange(end - start)
    names = ("input_ids", "segment_ids", "sequence_ids", "positions")
    ends = jnp.asarray([end - start - 1 for _, start, end in pairs])

    @jax.jit
    def scores_of(params, *fields):
        model = bert.bind(CONFIG, OBJECTIVE.heads, params, Runtime())
        hidden = model.encode(SimpleNamespace(**dict(zip(names, fields, strict=True)))).last
        last = jnp.take_along_axis(hidden, ends[:, None, None], axis=1)
        return jax.nn.log_softmax(vocabulary_logits(model, last)[:, 0])

    scores = np.asarray(scores_of(params, *map(jnp.asarray, prefixes)))
    for index, (row, _, end) in enumerate(pairs):
        total -= scores[index, text[row, end]]
        count += 1
    causal = OBJECTIVE.batch_at(2, batch)
    assert float(OBJECTIVE.counts(causal)["lm"]) == count
    loss = jax.jit(lambda params: loss_of(OBJECTIVE, CONFIG, params, causal))(params)
    np.testing.assert_allclose(loss, total / count, rtol=1e-5)


def test_a_masked_phase_is_the_program_of_masked_tokens_alone(params):
    batch, alone = packed_batch(), MaskedLMObjective(next_sentence=False)
    assert alone.heads == OBJECTIVE.heads

    def program(objective, batch):
        return str(jax.make_jaxpr(lambda params: loss_of(objective, CONFIG, params, batch))(params))

    program(alone, batch)  # the first one differs: jax keeps parts of it, and shows how they came about only once
    assert program(OBJECTIVE, OBJECTIVE.batch_at(3, batch)) == program(alone, batch) == program(OBJECTIVE, batch)


def test_the_type_of_a_batch_is_its_phase_and_survives_jax():
    for step, kind in ((0, NextTokenBatch), (2, NextTokenBatch), (3, MaskedTokenBatch), (10**9, MaskedTokenBatch)):
        batch = OBJECTIVE.batch_at(step, packed_batch())
        assert type(batch) is kind is type(jax.tree.map(lambda leaf: leaf, batch)) is type(batch._replace())
    assert OBJECTIVE.predictions(OBJECTIVE.batch_at(0, packed_batch())) == 24
    assert OBJECTIVE.predictions(OBJECTIVE.batch_at(3, packed_batch())) == 5
    assert OBJECTIVE.metric_names == ("loss", "lm_loss", "lm_accuracy", "mlm_loss", "mlm_accuracy")


@pytest.mark.parametrize("step", [0, 3])
def test_each_phase_trains_every_parameter(params, step):
    """So weight decay and old moments never move a parameter that the loss of a phase does not reach."""
    batch = OBJECTIVE.batch_at(step, packed_batch())
    gradients = jax.jit(jax.grad(lambda params: loss_of(OBJECTIVE, CONFIG, params, batch)))(params)
    for path, gradient in layers.flatten(gradients).items():
        assert np.abs(gradient).max() > 0, path


def test_a_log_line_across_a_border_is_the_mean_of_the_steps_that_have_a_metric():
    """Compares with numpy over the steps, for every way to cut them into two processes."""
    steps = [{"lm_loss": 5.0}, {"lm_loss": 4.0}, {"mlm_loss": 3.0}, {"lm_loss": 2.0}, {"mlm_loss": 1.0}]
    steps = [{**step, "loss": next(iter(step.values())), "tokens": 7, "finite": True} for step in steps]
    wanted = {"loss": 3.0, "lm_loss": 11 / 3, "mlm_loss": 2.0}

    def make(saved):
        return MetricAccumulator(CONFIG, saved, lambda step, values: True, OBJECTIVE)

    for cut in range(len(steps) + 1):
        accumulator = make({})
        for number, step in enumerate(steps):
            if number == cut:
                accumulator = make(json.loads(json.dumps(accumulator.state())))
            accumulator.add(number + 1, packed_batch(), {name: jnp.asarray(value) for name, value in step.items()})
        line = accumulator.close(0.0)
        assert {name: line[name] for name in wanted} == pytest.approx(wanted)
        assert "absent" not in accumulator.state()


def test_data_preparation_knows_the_objectives_of_training():
    assert set(OF_TRAINING) == {
        name for name, build in OBJECTIVES.items() if build.__module__.startswith("bert_jax.")
    } - {"phases"}


TRAITS = ShardTraits("the shards", False, "token")


BOTH = {0: "causal", 5: "mlm"}


@pytest.mark.parametrize(
    ("phases", "changes", "said"),
    [
        ({0: "causal"}, {}, r"its last phase is causal\. End with mlm.*--config\.objective=causal"),
        ({0: "mlm", 5: "replaced_tokens"}, {}, "'replaced_tokens' cannot be a phase; choose from causal, mlm"),
        ({0: "casual", 5: "mlm"}, {}, "'casual' cannot be a phase; choose from causal, mlm"),
        ({5: "causal", 9: "mlm"}, {}, "Its steps must begin at 0"),
        (BOTH, {"model": {"causal": True}}, r"--config\.model\.causal=false"),
        (BOTH, {"model": {"encoder": BiLSTM(), "positions": "none"}}, "bilstm has no attention. Use .*=transformer"),
        (BOTH, {"traits": {"mask_unit": "infill"}}, "needs every token of a text.* lack those of infilled spans"),
        (BOTH, {"config": {"checkpoint": CheckpointConfig(best="eval_loss")}}, r"checkpoint\.best=eval_loss compares"),
    ],
)
def test_phases_that_cannot_be_trained_are_refused(phases, changes, said):
    config = PretrainConfig(objective=Phases(phases), **changes.get("config", {}))
    model = dataclasses.replace(CONFIG, **changes.get("model", {}))
    with pytest.raises(UserError, match=said) as caught:
        pretraining_objective(config, model, [dataclasses.replace(TRAITS, **changes.get("traits", {}))])
    assert "\n" not in str(caught.value)


def test_the_borders_of_the_recipe_agree_with_its_tokens():
    """Rows are full, so a step reads rows x positions tokens; the steps of borders and the tokens may differ by one."""
    recipe = config_lib.from_flags(PretrainConfig, str(ROOT / "configs" / "phases.py"))
    model = sizes.model_config(recipe.model, vocab_size=50_368)
    objective = pretraining_objective(recipe, model, [TRAITS])
    causal, masked = objective.changes
    batches, lengths = batch_schedule(recipe.batch_schedule, recipe.batch_size), {4608: 1024, 576: 8192}
    _, decay = batches.steps
    tokens = {rows * lengths[rows] for rows in batches.values}
    assert len(tokens) == 1, "a step of long rows has other tokens than one of short rows"
    length = TokenLength(recipe.tokens, lambda step: float(step * next(iter(tokens))))
    optimizer = optim.with_token_shares(recipe.optimizer, recipe.tokens)

    def rate(step: int) -> float:
        return float(optim.learning_rate(optimizer, jnp.int32(step), jnp.float32(length.share(step))))

    assert causal == 0 and abs(2 * masked - decay) <= 1
    assert rate(masked) == rate(decay - 1) == rate(decay) == pytest.approx(recipe.optimizer.learning_rate)
    assert rate(decay + 2) < rate(decay) and rate(length.steps) == pytest.approx(1e-3 * rate(decay))
    rates = mask_rates(None, recipe.data.mask_schedule, recipe.data.mask_shape)
    assert rates.steps[1] == decay and abs(rates.steps[2] - length.steps) <= 1
    assert [rates.at(step) for step in (0, decay, length.steps)] == [0.3, 0.3, 0.15]
    assert rates.at(decay + 1000) == pytest.approx(0.3 - 0.15 * 1000 / (rates.steps[2] - decay))
    assert f"data.phases=\"{{{decay}: 'LONG'}}\"" in (ROOT / "configs" / "phases.py").read_text()


@pytest.fixture(scope="module")
def shards(sample_text, vocab_dir, tmp_path_factory) -> tuple[Path, Path]:
    """Shards of 32 and of 64 positions, without labels."""
    folder = tmp_path_factory.mktemp("shards")
    for length in (32, 64):
        options = {"objective": "full_sentences", "eval_fraction": 0.25, "workers": 1}
        build(BuildOptions(str(sample_text), vocab_dir, folder / str(length), length, **options))
    return folder / "32", folder / "64"


def mean_tokens(folder: Path) -> float:
    counts = json.loads((folder / "manifest.json").read_text())["parts"]["train"]
    return counts["tokens"] / counts["rows"]


def tokens_of(shards: tuple[Path, Path]) -> float:
    """The tokens of six steps of 16 rows and three of 8 rows, less half a token: the run ends after the ninth step."""
    short, long = map(mean_tokens, shards)
    return 6 * 16 * short + 3 * 8 * long - 0.5


def train(shards: tuple[Path, Path], workdir: Path, *overrides: str) -> dict:
    short, long = shards
    tokens = tokens_of(shards)
    pretrain.main(
        [
            f"--config={RECIPE}",
            f"--workdir={workdir}",
            f"--config.data.train={short}",
            *TINY,
            "--config.objective=phases",
            "--config.objective.phases={0: causal, 3: mlm}",
            f"--config.data.phases={{6: '{long}'}}",
            "--config.batch_schedule={0: 16, 6: 8}",
            "--config.data.mask_schedule={0: 0.3, 6: 0.3, 8: 0.1}",
            "--config.data.mask_shape=linear",
            "--config.steps=0",
            f"--config.tokens={tokens}",
            "--config.optimizer.schedule=wsd",
            "--config.optimizer.learning_rate=1e-3",
            "--config.optimizer.schedule.warmup_steps=0",
            f"--config.optimizer.schedule.warmup_tokens={tokens / 20}",
            f"--config.optimizer.schedule.decay_tokens={tokens / 2}",
            "--config.log_every=2",
            "--config.eval.every_steps=3",
            "--config.eval.max_rows=16",
            "--config.checkpoint.every_steps=1",
            "--config.checkpoint.keep=0",
            *overrides,
        ]
    )
    return json.loads((workdir / "result.json").read_text()) | {"seconds": 0}


def assert_same_run(one: Path, other: Path) -> None:
    """The last checkpoints are equal bit for bit, and so are the logs without their times."""
    left, right = (read_meta(workdir / "checkpoints" / "9")["tensors"] for workdir in (one, other))
    assert left == right and set(left) == {"params", "optimizer"}
    assert log(one) == log(other)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_through_all_phases_logs_evaluates_and_resumes_each_by_its_objective(shards, tmp_path, capsys):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    result = train(shards, whole)
    printed = " ".join(capsys.readouterr().err.split())
    for step, what in ((3, "16 rows of 32 positions"), (6, "8 rows of 64 positions")):
        for said in (f"compiling for step {step}: ", f"from step {step}: "):
            assert f"{said}batches of {what}, predicting masked tokens" in printed
    assert f"a run of {tokens_of(shards):,.0f} tokens: 9 steps" in printed
    shutil.copytree(whole, resumed)
    for step in range(4, 10):
        shutil.rmtree(resumed / "checkpoints" / str(step))
    assert train(shards, resumed) == result
    assert "resuming from step 3 of" in capsys.readouterr().err
    assert_same_run(whole, resumed)

    lines = {line["step"]: line for line in log(whole)}
    terms = {step: {name for name in ("lm_loss", "mlm_loss") if name in line} for step, line in lines.items()}
    assert terms[2] == {"lm_loss"} and terms[4] == {"mlm_loss"} and terms[9] == {"mlm_loss"}
    for step, name in ((3, "eval_lm_loss"), (6, "eval_mlm_loss"), (9, "eval_mlm_loss")):
        assert {name} == {each for each in lines[step] if each in ("eval_lm_loss", "eval_mlm_loss")}

    # The rate of the last step, before which all tokens but those of 8 long rows are read.
    read = 6 * 16 * mean_tokens(shards[0]) + 2 * 8 * mean_tokens(shards[1])
    done = (read / tokens_of(shards) - 0.5) / 0.5
    assert result["step"] == 9 and lines[9]["learning_rate"] == pytest.approx(1e-3 * (1 - done**0.5), rel=1e-4)

    opened = open_checkpoint(whole)
    assert not opened.model.causal and opened.heads.mlm and not opened.heads.lm
    measured = evaluation.evaluate(whole, shards[1], max_rows=16)
    assert measured["mlm_loss"] == pytest.approx(result["eval_mlm_loss"], rel=1e-5)
    page = report.report(whole).read_text()
    for title in ("Next tokens: loss", "Masked tokens: loss", "Next-token loss, held out", "at step 3, where"):
        assert title in page, title


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_killed_at_every_border_ends_bit_equal(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "PhasedLoader", DyingLoader)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = train(shards, whole)
    for border in (3, 4, 6):
        monkeypatch.setattr(DyingLoader, "end", border)
        with pytest.raises(Killed):
            train(shards, killed)
        assert latest_step(killed) == border
    monkeypatch.setattr(DyingLoader, "end", -1)
    assert train(shards, killed) == result
    assert_same_run(whole, killed)


@pytest.mark.slow
def test_a_run_through_all_phases_has_the_same_losses_on_eight_devices(shards, tmp_path, monkeypatch):
    train(shards, tmp_path / "eight", "--config.mesh.fsdp=2", "--config.mesh.tensor=2")
    with monkeypatch.context() as alone:
        first = jax.devices()[:1]
        alone.setattr(jax, "devices", lambda *_: first)
        train(shards, tmp_path / "one")
    one, eight = (metrics.read_metrics(tmp_path / name) for name in ("one", "eight"))
    for left, right in itertools.zip_longest(one, eight):
        for name in ("loss", "lm_loss", "mlm_loss", "eval_loss", "gradient_norm"):
            assert (name in left) == (name in right)
            if name in left:
                np.testing.assert_allclose(right[name], left[name], rtol=1e-5, err_msg=name)
