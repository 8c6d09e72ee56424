"""Tests that Hugging Face folders survive export and import, and that errors name the field or the tensor."""

import dataclasses
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from exporting import assert_transformers_agrees
from random_checkpoints import PRETRAINING, assert_same_tensors, change_config, odd_config, random_checkpoint
from tokenizer_kinds import byte_pairs, make

from bert_jax.errors import UserError
from bert_jax.interop import family, huggingface, huggingface_export
from bert_jax.interop.families.bert import BERT
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import MARKER
from bert_jax.tasks import embedder, registry
from bert_jax.tasks.kinds.question import QuestionTask
from bert_jax.tasks.kinds.question_data import Question
from bert_jax.tasks.rows import Split
from bert_jax.tokenization import tokenizer

LABELS = {"name": "moods", "kind": "classification", "labels": ["glad", "sad", "so so"]}
TAGS = {"name": "tags", "kind": "tagging", "labels": ["A", "B", "C", "D"]}
CASES = {
    "BertModel": (Heads(pooler=True), None),
    "BertForPreTraining": (PRETRAINING, None),
    "BertForMaskedLM": (Heads(mlm=True), None),
    "BertForNextSentencePrediction": (Heads(next_sentence=True, pooler=True), None),
    "BertForSequenceClassification": (Heads(pooler=True, classes=3), LABELS),
    "BertForTokenClassification": (Heads(tags=4), TAGS),
    "BertForQuestionAnswering": (Heads(question=True), None),
    "BertForMultipleChoice": (Heads(pooler=True, choices=True), None),
}


def export(tmp_path: Path, architecture: str) -> tuple[LoadedModel, Path]:
    heads, task = CASES[architecture]
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(), heads, task=task)
    huggingface_export.write(loaded, tmp_path / "out")
    return loaded, tmp_path / "out"


