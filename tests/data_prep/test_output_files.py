"""Shards in each format, SHA256SUMS, and copies of outputs that verify them."""

import hashlib
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from pyarrow import fs

from bert_jax.commands import copy_examples
from bert_jax.commands.copy_examples import copy
from bert_jax.data.example import Rows
from bert_jax.data.manifest import ShardTable
from bert_jax.data.shard_file import Corrupt
from bert_jax.data.shards import open_dataset
from bert_jax.errors import RunAgain, UserError
from bert_jax.storage import remote
from data_prep import output_files
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.inspection import verify
from tests.helpers import shard_tables

BUILDS: dict[str, dict[str, Any]] = {
    "static": {"masking": "static", "mask_unit": "word"},
    "dynamic": {},
    "sentences": {"masking": "static", "objective": "full_sentences", "dupe_factor": 2},
    "packed": {"masking": "static", "pack": 4},
}

OUTPUTS = [f"{name}_tfds" for name in BUILDS]


@pytest.fixture(scope="session")
def outputs(sample_text: Path, vocab_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an output for each build and each of its formats, such as static_tfds."""
    folder = tmp_path_factory.mktemp("formats")
    for name, options in BUILDS.items():
        for format in output_files.FORMATS:
            given = options | {"format": format, "eval_fraction": 0.3, "unit_mb": 0.03, "workers": 1}
            build(BuildOptions(str(sample_text), vocab_dir, folder / f"{name}_{format}", 64, **given))
    return folder


def all_rows(directory: Path, part: Any) -> Rows:
    dataset = open_dataset(directory, part, output_files.reader)
    return dataset.gather(np.arange(dataset.rows))


def assert_same(got: Rows, wanted: Rows) -> None:
    for name, values in wanted._asdict().items():
        np.testing.assert_array_equal(getattr(got, name), values, err_msg=name)
        assert values is None or getattr(got, name).dtype == values.dtype, name


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("part", ["train", "eval"])
def test_tfds_reads_back_as_the_rows_of_arrow(outputs: Path, output: str, part: str) -> None:
    arrow = outputs / f"{output.split('_')[0]}_arrow"
    assert_same(all_rows(outputs / output, part), all_rows(arrow, part))


@pytest.mark.parametrize("output", OUTPUTS)
def test_tfds_verifies(outputs: Path, output: str) -> None:
    manifest = verify(outputs / output).manifest
    assert manifest["format"] == "tfds" and manifest["shards"]["count"] >= 2


@pytest.mark.parametrize("name", list(BUILDS))
def test_tfds_reads_the_columns_without_tensorflow(outputs: Path, name: str) -> None:
    """The reader is TFDS itself; the values are those of the Arrow twin."""
    source = tfds.builder_from_directory(outputs / f"{name}_tfds").as_data_source()
    assert set(source) == {"train", "eval"}
    for part, examples in source.items():
        rows = all_rows(outputs / f"{name}_arrow", part)
        assert len(examples) == len(rows.input_ids)
        picked = np.random.default_rng(0).permutation(len(examples))[:40].tolist()
        for place, example in zip(picked, examples.__getitems__(picked), strict=True):
            for column, values in rows._asdict().items():
                assert (column in example) is (values is not None)
                if values is not None:
                    np.testing.assert_array_equal(example[column], values[place], err_msg=column)
                    assert example[column].dtype == values.dtype
    assert "tensorflow" not in sys.modules


def test_tfds_splits_can_be_cut(outputs: Path) -> None:
    builder = tfds.builder_from_directory(outputs / "static_tfds")
    held = builder.info.splits["train"]
    assert len(builder.as_data_source("train[:50%]")) == pytest.approx(held.num_examples / 2, abs=1)
    assert held.num_shards == len(list((outputs / "static_tfds" / "train").iterdir()))


def test_workers_and_a_failure_at_the_end_give_the_same_bytes(
    outputs: Path, sample_text: Path, vocab_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of two processes is killed after its folder is ready and before its manifest exists, and resumes."""
    options: dict[str, Any] = BUILDS["static"] | {"format": "tfds", "eval_fraction": 0.3, "unit_mb": 0.03, "workers": 2}
    finish = output_files.finish

    def dying(directory: Path, manifest: dict[str, Any], shards: ShardTable) -> None:
        finish(directory, manifest, shards)
        raise OSError("the machine is gone")

    with monkeypatch.context() as patched:
        patched.setattr(output_files, "finish", dying)
        with pytest.raises(OSError, match="gone"):
            build(BuildOptions(str(sample_text), vocab_dir, tmp_path / "out", 64, **options))
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.incomplete" / "manifest.json").exists()
    build(BuildOptions(str(sample_text), vocab_dir, tmp_path / "out", 64, **options))
    sums = [(folder / "SHA256SUMS").read_text() for folder in (outputs / "static_tfds", tmp_path / "out")]
    assert sums[0] == sums[1]


def test_units_without_rows_leave_no_gap_in_a_tfds_folder(outputs: Path, tmp_path: Path) -> None:
    """TFDS counts shards from 0. Neither missing numbers nor files that a killed run renamed may remain."""
    rows = all_rows(outputs / "static_arrow", "train")
    manifest = json.loads((outputs / "static_tfds" / "manifest.json").read_text())
    (tmp_path / "train").mkdir()
    shards = [output_files.write("tfds", tmp_path, f"train/shard-{number:05d}", rows) for number in (2, 5)]
    (tmp_path / "train" / "shard-00000.array_record").write_bytes(b"of a run before")
    table = output_files.finish(tmp_path, manifest, ShardTable.of_entries(shards))
    assert table.names.tolist() == [f"train/shard-0000{n}.array_record" for n in (0, 1)]
    source = tfds.builder_from_directory(tmp_path).as_data_source("train")
    assert len(source) == 2 * len(rows.input_ids)


def test_failed_write_leaves_nothing_and_names_the_file(outputs: Path, tmp_path: Path) -> None:
    rows = all_rows(outputs / "static_arrow", "train")
    (tmp_path / "train").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError) as caught:
            output_files.write("tfds", tmp_path, "train/shard", rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value.filename).startswith(str(tmp_path / "train" / "shard"))
    assert not list((tmp_path / "train").iterdir())


