"""Files of tasks: tables of every format, labelled texts, and the inputs of predictions."""

import csv
import gzip
import io
import json
import lzma
import subprocess
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.config import AutoTaskConfig, ClassificationConfig
from bert_jax.errors import UserError
from bert_jax.tasks import measurement, named, registry
from bert_jax.tasks.in_memory import data_file
from bert_jax.tasks.kinds.classification import ClassificationTask
from bert_jax.tasks.kinds.span import SpanPairTask
from bert_jax.tasks.kinds.tagging import TaggingTask
from bert_jax.tasks.kinds.token_regression import TokenRegressionTask
from bert_jax.tasks.reading import labelled, tables
from bert_jax.tasks.reading.inputs import InputRecord, form_of_file, record_words, split_words
from bert_jax.tasks.reading.tables import Column, Columns
from bert_jax.tasks.registry import KINDS
from bert_jax.tasks.rows import Span, Split
from bert_jax.tasks.task import Task

OWN = Columns("text", "", "label")
# Commas, quotes, tabs and line ends inside, a mark of byte order's own character, and what only splitlines ends.
TEXTS = ["plain", "with, comma", 'so "quoted"', "two\nlines", "a\ttab", "one\u2028line", " spaces ", "", "über"]


def own_rows() -> list[dict[str, str]]:
    return [{"id": str(n), "text": text, "label": "yn"[n % 2]} for n, text in enumerate(TEXTS)]


def write_csv(path: Path, rows: list[dict[str, str]], compress=bytes, mark: str = "") -> Path:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(rows[0]))  # RFC 4180: quoted where needed, lines end in CR LF
    writer.writeheader()
    writer.writerows(rows)
    path.write_bytes(compress((mark + stream.getvalue()).encode()))
    return path


