"""ELMo's two language models: equal to torch's LSTMs, apart from each other, refused objectives.

tests/model/test_families.py has what every architecture must pass; test_recurrent.py tests layers, refusals and runs.
"""

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

from bert_jax.config import CausalLM, Diffusion, MaskedLM, PretrainConfig, PretrainDataConfig, ReplacedTokens
from bert_jax.errors import UserError
from bert_jax.lineage import BidirectionalLMObjective
from bert_jax.lineage.bidirectional_lm import BidirectionalLM
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.heads.config import Heads
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


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("bilstm", PretrainConfig(objective=MaskedLM()), r"objective is mlm, but the directions of model\.encoder"),
        ("bilstm", PretrainConfig(objective=ReplacedTokens()), r"objective is replaced_tokens, but the directions"),
        ("bilstm", PretrainConfig(objective=Diffusion()), r"objective is diffusion, but the directions"),
        ("bilstm", PretrainConfig(objective=CausalLM()), r"objective is causal, but the model is bidirectional"),
        ("bilstm", PretrainConfig(data=PretrainDataConfig(mask_rate=0.2)), r"none of them is masked; leave out"),
        ("bert", PretrainConfig(objective=BidirectionalLM()), r"encoder=transformer has no second direction. Use"),
        ("lstm", PretrainConfig(objective=BidirectionalLM()), r"encoder=lstm has no second direction. Use"),
    ],
)
def test_an_objective_that_does_not_fit_is_refused(family, config, message):
    with pytest.raises(UserError, match=message):
        pretraining_objective(config, FAMILIES[family], [SHARDS])


def test_auto_selects_both_directions():
    assert pretraining_objective(PretrainConfig(), FAMILIES["bilstm"], [SHARDS]) == OBJECTIVE
