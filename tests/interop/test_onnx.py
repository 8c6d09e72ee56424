"""Tests that ONNX programs give the outputs of transformers and of the model in onnxruntime (make onnx)."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys

import jaxtyping
import numpy as np
import pytest
from exporting import our_outputs
from golden import open_golden, words_of
from random_checkpoints import PRETRAINING, modernbert, odd_config, random_checkpoint

from bert_jax.commands import export as commands_export
from bert_jax.errors import UserError
from bert_jax.interop import export
from bert_jax.interop import onnx as onnx_export
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads.config import Heads
from bert_jax.tasks.embedder import embed
from bert_jax.tokenization.tokenizer import Tokenizer

onnx = pytest.importorskip("onnx", reason="needs the extra: pip install '.[onnx]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra: pip install '.[onnx]'")
pytest.importorskip("jax2onnx", reason="needs the extra: pip install '.[onnx]'")

TOLERANCE = 1e-4  # of float32 outputs, as docs/exporting.md states
NAMES = {"mlm_logits": "logits", "lm_logits": "logits", "next_sentence_logits": "seq_relationship_logits"}

# Models that transformers computed: of each family, and of each kind of head.
REFERENCES = (
    "bert_pretraining",
    "bert_question",
    "bert_tagging",
    "roberta_question",
    "xlm_roberta_classification",
    "distilbert_classification",
    "electra_masked_lm",
    "electra_classification",
    "albert_pretraining",
    "mpnet_masked_lm",
    "modernbert_mlm",
    "modernbert_mean",
    "gpt2",
)

ELECTRA = odd_config(layers=2, embedding_width=12, pooler="gelu")
ALBERT = odd_config(layers=2, embedding_width=12, shared_layers="all", activation="gelu_tanh")
RANDOM = {
    "features": (
        odd_config(layers=2),
        Heads(pooler=True),
        {"hidden_2": "last_hidden_state", "pooled": "pooler_output"},
    ),
    "classification": (odd_config(layers=2), Heads(pooler=True, classes=3), {"class_logits": "logits"}),
    "tagging": (
        odd_config(layers=13),
        Heads(tags=4),
        {"tag_logits": "logits"},
    ),  # more layers than are unrolled by default
    "spans": (modernbert(), Heads(question=True), {"start_logits": "start_logits", "end_logits": "end_logits"}),
    "replaced tokens": (ELECTRA, Heads(replaced_tokens=True), {"replaced_token_logits": "logits"}),
    "masked language model": (ALBERT, Heads(mlm=True), {"vocabulary_logits": "logits"}),
    "pretraining": (
        odd_config(layers=2),
        PRETRAINING,
        {"vocabulary_logits": "logits", "next_sentence_logits": "seq_relationship_logits"},
    ),
}


@pytest.fixture(autouse=True)
def symbolic_sizes(monkeypatch):
    """Disables checks of int arguments, since the number of rows of a program is symbolic."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def run(folder, inputs):
    """Returns the outputs of a folder's program by name; the inputs are cut to those that it has."""
    [program] = sorted((folder / "onnx").glob("*.onnx"))[:1]
    session = onnxruntime.InferenceSession(program, providers=["CPUExecutionProvider"])
    given = {one.name: inputs[one.name].astype(np.int64) for one in session.get_inputs()}
    return dict(zip([one.name for one in session.get_outputs()], session.run(None, given), strict=True))


@pytest.mark.parametrize("name", REFERENCES)
def test_a_program_gives_the_outputs_of_transformers(tmp_path, sample_text, name):
    golden = open_golden(name, tmp_path)
    loaded = golden.loaded
    if "roberta" in name:
        loaded = dataclasses.replace(loaded, vocabulary=words_of(name, tmp_path / "words", sample_text))
    onnx_export.write(loaded, tmp_path / "out", "float32")
    inputs = {key.removeprefix("inputs/"): value for key, value in golden.arrays.items() if key.startswith("inputs/")}
    got = run(tmp_path / "out", inputs)
    wanted = {
        NAMES.get(key, key): golden.output(key)
        for key in ("logits", "mlm_logits", "lm_logits", "next_sentence_logits", "start_logits", "end_logits")
        if f"outputs/{key}" in golden.arrays
    }
    assert set(got) == set(wanted)
    for output, value in wanted.items():
        rows = golden.real() if value.shape[:2] == golden.real().shape else slice(None)
        np.testing.assert_allclose(got[output][rows], value[rows], atol=TOLERANCE, err_msg=output)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == json.loads(str(golden.arrays["config"]))["architectures"]


