"""Masked diffusion: the bound by enumeration and in closed form, mask rates, training, evaluation, refusals."""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import safetensors.numpy
import scipy.stats
from random_checkpoints import assert_same_tensors, odd_config, random_tree, write_vocabulary
from tiny_batches import lay, random_sequence
from tiny_runs import RECIPE, ROOT, TINY

from bert_jax.commands import evaluate, export, finetune, pretrain
from bert_jax.config import AdamW, Diffusion, PretrainConfig
from bert_jax.data.example import Batch
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import bert, layers
from bert_jax.model.dropout import uniform
from bert_jax.model.embeddings import is_unpacked
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import evaluation, fill_mask
from bert_jax.tasks.embedder import embed
from bert_jax.tokenization import vocabulary
from bert_jax.train import optim
from bert_jax.train import step as step_lib
from bert_jax.train.metrics import read_metrics
from bert_jax.train.objectives import DiffusionObjective, diffusion, means
from bert_jax.train.objectives.diffusion import LEAST_RATE, mask_rates, spread
from bert_jax.train.objectives.language_modeling import unmasked
from bert_jax.train.objectives.pretraining import ShardTraits, pretraining_objective

SPECIAL = (0, 1, 2, 3, 4)
MASK = 4
OBJECTIVE = DiffusionObjective(SPECIAL, MASK)


def text_batch(rows: np.ndarray) -> Batch:
    """Rows of one unmasked sequence each."""
    blank = np.zeros((len(rows), 1), np.int32)
    ones, positions = np.ones_like(rows), np.broadcast_to(np.arange(rows.shape[1], dtype=np.int32), rows.shape)
    none = blank.astype(np.float32)
    arrays = (rows, np.zeros_like(rows), ones, positions, blank, blank, none, blank, blank, none)
    return jax.tree.map(jnp.asarray, Batch(*arrays))


def packed_batch(vocab_size: int, rows: int = 8) -> Batch:
    lengths = [(9, 13) if number % 2 else (17,) for number in range(rows)]
    made = [
        [random_sequence(length, vocab_size, 100 * row + length) for length in of_row]
        for row, of_row in enumerate(lengths)
    ]
    return jax.tree.map(jnp.asarray, lay(made, 24, 5))


def random_params(config, scale: float = 0.3) -> dict:
    return jax.tree.map(jnp.asarray, random_tree(bert.abstract_params(config, OBJECTIVE.heads), scale))


@pytest.mark.slow
def test_the_expected_loss_equals_an_enumeration_of_all_masks():
    """For three tokens the integral over the rate of t^(k-1) (1-t)^(3-k) is a Beta function, (k-1)! (3-k)! / 3!.

    The mean of 65,536 sequences is within 5 standard errors of it: a false-alarm rate of 6e-7.
    """
    config = odd_config(vocab_size=9, layers=1)
    params, text = random_params(config, 0.5), np.array([[2, 6, 8, 5, 3]], np.int32)

    @jax.jit
    def log_probabilities(ids):
        model = bert.bind(config, OBJECTIVE.heads, params, Runtime())
        hidden = model.encode(text_batch(text)._replace(input_ids=ids)).last
        return jax.nn.log_softmax(vocabulary_logits(model, hidden)[..., : config.vocab_size])

    losses, wanted = np.zeros((2, 2, 2)), 0.0
    for masks in itertools.product((0, 1), repeat=3):
        chosen = np.array([[0, *masks, 0]], bool)
        log_p = np.asarray(log_probabilities(jnp.asarray(np.where(chosen, MASK, text))))[0]
        losses[masks] = -(log_p[np.arange(5), text[0]] * chosen[0]).sum()
        if k := sum(masks):
            wanted += losses[masks] * math.factorial(k - 1) * math.factorial(3 - k) / 6
    rows = 65536
    batch = text_batch(np.repeat(text, rows, axis=0))
    made = jax.device_get(jax.jit(OBJECTIVE.corrupt)(batch, jax.random.key(5)))
    masks = (made.input_ids[:, 1:4] == MASK).astype(int)
    sampled = losses[tuple(masks.T)] * made.weights.max(axis=1)
    error = sampled.std() / math.sqrt(rows)
    assert error < 0.02 * wanted
    assert abs(sampled.mean() - wanted) < 5 * error

    # What the objective computes from a batch is the sum that is enumerated here.
    some = jax.tree.map(lambda leaf: jnp.asarray(leaf[:64]), made)
    terms = OBJECTIVE.apply(bert.bind(config, OBJECTIVE.heads, params, Runtime()), some, None)
    np.testing.assert_allclose(terms["mdm"].loss, sampled[:64].sum(), rtol=1e-4)
    assert OBJECTIVE.counts(batch)["mdm"] == 3 * rows


