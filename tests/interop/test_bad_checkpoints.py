"""A bad checkpoint or input gives exit code 2 and one line that names the tensor or field."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from random_checkpoints import odd_config, random_checkpoint, write_vocabulary

from bert_jax import command_line
from bert_jax.commands import convert, embed, export, fill_mask
from bert_jax.errors import UserError
from bert_jax.interop import export as bert_jax_export
from bert_jax.interop import huggingface, huggingface_export
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import read_json, refuse_pickle


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    huggingface_export.write(random_checkpoint(folder / "vocabulary", odd_config()), folder / "model")
    return folder / "model"


@pytest.fixture
def folder(whole, tmp_path):
    """A pretrained model in Hugging Face format, for a test to damage."""
    return shutil.copytree(whole, tmp_path / "model")


@pytest.fixture
def error_of(monkeypatch, capsys):
    """Runs a command that fails with exit code 2, and returns the one line that it prints."""

    def run(main, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            command_line.run(main)
        message = capsys.readouterr().err
        assert stopped.value.code == 2, message
        assert message.count("\n") == 1 and message.startswith("error: "), message
        return message

    return run


def change_config(folder: Path, **changes: object) -> None:
    values = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(values | changes))


def change_tensors(folder: Path, **changes: np.ndarray | None) -> None:
    """Replaces tensors by name, with __ for a dot; None removes one."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    kept = {name: value for name, value in tensors.items() if value is not None}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "t5"}, "model_type is 't5'"),
        ({"model_type": ["bert"]}, "model_type is ['bert']"),
        ({"architectures": ["BertLMHeadModel"]}, "architectures is 'BertLMHeadModel'"),
        ({"architectures": [7]}, "architectures is 7"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"hidden_act": ["gelu"]}, "hidden_act is ['gelu']"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"position_embedding_type": "relative_key_query"}, "position_embedding_type is 'relative_key_query'"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is {'0': [1]}"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 10**6}, "1000000 layers"),
        ({"hidden_size": 10**7}, "word_embeddings.weight has shape [131, 20], but config.json expects [131, 10000000]"),
        ({"hidden_size": 22}, "config.json: hidden_size 22 is not a multiple of num_attention_heads 4"),
        ({"hidden_size": -20}, "hidden_size is -20"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"intermediate_size": 2.5}, "intermediate_size is 2.5"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps is nan"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob is 1.0"),
    ],
)
def test_an_unsupported_field_is_named(folder, tmp_path, error_of, changes, field):
    change_config(folder, **changes)
    message = error_of(convert.main, "--input", folder, "--output", tmp_path / "out")
    assert field in message and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"bert__pooler__dense__bias": None}, "pooler.dense.bias is missing"),
        ({"bert__encoder__layer__1__output__dense__weight": None}, "encoder.layer.1.output.dense.weight is missing"),
        ({"bert__encoder__layer__3__output__dense__bias": np.zeros(20, np.float32)}, "encoder.layer.3.output.dense"),
        ({"cls__predictions__bias": np.zeros((131, 1), np.float32)}, "cls.predictions.bias has shape [131, 1]"),
        ({"bert__pooler__dense__bias": np.zeros((), np.float32)}, "pooler.dense.bias has shape []"),
        ({"bert__pooler__dense__bias": np.zeros(20, np.int64)}, "pooler.dense.bias has dtype int64"),
    ],
)
def test_a_missing_unexpected_or_misshapen_tensor_is_named(folder, tmp_path, error_of, changes, tensor):
    change_tensors(folder, **changes)
    assert tensor in error_of(convert.main, "--input", folder, "--output", tmp_path / "out")


