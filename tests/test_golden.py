"""Law 6: imported weights give the reference's hidden states, logits, losses and gradients, to 1e-5 in float32.

The reference arrays in tests/testdata come from tests/tools/make_golden.py. To refresh them, run it as its docstring
says and copy its output there.
"""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from random_checkpoints import assert_same_tensors, write_vocabulary

from bert_jax.data.example import Batch
from bert_jax.interop import huggingface, names
from bert_jax.interop.families.bert import BERT
from bert_jax.interop.loaded import Loaded
from bert_jax.model import paths
from bert_jax.model.bert import bind
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.example import TaskBatch
from bert_jax.tasks.objective import TaskObjective
from bert_jax.train.losses import PretrainingObjective, means, total_loss

TESTDATA = Path(__file__).parent / "testdata"
TOLERANCE = 1e-5
IGNORED = -100  # the reference's label for "no prediction here"
# Between them the tests run both forms of the layer loop.
UNROLLED, SCAN = Runtime(layer_loop="unrolled"), Runtime(layer_loop="scan")
REFRESH = "not the reference; if the reference itself changed, refresh by tests/tools/make_golden.py"


class Golden(NamedTuple):
    loaded: Loaded
    arrays: dict[str, np.ndarray]

    def output(self, name: str) -> np.ndarray:
        return self.arrays[f"outputs/{name}"]

    def real(self) -> np.ndarray:
        return self.arrays["inputs/attention_mask"] == 1


def open_golden(name: str, folder: Path) -> Golden:
    """The reference model through the front door, as a Hugging Face folder; its tokenizer plays no part."""
    with np.load(TESTDATA / f"bert_{name}.npz") as file:
        arrays = dict(file)
    weights = {key.removeprefix("weights/"): value for key, value in arrays.items() if key.startswith("weights/")}
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(str(arrays["config"]))
    write_vocabulary(folder, json.loads(str(arrays["config"]))["vocab_size"])
    return Golden(huggingface.read(folder), arrays)


def pretraining_batch(arrays: dict[str, np.ndarray]) -> Batch:
    """The reference's inputs as our batch: a slot is a prediction where the reference has a label."""
    mask = arrays["inputs/attention_mask"].astype(np.int32)
    rows, length = mask.shape
    slots = np.broadcast_to(np.arange(length, dtype=np.int32), mask.shape)
    labels = arrays["inputs/labels"]
    return Batch(
        input_ids=arrays["inputs/input_ids"].astype(np.int32),
        segment_ids=arrays["inputs/token_type_ids"].astype(np.int32),
        sequence_ids=mask,
        positions=slots * mask,
        masked_positions=slots,
        masked_ids=np.where(labels == IGNORED, 0, labels).astype(np.int32),
        masked_weights=(labels != IGNORED).astype(np.float32),
        cls_positions=np.zeros((rows, 1), np.int32),
        next_sentence_label=arrays["inputs/next_sentence_label"].astype(np.int32)[:, None],
        next_sentence_weight=np.ones((rows, 1), np.float32),
    )


def task_batch(arrays: dict[str, np.ndarray]) -> TaskBatch:
    mask = arrays["inputs/attention_mask"].astype(np.int32)
    none = np.zeros(len(mask), np.float32)
    ids, segments = (arrays[f"inputs/{name}"].astype(np.int32) for name in ("input_ids", "token_type_ids"))
    return TaskBatch(ids, segments, mask, np.arange(mask.shape[1], dtype=np.int32) * mask, none, none)


def assert_close(got: object, wanted: np.ndarray, name: str) -> None:
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=0, atol=TOLERANCE, err_msg=f"{name}: {REFRESH}")


def assert_hidden_states_close(golden: Golden, encoded) -> None:
    real = golden.real()
    states = [encoded.embeddings, *encoded.layers]
    assert f"outputs/hidden_{len(states)}" not in golden.arrays
    for depth, state in enumerate(states):
        assert_close(np.asarray(state)[real], golden.output(f"hidden_{depth}")[real], f"hidden_{depth}")


