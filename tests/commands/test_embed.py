"""embed: every layer name and pooling is as documented, and does not depend on other texts of the batch."""

import dataclasses
import gzip
import itertools
import lzma

import jax
import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
from families import FAMILIES
from random_checkpoints import odd_config, random_checkpoint
from tokenizer_kinds import byte_pairs

from bert_jax.commands import embed as commands_embed
from bert_jax.errors import UserError
from bert_jax.interop import huggingface_export
from bert_jax.model import layers, outputs
from bert_jax.model.bert import bind
from bert_jax.model.heads.config import Heads
from bert_jax.model.runtime import Runtime
from bert_jax.tasks.batches import LENGTHS, bucketed_batches
from bert_jax.tasks.embedder import POOLS, embed, encode
from bert_jax.tasks.reading.inputs import read_stream, read_texts
from bert_jax.tasks.rows import TaskBatch, TokenRows
from bert_jax.tasks.vector_files import embed_file
from bert_jax.tokenization import tokenizer

PAIRS = [("a dog unwantable .", "the mat"), ("cat", "dog\u200b \x01 s")]
TEXTS = ["the cat sat", PAIRS[0], "", "river " * 30, "the river", PAIRS[1]]
LAYERS = 5


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("vocabulary"), odd_config(layers=LAYERS), Heads(pooler=True))


@pytest.fixture(scope="module")
def states(loaded):
    return states_of(loaded, TEXTS)


def states_of(loaded, texts):
    """ids and hidden states [L+1, n, D] of each text by itself: no batch, no padding."""

    @jax.jit
    def run(params, batch):
        model = bind(loaded.model, loaded.heads, params, Runtime(layer_loop="scan"))
        encoded = model.encode(batch, all_layers=True)
        return jax.numpy.concatenate([encoded.embeddings[None], encoded.layers])

    found = []
    words = loaded.vocabulary
    for text in texts:
        parts = [words.encode(part).tolist() for part in ([text] if isinstance(text, str) else text)]
        if len(parts) == 1:
            parts[0] = parts[0][:22]
        ids = [words.cls_id, *parts[0], words.sep_id, *[token for part in parts[1:] for token in [*part, words.sep_id]]]
        segments = [int(slot > len(parts[0]) + 1) for slot in range(len(ids))]
        row = [np.array([values], np.int32) for values in (ids, segments, [1] * len(ids), range(len(ids)))]
        batch = TaskBatch(*row, labels=np.zeros(1, np.float32), label_weights=np.zeros(1, np.float32))
        found.append((np.array(ids), np.asarray(run(layers.unflatten(loaded.params), batch))[:, 0]))
    return found


def combined(layers: np.ndarray, name: str) -> np.ndarray:
    """The layer names as the paper's table has them, over [L+1, n, D]."""
    if name.isdecimal():
        return layers[int(name)]
    return {
        "embeddings": lambda: layers[0],
        "last": lambda: layers[-1],
        "second_to_last": lambda: layers[-2],
        "sum_all": lambda: layers[1:].sum(axis=0),
        "sum_last_4": lambda: layers[-4:].sum(axis=0),
        "mean_last_4": lambda: layers[-4:].mean(axis=0),
        "concat_last_4": lambda: np.concatenate(layers[-4:], axis=-1),
    }[name]()


# Each name is a program of its own: those that are not like another one here are in the default tests.
FIRST = ("embeddings", "last", "concat_last_4", "3")
NAMES = (*outputs.LAYERS, "0", "3", str(LAYERS))


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_every_layer_name_of_every_token(loaded, states, name):
    got = embed(loaded, TEXTS, layers=name, pool="none", batch_size=4)
    wanted = np.concatenate([combined(layers, name) for _, layers in states])
    assert got["embeddings"].dtype == np.float32
    np.testing.assert_allclose(got["embeddings"], wanted, atol=1e-5)
    np.testing.assert_array_equal(got["input_ids"], np.concatenate([ids for ids, _ in states]))
    assert got["offsets"].dtype == np.int64 and got["input_ids"].dtype == np.int32
    np.testing.assert_array_equal(np.diff(got["offsets"]), [len(ids) for ids, _ in states])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_every_family(tmp_path, family):
    config = dataclasses.replace(FAMILIES[family], layers=LAYERS, max_positions=24)
    loaded = random_checkpoint(tmp_path, config, Heads())
    states = states_of(loaded, TEXTS[:2])
    for name in ("embeddings", "concat_last_4", "mean_last_4"):
        got = embed(loaded, TEXTS[:2], layers=name, pool="none")
        wanted = np.concatenate([combined(layers, name) for _, layers in states])
        np.testing.assert_allclose(got["embeddings"], wanted, rtol=1e-5, atol=1e-5, err_msg=name)
    wanted = [layers[-1].mean(axis=0) for _, layers in states]
    np.testing.assert_allclose(embed(loaded, TEXTS[:2])["embeddings"], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pool", ["cls", "mean", "max", "last"])
@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 32])
def test_every_pool_of_a_text(loaded, states, pool, batch_size):
    pooled = {"cls": lambda x: x[0], "mean": lambda x: x.mean(axis=0), "max": lambda x: x.max(axis=0)}
    pooled = (pooled | {"last": lambda x: x[-1]})[pool]
    got = embed(loaded, TEXTS, pool=pool, batch_size=batch_size)
    assert set(got) == {"embeddings"}
    np.testing.assert_allclose(got["embeddings"], [pooled(layers[-1]) for _, layers in states], atol=1e-5)


