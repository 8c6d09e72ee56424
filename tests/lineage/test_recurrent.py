"""Recurrent encoders: equal to torch's, truncated gradients, refusals, runs of the commands.

tests/model/test_families.py has what every architecture must pass: packed rows equal padded ones, who sees whom, loops.
"""

import dataclasses
import json
import math
import subprocess
import sys

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
from tiny_runs import RECIPE, ROOT, TINY

from bert_jax.commands import evaluate, pretrain, report
from bert_jax.config import EncoderConfig, PretrainConfig, from_flags
from bert_jax.errors import UserError
from bert_jax.interop import export
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.lineage import LSTM, FeedForward
from bert_jax.model import layers
from bert_jax.model.attention.layer import kernels
from bert_jax.model.bert import bind
from bert_jax.model.dropout import dropout, row_seeds
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.tasks import fill_mask
from bert_jax.tasks.embedder import embed
from bert_jax.train.objectives import CausalLMObjective, means, total_loss

LM = Heads(lm=True)


def test_the_core_trains_without_these_encoders_and_opening_a_checkpoint_adds_them() -> None:
    code = """
import sys
import bert_jax.train.loop
from bert_jax.errors import UserError
from bert_jax.config import ModelConfig, load
sizes = dict(vocab_size=61, layers=1, width=8, heads=1, feed_forward=1, causal=True, positions="none")
try:
    load(ModelConfig, sizes | {"encoder": "lstm"}, "model")
except UserError as error:
    assert str(error) == "unknown model.encoder 'lstm'; choose from transformer", error
assert "bert_jax.lineage" not in sys.modules
import bert_jax.interop.open_checkpoint
print(load(ModelConfig, sizes | {"encoder": "lstm"}, "model").encoder.kind)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True).stdout == b"lstm\n"


@pytest.mark.parametrize(("name", "runtime"), [("rnn", UNROLLED), ("lstm", SCAN)], ids=["rnn", "lstm"])
def test_a_recurrent_model_equals_torch(tmp_path, name, runtime):
    golden = open_encoder(name, LM, tmp_path)
    config, batch, real = golden.loaded.model, pretraining_batch(golden.arrays), golden.real()
    objective = CausalLMObjective()

    @jit_once
    def run(params, batch):
        def loss(params):
            model = bind(config, LM, params, runtime)
            terms, counts = objective.apply(model, batch, None), objective.counts(batch)
            encoded = model.encode(batch, all_layers=True)
            logits = vocabulary_logits(model, encoded.last)
            return total_loss(terms, counts), (encoded, logits, means(terms, counts)["lm_loss"])

        return jax.value_and_grad(loss, has_aux=True)(params)

    params = jax.tree.map(jnp.asarray, layers.unflatten(golden.loaded.params))
    (total, (encoded, logits, lm_loss)), gradients = run(params, jax.tree.map(jnp.asarray, batch))
    assert_hidden_states_close(golden, encoded)
    vocab_size = config.vocab_size
    assert_close(logits[..., :vocab_size][real], golden.output("logits")[real], "logits")
    assert_close(total, golden.output("loss"), "loss")
    assert_close(lm_loss, golden.output("loss"), "lm_loss")
    flat = {path: np.asarray(value) for path, value in layers.flatten(gradients).items()}
    wanted = golden.tensors("gradients")
    assert flat.keys() == wanted.keys()
    assert_no_gradient_in_padding(flat, vocab_size)
    for path, gradient in wanted.items():
        cut = flat[path][:vocab_size] if path.endswith("table") else flat[path]
        assert_close(cut, gradient, path)


def encoder_outputs(config, params, hidden, bptt: int):
    """The outputs of the stack on one sequence of one row each, in pieces of `bptt` positions with detached states."""
    length, stack = hidden.shape[1], params["encoder"]["layers"]
    cut = [position % bptt == 0 for position in range(length)]
    if config.directions == 1:
        return stack_outputs(config, stack, hidden, cut)
    forward, backward = jnp.split(hidden, 2, axis=-1)
    forward = stack_outputs(config, stack["forward"], forward, cut)
    # Read from the end, the state enters position p from p + 1.
    cut = [(position + 1) % bptt == 0 for position in reversed(range(length))]
    backward = stack_outputs(config, stack["backward"], backward[:, ::-1], cut)[:, ::-1]
    return jnp.concatenate([forward, backward], axis=-1)


def stack_outputs(config, stack, hidden, cut: list[bool]):
    """The outputs of the layers of one direction, with states detached before the positions where `cut` is true."""
    cell, (rows, length, width) = config.encoder.cell, hidden.shape
    for layer in range(config.layers):
        own = {path: value[layer] for path, value in layers.flatten(stack).items()}
        state = (jnp.zeros((rows, width)),) * cell.states
        outputs = []
        for position in range(length):
            if cut[position]:
                state = jax.lax.stop_gradient(state)
            products = jnp.einsum("bd,dgh->bgh", hidden[:, position], own["input/kernel"]) + own["input/bias"][None]
            products += jnp.einsum("bd,dgh->bgh", state[0], own["recurrent/kernel"])
            state = cell.step(products, state)
            outputs.append(state[0])
        hidden = jnp.stack(outputs, axis=1)
    return hidden


@pytest.mark.parametrize(
    "encoder", ["rnn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lstm", "bilstm"))]
)
def test_truncated_gradients_equal_those_of_pieces_with_detached_states(encoder):
    length, bptt = 11, 4
    kind = EncoderConfig.kinds[encoder]
    config = dataclasses.replace(FAMILIES[encoder], encoder=kind(bptt=bptt))
    params = random_params(config, LM)
    hidden = jax.random.normal(jax.random.key(1), (2, length, config.width))
    weights = jax.random.normal(jax.random.key(2), hidden.shape)
    ids = jnp.ones((2, length), jnp.int32)

    def truncated(config):
        def loss(params, hidden):
            model = bind(config, LM, params, SCAN)
            return (model.encoder(hidden, ids, ids, None).last * weights).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, hidden)

    def by_hand(params, hidden):
        return (encoder_outputs(config, params, hidden, bptt) * weights).sum()

    got, got_hidden = truncated(config)
    wanted, wanted_hidden = jax.jit(jax.grad(by_hand, argnums=(0, 1)))(params, hidden)
    np.testing.assert_allclose(got_hidden, wanted_hidden, atol=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), got, wanted)
    whole, whole_hidden = truncated(dataclasses.replace(config, encoder=kind()))
    assert np.abs(whole_hidden - got_hidden).max() > 1e-3
    for path, cut in layers.flatten(got).items():
        if path.endswith("recurrent/kernel"):
            assert np.abs(layers.flatten(whole)[path] - cut).max() > 1e-3


@pytest.mark.parametrize(
    ("encoder", "runtime"),
    [("lstm", SCAN), ("lstm", UNROLLED), pytest.param("bilstm", SCAN, marks=pytest.mark.slow)],
    ids=["scan", "unrolled", "residual"],
)
def test_dropout_and_residual_connections_are_between_layers(encoder, runtime):
    """torch.nn.LSTM drops the outputs of each layer but the last: neither the stack's input nor its output.

    In ELMo each layer but the lowest adds its input, after dropout, to its output.
    """
    config = dataclasses.replace(FAMILIES[encoder], dropout=0.4, layers=2)
    params, key = random_params(config, LM), jax.random.key(3)
    hidden, ids = jax.random.normal(jax.random.key(1), (3, 7, config.width)), jnp.ones((3, 7), jnp.int32)
    got = bind(config, LM, params, runtime).encoder(hidden, ids, ids, key, all_layers=True)
    single = dataclasses.replace(config, layers=1, dropout=0.0)

    def layer(number: int, below):
        own = {"layers": jax.tree.map(lambda leaf: leaf[number : number + 1], params["encoder"]["layers"])}
        return bind(single, LM, params | {"encoder": own}, runtime).encoder(below, ids, ids, None).last

    first = layer(0, hidden)
    np.testing.assert_allclose(got.layers[0], first, atol=1e-5)
    dropped = dropout(first, 0.4, row_seeds(key, (2,), 3)[1])
    assert 0.2 < (np.asarray(dropped) == 0).mean() < 0.6
    residual = dropped if config.encoder.residual else 0
    np.testing.assert_allclose(got.last, layer(1, dropped) + residual, atol=1e-5)


FEED_FORWARD = dataclasses.replace(FAMILIES["rnn"], encoder=FeedForward(window=3), layers=1, tied_output=False)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ("lstm", {"causal": False}, r"encoder=lstm does not support model\.causal=False. Use .*\.causal=true"),
        ("lstm", {"positions": "learned"}, r"not support model\.positions=learned. Use .*\.positions=none"),
        ("lstm", {"window": 3}, r"does not support model\.window=3. Use --config\.model\.window=0"),
        ("lstm", {"norm": "pre"}, r"does not support model\.norm=pre"),
        ("lstm", {"shared_layers": "all"}, r"does not support model\.shared_layers=all"),
        (
            "lstm",
            {"encoder": LSTM(bptt=33)},
            r"bptt is 33, longer than any row. .* model.max_positions, 32",
        ),
        ("bilstm", {"causal": True}, r"encoder=bilstm does not support model\.causal=True. Use .*\.causal=false"),
        ("bilstm", {"width": 13, "heads": 1}, r"width is 13, but .*encoder=bilstm gives each direction half of it"),
        ("bilstm", {"norm": "pre"}, r"encoder=bilstm does not support model\.norm=pre"),
        ("feed_forward", {"window": 3}, r"does not support model\.window=3. Use --config\.model\.window=0"),
        ("feed_forward", {"layers": 2}, r"does not support model\.layers=2. Use --config\.model\.layers=1"),
        ("feed_forward", {"causal": False}, r"does not support model\.causal=False. Use .*\.causal=true"),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused(config, changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(FAMILIES.get(config, FEED_FORWARD), **changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("encoder=gru",), r"unknown config\.model\.encoder 'gru'; choose from bilstm, feed_forward, lstm, rnn"),
        (("encoder.bptt=4",), r"model\.encoder=transformer does not have it. Set --config\.model\.encoder=rnn or lstm"),
        (("encoder=rnn", "encoder.cell_width=3"), r"encoder=rnn does not have it. Set .*=lstm or bilstm"),
        (
            ("encoder=feed_forward", "encoder.window=0"),
            r"encoder\.window is 0. Use a finite number of at least 1",
        ),
    ],
)
def test_options_of_another_kind_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        from_flags(PretrainConfig, RECIPE, [f"--config.model.{option}" for option in options])


@pytest.mark.parametrize("config", [FAMILIES["rnn"], FEED_FORWARD], ids=["rnn", "feed_forward"])
def test_attention_maps_are_refused(config):
    batch = jax.tree.map(jnp.asarray, lay([[random_sequence(9, config.vocab_size, 1)]], 9, 2))
    with pytest.raises(UserError, match=rf"model\.encoder={config.encoder.kind} has no attention maps"):
        bind(config, LM, random_params(config, LM), SCAN).encode(batch, attention_maps=True)


def test_an_attention_kernel_is_refused():
    assert kernels(FAMILIES["lstm"], SCAN, 100) == ["none"]
    with pytest.raises(UserError, match=r"encoder=lstm has no attention, but model\.attention is einsum"):
        kernels(FAMILIES["lstm"], dataclasses.replace(SCAN, attention="einsum"), 100)


ONE_WAY = ("encoder=lstm", "causal=true", "positions=none", "segment_types=0", "embedding_norm=false", "layers=2")
ELMO = ("encoder=bilstm", "positions=none", "layers=2", "encoder.bptt=20")
ELMO += ("encoder.residual=true", "encoder.cell_width=24")


def train(shards_dir, workdir, model: tuple[str, ...], *options: str) -> None:
    recipe, sizes = (RECIPE, TINY) if model else (RECIPE.replace("bert_tiny", "feed_forward_lm"), ())
    place = (f"--config={recipe}", f"--workdir={workdir}", f"--config.data.train={shards_dir}", *sizes)
    keys = (*(f"model.{option}" for option in model), "optimizer.schedule=constant", "batch_size=16", *options)
    pretrain.main([*place, *(f"--config.{key}" for key in keys)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "model"),
    [("lstm", (*ONE_WAY, "encoder.bptt=20")), ("bilstm", (*ELMO, "layer_loop=scan")), ("feed_forward", ())],
    ids=["lstm", "bilstm", "feed_forward"],
)
def test_a_run_resumes_bit_for_bit_and_the_commands_open_it(shards_dir, tmp_path, capsys, encoder, model):
    for name, steps in (("straight", 4), ("resumed", 2), ("resumed", 4)):
        train(shards_dir, tmp_path / name, model, f"steps={steps}")
    straight, resumed = (open_checkpoint(tmp_path / name) for name in ("straight", "resumed"))
    assert straight.params.keys() == resumed.params.keys()
    for path in straight.params:
        np.testing.assert_array_equal(straight.params[path], resumed.params[path], err_msg=path)
    result = json.loads((tmp_path / "straight" / "result.json").read_text())
    capsys.readouterr()
    evaluate.main([f"--checkpoint={tmp_path / 'straight'}", f"--data={shards_dir}"])
    metrics = json.loads(capsys.readouterr().out)
    terms = ("forward_lm", "backward_lm") if encoder == "bilstm" else ("lm",)
    for term in terms:
        assert metrics[f"{term}_loss"] == pytest.approx(result[f"eval_{term}_loss"], rel=1e-5)
    assert metrics["loss"] == pytest.approx(sum(metrics[f"{term}_loss"] for term in terms), rel=1e-5)
    export.export(tmp_path / "straight", tmp_path / "orbax", "orbax")
    again = open_checkpoint(tmp_path / "orbax").model
    assert (again, again.encoder.kind) == (straight.model, encoder)
    assert getattr(again.encoder, "bptt", 0) == (20 if model else 0)
    with pytest.raises(
        UserError, match=rf"no Hugging Face format holds this architecture.*encoder={type(again.encoder).__name__}"
    ):
        export.export(tmp_path / "straight", tmp_path / "hf", "hf")
    if encoder != "bilstm":
        return
    for term in terms:
        assert metrics[f"{term}_perplexity"] == pytest.approx(math.exp(metrics[f"{term}_loss"]))
    report.main([str(tmp_path / "straight")])
    page = (tmp_path / "straight" / "report.html").read_text()
    assert "Next-token accuracy, held out" in page and "Previous-token loss, held out" in page
    vectors = embed(straight, ["the house"], layers="embeddings", pool="none")["embeddings"]
    assert vectors.shape[-1] == straight.model.width
    np.testing.assert_array_equal(*np.split(vectors, 2, axis=-1))  # layer 0 is [x; x]
    with pytest.raises(UserError, match=r"needs a masked language model, but .* predicts next tokens"):
        fill_mask.fill_mask(straight, ["a [MASK]"])


def test_truncation_longer_than_the_rows_of_the_shards_is_refused(shards_dir, tmp_path):
    with pytest.raises(UserError, match=r"model\.encoder\.bptt is 500, longer than the rows of .*, \d+; use at most"):
        train(shards_dir, tmp_path / "run", (*ONE_WAY, "encoder.bptt=500"))
