"""Files and folders that are complete or absent, compressed files of several streams, and temporary folders."""

import bz2
import errno
import fcntl
import gzip
import io
import itertools
import lzma
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from building import ROOT
from hypothesis import given
from hypothesis import strategies as st
from streamed_outputs import interrupted

from bert_jax.command_line import explain_os_error
from bert_jax.errors import UserError
from bert_jax.storage.files import (
    MARKER,
    SUFFIXES,
    DamagedFile,
    atomic_file,
    atomic_folder,
    decompressed,
    incomplete_path,
    naming,
    naming_temporary,
    read_blocks,
    refuse_existing,
    scratch_folder,
)

WRITERS = {"atomic_folder": atomic_folder, "atomic_file": atomic_file}


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def write(output: Path, writer: str) -> None:
    with WRITERS[writer](output) as new:
        (new / "new").touch() if isinstance(new, Path) else new.write(b"new")
    assert writer == "atomic_folder" or output.read_bytes() == b"new"


@pytest.mark.parametrize("writer", WRITERS)
def test_second_writer_is_refused_and_the_first_one_completes(tmp_path: Path, writer: str) -> None:
    with WRITERS[writer](tmp_path / "out") as new:
        (new / "one").touch() if isinstance(new, Path) else new.write(b"one")
        with pytest.raises(UserError, match=r"another job is writing .*out\.incomplete; wait"):
            write(tmp_path / "out", writer)
        (new / "two").touch() if isinstance(new, Path) else new.write(b"two")
    assert names(tmp_path) == ({"out", "out/one", "out/two"} if writer == "atomic_folder" else {"out"})
    assert writer == "atomic_folder" or (tmp_path / "out").read_bytes() == b"onetwo"


@pytest.mark.parametrize("writer", WRITERS)
def test_leftover_of_a_killed_writer_is_replaced(tmp_path: Path, writer: str) -> None:
    """The end of a process releases its lock; a process that is only stopped keeps it."""
    output = tmp_path / "out"
    left = incomplete_path(output) / "left" if writer == "atomic_folder" else incomplete_path(output)
    code = (
        "import sys, time, pathlib; from bert_jax.storage import files; output = pathlib.Path(sys.argv[1])\n"
        f"with files.{writer}(output) as new:\n"
        "    if isinstance(new, pathlib.Path): (new / 'left').mkdir(); (new / 'left' / 'file').touch()\n"
        "    else: new.write(b'a longer content'); new.flush()\n"
        "    print('there', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, output], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(UserError, match="another job is writing"):
            write(output, writer)
        assert left.exists()
    finally:
        process.kill()
        process.communicate()
    write(output, writer)
    assert names(tmp_path) == ({"out", "out/new"} if writer == "atomic_folder" else {"out"})


@pytest.mark.parametrize("last", ["rename", "unlink"])
def test_a_kill_between_the_marker_and_the_rename_is_no_dead_end(tmp_path: Path, last: str) -> None:
    """Whatever comes first, the output is complete afterwards, or the next job makes it."""
    code = (
        "import os, pathlib, signal, sys; from bert_jax.storage import files\n"
        "def killed(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
        "with files.atomic_folder(sys.argv[1]) as folder:\n"
        "    (folder / 'new').touch(); setattr(pathlib.Path, sys.argv[2], killed)"
    )
    output = tmp_path / "out"
    ended = subprocess.run([sys.executable, "-c", code, output, last], cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL
    if output.exists():
        assert not incomplete_path(output).exists()
    else:
        write(output, "atomic_folder")
    assert names(tmp_path) - {f"out/{MARKER}"} == {"out", "out/new"}


def test_empty_unfinished_folder_is_used_and_an_unrelated_file_of_its_name_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.incomplete").mkdir()
    write(tmp_path / "out", "atomic_folder")
    assert names(tmp_path) == {"out", "out/new"}
    (tmp_path / "other.incomplete").write_text("mine")
    with pytest.raises(UserError, match="already exists and was not left by an interrupted run"):
        write(tmp_path / "other", "atomic_folder")
    assert (tmp_path / "other.incomplete").read_text() == "mine"


def test_one_of_many_simultaneous_writers_creates_the_folder(tmp_path: Path) -> None:
    """All start at the same moment, a hundred times: no folder mixes files of two writers, and none is lost."""
    code = (
        "import os, sys, time; from bert_jax.errors import UserError; from bert_jax.storage import files\n"
        "while not os.path.exists(sys.argv[1] + '/go'): time.sleep(0.0001)\n"
        "for number in range(100):\n"
        "    try:\n"
        "        with files.atomic_folder(f'{sys.argv[1]}/{number}') as folder:\n"
        "            [(folder / f'{sys.argv[2]}-{index}').touch() for index in range(5)]\n"
        "        print(number)\n"
        "    except UserError: pass"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path, name], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for name in "abc"
    ]
    (tmp_path / "go").touch()
    ended = [writer.communicate(timeout=120) for writer in writers]
    assert not any(message for _, message in ended), ended
    for name, (made, _) in zip("abc", ended, strict=True):
        for number in made.split():
            # A writer that comes too late may have created another marker in the folder while it was being renamed.
            assert names(tmp_path / number.decode()) - {MARKER} == {f"{name}-{index}" for index in range(5)}
    (tmp_path / "go").unlink()
    assert set(os.listdir(tmp_path)) == {str(number) for number in range(100)}
    assert sum(len(made.split()) for made, _ in ended) == 100


def test_full_disk_without_a_name_is_reported_with_the_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, atomic_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(tmp_path / "out") in str(explain_os_error(caught.value)) and not names(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (os.fsdecode(b"out\xff"), "is not UTF-8"),
        ("out.incomplete", "ends in .incomplete, which is reserved"),
        ("gs:/bucket/out", "is in an object store. Choose a local folder"),
        (".", "exists. Choose another"),
    ],
)
def test_output_that_cannot_be_created_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        refuse_existing(tmp_path / name)


