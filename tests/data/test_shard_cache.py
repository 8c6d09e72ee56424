"""Shards from a store or a slow disk, kept on a local one."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from pyarrow import fs

from bert_jax.config import PretrainConfig, PretrainDataConfig
from bert_jax.data.manifest import PARTS
from bert_jax.data.phases import open_held_out, open_phases
from bert_jax.data.shards import local_copy, open_dataset
from bert_jax.errors import UserError
from bert_jax.storage import remote


@pytest.fixture
def store(shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of all buckets, with the shards as gs://bucket/books."""
    folder = tmp_path / "store"
    shutil.copytree(shards_dir, folder / "bucket" / "books")
    pretended = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
    monkeypatch.setattr(remote, "open_store", lambda address: (pretended, address[5:]))
    return folder / "bucket" / "books"


@pytest.fixture
def copy(tmp_path: Path):
    """Calls local_copy with one cache; returns the path of the copy and the printed lines."""

    def copy(address: str, parts=PARTS) -> tuple[Path, list[str]]:
        lines: list[str] = []
        return Path(local_copy(address, str(tmp_path / "cache"), parts, lines.append)), lines

    return copy


def test_a_copy_is_made_once_and_equals_the_original(store, copy, shards_dir, tmp_path):
    there, lines = copy("gs://bucket/books")
    assert there.parent == tmp_path / "cache" and there.name.startswith("books-")
    assert len(lines) == 1 and lines[0].startswith("copying ") and "gs://bucket/books" in lines[0]
    for part in PARTS:
        assert open_dataset(there, part).fingerprint == open_dataset(shards_dir, part).fingerprint
    assert open_dataset(there, "train").vocabulary().content_hash == open_dataset(shards_dir, "train").tokenizer_hash
    assert copy("gs://bucket/books/") == (there, [])
    assert copy("gs://bucket/books/eval") == (there / "eval", [])
    assert copy(str(shards_dir))[0].name == there.name.replace("books", "shards")


@pytest.mark.parametrize("named", ["books", "books/train", "books/train/"])
def test_the_train_folder_of_a_store_has_its_held_out_rows(store, shards_dir, tmp_path, named):
    data = PretrainDataConfig(train=f"gs://bucket/{named}", cache_dir=str(tmp_path / "cache"))
    phases = open_phases(data)
    ((held_out,),) = open_held_out(PretrainConfig(data=data), phases)
    assert held_out.dataset.fingerprint == open_dataset(shards_dir, "eval").fingerprint
    assert phases[0].mixture.dataset.fingerprint == open_dataset(shards_dir, "train").fingerprint


def test_only_requested_parts_are_copied(store, copy):
    there, _ = copy("gs://bucket/books/eval")
    assert not (there.parent / "train").exists()
    assert open_dataset(there, "train").part == "eval"
    with pytest.raises(UserError, match="missing shard"):
        open_dataset(there.parent, "train")
    _, lines = copy("gs://bucket/books")
    assert len(lines) == 1
    open_dataset(there.parent, "train")


def test_a_truncated_or_missing_file_is_copied_again(store, copy):
    there, _ = copy("gs://bucket/books")
    shard, vocabulary = there / "train" / "shard-00000.arrow", next((there / "tokenizer").iterdir())
    content = shard.read_bytes()
    os.truncate(shard, 100)
    vocabulary.unlink()
    assert copy("gs://bucket/books")[1][0].startswith("copying 2 files")
    assert shard.read_bytes() == content and vocabulary.exists()


def test_damaged_files_are_refused_and_not_kept(store, copy, tmp_path):
    shard = store / "train" / "shard-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(
        UserError, match=r"damaged gs://bucket/books/train/shard-00000\.arrow: its sha256 is \w+\.\.\., expected"
    ) as caught:
        copy("gs://bucket/books")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("manifest.json")) and not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_rebuilt_output_is_another_copy(store, copy):
    first, _ = copy("gs://bucket/books")
    manifest = store / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))
    second, lines = copy("gs://bucket/books")
    assert second != first and lines


def test_errors_are_one_line(store, copy, tmp_path):
    with pytest.raises(UserError, match=r"gs://bucket/nowhere/manifest\.json does not exist. Check the address"):
        copy("gs://bucket/nowhere")
    with pytest.raises(UserError, match="cache_dir=gs://bucket/cache is in an object store"):
        local_copy("gs://bucket/books", "gs://bucket/cache", PARTS, print)
    (store / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"gs://bucket/books/manifest\.json is not valid JSON"):
        copy("gs://bucket/books")
    (store / "manifest.json").write_text('{"schema_version": 99}')
    with pytest.raises(UserError, match="schema_version 99"):
        copy("gs://bucket/books")


def test_a_cache_without_locks_is_refused(store, copy, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(UserError, match=r"cache is on a file system without locks; choose one on a local disk"):
        copy("gs://bucket/books")
