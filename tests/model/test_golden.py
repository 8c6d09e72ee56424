"""Law 6: imported weights give the reference's hidden states, logits, losses and gradients, to 1e-5 in float32.

BERT, ALBERT, ModernBERT and GPT-2. The reference arrays in tests/testdata come from tests/tools/make_golden.py and
make_golden_families.py. To refresh them, run these as their docstrings say and copy their output there.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import (
    SCAN,
    UNROLLED,
    Golden,
    assert_close,
    assert_export_equals,
    assert_hidden_states_close,
    assert_no_gradient_in_padding,
    jit_once,
    open_golden,
    pretraining_batch,
    task_batch,
)
from random_checkpoints import assert_same_tensors

from bert_jax.interop import family as name_table
from bert_jax.interop import huggingface
from bert_jax.interop.families import FAMILIES
from bert_jax.interop.families.albert import ALBERT
from bert_jax.interop.families.bert import BERT
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.outputs import masked_logits, next_sentence_logits, pool_vectors, vocabulary_logits
from bert_jax.model.transformer import gather_positions
from bert_jax.tasks.registry import KINDS
from bert_jax.train.objectives import CausalLMObjective, MaskedLMObjective, means, total_loss

PRETRAINING = {"bert": (BERT, "BertForPreTraining"), "albert": (ALBERT, "AlbertForPreTraining")}


@pytest.mark.parametrize("name", PRETRAINING)
def test_pretraining_model_equals_the_reference(tmp_path, name):
    golden = open_golden(f"{name}_pretraining", tmp_path)
    loaded, batch, real = golden.loaded, pretraining_batch(golden.arrays), golden.real()

    @jit_once
    def run(params, batch):
        model = bind(loaded.model, loaded.heads, params, UNROLLED)
        encoded = model.encode(batch, all_layers=True)
        pooled = pool_vectors(model, gather_positions(encoded.last, batch.cls_positions))
        logits = masked_logits(model, encoded.last, batch.masked_positions)
        return encoded, pooled, logits, next_sentence_logits(model, pooled)

    encoded, pooled, logits, next_sentence = run(layers.unflatten(loaded.params), batch)
    assert_hidden_states_close(golden, encoded)
    assert_close(pooled[:, 0], golden.output("pooled"), "pooled")
    assert_close(logits[..., : loaded.model.vocab_size][real], golden.output("mlm_logits")[real], "mlm_logits")
    assert not np.isfinite(logits[..., loaded.model.vocab_size :]).any()
    assert_close(next_sentence[:, 0], golden.output("next_sentence_logits"), "next_sentence_logits")


@pytest.mark.parametrize("name", PRETRAINING)
def test_losses_and_gradients_equal_the_reference(tmp_path, name):
    golden = open_golden(f"{name}_pretraining", tmp_path)
    family, architecture = PRETRAINING[name]
    loaded, batch = golden.loaded, pretraining_batch(golden.arrays)
    objective = MaskedLMObjective(next_sentence=True)

    @jit_once
    def run(params, batch):
        def loss(params):
            model = bind(loaded.model, loaded.heads, params, SCAN)
            terms, counts = objective.apply(model, batch, None), objective.counts(batch)
            return total_loss(terms, counts), means(terms, counts)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (total, metrics), gradients = run(layers.unflatten(loaded.params), jax.tree.map(jnp.asarray, batch))
    assert_close(total, golden.output("loss"), "loss")
    assert_close(metrics["mlm_loss"], golden.output("mlm_loss"), "mlm_loss")
    assert_close(metrics["nsp_loss"], golden.output("next_sentence_loss"), "next_sentence_loss")
    flat = {path: np.asarray(value) for path, value in layers.flatten(gradients).items()}
    theirs = name_table.export_tensors(family.table(architecture), flat, loaded.model)
    wanted = golden.tensors("gradients")
    assert {tensor.removeprefix(family.prefix) for tensor in wanted} == set(theirs)
    for tensor, value in wanted.items():
        assert_close(theirs[tensor.removeprefix(family.prefix)], value, f"gradient of {tensor}")
    assert_no_gradient_in_padding(flat, loaded.model.vocab_size)


# The layer loop of the cases with gradients.
STEPS = {"modernbert_mlm": SCAN, "modernbert_mean": UNROLLED, "gpt2": UNROLLED}
LOGITS = (
    "albert_classification",
    "bert_classification",
    "bert_tagging",
    "modernbert_cls",
    "modernbert_tagging",
)


def parts_of(golden: Golden):
    """Returns the objective and the batch of a reference, and the function from bert_jax's outputs to its logits."""
    heads = golden.loaded.heads
    if heads.classes or heads.tags:
        kind = "tagging" if heads.tags else "classification"
        task = KINDS[kind]("own", tuple(map(str, range(heads.classes or heads.tags))))
        objective = task.objective()
        batch = jax.tree.map(jnp.asarray, task_batch(golden.arrays))
        return objective, batch, lambda model, last: objective.outputs(model, batch, None)
    objective = CausalLMObjective() if heads.lm else MaskedLMObjective(next_sentence=False)
    vocab_size = golden.loaded.model.vocab_size
    batch = jax.tree.map(jnp.asarray, pretraining_batch(golden.arrays))
    return objective, batch, lambda model, last: vocabulary_logits(model, last)[..., :vocab_size]


