"""Opens the golden arrays of tests/testdata and compares with them.

They come from tests/tools/make_golden*.py, which say what each file holds and how to refresh it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors.numpy
from random_checkpoints import assert_same_tensors, write_vocabulary
from tokenizer_kinds import byte_pairs, make

from bert_jax.config import ModelConfig, load
from bert_jax.data.example import Batch
from bert_jax.interop import huggingface, huggingface_export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import Encoded
from bert_jax.shapes import padded_vocabulary
from bert_jax.tasks.rows import TaskBatch
from bert_jax.tokenization import tokenizer

TESTDATA = Path(__file__).parent.parent / "testdata"
TOLERANCE = 1e-5
IGNORED = -100  # the label that the reference's loss ignores
# Together the tests cover both forms of the layer loop.
UNROLLED, SCAN = Runtime(layer_loop="unrolled"), Runtime(layer_loop="scan")
VOCABULARY_PATHS = {"embeddings/token/table", "mlm_head/bias", "mlm_head/output/table", "lm_head/output/table"}
REFRESH = "not the reference; if the reference itself changed, refresh by tests/tools/make_golden*.py"


class Golden(NamedTuple):
    loaded: LoadedModel
    arrays: dict[str, np.ndarray]

    def output(self, name: str) -> np.ndarray:
        return self.arrays[f"outputs/{name}"]

    def real(self) -> np.ndarray:
        return self.arrays["inputs/attention_mask"] == 1

    def tensors(self, kind: str) -> dict[str, np.ndarray]:
        """Returns the `weights` or the `gradients` by name."""
        return _under(kind, self.arrays)


def _under(start: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{start}/"): value for key, value in arrays.items() if key.startswith(f"{start}/")}


def read_arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(TESTDATA / f"{name}.npz") as file:
        return dict(file)


def open_golden(name: str, folder: Path) -> Golden:
    """Opens the reference model as a Hugging Face folder; its tokenizer is not used."""
    arrays = read_arrays(name)
    safetensors.numpy.save_file(_under("weights", arrays), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(str(arrays["config"]))
    write_vocabulary(folder, json.loads(str(arrays["config"]))["vocab_size"])
    return Golden(huggingface.read(folder), arrays)


def open_encoder(name: str, heads: Heads, folder: Path) -> Golden:
    """Opens a model whose file has bert_jax's parameter paths and an unpadded vocabulary."""
    arrays = read_arrays(name)
    model = load(ModelConfig, json.loads(str(arrays["config"])), "model")
    params = _under("weights", arrays)
    missing = padded_vocabulary(model.vocab_size) - model.vocab_size
    for path in VOCABULARY_PATHS.intersection(params):
        params[path] = np.pad(params[path], [(0, missing)] + [(0, 0)] * (params[path].ndim - 1))
    write_vocabulary(folder, model.vocab_size)
    return Golden(LoadedModel(model, heads, params, tokenizer.load(folder)), arrays)


def pretraining_batch(arrays: dict[str, np.ndarray]) -> Batch:
    """Returns the reference's inputs as a batch; every position with a label is a prediction."""
    mask = arrays["inputs/attention_mask"].astype(np.int32)
    rows, length = mask.shape
    slots = np.broadcast_to(np.arange(length, dtype=np.int32), mask.shape)
    labels = arrays["inputs/labels"]
    next_sentence = arrays.get("inputs/next_sentence_label", np.zeros(rows))
    return Batch(
        input_ids=arrays["inputs/input_ids"].astype(np.int32),
        segment_ids=_segments(arrays),
        sequence_ids=mask,
        positions=slots * mask,
        masked_positions=slots,
        masked_ids=np.where(labels == IGNORED, 0, labels).astype(np.int32),
        masked_weights=(labels != IGNORED).astype(np.float32),
        cls_positions=np.zeros((rows, 1), np.int32),
        next_sentence_label=next_sentence.astype(np.int32)[:, None],
        next_sentence_weight=np.ones((rows, 1), np.float32),
    )


def task_batch(arrays: dict[str, np.ndarray]) -> TaskBatch:
    """Returns the reference's inputs, with a label for each row if it has labels."""
    mask = arrays["inputs/attention_mask"].astype(np.int32)
    labels = arrays.get("inputs/labels", np.zeros(len(mask))).astype(np.int32)
    weights = np.ones(len(mask), np.float32)
    ids, positions = arrays["inputs/input_ids"].astype(np.int32), np.arange(mask.shape[1], dtype=np.int32)
    return TaskBatch(ids, _segments(arrays), mask, positions * mask, labels, weights)


def _segments(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Returns zeros for a reference without token types."""
    none = np.zeros_like(arrays["inputs/input_ids"])
    return arrays.get("inputs/token_type_ids", none).astype(np.int32)


def jit_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """jax.jit without LLVM's optimizations, which take half of the compilation of a program that runs once."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def assert_no_gradient_in_padding(gradients: dict[str, np.ndarray], vocab_size: int) -> None:
    for path in VOCABULARY_PATHS.intersection(gradients):
        assert not gradients[path][vocab_size:].any(), f"{path}: gradient in the vocabulary's padding"


def assert_close(got: object, wanted: np.ndarray, name: str) -> None:
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=0, atol=TOLERANCE, err_msg=f"{name}: {REFRESH}")


def assert_hidden_states_close(golden: Golden, encoded: Encoded) -> None:
    real = golden.real()
    states = [encoded.embeddings, *encoded.layers]
    assert f"outputs/hidden_{len(states)}" not in golden.arrays
    for depth, state in enumerate(states):
        assert_close(np.asarray(state)[real], golden.output(f"hidden_{depth}")[real], f"hidden_{depth}")


def assert_export_equals(golden: Golden, loaded: LoadedModel, folder: Path) -> None:
    """Asserts that the exported tensors and the shared fields of config.json are the reference's."""
    huggingface_export.write(loaded, folder)
    assert_same_tensors(safetensors.numpy.load_file(folder / "model.safetensors"), golden.tensors("weights"))
    again, first = json.loads((folder / "config.json").read_text()), json.loads(str(golden.arrays["config"]))
    shared = set(again) & set(first)
    assert {key: again[key] for key in shared} == {key: first[key] for key in shared}


def words_of(name: str, folder: Path, sample_text: Path) -> tokenizer.Tokenizer:
    """Returns a tokenizer of the family's kind with the family's special ids."""
    if name.startswith(("bert", "distilbert", "electra")):
        write_vocabulary(folder, 40)
    elif name.startswith("roberta"):
        byte_pairs(folder, [])
    else:
        make("unigram", sample_text.read_text(encoding="utf-8").split("\n"), folder)
    return tokenizer.load(folder)
