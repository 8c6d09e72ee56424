"""Tests that Google's checkpoints give the outputs of google-research/bert.

The checkpoint and its outputs are by tests/tools/make_original_checkpoint.py, which gives each tensor values that its
name and shape determine. So most tests need no TensorFlow: they have the names of that code and compute the values.
`make tensorflow` runs those that read the files.
"""

import dataclasses
import importlib.util
import json
import shutil
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from random_checkpoints import PRETRAINING, assert_same_tensors

from bert_jax.commands import convert
from bert_jax.errors import UserError
from bert_jax.interop import huggingface, huggingface_export, original_bert
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model import layers
from bert_jax.model.bert import bind
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import answer_logits, masked_logits, next_sentence_logits, pool_vectors
from bert_jax.model.runtime import Runtime
from bert_jax.model.transformer import gather_positions
from bert_jax.tasks.registry import restore_task
from bert_jax.tasks.rows import TaskBatch

ORIGINAL = Path(__file__).parent.parent / "testdata" / "original_checkpoint"
WIDTH, FEED_FORWARD, WORDS, POSITIONS = 12, 20, 47, 16
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed; see make tensorflow"
)


def original_shapes() -> dict[str, tuple[int, ...]]:
    """The variables of google-research/bert, modeling.py, for bert_config.json of the test data."""
    shapes: dict[str, tuple[int, ...]] = {
        "bert/embeddings/word_embeddings": (WORDS, WIDTH),
        "bert/embeddings/position_embeddings": (POSITIONS, WIDTH),
        "bert/embeddings/token_type_embeddings": (2, WIDTH),
        "bert/pooler/dense/kernel": (WIDTH, WIDTH),
        "bert/pooler/dense/bias": (WIDTH,),
    }
    norms = ["bert/embeddings/LayerNorm"]
    for layer in (f"bert/encoder/layer_{number}" for number in range(2)):
        for name in ("self/query", "self/key", "self/value", "output/dense"):
            shapes[f"{layer}/attention/{name}/kernel"] = (WIDTH, WIDTH)
            shapes[f"{layer}/attention/{name}/bias"] = (WIDTH,)
        shapes[f"{layer}/intermediate/dense/kernel"] = (WIDTH, FEED_FORWARD)
        shapes[f"{layer}/intermediate/dense/bias"] = (FEED_FORWARD,)
        shapes[f"{layer}/output/dense/kernel"] = (FEED_FORWARD, WIDTH)
        shapes[f"{layer}/output/dense/bias"] = (WIDTH,)
        norms += [f"{layer}/attention/output/LayerNorm", f"{layer}/output/LayerNorm"]
    return shapes | {f"{norm}/{name}": (WIDTH,) for norm in norms for name in ("gamma", "beta")}


# The variables of run_pretraining.py, run_squad.py and, for two classes, run_classifier.py.
HEADS: dict[str, dict[str, tuple[int, ...]]] = {
    "bert_model.ckpt": {
        "cls/predictions/transform/dense/kernel": (WIDTH, WIDTH),
        "cls/predictions/transform/dense/bias": (WIDTH,),
        "cls/predictions/transform/LayerNorm/gamma": (WIDTH,),
        "cls/predictions/transform/LayerNorm/beta": (WIDTH,),
        "cls/predictions/output_bias": (WORDS,),
        "cls/seq_relationship/output_weights": (2, WIDTH),
        "cls/seq_relationship/output_bias": (2,),
    },
    "squad.ckpt": {"cls/squad/output_weights": (2, WIDTH), "cls/squad/output_bias": (2,)},
    "classifier.ckpt": {"output_weights": (2, WIDTH), "output_bias": (2,)},
}


