import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from bert_jax import command_line
from bert_jax.command_line import explain_os_error
from bert_jax.errors import install_hint

PROGRAM = """
import os, errno, sys
from bert_jax import command_line as command
def main(arguments):
    parser = command.Parser("tests", "A test.")
    parser.add_argument("--number", type=int, default=1)
    parser.add_switch("lowercase", help="lower-case the text")
    parsed = parser.parse_args(arguments)
    if parsed.number == 2: raise command.UserError("this is wrong\\nthere")
    if parsed.number == 3: raise command.Stopped("saved")
    if parsed.number == 4: raise OSError(errno.ENOSPC, "x", "/some/file")
    if parsed.number == 6: os.mkdir("x" * 300)
    if parsed.number == 5: open("/nowhere/at/all")
    print(parsed.lowercase)
command.run(main)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--number=2"], 2, "error: this is wrong there"),
        (["--number=3"], 143, "saved"),
        (["--number=4"], 2, "no space left for /some/file"),
        (["--number=5"], 2, "no such file or folder: /nowhere/at/all"),
        (["--number=6"], 2, "is too long. Choose a shorter one"),
        (["--number=x"], 2, "invalid int value"),
        (["--unknown"], 2, "--unknown"),
    ],
)
def test_exit_codes_and_one_line(arguments, code, said):
    done = run(*arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_output_that_nobody_reads_ends_the_command_without_a_word(monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as ended:
            command_line.run(lambda _: print("line\n" * 100_000))
    assert ended.value.code == 141
    assert capfd.readouterr().err == ""


def test_an_extra_is_installed_from_where_bert_jax_comes_from(tmp_path):
    """No package index has bert_jax, so a plain `pip install bert_jax[gcs]` is no advice."""
    root = Path(__file__).parent.parent
    assert install_hint("gcs") == f"pip install --editable '{root}[gcs]'"
    told = install_hint("gcs", tmp_path / "site-packages" / "bert_jax")
    assert "pip install '.[gcs]' in the clone" in told and "--no-index --find-links WHEELS 'bert_jax[gcs]'" in told


@pytest.mark.parametrize("name", ["ELOOP", "EIO", "EMFILE"])
def test_failures_of_the_system_name_the_file(name):
    explained = explain_os_error(OSError(getattr(errno, name), "x", "/some/file"))
    assert explained is not None and "/some/file" in explained


def test_a_device_without_enough_memory_is_reported_in_one_line():
    with pytest.raises(RuntimeError) as raised:
        jax.block_until_ready(jax.jit(lambda row: jnp.outer(row, row) + 1)(jnp.zeros(1 << 23)))
    code, message = command_line.outcome(raised.value)
    assert code == 2 and re.match(
        r"error: the device has too little memory: Out of memory .* Use smaller batches", message
    )
    assert command_line.outcome(RuntimeError("RESOURCE_EXHAUSTED: Out of memory, says somebody else")) is None


def test_a_command_whose_standard_error_is_closed_does_its_work():
    quoted = shlex.join([sys.executable, "-c", PROGRAM.replace("print(parsed", "sys.stderr.write('x'); print(parsed")])
    ended = subprocess.run(f"{quoted} --nolowercase 2>&-", shell=True, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "False\n")


def test_switches_are_three_valued():
    assert [run(*flags).stdout.strip() for flags in ([], ["--lowercase"], ["--nolowercase"])] == [
        "None",
        "True",
        "False",
    ]


def test_the_home_folder_is_meant_after_an_equals_sign_and_in_lists(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    typed = ["--input=~/a.txt,~/b*.txt", "~/c", "--config.data.mixture=de=~/de,en=/x:~", "a~/b", "~"]
    found = [command_line.expand_home(argument) for argument in typed]
    assert found[:2] == ["--input=/home/ann/a.txt,/home/ann/b*.txt", "/home/ann/c"]
    assert found[2:] == ["--config.data.mixture=de=/home/ann/de,en=/x:~", "a~/b", "~"]
    assert (
        command_line.expand_home("--config.data.phases=1:~/a,2:~/b")
        == "--config.data.phases=1:/home/ann/a,2:/home/ann/b"
    )
