import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from building import ROOT

from bert_jax.command_line import explain_os_error
from bert_jax.errors import UserError
from bert_jax.storage.files import MARKER, atomic_file, atomic_folder, incomplete_path, refuse_existing


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_second_writer_of_a_folder_is_refused_and_the_first_one_completes(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "one").touch()
        with (
            pytest.raises(UserError, match=r"another job is writing .*out\.incomplete; wait"),
            atomic_folder(tmp_path / "out"),
        ):
            pass
        (folder / "two").touch()
    assert names(tmp_path) == {"out", "out/one", "out/two"}


def test_second_writer_of_a_file_is_refused_and_the_first_one_completes(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "out") as file:
        file.write(b"one")
        with pytest.raises(UserError, match=r"another job is writing .*out\.incomplete"), atomic_file(tmp_path / "out"):
            pass
        file.write(b"two")
    assert names(tmp_path) == {"out"} and (tmp_path / "out").read_bytes() == b"onetwo"


@pytest.mark.parametrize("writer", ["atomic_folder", "atomic_file"])
def test_leftover_of_a_killed_writer_is_replaced(tmp_path: Path, writer: str) -> None:
    """The end of a process releases its lock; a process that is only stopped keeps it."""
    output = tmp_path / "out"
    left = incomplete_path(output) / "left" if writer == "atomic_folder" else incomplete_path(output)
    code = (
        "import sys, time, pathlib; from bert_jax.storage import files as local; output = pathlib.Path(sys.argv[1])\n"
        f"with local.{writer}(output) as new:\n"
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
        "import os, pathlib, signal, sys; from bert_jax.storage import files as local\n"
        "def killed(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
        "with local.atomic_folder(sys.argv[1]) as folder:\n"
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


def write(output: Path, writer: str) -> None:
    if writer == "atomic_folder":
        with atomic_folder(output) as folder:
            (folder / "new").touch()
    else:
        with atomic_file(output) as file:
            file.write(b"new")
        assert output.read_bytes() == b"new"


def test_empty_unfinished_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "out.incomplete").mkdir()
    write(tmp_path / "out", "atomic_folder")
    assert names(tmp_path) == {"out", "out/new"}


def test_unrelated_file_with_the_name_of_an_unfinished_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.incomplete").write_text("mine")
    with pytest.raises(UserError, match="exists and is no unfinished output"):
        write(tmp_path / "out", "atomic_folder")
    assert (tmp_path / "out.incomplete").read_text() == "mine"


def test_one_of_many_simultaneous_writers_creates_the_folder(tmp_path: Path) -> None:
    """All start at the same moment, a hundred times: no folder mixes files of two writers, and none is lost."""
    code = (
        "import os, sys, time, pathlib\n"
        "from bert_jax import command_line as command\n"
        "from bert_jax.storage import files as local\n"
        "while not os.path.exists(sys.argv[1] + '/go'): time.sleep(0.0001)\n"
        "for number in range(100):\n"
        "    try:\n"
        "        with local.atomic_folder(f'{sys.argv[1]}/{number}') as folder:\n"
        "            [(folder / f'{sys.argv[2]}-{each}').touch() for each in range(5)]\n"
        "        print(number)\n"
        "    except command.UserError: pass"
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
            assert names(tmp_path / number.decode()) == {f"{name}-{each}" for each in range(5)}
    (tmp_path / "go").unlink()
    assert set(os.listdir(tmp_path)) == {str(number) for number in range(100)}
    assert sum(len(made.split()) for made, _ in ended) == 100


def test_full_disk_without_a_name_is_reported_with_the_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, atomic_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(tmp_path / "out") in str(explain_os_error(caught.value)) and not names(tmp_path)


def test_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not UTF-8"):
        refuse_existing(tmp_path / os.fsdecode(b"out\xff"))


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
