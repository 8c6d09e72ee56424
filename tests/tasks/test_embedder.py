"""embed over files of any length: every form of input, shards, what is resumed, and what is refused."""

import dataclasses
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
from random_checkpoints import odd_config, random_checkpoint

from bert_jax.commands import embed as commands_embed
from bert_jax.errors import UserError
from bert_jax.interop import huggingface_export
from bert_jax.model.heads.config import Heads
from bert_jax.storage.files import incomplete_path
from bert_jax.tasks import vector_files as command
from bert_jax.tasks.embedder import Embedder, embed
from bert_jax.tasks.reading.inputs import read_stream
from bert_jax.tasks.vector_files import embed_file, write_vectors

TEXTS = [f"the cat sat{' on' * (number % 7)} a mat" for number in range(23)]
ODD = ["the\ncat", "a\tdog", "the\u2028river", "", "a dog\r\nsat"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    return random_checkpoint(folder, odd_config(layers=1), Heads())


def lengths(window):
    """Stands for a model: the lengths of the texts, and a constant."""
    return np.array([[len("".join(texts)), 0.1] for texts in window], np.float32)


def shards_of(folder):
    names = json.loads((folder / command.MANIFEST).read_text())["shards"]
    return [np.load(folder / name) for name in names]


def test_json_lines_and_parquet_keep_line_ends_and_tabs(tmp_path):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"body": text, "n": 1}) + "\n" for text in ODD))
    pq.write_table(pyarrow.table({"body": ODD, "other": ODD[::-1]}), tmp_path / "t.parquet")
    for name in ("t.jsonl", "t.parquet"):
        assert list(read_stream(tmp_path / name, text="body")) == [(text,) for text in ODD]
    pairs = list(read_stream(tmp_path / "t.parquet", text="body", text_pair="other"))
    assert pairs == list(zip(ODD, ODD[::-1], strict=True))
    (tmp_path / "t.txt").write_text("one\ntwo\tthree\n")
    assert list(read_stream(tmp_path / "t.txt")) == [("one",), ("two", "three")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", '{"text": "a"}\n{"title": "b"}\n', "line 2: 'text' is None, not a text. Its fields are 'title'"),
        ("t.jsonl", '{"text": "a"}\n\n{"title": "b"}\n', "t.jsonl line 3: 'text' is None"),
        ("t.json", '{"data": [], "text": "a"}', r"t.json is a JSON document without rows.* list of objects"),
        ("t.jsonl", "[1]\n", r"t.jsonl line 1 is not a JSON object: \[1\]"),
        ("t.jsonl", "{\n", "t.jsonl line 1 is not JSON"),
        ("t.parquet", "no table", "t.parquet is damaged or not a Parquet file"),
        ("t.txt", "a\tb\tc\n", "line 1 has 2 tabs"),
    ],
)
def test_a_damaged_input_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        list(read_stream(tmp_path / name))


def test_blank_lines_between_json_lines_are_no_texts(tmp_path):
    (tmp_path / "t.json").write_text('\n{"text": "a"}\n \n{"text": ""}\n\n')
    assert list(read_stream(tmp_path / "t.json", form="jsonl")) == [("a",), ("",)]


def test_a_folder_of_parquet_is_called_a_folder(tmp_path):
    with pytest.raises(UserError, match=r"is a folder; expected a file\. Name a file in it"):
        list(read_stream(tmp_path, form="parquet"))
    with pytest.raises(UserError, match=r"no such file: .*none\.parquet"):
        list(read_stream(tmp_path / "none.parquet"))


@pytest.mark.parametrize("value", [65520.0, -1e38])
def test_a_value_that_is_too_large_for_the_dtype_is_refused(tmp_path, value):
    def large(window):
        return np.full((len(window), 2), value, np.float32)

    with pytest.raises(UserError, match=r"a value is too large for float16\. Use --dtype float32"):
        write_vectors(iter([("a",)]), large, tmp_path / "out", job={}, dtype="float16")
    assert write_vectors(iter([("a",)]), large, tmp_path / "wide", job={})["count"] == 1
    with_missing = np.array([[1, 2], [np.nan, np.nan]], np.float32)  # of a word without pieces
    assert np.isnan(command.converted(with_missing, "float16", "--dtype")[1]).all()
    with pytest.raises(UserError, match="too large"):
        command.converted(with_missing * value, "float16", "--dtype")


def test_a_conversion_needs_no_memory_but_that_of_its_result():
    vectors = np.ones((60_000, 16), np.float32)
    assert command.converted(vectors, "float32", "--dtype") is vectors
    tracemalloc.start()
    found = command.converted(vectors, "float16", "--dtype")
    assert tracemalloc.get_traced_memory()[1] < 1.2 * found.nbytes
    tracemalloc.stop()
    vectors[-1, -1] = 1e6
    with pytest.raises(UserError, match="too large"):
        command.converted(vectors, "float16", "--dtype")