@pytest.mark.slow
def test_the_bound_of_a_unigram_model_is_the_unigram_cross_entropy():
    """Within 5 standard errors, a false-alarm rate of 6e-7. Evaluation must have the smaller error of the two."""
    config = odd_config(vocab_size=12, layers=1)
    shares = np.random.default_rng(0).dirichlet(np.ones(7))
    params = jax.tree.map(jnp.zeros_like, random_params(config))
    bias = np.full(params["mlm_head"]["bias"].shape, -1e9, np.float32)
    bias[5:12] = np.log(shares)
    params["mlm_head"]["bias"] = jnp.asarray(bias)
    ordinary = np.random.default_rng(1).choice(np.arange(5, 12), (512, 20), p=shares)
    edge = np.ones((512, 1), int)
    rows = np.concatenate([2 * edge, ordinary, 3 * edge], axis=1).astype(np.int32)
    batch = text_batch(rows)
    model = bert.bind(config, OBJECTIVE.heads, params, Runtime())
    wanted = -np.log(shares)[ordinary - 5].mean()
    evaluated = means(OBJECTIVE.apply(model, batch, None), OBJECTIVE.counts(batch))
    # The variance of 1/t * Bernoulli(t), averaged over t in [LEAST_RATE, 1], is ln(1/LEAST_RATE) - 1 at most.
    spread_of_one = math.sqrt(math.log(1 / LEAST_RATE) * (np.log(shares)[ordinary - 5] ** 2).mean() / ordinary.size)
    assert abs(evaluated["mdm_loss"] - wanted) < 5 * spread_of_one / math.sqrt(diffusion.EVALUATION_RATES)
    made = OBJECTIVE.corrupt(batch, jax.random.key(0))
    trained = means(OBJECTIVE.apply(model, made, jax.random.key(1)), OBJECTIVE.counts(batch))
    assert abs(trained["mdm_loss"] - wanted) < 5 * spread_of_one
    assert 5 * spread_of_one < 0.15 * wanted


@pytest.mark.slow
def test_the_number_of_masks_in_each_sequence_follows_its_rate():
    """Exact binomial tests of 24 packed sequences at 1e-8 each: a false-alarm rate below 1e-6."""
    rows, length = 12, 2000
    text = np.random.default_rng(0).integers(5, 40, (rows, length)).astype(np.int32)
    batch = text_batch(text)
    sequences = np.where(np.arange(length) < 800, 1, 2) * np.ones((rows, 1), int)
    batch = batch._replace(sequence_ids=jnp.asarray(sequences, jnp.int32))
    made = jax.device_get(OBJECTIVE.corrupt(batch, jax.random.key(7)))
    seen = []
    for row, sequence in itertools.product(range(rows), (1, 2)):
        own = sequences[row] == sequence
        weights = made.weights[row, own]
        [weight] = set(weights[weights > 0].tolist())  # one rate for each sequence
        seen.append(1 / weight)
        masked = int((made.input_ids[row, own] == MASK).sum())
        assert masked == (weights > 0).sum()
        assert scipy.stats.binomtest(masked, int(own.sum()), 1 / weight).pvalue > 1e-8
    # Low discrepancy: one rate in each of 24 intervals of equal length, up to the common shift.
    shares = np.sort((np.array(seen) - LEAST_RATE) / (1 - LEAST_RATE))
    np.testing.assert_allclose(np.diff(shares), 1 / 24, atol=1e-5)


