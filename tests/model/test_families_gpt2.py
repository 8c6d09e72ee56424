"""Tests of GPT-2's config.json and vocabulary, and of export and import with every head."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy
from exporting import assert_transformers_agrees
from golden import open_golden
from random_checkpoints import assert_same_tensors, odd_config, random_checkpoint
from tokenizer_kinds import byte_pairs

from bert_jax.config import (
    AutoObjective,
    AutoTaskConfig,
    FinetuneConfig,
    ModelOptions,
    PretrainConfig,
    PretrainDataConfig,
    ReplacedTokens,
)
from bert_jax.data.shards import open_dataset
from bert_jax.errors import UserError
from bert_jax.interop import huggingface, huggingface_export
from bert_jax.interop.families.gpt2 import ALWAYS
from bert_jax.model.heads.config import Heads
from bert_jax.pretraining import pretrain
from bert_jax.tasks.finetuning import finetune
from bert_jax.tokenization import tokenizer
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.inspection import verify

TAGS = {"name": "tags", "kind": "tagging", "labels": ["A", "B", "C", "D"]}
CASES = {
    "GPT2Model": (Heads(), None),
    "GPT2LMHeadModel": (Heads(lm=True), None),
    "GPT2ForTokenClassification": (Heads(tags=4), TAGS),
    "GPT2ForQuestionAnswering": (Heads(question=True), None),
}
END = "<|endoftext|>"


def gpt2(**changes):
    return odd_config(**({"layer_norm_epsilon": 1e-5, "activation": "gelu_tanh"} | ALWAYS | changes))


@pytest.mark.parametrize("architecture", CASES)
@pytest.mark.parametrize("tied", [True, False])
def test_export_and_import_preserve_everything(tmp_path, architecture, tied):
    heads, task = CASES[architecture]
    loaded = random_checkpoint(tmp_path / "words", gpt2(tied_output=tied), heads, task=task)
    huggingface_export.write(loaded, tmp_path / "out")
    again = huggingface.read(tmp_path / "out")
    assert (again.model, again.heads) == (loaded.model, loaded.heads)
    assert_same_tensors(again.params, loaded.params)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [architecture]
    tensors = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in tensors) == (heads.lm and not tied)


def test_files_in_the_published_form_are_read(tmp_path):
    """Published files have no prefix despite a head, contain the causal mask, and repeat the output table."""
    first = open_golden("gpt2", tmp_path).loaded
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    bare["h.2.attn.bias"] = np.tril(np.ones((1, 1, 19, 19), np.float32))
    bare["h.2.attn.masked_bias"] = np.array(-1e4, np.float32)
    bare["lm_head.weight"] = bare["wte.weight"]
    safetensors.numpy.save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = huggingface.read(tmp_path)
    assert (again.model, again.heads) == (first.model, first.heads)
    assert_same_tensors(again.params, first.params)


def test_the_inner_width_defaults_to_four_times_the_width(tmp_path):
    loaded = random_checkpoint(tmp_path / "words", gpt2(feed_forward=80), Heads(lm=True))
    huggingface_export.write(loaded, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    for inner in ({}, {"n_inner": None}):
        without = {name: value for name, value in values.items() if name not in ("n_inner", "activation_function")}
        (tmp_path / "out" / "config.json").write_text(json.dumps(without | inner))
        assert huggingface.read(tmp_path / "out").model == loaded.model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"activation_function": "silu"}, "activation_function is 'silu'"),
        ({"n_inner": "x"}, "n_inner is 'x'; expected an integer"),
        ({"n_embd": None}, "n_embd is None"),
        ({"tie_word_embeddings": False}, r"tensor lm_head\.weight is missing"),
    ],
)
def test_an_unsupported_field_is_named(tmp_path, changes, message):
    open_golden("gpt2", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(UserError, match=message):
        huggingface.read(tmp_path)


def test_unsupported_fields_are_named(tmp_path):
    for changes, message in (({"embedding_norm": True}, "embedding_norm=True"), ({"bias": False}, "bias=False")):
        loaded = random_checkpoint(tmp_path / "words", gpt2(**changes), Heads(lm=True))
        with pytest.raises(UserError, match=f"nearest is GPT-2, except for {message}"):
            huggingface_export.write(loaded, tmp_path / "out")


def write_vocabulary(folder, settings, left_out=("<s>", "<pad>", "</s>", "<unk>", "<mask>")) -> tokenizer.Tokenizer:
    """Writes letters, a few merges, and GPT-2's special token in place of RoBERTa's."""
    file = byte_pairs(folder, ["t h", "th e"]) / "vocab.json"
    tokens = [token for token in json.loads(file.read_text()) if token not in left_out]
    file.write_text(json.dumps({token: index for index, token in enumerate([*tokens, END])}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.load(folder)


@pytest.mark.parametrize("settings", [{}, {"bos_token": END, "eos_token": END, "unk_token": END}])
def test_one_special_token_serves_every_role(tmp_path, settings):
    words = write_vocabulary(tmp_path / "words", settings)
    end = words.token_id(END)
    assert {words.pad_id, words.unk_id, words.cls_id, words.sep_id, words.mask_id} == {end}
    assert words.special_ids == (end,) and not words.has_mask
    assert words.decode(words.encode("the cat, the mat")) == "the cat, the mat"
    loaded = random_checkpoint(tmp_path / "other", gpt2(vocab_size=words.vocab_size), Heads(lm=True))
    huggingface_export.write(dataclasses.replace(loaded, vocabulary=words), tmp_path / "out")
    assert huggingface.read(tmp_path / "out").vocabulary.content_hash == words.content_hash


def test_an_added_padding_token_is_used_for_padding(tmp_path):
    left_out = ("<s>", "</s>", "<unk>", "<mask>")
    words = write_vocabulary(tmp_path, {"eos_token": END, "pad_token": "<pad>"}, left_out)
    assert (words.pad_id, words.sep_id) == (words.token_id("<pad>"), words.token_id(END))


def test_the_vocabulary_serves_causal_models_only(tmp_path):
    write_vocabulary(tmp_path / "words", {})
    letters = np.random.default_rng(0).choice(list("abcdefgh    "), (40, 60))
    (tmp_path / "text.txt").write_text("\n\n".join("".join(line) for line in letters))
    build(
        BuildOptions(
            str(tmp_path / "text.txt"), tmp_path / "words", tmp_path / "data", 24, objective="single", workers=1
        )
    )
    verify(tmp_path / "data")
    rows = open_dataset(str(tmp_path / "data"), "train")
    assert rows.vocabulary().mask_id == rows.vocabulary().sep_id
    config = PretrainConfig(model=ModelOptions(preset="tiny"), data=PretrainDataConfig(train=str(tmp_path / "data")))
    for objective in (AutoObjective(), ReplacedTokens()):
        with pytest.raises(UserError, match=r"has no mask token; .* --config\.model\.causal=true"):
            pretrain(dataclasses.replace(config, objective=objective), tmp_path / "run")


def test_classifying_by_the_first_token_of_a_causal_model_is_refused(tmp_path):
    huggingface_export.write(random_checkpoint(tmp_path / "words", gpt2(), Heads(lm=True)), tmp_path / "gpt2")
    (tmp_path / "train.tsv").write_text("text\tlabel\nthe cat\tx\na mat\ty\n")
    files = {"train": str(tmp_path / "train.tsv"), "dev": str(tmp_path / "train.tsv")}
    config = FinetuneConfig(init_from=str(tmp_path / "gpt2"), task=AutoTaskConfig(text="text", label="label", **files))
    with pytest.raises(UserError, match=r"the model is causal.*task\.pooling=mean"):
        finetune(config, tmp_path / "run")


@pytest.mark.slow
def test_transformers_loads_exports_and_gives_the_same_outputs(tmp_path, peer_python):
    cases = [(heads, {"tied_output": True}) for heads, _ in CASES.values()]
    cases += [(Heads(lm=True), {"tied_output": False, "activation": "relu"})]
    exports = []
    for index, (heads, changes) in enumerate(cases):
        loaded = random_checkpoint(tmp_path / f"words{index}", gpt2(**changes), heads)
        huggingface_export.write(loaded, tmp_path / str(index))
        exports.append((tmp_path / str(index), loaded))
    said = assert_transformers_agrees(peer_python, exports, tolerance=1e-5)
    assert [one["architecture"] for one in said][: len(CASES)] == list(CASES)
