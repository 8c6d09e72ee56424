"""Exports open in the programs that people use, without a warning and with equal numbers (make peers)."""

import dataclasses
import importlib.util
import json
import subprocess
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
from exporting import SCRIPT
from random_checkpoints import odd_config, random_checkpoint, sensitive
from tokenizer_kinds import byte_pairs

from bert_jax.api import Model
from bert_jax.interop.export import export_loaded
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads.config import Heads
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.scoring import MASKINGS, ORIGINAL, WITHIN_WORD, score
from bert_jax.tokenization import tokenizer

pytestmark = pytest.mark.slow

TEXTS = ["the cat sat on a mat .", "a dog", "unwantable rivers"]
TOLERANCE = 1e-5
VECTORS = {"name": "own", "kind": "embedding", "labels": [], "max_length": 6, "pooling": "mean", "normalize": True}
# Prompts by name, the default one among them, another pooling, and vectors that are cut.
SETTINGS = (
    {},
    {"prompt": "the ", "query_prompt": "cat ", "document_prompt": "dog "},
    {"pooling": "cls", "normalize": False, "truncate_dim": 7},
    {"pooling": "max", "query_prompt": "cat ", "max_length": 24},
)


@pytest.fixture
def answers(tmp_path, peer_python):
    """Returns a function that runs a command of tests/tools/peers.py for folders: an answer of each, and the log."""

    def run(command: str, folders: list[Path]):
        (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
        arguments = [str(part) for folder in folders for part in (folder, tmp_path / "texts.json")]
        done = subprocess.run([peer_python, str(SCRIPT), command, *arguments], capture_output=True, text=True)
        if "No module named" in done.stderr:
            pytest.skip(done.stderr.splitlines()[-1])
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]
        assert len(lines) == len(folders)
        return lines, done.stderr

    return run


def assert_no_new_parameters(log: str) -> None:
    assert "MISSING" not in log and "newly initialized" not in log, log


def test_sentence_transformers_computes_our_vectors(tmp_path, answers):
    folders = []
    for index, settings in enumerate(SETTINGS):
        loaded = random_checkpoint(tmp_path / "words", odd_config(), Heads(), task=VECTORS | settings)
        for format in ("hf", "sentence_transformers"):
            folders.append(tmp_path / f"{format}{index}")
            export_loaded(loaded, folders[-1], format)
    lines, log = answers("vectors", folders)
    assert_no_new_parameters(log)
    for folder, found in zip(folders, lines, strict=True):
        model = Model(open_checkpoint(folder))
        task = model.loaded.task
        np.testing.assert_allclose(found["default"], model.encode(TEXTS), atol=TOLERANCE)
        for name in ("query", "document"):
            # The library has both prompts in every model, and one that is missing is empty.
            ours = model.encode(TEXTS, prompt=task[f"{name}_prompt"])
            np.testing.assert_allclose(found[name], ours, atol=TOLERANCE, err_msg=name)


def test_an_encoder_without_a_pooler_opens_without_new_parameters(tmp_path, answers):
    export_loaded(random_checkpoint(tmp_path / "words", odd_config(), Heads()), tmp_path / "out")
    [(first, pooled)], log = answers("encoders", [tmp_path / "out"])
    assert_no_new_parameters(log)
    np.testing.assert_allclose(pooled, np.tanh(first), atol=TOLERANCE)


def test_a_cross_encoder_gives_our_scores(tmp_path, answers):
    task = {"name": "own", "kind": "regression", "labels": [], "max_length": 24, "target_mean": 20.0, "target_std": 4.0}
    tasks = task, {"name": "own", "kind": "classification", "labels": ["a", "b", "c"], "max_length": 24}
    ours = []
    for task in tasks:
        task["columns"] = {"text": "text", "text_pair": "text_pair", "label": "label"}
        heads = Heads(pooler=True, classes=max(1, len(task["labels"])))
        loaded = random_checkpoint(tmp_path / "words", odd_config(), heads, task=task)
        export_loaded(loaded, tmp_path / task["kind"])
        ours.append(list(predict(loaded, [{"text": text, "text_pair": text} for text in TEXTS])))
    [numbers, logits], _ = answers("scores", [tmp_path / task["kind"] for task in tasks])
    np.testing.assert_allclose(numbers, [answer["score"] for answer in ours[0]], rtol=TOLERANCE)
    assert [tasks[1]["labels"][index] for index in np.argmax(logits, axis=1)] == [answer["label"] for answer in ours[1]]


def test_minicons_gives_our_scores_of_sentences(tmp_path, answers):
    """By whole words and pieces, of WordPiece and of byte-level BPE."""
    bert = sensitive(random_checkpoint(tmp_path / "words", odd_config()))
    bpe = tokenizer.load(byte_pairs(tmp_path / "bpe", ["a t", "Ġ c", "Ġc at", "u n", "Ġ r", "i v"]))
    sizes = {"vocab_size": bpe.vocab_size, "segment_types": 1, "position_offset": 2, "max_positions": 64}
    roberta = sensitive(random_checkpoint(tmp_path / "other", odd_config(**sizes), Heads(mlm=True)))
    models = bert, dataclasses.replace(roberta, vocabulary=bpe)
    for loaded, name in zip(models, ("bert", "roberta"), strict=True):
        export_loaded(loaded, tmp_path / name)
    found, _ = answers("likelihoods", [tmp_path / "bert", tmp_path / "roberta"])
    for loaded, theirs in zip(models, found, strict=True):
        assert theirs[ORIGINAL] != theirs[WITHIN_WORD]
        for masking in MASKINGS:
            np.testing.assert_allclose(score(loaded, TEXTS, masking), theirs[masking], atol=1e-4)


def test_fastembed_computes_our_vectors_by_both_programs(tmp_path, answers, monkeypatch):
    # The number of rows of a program is symbolic, which checks of int arguments refuse.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    if not all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime", "jax2onnx")):
        pytest.skip("needs the extra onnx")
    loaded = random_checkpoint(tmp_path / "words", odd_config(layers=1), Heads(), task=VECTORS | {"max_length": 24})
    export_loaded(loaded, tmp_path / "out", "onnx")
    [found], _ = answers("programs", [tmp_path / "out"])
    ours = Model(loaded).encode(TEXTS)
    np.testing.assert_allclose(found["onnx/model.onnx"], ours, atol=TOLERANCE)
    np.testing.assert_allclose(found["onnx/model_quantized.onnx"], ours, atol=0.05)