def original_tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, as make_original_checkpoint.py computes them."""
    tensors = {}
    for name, shape in (original_shapes() | HEADS[checkpoint.name]).items():
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        tensors[name] = (0.3 * generator.standard_normal(shape)).astype(np.float32)
    return tensors


@pytest.fixture
def folder(tmp_path):
    kept_out = shutil.ignore_patterns("squad.ckpt*")
    return Path(shutil.copytree(ORIGINAL, tmp_path / "original", ignore=kept_out))


@pytest.fixture
def without_tensorflow(monkeypatch):
    """Computes the tensors of a checkpoint instead of reading its files."""
    monkeypatch.setattr(original_bert, "load_tensors", original_tensors)


@needs_tensorflow
@pytest.mark.parametrize("checkpoint", ["bert_model.ckpt", "squad.ckpt"])
def test_tensorflow_reads_the_tensors_of_the_original_code_without_training_state(checkpoint):
    tensors = original_bert.load_tensors(ORIGINAL / checkpoint)
    assert_same_tensors(tensors, original_tensors(ORIGINAL / checkpoint))


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(UserError, match=r"needs TensorFlow, and that is not installed: pip install .*\[tensorflow\]"):
        original_bert.read(ORIGINAL)


@pytest.fixture(scope="module")
def wanted():
    with np.load(ORIGINAL / "outputs.npz") as file:
        return dict(file)


def encoded(loaded, wanted, outputs):
    """Returns outputs(model, hidden states of every layer) for the batch of the original code."""
    real = jax.numpy.asarray(wanted["attention_mask"])
    ids, segments = (jax.numpy.asarray(wanted[name]) for name in ("input_ids", "segment_ids"))
    positions = jax.numpy.arange(real.shape[1])[None] * real
    batch = TaskBatch(ids, segments, real, positions, np.zeros(2, np.float32), np.zeros(2, np.float32))

    @jax.jit
    def run(params, batch):
        model = bind(loaded.model, loaded.heads, params, Runtime(layer_loop="scan"))
        encoded = model.encode(batch, all_layers=True)
        return outputs(model, jax.numpy.concatenate([encoded.embeddings[None], encoded.layers]))

    return run(layers.unflatten(loaded.params), batch)


def test_hidden_states_and_heads_equal_the_original_code(wanted, without_tensorflow):
    loaded = original_bert.read(ORIGINAL)
    assert loaded.heads == PRETRAINING and loaded.vocabulary.vocab_size == loaded.model.vocab_size

    def outputs(model, hidden):
        pooled = pool_vectors(model, gather_positions(hidden[-1], jax.numpy.zeros((2, 1), int)))
        masked = masked_logits(model, hidden[-1], jax.numpy.asarray(wanted["positions"]))
        masked = masked[..., : loaded.model.vocab_size]
        return {
            "hidden": hidden,
            "pooled": pooled[:, 0],
            "mlm_log_probs": jax.nn.log_softmax(masked).reshape(-1, masked.shape[-1]),
            "next_sentence_log_probs": jax.nn.log_softmax(next_sentence_logits(model, pooled)[:, 0]),
        }

    rows = wanted["attention_mask"] == 1
    for name, value in encoded(loaded, wanted, outputs).items():
        ours, theirs = (array[:, rows] if name == "hidden" else array for array in (np.asarray(value), wanted[name]))
        np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=name)


def test_answer_logits_of_a_run_squad_checkpoint_equal_the_original_code(wanted, without_tensorflow):
    loaded = original_bert.read(ORIGINAL / "squad.ckpt")
    assert loaded.heads == Heads(question=True, pooler=True)
    got = encoded(loaded, wanted, lambda model, hidden: answer_logits(model, hidden[-1]))
    rows = wanted["attention_mask"] == 1
    np.testing.assert_allclose(np.asarray(got)[rows], wanted["answer_logits"][rows], atol=1e-5)


def test_a_fine_tuned_checkpoint_has_the_task_of_the_same_model_in_hugging_face_format(
    tmp_path, folder, without_tensorflow
):
    assert original_bert.read(ORIGINAL).task is None
    squad = original_bert.read(ORIGINAL / "squad.ckpt")
    (folder / "classifier.ckpt.index").touch()
    classifier = original_bert.read(folder / "classifier.ckpt")
    assert (squad.task["kind"], classifier.task["labels"]) == ("question", ["LABEL_0", "LABEL_1"])
    for name, loaded in (("squad", squad), ("classifier", classifier)):
        huggingface_export.write(dataclasses.replace(loaded, task=None), tmp_path / name)
        assert huggingface.read(tmp_path / name).task == loaded.task
        assert restore_task(loaded).max_length == loaded.model.max_positions


@needs_tensorflow
def test_convert_accepts_the_folder_and_a_checkpoint_prefix(tmp_path, folder, capsys):
    convert.main(["--input", str(folder), "--output", str(tmp_path / "ours")])
    assert "2 layers x 12" in capsys.readouterr().out
    read = original_bert.read(folder)
    assert_same_tensors(open_checkpoint(tmp_path / "ours").params, read.params)
    for file in folder.glob("bert_model.ckpt.*"):
        file.rename(file.with_name(file.name.replace("bert_model.ckpt", "model.ckpt-1000")))
    assert_same_tensors(original_bert.read(folder).params, read.params)  # the only checkpoint left
    shutil.copy(folder / "model.ckpt-1000.index", folder / "model.ckpt-2000.index")
    assert_same_tensors(original_bert.read(folder / "model.ckpt-1000").params, read.params)
    with pytest.raises(UserError, match=r"holds 2 checkpoints\. Give one of them, such as .*model\.ckpt-2000"):
        original_bert.read(folder)
    with pytest.raises(UserError, match=r"model\.ckpt-2000 is damaged or incomplete \(.*data-00000-of-00001"):
        original_bert.read(folder / "model.ckpt-2000")
    with pytest.raises(UserError, match="bert-jax convert --input"):
        open_checkpoint(folder)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: flip(d / "bert_model.ckpt.index", 100), "is damaged or incomplete .*checksum mismatch"),
        (lambda d: (d / "bert_model.ckpt.index").write_bytes(b"short"), "is damaged or incomplete .*too short"),
        (lambda d: flip(d / "bert_model.ckpt.data-00000-of-00001", 5000), "is damaged or incomplete .*Checksum does"),
        (
            lambda d: (d / "bert_model.ckpt.data-00000-of-00001").write_bytes(b"123"),
            "is damaged or incomplete .*Read less bytes",
        ),
    ],
)
@needs_tensorflow
def test_damage_is_reported_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        original_bert.read(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "bert_model.ckpt.index").unlink(), "holds bert_config.json but no checkpoint"),
        (lambda d: (d / "vocab.txt").unlink(), r"contains no tokenizer: no tokenizer\.json, vocab\.txt"),
        (
            lambda d: (d / "vocab.txt").write_text((d / "vocab.txt").read_text() + "more\n"),
            "the tokenizer has 48 tokens, but bert_config.json has vocab_size 47",
        ),
        (
            {"num_hidden_layers": 3},
            r"tensor encoder\.layer\.2\.attention\.self\.query\.weight is missing \(16 in all\)",
        ),
        (
            {"num_hidden_layers": 1},
            r"tensor bert/encoder/layer_1/\S+ \(.* is not part of .* bert_config\.json \(16 such tensors\)",
        ),
        (
            {"intermediate_size": 24},
            r"intermediate/dense/kernel \(.* in transformers\) has shape \[20, 12\], but bert_config.* \[24, 12\]",
        ),
        ({"hidden_act": "swish"}, "hidden_act is 'swish'"),
        ({"hidden_size": "12"}, "hidden_size is '12'; expected an integer"),
    ],
)
def test_a_wrong_file_or_field_is_reported(folder, without_tensorflow, damage, message):
    if callable(damage):
        damage(folder)
    else:
        file = folder / "bert_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    with pytest.raises(UserError, match=message):
        original_bert.read(folder)
