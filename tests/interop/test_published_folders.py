"""Tests of folders as others publish them: what AutoModel of transformers opens as an encoder opens, with a line.

The outputs for the kinds of folders here were compared with transformers 5.24: they differ by less than 1e-6.
"""

import json
from pathlib import Path

import flax.serialization
import flax.traverse_util
import numpy as np
import pytest
import safetensors.numpy
from random_checkpoints import PRETRAINING, assert_same_tensors, change_config, odd_config, random_checkpoint

from bert_jax.errors import UserError
from bert_jax.interop import huggingface, huggingface_export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads.config import Heads

ROBERTA = odd_config(segment_types=1, position_offset=1, layer_norm_epsilon=1e-5)
WEIGHTS = "model.safetensors"


def export(tmp_path: Path, heads: Heads = PRETRAINING, model=None) -> tuple[LoadedModel, Path]:
    loaded = random_checkpoint(tmp_path / "words", model or odd_config(), heads)
    huggingface_export.write(loaded, tmp_path / "out")
    return loaded, tmp_path / "out"


def change_tensors(folder: Path, change) -> None:
    tensors = change(safetensors.numpy.load_file(folder / WEIGHTS))
    safetensors.numpy.save_file(tensors, folder / WEIGHTS)


def encoder(loaded: LoadedModel) -> dict[str, np.ndarray]:
    return {path: value for path, value in loaded.params.items() if path.startswith(("embeddings/", "encoder/"))}


def remove(folder: Path, *fields: str) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({name: values[name] for name in values if name not in fields}))


@pytest.mark.parametrize(
    ("heads", "class_name"),
    [(Heads(pooler=True), "Model"), (Heads(mlm=True), "ForMaskedLM"), (Heads(tags=4), "ForTokenClassification")],
)
def test_camembert_is_read_as_roberta(tmp_path, capsys, heads, class_name):
    loaded, folder = export(tmp_path, heads, ROBERTA)
    change_config(folder, model_type="camembert", architectures=[f"Camembert{class_name}"])
    again = huggingface.read(folder)
    assert (again.model, again.heads) == (loaded.model, heads)
    assert_same_tensors(again.params, loaded.params)
    assert "model_type camembert is read as roberta" in capsys.readouterr().err


def test_a_class_of_its_own_opens_as_the_encoder_with_known_heads(tmp_path, capsys):
    """As AntiBERTy, whose heads are that of BertForMaskedLM and others."""
    loaded, folder = export(tmp_path)
    change_config(folder, architectures=["AntiBERTy"], id2label={"0": "a"}, num_labels=7)
    extra = {f"cls.{name}.{end}": np.ones(3, np.float32) for name in ("species", "chain") for end in ("weight", "bias")}
    change_tensors(folder, lambda tensors: tensors | extra | {"cls.x": np.ones(1, np.float32)})
    again = huggingface.read(folder)
    assert again.heads == PRETRAINING and again.task is None
    assert_same_tensors(again.params, loaded.params)
    said = capsys.readouterr().err
    assert "the class AntiBERTy is unknown; read as BertModel" in said and said.count("\n") == 2
    assert "left out: cls.chain.bias, cls.chain.weight, cls.species.bias, cls.species.weight and 1 more" in said
    # A head of which a part has another name is another head.
    change_tensors(
        folder, lambda tensors: {name.replace("transform.dense", "dense"): tensors[name] for name in tensors}
    )
    again = huggingface.read(folder)
    assert again.heads == Heads(next_sentence=True, pooler=True)
    assert_same_tensors(encoder(again), encoder(loaded))
    # Tensors of the encoder are never left out.
    change_tensors(folder, lambda tensors: tensors | {"bert.encoder.x": np.ones(1, np.float32)})
    with pytest.raises(UserError, match=r"encoder\.x is not part of the architecture"):
        huggingface.read(folder)


def test_heads_that_the_class_lacks_are_left_out(tmp_path, capsys):
    loaded, folder = export(tmp_path, Heads(pooler=True, classes=3))
    change_config(folder, architectures=["BertModel"])
    again = huggingface.read(folder)
    assert again.heads == Heads(pooler=True) and again.task is None
    assert_same_tensors(encoder(again), encoder(loaded))
    assert "left out: classifier.bias, classifier.weight" in capsys.readouterr().err


