"""Law 6: imported weights give the reference's hidden states, logits, losses and gradients, to 1e-5 in float32.

The reference arrays in tests/testdata come from tests/tools/make_golden.py. To refresh them, run it as its docstring
says and copy its output there.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from golden import (
    SCAN,
    UNROLLED,
    assert_close,
    assert_hidden_states_close,
    assert_no_gradient_in_padding,
    jit_once,
    open_golden,
    pretraining_batch,
    task_batch,
)
from random_checkpoints import assert_same_tensors

from bert_jax.interop import family as name_table
from bert_jax.interop import huggingface_export
from bert_jax.interop.families.albert import ALBERT
from bert_jax.interop.families.bert import BERT
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.outputs import masked_logits, next_sentence_logits, pool_vectors
from bert_jax.model.transformer import gather_positions
from bert_jax.tasks.registry import KINDS
from bert_jax.train.objectives import MaskedLMObjective, means, total_loss

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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert_classification", "classification"),
        ("bert_tagging", "tagging"),
        ("albert_classification", "classification"),
    ],
)
def test_task_heads_equal_the_reference(tmp_path, name, kind):
    golden = open_golden(name, tmp_path)
    loaded, batch = golden.loaded, task_batch(golden.arrays)
    labels = tuple(map(str, range(loaded.heads.classes or loaded.heads.tags)))
    task = KINDS[kind](name, labels)
    objective = task.objective()

    @jit_once
    def run(params, batch):
        model = bind(loaded.model, loaded.heads, params, SCAN)
        return model.encode(batch, all_layers=True), objective.outputs(model, batch, None)

    encoded, logits = run(layers.unflatten(loaded.params), batch)
    assert_hidden_states_close(golden, encoded)
    wanted = golden.output("logits")
    rows = golden.real() if kind == "tagging" else slice(None)
    assert_close(np.asarray(logits)[rows], wanted[rows], "logits")
    assert loaded.task is not None and len(loaded.task["labels"]) == wanted.shape[-1]


@pytest.mark.parametrize(
    "name",
    ["bert_pretraining", "bert_classification", "bert_tagging", "albert_pretraining", "albert_classification"],
)
def test_exported_tensors_equal_those_of_the_reference(tmp_path, name):
    (tmp_path / "in").mkdir()
    golden = open_golden(name, tmp_path / "in")
    huggingface_export.write(golden.loaded, tmp_path / "out")
    wanted = golden.tensors("weights")
    assert_same_tensors(safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors"), wanted)
    again, first = json.loads((tmp_path / "out" / "config.json").read_text()), json.loads(str(golden.arrays["config"]))
    shared = set(again) & set(first)
    assert {key: again[key] for key in shared} == {key: first[key] for key in shared}