@pytest.mark.parametrize("name", ["ENOSYS", "EOPNOTSUPP", "ENOLCK"])
def test_a_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Lustre mounted with noflock and NFS without a lock daemon give these errors."""

    def flock(file: object, operation: int) -> None:
        raise OSError(getattr(errno, name), "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").touch()
    assert names(tmp_path / "out") == {"a"}
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "a broken disk")))
    with pytest.raises(OSError, match="a broken disk"), atomic_folder(tmp_path / "other"):
        pass


COMPRESS = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: pa.Codec("zstd").compress(content, asbytes=True),
}


class Shorter(io.BytesIO):
    """A file that returns a few bytes at a time, as a store may."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(min(size or 7, 7))


def content(stored: bytes, suffix: str, file: type[io.BytesIO] = io.BytesIO, size: int = -1) -> bytes | None:
    """The content of a file; None if it is damaged."""
    with decompressed(file(stored), suffix, 1 if size > 0 else 1 << 16) as opened:
        try:
            return b"".join(iter(lambda: opened.read(size), b""))
        except DamagedFile:
            return None


def content_by_xz(stored: bytes) -> bytes | None:
    run = subprocess.run(["xz", "-dc"], input=stored, capture_output=True)
    return None if run.returncode else run.stdout


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("file, size", [(io.BytesIO, -1), (io.BytesIO, 3), (Shorter, 1000)])
def test_concatenated_streams_are_all_read(suffix, file, size):
    pieces = [b"", b"one ", b"two " * 40_000, b"", b"three"]
    stored = b"".join(map(COMPRESS[suffix], pieces))
    assert content(stored, suffix, file, size) == b"".join(pieces)


@pytest.mark.skipif(shutil.which("xz") is None, reason="xz is what this is compared with")
@pytest.mark.parametrize("padding", [*itertools.product([0, 3, 4, 1 << 17], repeat=3)], ids=str)
def test_padding_of_xz_is_accepted_where_the_xz_tool_accepts_it(padding):
    first, between, last = (bytes(size) for size in padding)
    stored = first + lzma.compress(b"one ") + between + lzma.compress(b"two") + last
    assert content(stored, ".xz") == content_by_xz(stored)
    assert (content(stored, ".xz") == b"one two") == (padding[0] == padding[1] % 4 == padding[2] % 4 == 0)


@pytest.mark.skipif(shutil.which("xz") is None, reason="xz is what this is compared with")
@given(st.integers(0, 1 << 32))
def test_damaged_xz_is_found_where_the_xz_tool_finds_it(seed):
    generator = random.Random(seed)
    stored = bytearray()
    for _ in range(generator.randint(1, 3)):
        stored += lzma.compress(generator.randbytes(generator.randint(0, 9)) * 9)
        stored += bytes(generator.choice([0, 0, 1, 4, 8]))
    match generator.randrange(4):
        case 0:
            stored[generator.randrange(len(stored))] ^= 1 << generator.randrange(8)
        case 1:
            del stored[generator.randrange(1, len(stored)) :]
        case 2:
            stored += generator.randbytes(generator.randint(1, 9))
    assert content(bytes(stored), ".xz") == content_by_xz(stored), bytes(stored).hex()


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_any_flipped_byte_of_a_later_stream_is_reported_or_changes_nothing(suffix):
    """It changes nothing in the time stamp of a .gz header, or in a limit of .xz that the text does not reach."""
    first, second = (COMPRESS[suffix](text * 9) for text in (b"one ", b"two "))
    detected = 0
    for place in range(len(second)):
        for flip in (1, 0x80, 0xFF):
            flipped = bytearray(second)
            flipped[place] ^= flip
            found = content(first + flipped, suffix)
            assert found in (None, b"one " * 9 + b"two " * 9), (place, flip)
            detected += found is None
    assert detected > 0.6 * 3 * len(second)
    for size in range(1, len(second)):
        assert content(first + second[:size], suffix) is None, size