def test_a_word_is_the_mean_of_its_pieces_and_keeps_its_place(loaded, states, capsys):
    got = embed(loaded, TEXTS, pool="words")
    np.testing.assert_array_equal(np.diff(got["offsets"]), [3, 6, 0, 30, 2, 4])
    second = got["embeddings"][slice(*got["offsets"][1:3])]
    last = states[1][1][-1]  # [CLS] a dog un ##want ##able . [SEP] the mat [SEP]
    wanted = [last[1], last[2], last[3:6].mean(axis=0), last[6], last[8], last[9]]
    np.testing.assert_allclose(second, wanted, atol=1e-5)
    missing = np.isnan(got["embeddings"]).all(axis=1)
    # 22 pieces of the long text fit the 24 positions; \x01 is no character to the tokenizer.
    assert np.flatnonzero(missing).tolist() == [*range(9 + 22, 9 + 30), 9 + 30 + 2 + 2]
    said = capsys.readouterr().err
    assert "1 of 6 texts are longer than 24 tokens; truncated" in said and "9 of 45 words" in said


def test_words_of_byte_level_bpe_are_those_of_the_text(tmp_path):
    words = tokenizer.load(byte_pairs(tmp_path, ["Ġ a", "Ġ b", "Ġa b"]))
    texts = ["ab ab b", ("b a", "ab ab"), "c  ab "]
    whole, parted = (encode(texts, words, 24, by_word=by_word) for by_word in (False, True))
    assert words.tokens(parted.rows.input_ids[:6]) == ["<s>", "a", "b", "Ġab", "Ġb", "</s>"]
    np.testing.assert_array_equal(np.diff(parted.word_offsets), [3, 4, 2])
    np.testing.assert_array_equal(parted.rows.input_ids[:14], whole.rows.input_ids[:14])


def test_a_text_over_max_length_is_cut_and_the_longer_of_a_pair_first(loaded, capsys):
    texts = ["cat cat cat cat cat cat cat", ("the dog", "a a a a a a a a"), "the"]
    got = embed(loaded, texts, pool="none", max_length=8)
    words = loaded.vocabulary
    rows = [words.decode(got["input_ids"][start:end]) for start, end in itertools.pairwise(got["offsets"])]
    assert rows == [
        "[CLS] cat cat cat cat cat cat [SEP]",
        "[CLS] the dog [SEP] a a a [SEP]",
        "[CLS] the [SEP]",
    ]
    assert "2 of 3 texts are longer than 8 tokens" in capsys.readouterr().err


def rows_of(lengths: np.ndarray) -> TokenRows:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids, firsts = np.zeros(offsets[-1], np.int32), lengths.astype(np.int32)
    return TokenRows(input_ids=ids, first_lengths=firsts, offsets=offsets, pad_id=0, truncated=0)


def test_lengths_share_few_shapes_and_every_text_comes_once():
    lengths = np.random.default_rng(0).integers(2, 513, 1000)
    seen, shapes = [], set()
    for indices, batch in bucketed_batches(rows_of(lengths), batch_size=32, devices=8, max_length=512):
        real = indices[indices >= 0]
        length = batch.input_ids.shape[1]
        assert len(indices) % 8 == 0 and len(real) > len(indices) / 2 - 8 and (lengths[real] <= length).all()
        np.testing.assert_array_equal(batch.sequence_ids.sum(axis=1)[indices >= 0], lengths[real])
        seen += real.tolist()
        shapes.add((len(indices), length))
    assert sorted(seen) == list(range(1000)) and len(shapes) <= 2 * len(LENGTHS)


