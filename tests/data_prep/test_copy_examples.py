import hashlib
import shutil
from pathlib import Path

import pytest
from pyarrow import fs

from bert_jax.commands import copy_examples
from bert_jax.commands.copy_examples import copy
from bert_jax.data.shards import open_dataset
from bert_jax.errors import RunAgain, UserError
from bert_jax.storage import remote
from data_prep import output_files
from data_prep.build import build
from data_prep.build_options import BuildOptions
from data_prep.inspection import verify


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
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.incomplete").exists()
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


def test_an_address_without_a_bucket_is_refused(shards_dir: Path) -> None:
    with pytest.raises(UserError, match="gs:// names no bucket"):
        copy(str(shards_dir), "gs://")


def test_other_commands_name_the_copy(sample_text: Path, vocab_dir: Path) -> None:
    with pytest.raises(UserError, match="Choose a local folder, and copy it when it is complete"):
        build(BuildOptions(str(sample_text), vocab_dir, "gs://bucket/books", 64))
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