def assert_outputs_close(golden: Golden, encoded, logits) -> None:
    assert_hidden_states_close(golden, encoded)
    name = next(name for name in ("logits", "mlm_logits", "lm_logits") if f"outputs/{name}" in golden.arrays)
    wanted = golden.output(name)
    rows = slice(None) if golden.loaded.heads.classes else golden.real()
    assert_close(np.asarray(logits)[rows], wanted[rows], name)


@pytest.mark.parametrize("name", LOGITS)
def test_a_head_equals_the_reference(tmp_path, name):
    golden = open_golden(name, tmp_path)
    _, batch, logits_of = parts_of(golden)

    @jit_once
    def run(params):
        model = bind(golden.loaded.model, golden.loaded.heads, params, SCAN)
        encoded = model.encode(batch, all_layers=True)
        return encoded, logits_of(model, encoded.last)

    assert_outputs_close(golden, *run(layers.unflatten(golden.loaded.params)))
    assert golden.loaded.task is not None and len(golden.loaded.task["labels"]) == golden.output("logits").shape[-1]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_the_reference(tmp_path, name):
    golden = open_golden(name, tmp_path)
    loaded = golden.loaded
    objective, batch, logits_of = parts_of(golden)

    @jit_once
    def run(params):
        def loss(params):
            model = bind(loaded.model, loaded.heads, params, STEPS[name])
            encoded = model.encode(batch, all_layers=True)
            total = total_loss(objective.apply(model, batch, None), objective.counts(batch))
            return total, (encoded, logits_of(model, encoded.last))

        return jax.value_and_grad(loss, has_aux=True)(params)

    (total, outputs), gradients = run(jax.tree.map(jnp.asarray, layers.unflatten(loaded.params)))
    assert_outputs_close(golden, *outputs)
    assert_close(total, golden.output("loss"), "loss")
    flat = {path: np.asarray(value) for path, value in layers.flatten(gradients).items()}
    assert_no_gradient_in_padding(flat, loaded.model.vocab_size)
    if loaded.model.norm == "pre_but_first":
        assert not flat["encoder/layers/attention_norm/scale"][0].any(), "layer 0 has no norm before its attention"
    values = json.loads(str(golden.arrays["config"]))
    family, architecture = FAMILIES[values["model_type"]], values["architectures"][0]
    theirs = name_table.export_tensors(family.table(architecture), flat, loaded.model)
    got = {family.full_name(bare, architecture): value for bare, value in theirs.items()}
    wanted = golden.tensors("gradients")
    assert set(got) == set(wanted)
    for tensor, value in wanted.items():
        assert_close(got[tensor], value, f"gradient of {tensor}")


@pytest.mark.parametrize("name", [*(f"{name}_pretraining" for name in PRETRAINING), *STEPS, *LOGITS])
def test_exported_tensors_equal_those_of_the_reference(tmp_path, name):
    (tmp_path / "in").mkdir()
    golden = open_golden(name, tmp_path / "in")
    assert_export_equals(golden, golden.loaded, tmp_path / "out")
    assert_same_tensors(huggingface.read(tmp_path / "out").params, golden.loaded.params)