def test_rates_are_uniform_over_steps_and_spread_within_a_step():
    """A Kolmogorov-Smirnov test of the first sequence's rate over 2,000 steps, at a false-alarm rate of 1e-6."""
    ids = jnp.array([[1, 1, 2, 0], [0, 0, 0, 0], [1, 2, 3, 3]])
    rates = np.asarray(spread(jnp.float32(0.5), ids))
    np.testing.assert_allclose(rates[0, :3], [0.5, 0.5, 0.7], atol=1e-6)
    np.testing.assert_allclose(rates[2], [0.9, 0.1, 0.3, 0.3], atol=1e-6)
    batch = text_batch(np.full((1, 400), 9, np.int32))

    @jax.jit
    @jax.vmap
    def weights(key):
        return OBJECTIVE.corrupt(batch, key).weights.max()

    # The rate of a row without masks is unknown. Of 400 tokens one is masked with certainty only at rates above 0.05.
    found = np.asarray(weights(jax.random.split(jax.random.key(2), 2000)))
    found = 1 / found[(found > 0) & (found < 20)]
    assert abs(len(found) / 2000 - 0.951) < 5 * math.sqrt(0.05 * 0.95 / 2000)
    assert scipy.stats.kstest(found, scipy.stats.uniform(0.05, 0.95).cdf).pvalue > 1e-6
    assert mask_rates(jnp.zeros((1, 1))) == jnp.float32(LEAST_RATE)


@pytest.mark.slow
def test_special_tokens_and_padding_are_never_masked_and_the_shards_masks_are_undone():
    batch = packed_batch(40)
    text = np.asarray(unmasked(batch))
    given = np.isin(text, SPECIAL) | (np.asarray(batch.sequence_ids) == 0)
    ever = np.zeros_like(given)
    for seed in range(50):
        made = jax.device_get(OBJECTIVE.corrupt(batch, jax.random.key(seed)))
        np.testing.assert_array_equal(made.targets, text)
        np.testing.assert_array_equal(made.input_ids, np.where(made.weights > 0, MASK, text))
        ever |= made.weights > 0
    np.testing.assert_array_equal(ever, ~given)  # each other token is masked at least once in 50 steps
    assert given[np.asarray(batch.sequence_ids) > 0].any()
    assert OBJECTIVE.counts(batch)["mdm"] == (~given).sum()


@pytest.mark.parametrize("packed", [False, True])
def test_rows_with_masks_are_unpacked_if_their_batch_is(packed):
    batch = packed_batch(40, rows=2) if packed else text_batch(np.full((2, 6), 9, np.int32))
    made = jax.eval_shape(OBJECTIVE.corrupt, batch, jax.random.key(0))
    assert is_unpacked(made) == batch.unpacked == (not packed)
    assert {leaf.shape[0] for leaf in made} == {2}  # all of it is split into microbatches


@pytest.mark.slow
def test_microbatches_change_nothing():
    config = odd_config(vocab_size=40, layers=1, dropout=0.0, attention_dropout=0.0)
    params, batch = random_params(config), packed_batch(40)

    def step(microbatches):
        chain = optim.build(AdamW(), bert.abstract_params(config, OBJECTIVE.heads))
        plan = step_lib.Plan(config, Runtime(), OBJECTIVE, AdamW(), chain, microbatches)
        state = step_lib.initial_state(plan, params)
        return jax.jit(step_lib.train_step, static_argnums=0)(plan, state, batch, jnp.float32(0), jax.random.key(3))[1]

    one, four = step(1), step(4)
    for name in ("loss", "mdm_accuracy", "gradient_norm"):
        np.testing.assert_allclose(one[name], four[name], rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_evaluation_depends_neither_on_the_batch_nor_on_the_shards_masks():
    config = odd_config(vocab_size=40, layers=1)
    params, batch = random_params(config), packed_batch(40)

    @jax.jit
    def run(batch):
        return OBJECTIVE.apply(bert.bind(config, OBJECTIVE.heads, params, Runtime()), batch, None)

    whole = run(batch)
    halves = [run(jax.tree.map(lambda leaf, start=start: leaf[start : start + 4], batch)) for start in (0, 4)]
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a, b + c, rtol=1e-5), whole, *halves)
    undone = batch._replace(input_ids=unmasked(batch), masked_weights=jnp.zeros_like(batch.masked_weights))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), whole, run(undone))


