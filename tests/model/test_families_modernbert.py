"""Tests of ModernBERT's config.json in old and new versions, and of export and import with every head."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy
from exporting import assert_transformers_agrees
from golden import open_golden
from random_checkpoints import assert_same_tensors, modernbert, random_checkpoint

from bert_jax.errors import UserError
from bert_jax.interop import huggingface, huggingface_export
from bert_jax.model.heads.config import Heads

LABELS = {"name": "moods", "kind": "classification", "labels": ["glad", "sad", "so so"]}
TAGS = {"name": "tags", "kind": "tagging", "labels": ["A", "B", "C", "D"]}
CASES = {
    "ModernBertModel": (Heads(), None),
    "ModernBertForMaskedLM": (Heads(mlm=True), None),
    "ModernBertForSequenceClassification": (Heads(pooler=True, pooling="mean", classes=3), LABELS),
    "ModernBertForTokenClassification": (Heads(tags=4), TAGS),
    "ModernBertForQuestionAnswering": (Heads(question=True), None),
    "ModernBertForMultipleChoice": (Heads(pooler=True, choices=True), None),
}


def test_the_architecture_is_read_from_the_fields_of_version_5(tmp_path):
    model = open_golden("modernbert_mlm", tmp_path).loaded.model
    assert (model.window, model.global_every) == (4, 3)
    assert (model.rotary_base, model.rotary_base_local) == (160_000.0, 10_000.0)
    assert (model.norm, model.bias, model.activation) == ("pre_but_first", False, "gelu")


def change_config(folder, changes) -> None:
    """Sets fields of config.json; None removes one."""
    values = json.loads((folder / "config.json").read_text()) | changes
    kept = {name: value for name, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


NEW = {"layer_types": None, "rope_parameters": None}  # removes the fields that version 5 introduced


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        (NEW | {"global_attn_every_n_layers": 3, "global_rope_theta": 8e4}, {"rotary_base": 8e4}),
        (
            NEW | {"global_attn_every_n_layers": 2, "local_rope_theta": 300.0},
            {"global_every": 2, "rotary_base_local": 300.0},
        ),
        (NEW | {"global_attn_every_n_layers": None, "local_attention": 7}, {"global_every": 3, "window": 3}),
        ({"global_attn_every_n_layers": None}, {"global_every": 3}),
        ({"layer_types": ["full_attention"] * 5}, {"global_every": 1, "window": 0}),
        ({"layer_types": ["full_attention"] + ["sliding_attention"] * 4}, {"global_every": 5, "window": 4}),
        ({"rope_parameters": {"full_attention": {"rope_theta": 99.0}}}, {"rotary_base": 99.0}),
        ({"hidden_activation": "quick_gelu", "classifier_activation": "quick_gelu"}, {"activation": "gelu_sigmoid"}),
    ],
)
def test_equivalent_configurations_are_read(tmp_path, changes, read):
    first = open_golden("modernbert_mlm", tmp_path).loaded
    change_config(tmp_path, changes)
    again = huggingface.read(tmp_path)
    assert again.model == dataclasses.replace(first.model, **read)
    assert_same_tensors(again.params, first.params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "mlp_bias is False, but attention_bias is not"),
        ({"decoder_bias": False}, "decoder_bias is False; only True is supported"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"classifier_activation": "relu"}, "classifier_activation differs from hidden_activation"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types is .* only 'full_attention' in the layers 0, n, 2n"),
        ({"layer_types": ["full_attention"]}, "expected the type of each of the 5 layers"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is .*yarn"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_type 'yarn'; only 'default' is supported",
        ),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": "x"}}}, "rope_theta of sliding_attention.* is 'x'"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]"),
        (
            {"rope_parameters": {"rope_theta": 9.0}},
            r"rope_parameters is {'rope_theta': 9\.0}; expected those of 'full_att",
        ),
        ({"local_attention": 1}, "local_attention is 1; expected 2 or more"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; only True or False or None is supported"),
        ({"global_attn_every_n_layers": 0, "layer_types": None}, "global_attn_every_n_layers is 0; expected 1"),
        ({"num_attention_heads": 6}, "needs heads of even width, but hidden_size / num_attention_heads is 3"),
        ({"architectures": ["ModernBertForCausalLM"]}, "architectures is 'ModernBertForCausalLM'"),
        (
            {"num_hidden_layers": 4, "layer_types": None},
            r"tensor model\.layers\.4\.\S+ is not part of the architecture",
        ),
    ],
)
def test_an_unsupported_field_is_named(tmp_path, changes, message):
    open_golden("modernbert_mlm", tmp_path)
    change_config(tmp_path, changes)
    with pytest.raises(UserError, match=message):
        huggingface.read(tmp_path)


@pytest.mark.parametrize("architecture", CASES)
@pytest.mark.parametrize("tied", [True, False])
def test_export_and_import_preserve_everything(tmp_path, architecture, tied):
    heads, task = CASES[architecture]
    loaded = random_checkpoint(tmp_path / "words", modernbert(tied_output=tied, bias=not tied), heads, task=task)
    for path, without in (("encoder/layers/attention_norm/scale", 1), ("encoder/layers/attention_norm/bias", 0)):
        if path in loaded.params:
            loaded.params[path][0] = without  # never read, and in no file
    huggingface_export.write(loaded, tmp_path / "out")
    again = huggingface.read(tmp_path / "out")
    assert (again.model, again.heads) == (loaded.model, loaded.heads)
    assert_same_tensors(again.params, loaded.params)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == [architecture]
    tensors = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert ("decoder.weight" in tensors) == (heads.mlm and not tied)


def test_unsupported_fields_are_named(tmp_path):
    def refused(heads=Heads(), **changes):  # noqa: B008 (frozen)
        loaded = random_checkpoint(tmp_path / "words", modernbert(**changes), heads)
        with pytest.raises(UserError) as raised:
            huggingface_export.write(loaded, tmp_path / "out")
        return str(raised.value)

    assert "ModernBERT, except for norm='pre'" in refused(norm="pre")
    assert "ModernBERT, except for causal=True" in refused(causal=True)
    assert "heads.pooling='max'" in refused(Heads(pooler=True, pooling="max", classes=3))
    assert not (tmp_path / "out").exists()


def test_windows_in_all_layers_and_in_none_survive_export(tmp_path):
    for index, changes in enumerate(({"window": 0, "global_every": 1}, {"global_every": 4}, {"global_every": 9})):
        loaded = random_checkpoint(tmp_path / "words", modernbert(**changes), Heads())
        huggingface_export.write(loaded, tmp_path / str(index))
        assert huggingface.read(tmp_path / str(index)).model == loaded.model
        kinds = json.loads((tmp_path / str(index) / "config.json").read_text())["layer_types"]
        assert np.count_nonzero(np.array(kinds) == "full_attention") == (1 if index else 4)


@pytest.mark.slow
def test_transformers_loads_exports_and_gives_the_same_outputs(tmp_path, peer_python):
    cases = [
        (heads, {"tied_output": index % 2 == 0, "bias": index > 3}) for index, (heads, _) in enumerate(CASES.values())
    ]
    cases += [(Heads(pooler=True, classes=2), {}), (Heads(mlm=True), {"window": 0, "global_every": 1})]
    exports = []
    for index, (heads, changes) in enumerate(cases):
        loaded = random_checkpoint(tmp_path / f"words{index}", modernbert(**changes), heads)
        huggingface_export.write(loaded, tmp_path / str(index))
        exports.append((tmp_path / str(index), loaded))
    said = assert_transformers_agrees(peer_python, exports, tolerance=1e-5)
    assert [one["architecture"] for one in said][: len(CASES)] == list(CASES)