def change_tensors(folder: Path, change) -> None:
    """Rewrites the weights after change(tensors), which changes them in place or returns a new dict."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    changed = change(tensors)
    tensors = changed if isinstance(changed, dict) else tensors
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("architecture", CASES)
def test_export_and_import_preserve_everything(tmp_path, architecture):
    loaded, folder = export(tmp_path, architecture)
    again = huggingface.read(folder)
    assert again.model == loaded.model and again.heads == loaded.heads
    assert_same_tensors(again.params, loaded.params)
    assert again.vocabulary.content_hash == loaded.vocabulary.content_hash
    none = [] if loaded.heads.choices or loaded.heads.question else None  # tasks without labels
    assert (again.task or {}).get("labels") == (loaded.task or {}).get("labels", none)
    assert json.loads((folder / "config.json").read_text())["architectures"] == [architecture]
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "vocab.txt", "tokenizer.json"} <= names
    assert f"{architecture}.from_pretrained" in (folder / "README.md").read_text()
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_the_table_covers_every_parameter_of_every_head():
    config = odd_config()
    for heads, _ in CASES.values():
        table = BERT.table(huggingface_export.class_for(BERT, heads))
        params = layers.flatten(abstract_params(config, heads))
        assert {entry.path for entry in table} >= set(params)
        assert sum(map(np.prod, family.tensor_shapes(table, config, heads).values())) == sum(
            np.prod(leaf.shape) for leaf in params.values()
        ) - (256 - config.vocab_size) * (config.width * 1 + heads.mlm)


def test_vocabulary_padding_is_removed_and_restored_as_zeros(tmp_path):
    _, folder = export(tmp_path, "BertForPreTraining")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    assert tensors["bert.embeddings.word_embeddings.weight"].shape == (131, 20)
    assert tensors["cls.predictions.bias"].shape == (131,)
    table = huggingface.read(folder).params["embeddings/token/table"]
    assert table.shape == (256, 20) and not table[131:].any()


def test_legacy_tensor_names_are_read(tmp_path):
    loaded, folder = export(tmp_path, "BertForPreTraining")

    def respell(tensors):
        old = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for name, value in tensors.items()
        }
        old["bert.embeddings.position_ids"] = np.arange(24)[None]
        old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"]
        old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"]
        return old

    change_tensors(folder, respell)
    # Published BertForMaskedLM files often hold the pooler and the next-sentence head, too.
    change_config(folder, architectures=["BertForMaskedLM"])
    again = huggingface.read(folder)
    assert again.heads == PRETRAINING
    assert_same_tensors(again.params, loaded.params)


def test_base_model_names_may_have_the_prefix(tmp_path):
    loaded, folder = export(tmp_path, "BertModel")
    change_tensors(folder, lambda tensors: {f"bert.{name}": value for name, value in tensors.items()})
    assert_same_tensors(huggingface.read(folder).params, loaded.params)


@pytest.mark.parametrize("kind", ["wordpiece_uncased", "bpe", "unigram", "unigram_albert", "sentencepiece_bpe"])
def test_the_exported_tokenizer_builds_the_rows_of_the_model(tmp_path, sample_text, kind):
    folder = tmp_path / "vocabulary"
    make(kind, sample_text.read_text(encoding="utf-8").split("\n"), folder)
    words = tokenizer.load(folder)
    loaded = random_checkpoint(tmp_path / "other", odd_config(vocab_size=words.vocab_size))
    huggingface_export.write(dataclasses.replace(loaded, vocabulary=words), tmp_path / "out")
    assert huggingface.read(tmp_path / "out").vocabulary.content_hash == words.content_hash
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    theirs = library.encode("a river", "the river bank")
    rows = embedder.encode([("a river", "the river bank")], words, 24, by_word=False).rows
    assert theirs.ids == rows.input_ids.tolist()
    assert theirs.type_ids == rows.batch(np.array([0]), len(theirs.ids)).segment_ids[0].tolist()
    assert [theirs.tokens[0], theirs.tokens[-1]] == [words.roles.cls_token, words.roles.sep_token]
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert "token_type_ids" in said["model_input_names"]  # of the classes, BertTokenizer alone gives them by default
    assert said["tokenizer_class"] in ("BertTokenizer", "AlbertTokenizer", "PreTrainedTokenizerFast")
    assert theirs.ids.count(words.sep_id) == 1 + (2 if kind in ("bpe", "unigram", "sentencepiece_bpe") else 1)


@pytest.mark.parametrize("types", [1, 2])
def test_the_exported_tokenizer_of_a_question_model_builds_its_rows(tmp_path, types):
    words = tokenizer.load(byte_pairs(tmp_path / "vocabulary", []))
    model = odd_config(vocab_size=words.vocab_size, layers=1, segment_types=types)
    loaded = random_checkpoint(tmp_path / "other", model, Heads(question=True))
    huggingface_export.write(dataclasses.replace(loaded, vocabulary=words), tmp_path / "out")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    theirs = library.encode("ab", "a cd")
    split = Split(Path("in"), (Question("0", "ab", "a cd", None, "line 1"),), labelled=False)
    rows = QuestionTask("own").encode(split, words)
    assert theirs.ids == rows.input_ids.tolist() and theirs.tokens.count("</s>") == 3
    segments = rows.batch(np.array([0]), len(theirs.ids)).segment_ids[0]
    assert theirs.type_ids == (segments * (types - 1)).tolist()


def set_tokenizer(folder: Path, **settings: str) -> None:
    """Leaves only vocab.txt, with these settings."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def split_in_two(folder: Path) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts: dict[str, dict[str, np.ndarray]] = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, value) in enumerate(tensors.items()):
        parts[sorted(parts)[index % 2]][name] = value
    for part, content in parts.items():
        safetensors.numpy.save_file(content, folder / part)
    weight_map = {name: part for part, content in parts.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_weights_in_several_files_are_read_and_a_missing_one_is_named(tmp_path):
    loaded, folder = export(tmp_path, "BertForPreTraining")
    split_in_two(folder)
    assert_same_tensors(huggingface.read(folder).params, loaded.params)
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"names b\.safetensors for .* missing"):
        huggingface.read(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5"}, "model_type is 't5'; choose from 'bert', 'roberta', 'xlm-roberta'"),
        ({"model_type": "roberta"}, "architectures is 'BertForPreTraining'; choose from 'RobertaModel'"),
        ({"architectures": ["BertLMHeadModel"]}, "architectures is 'BertLMHeadModel'"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'; choose from 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"tie_word_embeddings": False}, r"tensor cls\.predictions\.decoder\.\S+ is missing"),
        ({"hidden_size": None}, "hidden_size is None; expected an integer"),
        ({"hidden_size": 22}, r"hidden_size 22 is not|width 22 is not"),
        ({"num_hidden_layers": 4}, r"tensor encoder\.layer\.3\.attention\.self\.query\.weight is missing"),
        ({"num_hidden_layers": 2}, r"encoder\.layer\.2\.\S+ is not part of the architecture"),
        (
            {"intermediate_size": 30},
            r"intermediate\.dense\.weight has shape \[28, 20\], but config\.json expects \[30, 20\]",
        ),
        ({"vocab_size": 100}, r"word_embeddings\.weight has shape \[131, 20\]"),
        ({"architectures": ["BertForTokenClassification"]}, r"tensor classifier\.weight is missing"),
        ({"id2label": 3}, "id2label is 3; expected labels of 3 outputs"),
        ({"problem_type": "regression"}, "problem_type is 'regression'"),
    ],
)
def test_an_unsupported_field_is_named(tmp_path, changes, message):
    labelled = {"id2label", "problem_type"} & changes.keys()
    _, folder = export(tmp_path, "BertForSequenceClassification" if labelled else "BertForPreTraining")
    change_config(folder, **changes)
    with pytest.raises(UserError, match=message):
        huggingface.read(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bert.pooler.dense.bias", None, r"pooler\.dense\.bias is missing"),
        ("bert.embeddings.x", np.zeros(2, np.float32), r"embeddings\.x is not part of the architecture"),
        ("cls.predictions.bias", np.zeros(7, np.float32), r"cls\.predictions\.bias has shape \[7\]"),
        ("cls.predictions.decoder.weight", np.zeros((131, 20), np.float32), r"decoder\.weight differs from embeddings"),
        ("bert.pooler.dense.bias", np.zeros(20, np.int32), "dtype int32"),
        ("pooler.dense.bias", np.zeros(20, np.float32), "which are the same tensor"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, name, value, message):
    _, folder = export(tmp_path, "BertForPreTraining")
    change_tensors(folder, lambda tensors: tensors.pop(name) if value is None else tensors | {name: value})
    with pytest.raises(UserError, match=message):
        huggingface.read(folder)


@pytest.mark.parametrize("damage", [{"labels": 3}, {"labels": [1, 2, 3]}, {"name": None}])
def test_a_damaged_bert_jax_task_falls_back_to_the_standard_fields(tmp_path, damage):
    _, folder = export(tmp_path, "BertForSequenceClassification")
    task = huggingface.read(folder).task
    change_config(folder, bert_jax_task={**task, **damage})
    again = huggingface.read(folder)
    assert (again.task["name"], again.task["labels"]) == ("own", task["labels"])
    huggingface_export.write(again, tmp_path / "again")


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_labels_that_another_program_renamed_are_those_of_id2label(tmp_path, architecture, capsys):
    loaded, folder = export(tmp_path, architecture)
    assert huggingface.read(folder).task["labels"] == loaded.task["labels"]
    renamed = {str(index): f"new {index}" for index in range(len(loaded.task["labels"]))}
    change_config(folder, id2label=renamed)
    task = huggingface.read(folder).task
    assert (task["name"], task["labels"]) == ("own", list(renamed.values()))
    assert "id2label has other labels than bert_jax_task" in capsys.readouterr().err
    change_config(folder, id2label=None)
    assert huggingface.read(folder).task["labels"] == loaded.task["labels"]  # nothing says otherwise


def test_labels_that_id2label_repeats_are_distinguished(tmp_path, capsys):
    _, folder = export(tmp_path, "BertForTokenClassification")
    change_config(folder, id2label={"0": "O", "1": "B-x", "2": "O", "3": "O_2"}, bert_jax_task=None)
    again = huggingface.read(folder)
    assert again.task["labels"] == ["O", "B-x", "O_2_2", "O_2"]
    assert "id2label repeats labels, so these have other names here: 2: O_2_2" in capsys.readouterr().err
    huggingface_export.write(again, tmp_path / "again")
    assert huggingface.read(tmp_path / "again").task["labels"] == again.task["labels"]
    assert len(json.loads((tmp_path / "again" / "config.json").read_text())["label2id"]) == 4


def test_an_untied_output_without_a_bias_of_its_own_has_that_of_the_head(tmp_path):
    """transformers 4 ties the two biases of an untied output, too, and saves one of them."""
    loaded = random_checkpoint(tmp_path / "words", odd_config(tied_output=False), Heads(mlm=True))
    huggingface_export.write(loaded, tmp_path / "out")
    change_tensors(tmp_path / "out", lambda tensors: tensors.__delitem__("cls.predictions.decoder.bias"))
    assert_same_tensors(huggingface.read(tmp_path / "out").params, loaded.params)


def test_a_model_of_another_program_reads_texts_up_to_its_positions(tmp_path):
    _, folder = export(tmp_path, "BertForSequenceClassification")
    change_config(folder, bert_jax_task=None)
    assert huggingface.read(folder).task["max_length"] == 24  # the positions
    settings = folder / "tokenizer_config.json"
    values = json.loads(settings.read_text())
    assert values["model_max_length"] == 24
    for limit, expected in ((16, 16), (1000000000000000019884624838656, 24)):
        settings.write_text(json.dumps(values | {"model_max_length": limit}))
        assert huggingface.read(folder).task["max_length"] == expected


@pytest.mark.parametrize(
    ("heads", "kind", "limit"),
    [
        (Heads(tags=3), "tagging", 24),
        (Heads(tags=1), "token_regression", 24),
        (Heads(pooler=True, classes=2), "classification", 12),
        (Heads(question=True), "question", 12),
    ],
)
def test_programs_cut_texts_where_the_task_cuts_them(tmp_path, heads, kind, limit):
    """A tagger of bert_jax cuts no text: it continues a long sentence in further rows."""
    labels = [str(index) for index in range(max(heads.classes, heads.tags))] if kind in huggingface.LABELLED else []
    task = {"name": "own", "kind": kind, "labels": labels, "max_length": 12}
    huggingface_export.write(
        random_checkpoint(tmp_path / "vocabulary", odd_config(), heads, task=task), tmp_path / "out"
    )
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["model_max_length"] == limit
    assert huggingface.read(tmp_path / "out").task["max_length"] == 12


def test_a_regression_survives_export(tmp_path):
    task = {"name": "stsb", "kind": "regression", "labels": []}
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(), Heads(pooler=True, classes=1), task=task)
    huggingface_export.write(loaded, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["problem_type"] == "regression" and values["id2label"] == {"0": "LABEL_0"}
    # CrossEncoder of sentence-transformers would apply a sigmoid otherwise.
    assert values["sentence_transformers"] == {"activation_fn": "torch.nn.modules.linear.Identity"}
    again = huggingface.read(tmp_path / "out").task
    assert again is not None and again["kind"] == "regression" and again["labels"] == []


def test_the_no_answer_threshold_survives_export_and_defaults_to_always_answering(tmp_path):
    task = {"name": "squad2", "kind": "question", "labels": [], "unanswerable": True, "null_threshold": 0.25}
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config(), Heads(question=True), task=task)
    huggingface_export.write(loaded, tmp_path / "out")
    assert registry.restore_task(huggingface.read(tmp_path / "out")).null_threshold == 0.25
    change_config(tmp_path / "out", bert_jax_task=None)
    foreign = registry.restore_task(huggingface.read(tmp_path / "out"))
    assert (foreign.kind, foreign.unanswerable, foreign.metrics) == ("question", False, ("f1", "exact_match"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            r"pytorch_model\.bin, a pickle: .*any code.*save_pretrained",
        ),
        (lambda folder: os.truncate(folder / "model.safetensors", 9999), r"model\.safetensors is damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"holds no model\.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (
            lambda folder: random_checkpoint(folder / "more", odd_config(vocab_size=140)).vocabulary.save(folder),
            r"tokenizer has 140 tokens, but config\.json has vocab_size 131",
        ),
        (lambda folder: set_tokenizer(folder, word_tokenizer_type="mecab"), r"vocab\.txt: its word_tok"),
        (lambda folder: set_tokenizer(folder, tokenizer_class="KoBertTokenizer"), r"vocab\.txt: its tokenizer_cl"),
    ],
    ids=["pickle", "damaged", "missing", "config", "tokenizer", "words", "class"],
)
def test_a_folder_that_is_not_whole_is_refused_with_the_file(tmp_path, damage, message):
    _, folder = export(tmp_path, "BertModel")
    damage(folder)
    with pytest.raises(UserError, match=message):
        huggingface.read(folder)


