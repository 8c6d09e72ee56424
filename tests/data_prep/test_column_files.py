"""Documents in a named column of CSV, TSV and Arrow files, and of data sets that Hugging Face's library saved."""

import bz2
import csv
import gzip
import io
import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.commands.clean import CleanOptions, clean
from bert_jax.errors import UserError
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.readers import text
from data_prep.readers.corpus import Corpus, Reading, find_sources, read
from data_prep.vocabulary import TokenizerOptions, train

TEXTS = ['He said, "No."\nShe left.', "¿Qué? Sí.", "三。四。", "a \u2028 b\tc", "'x',"]
COMPRESS = [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress)]


def corpus(pattern: object, **reading: str) -> Corpus:
    return Corpus(find_sources(str(pattern)), Reading(**reading))


def written_csv(texts: list[str], line_end: str = "\r\n", **options: object) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator=line_end, **options)
    writer.writerows([["id", "body"], *([number, text] for number, text in enumerate(texts))])
    return file.getvalue().encode()


@pytest.mark.parametrize("suffix, compress", COMPRESS)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_csv_gives_its_column(tmp_path, suffix, compress, line_end):
    path = tmp_path / f"a.csv{suffix}"
    path.write_bytes(compress(b"\xef\xbb\xbf" + written_csv(TEXTS, line_end) + b"\n"))
    found = corpus(path, text_field="body")
    assert list(found.documents()) == TEXTS
    assert found.bytes_read == found.total_bytes == path.stat().st_size


@given(st.lists(st.text(alphabet="a,\"\n \té'", max_size=12).filter(lambda text: text.strip()), min_size=1))
def test_csv_of_any_text_is_read_as_pythons_writer_wrote_it(tmp_path_factory, texts):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(written_csv(texts, quoting=random.Random(len(texts)).choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])))
    assert [item.decode() for item in read(str(path), Reading(text_field="body"))] == texts


def test_tsv_is_never_quoted(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b'id\ttext\r\n1\t"one\r\n\r\n2\ttwo, "three"\r\n')
    assert list(corpus(tmp_path / "a.tsv").documents()) == ['"one', 'two, "three"']


ROWS = {
    "too few fields": (
        "a.csv",
        b'id,text\n1,one\n2\n3,"three"\n',
        "bad_row",
        r"line 3: 1 fields, but the first line names 2",
    ),
    "too many fields": ("a.tsv", b"id\ttext\n1\tone\n2\ttwo\tx\n3\tthree\n", "bad_row", "line 3: 3 fields, but"),
    "a bad quote": ("a.csv", b'id,text\n1,one\n2,"two" x\n3,three\n', "bad_row", r"line 3: not CSV \('"),
    "an empty field": ("a.csv", b"id,text\n1,one\n2,\n3,three\n", "empty_text", ""),
    "Latin-1": (
        "a.csv",
        b'id,text\n1,one\n2,"caf\xe9"\n3,three\n',
        "invalid_utf8",
        r"line 3, byte 4|line 3: not UTF-8",
    ),
    "NUL": ("a.csv", b"id,text\n1,one\n2,a\0b\n3,three\n", "nul_character", "line 3: a NUL character"),
}


@pytest.mark.parametrize("name, content, reason, message", ROWS.values(), ids=ROWS)
def test_a_bad_row_is_refused_and_the_rest_is_read(tmp_path, name, content, reason, message):
    (tmp_path / name).write_bytes(content)
    if message:
        with pytest.raises(UserError, match=message):
            list(corpus(tmp_path / name).documents())
    found = corpus(tmp_path / name, on_error="skip")
    assert list(found.documents()) == ["one", "three"] and found.refused == {reason: 1}