@pytest.mark.parametrize("name", RANDOM)
def test_a_program_gives_the_model_s_outputs_for_any_batch_and_length(tmp_path, name):
    config, heads, names = RANDOM[name]
    loaded = random_checkpoint(tmp_path / "words", config, heads)
    onnx_export.write(loaded, tmp_path / "out", "float32")
    onnx.checker.check_model(onnx.load(tmp_path / "out" / "onnx" / "model.onnx"), full_check=True)
    for length, rows in ((24, slice(None)), (17, slice(1, 2))):
        ours = our_outputs(loaded, length)
        mask = ours["attention_mask"][rows]
        inputs = {"input_ids": ours["input_ids"][rows], "attention_mask": mask}
        inputs["token_type_ids"] = ours.get("segment_ids", mask * 0)[rows]
        got = run(tmp_path / "out", inputs)
        assert set(got) == set(names.values())
        for own, output in names.items():
            real = mask == 1 if ours[own].shape[:2] == ours["attention_mask"].shape else slice(None)
            np.testing.assert_allclose(got[output][real], ours[own][rows][real], atol=TOLERANCE, err_msg=output)


@pytest.mark.parametrize(
    ("pooling", "normalize", "truncate_dim"),
    [("mean", True, 5), ("cls", False, 0), ("max", False, 3), ("last", True, 0)],
)
def test_the_vectors_of_texts_are_those_of_embed(tmp_path, pooling, normalize, truncate_dim):
    task = {"name": "own", "kind": "embedding", "labels": [], "max_length": 16}
    task |= {"pooling": pooling, "normalize": normalize, "truncate_dim": truncate_dim}
    loaded = random_checkpoint(tmp_path / "words", odd_config(layers=1), Heads(pooler=True), task=task)
    onnx_export.write(loaded, tmp_path / "out", "float32")
    assert {"modules.json", "1_Pooling", "sentence_bert_config.json"} <= {
        one.name for one in (tmp_path / "out").iterdir()
    }
    words, texts = Tokenizer(loaded.vocabulary.spec), ["the cat sat on a mat", "unwantable", "river dog ."]
    ids = [[words.cls_id, *words.encode(text).tolist(), words.sep_id] for text in texts]
    mask = np.arange(max(map(len, ids))) < np.array([[len(row)] for row in ids])
    padded = np.zeros(mask.shape, np.int64)
    padded[mask] = np.concatenate(ids)
    got = run(tmp_path / "out", {"input_ids": padded, "attention_mask": mask, "token_type_ids": mask * 0})
    assert set(got) == {"last_hidden_state", "sentence_embedding"}
    np.testing.assert_allclose(got["sentence_embedding"], embed(loaded, texts)["embeddings"], atol=TOLERANCE)


@pytest.mark.parametrize("config", [odd_config(layers=2), modernbert(layers=2)], ids=["bert", "modernbert"])
def test_int8_quantizes_every_matrix_and_its_outputs_stay_near(tmp_path, config):
    loaded = random_checkpoint(tmp_path / "words", config, Heads(tags=4))
    found = onnx_export.write(loaded, tmp_path / "out", "int8")["int8"]
    [program] = (tmp_path / "out" / "onnx").iterdir()
    assert program.name == "model_quantized.onnx"
    graph = onnx.load(program).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMulInteger"]
    assert len(products) >= 4 * config.layers + 1  # queries, keys and values; output; two of the feed-forward; the head
    assert all(types[node.input[1]] == onnx.TensorProto.INT8 for node in products)
    assert not any(node.op_type in ("MatMul", "Gemm") and node.input[1] in types for node in graph.node)
    tables = [list(one.dims) for one in graph.initializer if one.data_type == onnx.TensorProto.UINT8 and one.dims]
    assert tables == [list(loaded.params["embeddings/token/table"].shape)]
    assert 1e-4 < found["logits"].relative < 0.1
    ours = our_outputs(loaded)
    got = run(tmp_path / "out", ours | {"token_type_ids": ours.get("segment_ids")})["logits"]
    real = ours["attention_mask"] == 1
    assert np.abs(got - ours["tag_logits"])[real].max() < 0.1 * np.abs(ours["tag_logits"]).max()


