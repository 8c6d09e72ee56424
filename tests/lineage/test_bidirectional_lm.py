"""ELMo's two language models: equal to torch's LSTMs, apart from each other, refusals, runs of the commands.

tests/model/test_families.py has what every architecture must pass; tests/lineage/test_recurrent.py tests the layers.
"""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, random_params
from golden import (
    SCAN,
    UNROLLED,
    assert_close,
    assert_hidden_states_close,
    assert_no_gradient_in_padding,
    jit_once,
    open_encoder,
    pretraining_batch,
)
from tiny_batches import lay, random_sequence
from tiny_runs import RECIPE, TINY

from bert_jax.commands import evaluate, export, pretrain, report
from bert_jax.config import PretrainConfig
from bert_jax.config.training import PretrainDataConfig
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.lineage import BidirectionalLMObjective
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.dropout import dropout, row_seeds
from bert_jax.model.heads.config import Heads
from bert_jax.tasks import fill_mask
from bert_jax.tasks.embedder import embed
from bert_jax.train.objectives import means, total_loss
from bert_jax.train.objectives.pretraining import ShardTraits, pretraining_objective

LM = Heads(lm=True)
OBJECTIVE = BidirectionalLMObjective()
SHARDS = ShardTraits("shards", labelled=False, mask_unit="token")


@pytest.mark.parametrize(("name", "runtime"), [("bilstm", SCAN), ("elmo", UNROLLED)], ids=["bilstm", "elmo"])
def test_two_directions_equal_two_lstms_of_torch(tmp_path, name, runtime):
    golden = open_encoder(name, LM, tmp_path)
    config, batch = golden.loaded.model, pretraining_batch(golden.arrays)

    @jit_once
    def run(params, batch):
        def loss(params):
            model = bind(config, LM, params, runtime)
            terms, counts = OBJECTIVE.apply(model, batch, None), OBJECTIVE.counts(batch)
            return total_loss(terms, counts), (model.encode(batch, all_layers=True), means(terms, counts))

        return jax.value_and_grad(loss, has_aux=True)(params)

    params = jax.tree.map(jnp.asarray, layers.unflatten(golden.loaded.params))
    (total, (encoded, metrics)), gradients = run(params, jax.tree.map(jnp.asarray, batch))
    assert encoded.last.shape[-1] == encoded.embeddings.shape[-1] == config.width
    assert_hidden_states_close(golden, encoded)
    assert_close(total, golden.output("loss"), "loss")
    assert_close(metrics["forward_lm_loss"], golden.output("forward_loss"), "forward_lm_loss")
    assert_close(metrics["backward_lm_loss"], golden.output("backward_loss"), "backward_lm_loss")
    flat = {path: np.asarray(value) for path, value in layers.flatten(gradients).items()}
    wanted = golden.tensors("gradients")
    assert flat.keys() == wanted.keys()
    assert_no_gradient_in_padding(flat, config.vocab_size)
    for path, gradient in wanted.items():
        cut = flat[path][: config.vocab_size] if path.endswith("table") else flat[path]
        assert_close(cut, gradient, path)


@pytest.mark.slow
def test_no_direction_sees_what_it_predicts():
    """The forward half depends on earlier tokens of its sequence and its own, the backward half on later ones."""
    config = FAMILIES["bilstm"]
    batch = lay([[random_sequence(length, config.vocab_size, length) for length in (9, 6)]], 17, 2)
    batch, params = jax.tree.map(jnp.asarray, batch), random_params(config, LM)

    def layers(embedded):
        encoder = bind(config, LM, params, SCAN).encoder
        return encoder(embedded, batch.sequence_ids, batch.positions, None, all_layers=True).layers[:, 0]

    embedded, half = jax.random.normal(jax.random.key(1), (1, 17, config.width)), config.width // 2
    moved = np.abs(jax.jit(jax.jacobian(layers))(embedded))[:, :, :, 0]  # [L, T, D, T, D]
    sequence = np.asarray(batch.sequence_ids[0])
    same = sequence[:, None] == sequence[None, :]
    for part, seen in ((slice(0, half), np.tril(same)), (slice(half, None), np.triu(same))):
        for found in moved[:, :, part, :, part].max(axis=(2, 4)):
            np.testing.assert_array_equal(found[sequence > 0] > 0, seen[sequence > 0])
    assert not moved[:, :, :half, :, half:].any() and not moved[:, :, half:, :, :half].any()