def test_export_overwrites_nothing_and_leaves_no_partial_output(tmp_path):
    loaded, folder = export(tmp_path, "BertModel")
    with pytest.raises(UserError, match=r"out exists\. Choose another"):
        huggingface_export.write(loaded, folder)
    both = random_checkpoint(tmp_path / "both", odd_config(), Heads(pooler=True, classes=2, tags=2))
    with pytest.raises(UserError, match="no BERT class of transformers holds them together"):
        huggingface_export.write(both, tmp_path / "both_out")
    (tmp_path / "new.incomplete").mkdir()
    (tmp_path / "new.incomplete" / "left").touch()
    with pytest.raises(UserError, match="already exists and was not left by an interrupted run"):
        huggingface_export.write(loaded, tmp_path / "new")
    (tmp_path / "new.incomplete" / MARKER).touch()  # a killed writer leaves the marker
    huggingface_export.write(loaded, tmp_path / "new")
    assert not (tmp_path / "new" / "left").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".incomplete") or path.name == "both_out"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_exported_unchanged_until_it_is_trained_further(tmp_path, dtype):
    loaded, _ = export(tmp_path, "BertForPreTraining")
    narrow = jnp.dtype(dtype)
    params = {path: value.astype(narrow).astype(np.float32) for path, value in loaded.params.items()}
    halved = dataclasses.replace(loaded, params=params, dtype=dtype)
    huggingface_export.write(halved, tmp_path / "half")
    file = tmp_path / "half" / "model.safetensors"  # older versions of transformers also saved the positions
    safetensors.numpy.save_file(
        safetensors.numpy.load_file(file) | {"bert.embeddings.position_ids": np.arange(24)[None]}, file
    )
    again = huggingface.read(tmp_path / "half")
    assert again.dtype == dtype
    assert_same_tensors(again.params, params)  # float32, which holds the narrower values exactly
    trained = dict(params) | {"embeddings/norm/bias": params["embeddings/norm/bias"] + np.float32(1e-7)}
    huggingface_export.write(dataclasses.replace(halved, params=trained), tmp_path / "trained")
    assert huggingface.read(tmp_path / "trained").dtype == "float32"