@pytest.mark.parametrize(
    "name, content, reason, message",
    [
        ("a.csv", b"id,body\n1,one\n", "no_text_column", "no column 'text'; the first line names the columns id, body"),
        ("a.csv", b"text,text\n1,one\n", "no_text_column", "2 columns are called 'text'"),
        ("a.tsv", b"id,text\n1,one\n", "no_text_column", "no column 'text'; the first line names the columns id,text"),
        ("a.csv", b'"a\nb",c\n1,2\n', "no_text_column", "the first line names the columns a b, c. Use"),
        ("a.csv", b"", "no_text_column", r"no column 'text'; the first line names the columns \(none\)"),
        ("a.csv", b'id,text\n1,"one\n2,two\n', "bad_row", r"line 2: not CSV \(unexpected end of data\)"),
        ("a.csv", b"id,text\n1," + b"x" * 3000, "document_too_long", "line 2: a document of more than"),
        ("a.csv", b'id,text\n1,"' + b"x\n" * 1500, "document_too_long", "line 2: a document of more than"),
        ("a.csv.gz", gzip.compress(b"id,text\n" + b"1,one\n" * 999, mtime=0)[:-9], "damaged_file", "damaged file"),
    ],
)
def test_a_bad_table_is_refused(tmp_path, monkeypatch, name, content, reason, message):
    monkeypatch.setattr(text, "MAX_DOCUMENT_BYTES", 2000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(corpus(tmp_path / name).documents())
    found = corpus(tmp_path / name, on_error="skip")
    assert not {"one\n2,two"} & set(found.documents()) and found.refused == {reason: 1}


def write_arrow(path: Path, texts: pa.Array | list, rows: int = 2, opening: object = pa.ipc.new_stream) -> None:
    table = pa.table({"id": pa.array(range(len(texts))), "text": texts})
    with opening(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


@pytest.mark.parametrize("opening", [pa.ipc.new_stream, pa.ipc.new_file], ids=["stream", "file"])
@pytest.mark.parametrize("suffix, compress", COMPRESS)
def test_arrow_gives_its_column(tmp_path, opening, suffix, compress):
    write_arrow(tmp_path / "a.arrow", TEXTS, opening=opening)
    path = tmp_path / f"b.arrow{suffix}"
    path.write_bytes(compress((tmp_path / "a.arrow").read_bytes()))
    found = corpus(path)
    assert list(found.documents()) == TEXTS
    assert found.bytes_read == found.total_bytes == path.stat().st_size


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_arrow_text_of_every_kind_is_read(tmp_path, kind):
    values = pa.array(TEXTS, pa.binary() if pa.types.is_binary(kind) else pa.string()).cast(kind)
    write_arrow(tmp_path / "a.arrow", values, rows=100)
    assert list(corpus(tmp_path / "a.arrow").documents()) == TEXTS


@pytest.mark.parametrize("name", ["a.arrow", "a.parquet"])
def test_a_value_that_is_too_long_is_refused_and_the_rest_is_read(tmp_path, monkeypatch, name):
    monkeypatch.setattr(text, "MAX_DOCUMENT_BYTES", 1000)
    if name == "a.arrow":
        write_arrow(tmp_path / name, ["one", "x" * 1001, "two"])
    else:
        pq.write_table(pa.table({"text": ["one", "x" * 1001, "two"]}), tmp_path / name)
    first, refusal, last = read(str(tmp_path / name))
    assert (first, last, refusal.reason) == (b"one", b"two", "document_too_long")
    assert "row 2" in str(refusal) and "Divide it into several" in str(refusal)
    assert "--document_separator" not in str(refusal)


def test_arrow_rows_without_text_are_refused_one_by_one(tmp_path):
    texts = pa.array([b"one", None, b"\xff", b"two"]).view(pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(texts), texts.buffers(), null_count=1)
    write_arrow(tmp_path / "a.arrow", text, rows=3)
    with pytest.raises(UserError, match=r"a\.arrow, row 2: expected text in 'text', got null"):
        list(corpus(tmp_path / "a.arrow").documents())
    found = corpus(tmp_path / "a.arrow", on_error="skip")
    assert list(found.documents()) == ["one", "two"] and found.refused == {"no_text_field": 1, "invalid_utf8": 1}
    with pytest.raises(UserError, match=r"no text column 'body'; the columns are id \(int64\), text \(string\)"):
        list(corpus(tmp_path / "a.arrow", text_field="body").documents())
    with pytest.raises(UserError, match=r"expected text in column 'id', got int64; the columns are id"):
        list(corpus(tmp_path / "a.arrow", text_field="id").documents())


@pytest.mark.parametrize("opening", [pa.ipc.new_stream, pa.ipc.new_file], ids=["stream", "file"])
def test_arrow_that_is_cut_anywhere_is_damaged(tmp_path, opening):
    write_arrow(tmp_path / "a.arrow", TEXTS, opening=opening)
    whole = (tmp_path / "a.arrow").read_bytes()
    for size in range(1, len(whole), 11):
        (tmp_path / "a.arrow").write_bytes(whole[:size])
        *texts, refusal = read(str(tmp_path / "a.arrow"))
        assert refusal.reason == "damaged_file" and texts == [text.encode() for text in TEXTS[: len(texts)]], size


def test_arrow_with_flipped_bytes_gives_text_or_a_refusal(tmp_path):
    """Arrow has no checksums: offsets that point outside of a column must not be followed."""
    write_arrow(tmp_path / "a.arrow", TEXTS * 5, rows=10)
    whole = (tmp_path / "a.arrow").read_bytes()
    generator = random.Random(0)
    for _ in range(300):
        flipped = bytearray(whole)
        flipped[generator.randrange(len(flipped))] ^= 1 << generator.randrange(8)
        (tmp_path / "a.arrow").write_bytes(flipped)
        for item in read(str(tmp_path / "a.arrow")):
            assert "\n" not in str(item) if not isinstance(item, bytes) else item.decode() is not None


def save_to_disk(folder: Path, shards: list[list[str]], split: str | None = "train") -> None:
    """Writes the files of datasets 5.2.0's Dataset.save_to_disk."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        write_arrow(folder / name, pa.array(texts, pa.string()), rows=1000)
    features = {"id": {"dtype": "int64", "_type": "Value"}, "text": {"dtype": "string", "_type": "Value"}}
    information = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    (folder / "dataset_info.json").write_text(json.dumps(information, indent=2))
    formats = {"format_columns": None, "format_kwargs": {}, "format_type": None, "output_all_columns": False}
    files = {"data_files": [{"filename": name} for name in names]}
    state = {**files, "fingerprint": "0123456789abcdef", **formats, "split": split}
    (folder / "state.json").write_text(json.dumps({f"_{name}": value for name, value in state.items()}, indent=2))


def test_saved_datasets_are_read_by_their_folder(tmp_path):
    save_to_disk(tmp_path / "saved", [TEXTS[:2], TEXTS[2:]])
    for pattern in ("saved", "saved/", "sav*", "*", "saved/*.arrow"):
        found = corpus(tmp_path / pattern)
        assert list(found.documents()) == TEXTS, pattern
        assert [Path(source.path).name for source in found.sources] == [
            "data-00000-of-00002.arrow",
            "data-00001-of-00002.arrow",
        ]
        assert found.bytes_read == found.total_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.arrow"))


def test_of_a_saved_dictionary_of_splits_the_training_split_is_read(tmp_path):
    for split, texts in (("train", TEXTS[:3]), ("test", TEXTS[3:])):
        save_to_disk(tmp_path / "saved" / split, [texts], split)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert list(corpus(tmp_path / "saved").documents()) == TEXTS[:3]
    assert list(corpus(tmp_path / "saved" / "test").documents()) == TEXTS[3:]
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(UserError, match=r"DatasetDict without the split train\. Name a split: \S+/saved/test$"):
        corpus(tmp_path / "saved")


def test_damaged_saved_datasets_are_refused(tmp_path):
    save_to_disk(tmp_path / "saved", [TEXTS[:2], TEXTS[2:]])
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00001-of-00002\.arrow: no such file"):
        list(corpus(tmp_path / "saved").documents())
    for content, message in {
        "{": "state.json is not valid JSON",
        "{}": "state.json names no files",
        '{"_data_files": []}': "a saved data set without rows",
        '{"_indices_data_files": [{"filename": "indices.arrow"}]}': "saved with a list of row numbers",
    }.items():
        (tmp_path / "saved" / "state.json").write_text(content)
        with pytest.raises(UserError, match=message):
            corpus(tmp_path / "saved")


def test_vocabularies_are_trained_on_every_format(tmp_path, sample_text):
    documents = sample_text.read_text().split("\n\n")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(written_csv(documents)))
    save_to_disk(tmp_path / "saved", [documents])
    found = set()
    for number, (name, field) in enumerate(((sample_text, "text"), ("a.csv.gz", "body"), ("saved", "text"))):
        options = TokenizerOptions(tmp_path / name, tmp_path / f"vocab{number}", 400, text_field=field)
        found.add(train(options).content_hash)
    assert len(found) == 1


def test_every_format_is_cleaned(tmp_path):
    texts = [f"{text} {number}" for number, text in enumerate(TEXTS)]
    (tmp_path / "a.csv").write_bytes(written_csv([*texts, texts[0]]))
    found = clean(CleanOptions(tmp_path / "a.csv", tmp_path / "out", text_field="body", workers=1))
    assert (found["documents"]["read"], found["documents"]["kept"]) == (len(texts) + 1, len(texts))
    assert list(corpus(tmp_path / "out" / "*.jsonl.zst").documents()) == texts
    (tmp_path / "records").write_text('{"text": "one"}\n')
    clean(CleanOptions(tmp_path / "records", tmp_path / "chosen", input_format="jsonl", workers=1))
    assert list(corpus(tmp_path / "chosen" / "*.jsonl.zst").documents()) == ["one"]


def test_every_format_gives_the_shards_of_its_text(tmp_path, sample_text, vocab_dir):
    """With two workers, and a unit size that makes many units."""
    documents = sample_text.read_text().split("\n\n")
    (tmp_path / "a.csv.bz2").write_bytes(bz2.compress(written_csv(documents)))
    save_to_disk(tmp_path / "saved", [documents[:9], documents[9:]])
    found = {}
    for name, field in (("a.csv.bz2", "body"), ("saved", "text"), (str(sample_text), "text")):
        options = {"seq_len": 64, "workers": 2, "unit_mb": 0.01, "text_field": field}
        output = tmp_path / f"out{len(found)}"
        manifest = build(BuildOptions(tmp_path / name, vocab_dir, output, **options))
        found[name] = manifest["shards"]
    assert len({shards["sha256"] for shards in found.values()}) == 1


TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()]


def written(path: Path, column: pa.Array) -> str:
    table = pa.table({"id": pa.array(range(len(column))), "text": column})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return str(path)


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
@pytest.mark.parametrize("layout", ["plain", "dictionary", "run_end_encoded"])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_text_of_every_arrow_type_is_read(tmp_path, kind, layout, suffix):
    values = pa.array(["one", "zwei \u00fc", "one"]).cast(pa.binary()).cast(kind)
    column = {
        "plain": lambda: values,
        "dictionary": lambda: pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), values[:2]),
        "run_end_encoded": lambda: pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3], pa.int32()), values),
    }[layout]()
    try:
        path = written(tmp_path / f"a{suffix}", column)
    except pa.ArrowNotImplementedError:
        pytest.skip("pyarrow does not write it")
    assert list(read(path)) == [b"one", "zwei \u00fc".encode(), b"one"]


NO_TEXT = {
    r"list<\w+: string>": pa.array([["one"]]),
    "struct<text: string>": pa.array([{"text": "one"}]),
    "null": pa.array([None]),
    r"extension<arrow\.json>": pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(["1"])),
    "bool": pa.array([True]),
}


@pytest.mark.parametrize("kind", NO_TEXT)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_columns_of_other_types_are_refused_with_their_type(tmp_path, kind, suffix):
    (refusal,) = read(written(tmp_path / f"a{suffix}", NO_TEXT[kind]))
    assert refusal.reason == "no_text_column"
    assert re.search(rf"expected text in column 'text', got {kind}; the columns are id \(int64\), text", str(refusal))


def test_output_of_datatrove_is_input(tmp_path):
    """Its JsonlWriter and ParquetWriter write these fields, in files of these names (docs/data.md)."""
    records = [{"text": f"Page {n}.\nIt is good.", "id": f"x/{n}", "metadata": {"url": "u", "n": n}} for n in range(9)]
    for name in ("00000.jsonl.gz", "00001.jsonl.gz"):
        chosen = records[:5] if name[4] == "0" else records[5:]
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in chosen)
        (tmp_path / name).write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "000_00000.parquet")
    texts = [record["text"] for record in records]
    for pattern in ("*.jsonl.gz", "*.parquet"):
        assert list(corpus(tmp_path / pattern).documents()) == texts
