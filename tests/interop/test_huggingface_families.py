"""Tests of the Hugging Face formats of BERT's relatives: export, import, and errors that name the field."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from exporting import assert_transformers_agrees
from random_checkpoints import assert_same_tensors, change_config, odd_config, random_checkpoint
from tokenizer_kinds import byte_pairs, make

from bert_jax.errors import UserError
from bert_jax.interop import huggingface, huggingface_export
from bert_jax.interop.huggingface_export import describe
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model.heads.config import Heads, SpanHeads
from bert_jax.tokenization import tokenizer

HEADS = {
    "Model": Heads(pooler=True),
    "ForMaskedLM": Heads(mlm=True),
    "ForSequenceClassification": Heads(pooler=True, classes=3),
    "ForTokenClassification": Heads(tags=4),
    "ForQuestionAnswering": Heads(question=True),
    "ForMultipleChoice": Heads(pooler=True, choices=True),
}
ROBERTA = odd_config(segment_types=1, position_offset=2, layer_norm_epsilon=1e-5)


def byte_pair_model(folder: Path, heads: Heads, config=ROBERTA) -> LoadedModel:
    words = tokenizer.load(byte_pairs(folder / "words", []))
    return dataclasses.replace(random_checkpoint(folder / "other", config, heads), vocabulary=words)


@pytest.mark.parametrize("ending", HEADS)
def test_export_and_import_preserve_roberta(tmp_path, ending):
    loaded = byte_pair_model(tmp_path, HEADS[ending])
    huggingface_export.write(loaded, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["model_type"], values["architectures"]) == ("roberta", [f"Roberta{ending}"])
    assert (values["max_position_embeddings"], values["pad_token_id"], values["type_vocab_size"]) == (26, 1, 1)
    again = huggingface.read(tmp_path / "out")
    assert (again.model, again.heads) == (loaded.model, loaded.heads)
    assert_same_tensors(again.params, loaded.params)
    assert again.vocabulary.content_hash == loaded.vocabulary.content_hash
    held = sum(value.size for value in safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors").values())
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"A RoBERTa encoder of 3 layers, width 20, 4 attention heads and {held:,} parameters" in card
    assert describe(loaded).startswith("RoBERTa, 3 layers x 20")


def test_a_model_with_a_sentencepiece_vocabulary_is_exported_as_xlm_roberta(tmp_path, sample_text):
    make("unigram", sample_text.read_text(encoding="utf-8").split("\n"), tmp_path / "words")
    words = tokenizer.load(tmp_path / "words")
    config = dataclasses.replace(ROBERTA, vocab_size=words.vocab_size)
    loaded = dataclasses.replace(random_checkpoint(tmp_path / "other", config, Heads(mlm=True)), vocabulary=words)
    huggingface_export.write(loaded, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["model_type"], values["architectures"]) == ("xlm-roberta", ["XLMRobertaForMaskedLM"])
    assert "XLM-RoBERTa encoder" in (tmp_path / "out" / "README.md").read_text()
    assert describe(loaded).startswith("XLM-RoBERTa, 3 layers x 20")
    again = huggingface.read(tmp_path / "out")
    assert again.model == loaded.model and again.vocabulary.content_hash == words.content_hash
    assert_same_tensors(again.params, loaded.params)


def test_a_model_without_segments_gets_rows_without_token_types(tmp_path):
    for kind, loaded in (
        ("bpe", byte_pair_model(tmp_path / "bpe", Heads(mlm=True))),
        ("wordpiece", random_checkpoint(tmp_path / "wordpiece", odd_config(segment_types=1), Heads(mlm=True))),
    ):
        huggingface_export.write(loaded, tmp_path / f"{kind}_out")
        library = tokenizers.Tokenizer.from_file(str(tmp_path / f"{kind}_out" / "tokenizer.json"))
        pair = library.encode("a cat", "the mat")
        words = loaded.vocabulary
        assert not any(pair.type_ids) and pair.ids.count(words.sep_id) == 1 + words.pair_separators
        settings = json.loads((tmp_path / f"{kind}_out" / "tokenizer_config.json").read_text())
        if settings["tokenizer_class"] != "RobertaTokenizer":  # this class gives none by default
            assert settings["model_input_names"] == ["input_ids", "attention_mask"]


def test_extra_tensors_of_published_roberta_files_are_left_out(tmp_path, capsys):
    loaded = byte_pair_model(tmp_path, Heads(pooler=True, classes=3))
    huggingface_export.write(loaded, tmp_path / "out")
    tensors = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert {"classifier.dense.weight", "classifier.out_proj.bias"} < set(tensors)
    tensors["roberta.pooler.dense.weight"] = np.ones((20, 20), np.float32)
    tensors["roberta.embeddings.position_ids"] = np.arange(26)[None]
    safetensors.numpy.save_file(tensors, tmp_path / "out" / "model.safetensors")
    assert_same_tensors(huggingface.read(tmp_path / "out").params, loaded.params)
    said = capsys.readouterr().err
    assert "left out: pooler.dense.weight" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": 2}, r"max_position_embeddings is 2; expected more than 2, the rows"),
        ({"pad_token_id": 0}, None),  # another offset into the same table
        ({"pad_token_id": None}, r"pad_token_id is None; expected an integer"),
        ({"hidden_act": "relu"}, r"hidden_act is 'relu'; only 'gelu' is supported"),
        (
            {"type_vocab_size": 2},
            r"token_type_embeddings\.weight has shape \[1, 20\], but config\.json expects \[2, 20\]",
        ),
        ({"architectures": ["RobertaForCausalLM"]}, r"architectures is 'RobertaForCausalLM'"),
        ({"architectures": ["RobertaForSequenceClassification"]}, r"tensor classifier\.dense\.\S+ is missing"),
    ],
)
def test_an_unsupported_roberta_field_is_named(tmp_path, changes, message):
    huggingface_export.write(byte_pair_model(tmp_path, Heads(mlm=True)), tmp_path / "out")
    change_config(tmp_path / "out", **changes)
    if message is None:
        assert huggingface.read(tmp_path / "out").model.position_offset == 1
        return
    with pytest.raises(UserError, match=message):
        huggingface.read(tmp_path / "out")


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu_sigmoid", "relu"])
def test_an_untied_output_and_the_other_activations_survive_export(tmp_path, activation):
    loaded = random_checkpoint(tmp_path / "words", odd_config(activation=activation, tied_output=False))
    huggingface_export.write(loaded, tmp_path / "out")
    tensors = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["cls.predictions.decoder.weight"].shape == (131, 20)
    again = huggingface.read(tmp_path / "out")
    assert again.model == loaded.model
    assert_same_tensors(again.params, loaded.params)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"norm": "pre"}, "norm='pre'"),
        ({"relative": "shaw"}, "relative='shaw'"),
        ({"positions": "sinusoidal"}, "positions='sinusoidal'"),
        ({"bias": False}, "bias=False"),
        ({"segment_types": 0}, "segment_types=0"),
        ({"pooler": "transform"}, "pooler='transform'"),
        ({"causal": True}, "causal=True"),
    ],
)
def test_an_architecture_without_a_format_names_the_field_and_the_alternative(tmp_path, changes, field):
    loaded = random_checkpoint(tmp_path / "words", odd_config(**changes), Heads(pooler=True))
    with pytest.raises(UserError, match=f"nearest is BERT, except for {field}.*--format orbax"):
        huggingface_export.write(loaded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_roberta_with_a_wordpiece_vocabulary_counts_positions_from_its_padding_id(tmp_path):
    """transformers derives positions from pad_token_id, so the unused rows of the table before it differ."""
    loaded = random_checkpoint(tmp_path / "words", ROBERTA, Heads(mlm=True))
    assert (loaded.vocabulary.pad_id, loaded.model.position_offset) == (0, 2)
    huggingface_export.write(loaded, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (values["model_type"], values["pad_token_id"], values["max_position_embeddings"]) == ("roberta", 0, 25)
    again = huggingface.read(tmp_path / "out")
    assert again.model == dataclasses.replace(loaded.model, position_offset=1)
    table = "embeddings/position/table"
    np.testing.assert_array_equal(again.params.pop(table)[1:], loaded.params[table][2:])
    assert_same_tensors(again.params, {path: loaded.params[path] for path in again.params})


@pytest.mark.parametrize(
    ("heads", "changes", "wanted"),
    [
        (Heads(replaced_tokens=True), {}, "ElectraForPreTraining"),
        (Heads(mlm=True), {"embedding_width": 12}, "ElectraForMaskedLM"),
        (Heads(mlm=True), {"pooler": "relu"}, "BertForMaskedLM"),
        (Heads(mlm=True), {"pooler": "gelu"}, "ElectraForMaskedLM"),
        (Heads(tags=3), {"pooler": "gelu"}, "ElectraForTokenClassification"),
    ],
)
def test_a_pooler_that_no_head_reads_rules_out_no_family(tmp_path, heads, changes, wanted):
    loaded = random_checkpoint(tmp_path / "words", odd_config(**changes), heads)
    huggingface_export.write(loaded, tmp_path / "out")
    again = huggingface.read(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [wanted]
    assert dataclasses.replace(again.model, pooler=loaded.model.pooler) == loaded.model and again.heads == heads
    assert_same_tensors(again.params, loaded.params)
    assert describe(loaded).lower().startswith(wanted[:4].lower())


@pytest.mark.parametrize(
    ("heads", "field"),
    [
        (Heads(tags=3, crf=True), "heads.crf=True"),
        (Heads(classes=3, pooling="mean"), "heads.pooling='mean'"),
        (Heads(spans=SpanHeads(length=2, classes=2)), "heads.spans="),
        (
            Heads(tags=3, question=True),
            "the heads question, tags, but no BERT class of transformers holds them together",
        ),
    ],
)
def test_an_unsupported_head_is_named(tmp_path, heads, field):
    loaded = random_checkpoint(tmp_path / "words", odd_config(), heads)
    with pytest.raises(UserError, match=f"{field}.*--format orbax"):
        huggingface_export.write(loaded, tmp_path / "out")


def test_the_span_boundary_head_is_left_out_and_reported(tmp_path, capsys):
    heads = Heads(mlm=True, span_boundary=True)
    loaded = random_checkpoint(tmp_path / "words", odd_config(), heads)
    huggingface_export.write(loaded, tmp_path / "out")
    assert "left out: span_boundary_head" in capsys.readouterr().err
    again = huggingface.read(tmp_path / "out")
    assert again.heads == Heads(mlm=True)
    assert_same_tensors(again.params, {path: loaded.params[path] for path in again.params})


@pytest.mark.slow
def test_transformers_loads_exports_of_roberta_and_gives_the_same_outputs(tmp_path, sample_text, peer_python):
    exports = []
    for ending, heads in HEADS.items():
        loaded = byte_pair_model(tmp_path / ending, heads)
        huggingface_export.write(loaded, tmp_path / ending / "out")
        exports.append((tmp_path / ending / "out", loaded))
    make("unigram", sample_text.read_text(encoding="utf-8").split("\n"), tmp_path / "words")
    words = tokenizer.load(tmp_path / "words")
    config = dataclasses.replace(ROBERTA, vocab_size=words.vocab_size)
    xlm = dataclasses.replace(random_checkpoint(tmp_path / "other", config, Heads(mlm=True)), vocabulary=words)
    untied = random_checkpoint(tmp_path / "untied" / "words", odd_config(activation="relu", tied_output=False))
    for loaded, folder in ((xlm, tmp_path / "xlm"), (untied, tmp_path / "untied" / "out")):
        huggingface_export.write(loaded, folder)
        exports.append((folder, loaded))
    said = assert_transformers_agrees(peer_python, exports, tolerance=1e-5)
    wanted = [*(f"Roberta{ending}" for ending in HEADS), "XLMRobertaForMaskedLM", "BertForPreTraining"]
    assert [one["architecture"] for one in said] == wanted
