"""Models whose vocabulary grew or shrank: rows, outputs, files, refusals, and training that continues."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from families import FAMILIES
from random_checkpoints import PRETRAINING, SPECIAL, WORDS, assert_same_tensors, odd_config, random_checkpoint
from tokenizer_kinds import byte_pairs

from bert_jax.commands import pretrain, resize_vocabulary
from bert_jax.errors import UserError
from bert_jax.interop import export, huggingface, huggingface_export
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.interop.resizing import vocabulary_axes
from bert_jax.model import layers
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.heads.config import Heads
from bert_jax.model.outputs import vocabulary_logits
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import evaluation
from bert_jax.tasks.rows import TaskBatch
from bert_jax.tokenization import tokenizer
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.readers import corpus as readers
from data_prep.units import Unit
from data_prep.vocabulary import TokenizerOptions, train
from data_prep.worker import encode

ROOT = Path(__file__).parent.parent.parent
NEW = ["doghouse", "unwants", "riverà"]  # the last one as an uncased vocabulary never sees it
MODELS = {
    "tied": (odd_config(), PRETRAINING),
    "untied": (odd_config(tied_output=False), PRETRAINING),
    "factorized": (odd_config(embedding_width=7, shared_layers="all", activation="gelu_tanh"), PRETRAINING),
    "classifier": (odd_config(), Heads(pooler=True, classes=3)),
}


def written(folder: Path, name: str = "tied", **known: object) -> Path:
    """A folder in Hugging Face format with random parameters."""
    model, heads = MODELS[name]
    loaded = random_checkpoint(folder / "vocabulary", model, heads, **known)
    task = {"name": "own", "kind": "classification", "labels": ["a", "b", "c"], "max_length": 24}
    loaded = dataclasses.replace(loaded, task=task if heads.classes else None)
    huggingface_export.write(loaded, folder / "old")
    return folder / "old"


def words_file(folder: Path, words: list[str]) -> Path:
    (folder / "words.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    return folder / "words.txt"


def outputs(loaded: LoadedModel, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The last hidden states of a sequence, and the logits of the vocabulary."""
    row = np.array([ids], np.int32)
    none = np.zeros(1, np.float32)
    batch = TaskBatch(row, 0 * row, 1 + 0 * row, np.arange(row.size, dtype=np.int32)[None], none, none)
    heads = loaded.heads

    @jax.jit
    def run(params, batch):
        model = bind(loaded.model, heads, params, Runtime())
        hidden = model.encode(batch).last
        return hidden, vocabulary_logits(model, hidden) if heads.mlm else hidden

    hidden, logits = run(layers.unflatten(dict(loaded.params)), batch)
    return np.array(hidden[0]), np.array(logits[0, :, : loaded.model.vocab_size])


@pytest.mark.parametrize("name", MODELS)
def test_new_rows_are_means_and_texts_without_the_words_have_the_same_outputs(tmp_path, name, capsys):
    folder = written(tmp_path, name)
    arguments = ["--checkpoint", str(folder), "--output", str(tmp_path / "new")]
    resize_vocabulary.main([*arguments, "--add_tokens", str(words_file(tmp_path, NEW[:2]))])
    assert "new: 131 -> 133 tokens" in capsys.readouterr().out
    old, new = huggingface.read(folder), huggingface.read(tmp_path / "new")
    words, grown = tokenizer.load(folder), tokenizer.load(tmp_path / "new")
    assert new.model == dataclasses.replace(old.model, vocab_size=133) and new.heads == old.heads
    assert (new.task or {}).get("labels") == (old.task or {}).get("labels")
    changed = {path for path, value in old.params.items() if not np.array_equal(value, new.params[path])}
    assert changed == set(vocabulary_axes(old.model, old.heads))
    for path in changed:
        before, after = old.params[path], new.params[path]
        np.testing.assert_array_equal(after[:131], before[:131])
        for number, word in enumerate(NEW[:2]):
            mean = before[words.encode(word).astype(int)].astype(np.float64).mean(0)
            np.testing.assert_allclose(after[131 + number], mean, rtol=1e-6, err_msg=path)
        assert not after[133:].any()
    ids = [words.cls_id, *words.encode("the cat sat on a mat. unwantable dogs").tolist(), words.sep_id]
    assert ids[1:-1] == grown.encode("the cat sat on a mat. unwantable dogs").tolist()
    for got, wanted in zip(outputs(new, ids), outputs(old, ids), strict=True):
        np.testing.assert_allclose(got[..., : wanted.shape[-1]], wanted, atol=1e-6)
    assert len(grown.encode("doghouse unwants")) == 2