def test_damaged_shard_or_one_of_another_layout_is_refused(outputs: Path, tmp_path: Path) -> None:
    manifest = json.loads((outputs / "static_tfds" / "manifest.json").read_text())
    whole = outputs / "static_tfds" / shard_tables.entries(outputs / "static_tfds")[0]["name"]
    path, content, read = tmp_path / whole.name, whole.read_bytes(), output_files.reader(manifest)
    for damaged in (content[: len(content) // 2], b"\0" * len(content), b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(Corrupt):
            read(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read(path)
    for change in ({"seq_len": 128}, {"pack": 2}, {"masking": manifest["masking"] | {"max_predictions": 9}}):
        with pytest.raises(Corrupt, match="a record whose features have the sizes"):
            output_files.reader(manifest | change)(whole)
    with pytest.raises(UserError, match="unknown shard format 'later'; expected one of arrow, tfds"):
        output_files.reader(manifest | {"format": "later"})
    with pytest.raises(UserError, match=r"has tfds shards, but training reads Arrow .* without --format"):
        open_dataset(outputs / "static_tfds", "train")


def test_ids_over_16_bits_are_stored_as_tensorflow_can_read_them(outputs: Path, tmp_path: Path) -> None:
    """tf.io.decode_raw does not support uint32."""
    manifest = json.loads((outputs / "static_tfds" / "manifest.json").read_text())
    manifest["tokenizer"]["vocab_size"] = 100_000
    rows = all_rows(outputs / "static_arrow", "train")
    rows = rows._replace(
        input_ids=rows.input_ids.astype(np.uint32) + 90_000, masked_ids=rows.masked_ids.astype(np.uint32) + 90_000
    )
    (tmp_path / "train").mkdir()
    shard = output_files.write("tfds", tmp_path, "train/shard-00000", rows)
    [name] = output_files.finish(tmp_path, manifest, ShardTable.of_entries([shard])).names
    example = tfds.builder_from_directory(tmp_path).as_data_source("train")[3]
    assert example["input_ids"].dtype == np.int32
    np.testing.assert_array_equal(example["input_ids"], rows.input_ids[3])
    assert_same(output_files.reader(manifest)(tmp_path / name), rows)


TENSORFLOW = """
import sys
from pathlib import Path
import numpy as np
import tensorflow_datasets as tfds

folder, wanted = Path(sys.argv[1]), np.load(sys.argv[2])
raw = tfds.decode.DeserializeMethod.RAW_BYTES
builder = tfds.builder_from_directory(folder / "static_tfds")
example = builder.info.features.deserialize_example(builder.as_data_source("train", deserialize_method=raw)[0])
for name, value in example.items():
    np.testing.assert_array_equal(value.numpy(), wanted[name], err_msg=name)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflow_decodes_a_record_of_tfds(outputs: Path, tmp_path: Path) -> None:
    """Runs in another process, because TensorFlow and jax in one process warn about each other."""
    rows = all_rows(outputs / "static_arrow", "train")
    np.savez(tmp_path / "wanted.npz", **{name: values[0] for name, values in rows._asdict().items()})
    subprocess.run([sys.executable, "-c", TENSORFLOW, str(outputs), str(tmp_path / "wanted.npz")], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_arrow_shards_open_in_data_frame_libraries(outputs: Path, library: str) -> None:
    """As described in docs/data_format.md."""
    frames = pytest.importorskip(library, reason=f"{library} is not installed")
    path = outputs / "static_arrow" / "train" / "shard-00000.arrow"
    frame = frames.read_feather(path) if library == "pandas" else frames.read_ipc(path)
    rows = all_rows(outputs / "static_arrow", "train")
    for name, values in rows._asdict().items():
        got = np.stack(frame[name].to_numpy())
        np.testing.assert_array_equal(got, values[: len(got)], err_msg=name)
        assert len(got) > 0


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of all buckets: s3://bucket/name is bucket/name in it."""
    folder = tmp_path / "store"
    folder.mkdir()
    pretended = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
    monkeypatch.setattr(remote, "open_store", lambda address: (pretended, address[5:]))
    return folder


def test_output_is_copied_to_a_store_and_back(shards_dir: Path, store: Path, tmp_path: Path) -> None:
    copy_examples.main([f"--input={shards_dir}", "--output=s3://bucket/books"])
    assert files(store / "bucket" / "books") == files(shards_dir)
    copy_examples.main(["--input=s3://bucket/books/", f"--output={tmp_path / 'back'}"])
    assert files(tmp_path / "back") == files(shards_dir)
    verify(tmp_path / "back")
    assert open_dataset(tmp_path / "back", "train").fingerprint == open_dataset(shards_dir, "train").fingerprint


def test_a_stopped_copy_has_no_manifest_and_starts_again(
    shards_dir: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its files."""
    write = remote.Folder.write
    for name in [*output_files.read_sums(shards_dir), output_files.SUMS]:
        address = f"gs://bucket/{hashlib.sha256(name.encode()).hexdigest()}"

        def stopped(folder, written, content, last=name):
            if written == last:
                raise KeyboardInterrupt
            write(folder, written, content)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(remote.Folder, "write", stopped)
            copy(str(shards_dir), address)
        assert not (store / address[5:] / "manifest.json").exists()
        with pytest.raises(UserError, match="does not exist"):
            copy(address, str(tmp_path / "back"))
        copy(str(shards_dir), address)
        assert files(store / address[5:]) == files(shards_dir)


@pytest.mark.parametrize("place", ["local", "store"])
def test_a_copy_resumes_with_the_files_that_are_not_intact(
    shards_dir: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, place: str
) -> None:
    """It lists both folders once, and asks for no size of a file that it does not copy."""
    left, output = (tmp_path / "out.incomplete", str(tmp_path / "out"))
    if place == "store":
        left, output = store / "bucket" / "out", "s3://bucket/out"
    write, sizes = remote.Folder.write, remote.Folder.sizes
    written, listings = [], []

    def stopped(folder, name, content):
        if name == output_files.SUMS:
            raise KeyboardInterrupt
        write(folder, name, content)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(remote.Folder, "write", stopped)
        copy(str(shards_dir), output)
    truncated, changed, *_ = sorted(name for name in output_files.read_sums(shards_dir) if name != "manifest.json")
    os.truncate(left / truncated, 3)
    content = bytearray((left / changed).read_bytes())
    content[0] ^= 1
    (left / changed).write_bytes(content)
    if place == "local":
        (left / "train" / "of-another-input").write_text("x")
    monkeypatch.setattr(remote.Folder, "write", lambda *call: written.append(call[1]) or write(*call))
    monkeypatch.setattr(remote.Folder, "sizes", lambda *call: listings.append(call) or sizes(*call))
    copy(str(shards_dir), output, quiet=False)
    assert sorted(written) == sorted([truncated, changed, output_files.SUMS, "manifest.json"]) and len(listings) == 2
    assert (
        f"{len(files(shards_dir)) - 4} of {len(files(shards_dir))} files were there already" in capsys.readouterr().err
    )
    assert files(tmp_path / "out" if place == "local" else left) == files(shards_dir)


@pytest.mark.parametrize("place", ["local", "store"])
def test_damage_while_copying_is_named_and_gives_no_output(
    shards_dir: Path, store: Path, tmp_path: Path, place: str
) -> None:
    source = tmp_path / "in" if place == "local" else store / "bucket" / "in"
    shutil.copytree(shards_dir, source)
    shard = source / "train" / "shard-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    input, output = (str(source), "s3://bucket/out") if place == "local" else ("s3://bucket/in", str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"damaged .*in/train/shard-00000\.arrow: its sha256 is \w+\.\.\., expected"):
        copy(input, output)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.incomplete" / "manifest.json").exists()
    assert not (tmp_path / "out.incomplete" / "train" / "shard-00000.arrow").exists()
    assert not (store / "bucket" / "out" / "manifest.json").exists()


def test_list_that_leads_out_of_the_folder_is_refused(shards_dir: Path, store: Path, tmp_path: Path) -> None:
    """The list may come from someone else; a copy must write only into the output."""
    shutil.copytree(shards_dir, store / "bucket" / "in")
    for name in ("../outside", "/outside", "train/../../outside"):
        with (store / "bucket" / "in" / output_files.SUMS).open("a") as file:
            file.write(f"{'0' * 64}  {name}\n")
        with pytest.raises(UserError, match="is outside of the folder"):
            copy("s3://bucket/in", str(tmp_path / "out"))
        shutil.copy(shards_dir / output_files.SUMS, store / "bucket" / "in")


def test_errors_are_one_line(shards_dir: Path, store: Path, tmp_path: Path) -> None:
    copy(str(shards_dir), "s3://bucket/there")
    (store / "bucket" / "mixed").mkdir()
    (store / "bucket" / "mixed" / "notes.txt").write_text("of somebody else")
    for input, output, message in [
        (str(shards_dir), "s3://bucket/there", "output s3://bucket/there exists"),
        (str(shards_dir), "s3://bucket/mixed", r"holds notes\.txt, which is not part of the output"),
        (str(shards_dir), str(tmp_path), "exists"),
        (str(tmp_path), "s3://bucket/new", "SHA256SUMS does not exist. Check the address"),
        ("s3://bucket/nowhere", str(tmp_path / "out"), "SHA256SUMS does not exist"),
        (str(shards_dir), str(shards_dir / "copy"), r"is inside .*Choose an --output outside of it"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            copy(input, output)
        assert "\n" not in str(caught.value)


def test_a_store_is_refused_as_training_rows_and_an_address_needs_a_bucket(shards_dir: Path) -> None:
    with pytest.raises(UserError, match="gs:// names no bucket"):
        copy(str(shards_dir), "gs://")
    with pytest.raises(UserError, match=r"^s3://bucket/books is in an object .* bert-jax copy-examples"):
        open_dataset("s3://bucket/books/train", "train")
    assert not Path("gs:").exists()


def test_error_of_a_store_is_one_line(shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow's own S3 client, at an address where nothing listens."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setattr(
        remote,
        "open_store",
        lambda address: (
            fs.S3FileSystem(
                endpoint_override="127.0.0.1:9",
                scheme="http",
                connect_timeout=0.2,
                request_timeout=0.2,
                retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
            ),
            address[5:],
        ),
    )
    with pytest.raises(
        RunAgain, match=r"^s3://bucket/books.*Check the address, the network and the credentials"
    ) as caught:
        copy(str(shards_dir), "s3://bucket/books")
    assert "\n" not in str(caught.value)
