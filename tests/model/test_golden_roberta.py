"""Law 6 for RoBERTa, XLM-R, DistilBERT, ELECTRA and MPNet, and for BERT's question and multiple-choice heads.

Compares hidden states, logits, losses and gradients. The reference arrays in tests/testdata come from
tests/tools/make_golden_families.py; to refresh them, run it as its docstring says.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import (
    IGNORED,
    SCAN,
    UNROLLED,
    assert_close,
    assert_export_equals,
    assert_hidden_states_close,
    open_golden,
    words_of,
)

from bert_jax.interop import family as name_table
from bert_jax.interop.families import FAMILIES
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.outputs import answer_logits, class_logits, pool_vectors, tag_logits, vocabulary_logits
from bert_jax.model.transformer import gather_positions
from bert_jax.tasks.rows import TaskBatch

# The layer loop of each case; together they cover both forms.
GOLDEN = {
    "roberta_masked_lm": UNROLLED,
    "roberta_tagging": SCAN,
    "roberta_question": SCAN,
    "roberta_choices": UNROLLED,
    "xlm_roberta_classification": SCAN,
    "bert_question": UNROLLED,
    "bert_choices": SCAN,
    "distilbert_masked_lm": SCAN,
    "distilbert_classification": UNROLLED,
    "distilbert_question": SCAN,
    "electra_masked_lm": SCAN,
    "electra_classification": UNROLLED,
    "electra_choices": SCAN,
    "mpnet_masked_lm": UNROLLED,
    "mpnet_classification": SCAN,
}


def batch_of(arrays: dict[str, np.ndarray]) -> TaskBatch:
    """Returns the reference's inputs, with the choices of all questions in sequence."""
    length = arrays["inputs/input_ids"].shape[-1]
    ids, mask = (
        arrays[f"inputs/{name}"].reshape(-1, length).astype(np.int32) for name in ("input_ids", "attention_mask")
    )
    segments = arrays.get("inputs/token_type_ids", np.zeros_like(ids)).reshape(-1, length).astype(np.int32)
    none = np.zeros(len(ids), np.float32)
    return TaskBatch(ids, segments, mask, np.arange(length, dtype=np.int32) * mask, none, none)


def logits_of(heads, model, last) -> dict[str, jax.Array]:
    """Returns the logits by the names of the reference."""
    if heads.mlm:
        return {"logits": vocabulary_logits(model, last)[..., : model.config.vocab_size]}
    if heads.tags:
        return {"logits": tag_logits(model, last)}
    if heads.question:
        answers = answer_logits(model, last)
        return {"start_logits": answers[..., 0], "end_logits": answers[..., 1]}
    first_slot = jnp.zeros((len(last), 1), jnp.int32)
    return {"logits": class_logits(model, pool_vectors(model, gather_positions(last, first_slot)))[:, 0]}


def loss_of(logits: dict[str, jax.Array], arrays: dict[str, np.ndarray]) -> jax.Array:
    """Returns the reference's loss: the mean cross-entropy of labelled positions; for answers the mean of both ends."""
    truths = {"logits": "labels", "start_logits": "start_positions", "end_logits": "end_positions"}
    losses = []
    for name, values in logits.items():
        labels = arrays[f"inputs/{truths[name]}"]
        log_probabilities = jax.nn.log_softmax(values.reshape(*labels.shape, -1))
        known = labels != IGNORED
        picked = jnp.take_along_axis(log_probabilities, np.where(known, labels, 0)[..., None], axis=-1)[..., 0]
        losses.append(-jnp.where(known, picked, 0).sum() / known.sum())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_model_equals_the_reference(tmp_path, name):
    golden = open_golden(name, tmp_path)
    loaded, arrays = golden.loaded, golden.arrays
    batch = batch_of(arrays)

    @jax.jit
    def run(params, batch):
        def loss(params):
            model = bind(loaded.model, loaded.heads, params, GOLDEN[name])
            encoded = model.encode(batch, all_layers=True)
            logits = logits_of(loaded.heads, model, encoded.last)
            return loss_of(logits, arrays), (encoded, logits)

        return jax.value_and_grad(loss, has_aux=True)(params)

    params = jax.tree.map(jnp.asarray, layers.unflatten(loaded.params))
    (loss, (encoded, logits)), gradients = run(params, batch)
    flat_mask = golden._replace(arrays=arrays | {"inputs/attention_mask": batch.sequence_ids})
    assert_hidden_states_close(flat_mask, encoded)
    by_token = loaded.heads.mlm or loaded.heads.tags
    for kind, values in logits.items():
        wanted = golden.output(kind)
        rows = golden.real() if by_token else slice(None)
        assert_close(np.asarray(values).reshape(wanted.shape)[rows], wanted[rows], kind)
    assert_close(loss, golden.output("loss"), "loss")
    values = json.loads(str(arrays["config"]))
    family, architecture = FAMILIES[values["model_type"]], values["architectures"][0]
    flat = {path: np.asarray(value) for path, value in layers.flatten(gradients).items()}
    theirs = name_table.export_tensors(family.table(architecture), flat, loaded.model)
    wanted = golden.tensors("gradients")
    assert {family.full_name(bare, architecture) for bare in theirs} == set(wanted)
    for bare, value in theirs.items():
        whole = family.full_name(bare, architecture)
        assert_close(value, wanted[whole], f"gradient of {whole}")


@pytest.mark.parametrize("name", GOLDEN)
def test_exported_tensors_equal_those_of_the_reference(tmp_path, sample_text, name):
    (tmp_path / "in").mkdir()
    golden = open_golden(name, tmp_path / "in")
    loaded = dataclasses.replace(golden.loaded, vocabulary=words_of(name, tmp_path / "words", sample_text))
    assert_export_equals(golden, loaded, tmp_path / "out")
