"""Addresses in object stores, and TFDS datasets: listed and read like local files."""

import errno
import glob
import importlib.util
import json
import lzma
import os
import random
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import fs
from streamed_outputs import check_streaming

from bert_jax.errors import RunAgain, Stopped, UserError
from bert_jax.storage import remote
from bert_jax.storage.remote import Folder, as_address, failure
from data_prep.readers.corpus import Corpus, Reading, find_sources

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from moto and TFDS


def test_globs_of_stores_are_those_of_folders(tmp_path, monkeypatch):
    """Compares with Python's glob, on random trees and patterns. A folder takes the place of all buckets."""
    store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    monkeypatch.setattr(remote, "open_store", lambda address: (store, address[5:]))
    generator = random.Random(0)
    for number in range(100):
        tree = tmp_path / str(number)
        for _ in range(12):
            path = tree.joinpath(*generator.choices(["a", "b", "ab", "a.b"], k=generator.randint(1, 4)))
            if not any(parent.is_file() for parent in path.parents) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("x")
        parts = generator.choices(["a", "*", "**", "?", "a*", "[ab]*", "*.b"], k=2)
        pattern = "/".join([str(number), generator.choice(["*", "**", "?"]), *parts])
        listed = glob.glob(pattern, root_dir=tmp_path, recursive=True)
        wanted = {path for path in listed if os.path.isfile(f"{tmp_path}/{path}")}
        found = [file.path for file in remote.find_files(f"gs://{pattern}") if not file.is_folder]
        assert found == [f"gs://{path}" for path in sorted(wanted)], pattern
    with pytest.raises(UserError, match=r"gs://0/foo\*\*\.txt is no valid pattern: .* Write \*\* between two slashes"):
        remote.find_files("gs://0/foo**.txt")


