"""Replaced token detection: equal to a torch program of both models, samples of the generator, training."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from golden import SCAN, assert_close, jit_once, open_golden, pretraining_batch
from random_checkpoints import assert_same_tensors
from tiny_batches import lay, random_sequence
from tiny_runs import RECIPE, TINY

from bert_jax.commands import evaluate, pretrain
from bert_jax.errors import UserError
from bert_jax.interop import export, family
from bert_jax.interop.families.electra import ELECTRA
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import bert, layers
from bert_jax.model.heads.config import Heads
from bert_jax.model.heads.tokens import generator_config
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import fill_mask
from bert_jax.train.metrics import read_metrics
from bert_jax.train.objectives import ReplacedTokensObjective, means, replaced_tokens, total_loss

GENERATOR = "ElectraForMaskedLM"
WIDTH = 12  # of the reference's generator
OWN = ("embeddings/projection", "encoder", "mlm_head")  # what the generator does not share


def to_pair(path: str) -> str:
    """The path of a generator's parameter in the parameters of both models."""
    return f"generator/{path.removeprefix('embeddings/')}" if path.startswith(OWN) else path


def test_a_step_of_both_models_equals_the_reference(tmp_path, monkeypatch):
    golden = open_golden("electra_pair", tmp_path)
    model, arrays = golden.loaded.model, golden.arrays
    small, objective = generator_config(model, WIDTH), ReplacedTokensObjective(WIDTH)
    table = ELECTRA.table(GENERATOR)

    def tensor(kind: str):
        return lambda bare: arrays[f"outputs/generator_{kind}/{ELECTRA.full_name(bare, GENERATOR)}"]

    theirs = family.import_params(table, tensor("weights"), small, Heads(mlm=True))
    params = {to_pair(path): value for path, value in theirs.items()} | dict(golden.loaded.params)
    monkeypatch.setattr(
        replaced_tokens, "sample", lambda logits, seeds: jnp.asarray(arrays["inputs/sampled"], jnp.int32)
    )

    @jit_once
    def run(params, batch):
        def loss(params):
            terms = objective.apply(bert.bind(model, objective.heads, params, SCAN), batch, None)
            counts = objective.counts(batch)
            weights = objective.term_weights
            return total_loss(terms, counts, weights), means(terms, counts, weights)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (total, metrics), gradients = run(layers.unflatten(params), jax.tree.map(jnp.asarray, pretraining_batch(arrays)))
    assert_close(metrics["mlm_loss"], golden.output("mlm_loss"), "mlm_loss")
    assert_close(metrics["rtd_loss"], golden.output("rtd_loss"), "rtd_loss")
    np.testing.assert_allclose(total, golden.output("loss"), rtol=1e-6)
    flat = {path: np.asarray(value) for path, value in layers.flatten(gradients).items()}
    of_model = {path: value for path, value in flat.items() if not path.startswith("generator/")}
    for bare, value in family.export_tensors(ELECTRA.table("ElectraForPreTraining"), of_model, model).items():
        wanted = golden.tensors("gradients")[ELECTRA.full_name(bare, "ElectraForPreTraining")]
        # The loss is 50 times the model's, and so are its gradients.
        np.testing.assert_allclose(value, wanted, rtol=0, atol=5e-5, err_msg=bare)
    of_generator = {path: flat[to_pair(path)] for path in theirs}
    for bare, value in family.export_tensors(table, of_generator, small).items():
        np.testing.assert_allclose(value, tensor("gradients")(bare), rtol=0, atol=5e-5, err_msg=bare)


def test_samples_follow_the_softmax_of_the_logits():
    """A chi-squared test at a false-alarm rate of 1e-6."""
    logits = jnp.log(jnp.array([0.5, 0.25, 0.125, 0.0625, 0.0625, 0.0]))
    rows, positions = 50, 400
    seeds = jax.random.bits(jax.random.key(3), (rows, positions, 2), jnp.uint32)
    sampled = replaced_tokens.sample(jnp.broadcast_to(logits, (rows, positions, 6)), seeds)
    counts = np.bincount(np.asarray(sampled).ravel(), minlength=6)
    assert counts[5] == 0
    assert scipy.stats.chisquare(counts[:5], rows * positions * np.exp(logits[:5])).pvalue > 1e-6


def test_only_wrong_samples_count_as_replaced(tiny_config):
    batch = lay([[random_sequence(9, 50, 1)]], 12, 4)
    sampled = np.where(np.arange(4) % 2, batch.masked_ids, batch.masked_ids + 1)
    ids, replaced = replaced_tokens.replace(batch, jnp.asarray(sampled, jnp.int32))
    for position, weight, original, token in zip(
        batch.masked_positions[0], batch.masked_weights[0], batch.masked_ids[0], sampled[0], strict=True
    ):
        if weight:
            assert ids[0, position] == token
            assert replaced[0, position] == (token != original)
    assert replaced.sum() == ((sampled != batch.masked_ids) * batch.masked_weights).sum()