def test_padding_and_garbage_of_gz_are_treated_as_python_does():
    first, second = gzip.compress(b"one "), gzip.compress(b"two")
    for stored in (b"", first + bytes(5) + second + bytes(70_000), first + b"garbage", bytes(4) + first, first[:5]):
        try:
            wanted = gzip.decompress(stored)
        except (OSError, EOFError):
            wanted = None
        assert content(stored, ".gz") == wanted


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_lost_connection_is_no_damage(monkeypatch, suffix):
    stored = COMPRESS[suffix](random.Random(0).randbytes(200_000))
    address = f"s3://bucket/a.txt{suffix}"
    interrupted(stored, range(90_000, len(stored)), monkeypatch)
    with pytest.raises(OSError, match="NETWORK_CONNECTION") as caught:
        list(read_blocks(address))
    assert caught.value.errno == errno.EIO
    interrupted(stored[:90_000], range(0), monkeypatch)
    with pytest.raises(DamagedFile):
        list(read_blocks(address))
    interrupted(stored, range(0), monkeypatch)
    assert b"".join(read_blocks(address)) == random.Random(0).randbytes(200_000)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_is_bounded_by_a_block(suffix):
    stored = COMPRESS[suffix](bytes(1 << 26))
    tracemalloc.start()
    try:
        with decompressed(io.BytesIO(stored), suffix) as opened:
            assert sum(len(block) for block in iter(lambda: opened.read(1 << 20), b"")) == 1 << 26
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 24, f"{peak} bytes, of which the dictionary of .xz takes 8 MiB"


KILLED = """
import os, signal
from bert_jax.storage.files import scratch_folder
with scratch_folder() as folder:
    (folder / "large").write_bytes(b"x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_is_removed_at_its_end_or_after_its_process_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, env=environment)
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    beginning, elsewhere = left.with_name(f"{left.name}x"), tmp_path / "bert_jax-staging-elsewhere-x"
    beginning.mkdir()  # its process has not locked it yet
    shutil.copytree(left, elsewhere)
    with scratch_folder() as one, scratch_folder() as two:
        assert not left.exists() and one != two and one.is_dir() and two.is_dir()
        (two / "file").write_bytes(b"x")
    assert {*tmp_path.iterdir()} == {beginning, elsewhere}


def test_a_full_folder_is_explained(tmp_path, monkeypatch):
    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    said = r"temporary folder \(No space left on device\)\. Free some space, or set TMPDIR"
    with pytest.raises(UserError, match=said), scratch_folder():
        pass


def zstd_frame(content: bytes, window: bytes) -> bytes:
    """A frame of one raw block, with a window descriptor (RFC 8878, 3.1.1)."""
    return b"\x28\xb5\x2f\xfd\x00" + window + (len(content) << 3 | 1).to_bytes(3, "little") + content


@pytest.mark.parametrize("window", [b"\x00", b"\x88", b"\x89", b"\xa8"])
def test_any_window_of_zstd_is_read(tmp_path, window):
    """0x88 is 128 MiB, 0x89 an eighth more, and 0xa8 is 2 GiB, as zstd --long=31 makes it."""
    frames = [zstd_frame(b"one ", window), COMPRESS[".zst"](b"two "), b"\x50\x2a\x4d\x18\1\0\0\0x"]  # one is skippable
    ends = list(itertools.accumulate(map(len, frames)))
    path = tmp_path / "a.zst"
    path.write_bytes(b"".join(frames))
    assert b"".join(read_blocks(str(path))) == b"one two "
    for size in set(range(1, ends[-1])).difference(ends):
        path.write_bytes(b"".join(frames)[:size])
        with pytest.raises(DamagedFile):
            list(read_blocks(str(path)))


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for naming_it, name in ((naming(tmp_path / "cache"), "cache"), (naming_temporary(), r"\(TMPDIR\)")):
        with pytest.raises(OSError) as raised, naming_it:
            fail()
        assert re.match(rf"no space left for .*{tmp_path}.*{name}\. Free some", explain_os_error(raised.value) or "")
    with pytest.raises(OSError) as raised, naming_temporary():
        (tmp_path / "missing").read_bytes()
    assert raised.value.filename == str(tmp_path / "missing")