@pytest.mark.parametrize("labels", [{"0": "x", "1": "y"}, {str(index): "abcd"[index] for index in range(4)}])
@pytest.mark.parametrize("heads", [Heads(pooler=True, classes=3), Heads(tags=3)])
def test_labels_of_another_number_are_not_used(tmp_path, capsys, heads, labels):
    _, folder = export(tmp_path, heads)
    change_config(folder, id2label=labels, num_labels=3, bert_jax_task=None)
    assert huggingface.read(folder).task["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert f"id2label has {len(labels)} labels for 3 outputs, so none is used" in capsys.readouterr().err


FAMILIES = {
    "bert": (PRETRAINING, odd_config()),
    "roberta": (Heads(mlm=True), ROBERTA),
    "electra": (Heads(pooler=True, classes=3), odd_config(embedding_width=12, pooler="gelu")),
    "distilbert": (Heads(tags=3), odd_config(segment_types=0, pooler="relu")),
    "albert": (Heads(mlm=True), odd_config(embedding_width=12, shared_layers="all")),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_missing_model_type_follows_from_the_class_or_the_tensors(tmp_path, capsys, name, named):
    loaded, folder = export(tmp_path, *FAMILIES[name])
    assert json.loads((folder / "config.json").read_text())["model_type"] == name
    remove(folder, "model_type", *([] if named else ["architectures"]))
    again = open_checkpoint(folder)
    assert f"no model_type; read as {name}, by its {'class' if named else 'tensors'}" in capsys.readouterr().err
    assert again.model == loaded.model or not named  # the pooler is a part of a head
    assert_same_tensors(encoder(again), encoder(loaded))
    if not named:  # the tensors of a base class have no prefix
        change_tensors(folder, lambda tensors: {key.removeprefix(f"{name}."): value for key, value in tensors.items()})
        change_config(folder, pad_token_id=1 if name == "roberta" else 0)
        assert set(encoder(open_checkpoint(folder))) == set(encoder(loaded))
        assert f"read as {name}," in capsys.readouterr().err


def test_a_folder_without_a_known_encoder_is_refused(tmp_path):
    _, folder = export(tmp_path)
    remove(folder, "model_type", "architectures")
    change_tensors(folder, lambda tensors: {f"t5.{name}": value for name, value in tensors.items()})
    with pytest.raises(UserError, match="model_type is None; choose from"):
        open_checkpoint(folder)


def test_files_that_are_not_read_are_named(tmp_path, capsys):
    _, folder = export(tmp_path)
    (folder / "model_head.pkl").write_bytes(b"")
    assert open_checkpoint(folder).heads == PRETRAINING
    assert "model_head.pkl, a classifier of SetFit, is a pickle and is not read" in capsys.readouterr().err
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"holds no model\.safetensors"):
        huggingface.read(folder)
    (folder / "tf_model.h5").write_bytes(b"")
    with pytest.raises(UserError, match=r"weights of TensorFlow only \(tf_model\.h5\)\. Convert them once"):
        huggingface.read(folder)


def to_flax(folder: Path, dtype: type = np.float32) -> None:
    """Replaces the weights by those that transformers 4 writes for Flax."""
    tensors = {}
    for name, value in safetensors.numpy.load_file(folder / WEIGHTS).items():
        start, _, end = name.rpartition(".")
        if end == "weight":
            end = "embedding" if "embeddings" in start.rpartition(".")[2] else "kernel" if value.ndim == 2 else "scale"
        tensors[f"{start}.{end}"] = (value.T if end == "kernel" else value).astype(dtype)
    content = flax.traverse_util.unflatten_dict(tensors, sep=".")
    (folder / "flax_model.msgpack").write_bytes(flax.serialization.msgpack_serialize(content))
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize("name", FAMILIES)
def test_flax_weights_are_read(tmp_path, name):
    loaded, folder = export(tmp_path, *FAMILIES[name])
    to_flax(folder)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle, which is not read")
    again = open_checkpoint(folder)
    assert (again.model, again.heads, again.dtype) == (loaded.model, loaded.heads, "float32")
    assert_same_tensors(again.params, loaded.params)


def test_flax_weights_in_half_precision_and_damaged_ones(tmp_path):
    _, folder = export(tmp_path)
    to_flax(folder, np.float16)
    assert huggingface.read(folder).dtype == "float16"
    file = folder / "flax_model.msgpack"
    for damaged in (file.read_bytes()[:-9], b"", b"\x01", b"no msgpack", b"\x93\x01\x02\x03"):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=r"flax_model\.msgpack is damaged or holds no Flax weights"):
            huggingface.read(folder)
