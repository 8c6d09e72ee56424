import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from building import ROOT

from bert_jax import tokenizer as tokenizers
from bert_jax.command import EXIT_USER_ERROR, UserError
from bert_jax.data.loader import PretrainingLoader
from bert_jax.data.shards import open_dataset
from data_prep import convert_examples, inspect_shards
from data_prep.build_examples import build
from data_prep.build_options import BuildOptions
from data_prep.convert_examples import convert
from data_prep.formats import tfrecord
from data_prep.inspection.verification import verify

ORIGINAL = Path(__file__).parent / "testdata" / "original_bert"


@pytest.fixture(scope="module")
def outputs(sample_text: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same static rows in each format."""
    folder = tmp_path_factory.mktemp("converted")
    for format in ("arrow", "tfds", "tfrecord"):
        keywords = {"masking": "static", "mask_unit": "word", "format": format, "unit_mb": 0.03, "workers": 1}
        build(BuildOptions(str(sample_text), vocab_dir, folder / format, 64, eval_fraction=0.3, **keywords))
    return {path.name: path for path in folder.iterdir()}


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("source", ["arrow", "tfds", "tfrecord"])
@pytest.mark.parametrize("target", ["arrow", "tfds", "tfrecord"])
def test_conversion_gives_the_folder_that_building_gives(
    outputs: dict[str, Path], source: str, target: str, tmp_path: Path
) -> None:
    """Every file is equal, including the manifest and hashes, so training on either is the same."""
    convert(outputs[source], tmp_path / "out", format=target)
    assert files(tmp_path / "out") == files(outputs[target])


def test_training_on_an_import_gives_the_batches_of_the_arrow_twin(outputs: dict[str, Path], tmp_path: Path) -> None:
    convert_examples.main([f"--input={outputs['tfrecord']}", f"--output={tmp_path / 'out'}"])
    loaders = []
    for directory in (outputs["arrow"], tmp_path / "out"):
        dataset = open_dataset(directory, "train")
        loaders.append(PretrainingLoader(dataset, dataset.vocabulary(), batch_size=16, seed=3))
    assert loaders[0].fingerprint == loaders[1].fingerprint
    for step in (0, 1, 50):
        for one, other in zip(*(loader.batch(step) for loader in loaders), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: os.truncate(folder / "unigram_counts.npy", 60), r"damaged .*unigram_counts\.npy: its sha256"),
        (lambda folder: os.truncate(folder / "SHA256SUMS", 0), r"damaged .*SHA256SUMS: line 1"),
        (lambda folder: (folder / "SHA256SUMS").unlink(), r"(missing .*SHA256SUMS|SHA256SUMS is missing)"),
        (lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(), r"tokenizer\.json does not exist"),
        (lambda folder: append(folder / "manifest.json"), r"damaged .*manifest\.json: its sha256"),
        (lambda folder: append(folder / "tokenizer" / "vocab.txt"), r"damaged .*vocab\.txt: its sha256"),
        (lambda folder: without(folder / "SHA256SUMS", "unigram"), r"SHA256SUMS: it does not list unigram_counts\.npy"),
        (lambda folder: without(folder / "SHA256SUMS", "shard-00000"), r"SHA256SUMS: it does not list .*shard-00000"),
    ],
)
def test_damaged_input_is_refused_and_gives_no_output(
    outputs: dict[str, Path], tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    """New hashes over damaged files would hide the damage for good. Copying refuses what is not whole as well."""
    shutil.copytree(outputs["arrow"], tmp_path / "in")
    damage(tmp_path / "in")
    with pytest.raises(UserError, match=message) as caught:
        convert(tmp_path / "in", tmp_path / "out", format="tfds")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def without(path: Path, word: str) -> None:
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if word not in line))


def test_full_disk_names_the_output(outputs: dict[str, Path], tmp_path: Path) -> None:
    """Uses a real error of the operating system: a file exceeds the maximum size."""
    for blocks in (1, 64):
        limited = ["bash", "-c", f'ulimit -f {blocks}; exec "$@"', "bash", sys.executable]
        flags = [f"--input={outputs['arrow']}", f"--output={tmp_path / 'out'}", "--format=tfds"]
        command = [*limited, "-m", "bert_jax", "convert-examples", *flags]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == EXIT_USER_ERROR and len(ended.stderr.strip().splitlines()) == 1, ended.stderr
        assert f"{tmp_path / 'out'}.incomplete/" in ended.stderr and not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of google-research/bert's own script, as shards; the same file, gzipped, is held out."""
    folder = tmp_path_factory.mktemp("imported")
    shutil.copy(ORIGINAL / "rows.tfrecord", folder / "a.tfrecord")
    shutil.copy(ORIGINAL / "rows.tfrecord", folder / "b.tfrecord")
    (folder / "c.tfrecord.gz").write_bytes(gzip.compress((ORIGINAL / "rows.tfrecord").read_bytes()))
    convert_examples.main(
        [
            f"--input={folder}/*.tfrecord",
            f"--eval_input={folder}/c.tfrecord.gz",
            f"--tokenizer={ORIGINAL / 'vocab.txt'}",
            f"--output={folder / 'out'}",
        ]
    )
    return folder / "out"


def test_import_verifies_and_is_shown(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = verify(imported).manifest
    assert (manifest["objective"], manifest["seq_len"], manifest["masking"]["max_predictions"]) == ("nsp", 48, 8)
    assert [manifest["parts"][part]["rows"] for part in ("train", "eval")] == [86, 43]
    inspect_shards.main([str(imported), "--show=1"])
    assert "[MASK]" in capsys.readouterr().out
    inspect_shards.main([str(imported)])
    assert "by another program: 14.6% of the positions" in " ".join(capsys.readouterr().out.split())


def test_imported_rows_are_the_fields_that_tensorflow_reads(imported: Path) -> None:
    for part, copies in (("train", 2), ("eval", 1)):
        dataset = open_dataset(imported, part)
        examples = tfrecord.to_examples(dataset.gather(np.arange(dataset.rows)))
        with np.load(ORIGINAL / "fields.npz") as wanted:
            for name, values in examples._asdict().items():
                np.testing.assert_array_equal(values, np.concatenate([wanted[name]] * copies), err_msg=name)


def test_imported_batches_are_the_fields_that_tensorflow_reads(imported: Path) -> None:
    """What the model gets in evaluation, which keeps the order of the rows."""
    dataset = open_dataset(imported, "eval")
    (batch,) = PretrainingLoader(dataset, dataset.vocabulary(), batch_size=43, seed=0).evaluation_batches(43)
    names = {
        "input_ids": "input_ids",
        "segment_ids": "segment_ids",
        "sequence_ids": "input_mask",
        "masked_weights": "masked_lm_weights",
        "next_sentence_label": "next_sentence_labels",
    }
    with np.load(ORIGINAL / "fields.npz") as wanted:
        for field, name in names.items():
            np.testing.assert_array_equal(getattr(batch, field), wanted[name], err_msg=field)
        real = wanted["masked_lm_weights"] == 1
        for field, name in (("masked_positions", "masked_lm_positions"), ("masked_ids", "masked_lm_ids")):
            np.testing.assert_array_equal(getattr(batch, field)[real], wanted[name][real], err_msg=field)
    assert batch.next_sentence_weight.all()


def test_objective_of_an_import_can_be_set(tmp_path: Path) -> None:
    """google-research/albert's script writes the same fields with labels of sentence order."""
    manifest = convert(ORIGINAL / "rows.tfrecord", tmp_path / "out", tokenizer=ORIGINAL / "vocab.txt", objective="sop")
    assert manifest["objective"] == "sop"
    verify(tmp_path / "out")


def test_sequence_keys_of_an_import_number_the_file_and_the_row(imported: Path) -> None:
    train, held_out = (open_dataset(imported, part) for part in ("train", "eval"))
    keys = train.gather(np.arange(86)).sequence_keys[:, 0].tolist()
    assert keys == [unit << 32 | ordinal for unit in (0, 1) for ordinal in range(43)]
    assert (held_out.gather(np.arange(43)).sequence_keys[:, 0] >> np.uint64(32) == 1 << 31).all()


@pytest.mark.parametrize("format", ["tfds", "tfrecord"])
def test_import_writes_any_format(imported: Path, format: str, tmp_path: Path) -> None:
    source = f"{imported.parent}/*.tfrecord"
    keywords = {"tokenizer": ORIGINAL / "vocab.txt", "eval_input": str(imported.parent / "c.tfrecord.gz")}
    convert(source, tmp_path / "direct", format=format, **keywords)
    convert(imported, tmp_path / "later", format=format)
    assert files(tmp_path / "direct") == files(tmp_path / "later")
    verify(tmp_path / "direct")


@pytest.fixture
def other_vocabulary(tmp_path: Path) -> Path:
    """The same tokens in another order: other ids."""
    tokens = (ORIGINAL / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
    (tmp_path / "vocab.txt").write_text("\n".join(reversed(tokens)) + "\n", encoding="utf-8")
    return tmp_path / "vocab.txt"


def test_wrong_tokenizer_is_refused(other_vocabulary: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows\.tfrecord: example 0 has a sequence that does not begin with \[CLS\]"):
        convert(ORIGINAL / "rows.tfrecord", tmp_path / "out", tokenizer=other_vocabulary)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vocab.txt"]


def test_tokenizer_that_is_too_small_is_refused(tmp_path: Path) -> None:
    tokens = (ORIGINAL / "vocab.txt").read_text(encoding="utf-8").split("\n")
    (tmp_path / "vocab.txt").write_text("\n".join(tokens[:300]) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="an id outside of the vocabulary"):
        convert(ORIGINAL / "rows.tfrecord", tmp_path / "out", tokenizer=tmp_path / "vocab.txt")


def test_files_of_different_widths_are_refused(outputs: dict[str, Path], vocab_dir: Path, tmp_path: Path) -> None:
    shutil.copy(outputs["tfrecord"] / "train" / "shard-00000.tfrecord", tmp_path / "a.tfrecord")
    shutil.copy(ORIGINAL / "rows.tfrecord", tmp_path / "b.tfrecord")
    with pytest.raises(UserError, match=r"b\.tfrecord: examples of 48 tokens and 8 predictions, expected 64"):
        convert(f"{tmp_path}/*.tfrecord", tmp_path / "out", tokenizer=vocab_dir)


def test_damaged_file_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "rows.tfrecord").write_bytes((ORIGINAL / "rows.tfrecord").read_bytes()[:-20])
    with pytest.raises(UserError, match=r"rows\.tfrecord: the file ends within a record"):
        convert(tmp_path / "rows.tfrecord", tmp_path / "out", tokenizer=ORIGINAL / "vocab.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.tfrecord"]


def test_damaged_arrow_shard_is_named(outputs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(outputs["tfds"], tmp_path / "in")
    path = tmp_path / "in" / "train" / "shard-00000.array_record"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged shard .*shard-00000\.array_record: its sha256"):
        convert(tmp_path / "in", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_file_in_both_parts_is_refused_whatever_it_is_called(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ORIGINAL / "rows.tfrecord", "a.tfrecord")
    Path("link.tfrecord").symlink_to("a.tfrecord")
    for other in (str(tmp_path / "a.tfrecord"), "link.tfrecord"):
        with pytest.raises(UserError, match="is in --input and in --eval_input"):
            convert("a.tfrecord", tmp_path / "out", tokenizer=ORIGINAL / "vocab.txt", eval_input=other)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "nowhere/*.tfrecord"}, "matches no file"),
        ({"tokenizer": None}, "give the --tokenizer that made them"),
        ({"objective": "mlm"}, "unknown --objective mlm; choose from nsp, sop"),
        ({"objective": "single"}, r"example 0 has segment lengths that do not fit; the objective is single; use --obj"),
        ({"format": "parquet"}, "choose from arrow, tfds, tfrecord"),
        ({"input": str(ORIGINAL), "tokenizer": None}, r"Name the files, for example .*\*\.tfrecord"),
        ({"eval_input": str(ORIGINAL / "rows.tfrecord")}, "is in --input and in --eval_input"),
        ({"eval_input": "nowhere/*.tfrecord"}, r"^--eval_input 'nowhere/\*\.tfrecord' matches no file"),
        ({"eval_input": str(ORIGINAL)}, r"got a folder\. Name its files, for example '.*/\*\.txt'$"),
        ({"input": str(ORIGINAL / "vocab.txt")}, r"vocab\.txt: a record of \d+ bytes: not a TFRecord file"),
    ],
)
def test_error_is_one_line(change: dict, message: str, tmp_path: Path) -> None:
    keywords = {"input": ORIGINAL / "rows.tfrecord", "tokenizer": ORIGINAL / "vocab.txt"} | change
    with pytest.raises(UserError, match=message) as caught:
        convert(output=tmp_path / "out", **keywords)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("input", ["train", "train/", "eval/*.tfrecord", "train/shard-00000.tfrecord"])
def test_a_part_of_an_output_is_refused_with_the_whole(outputs: dict[str, Path], tmp_path: Path, input: str) -> None:
    with pytest.raises(UserError, match=rf"is a part of .*; give --input {re.escape(str(outputs['tfrecord']))}$"):
        convert(f"{outputs['tfrecord']}/{input}", tmp_path / "out", tokenizer=ORIGINAL / "vocab.txt")


@pytest.mark.parametrize("content", ['{"files": ["train/a.tfrecord"]}', "no JSON"])
def test_files_below_the_manifest_of_another_program_are_imported(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    (tmp_path / "train").mkdir()
    shutil.copy(ORIGINAL / "rows.tfrecord", tmp_path / "train" / "a.tfrecord")
    given = {"tokenizer": ORIGINAL / "vocab.txt"}
    found = convert(tmp_path / "train" / "*.tfrecord", tmp_path / "out", **given)
    assert found["counts"] == convert(ORIGINAL / "rows.tfrecord", tmp_path / "same", **given)["counts"]


def test_dynamic_rows_cannot_be_converted_to_tfrecord(shards_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use --masking static"):
        convert(shards_dir, tmp_path / "out", format="tfrecord")
    with pytest.raises(UserError, match=r"--tokenizer, .* are only for TFRecord files; leave them out"):
        convert(shards_dir, tmp_path / "out", tokenizer=shards_dir / "tokenizer")
    with pytest.raises(UserError, match=r"--lowercase, .* are only for TFRecord files; leave them out"):
        convert(shards_dir, tmp_path / "out", lowercase=True)


def test_output_inside_of_the_input_is_refused(shards_dir: Path) -> None:
    """Files that the list of hashes does not contain would count as damage there."""
    with pytest.raises(UserError, match=r"output .*/new is inside .*/shards\. Choose an --output outside of it"):
        convert(shards_dir, shards_dir / "new", format="tfds")
    verify(shards_dir)


@pytest.mark.parametrize("labels", [{}, {"next_sentence_labels": np.zeros((2, 1), int)}])
def test_rows_of_one_segment_are_imported_without_labels(tmp_path: Path, labels: dict) -> None:
    """A script for RoBERTa may keep the layout with one segment, without next_sentence_labels or with zeros."""
    from tensorflow_datasets.proto import tf_example_pb2

    tokenizer = tokenizers.load(ORIGINAL / "vocab.txt")
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    width = 12
    ids = np.array([[cls, 20, 21, 22, sep] + [0] * 7, [cls, *range(30, 40), sep]])
    fields = {
        "input_ids": ids,
        "input_mask": (ids > 0).astype(int),
        "segment_ids": np.zeros_like(ids),
        "masked_lm_positions": np.array([[1], [2]]),
        "masked_lm_ids": np.array([[20], [31]]),
        **labels,
    }
    records = []
    for row in range(2):
        example = tf_example_pb2.Example()
        for name, values in fields.items():
            example.features.feature[name].int64_list.value.extend(values[row].tolist())
        example.features.feature["masked_lm_weights"].float_list.value.append(1.0)
        records.append(example.SerializeToString())
    (tmp_path / "rows.tfrecord").write_bytes(b"".join(tfrecord.frames(records)))
    known = {"tokenizer": ORIGINAL / "vocab.txt"}
    if labels:
        with pytest.raises(UserError, match="the objective is nsp; use --objective if it is another"):
            convert(tmp_path / "rows.tfrecord", tmp_path / "out", **known)
        known["objective"] = "full_sentences"
    manifest = convert(tmp_path / "rows.tfrecord", tmp_path / "out", **known)
    assert manifest["objective"] == "full_sentences" and manifest["seq_len"] == width
    assert verify(tmp_path / "out").statistics["train"].labels == {0: 0, 1: 0, -1: 2}
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