def split_in_two(folder: Path) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, held in parts.items():
        safetensors.numpy.save_file({name: tensors[name] for name in held}, folder / part)
    write_index(folder, {name: part for part, held in parts.items() for name in held})


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_with_a_missing_or_wrong_part_is_refused(folder, tmp_path, error_of):
    arguments = ("--input", folder, "--output", tmp_path / "out")
    split_in_two(folder)
    whole = read_json(folder / "model.safetensors.index.json")["weight_map"]
    write_index(folder, dict.fromkeys(whole, "a.safetensors"))
    assert "but the file does not hold it" in error_of(convert.main, *arguments)
    for broken in (["a.safetensors"], {"bert.pooler.dense.bias": 1}, None):
        write_index(folder, broken)
        assert "weight_map does not map each tensor to a file" in error_of(convert.main, *arguments)
    write_index(folder, whole)
    (folder / "b.safetensors").unlink()
    assert "names b.safetensors" in error_of(convert.main, *arguments)
    (folder / "b.safetensors").write_bytes(b"\0" * 100)
    assert "b.safetensors is damaged" in error_of(convert.main, *arguments)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "weights.pt"])
def test_a_pickle_is_refused_in_a_folder_and_as_a_path(folder, tmp_path, error_of, name):
    (folder / "model.safetensors").rename(folder / name)
    for path in (folder, folder / name):
        message = error_of(convert.main, "--input", path, "--output", tmp_path / "out")
        assert f"{name}, a pickle: reading one can run any code" in message and "save_pretrained(NEW_FOLDER)" in message
    assert "a pickle" in error_of(export.main, "--checkpoint", folder / name, "--output", tmp_path / "out")


@pytest.mark.parametrize(
    ("architectures", "advice"),
    [
        (["BertForSequenceClassification"], r"transformers: BertForSequenceClassification.from_pretrained(FOLDER)"),
        ("BertForMaskedLM", "transformers: BertForMaskedLM.from_pretrained(FOLDER)"),
        (["AntiBERTy"], "transformers: AntiBERTy.from_pretrained(FOLDER)"),
        (None, "names no class in architectures; AutoModel keeps no head"),
        ([], "transformers: AutoModel.from_pretrained(FOLDER)"),
        (["no name"], "transformers: AutoModel.from_pretrained(FOLDER)"),
    ],
)
def test_the_advice_for_a_pickle_names_the_class_of_the_weights(tmp_path, architectures, advice):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=re.escape(advice)):
        refuse_pickle(tmp_path / "pytorch_model.bin")


def test_sequences_longer_than_the_positions_are_refused(folder, tmp_path, error_of):
    (tmp_path / "texts.txt").write_text("the cat\n")
    arguments = ("--checkpoint", folder, "--input", tmp_path / "texts.txt", "--output", tmp_path / "out.npz")
    message = error_of(embed.main, *arguments, "--max_length", 25)
    assert "max_length is 25; use 5 to 24 (the model's positions)" in message
    message = error_of(fill_mask.main, "--checkpoint", folder, "the [MASK] " * 20)
    assert "42 tokens does not fit the model's 24 positions" in message


def test_a_tokenizer_with_ids_outside_the_vocabulary_is_refused(folder, tmp_path, error_of):
    bert_jax_export.write(huggingface.read(folder), tmp_path / "workdir")
    for place, tokenizer in ((folder, folder), (tmp_path / "workdir", tmp_path / "workdir" / "tokenizer")):
        for file in tokenizer.glob("*token*.json"):
            file.unlink()
        write_vocabulary(tokenizer, 140)
        message = error_of(fill_mask.main, "--checkpoint", place, "the [MASK] sat")
        assert "the tokenizer has 140 tokens, but config.json has vocab_size 131" in message


def test_a_command_that_needs_a_missing_head_is_refused(tmp_path, error_of):
    bare = random_checkpoint(tmp_path / "vocabulary", odd_config(), Heads(pooler=True))
    huggingface_export.write(bare, tmp_path / "bare")
    message = error_of(fill_mask.main, "--checkpoint", tmp_path / "bare", "the [MASK] sat")
    assert "has no masked language model head" in message
    change_config(tmp_path / "bare", architectures=["BertForMaskedLM"])
    message = error_of(convert.main, "--input", tmp_path / "bare", "--output", tmp_path / "out")
    assert "tensor cls.predictions." in message and "is missing (5 in all)" in message


def test_json_nested_too_deeply_is_refused(folder, tmp_path, error_of):
    (folder / "config.json").write_text("[" * 100_000)
    assert "config.json is not valid JSON" in error_of(convert.main, "--input", folder, "--output", tmp_path / "out")