@pytest.fixture(scope="module")
def bucket() -> Iterator[fs.FileSystem]:
    """A bucket "books" of a real S3 server on this machine."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto[server] is not installed: it is the S3 server of this test")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "key")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
            store = fs.S3FileSystem(endpoint_override=f"http://{host}:{port}", allow_bucket_creation=True)
            store.create_dir("books")
            yield store
    finally:
        server.stop()


def test_s3_is_listed_and_streamed(bucket, tmp_path):
    pq.write_table(pa.table({"text": ["five", "six"]}), tmp_path / "a.parquet")
    contents = {
        "deep/er/a.txt.xz": lzma.compress(b"one\n\ntwo\n\n" + b"long " * 500_000),
        "deep/b.txt": b"three",
        "c.jsonl": b'{"text": "four"}\n',
        "a.parquet": (tmp_path / "a.parquet").read_bytes(),
        "cut.xz": lzma.compress(b"seven" * 1000)[:-9],
    }
    for name, content in contents.items():
        with bucket.open_output_stream(f"books/{name}") as file:
            file.write(content)

    def read(pattern: str, **options: str) -> tuple[list[str], list[str]]:
        corpus = Corpus(find_sources(pattern), Reading(**options))
        texts = [text[:5] for text in corpus.documents()]
        assert corpus.bytes_read == corpus.total_bytes == sum(source.bytes for source in corpus.sources)
        return [source.path for source in corpus.sources], texts

    assert read("s3://books/c.jsonl") == (["s3://books/c.jsonl"], ["four"])
    assert read("s3://books/**/*.txt*") == (
        ["s3://books/deep/b.txt", "s3://books/deep/er/a.txt.xz"],
        ["three", "one", "two", "long "],
    )
    assert read("s3://books/*.parquet,s3://books/*.jsonl")[1] == ["five", "six", "four"]
    assert read("s3://books/*", on_error="skip")[0] == [
        f"s3://books/{name}" for name in ("a.parquet", "c.jsonl", "cut.xz")
    ]
    for pattern, message in {
        "s3://books/none.txt": "matches no file",
        "s3://books/*.none": "matches no file",
        "s3://books/deep": "expected a file, got a folder",
        "s3://other/*.txt": "matches no file|Check the address",
        "s3://*/a.txt": "the bucket may not contain wildcards",
        "s3://books/cut.xz": r"damaged file \(truncated\)",
    }.items():
        with pytest.raises(UserError, match=message) as raised:
            read(pattern)
        assert "\n" not in str(raised.value)


def test_rows_are_streamed_from_shards_in_s3(bucket, shards_dir, tmp_path):
    check_streaming(shards_dir, "s3://books/shards/sample", tmp_path / "cache")


def test_folder_is_written_listed_read_and_removed(tmp_path):
    """The name contains the characters that have a meaning in globs and addresses."""
    folder = Folder(str(tmp_path / "an [odd] *name?"))
    assert folder.names("units") == set()
    folder.write("units/a", b"text")
    folder.write("units/a", [b"mo", b"re"])
    assert folder.names("units") == folder.names() == {"units/a"}
    assert folder.read("units/a") == folder.read_if_present("units/a") == b"more" and folder.size("units/a") == 4
    folder.remove("units/a")
    assert folder.read_if_present("units/a") is None
    with pytest.raises(UserError, match=r"units/a does not exist\. Check the address"):
        folder.read("units/a")
    folder.clear()
    folder.clear()
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="nowhere://x: "):
        Folder("nowhere://x")


def test_unfinished_file_of_a_folder_is_not_listed_and_removed_if_it_is_interrupted(tmp_path):
    folder = Folder(str(tmp_path))

    def content(interruption: BaseException | None = None):
        yield b"half"
        assert len(list(tmp_path.iterdir())) == 1 and not folder.names()
        if interruption:
            raise interruption
        yield b" of it"

    with pytest.raises(KeyboardInterrupt):
        folder.write("a", content(KeyboardInterrupt()))
    assert not list(tmp_path.iterdir())
    folder.write("a", content())
    assert folder.names() == {"a"} and folder.read("a") == b"half of it"


class _WithoutDeletion:
    """A store for a process that is killed before it removes anything."""

    def __init__(self, files: fs.FileSystem) -> None:
        self.files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def delete_file(self, name: str) -> None:
        raise OSError(f"{name} stays")


def test_blocks_that_end_with_an_error_leave_no_object_in_s3(bucket, monkeypatch):
    folder = Folder("s3://books/broken")

    def blocks(error: Exception | None):
        yield b"half"
        assert folder.names() == set()
        if error is not None:
            raise error
        yield b" of it"

    with monkeypatch.context() as patch:
        made = fs.SubTreeFileSystem
        patch.setattr(fs, "SubTreeFileSystem", lambda path, store: _WithoutDeletion(made(path, store)))
        killed = Folder("s3://books/broken")
    with pytest.raises(ZeroDivisionError):
        killed.write("a", blocks(ZeroDivisionError()))
    assert folder.names() == set()
    folder.write("a", blocks(None))
    assert folder.names() == {"a"} and folder.read("a") == b"half of it"


def caused_by(cause: Exception) -> OSError:
    error = OSError(errno.EIO, str(cause))
    error.__cause__ = cause
    return error


def of_status(status: int) -> Exception:
    class HubError(RuntimeError):
        response = types.SimpleNamespace(status_code=status)

    return HubError(f"the Hub answered {status}")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 7, Could not connect to server", RunAgain),
        ("AWS Error SLOW_DOWN during ListObjectsV2 operation: ", RunAgain),
        ("AWS Error UNKNOWN (HTTP status 400) during GetObject operation: The provided token has expired.", RunAgain),
        ("google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of PerformWork())", RunAgain),
        ("AWS Error ACCESS_DENIED during HeadObject operation: No response body.", UserError),
        ("AWS Error INVALID_ACCESS_KEY_ID during ListObjectsV2 operation: The AWS Access Key Id ...", UserError),
        ("AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation: The specified bucket does not exist", UserError),
        ("AWS Error UNKNOWN (HTTP status 301) during HeadObject operation: No response body.", UserError),
        ("Cannot reach https://huggingface.co: please unset the `HF_HUB_OFFLINE` environment variable.", UserError),
        (PermissionError(13, "google::cloud::Status(UNAUTHENTICATED: Permanent error)"), UserError),
        (FileNotFoundError(2, "google::cloud::Status(NOT_FOUND: Permanent error)"), UserError),
        (pa.ArrowInvalid("google::cloud::Status(INVALID_ARGUMENT: Permanent error)"), UserError),
        ("google::cloud::Status(PERMISSION_DENIED: no access to /expired-domains/x.txt)", UserError),
        (caused_by(ValueError("Repository id must be 'namespace/name'")), UserError),
        (caused_by(json.JSONDecodeError("Expecting value", "", 0)), RunAgain),
        (caused_by(of_status(404)), UserError),
        (caused_by(of_status(403)), UserError),
        (caused_by(of_status(429)), RunAgain),
        (caused_by(of_status(503)), RunAgain),
    ],
)
def test_a_command_may_succeed_again_only_after_some_failures_of_a_store(tmp_path, monkeypatch, error, kind):
    """The messages are those of pyarrow 26."""
    error = OSError(error) if isinstance(error, str) else error
    assert type(failure("gs://bucket/a", error)) is kind
    assert type(failure("/mnt/a", error)) is UserError

    def refuse(address: str) -> None:
        raise error

    monkeypatch.setattr(remote, "open_store", refuse)
    with pytest.raises(kind, match=r"^gs://bucket/\*\.txt"):
        find_sources("gs://bucket/*.txt")
    folder = Folder(str(tmp_path))
    folder.address = "gs://bucket"
    with pytest.raises(kind, match=r"^gs://bucket/a") as caught:
        folder.write("a", map(refuse, "a"))
    assert "\n" not in str(caught.value) and "Errno" not in str(caught.value)


def test_an_address_is_shown_as_it_was_typed():
    for path in (Path("gs://bucket/a/b"), Path("gs://bucket/a/b").absolute()):
        assert as_address(path) == "gs://bucket/a/b"
    assert as_address(Path("/mnt/a")) == "/mnt/a"


def example(text: bytes) -> bytes:
    """A tf.train.Example with the byte string `text`: nested messages, each a tag, a length and its content."""

    def held(tag: bytes, content: bytes) -> bytes:
        assert len(content) < 128
        return tag + bytes([len(content)]) + content

    feature = held(b"\n", held(b"\n", text))
    return held(b"\n", held(b"\n", held(b"\n", b"text") + held(b"\x12", feature)))


@pytest.mark.parametrize("pattern", ["**", "**/*.txt", "*/*.txt", "*/*/c.txt", "[a]/b/*", "a/b/c.*"])
def test_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch, pattern):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "z.txt").write_text("Other text.")
    for name in ("a/x.txt", "a/b/c.txt"):
        (tmp_path / name).write_text("Text.")
    assert find_sources(f"{tmp_path}/{pattern}")
    closed = tmp_path / "a" / ("b" if pattern != "*/*.txt" else "")
    # As for another user: root may read everything.
    monkeypatch.setattr(os, "access", lambda path, mode: not os.path.samefile(path, closed))
    with pytest.raises(UserError, match=f"--input .* searches {closed}/?, which cannot be read"):
        find_sources(f"{tmp_path}/{pattern}")


@pytest.mark.parametrize("address", ["s3://", "s3:///name/*", "gs://"])
def test_an_address_without_a_bucket_is_refused(address):
    with pytest.raises(UserError, match="names no bucket"):
        find_sources(address)


def write_tfds(folder: Path, texts: list[str]) -> None:
    """A prepared TFDS dataset with one text feature, as `tfds build --file_format=array_record` leaves it."""
    folder.mkdir(parents=True)
    writer = ArrayRecordWriter(str(folder / "words-train.array_record-00000-of-00001"), "group_size:1")
    for text in texts:
        writer.write(example(text.encode()))
    writer.close()
    feature = {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text", "text": {}}
    features = {
        "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
        "featuresDict": {"features": {"text": feature}},
    }
    split = {"name": "train", "shardLengths": [str(len(texts))], "numBytes": "1000"}
    split["filepathTemplate"] = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    information = {"name": "words", "version": "1.0.0", "fileFormat": "array_record", "splits": [split]}
    (folder / "features.json").write_text(json.dumps(features))
    (folder / "dataset_info.json").write_text(json.dumps(information))


def test_tfds_datasets_are_read_by_name_split_and_folder(tmp_path, monkeypatch):
    texts = [f"Document {number}." for number in range(20)]
    write_tfds(tmp_path / "data" / "words" / "1.0.0", texts)
    # TFDS reads TFDS_DATA_DIR when it is imported, which another test may have done.
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path / "data"))
    folder = f"tfds:{tmp_path}/data/words/1.0.0"
    for address in ("tfds:words", "tfds:words:1.0.0", "tfds:words:train", "tfds:words:1.0.0:train", folder):
        assert list(Corpus(find_sources(address)).documents()) == texts, address
    assert list(Corpus(find_sources("tfds:words:train[:25%]")).documents()) == texts[:5]
    with pytest.raises(UserError, match="no feature 'content'; the features are text"):
        list(Corpus(find_sources("tfds:words"), Reading(text_field="content")).documents())
    with pytest.raises(UserError, match=r"tfds:words:validation: unknown split validation; choose from train"):
        find_sources("tfds:words:validation")
    with pytest.raises(UserError, match=r"tfds:absent is not prepared on this machine .*\[tensorflow\].*TFDS_DATA_DIR"):
        find_sources("tfds:absent")


@pytest.mark.parametrize(
    "harm",
    [
        lambda records: records.unlink(),
        lambda records: records.write_bytes(records.read_bytes()[:150] + bytes(records.stat().st_size - 150)),
    ],
    ids=["gone", "damaged"],
)
def test_tfds_records_that_cannot_be_read_are_refused(tmp_path, harm):
    write_tfds(tmp_path / "words" / "1.0.0", [f"Document {number}." for number in range(20)])
    (records,) = (tmp_path / "words" / "1.0.0").glob("*.array_record*")
    harm(records)
    address = f"tfds:{tmp_path}/words/1.0.0"
    with pytest.raises(UserError, match=r"words/1\.0\.0: damaged file \(.*or use --on_error skip"):
        list(Corpus(find_sources(address)).documents())
    skipping = Corpus(find_sources(address), Reading(on_error="skip"))
    assert not list(skipping.documents()) and skipping.refused == {"damaged_file": 1}


def test_sigterm_while_reading_tfds_is_not_reported_as_damage(tmp_path, monkeypatch):
    def stop(*_):
        raise Stopped("SIGTERM")

    write_tfds(tmp_path / "words" / "1.0.0", ["A document."])
    corpus = Corpus(find_sources(f"tfds:{tmp_path}/words/1.0.0"), Reading(on_error="skip"))
    monkeypatch.setattr("data_prep.readers.datasets.check", stop)
    with pytest.raises(Stopped):
        list(corpus.documents())


def test_tfds_datasets_for_tensorflow_alone_are_refused_before_reading(tmp_path):
    folder = tmp_path / "words" / "1.0.0"
    write_tfds(folder, ["A document."])
    information = json.loads((folder / "dataset_info.json").read_text()) | {"fileFormat": "tfrecord"}
    (folder / "dataset_info.json").write_text(json.dumps(information))
    with pytest.raises(UserError, match="prepared as tfrecord, which only TensorFlow can read"):
        find_sources(f"tfds:{folder}")