def test_a_row_over_the_last_length_is_padded_to_the_next_multiple_of_it():
    batches = list(
        bucketed_batches(rows_of(np.array([600, 512, 513, 8000, 9])), batch_size=4, devices=1, max_length=8000)
    )
    assert [batch.input_ids.shape for _, batch in batches] == [(1, 16), (1, 512), (2, 1024), (1, 8000)]


def test_the_command_writes_what_the_function_gives(tmp_path, loaded, capsys):
    huggingface_export.write(loaded, tmp_path / "hf")
    lines = TEXTS[:-1]  # without control characters
    written = [line if isinstance(line, str) else "\t".join(line) for line in lines]
    (tmp_path / "texts.txt").write_text("".join(f"{line}\n" for line in written))
    output = tmp_path / "new" / "vectors.npz"
    arguments = ["--checkpoint", str(tmp_path / "hf"), "--input", str(tmp_path / "texts.txt"), "--output", str(output)]
    commands_embed.main(
        [*arguments, "--pooling=none", "--no-normalize", "--input_format=text", "--layers=second_to_last"]
    )
    wanted = embed(loaded, lines, pool="none", layers="second_to_last")
    with np.load(output) as written:
        assert set(written) == set(wanted)
        for name, array in wanted.items():
            np.testing.assert_array_equal(written[name], array)
    assert [path.name for path in output.parent.iterdir()] == ["vectors.npz"]
    assert "embeddings float32[" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"vectors\.npz exists"):
        commands_embed.main(arguments)
    with pytest.raises(UserError, match=r"--shard_size is for output in shards .* but .*npz is one file"):
        commands_embed.main([*arguments, "--shard_size=5"])


def test_the_ending_of_the_output_decides_its_format(tmp_path, loaded, capsys):
    huggingface_export.write(loaded, tmp_path / "hf")
    (tmp_path / "texts.csv").write_text("a,b\n" + "".join(f'"{text}, good",{n}\n' for n, text in enumerate("xyz")))
    arguments = ["--checkpoint", str(tmp_path / "hf"), "--input", str(tmp_path / "texts.csv"), "--text=a"]
    for name in ("vectors.npz", "vectors.parquet"):
        commands_embed.main([*arguments, "--pool=mean", "--output", str(tmp_path / name)])
    table = pq.read_table(tmp_path / "vectors.parquet").to_pydict()
    assert table["row"] == [0, 1, 2] and table["text"] == [f"{text}, good" for text in "xyz"]
    with np.load(tmp_path / "vectors.npz") as wanted:
        np.testing.assert_array_equal(np.array(table["embedding"], np.float32), wanted["embeddings"])
    with pytest.raises(UserError, match=r"vectors\.csv, but .*; use \.npz, \.parquet"):
        commands_embed.main([*arguments, "--output", str(tmp_path / "vectors.csv")])
    with pytest.raises(UserError, match="is for one vector per text"):
        commands_embed.main([*arguments, "--pool=words", "--output", str(tmp_path / "words.parquet")])
    assert not (tmp_path / "words.parquet").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "first"}, "unknown --layers 'first'; choose from embeddings, .*, or give a number from 0 to 5"),
        ({"layers": "6"}, "unknown --layers '6'; choose from"),
        ({"pool": "sum"}, f"unknown pool 'sum'; choose from {', '.join(POOLS)}"),
        ({"max_length": 25}, "--max_length is 25; use 5 to 24"),
        ({"truncate_dim": 21}, r"--truncate_dim is 21; use 1 to 20 \(the width of --layers last\)"),
        ({"truncate_dim": 81, "layers": "concat_last_4"}, r"use 1 to 80 \(the width of --layers concat_last_4\)"),
        ({"batch_size": 0}, "^batch_size is 0"),
        ({"compute_dtype": "float16"}, "float16"),
    ],
)
def test_an_option_out_of_range_is_refused(loaded, options, message):
    with pytest.raises(UserError, match=message):
        embed(loaded, ["the cat"], **options)


def test_vectors_of_several_layers_are_cut_at_any_of_their_dimensions(loaded):
    whole = embed(loaded, TEXTS[:2], layers="concat_last_4", pool="mean")["embeddings"]
    cut = embed(loaded, TEXTS[:2], layers="concat_last_4", pool="mean", truncate_dim=28)["embeddings"]
    np.testing.assert_allclose(cut, whole[:, :28], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"causal": True}, {"pool": "cls"}, "in a causal model the first token sees only itself"),
        ({"layers": 2}, {"layers": "sum_last_4"}, "--layers is sum_last_4, but the model has 2 layers"),
    ],
)
def test_an_option_that_does_not_fit_the_model_is_refused(tmp_path, changes, options, message):
    with pytest.raises(UserError, match=message):
        embed(random_checkpoint(tmp_path, odd_config(**changes)), ["the cat"], **options)


