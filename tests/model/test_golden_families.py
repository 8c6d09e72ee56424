"""Tests of law 6 for ModernBERT and GPT-2: hidden states, logits, loss, gradients and exported tensors.

The reference arrays in tests/testdata come from tests/tools/make_golden_families.py. To refresh them, run it as its
docstring says and copy its output there.
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
    Golden,
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
from bert_jax.interop import huggingface, huggingface_export
from bert_jax.interop.families import FAMILIES
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.tasks.registry import KINDS
from bert_jax.train.objectives import CausalLMObjective, MaskedLMObjective, total_loss

# The layer loop of the cases with gradients.
STEPS = {"modernbert_mlm": SCAN, "modernbert_mean": UNROLLED, "gpt2": UNROLLED}
LOGITS = ("modernbert_cls", "modernbert_tagging")


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


@pytest.mark.parametrize("name", [*STEPS, *LOGITS])
def test_exported_tensors_equal_those_of_the_reference(tmp_path, name):
    (tmp_path / "in").mkdir()
    golden = open_golden(name, tmp_path / "in")
    huggingface_export.write(golden.loaded, tmp_path / "out")
    wanted = golden.tensors("weights")
    assert_same_tensors(safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors"), wanted)
    again, first = json.loads((tmp_path / "out" / "config.json").read_text()), json.loads(str(golden.arrays["config"]))
    shared = set(again) & set(first)
    assert {key: again[key] for key in shared} == {key: first[key] for key in shared}
    assert_same_tensors(huggingface.read(tmp_path / "out").params, golden.loaded.params)