@pytest.mark.slow
def test_transformers_loads_exports_and_gives_the_same_outputs(tmp_path, peer_python):
    exports = [(folder, loaded) for loaded, folder in (export(tmp_path / name, name) for name in CASES)]
    said = assert_transformers_agrees(peer_python, exports, tolerance=1e-5)
    assert [one["architecture"] for one in said] == list(CASES)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"tokenizer_class": "XLMRobertaTokenizer"}, False),
        ({"model_input_names": ["input_ids", "attention_mask"]}, False),
        ({"tokenizer_class": "XLMRobertaTokenizer", "model_input_names": ["input_ids", "token_type_ids"]}, True),
        ({"tokenizer_class": "BertTokenizer"}, True),
        ({}, False),  # the class in config.json, to which AutoTokenizer falls back
    ],
)
def test_a_model_has_the_token_types_that_its_tokenizer_gives(tmp_path, capsys, settings, kept):
    loaded, folder = export(tmp_path, "BertForSequenceClassification")
    change_config(folder, tokenizer_class="XLMRobertaTokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"truncation_side": "left"}))
    again = huggingface.read(folder)
    table = loaded.params["embeddings/segment/table"]
    assert again.model.segment_types == (2 if kept else 1)
    np.testing.assert_array_equal(again.params["embeddings/segment/table"], table if kept else table[:1])
    said = " ".join(capsys.readouterr().err.split())
    assert ("the tokenizer gives no token types" in said) != kept
    assert "truncation_side is left, but texts lose their end here" in said


def test_a_model_that_albert_cannot_hold_is_refused(tmp_path):
    """ALBERT always projects its embeddings."""
    loaded = random_checkpoint(tmp_path / "words", odd_config(shared_layers="all", activation="gelu_tanh"))
    with pytest.raises(UserError, match="no Hugging Face format holds this architecture"):
        huggingface_export.write(loaded, tmp_path / "out")


def test_the_head_of_an_electra_generator_has_the_exact_gelu(tmp_path):
    config = odd_config(embedding_width=16, pooler="gelu")
    loaded = random_checkpoint(tmp_path / "words", config, Heads(mlm=True))
    huggingface_export.write(loaded, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["ElectraForMaskedLM"]
    change_config(tmp_path / "out", hidden_act="gelu_new")
    with pytest.raises(UserError, match="hidden_act is 'gelu_new', but the head of masked tokens has gelu"):
        huggingface.read(tmp_path / "out")
    other = dataclasses.replace(loaded, model=dataclasses.replace(config, activation="relu"))
    with pytest.raises(UserError, match="hidden_act is 'relu', but the head of masked tokens has gelu"):
        huggingface_export.write(other, tmp_path / "relu")