@pytest.mark.parametrize("format", ["npy", "parquet"])
def test_an_interrupted_job_resumes_behind_its_complete_shards(tmp_path, monkeypatch, format):
    monkeypatch.setattr(command, "TEXTS_AT_ONCE", 4)
    texts = [(text,) for text in TEXTS]
    seen = []

    def once_broken(window):
        seen.append(len(window))
        if len(seen) == 5:
            raise KeyboardInterrupt
        return lengths(window)

    options = {"job": {"input": "a"}, "format": format, "dtype": "float16", "shard_size": 10}
    with pytest.raises(KeyboardInterrupt):
        write_vectors(iter(texts), once_broken, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="was begun with input='a', not 'b'"):
        write_vectors(iter(texts), lengths, tmp_path / "out", **options | {"job": {"input": "b"}})
    seen.clear()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        write_vectors(iter(texts), lengths, tmp_path / "killed", **options)
    assert write_vectors(iter(texts), lengths, tmp_path / "killed", **options)["count"] == 23
    manifest = write_vectors(
        iter(texts), lambda window: seen.append(len(window)) or lengths(window), tmp_path / "out", **options
    )
    assert seen == [4, 4, 2, 3]  # the second and third shard
    assert (manifest["count"], manifest["width"]) == (23, 2) and len(manifest["shards"]) == 3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [command.MANIFEST, *manifest["shards"]]
    if format == "npy":
        found = np.concatenate(shards_of(tmp_path / "out"))
    else:
        table = pq.read_table(tmp_path / "out", columns=["row", "embedding"])
        assert table["row"].to_pylist() == list(range(23))
        found = np.array(table["embedding"].to_pylist(), np.float16)
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, lengths(texts).astype(np.float16))
    assert not incomplete_path(tmp_path / "out").exists()


def test_a_folder_of_others_and_an_empty_input_are_refused(tmp_path):
    (tmp_path / "out.incomplete").mkdir()
    (tmp_path / "out.incomplete" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="was not left by an interrupted run"):
        write_vectors(iter([("a",)]), lengths, tmp_path / "out", job={})
    with pytest.raises(UserError, match="the input has no texts"):
        write_vectors(iter([]), lengths, tmp_path / "empty", job={})


def test_the_shards_of_a_file_hold_the_vectors_of_embed_in_order(tmp_path, loaded, monkeypatch, capsys):
    monkeypatch.setattr(command, "TEXTS_AT_ONCE", 6)
    huggingface_export.write(loaded, tmp_path / "hf")
    (tmp_path / "t.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    arguments = ["--checkpoint", str(tmp_path / "hf"), "--input", str(tmp_path / "t.txt")]
    commands_embed.main(
        [*arguments, "--output", str(tmp_path / "out"), "--format=npy", "--shard_size=9", "--normalize"]
    )
    assert "embeddings float32[23, 20] in 3 shards" in capsys.readouterr().out
    shards = shards_of(tmp_path / "out")
    assert [len(shard) for shard in shards] == [9, 9, 5]
    wanted = embed(loaded, TEXTS, normalize=True)["embeddings"]
    np.testing.assert_allclose(np.concatenate(shards), wanted, atol=1e-6)
    commands_embed.main([*arguments, "--output", str(tmp_path / "v.npz"), "--dtype=float16", "--normalize"])
    with np.load(tmp_path / "v.npz") as written:
        np.testing.assert_array_equal(written["embeddings"], wanted.astype(np.float16))
    with monkeypatch.context() as patch, pytest.raises(UserError, match="too large for float16"):
        patch.setattr(commands_embed, "embed", lambda *_, **__: {"embeddings": np.full((1, 2), 1e9, np.float32)})
        commands_embed.main([*arguments, "--output", str(tmp_path / "w.npz"), "--dtype=float16"])
    with pytest.raises(UserError, match="--format npy is for one vector per text, but --pool is words"):
        embed_file(loaded, tmp_path / "t.txt", tmp_path / "other", pool="words")
    with pytest.raises(UserError, match=r"out exists\. Choose another --output"):
        embed_file(loaded, tmp_path / "t.txt", Path(tmp_path / "out"))


def test_a_job_that_was_begun_for_other_texts_or_parameters_is_not_resumed(tmp_path, loaded, monkeypatch):
    """Though the file has the same name and length, and the checkpoint the same path and step."""

    def interrupted(*_):
        raise KeyboardInterrupt

    source = tmp_path / "t.txt"
    source.write_text("the cat\na dog\n")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Embedder, "vectors", interrupted)
        embed_file(loaded, source, tmp_path / "out")
    source.write_text("the dog\na cat\n")
    with pytest.raises(UserError, match=r"was begun with another input\. Remove it"):
        embed_file(loaded, source, tmp_path / "out")
    source.write_text("the cat\na dog\n")
    path = "embeddings/token/table"
    other = dataclasses.replace(loaded, params={**loaded.params, path: loaded.params[path] + 1})
    with pytest.raises(UserError, match="was begun with another model"):
        embed_file(other, source, tmp_path / "out")
    assert embed_file(loaded, source, tmp_path / "out")["count"] == 2


def test_a_command_with_an_input_that_cannot_be_read_can_be_corrected(tmp_path, loaded):
    huggingface_export.write(loaded, tmp_path / "hf")
    (tmp_path / "t.jsonl").write_text('{"body": "the cat"}\n')
    line = [f"--checkpoint={tmp_path / 'hf'}", f"--input={tmp_path / 't.jsonl'}", f"--output={tmp_path / 'vectors'}"]
    with pytest.raises(UserError, match="line 1: 'title' is None"):
        commands_embed.main([*line, "--format=npy", "--text=title"])
    commands_embed.main([*line, "--format=npy", "--text=body"])
    assert json.loads((tmp_path / "vectors" / command.MANIFEST).read_text())["count"] == 1
