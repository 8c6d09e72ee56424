"""Copies shards to or from an object store, and verifies every byte."""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bert_jax.config.options import option, parse
from bert_jax.data.manifest import MANIFEST
from bert_jax.errors import UserError
from bert_jax.progress import Reporter, print_note
from bert_jax.storage.files import MARKER, atomic_folder, refuse_inside
from bert_jax.storage.remote import Folder, is_remote
from data_prep import output_files

_PARALLEL_FILES = 32  # a store takes a while to answer each request

DESCRIPTION = """\
Copies an output of bert-jax build-examples to or from an object store, or between two folders.

  bert-jax copy-examples --input data/books --output gs://bucket/books
  bert-jax copy-examples --input s3://bucket/books --output data/books

Each file is hashed while it is read and compared with SHA256SUMS; its size is checked at the destination. manifest.json
is written last: an output without it is incomplete. If a copy is stopped, the same command resumes it: files that are
there with the right size and hash are not copied again.
Credentials are those of the stores' own tools (AWS_PROFILE, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, ...).
"""


def copy(input: str, output: str, *, quiet: bool = True) -> int:
    """Copies as the command does, and returns the output's size in bytes.

    Raises:
        UserError: The input is not a finished output or is damaged, the output exists, or a store does not answer.
    """
    if not is_remote(input) and not is_remote(output):
        refuse_inside(Path(os.path.abspath(output)), Path(os.path.abspath(input)))
    source = Folder(input)
    place = f"{input}/{output_files.SUMS}"
    listed = output_files.parse_sums(source.read(output_files.SUMS), place)
    if MANIFEST not in listed:
        raise UserError(f"damaged {place}: it does not list {MANIFEST}; copy the folder again")
    # The file of sums is copied, too, although it does not list itself. One listing of the source finds missing files
    # before anything is written, and one of the target those that a stopped copy left.
    stored = source.sizes()
    if missing := [name for name in listed if name not in stored]:
        raise UserError(f"{input}/{missing[0]} does not exist, but {output_files.SUMS} lists it; copy the folder again")
    sizes = {name: stored[name] for name in [*listed, output_files.SUMS]}
    with (
        _target(output, set(sizes)) as (target, present),
        Reporter("copying", sum(sizes.values()), ["MB"], quiet) as reporter,
    ):
        copied = done = skipped = 0

        def transfer(name: str) -> bool:
            if present.get(name) == sizes[name] and name in listed and _is_intact(target, name, listed[name]):
                return False
            _copy_file(source, target, name, listed.get(name), sizes[name])
            return True

        # The manifest comes last, because it means that all other files exist.
        for names in (sorted(set(listed) - {MANIFEST}), [output_files.SUMS], [MANIFEST]):
            with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
                for name, was_copied in zip(names, pool.map(transfer, names), strict=True):
                    copied += sizes[name] if was_copied else 0
                    skipped += not was_copied
                    done += sizes[name]
                    reporter.update(done, copied / 1e6)
    if skipped and not quiet:
        print_note(f"{skipped} of {len(sizes)} files were there already")
    return done


@contextlib.contextmanager
def _target(output: str, names: set[str]) -> Iterator[tuple[Folder, dict[str, int]]]:
    """Opens the folder to write to, and lists the sizes of what a stopped copy left in it.

    A folder on disk then has no other files. In a store, other files are an error.
    """
    if not is_remote(output):
        with atomic_folder(Path(os.path.abspath(output)), resumes=True) as folder:
            for path in folder.rglob("*"):  # unfinished files, or those of another input
                if path.is_file() and path.relative_to(folder).as_posix() not in {*names, MARKER}:
                    path.unlink()
            target = Folder(str(folder))
            yield target, target.sizes()
        return
    target = Folder(output)
    existing = target.sizes()
    if MANIFEST in existing:
        raise UserError(f"output {output} exists. Choose another --output, or remove it first")
    if others := existing.keys() - names:
        raise UserError(f"{output} holds {min(others)}, which is not part of the output. Choose another --output")
    yield target, existing


def _is_intact(target: Folder, name: str, sha256: str) -> bool:
    digest = hashlib.sha256()
    for block in target.blocks(name):
        digest.update(block)
    return digest.hexdigest() == sha256


def _copy_file(source: Folder, target: Folder, name: str, sha256: str | None, size: int) -> None:
    target.write(name, source.verified_blocks(name, sha256, size))
    if (stored := target.size(name)) != size:
        raise UserError(f"{target.address}/{name} has {stored} bytes, expected {size}; copy it again")


@dataclass(frozen=True)
class Options:
    input: str = option(help="a finished output", metavar="DIR_OR_URL")
    output: str = option(help="gs://BUCKET/NAME, s3://BUCKET/NAME or DIR", metavar="URL_OR_DIR")


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax copy-examples", DESCRIPTION, Options, arguments)
    size = copy(options.input, options.output, quiet=False)
    print(f"{options.output}: {size / 1e6:.1f} MB, every file verified by {output_files.SUMS}")