@pytest.mark.slow
def test_logits_of_all_tokens_or_of_some_at_a_time_give_the_same_loss():
    config = odd_config(vocab_size=40, layers=1)
    params, batch = random_params(config), packed_batch(40)
    made = OBJECTIVE.corrupt(batch, jax.random.key(0))
    whole, parts = (
        OBJECTIVE.apply(bert.bind(config, OBJECTIVE.heads, params, runtime), made, None)["mdm"]
        for runtime in (Runtime(), Runtime(logits_at_once=48))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, parts)


def test_uniform_numbers_reach_neither_end():
    """Of 2^23 numbers with 24 bits, two are expected within four steps of each end."""
    drawn = np.asarray(uniform(jnp.arange(64, dtype=jnp.uint32).reshape(32, 2), (32, 2**18)))
    assert 0 < drawn.min() < 2**-22 and 1 - 2**-22 < drawn.max() < 1


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_evaluates_and_serves_as_a_masked_model(shards_dir, tmp_path, capsys):
    def run(workdir, steps: int) -> None:
        options = ("--config.objective=diffusion", "--config.optimizer.schedule=constant", "--config.log_every=1")
        place = (f"--config={RECIPE}", f"--workdir={workdir}", f"--config.data.train={shards_dir}")
        pretrain.main([*place, *TINY, *options, "--config.batch_size=16", f"--config.steps={steps}"])

    run(tmp_path / "straight", 4)
    run(tmp_path / "resumed", 2)
    run(tmp_path / "resumed", 4)
    straight, resumed = (open_checkpoint(tmp_path / name) for name in ("straight", "resumed"))
    assert straight.params.keys() == resumed.params.keys()
    for path, value in straight.params.items():
        np.testing.assert_array_equal(value, resumed.params[path], err_msg=path)
    assert read_metrics(tmp_path / "straight")[0]["mdm_loss"] > 0
    result = json.loads((tmp_path / "straight" / "result.json").read_text())
    capsys.readouterr()
    evaluate.main([f"--checkpoint={tmp_path / 'straight'}", f"--data={shards_dir}"])
    measured = json.loads(capsys.readouterr().out)
    assert measured["mdm_loss"] == pytest.approx(result["eval_mdm_loss"], rel=1e-5)
    assert measured["mdm_perplexity"] == pytest.approx(math.exp(measured["mdm_loss"]))
    assert 0 <= measured["mdm_accuracy"] <= 1
    # An untrained model's bound is that of nearly equal probabilities.
    assert abs(measured["mdm_loss"] / math.log(straight.model.vocab_size) - 1) < 0.1
    assert len(fill_mask.fill_mask(straight, ["The [MASK] sat."])[0].masks) == 1
    [text] = fill_mask.generate(tmp_path / "straight", 6, ["The river"], seed=1)
    assert text.lower().startswith("the river") and "[MASK]" not in text


@pytest.fixture(scope="module")
def trained(shards_dir, tmp_path_factory):
    """A workdir after two steps."""
    workdir = tmp_path_factory.mktemp("diffusion") / "run"
    place = (f"--config={RECIPE}", f"--workdir={workdir}", f"--config.data.train={shards_dir}")
    pretrain.main([*place, *TINY, "--config.objective=diffusion", "--config.batch_size=16", "--config.steps=2"])
    return workdir