@pytest.mark.slow
def test_evaluation_does_not_depend_on_the_batch(tiny_config):
    objective = ReplacedTokensObjective(tiny_config.width // 2)
    params = objective.init(tiny_config, jax.random.key(0))
    rows = [[random_sequence(length, tiny_config.vocab_size, length)] for length in (9, 12, 7, 11)]
    batch = jax.tree.map(jnp.asarray, lay(rows, 12, 3))

    @jax.jit
    def run(batch):
        return objective.apply(objective.bind(tiny_config, params, Runtime()), batch, None)

    whole = run(batch)
    halves = [run(jax.tree.map(lambda leaf, start=start: leaf[start : start + 2], batch)) for start in (0, 2)]
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a, b + c, rtol=1e-5), whole, *halves)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_evaluates(shards_dir, tmp_path, capsys):
    def run(workdir, steps: int) -> None:
        options = ("--config.objective=replaced_tokens", "--config.optimizer.schedule=constant", "--config.log_every=1")
        place = (f"--config={RECIPE}", f"--workdir={workdir}", f"--config.data.train={shards_dir}")
        pretrain.main([*place, *TINY, *options, "--config.batch_size=16", f"--config.steps={steps}"])

    run(tmp_path / "straight", 4)
    run(tmp_path / "resumed", 2)
    run(tmp_path / "resumed", 4)
    straight, resumed = (open_checkpoint(tmp_path / name).params for name in ("straight", "resumed"))
    assert straight.keys() == resumed.keys()
    for path in straight:
        np.testing.assert_array_equal(straight[path], resumed[path], err_msg=path)
    line = read_metrics(tmp_path / "resumed")[-1]
    assert line["loss"] == pytest.approx(line["mlm_loss"] + 50 * line["rtd_loss"], rel=1e-5)
    assert 0 < line["rtd_replaced"] < 0.2 and 0 <= line["rtd_accuracy"] <= 1
    result = json.loads((tmp_path / "straight" / "result.json").read_text())
    capsys.readouterr()
    evaluate.main([f"--checkpoint={tmp_path / 'straight'}", f"--data={shards_dir}"])
    measured = json.loads(capsys.readouterr().out)
    assert measured["rtd_loss"] == pytest.approx(result["eval_rtd_loss"], rel=1e-5)


def trained(shards_dir, workdir, *further):
    options = ("--config.objective=replaced_tokens", "--config.batch_size=16", "--config.steps=1")
    place = (f"--config={RECIPE}", f"--workdir={workdir}", f"--config.data.train={shards_dir}")
    pretrain.main([*place, *TINY, *options, "--config.objective.generator_size=0.5", *further])
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [("embedding_width=16", "pooler=gelu"), ()])
def test_both_models_are_exported_and_used(shards_dir, tmp_path, sizes):
    workdir = trained(shards_dir, tmp_path / "run", *(f"--config.model.{size}" for size in sizes))
    both = open_checkpoint(workdir)
    for part, architecture in (("", "ElectraForPreTraining"), ("generator", "ElectraForMaskedLM")):
        loaded = export.export(workdir, tmp_path / f"hf{part}", part=part)
        values = json.loads((tmp_path / f"hf{part}" / "config.json").read_text())
        assert values["architectures"] == [architecture] and values["embedding_size"] == (16 if sizes else 32)
        again = open_checkpoint(tmp_path / f"hf{part}")
        assert (again.model, again.heads) == (dataclasses.replace(loaded.model, pooler="gelu"), loaded.heads)
        assert_same_tensors(again.params, loaded.params)
    assert again.model.width == both.model.width // 2
    np.testing.assert_array_equal(
        again.params["encoder/layers/attention/qkv/kernel"],
        both.params["generator/encoder/layers/attention/qkv/kernel"],
    )
    assert export.export(workdir, tmp_path / "orbax", "orbax").params.keys() == both.params.keys()
    sentence = ["The [MASK] sat."]
    np.testing.assert_allclose(
        [token.probability for token in fill_mask.fill_mask(workdir, sentence)[0].masks[0]],
        [token.probability for token in fill_mask.fill_mask(tmp_path / "hfgenerator", sentence)[0].masks[0]],
        rtol=1e-6,
    )
    with pytest.raises(UserError, match=r"has no generator; only models of config\.objective=replaced_tokens"):
        export.export(tmp_path / "hf", tmp_path / "other", part="generator")
    with pytest.raises(UserError, match="unknown --part head; choose from discriminator, generator"):
        export.export(workdir, tmp_path / "other", part="head")
