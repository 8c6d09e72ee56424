"""Runs a unit on another machine: units and results travel as bytes, so workers need none of this machine's files.

A unit runs in a temporary folder with the job folder's layout and tokenizer. Its files come back as one tar, which is
unpacked here.
"""

import io
import itertools
import json
import os
import shlex
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from bert_jax.data.manifest import PARTS
from bert_jax.errors import UserError
from bert_jax.storage.files import write_atomic
from data_prep.job import UnitRecord, unit_folder
from data_prep.units import Unit

# Builds a unit in its job's folder (data_prep.job).
Work = Callable[[Path, Unit], UnitRecord]

# By job, the temporary folder and the tokenizer's tar. All units of a job have the same folder, because tokenizers are
# cached by path.
_known: dict[str, tuple[Path, bytes]] = {}
# Some runners give a process several units at once, but only one thread at a time may use a tokenizer.
_one_unit = threading.Lock()


def split_options(options: str) -> list[str]:
    """Splits --engine_options into flags.

    Raises:
        UserError: A quote is not closed.
    """
    try:
        return shlex.split(options)
    except ValueError as error:
        raise UserError(f"--engine_options {options!r}: {error}") from None


def pack_unit(unit: Unit) -> bytes:
    """Packs a unit as a JSON line and its text."""
    # Not a pickle: others may write to the exchange folder, and a pickle can run code.
    head = {"part": unit.part, "number": unit.number, "text_hash": unit.text_hash}
    lengths = [len(document) for document in unit.documents]
    return b"\n".join([json.dumps(head | {"lengths": lengths}).encode(), b"".join(unit.documents)])


def unpack_unit(packed: bytes) -> Unit:
    """Undoes pack_unit."""
    head, text = packed.split(b"\n", 1)
    fields = json.loads(head)
    ends = list(itertools.accumulate(fields.pop("lengths"), initial=0))
    return Unit(**fields, documents=tuple(text[begin:end] for begin, end in itertools.pairwise(ends)))


def pack_tokenizer(directory: Path) -> bytes:
    """Packs a job's tokenizer for `do_unit`."""
    return pack_files(directory, (directory / "tokenizer").iterdir())


def do_unit(work: Work, job: str, tokenizer: Callable[[], bytes], unit: Unit) -> bytes:
    """On a worker: builds a unit and returns its files, for `put_in_place`.

    Args:
        job: A unique name.
        tokenizer: Returns the result of pack_tokenizer. Called once in a process.
    """
    with _one_unit:
        if job not in _known:
            _known[job] = Path(tempfile.gettempdir()) / f"bert_jax_{os.urandom(8).hex()}", tokenizer()
        # The folder is removed after each unit, because nothing tells a worker that a job has ended.
        folder, packed_tokenizer = _known[job]
        folder.mkdir(mode=0o700)
        try:
            for inner in (unit_folder(folder), folder / "tokenizer", *(folder / part for part in PARTS)):
                inner.mkdir(parents=True)
            for path, content in unpack_files(packed_tokenizer).items():
                (folder / path).write_bytes(content)
            work(folder, unit)
            written = (path for path in folder.rglob("*") if path.is_file() and path.parent != folder / "tokenizer")
            return pack_files(folder, written)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def put_in_place(directory: Path, packed: bytes) -> UnitRecord:
    """Writes a unit's files into the job's folder, its record last, and returns the record."""
    files = unpack_files(packed)
    (name,) = (path for path in files if path.parent == unit_folder(Path()) and path.suffix == ".json")
    # The record comes last, because it says that all other files of the unit are complete.
    for path in sorted(files, key=lambda path: path == name):
        write_atomic(directory / path, files[path])
    return UnitRecord(**json.loads(files[name]))


def pack_files(folder: Path, paths: Iterable[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in paths:
            tar.add(path, path.relative_to(folder))
    return buffer.getvalue()


def unpack_files(packed: bytes) -> dict[Path, bytes]:
    """Returns the files in a tar, by path.

    Raises:
        ValueError: A path leads out of the job's folder.
    """
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as tar:
        members = tar.getmembers()
    # extractfile and the mode "r" are avoided: the C code of io, and the readers of compressed files that "r" tries,
    # drop exceptions raised in some of their steps, including Ctrl-C (5 of 100 interrupts here were lost).
    files = {Path(member.name): packed[member.offset_data : member.offset_data + member.size] for member in members}
    for path in files:
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{path} leads out of the job's folder")
    return files