def write_jsonl(path: Path, rows: list[dict], compress=bytes) -> Path:
    path.write_bytes(compress("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()))
    return path


def write_parquet(path: Path, rows: list[dict], classes: list[str] | None = None) -> Path:
    found = pa.Table.from_pylist(rows)
    if classes:  # as `datasets` writes it
        told = {"info": {"features": {"label": {"names": classes, "_type": "ClassLabel"}}}}
        found = found.replace_schema_metadata({"huggingface": json.dumps(told)})
    pq.write_table(found, path)
    return path


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("compression", COMPRESS)
def test_csv_and_jsonl_read_alike_plain_and_compressed(tmp_path, compression):
    compress = COMPRESS[compression]
    files = [
        write_csv(tmp_path / f"a.csv{compression}", own_rows(), compress, "\ufeff"),
        write_jsonl(tmp_path / f"a.jsonl{compression}", own_rows(), compress),
    ]
    for path in files:
        split = labelled.read_table(path, OWN, label_required=True)
        assert [item.text for item in split.items] == TEXTS, path
        assert [item.label for item in split.items] == [row["label"] for row in own_rows()]
        assert split.labelled and split.left_out == 0


def test_csv_equals_that_of_python_and_has_the_line_that_a_record_ends_on(tmp_path):
    path = write_csv(tmp_path / "a.csv", own_rows())
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        wanted = [(row["text"], reader.line_num) for row in reader]
    split = labelled.read_table(path, OWN, label_required=True)
    assert [(item.text, item.line) for item in split.items] == wanted


@pytest.mark.parametrize("separator", [";", "\t"])
def test_csv_of_spreadsheets_that_separate_by_other_marks_than_commas(tmp_path, separator):
    rows = [("text", "label"), ("good, really; very\tgood", "y"), ('"no"', "n"), ("two\nlines", "y")]
    with (tmp_path / "a.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    split = labelled.read_table(tmp_path / "a.csv", OWN, label_required=True)
    assert [(item.text, item.label) for item in split.items] == rows[1:]


def test_whole_rows_are_read_by_content_and_by_endings_in_any_case(tmp_path):
    rows = [{"text": "one, two", "label": "y"}, {"text": "three", "label": "n"}]
    with (tmp_path / "A.CSV").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text("\n".join(map(json.dumps, rows)))
    for name in ("A.CSV", "a.json", "b.json"):
        assert tables.whole_rows(tmp_path / name) == rows, name


def test_a_list_of_texts_with_a_hashtag_has_no_columns(tmp_path):
    for content, has_columns in (("one\n#two\nthree\n", False), ("one\n#two\n\nthree\n", True)):
        (tmp_path / "a.txt").write_text(content)
        assert labelled.has_conll_columns(tmp_path / "a.txt", Columns(), lambda tag: True) == has_columns


def test_marks_within_a_sentence_separate_no_columns(tmp_path):
    (tmp_path / "a.csv").write_text("Good; not bad.\nBad; or worse; no.\n")
    rows = tables.whole_rows(tmp_path / "a.csv", header=False)
    assert rows == [{"0": "Good; not bad."}, {"0": "Bad; or worse; no."}]


def test_a_text_of_csv_may_be_a_book(tmp_path):
    book = "a word, " * 50_000
    path = write_csv(tmp_path / "a.csv", [{"text": book, "label": "y"}])
    assert labelled.read_table(path, OWN, label_required=True).items[0].text == book


def test_parquet_reads_as_jsonl_does(tmp_path):
    rows = [{"text": text, "label": n % 3} for n, text in enumerate(TEXTS)]
    stored = labelled.read_table(write_parquet(tmp_path / "a.parquet", rows), OWN, label_required=True)
    lines = labelled.read_table(write_jsonl(tmp_path / "a.jsonl", rows), OWN, label_required=True)
    assert stored.items == tuple(item._replace(line=n) for n, item in enumerate(lines.items, start=1))
    assert [item.label for item in stored.items] == [str(n % 3) for n in range(len(TEXTS))]


def labels_of(path: Path, labels: tuple[str, ...] = ()) -> list[str | None]:
    return [item.label for item in labelled.read_table(path, OWN, True, labels).items]


def test_a_number_is_the_index_of_a_class_if_names_are_known(tmp_path):
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": 0}]
    bare = write_parquet(tmp_path / "bare.parquet", rows)
    named = write_parquet(tmp_path / "named.parquet", rows, ["bad", "good"])
    assert labels_of(bare) == ["1", "0"]
    assert labels_of(bare, ("no", "yes")) == ["yes", "no"]
    assert labels_of(named) == ["good", "bad"]
    assert labels_of(named, ("0", "1")) == ["1", "0"]
    assert labels_of(named, ("no", "yes")) == ["yes", "no"]  # the file's own names are others
    assert labels_of(write_jsonl(tmp_path / "b.jsonl", [{"text": "a", "label": True}])) == ["true"]
    assert labels_of(tmp_path / "b.jsonl", ("0", "1")) == ["1"]
    for values, read in (((3.0, 2.5), ["3", "2.5"]), ((-1, 1), ["-1", "1"])):
        path = write_jsonl(tmp_path / "c.jsonl", [{"text": "a", "label": value} for value in values])
        assert labels_of(path) == read


def test_a_number_is_never_the_place_of_another_number(tmp_path):
    stars = write_jsonl(tmp_path / "stars.jsonl", [{"text": "a", "label": 0}, {"text": "b", "label": 4}])
    assert labels_of(stars, ("1", "2", "4", "5")) == ["0", "4"]  # 0 is not in the training file, so it is reported
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    named = write_parquet(tmp_path / "named.parquet", rows, ["1", "2"])
    assert labels_of(named, ("1", "2")) == labels_of(named) == ["1", "2"]


def test_the_order_of_the_classes_that_a_file_names_is_kept(tmp_path):
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": 0}]
    train = labelled.read_table(write_parquet(tmp_path / "a.parquet", rows, ["World", "Sports", "Business"]), OWN, True)
    task = ClassificationTask("own").complete(train)
    assert task.labels == ("World", "Sports", "Business")
    assert labels_of(write_jsonl(tmp_path / "b.jsonl", rows), task.labels) == ["Sports", "World"]


@pytest.mark.parametrize("ending", ["tsv", "csv", "jsonl"])
def test_an_empty_label_is_none(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    between = {"tsv": "\t", "csv": ","}.get(ending, "")

    def write(*labels: str) -> None:
        rows = [{"text": "a", "label": label} for label in labels]
        lines = [between.join(row.values()) for row in rows] if between else [json.dumps(row) for row in rows]
        path.write_text("\n".join([f"text{between}label", *lines][not between :]) + "\n")

    write("x", " ", "y")
    with pytest.raises(UserError, match=rf"a.{ending} line {2 + bool(between)} has no label, but other lines have one"):
        labelled.read_table(path, OWN, label_required=True)
    write("", " ")
    assert not labelled.read_table(path, OWN, label_required=False).labelled
    with pytest.raises(UserError, match="has no labels: column 'label' is empty, null or -1 throughout"):
        labelled.read_table(path, OWN, label_required=True)


def test_what_is_only_to_be_answered_needs_no_label(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "label": None}, {"text": "b", "label": 1}])
    found = labelled.read_table(path, OWN, label_required=False)
    assert found.labelled and [item.label for item in found.items] == [None, "1"]


def test_columns_that_are_not_named_are_those_of_the_task():
    task = Columns("a", "b", "same", ("1", "2", "3", "4"))
    assert Columns("question").filled(task) == Columns("question", "b", "same", ("1", "2", "3", "4"))
    assert Columns().filled(task) == task and task.filled(OWN) == task


@pytest.mark.parametrize("held_back", [None, -1, float("nan")])
def test_labels_that_are_held_back_are_none(tmp_path, held_back):
    rows = [{"text": "a", "label": held_back}, {"text": None, "label": held_back}]
    path = write_jsonl(tmp_path / "test.jsonl", rows)
    split = labelled.read_table(path, OWN, label_required=False)
    assert not split.labelled and split.items == (("a", None, None, 1), ("", None, None, 2))
    with pytest.raises(UserError, match=r"test.jsonl has no labels: column 'label' is empty, null or -1 throughout"):
        labelled.read_table(path, OWN, label_required=True)
    without = write_jsonl(tmp_path / "bare.jsonl", [{"text": "a"}])
    assert not labelled.read_table(without, OWN, label_required=False).labelled


def test_records_have_all_columns_of_a_file(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"a": [1, 2], "b": {"c": 3}}, {"a": None}])
    columns = [Column("b", "text", required=False), Column("a", "label"), Column("z", "x", False)]
    found = tables.read_records(path, columns)
    assert found.records == [(1, ({"c": 3}, [1, 2], None)), (2, (None, None, None))]
    assert found.present == (True, True, False)


