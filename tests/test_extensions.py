"""Extensions from outside the package: an objective, a positional encoding, an optimizer, a model of two encoders."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from extensions import alibi, first_token, lion, parameter_norms, rare_words, word_dropout
from extensions.two_encoders import ReplacedTokenObjective
from tiny_batches import lay, random_sequence
from tiny_runs import RECIPE, TINY

from bert_jax.commands import evaluate, pretrain, report
from bert_jax.config import AdamW, Lamb, LinearSchedule
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import bert
from bert_jax.model import layers as paths
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import evaluation
from bert_jax.train import optim, rules
from bert_jax.train import step as step_lib
from bert_jax.train.metrics import read_metrics
from bert_jax.train.objectives import extended_batch
from bert_jax.train.objectives.language_modeling import unmasked

FILES = sorted((Path(__file__).parent / "extensions").glob("[a-z]*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_guide_shows_every_extension_as_it_is_or_links_to_it(file: Path) -> None:
    guide = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
    shown = f"```python\n{file.read_text(encoding='utf-8')}```" in guide
    linked = f"(../tests/extensions/{file.name})" in guide
    assert shown != linked, f"copy {file.name} into docs/extending.md again, or link to it"


class Forgetful(first_token.FirstTokenObjective):
    def extend_batch(self, batch):
        return batch


LIMITS = {"first_token": 60, "alibi": 40, "lion": 20, "parameter_norms": 15, "rare_words": 60, "word_dropout": 65}


def run(shards: Path, workdir: Path, *overrides: str, steps: int = 4) -> None:
    pretrain.main(
        [
            f"--config={RECIPE}",
            f"--workdir={workdir}",
            f"--config.data.train={shards}",
            *TINY,
            "--config.batch_size=16",
            f"--config.steps={steps}",
            "--config.log_every=1",
            *overrides,
        ]
    )


def checkpoint(workdir: Path) -> dict[str, np.ndarray]:

    return open_checkpoint(workdir).params


@pytest.mark.parametrize(("name", "lines"), LIMITS.items())
def test_an_extension_is_short_and_uses_public_names_only(name: str, lines: int) -> None:
    text = (Path(__file__).parent / "extensions" / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= lines
    assert not re.search(r"\b_[a-z]|\._[a-z]|import _", text)
    modules = first_token, alibi, lion, parameter_norms, rare_words, word_dropout
    assert all(modules)  # imported, which is what adds them


@pytest.mark.slow
def test_an_objective_pretrains_resumes_evaluates_and_reports(
    shards_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "--config.objective=first_token"
    run(shards_dir, tmp_path / "straight", own)
    run(shards_dir, tmp_path / "resumed", own, "--config.optimizer.schedule=constant", steps=2)
    run(shards_dir, tmp_path / "resumed", own, "--config.optimizer.schedule=constant", steps=4)
    result = json.loads((tmp_path / "straight" / "result.json").read_text())
    assert 0 < result["eval_first_loss"] < 4 and 0 <= result["eval_first_accuracy"] <= 1
    resumed = read_metrics(tmp_path / "resumed")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4]
    assert all(line["first_loss"] > 0 and line["mlm_loss"] > 0 for line in resumed)
    assert "first_token_head/dense/kernel" in checkpoint(tmp_path / "resumed")
    capsys.readouterr()
    evaluate.main([f"--checkpoint={tmp_path / 'straight'}", f"--data={shards_dir}"])
    measured = json.loads(capsys.readouterr().out)
    assert measured["first_loss"] == pytest.approx(result["eval_first_loss"], rel=1e-5)
    report.main([str(tmp_path / "straight")])
    page = (tmp_path / "straight" / "report.html").read_text()
    assert "First loss" in page and "First accuracy" in page


@pytest.mark.slow
def test_an_objective_resumes_bit_for_bit(shards_dir: Path, tmp_path: Path) -> None:
    options = ("--config.objective=first_token", "--config.optimizer.schedule=constant")
    run(shards_dir, tmp_path / "straight", *options)
    for steps_done in (2, 4):
        run(shards_dir, tmp_path / "resumed", *options, steps=steps_done)
    straight, resumed = checkpoint(tmp_path / "straight"), checkpoint(tmp_path / "resumed")
    assert straight.keys() == resumed.keys()
    for path in straight:
        np.testing.assert_array_equal(straight[path], resumed[path], err_msg=path)


def test_an_unknown_objective_and_a_field_that_batches_lack_are_refused(shards_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown config\.objective 'first'; did you mean first_token"):
        run(shards_dir, tmp_path / "run", "--config.objective=first")
    with pytest.raises(UserError, match="Forgetful reads the batch fields first_bucket, and these shards"):
        extended_batch(Forgetful(), lay([[random_sequence(8, 50, 0)]], 8, 2))


@pytest.mark.slow
def test_a_positional_encoding_is_a_name_of_the_configuration(shards_dir: Path, tmp_path: Path) -> None:
    biased = ("--config.model.relative=alibi", "--config.model.positions=none", "--config.model.attention_dropout=0.0")
    run(shards_dir, tmp_path / "run", *biased, steps=1)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["relative"] == "alibi"
    with pytest.raises(UserError, match=r"model\.relative"):
        run(shards_dir, tmp_path / "other", "--config.model.relative=alibbi", steps=1)


def test_alibi_is_the_penalty_of_the_paper(tiny_config) -> None:
    positions = jnp.arange(5)[None]
    bias = alibi.Alibi(tiny_config, key=None)(positions, positions)
    assert bias.shape == (1, tiny_config.heads, 5, 5)
    for head in range(tiny_config.heads):  # of four heads the slopes are 1/4, 1/16, 1/64, 1/256
        np.testing.assert_allclose(bias[0, head, 1, 4], -3 / 4 ** (head + 1), rtol=1e-6)
        np.testing.assert_allclose(bias[0, head, 4, 1], -3 / 4 ** (head + 1), rtol=1e-6)


@pytest.mark.slow
def test_what_is_sampled_depends_on_seed_and_step_but_not_on_microbatches(tiny_config) -> None:
    small = dataclasses.replace(tiny_config, layers=1, causal=True, initializer_range=0.3)
    config = dataclasses.replace(small, dropout=0.0, attention_dropout=0.0)
    objective = word_dropout.WordDropoutObjective(unknown_id=1, special_ids=(0, 1, 2, 3, 4))
    rows = [[random_sequence(length, config.vocab_size, length)] for length in (38, 33, 40, 31)]
    batch = jax.tree.map(jnp.asarray, lay(rows, 40, 8))
    text = np.asarray(unmasked(batch))
    made = [np.asarray(objective.corrupt(batch, jax.random.key(seed)).input_ids) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(made[0], made[1])
    assert (made[0] != made[2]).any()
    dropped = made[0] != text
    assert (made[0][dropped] == 1).all() and not dropped[text < 5].any()
    # At a rate of 0.1 and 142 tokens the count is outside of 2 to 34 once in 10,000 keys; the key is fixed.
    assert 2 <= dropped.sum() <= 34

    params, chain = (
        objective.init(config, jax.random.key(0)),
        AdamW(schedule=LinearSchedule(warmup_steps=1, from_start=True)),
    )
    found = []
    for parts in (1, 2):
        plan = step_lib.Plan(config, Runtime(), objective, chain, optim.build(chain, params), parts)
        step = jax.jit(functools.partial(step_lib.train_step, plan))
        found.append(step(step_lib.initial_state(plan, params), batch, jnp.float32(0), jax.random.key(3))[1])
    assert found[0]["lm_loss"] == pytest.approx(float(found[1]["lm_loss"]), rel=1e-5)
    evaluate_step = jax.jit(functools.partial(step_lib.evaluation_step, plan))
    terms, counts = evaluate_step(params, batch)
    clean = float(terms["lm"].loss / counts["lm"])
    assert abs(clean - float(found[0]["lm_loss"])) > 1e-3  # the step has trained on other inputs


@pytest.mark.slow
def test_an_objective_that_samples_pretrains_and_evaluates(shards_dir: Path, tmp_path: Path) -> None:
    run(shards_dir, tmp_path / "run", "--config.objective=word_dropout", "--config.model.causal=true", steps=2)
    measured = evaluation.evaluate(tmp_path / "run", shards_dir)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert measured["lm_loss"] == pytest.approx(result["eval_lm_loss"], rel=1e-5) and measured["word_perplexity"] > 1


@pytest.mark.slow
def test_an_optimizer_is_a_name_of_the_configuration(shards_dir: Path, tmp_path: Path) -> None:
    run(shards_dir, tmp_path / "run", "--config.optimizer=lion", "--config.optimizer.learning_rate=1e-4", steps=2)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 2


def two_encoder_plan(config, **options) -> tuple[step_lib.Plan, dict]:
    objective = ReplacedTokenObjective()
    params = objective.init(config, jax.random.key(0))
    optimizer_config = Lamb(schedule=LinearSchedule(warmup_steps=1, from_start=True), **options)
    plan = step_lib.Plan(config, Runtime(), objective, optimizer_config, optim.build(optimizer_config, params))
    return plan, params


@pytest.mark.slow
def test_two_encoders_train_under_lamb_with_the_trust_ratio_of_each_layer(tiny_config) -> None:
    config = dataclasses.replace(tiny_config, dropout=0.0, attention_dropout=0.0)
    plan, params = two_encoder_plan(config, learning_rate=1.0, weight_decay=0.0, clip_norm=0.0)
    rows = [[random_sequence(length, config.vocab_size, length)] for length in (8, 13, 20, 11)]
    batch = jax.tree.map(jnp.asarray, lay(rows, 20, 4))
    step = jax.jit(lambda state: step_lib.train_step(plan, state, batch, jnp.float32(0), jax.random.key(1)))
    after, metrics = step(step_lib.initial_state(plan, params))
    assert metrics["rtd_loss"] > 0 and metrics["mlm_loss"] > 0
    before, after = paths.flatten(params), paths.flatten(after.params)
    stacks = {"generator/encoder/layers/": 1, "discriminator/encoder/layers/": config.layers}
    assert rules.stacks(params) == stacks
    for stack, layers in stacks.items():
        for layer in range(layers):
            kernel = f"{stack}feed_forward/output/kernel"
            old, change = before[kernel][layer], after[kernel][layer] - before[kernel][layer]
            # LAMB scales a tensor's update to the tensor's own norm, so each layer moves by exactly its norm.
            np.testing.assert_allclose(np.linalg.norm(change), np.linalg.norm(old), rtol=1e-4)
            for part in range(3):
                kernel = f"{stack}attention/qkv/kernel"
                old, change = before[kernel][layer][:, part], (after[kernel] - before[kernel])[layer][:, part]
                np.testing.assert_allclose(np.linalg.norm(change), np.linalg.norm(old), rtol=1e-4)
    table = after["embeddings/token/table"] - before["embeddings/token/table"]
    np.testing.assert_allclose(np.linalg.norm(table), np.linalg.norm(before["embeddings/token/table"]), rtol=1e-4)


def test_rules_reach_every_stack_of_a_tree(tiny_config) -> None:
    _, params = two_encoder_plan(tiny_config)
    decayed = paths.flatten(rules.per_layer(rules.by_depth(lambda depth: 0.5**depth, params, 1.0), params))
    np.testing.assert_array_equal(decayed["discriminator/encoder/layers/attention/output/kernel"].ravel(), [0.25, 0.5])
    assert decayed["generator/encoder/layers/attention/output/kernel"] == 0.5
    assert decayed["embeddings/token/table"] == 0.125  # below the deeper of the two
    assert decayed["generator/mlm_head/bias"] == 1
    frozen = paths.flatten(rules.trainable("head", params))
    assert {path.split("/")[1] for path, factor in frozen.items() if factor} == {"mlm_head", "tagger"}
    alone = bert.abstract_params(tiny_config, Heads(mlm=True))
    assert rules.stacks(alone) == {"encoder/layers/": tiny_config.layers}