def test_pretraining_model_equals_the_reference(tmp_path):
    golden = open_golden("pretraining", tmp_path)
    loaded, batch, real = golden.loaded, pretraining_batch(golden.arrays), golden.real()

    @jax.jit
    def run(params, batch):
        model = bind(loaded.model, loaded.heads, params, UNROLLED)
        encoded = model.encode(batch, all_layers=True)
        pooled = model.pooled(encoded.last, batch.cls_positions)
        logits = model.masked_logits(encoded.last, batch.masked_positions)
        return encoded, pooled, logits, model.next_sentence_logits(pooled)

    encoded, pooled, logits, next_sentence = run(paths.unflatten(loaded.params), batch)
    assert_hidden_states_close(golden, encoded)
    assert_close(pooled[:, 0], golden.output("pooled"), "pooled")
    assert_close(logits[..., : loaded.model.vocab_size][real], golden.output("mlm_logits")[real], "mlm_logits")
    assert not np.isfinite(logits[..., loaded.model.vocab_size :]).any()
    assert_close(next_sentence[:, 0], golden.output("next_sentence_logits"), "next_sentence_logits")


def test_losses_and_gradients_equal_the_reference(tmp_path):
    golden = open_golden("pretraining", tmp_path)
    loaded, batch = golden.loaded, pretraining_batch(golden.arrays)
    objective = PretrainingObjective(next_sentence=True)

    @jax.jit
    def run(params, batch):
        def loss(params):
            model = bind(loaded.model, loaded.heads, params, SCAN)
            sums, counts = objective.sums(model, batch, None), objective.counts(batch)
            return total_loss(sums, counts), means(sums, counts)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (total, metrics), gradients = run(paths.unflatten(loaded.params), jax.tree.map(jnp.asarray, batch))
    assert_close(total, golden.output("loss"), "loss")
    assert_close(metrics["mlm_loss"], golden.output("mlm_loss"), "mlm_loss")
    assert_close(metrics["nsp_loss"], golden.output("next_sentence_loss"), "next_sentence_loss")
    flat = {path: np.asarray(value) for path, value in paths.flatten(gradients).items()}
    theirs = names.to_theirs(BERT.table("BertForPreTraining"), flat, loaded.model)
    wanted = {key.removeprefix("gradients/"): value for key, value in golden.arrays.items() if "gradients/" in key}
    assert {name.removeprefix("bert.") for name in wanted} == set(theirs)
    for name, value in wanted.items():
        assert_close(theirs[name.removeprefix("bert.")], value, f"gradient of {name}")
    for path in ("embeddings/token/table", "mlm_head/bias"):
        assert not flat[path][loaded.model.vocab_size :].any(), f"{path}: gradient in the vocabulary's padding"


@pytest.mark.parametrize(("name", "kind"), [("classification", "classification"), ("tagging", "tagging")])
def test_task_heads_equal_the_reference(tmp_path, name, kind):
    golden = open_golden(name, tmp_path)
    loaded, batch = golden.loaded, task_batch(golden.arrays)
    objective = TaskObjective(kind, loaded.heads.classes or loaded.heads.tags)

    @jax.jit
    def run(params, batch):
        model = bind(loaded.model, loaded.heads, params, SCAN)
        return model.encode(batch, all_layers=True), objective.outputs(model, batch, None)

    encoded, logits = run(paths.unflatten(loaded.params), batch)
    assert_hidden_states_close(golden, encoded)
    wanted = golden.output("logits")
    rows = golden.real() if kind == "tagging" else slice(None)
    assert_close(np.asarray(logits)[rows], wanted[rows], "logits")
    assert loaded.task is not None and len(loaded.task["labels"]) == wanted.shape[-1]


@pytest.mark.parametrize("name", ["pretraining", "classification", "tagging"])
def test_exported_again_the_tensors_are_the_reference_s_own(tmp_path, name):
    (tmp_path / "in").mkdir()
    golden = open_golden(name, tmp_path / "in")
    huggingface.write(golden.loaded, tmp_path / "out")
    wanted = {key.removeprefix("weights/"): value for key, value in golden.arrays.items() if "weights/" in key}
    assert_same_tensors(safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors"), wanted)
    again, first = json.loads((tmp_path / "out" / "config.json").read_text()), json.loads(str(golden.arrays["config"]))
    shared = set(again) & set(first)
    assert {key: again[key] for key in shared} == {key: first[key] for key in shared}