def test_ragged_lines_are_left_out_and_counted_where_a_task_allows_them(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("text\tlabel\na\tx\nbroken\n\there\tx\nb\ty\n")
    found = labelled.read_table(path, OWN, True, ragged_lines=True)
    assert [item.text for item in found.items] == ["a", "b"] and found.left_out == 2


JSONL, CSV = "a.jsonl", "a.csv"
MISTAKES = {
    "not JSON": (JSONL, b'{"text": "a", "label": 1}\n{"text": \n', r"a.jsonl line 2 is not JSON"),
    "half a pair": (
        JSONL,
        b'{"text": "\\ud83d\\ude00 \\\\ud83d", "label": 1}\n{"text": "\\uD83d", "label": 1}\n',
        r"a.jsonl line 2 contains half of a surrogate pair",
    ),
    "no object": (JSONL, b'["a", 1]\n', "line 1 is not a JSON object"),
    "no such field": (JSONL, b'{"review": "a", "label": 1}\n', "no column 'text'; its columns are: review, label"),
    "a label missing": (JSONL, b'{"text": "a", "label": 1}\n\n{"text": "b", "label": null}\n', "line 3 has no label"),
    "a label that is NaN": (JSONL, b'{"text": "a", "label": 1}\n{"text": "b", "label": NaN}\n', "line 2 has no label"),
    "label of no kind": (JSONL, b'{"text": "a", "label": [1]}\n', r"line 1: \[1\] is not a label"),
    "text of no kind": (JSONL, b'{"text": 7, "label": 1}\n', "line 1: column 'text' holds 7; expected a text"),
    "empty JSON": (JSONL, b"\n", "a.jsonl has no examples"),
    "ragged CSV": (CSV, b'text,label\n"a\nb",1\nc\n', "a.csv line 4 has 1 fields, but the first line has 2.*Quote"),
    "an open quote": (CSV, b'text,label\na,1\n"b,2\nc,3\n', "a.csv line 3 is not CSV"),
    "text after a quote": (CSV, b'text,label\n"a"b,1\n', "a.csv line 2 is not CSV.*double its quotes"),
    "no such column": (CSV, b"review,label\na,1\n", "no column 'text'; its columns are: review, label"),
    "not Parquet": ("a.parquet", b"text,label\n", "a.parquet is damaged or not a Parquet file"),
    "damaged zst": ("a.csv.zst", b"(\xb5/\xfd garbage", "a.csv.zst is cut short or damaged"),
    "no such data": ("", b"", r"tfds:glue/mrpc is not prepared on this machine .*TFDS_DATA_DIR"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_invalid_file_is_refused_with_the_line(tmp_path, mistake):
    name, content, message = MISTAKES[mistake]
    path = tmp_path / name if name else Path("tfds:glue/mrpc")
    if name:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        labelled.read_table(path, OWN, label_required=True)
    assert "\n" not in str(caught.value)


def test_a_missing_parquet_column_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{"review": "a", "stars": 1}])
    with pytest.raises(UserError, match=r"a.parquet has no column 'text'; its columns are: review, stars. .*task.text"):
        labelled.read_table(path, OWN, label_required=True)


def write_shards(folder: Path, rows: list[dict], digits: Sequence[str] = ("", "", "")) -> list[Path]:
    """Three files, the second without rows."""
    shards = [folder / f"train-{number:05d}-of-00003{each}.parquet" for number, each in enumerate(digits)]
    for shard, part in zip(shards, (rows[:3], [], rows[3:]), strict=True):
        pq.write_table(pa.Table.from_pylist(part, pa.Table.from_pylist(rows).schema), shard)
    return shards


SEVEN = [{"text": str(number), "label": number % 2, "pair": "b"} for number in range(7)]


@pytest.mark.parametrize("digits", [("", "", ""), ("-0123456789abcdef", "-fedcba9876543210", "-00000000aaaaaaaa")])
def test_the_first_of_several_parquet_files_stands_for_them_all(tmp_path, digits):
    shards = write_shards(tmp_path, SEVEN, digits)
    whole = labelled.read_table(write_parquet(tmp_path / "whole.parquet", SEVEN), OWN, label_required=True)
    found = labelled.read_table(shards[0], OWN, label_required=True)
    assert found.items == whole.items and len(found.items) == 7
    assert [item.line for item in found.items] == list(range(1, 8))
    assert len(labelled.read_table(shards[2], OWN, label_required=True).items) == 4  # named itself, it is itself
    assert registry.find_split("own", tmp_path, "train") == shards[0]
    assert measurement.file_remarks(shards[0]) == [f"{shards[0]}: reading all 3 files of this data set as one"]
    assert not measurement.file_remarks(shards[2])
    shards[1].rename(tmp_path / "elsewhere.parquet")
    with pytest.raises(UserError, match=r"no such file: .*train-00001-of-00003.*.parquet"):
        labelled.read_table(shards[0], OWN, label_required=True)


@pytest.mark.parametrize(
    "rows, classes, said",
    [
        (SEVEN, ["bad", "good"], r"00002-of-00003.parquet names its classes differently from train-00000-of"),
        ([{"review": "a", "label": 1}], None, r"00002-of-00003.parquet has no column 'text'; its columns are: review"),
        ([{"text": "a"}], None, r"00002-of-00003.parquet has no column 'label', but train-00000-of-00003.parquet has"),
    ],
)
def test_parquet_files_of_different_data_sets_are_refused(tmp_path, rows, classes, said):
    shards = write_shards(tmp_path, SEVEN)
    write_parquet(shards[2], rows, classes)
    with pytest.raises(UserError, match=said):
        labelled.read_table(shards[0], OWN, label_required=False)


def test_parquet_files_of_two_data_sets_are_ambiguous(tmp_path):
    write_shards(tmp_path, SEVEN)
    write_parquet(tmp_path / "train-00000-of-00001.parquet", SEVEN)
    with pytest.raises(UserError, match=r"train-00000-of-00001.* and train-00000-of-00003.* belong to different data"):
        registry.find_split("own", tmp_path, "train")
    for digits in ("-0123456789abcdef", "-fedcba9876543210"):
        write_parquet(tmp_path / f"dev-00001-of-00002{digits}.parquet", SEVEN)
    with pytest.raises(UserError, match=r"dev-00001-of-00002-0123456789abcdef.* and dev-.* belong to different data"):
        tables.data_set_files(tmp_path / "dev-00000-of-00002-0123456789abcdef.parquet")


def test_a_split_that_is_part_of_another_one_is_refused(tmp_path):
    first, _, last = map(str, write_shards(tmp_path, SEVEN))
    with pytest.raises(UserError, match=r"reads all 3 files of this data set, but dev is one of them: train-00002-of"):
        registry.resolve(AutoTaskConfig(train=first, dev=last, text="text", label="label"))
    registry.resolve(
        AutoTaskConfig(train=last, dev=first.replace("train-00000", "train-00001"), text="text", label="label")
    )


def write_prepared(folder: Path, splits: dict[str, list[dict]], classes: list[str]) -> None:
    """Pairs of glue/mrpc as TensorFlow Datasets prepares them with --file_format=array_record."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.proto import tf_example_pb2

    folder.mkdir(parents=True)
    template = tfds.core.ShardedFileTemplate(data_dir=folder, dataset_name="glue", filetype_suffix="array_record")
    infos = []
    for name, rows in splits.items():
        info = tfds.core.SplitInfo(
            name=name, shard_lengths=[len(rows)], num_bytes=1, filename_template=template.replace(split=name)
        )
        writer = ArrayRecordWriter(str(info.filepaths[0]), "group_size:1")
        for row in rows:
            example = tf_example_pb2.Example()
            for key in ("sentence1", "sentence2"):
                example.features.feature[key].bytes_list.value.append(row[key].encode())
            for key in ("label", "idx"):
                example.features.feature[key].int64_list.value.append(row[key])
            writer.write(example.SerializeToString())
        writer.close()
        infos.append(info)
    text = tfds.features.Text
    label = tfds.features.ClassLabel(names=classes)
    features = {"sentence1": text(), "sentence2": text(), "idx": np.int32, "label": label}
    identity = tfds.core.DatasetIdentity(
        name="glue", config_name="mrpc", version=tfds.core.Version("2.0.0"), data_dir=str(folder), module_name=""
    )
    information = tfds.core.DatasetInfo(builder=identity, features=tfds.features.FeaturesDict(features))
    information.set_file_format(tfds.core.FileFormat.ARRAY_RECORD)
    information.set_splits(tfds.core.SplitDict(infos))
    information.write_to_directory(folder)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_prepared_data_of_tensorflow_datasets_are_read_as_a_named_task_and_as_ones_own(tmp_path, monkeypatch):
    rows = [{"sentence1": f"über {n}", "sentence2": f"b {n}", "label": n % 2, "idx": n} for n in range(5)]
    unlabelled = [row | {"label": -1} for row in rows]
    classes = ["not_equivalent", "equivalent"]
    write_prepared(tmp_path / "glue/mrpc/2.0.0", {"train": rows, "validation": rows[:3], "test": unlabelled}, classes)
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    for data_dir in ("tfds:", "tfds:glue/mrpc", "tfds:glue/mrpc:2.0.0", f"tfds:{tmp_path}/glue/mrpc/2.0.0"):
        task, files = registry.resolve(AutoTaskConfig(name="mrpc", data_dir=data_dir))
        found = {split: registry.read(task, path, label_required=split != "test") for split, path in files.items()}
        sizes = {split: (len(part.items), part.labelled) for split, part in found.items()}
        assert sizes == {"train": (5, True), "dev": (3, True), "test": (5, False)}
        assert found["train"].items[1] == ("über 1", "b 1", "1", 2)  # by the task's labels
    own = AutoTaskConfig(train="tfds:glue/mrpc:train[:40%]", text="sentence1", label="label")
    task, files = registry.resolve(own)
    assert [item.label for item in registry.read(task, files["train"]).items] == classes  # by its own names
    with pytest.raises(UserError, match=r"no column 'review'; its columns are: .*sentence1.*task.text"):
        labelled.read_table(files["train"], Columns("review", "", "label"), label_required=True)
    with pytest.raises(UserError, match=r"unknown split dev; choose from .*validation"):
        labelled.read_table(Path("tfds:glue/mrpc:dev"), OWN, label_required=True)
    with pytest.raises(UserError, match="TensorFlow Datasets has no ewt"):
        registry.resolve(AutoTaskConfig(name="ewt", data_dir="tfds:"))


def test_a_clone_of_a_hugging_face_data_set_is_found_by_its_own_names(tmp_path):
    folder = tmp_path / "glue" / "mnli"
    for name in ("train", "validation_matched", "validation_mismatched", "test_matched", "../ax/test"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        rows = [{"premise": "a", "hypothesis": name, "label": -1 if "test" in name else 2, "idx": 0}]
        parts = 2 if name == "train" else 1
        for part in range(parts):
            file = folder / f"{name}-{part:05d}-of-{parts:05d}.parquet"
            write_parquet(file, rows, ["entailment", "neutral", "contradiction"])
    task, files = registry.resolve(AutoTaskConfig(name="mnli", data_dir=str(tmp_path)))
    assert list(files) == ["train", "dev", "dev_mismatched", "test", "ax"]
    splits = [registry.read(task, path, label_required=False).items for path in files.values()]
    assert [len(items) for items in splits] == [2, 1, 1, 1, 1]
    pairs = ("train", "validation_matched", "validation_mismatched", "test_matched", "../ax/test")
    wanted = [(pair, None if "test" in pair else "contradiction") for pair in pairs]
    assert [(items[0].text_pair, items[0].label) for items in splits] == wanted
    assert named.TASKS["mnli"].match_split(files["ax"]) == "ax"


# What Hugging Face's `datasets` writes of a data set with named classes, in each of its forms.
WRITE = """
import json, sys
from datasets import ClassLabel, Dataset, Features, Value
texts = json.loads(sys.argv[2])
classes = ClassLabel(names=["bad", "good"])
features = Features({"text": Value("string"), "label": classes, "idx": Value("int32")})
columns = {"text": texts, "label": [n % 2 for n in range(len(texts))], "idx": list(range(len(texts)))}
data = Dataset.from_dict(columns, features=features)
data.to_parquet(sys.argv[1] + "/a.parquet"), data.to_json(sys.argv[1] + "/a.jsonl"), data.to_csv(sys.argv[1] + "/a.csv")
"""


@pytest.mark.slow
def test_what_hugging_face_data_sets_write_is_read_as_they_hold_it(tmp_path, peer_python):
    if subprocess.run([peer_python, "-c", "import datasets"], capture_output=True).returncode:
        pytest.skip("that Python has no datasets")
    ran = subprocess.run([peer_python, "-c", WRITE, str(tmp_path), json.dumps(TEXTS)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for ending, names in ((".parquet", ["bad", "good"]), (".jsonl", ["0", "1"]), (".csv", ["0", "1"])):
        found = labelled.read_table(tmp_path / f"a{ending}", OWN, label_required=True).items
        assert [item.text for item in found] == TEXTS, ending
        assert [item.label for item in found] == [names[n % 2] for n in range(len(TEXTS))]


CONLLU = """\
# newdoc id = email
# text = I can't go
1\tI\tI\tPRON\tPRP\t_\t3\tnsubj\t_\t_
2-3\tcan't\t_\t_\t_\t_\t_\t_\t_\t_
2\tca\tcan\tAUX\tMD\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\tRB\t_\t4\tadvmod\t_\t_
3.1\tgone\tgo\tVERB\tVB\t_\t_\t_\t_\t_
4\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_

# text = Why?
1\tWhy\twhy\tADV\tWRB\t_\t0\troot\t_\tSpaceAfter=No
2\t?\t?\tPUNCT\t.\t_\t1\tpunct\t_\t_
"""
CONLL = """\
-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Peter NNP I-NP I-PER
"""


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_a_table_reads_alike_plain_and_compressed(tmp_path, ending):
    path = write(
        tmp_path / f"a.tsv{ending}", COMPRESS[ending](b'sentence\tlabel\nhide new " secretions \t0\n\x20wit\t1\n')
    )
    split = labelled.read_table(path, Columns("sentence", "", "label"), label_required=True)
    assert split.items == (('hide new " secretions ', None, "0", 2), (" wit", None, "1", 3)) and split.labelled


@pytest.mark.parametrize(
    ("columns", "content", "items"),
    [
        # Numbers for columns mean that there is no header.
        (
            Columns("3", "", "1"),
            "gj04\t1\t\tOur own.\ngj04\t0\t*\tMe.\n",
            [("Our own.", None, "1"), ("Me.", None, "0")],
        ),
        # A number next to a name counts columns under the header.
        (Columns("#1 String", "-1", "0"), "id\t#1 String\t#2 String\n7\tone\ttwo\n", [("one", "two", "7")]),
        # A byte order mark and the line ends of Windows are no text.
        (OWN, "\ufefftext\tlabel\r\none\u2028line\ty\r\n", [("one\u2028line", None, "y")]),
    ],
)
def test_columns_go_by_name_or_number(tmp_path, columns, content, items):
    split = labelled.read_table(write(tmp_path / "a.tsv", content), columns, label_required=True)
    assert [item[:3] for item in split.items] == items


def test_a_test_file_may_lack_labels(tmp_path):
    path = write(tmp_path / "test.tsv", "index\tsentence\n0\tBill whistled past the house.\n")
    assert not labelled.read_table(path, Columns("sentence", "", "label"), label_required=False).labelled


def test_conllu_words_are_neither_multiword_tokens_nor_empty_nodes(tmp_path):
    split = labelled.read_conllu(write(tmp_path / "a.conllu", CONLLU), Columns(), label_required=True)
    assert [item.words for item in split.items] == [("I", "ca", "n't", "go"), ("Why", "?")]
    assert [item.tags for item in split.items] == [("PRON", "AUX", "PART", "VERB"), ("ADV", "PUNCT")]
    assert split.items[0].lines == (3, 5, 6, 8)


def test_conllu_columns_go_by_name_or_number(tmp_path):
    path = write(tmp_path / "a.conllu", CONLLU)
    by_name = labelled.read_conllu(path, Columns("LEMMA", "", "XPOS"), label_required=True)
    assert by_name.items == labelled.read_conllu(path, Columns("2", "", "4"), label_required=True).items
    assert by_name.items[1].tags == ("WRB", ".")


@pytest.mark.parametrize(
    ("columns", "content", "sentences"),
    [
        # By default the first and the last column; marks of documents are no words.
        (Columns(), CONLL, [(("EU", "rejects"), ("I-ORG", "O")), (("Peter",), ("I-PER",))]),
        (Columns("1", "", "0"), "O\tNew York\nX\tis\n", [(("New York", "is"), ("O", "X"))]),  # separated by tabs
        # A space that does not break is part of a word.
        (Columns(), "10\u00a0000  O \n\u3000 O\n", [(("10\u00a0000", "\u3000"), ("O", "O"))]),
    ],
)
def test_words_and_tags_of_conll_are_columns(tmp_path, columns, content, sentences):
    split = labelled.read_conll(write(tmp_path / "eng.train", content), columns, label_required=True)
    assert [(item.words, item.tags) for item in split.items] == sentences


@pytest.mark.parametrize(
    ("columns", "content", "words", "comments"),
    [
        ("", "# id 1\nAnn B-X\nsat O\n\n# id 2\nBob B-X\n", ["Ann sat", "Bob"], 2),  # another number of columns
        ("", "# id-1\nAnn B-X\nsat O\n", ["Ann sat"], 1),  # the same number
        ("", "# id 8d\tdomain=en\nAnn _ _ B-X\nsat _ _ O\n", ["Ann sat"], 1),  # MultiCoNER
        ("", "# O\nAnn B-X\nsat O\n", ["# Ann sat"], 0),  # a word, because O is a tag
        ("", "#rome B-Y\nis O\n", ["#rome is"], 0),
        ("", "Ann B-X\n# B-Z\n", ["Ann #"], 0),  # within a sentence
        ("", "-DOCSTART-\n\nAnn B-X\n-DOCSTART- -X- O O\nBob B-X\n", ["Ann", "Bob"], 0),
        ("", "-DOCSTART- (1 EU)\nAnn B-X\n", ["Ann"], 0),  # AIDA
        ("12", "# text = Ann sat .\n1\tAnn\tB-X\t-\t-\n2\tsat\tO\t-\t-\n", ["Ann sat"], 1),
        ("", "# Ann\nAnn\n", None, 0),  # a file of words
    ],
)
def test_comments_and_marks_of_documents_are_no_words_of_conll(tmp_path, columns, content, words, comments):
    path = write(tmp_path / "a.conll", content)
    if words is None:
        (item,) = labelled.read_conll(path, Columns(), label_required=False).items
        assert item.words == ("Ann",)
        return
    split = labelled.read_conll(path, Columns(*columns[:1], label=columns[1:]), label_required=True)
    assert [" ".join(item.words) for item in split.items] == words
    assert split.remarks == ((f"{comments} lines are comments, which begin with #",) if comments else ())


def test_conllu_is_recognized_under_another_name(tmp_path):
    read = [labelled.read_conllu, labelled.read_conll]
    ((first, second), others) = [
        [item._replace(lines=()) for item in reader(write(tmp_path / "a.conll", CONLLU), Columns(), True).items]
        for reader in read
    ]
    assert others == [first, second]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ('{"text": "a", "label": "b"}\n{"text": "c", "label": "d"}\n', "table"),
        ('\ufeff\n{"text": "a", "label": "b"}', "table"),
        ('{"version": "1.1", "data": []}', "squad"),
        ('{\n "data": []\n}', "squad"),
        ('[{"text": "a", "label": "b"}, {"text": "c", "label": "d"}]', "table"),
        ('[\n{"text": "a",\n "label": "b"}\n]', "table"),
        ('{"version": "1", "data": [{"text": "a", "label": "b"}]}', "table"),
        ('{"version": "1.1", "data": [{"title": "", "paragraphs": []}]}', "squad"),
        ('{\n "text": "a"\n}', "squad"),
        ("[]", "squad"),
        ("", "squad"),
    ],
)
@pytest.mark.parametrize("name", ["a.json", "A.JSON"])
def test_json_lines_and_lists_may_be_named_json(tmp_path, name, content, kind):
    path = write(tmp_path / name, content)
    assert tables.kind_of_file(path) == kind
    if kind == "table":
        assert labelled.read_table(path, OWN, label_required=True).items[0].label == "b"


def test_endings_in_upper_case_are_those_in_lower_case(tmp_path):
    for name, content in (("A.CSV", 'text,label\n"a,b",c\n'), ("A.JSONL", '{"text": "a,b", "label": "c"}\n')):
        (item,) = labelled.read_table(write(tmp_path / name, content), OWN, label_required=True).items
        assert (item.text, item.label) == ("a,b", "c")
    assert tables.kind_of_file(Path("A.CONLLU")) == "conllu" and form_of_file(Path("A.TXT")) == "text"


def test_tokens_of_white_space_are_words_in_predict_as_in_training():
    tokens = ["Ann", " ", "left", "\n", ""]
    assert record_words(Path("a.jsonl"), InputRecord(1, {"tokens": tokens})).words == tuple(tokens)
    found = record_words(Path("a.jsonl"), InputRecord(1, {"tokens": tokens[:4], "text": "Ann left\n"}))
    assert found.offsets == ((0, 3), (3, 4), (4, 8), (8, 9))
    with pytest.raises(UserError, match="line 3: token 1: expected a string, got None"):
        record_words(Path("a.jsonl"), InputRecord(3, {"tokens": ["a", None]}))


def test_a_conll_file_of_words_alone_is_unlabelled(tmp_path):
    path = write(tmp_path / "a.conll", "New\nYork\n")
    assert not labelled.read_conll(path, Columns(), label_required=False).labelled
    with pytest.raises(UserError, match="one column"):
        labelled.read_conll(path, Columns(), label_required=True)


TABLE, NAMED = labelled.read_table, OWN
TEXT_MISTAKES = {
    "empty file": (TABLE, NAMED, "", "has no examples"),
    "header only": (TABLE, NAMED, "text\tlabel\n", "no examples"),
    "no such column": (TABLE, NAMED, "review\tlabel\na\tb\n", "no column 'text'; its columns are: review, label"),
    "no label column": (TABLE, NAMED, "text\tstars\na\tb\n", "no column 'label'.*task.label"),
    "no label asked for": (TABLE, Columns("text"), "text\tstars\na\tb\n", "task.label is not set"),
    "no text asked for": (TABLE, Columns(), "text\tstars\na\tb\n", "task.text is not set"),
    "number too high": (TABLE, Columns("0", "", "2"), "a\tb\n", "no column '2'.*columns 0 to 1"),
    "number of another kind": (TABLE, Columns("0", "", "²"), "a\tb\n", "no column '²'; its columns are: a, b"),
    "two columns of one name": (TABLE, NAMED, "text\tlabel\tlabel\na\tb\tc\n", "has 2 columns named 'label'. Rename"),
    "ragged table": (TABLE, NAMED, "text\tlabel\na\tb\nc\n", "line 3 has 1 fields, but the first line has 2"),
    "not UTF-8": (TABLE, NAMED, b"text\tlabel\na\tb\n\xe9\tb\n", "line 3 is not UTF-8"),
    "ragged conllu": (labelled.read_conllu, Columns(), "# x\n1\tI\tPRON\n", "line 2 has 3 tab-separated fields"),
    "conllu column": (labelled.read_conllu, Columns(label="POS"), CONLLU, "no column 'POS'.*UPOS"),
    "empty conllu": (labelled.read_conllu, Columns(), "# text\n\n", "contains no words"),
    "ragged conll": (labelled.read_conll, Columns(), "a X O\nb O\n", "line 2 has 2 columns, but the first word has 3"),
    "conll column": (labelled.read_conll, Columns(label="tag"), "a X O\n", "no column 'tag'.*columns 0 to 2"),
    "empty conll": (labelled.read_conll, Columns(), "-DOCSTART- O\n", "contains no words"),
}


@pytest.mark.parametrize("mistake", TEXT_MISTAKES)
def test_an_invalid_file_is_refused_with_the_place(tmp_path, mistake):
    reader, columns, text, message = TEXT_MISTAKES[mistake]
    path = write(tmp_path / "file.txt", text)
    with pytest.raises(UserError, match=message) as caught:
        reader(path, columns, True)
    assert "file.txt" in str(caught.value) or mistake == "no label asked for" or "CoNLL-U" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", ["gz", "xz"])
def test_a_truncated_compressed_file_is_refused(tmp_path, ending):
    whole = COMPRESS[f".{ending}"]("".join(f"word {n}\t{n}\n" for n in range(9999)).encode())
    path = write(tmp_path / f"a.tsv.{ending}", whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cut short or damaged"):
        labelled.read_table(path, Columns("0", "", "1"), label_required=True)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        labelled.read_table(tmp_path / "none.tsv", NAMED, label_required=True)
    with pytest.raises(UserError, match="is a folder"):
        labelled.read_table(tmp_path, NAMED, label_required=True)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.tsv", "table"), ("a.tsv.xz", "table"), ("a.txt", "table"), ("a.conllu.gz", "conllu"), ("a.iob2", "conll")],
)
def test_the_ending_determines_the_kind(name, kind):
    assert tables.kind_of_file(Path("folder.conllu") / name) == kind


@pytest.mark.parametrize("listed", ["Sequence", "List"])  # as datasets 2 and 3, and as datasets 4 writes it
def test_numbers_of_tags_become_the_names_that_a_parquet_file_gives_them(tmp_path, listed):
    tags = {"feature": {"names": ["O", "B-X"], "_type": "ClassLabel"}, "_type": listed}
    table = pa.table({"tokens": [["a", "b"], ["c"]], "ner_tags": [[0, 1], [0]]})
    schema = {"huggingface": json.dumps({"info": {"features": {"ner_tags": tags}}})}
    pq.write_table(table.replace_schema_metadata(schema), tmp_path / "a.parquet")
    split = labelled.read_word_lists(tmp_path / "a.parquet", Columns(label="ner_tags"), True)
    assert [item.tags for item in split.items] == [("O", "B-X"), ("O",)] and split.class_names == ("O", "B-X")


def test_lists_of_prepared_data_are_those_of_json():
    example = {"tokens": [b"caf\xc3\xa9", b"b"], "tags": [np.int64(0), np.float32(0.5)], "more": {"text": [b"c"]}}
    assert tables.plain_value(example) == {"tokens": ["café", "b"], "tags": [0, 0.5], "more": {"text": ["c"]}}


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("tagging", "a\tN\nb\t\n", "line 2: a word has no tag"),
        ("spans", "a\tO\nb\t\n", "line 2: the tag does not mark an entity"),
        ("spans", "a\tDET\nb\tNOUN\n", "line 1: the tag does not mark an entity"),
    ],
)
def test_a_tag_that_is_none_is_a_mistake(tmp_path, kind, text, said):
    task, path = KINDS[kind]("own"), write(tmp_path / "a.conll", text)
    with pytest.raises(UserError, match=said):
        task.read(path, Columns(), True)


def test_a_file_without_any_tag_is_unlabelled(tmp_path):
    task, path = TaggingTask("own"), write(tmp_path / "a.conll", "a\t\n\nb\t\n")
    split = task.read(path, Columns(), False)
    assert not split.labelled and [item.words for item in split.items] == [("a",), ("b",)]
    with pytest.raises(UserError, match="line 1: a word has no tag"):
        task.read(path, Columns(), True)
    some = write(tmp_path / "some.conll", "a\tN\n\nb\t\n")  # whose tags predict does not read
    assert [item.words for item in task.read(some, Columns(), False).items] == [("a",), ("b",)]


@pytest.mark.parametrize("withheld", [None, []])
@pytest.mark.parametrize("kind", ["tagging", "token_regression"])
def test_lists_of_words_without_any_label_are_unlabelled(tmp_path, kind, withheld):
    pq.write_table(pa.table({"tokens": [["a", "b"], ["c"]], "labels": [withheld] * 2}), tmp_path / "a.parquet")
    rows = "".join(json.dumps({"tokens": words, "labels": withheld}) + "\n" for words in (["a", "b"], ["c"]))
    for path in (tmp_path / "a.parquet", write(tmp_path / "a.jsonl", rows)):
        split = KINDS[kind]("own").read(path, Columns(), False)
        assert not split.labelled and [item.words for item in split.items] == [("a", "b"), ("c",)]
        with pytest.raises(UserError, match=r"line 1: labels .*; expected a list of 2|line 1: labels has 0 labels"):
            KINDS[kind]("own").read(path, Columns(), True)


def test_a_list_of_labels_that_is_missing_among_others_is_a_mistake(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"tokens": ["a"], "labels": ["N"]}\n{"tokens": ["b"], "labels": null}\n')
    with pytest.raises(UserError, match="line 2: labels is None; expected a list of 1"):
        TaggingTask("own").read(path, Columns(), False)


SOURCE = Path("input.txt")
RECORD_TEXTS = ClassificationTask("own", ("a", "b"), columns=Columns("review", "", "stars"))
PAIRS = ClassificationTask("own", ("a", "b"), columns=Columns("question1", "question2", "same"))
UNKNOWN = ClassificationTask("own", ("a", "b"))  # as another's folder says it: without columns
TAGS = TaggingTask("own", ("O", "B-X", "I-X"))


def parse(task: Task, *contents: Any) -> Split[Any]:
    records = [InputRecord(line, content) for line, content in enumerate(contents, start=1)]
    return task.parse(SOURCE, records)


def texts(split: Split[Any]) -> list[tuple[str, str | None]]:
    assert not split.labelled
    return [(item.text, item.text_pair) for item in split.items]


def test_a_tab_parts_the_texts_of_a_pair():
    assert texts(parse(PAIRS, "one text\tanother", "b\tc")) == [("one text", "another"), ("b", "c")]
    assert texts(parse(RECORD_TEXTS, "one text")) == [("one text", None)]
    assert texts(parse(UNKNOWN, "a\tb")) == [("a", "b")]
    assert texts(parse(UNKNOWN, "a")) == [("a", None)]


def test_fields_have_the_columns_names_or_the_general_ones():
    assert texts(parse(RECORD_TEXTS, {"review": "good", "stars": 3, "text": "other"})) == [("good", None)]
    assert texts(parse(RECORD_TEXTS, {"text": "good"})) == [("good", None)]
    pairs = parse(PAIRS, {"question2": "b", "question1": "a"}, {"text": "c", "text_pair": "d"})
    assert texts(pairs) == [("a", "b"), ("c", "d")]
    assert texts(parse(UNKNOWN, {"text": "a", "text_pair": None})) == [("a", None)]


@pytest.mark.parametrize(
    ("task", "contents", "said"),
    [
        (RECORD_TEXTS, ["fine", "  "], "input.txt line 2 is empty"),
        (RECORD_TEXTS, ["a\tb"], "line 1 has 2 texts separated by tabs; expected 1: text"),
        (PAIRS, ["a"], "line 1 has 1 texts separated by tabs; expected 2: text, text_pair"),
        (UNKNOWN, ["a\tb", "c"], "line 2 is one text, but line 1 is a pair"),
        (RECORD_TEXTS, [{"sentence": "a"}], "line 1 has no field 'review' or 'text'; its fields are: 'sentence'"),
        (RECORD_TEXTS, [{"text": 7}], "line 1: expected a string, got 7"),
        (RECORD_TEXTS, [{"text": "a \ud800"}], "line 1 has half of a surrogate pair"),
        (TAGS, [""], "line 1 is empty"),
        (TAGS, [{"tokens": "a b"}], "tokens is 'a b'; expected a list of words"),
        (TAGS, [{"tokens": ["a", "c"], "text": "a b"}], "the token 'c' is not in the text after character 1"),
    ],
)
def test_invalid_records_are_refused_with_their_line(task, contents, said):
    with pytest.raises(UserError, match=r"^input.txt line") as error:
        parse(task, *contents)
    assert said in str(error.value)


def test_words_of_text_and_given_words_keep_their_places():
    (split,) = parse(TAGS, "Ann's (1,5) €").items
    assert split.words == ("Ann", "'", "s", "(", "1", ",", "5", ")", "€")
    assert [split.text[start:end] for start, end in split.offsets] == list(split.words)
    (given,) = parse(TAGS, {"tokens": ["do", "n't", "go"], "text": "do  don't go"}).items
    assert given.offsets == ((0, 2), (6, 9), (10, 12))
    (bare,) = parse(TAGS, {"tokens": ["a", "b-c"]}).items
    assert (bare.words, bare.text, bare.offsets) == (("a", "b-c"), None, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I \u2764\ufe0fNY", ["I", "\u2764\ufe0f", "NY"]),
        ("\U0001f468\u200d\U0001f469 \ufe0f", ["\U0001f468\u200d", "\U0001f469", "\ufe0f"]),
        ("cafe\u0301 =\u0338.", ["cafe\u0301", "=\u0338", "."]),
    ],
)
def test_what_combines_with_a_symbol_stays_with_it(text, words):
    assert [text[start:end] for start, end in split_words(text)] == words


def test_words_are_read_from_the_column_of_the_training_file():
    task = TaggingTask("own", ("O", "B-X"), columns=Columns("forms", "", "ner"))
    objects = [{"forms": ["a", "b"], "tokens": ["c"]}, {"tokens": ["c"]}, {"forms": "a b"}, {"text": "a b"}]
    assert [item.words for item in parse(task, *objects).items] == [("a", "b"), ("c",), ("a", "b"), ("a", "b")]
    called_text = TokenRegressionTask("own", columns=Columns("text", "", "labels"))
    (words, line) = parse(called_text, {"text": ["a", "b"]}, {"tokens": ["a", "b"], "text": "a b"}).items
    assert (words.words, words.offsets) == (("a", "b"), None) and line.offsets == ((0, 1), (2, 3))
    pairs = SpanPairTask("own", ("X",), relations_between="given", columns=Columns("forms", "", "entities"))
    (item,) = parse(pairs, {"forms": ["a", "b"], "entities": [{"start": 0, "end": 2, "label": "X"}]}).items
    assert item.words == ("a", "b") and item.spans == (Span("X", 0, 2),)


@given(st.text())
def test_splitting_keeps_all_but_white_space_and_marks_stand_alone(text):
    words = [text[start:end] for start, end in split_words(text)]
    assert "".join(words) == "".join(text.split())
    kinds = [[unicodedata.category(character)[0] for character in word] for word in words]
    for word, (first, *others) in zip(words, kinds, strict=True):
        assert not {"P", "S"} & set(others)
        joined = [kind == "M" or character == "\u200d" for character, kind in zip(word[1:], others, strict=True)]
        assert first not in "PS" or all(joined)
    for before, after in zip(split_words(text), split_words(text)[1:], strict=False):
        marks = any(unicodedata.category(text[place])[0] in "PS" for place in (before[0], after[0]))
        assert before[1] < after[0] or marks  # nothing else parts words


def test_a_column_that_occurs_twice_is_refused(tmp_path):
    columns = Columns("text", label="label")
    table = pa.table([["a"], ["b"], ["c"]], names=["text", "label", "label"])
    pq.write_table(table, tmp_path / "a.parquet")
    write(tmp_path / "a.csv", "text,label,label\na,b,c\n")
    for name in ("a.parquet", "a.csv"):
        with pytest.raises(UserError, match=rf"{name} has 2 columns named 'label'"):
            labelled.read_table(tmp_path / name, columns, label_required=True)
    path = write(tmp_path / "a.jsonl", '{"text": "a", "label": "b"}\n{"text": "a", "label": "b", "label": "c"}\n')
    with pytest.raises(UserError, match="line 2 has the key 'label' twice"):
        labelled.read_table(path, columns, label_required=True)
    with pytest.raises(UserError, match="the data has 2 columns named 'label'"):
        data_file(table, tmp_path / "b.jsonl", ClassificationConfig(text="text", label="label"))


def test_a_transform_of_a_data_set_is_applied(tmp_path):
    class Dataset(list):  # as datasets.Dataset; to_parquet writes rows without the transform
        def to_parquet(self, path):
            pq.write_table(pa.table({"text": ["raw"]}), path)

    rows = Dataset([{"text": "made", "label": 1}, {"text": "so", "label": 0}])
    rows.features = {"text": object(), "label": SimpleNamespace(names=("bad", "good"))}
    config = ClassificationConfig(text="text", label="label")
    rows.format = {"type": "numpy"}
    assert data_file(rows, tmp_path / "a.jsonl", config).endswith(".parquet")
    rows.format = {"type": "custom"}
    path = Path(data_file(rows, tmp_path / "a.jsonl", config))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"text": "made", "label": "good"},
        {"text": "so", "label": "bad"},
    ]