@pytest.mark.slow
def test_dropout_and_residual_connections_are_between_layers():
    """Each layer but the lowest adds its input, after dropout, to its output."""
    config = dataclasses.replace(FAMILIES["bilstm"], dropout=0.4, layers=2)
    params, key = random_params(config, LM), jax.random.key(3)
    hidden, ids = jax.random.normal(jax.random.key(1), (3, 7, config.width)), jnp.ones((3, 7), jnp.int32)
    got = bind(config, LM, params, SCAN).encoder(hidden, ids, ids, key, all_layers=True)
    single = dataclasses.replace(config, layers=1, dropout=0.0)

    def layer(number: int, below):
        own = {"layers": jax.tree.map(lambda leaf: leaf[number : number + 1], params["encoder"]["layers"])}
        return bind(single, LM, params | {"encoder": own}, SCAN).encoder(below, ids, ids, None).last

    first = layer(0, hidden)
    np.testing.assert_allclose(got.layers[0], first, atol=1e-5)
    dropped = dropout(first, 0.4, row_seeds(key, (2,), 3)[1])
    assert 0.2 < (np.asarray(dropped) == 0).mean() < 0.6
    np.testing.assert_allclose(got.last, layer(1, dropped) + dropped, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": True}, r"encoder=bilstm does not support model\.causal=True. Use --config\.model\.causal=false"),
        ({"width": 13, "heads": 1}, r"model\.width is 13, but model\.encoder=bilstm gives each direction half of it"),
        ({"norm": "pre"}, r"encoder=bilstm does not support model\.norm=pre"),
        (
            {"encoder": "transformer", "cell_width": 0},
            r"encoder=transformer does not support model\.recurrent_residual=True. Use .*recurrent_residual=false",
        ),
    ],
)
def test_an_architecture_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(FAMILIES["bilstm"], **changes)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        (
            "bilstm",
            PretrainConfig(objective="mlm"),
            r"objective is mlm, but the directions of model\.encoder",
        ),
        ("bilstm", PretrainConfig(objective="replaced_tokens"), r"objective is replaced_tokens, but the directions"),
        ("bilstm", PretrainConfig(objective="diffusion"), r"objective is diffusion, but the directions"),
        ("bilstm", PretrainConfig(objective="causal"), r"objective is causal, but the model is bidirectional"),
        ("bilstm", PretrainConfig(data=PretrainDataConfig(mask_rate=0.2)), r"none of them is masked; leave out"),
        ("bilstm", PretrainConfig(span_boundary=True), r"none of them is masked; leave out config\.span_boundary"),
        ("bert", PretrainConfig(objective="bidirectional_lm"), r"encoder=transformer has no second direction; use"),
        ("lstm", PretrainConfig(objective="bidirectional_lm"), r"encoder=lstm has no second direction; use"),
    ],
)
def test_an_objective_that_does_not_fit_is_refused(family, config, message):
    with pytest.raises(UserError, match=message):
        pretraining_objective(config, FAMILIES[family], [SHARDS])


def test_auto_selects_both_directions():
    assert pretraining_objective(PretrainConfig(), FAMILIES["bilstm"], [SHARDS]) == OBJECTIVE


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_the_commands_open_it(shards_dir, tmp_path, capsys):
    model = ("encoder=bilstm", "positions=none", "layers=2", "bptt=20", "recurrent_residual=true", "cell_width=24")
    loop = "--config.model.layer_loop=scan"  # compiles fast

    def run(workdir, steps: int) -> None:
        place = (f"--config={RECIPE}", f"--workdir={workdir}", f"--config.data.train={shards_dir}", *TINY)
        options = ("--config.optimizer.schedule=constant", "--config.batch_size=16", f"--config.steps={steps}")
        pretrain.main([*place, *(f"--config.model.{option}" for option in model), loop, *options])

    run(tmp_path / "straight", 4)
    run(tmp_path / "resumed", 2)
    run(tmp_path / "resumed", 4)
    straight, resumed = (open_checkpoint(tmp_path / name) for name in ("straight", "resumed"))
    assert straight.params.keys() == resumed.params.keys()
    for path in straight.params:
        np.testing.assert_array_equal(straight.params[path], resumed.params[path], err_msg=path)
    result = json.loads((tmp_path / "straight" / "result.json").read_text())
    capsys.readouterr()
    evaluate.main([f"--checkpoint={tmp_path / 'straight'}", f"--data={shards_dir}"])
    metrics = json.loads(capsys.readouterr().out)
    for term in ("forward_lm", "backward_lm"):
        assert metrics[f"{term}_loss"] == pytest.approx(result[f"eval_{term}_loss"], rel=1e-5)
        assert metrics[f"{term}_perplexity"] == pytest.approx(math.exp(metrics[f"{term}_loss"]))
    assert metrics["loss"] == pytest.approx(metrics["forward_lm_loss"] + metrics["backward_lm_loss"], rel=1e-5)
    report.main([str(tmp_path / "straight")])
    page = (tmp_path / "straight" / "report.html").read_text()
    assert "Next-token accuracy, held out" in page and "Previous-token loss, held out" in page
    vectors = embed(straight, ["the house"], layers="embeddings", pool="none")["embeddings"]
    assert vectors.shape[-1] == straight.model.width
    np.testing.assert_array_equal(*np.split(vectors, 2, axis=-1))  # layer 0 is [x; x]
    export.export(tmp_path / "straight", tmp_path / "orbax", "orbax")
    assert open_checkpoint(tmp_path / "orbax").model == straight.model
    with pytest.raises(UserError, match=r"no Hugging Face format holds this architecture.*encoder='bilstm'"):
        export.export(tmp_path / "straight", tmp_path / "hf", "hf")
    with pytest.raises(UserError, match="predicts next and previous tokens, not masked ones"):
        fill_mask.fill_mask(straight, ["a [MASK]"])