def test_a_grown_folder_is_read_and_written_again_without_a_change(tmp_path):
    resize_vocabulary.add_tokens(written(tmp_path), words_file(tmp_path, NEW[:2]), tmp_path / "new")
    once = huggingface.read(tmp_path / "new")
    huggingface_export.write(once, tmp_path / "again")
    again = huggingface.read(tmp_path / "again")
    assert again.model == once.model and again.vocabulary.content_hash == once.vocabulary.content_hash
    assert_same_tensors(again.params, once.params)
    for file in ("tokenizer.json", "vocab.txt", "config.json"):
        assert (tmp_path / "new" / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"] == 133


def test_a_file_in_half_precision_stays_one(tmp_path):
    loaded = random_checkpoint(tmp_path / "vocabulary", odd_config())
    halves = {path: value.astype(np.float16).astype(np.float32) for path, value in loaded.params.items()}
    huggingface_export.write(dataclasses.replace(loaded, params=halves, dtype="float16"), tmp_path / "old")
    done = resize_vocabulary.add_tokens(tmp_path / "old", words_file(tmp_path, NEW[:2]), tmp_path / "new")
    assert huggingface.read(tmp_path / "new").dtype == "float16"
    assert done.bytes_before < done.bytes_after < 1.1 * done.bytes_before


@pytest.mark.slow
def test_a_trimmed_model_has_the_same_outputs_under_new_ids_and_a_smaller_file(tmp_path, capsys):
    folder = written(tmp_path)
    text = "the cat sat on a mat. unwantable dogs word42\nword27\n"
    (tmp_path / "text.txt").write_text(text)
    done = resize_vocabulary.trim(folder, str(tmp_path / "text.txt"), tmp_path / "new", quiet=True)
    old, new = huggingface.read(folder), huggingface.read(tmp_path / "new")
    words, small = tokenizer.load(folder), tokenizer.load(tmp_path / "new")
    kept = {*SPECIAL, *WORDS, "word27", "word42"} - {"river"}
    assert set(small.spec.all_tokens()) == kept
    assert (done.tokens_before, new.model.vocab_size) == (131, len(kept))
    files = [one / "model.safetensors" for one in (folder, tmp_path / "new")]
    assert [done.bytes_before, done.bytes_after] == [file.stat().st_size for file in files]
    assert done.bytes_before - done.bytes_after > 0.9 * 4 * (20 + 1) * (131 - len(kept))
    ids = words.encode(text.split("\n")[0]).tolist()
    again = small.encode(text.split("\n")[0]).tolist()
    assert words.tokens(ids) == small.tokens(again) and ids != again
    (hidden, logits), (wanted_hidden, wanted) = outputs(new, again), outputs(old, ids)
    np.testing.assert_allclose(hidden, wanted_hidden, atol=1e-6)
    places = [words.token_id(token) for token in small.spec.all_tokens()]
    np.testing.assert_allclose(logits, wanted[:, places], atol=1e-6)


def test_a_trimmed_model_has_the_same_tokens_in_shards_that_keep_line_breaks(tmp_path):
    folder = byte_pairs(tmp_path / "words", ["Ċ Ċ", "a b", "t h", "Ġ th"])
    values = json.loads((folder / "vocab.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(values | {"Ċ": len(values)}))
    words = tokenizer.load(folder)
    model = odd_config(vocab_size=words.vocab_size, segment_types=1, position_offset=2)
    loaded = dataclasses.replace(random_checkpoint(tmp_path / "unused", model, Heads(mlm=True)), vocabulary=words)
    huggingface_export.write(loaded, tmp_path / "old")
    document = "that.\n\n\nthe."
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": document}) + "\n")
    resize_vocabulary.trim(tmp_path / "old", str(tmp_path / "text.jsonl"), tmp_path / "new", quiet=True)
    small = tokenizer.load(tmp_path / "new")
    assert small.vocab_size < words.vocab_size
    unit = Unit("train", 0, (document.encode(),), "")
    for newlines in ("join", "keep"):
        old, new = (one.tokens(encode(one, unit, newlines=newlines).ids) for one in (words, small))
        assert old == new and ("ĊĊ" in old) == (newlines == "keep"), newlines


def test_a_trimmed_model_of_vectors_keeps_the_tokens_of_its_prompts(tmp_path):
    task = {"name": "own", "kind": "embedding", "labels": [], "max_length": 24, "pooling": "mean", "normalize": True}
    task |= {"prompt": "river word27: ", "query_prompt": "un", "prompts": [["other", "dog word42"]]}
    loaded = random_checkpoint(tmp_path / "vocabulary", MODELS["tied"][0], Heads(), task=task)
    huggingface_export.write_sentence_transformer(loaded, tmp_path / "old")
    (tmp_path / "text.txt").write_text("wants a cat\n")
    resize_vocabulary.trim(tmp_path / "old", str(tmp_path / "text.txt"), tmp_path / "new", quiet=True)
    words, small = tokenizer.load(tmp_path / "old"), tokenizer.load(tmp_path / "new")
    assert small.token_id("word30") is None and small.token_id("sat") is None
    for text in ("river word27: wants a cat", "unwants a cat", "dog word42", "un"):
        assert small.tokens(small.encode(text)) == words.tokens(words.encode(text)), text
    assert "##want" in small.tokens(small.encode("unwants"))


def test_a_model_without_a_hugging_face_format_is_written_as_a_workdir(tmp_path, capsys):
    loaded = random_checkpoint(tmp_path / "vocabulary", MODELS["tied"][0], Heads(tags=3, crf=True))
    export.write(loaded, tmp_path / "old")
    arguments = ["--checkpoint", str(tmp_path / "old"), "--output", str(tmp_path / "new")]
    resize_vocabulary.main([*arguments, "--add_tokens", str(words_file(tmp_path, NEW[:2]))])
    assert "131 -> 133 tokens in a workdir; " in capsys.readouterr().out
    new = open_checkpoint(tmp_path / "new")
    assert new.heads == loaded.heads and new.model.vocab_size == tokenizer.load(tmp_path / "new").vocab_size == 133
    np.testing.assert_array_equal(
        new.params["embeddings/token/table"][:131], loaded.params["embeddings/token/table"][:131]
    )


def test_a_model_of_vectors_that_cannot_be_computed_keeps_its_task(tmp_path):
    task = {"name": "own", "kind": "embedding", "labels": [], "max_length": 24, "pooling": "mean and Dense"}
    loaded = random_checkpoint(tmp_path / "vocabulary", MODELS["tied"][0], Heads(), task=task)
    export.write(loaded, tmp_path / "old")
    resize_vocabulary.add_tokens(tmp_path / "old", words_file(tmp_path, NEW[:2]), tmp_path / "new")
    assert huggingface.read(tmp_path / "new").task == task


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parameters_with_a_row_for_each_token_are_found_in_every_family(name):
    model = FAMILIES[name]
    heads = Heads(lm=True) if model.causal or model.directions > 1 else PRETRAINING
    shapes = {path: leaf.shape for path, leaf in layers.flatten(abstract_params(model, heads)).items()}
    rows = {path for path, shape in shapes.items() if 128 in shape}
    assert vocabulary_axes(model, heads) == dict.fromkeys(rows, 0)
    assert "embeddings/token/table" in rows


@pytest.mark.parametrize(
    ("arguments", "words", "message"),
    [
        (["--add_tokens={words}"], [], "words.txt: it has no words"),
        (["--add_tokens={words}"], ["dog"], "words.txt: the vocabulary has a token for 'dog'"),
        (["--add_tokens={words}"], ["two dogs"], "words.txt: 'two dogs' contains white space"),
        (["--add_tokens={words}"], [NEW[2]], "words.txt: the tokenizer changes 'riverà' to 'rivera'"),
        (["--add_tokens=absent.txt"], [], "no such file: absent.txt"),
        (["--trim=absent*.txt"], [], r"--trim .*absent\*\.txt"),
        (["--trim={words}"], [""], r"words\.txt: no document in it\. Remove it from --trim$"),
        ([], [], "give one of --add_tokens FILE and --trim GLOB"),
        (["--trim={words}", "--add_tokens={words}"], NEW, "give one of --add_tokens FILE and --trim GLOB"),
    ],
)
def test_bad_words_and_files_are_refused_and_nothing_is_written(tmp_path, arguments, words, message):
    folder = written(tmp_path)
    arguments = [argument.format(words=words_file(tmp_path, words)) for argument in arguments]
    with pytest.raises(UserError, match=message) as refused:
        resize_vocabulary.main(["--checkpoint", str(folder), "--output", str(tmp_path / "new"), *arguments])
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("new*"))


@pytest.mark.slow
def test_the_steps_of_the_guide_adapt_a_model_to_another_text(tmp_path, vocab_dir, sample_text):
    """docs/adapting.md on the sample: words, shards, training with replay, losses before and after."""
    words = tokenizer.load(vocab_dir)
    loaded = random_checkpoint(tmp_path / "unused", odd_config(vocab_size=words.vocab_size, max_positions=64))
    huggingface_export.write(dataclasses.replace(loaded, vocabulary=words), tmp_path / "model")
    verne = list(readers.documents(ROOT / "data_prep" / "sample" / "books" / "verne_twenty_thousand_leagues.txt.xz"))
    (tmp_path / "domain.txt").write_text("\n\n".join(verne[20:32]), encoding="utf-8")

    domain_words = tmp_path / "domain_words"
    train(TokenizerOptions(tmp_path / "domain.txt", domain_words, vocab_size=1500, lowercase=True))
    learned = (domain_words / "vocab.txt").read_text(encoding="utf-8").split()
    known = set((tmp_path / "model" / "vocab.txt").read_text(encoding="utf-8").split())
    new = [token for token in learned if not token.startswith("##") and token not in known]
    assert {"nautilus", "nemo"} <= set(new)
    resize_vocabulary.add_tokens(tmp_path / "model", words_file(tmp_path, new), tmp_path / "grown")

    for name, text in (("domain", tmp_path / "domain.txt"), ("general", sample_text)):
        options = BuildOptions(str(text), tmp_path / "grown", tmp_path / name, 64, objective="doc_sentences")
        build(dataclasses.replace(options, workers=1, eval_fraction=0.2))
    mixture = {"domain": (str(tmp_path / "domain"), 0.75), "general": (str(tmp_path / "general"), 0.25)}
    keys = [f"init_from={tmp_path / 'grown'}", f"data.mixture={mixture}", "steps=40", "batch_size=16"]
    keys += ["optimizer.learning_rate=1e-2"]
    flags = ["--config", "continued", *(f"--config.{key}" for key in keys)]
    pretrain.main([*flags, "--workdir", str(tmp_path / "run")])

    result = json.loads((tmp_path / "run" / "result.json").read_text())
    for name in ("domain", "general"):
        before, after = (
            evaluation.evaluate(tmp_path / one, tmp_path / name, compute_dtype="float32")["mlm_loss"]
            for one in ("grown", "run")
        )
        assert after < before - 0.5, name
        np.testing.assert_allclose(result[f"eval_{name}/mlm_loss"], after, rtol=1e-4)
    assert open_checkpoint(tmp_path / "run").vocabulary.token_id("nautilus") is not None