def test_texts_are_read_plain_or_compressed_and_other_data_are_refused(tmp_path, loaded):
    content = b"eins\r\nzwei\tdrei\n\nvier"
    for name, write in (("t.txt", bytes), ("t.gz", gzip.compress), ("t.xz", lzma.compress)):
        (tmp_path / name).write_bytes(write(content))
        assert read_texts(tmp_path / name) == [("eins",), ("zwei", "drei"), ("",), ("vier",)]
    for name, content, message in (
        ("empty", b"", "has no texts"),
        ("latin", b"na\xefve", "not UTF-8"),
        ("torn.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], "cut short or damaged"),
        ("torn.xz", lzma.compress(b"text" * 99)[:-9], "cut short or damaged"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_texts(tmp_path / name)
    (tmp_path / "tabs").write_text("one\na\tb\tc\n")
    with pytest.raises(UserError, match="tabs line 2 has 2 tabs"):
        read_texts(tmp_path / "tabs")


def test_tables_are_read_by_columns_and_never_as_lines(tmp_path):
    content = 'id,review,answer\n1,"good, and\nlong",yes\n2,"a ""bad"" one",no\n'
    (tmp_path / "t.csv").write_text(content)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(content.encode()))
    for name in ("t.csv", "t.csv.gz"):
        assert read_texts(tmp_path / name, text="review") == [("good, and\nlong",), ('a "bad" one',)]
        found = read_texts(tmp_path / name, text="review", text_pair="answer")
        assert found == [("good, and\nlong", "yes"), ('a "bad" one', "no")]
    (tmp_path / "t.tsv").write_text('text\tother\n"one\t1\ntwo\t2\n')
    assert read_texts(tmp_path / "t.tsv", form="tsv") == [('"one',), ("two",)]
    assert read_texts(tmp_path / "t.tsv", form="tsv", text="1")[0] == ("other",)
    assert read_texts(tmp_path / "t.tsv")[0] == ("text", "other")  # lines: a tab separates the texts of a pair
    with pytest.raises(UserError, match=r"t\.csv.*'text'.*review.*in predict, evaluate and embed: --text"):
        read_texts(tmp_path / "t.csv")
    with pytest.raises(UserError, match=r"--text is 'review'.*read as lines of text.*--form csv"):
        read_texts(tmp_path / "t.tsv", text="review")
    (tmp_path / "ragged.csv").write_text("text,b\n1,2\n3\n")
    with pytest.raises(UserError, match="line 3 has 1 fields, but the first line has 2"):
        read_texts(tmp_path / "ragged.csv")
    (tmp_path / "header.csv").write_text("text\n")
    with pytest.raises(UserError, match="has no texts"):
        read_texts(tmp_path / "header.csv")


def test_the_first_of_several_parquet_files_stands_for_them_all(tmp_path, loaded, capsys):
    files = [tmp_path / f"train-{number:05}-of-00003.parquet" for number in range(3)]
    for file, texts in zip(files, (["the cat", "a dog"], [], ["river"]), strict=True):
        pq.write_table(pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())}), file)
    assert read_texts(files[0]) == [("the cat",), ("a dog",), ("river",)] and read_texts(files[2]) == [("river",)]
    manifest = embed_file(loaded, files[0], tmp_path / "out", shard_size=2)
    assert manifest["count"] == 3 and manifest["input_bytes"] == sum(file.stat().st_size for file in files)
    assert f"{files[0]}: reading all 3 files of this data set as one" in capsys.readouterr().err
    whole = embed(loaded, ["the cat", "a dog", "river"])["embeddings"]
    shards = [np.load(tmp_path / "out" / name) for name in manifest["shards"]]
    np.testing.assert_allclose(np.concatenate(shards), whole, atol=1e-6)
    pq.write_table(pyarrow.table({"text": ["a", None]}), files[2])
    with pytest.raises(UserError, match=r"train-00000-of-00003\.parquet line 4: 'text' is None"):
        read_texts(files[0])
    pq.write_table(pyarrow.table({"body": ["a"]}), files[2])
    with pytest.raises(UserError, match=r"train-00002-of-00003\.parquet has no column 'text'"):
        next(read_stream(files[0]))
    files[1].unlink()
    with pytest.raises(UserError, match=r"no such file: .*train-00001-of-00003\.parquet"):
        next(read_stream(files[0]))


def test_a_tab_in_a_text_of_a_caller_is_white_space(loaded):
    spaced, tabbed = (embed(loaded, [f"the{space}cat{space}sat"])["embeddings"] for space in " \t")
    np.testing.assert_array_equal(spaced, tabbed)