def test_tensors_beyond_the_limit_of_a_file_are_in_a_second_one(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "TENSORS_LIMIT", 1000)
    loaded = random_checkpoint(tmp_path / "words", odd_config(layers=1), Heads(pooler=True, classes=3))
    measured = onnx_export.write(loaded, tmp_path / "out")
    names = {name for file in ("model.onnx", "model_quantized.onnx") for name in (file, f"{file}_data")}
    assert {file.name for file in (tmp_path / "out" / "onnx").iterdir()} == names
    assert measured["float32"]["logits"].error < TOLERANCE and measured["int8"]["logits"].error < 0.1
    sizes = {name: (tmp_path / "out" / "onnx" / name).stat().st_size for name in names}
    assert sizes["model_quantized.onnx_data"] < sizes["model.onnx_data"]


def test_a_program_that_differs_is_not_written(tmp_path, monkeypatch):
    loaded = random_checkpoint(tmp_path / "words", odd_config(layers=1), Heads(tags=4))
    bias = loaded.params["tagger/dense/bias"] + np.array([0, 0.01, 0, 0], np.float32)
    other = dataclasses.replace(loaded, params={**loaded.params, "tagger/dense/bias": bias})
    convert = onnx_export.convert
    monkeypatch.setattr(onnx_export, "convert", lambda _, compute: convert(other, compute))
    with pytest.raises(UserError, match=r"the ONNX program's logits differs from the model's by 1\.0e-02"):
        onnx_export.write(loaded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_models_without_the_format_are_refused_in_one_line(tmp_path):
    for heads, config, message in (
        (Heads(pooler=True, choices=True), odd_config(), "does not write models of multiple choice"),
        (Heads(tags=4, crf=True), odd_config(), r"cannot hold heads\.crf=True"),
        (Heads(mlm=True), odd_config(positions="none", relative="shaw", relative_distance=3), "no Hugging Face format"),
    ):
        loaded = random_checkpoint(tmp_path / "words", config, heads)
        with pytest.raises(UserError, match=message):
            onnx_export.write(loaded, tmp_path / "out")


def test_the_command_writes_a_folder_whose_readme_runs(tmp_path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed, whose tokenizer README.md uses")
    task = {"name": "own", "kind": "classification", "labels": ["bad", "good"]}
    loaded = random_checkpoint(tmp_path / "words", odd_config(layers=1), Heads(pooler=True, classes=2), task=task)
    export.export_loaded(loaded, tmp_path / "workdir", "orbax")
    out = tmp_path / "out"
    commands_export.main(["--checkpoint", str(tmp_path / "workdir"), "--format", "onnx", "--output", str(out)])
    with pytest.raises(UserError, match="holds ONNX programs, not a checkpoint"):
        open_checkpoint(out)
    [shown] = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    shown = shown.replace("PATH", str(out)).replace("Some text.", "the cat sat").replace("More text.", "a dog")
    done = subprocess.run(
        [sys.executable, "-c", shown + "print(outputs['logits'].tolist())"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    words = Tokenizer(loaded.vocabulary.spec)
    ids = [[words.cls_id, *words.encode(text).tolist(), words.sep_id] for text in ("the cat sat", "a dog")]
    for row, logits in zip(ids, json.loads(done.stdout.splitlines()[-1]), strict=True):
        inputs = {"input_ids": np.array([row]), "attention_mask": np.ones((1, len(row)))}
        got = run(out, inputs | {"token_type_ids": np.zeros((1, len(row)))})["logits"]
        np.testing.assert_allclose(logits, got[0], atol=TOLERANCE)