@pytest.mark.slow
def test_a_checkpoint_is_embedded_and_exported_as_a_masked_model(trained, shards_dir, tmp_path, monkeypatch):
    texts = ["the river", "a house by the sea\tit was old"]
    loaded = open_checkpoint(trained)
    vectors = embed(trained, texts)["embeddings"]
    for layout in ("orbax", "hf"):
        export.main([f"--checkpoint={trained}", f"--format={layout}", f"--output={tmp_path / layout}"])
        again = open_checkpoint(tmp_path / layout)
        assert again.heads == loaded.heads == OBJECTIVE.heads
        assert_same_tensors(dict(again.params), dict(loaded.params))
        np.testing.assert_allclose(embed(tmp_path / layout, texts)["embeddings"], vectors, atol=1e-6)
    # bert_jax's format records the objective. The Hugging Face format does not, so its model is one of masked tokens.
    bound = evaluation.evaluate(trained, shards_dir, max_rows=8)
    assert evaluation.evaluate(tmp_path / "orbax", shards_dir, max_rows=8) == bound
    assert "mdm_loss" in bound and "mlm_loss" in evaluation.evaluate(tmp_path / "hf", shards_dir, max_rows=8)
    assert '"BertForMaskedLM"' in (tmp_path / "hf" / "config.json").read_text()

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the number of rows of a program is symbolic
    export.main([f"--checkpoint={trained}", "--format=stablehlo", f"--output={tmp_path / 'programs'}"])
    program = jax.export.deserialize((tmp_path / "programs" / "predictions.stablehlo").read_bytes())
    parameters = safetensors.numpy.load_file(tmp_path / "programs" / "parameters.safetensors")
    ids = np.array([[2, 7, MASK, 9, 3]], np.int32)
    inputs = {"input_ids": ids, "segment_ids": np.zeros_like(ids), "attention_mask": np.ones_like(ids)}
    model = bert.bind(loaded.model, loaded.heads, layers.unflatten(loaded.params), Runtime())
    wanted = vocabulary_logits(model, model.encode(text_batch(ids)).last)[..., : loaded.model.vocab_size]
    np.testing.assert_allclose(program.call(parameters, inputs)["mlm_logits"], wanted, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_is_fine_tuned_from_its_encoder(trained, tmp_path):
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + "good\t1\nbad\t0\n" * 8)
    place = [f"--workdir={tmp_path / 'tuned'}", f"--config={ROOT}/configs/own.py", f"--config.init_from={trained}"]
    task = [f"--config.task.{name}={tmp_path / 'train.tsv'}" for name in ("train", "dev")]
    rates = ["--config.optimizer.learning_rate=0.0", "--config.batch_size=8", "--config.epochs=1"]
    finetune.main([*place, *task, "--config.task.text=text", "--config.task.label=label", *rates])
    before, after = open_checkpoint(trained), open_checkpoint(tmp_path / "tuned")
    assert after.heads.classes == 2 and not after.heads.mlm
    shared = before.params.keys() & after.params.keys()
    assert {path for path in before.params if path.startswith(("embeddings/", "encoder/"))} <= shared
    for path in shared:  # at a learning rate of 0 it ends where it began
        np.testing.assert_array_equal(after.params[path], before.params[path], err_msg=path)


def test_a_vocabulary_without_a_mask_is_refused(tmp_path):
    write_vocabulary(tmp_path, 20)
    words = vocabulary.load(tmp_path)
    words.has_mask = False  # as GPT-2's
    config = dataclasses.replace(PretrainConfig(), objective=Diffusion())
    traits = ShardTraits("the shards", False, "token", words)
    with pytest.raises(UserError, match="the vocabulary of the shards has no mask token; rebuild the examples"):
        pretraining_objective(config, odd_config(), [traits])


def test_every_parameter_of_the_model_is_trained():
    config = odd_config(vocab_size=40, layers=1)
    params, batch = random_params(config), packed_batch(40)
    made = OBJECTIVE.corrupt(batch, jax.random.key(0))

    def loss(params):
        return OBJECTIVE.apply(bert.bind(config, OBJECTIVE.heads, params, Runtime()), made, None)["mdm"].loss

    for path, gradient in layers.flatten(jax.jit(jax.grad(loss))(params)).items():
        assert np.abs(gradient).max() > 0, path
