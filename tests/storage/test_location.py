"""Addresses of workdirs, and writing whole files and folders where nothing can be renamed."""

import errno
import importlib.util
from pathlib import Path

import jax
import pytest
from etils import epath

from bert_jax.errors import RunAgain, UserError
from bert_jax.storage.location import (
    copy_folder,
    is_store_failure,
    is_stored,
    local_folder,
    location,
    read_json,
    remove_folder,
    replace_folder,
    write_json,
)
from bert_jax.train.checkpoint import check_workdir
from bert_jax.train.orbax_io import reading


def test_a_path_on_disk_stays_what_it_is(tmp_path):
    assert location("runs/a") == Path("runs/a") and location(tmp_path) is not None and location(tmp_path) == tmp_path
    assert location("C:three") == Path("C:three") and location(Path("c:/x")) == Path("c:/x")
    assert not is_stored(location("a:b/c"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "hf://name/run",
            r"^hf://name/run: runs are kept on disks and in gs:// and s3://, not in hf://\. Use a local folder",
        ),
        (Path("hf://name/run"), r"^hf://name/run: runs are kept"),
        ("ftp://host/run", r"^ftp://host/run: runs are kept on disks and in gs:// and s3://, not in ftp://"),
        ("s3://bucket/", r"^s3://bucket/ names no folder in a bucket. Use s3://BUCKET/NAME$"),
        ("gs://", r"^gs:// names no folder in a bucket. Use gs://BUCKET/NAME$"),
        ("gs://bucket/", r"^gs://bucket/ names no folder in a bucket"),
    ],
)
def test_other_addresses_are_refused(address, message):
    with pytest.raises(UserError, match=message):
        location(address)


@pytest.mark.parametrize(("scheme", "package", "extra"), [("gs", "gcsfs", "gcs"), ("s3", "s3fs", "s3")])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, scheme, package, extra):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    hint = rf"which needs the package {package}: pip install --editable '.*\[{extra}\]'$"
    with pytest.raises(UserError, match=hint):
        location(f"{scheme}://bucket/run")


def test_several_processes_are_refused_in_s3(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"^--workdir s3://bucket/run: a run of several processes .* Use gs://BUCKET"):
        check_workdir(epath.Path("s3://bucket/run"))


def test_a_file_in_place_of_the_workdir_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file; name a folder"):
        check_workdir(tmp_path / "file")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError("Forbidden: bucket/run"), UserError),
        (ValueError("UNAVAILABLE: error reading gs://bucket/run"), RunAgain),
        (TimeoutError(), RunAgain),
    ],
)
def test_a_store_that_refuses_or_does_not_answer_damages_no_checkpoint(error, raised):
    step = epath.Path("gs://bucket/run/checkpoints/1")
    with pytest.raises(raised, match=rf"^cannot read {step}: orbax: cannot restore"), reading(step):
        raise ValueError("orbax: cannot restore") from error
    for other in (ValueError("DATA_LOSS: checksum"), FileNotFoundError("x"), OSError(errno.ENOSPC, "disk full")):
        assert not is_store_failure(other)


@pytest.mark.parametrize(
    ("error", "raised", "advice"),
    [
        ("Forbidden: bucket/run", UserError, "Check what the credentials permit"),
        ("Busy", RunAgain, "Run the same comm"),
    ],
)
def test_a_write_that_a_store_refuses_ends_with_a_line_that_says_what_to_do(monkeypatch, error, raised, advice):
    def refuse(path: epath.Path, content: bytes) -> int:
        raise OSError(error)

    path = epath.Path("gs://bucket/run/result.json")
    monkeypatch.setattr(type(path), "write_bytes", refuse)
    with pytest.raises(raised, match=rf"^cannot write gs://bucket/run/result\.json: {error}\. {advice}"):
        write_json(path, {})


@pytest.mark.parametrize("kind", [Path, epath.Path])
def test_a_folder_is_replaced_copied_and_removed(tmp_path, kind):
    folder, other = kind(tmp_path / "folder"), kind(tmp_path / "other")

    def save(target: Path) -> None:
        (target / "same").write_bytes(b"same")
        (target / "new").write_bytes(b"new")

    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "same").write_bytes(b"same")
    (tmp_path / "folder" / "old").write_bytes(b"old")
    before = (tmp_path / "folder" / "same").stat().st_mtime_ns
    replace_folder(folder, save)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"same": b"same", "new": b"new"}
    if is_stored(folder):
        assert (tmp_path / "folder" / "same").stat().st_mtime_ns == before
        (tmp_path / "other").mkdir()  # on a disk; a store has no folders
    copy_folder(folder, other)
    assert {path.name: path.read_bytes() for path in local_folder(other).iterdir()} == {"same": b"same", "new": b"new"}
    remove_folder(other)
    remove_folder(other)
    assert not other.exists()
    write_json(folder / "new", {"a": 1})
    assert read_json(folder / "new") == {"a": 1}
    with pytest.raises(UserError, match=r"no none\.json in"):
        read_json(folder / "none.json")
