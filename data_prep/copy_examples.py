"""An output to or from an object store: every byte checked on the way, the manifest last."""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

from pyarrow import fs

from bert_jax import command
from bert_jax.command import Parser, UserError
from bert_jax.data.manifest import MANIFEST
from bert_jax.files import new_folder, refuse_inside
from data_prep import checksums
from data_prep.progress import Reporter
from data_prep.readers import places

_BLOCK = 1 << 22
_AT_ONCE = 8  # files under way; a store answers each after a while

DESCRIPTION = """\
Copies an output of data_prep.build_examples to an object store, or from one; or between two folders.

  python -m data_prep.copy_examples --input data/books --output gs://bucket/books
  python -m data_prep.copy_examples --input s3://bucket/books --output data/books

Each file is hashed as it is read, and compared with SHA256SUMS; its size is checked where it arrived. manifest.json is
written last: an output without one is not whole. A copy that was stopped is begun again by the same command.
Credentials are those of the stores' own tools (AWS_PROFILE, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, ...).
"""


def copy(input: str, output: str, *, quiet: bool = True) -> int:
    """Copies as the command does, and returns how many bytes the output has.

    Raises UserError for an input that is no finished output or is damaged, an output that exists, and a store that
    cannot be read or written.
    """
    if not places.is_remote(input) and not places.is_remote(output):
        refuse_inside(Path(os.path.abspath(output)), Path(os.path.abspath(input)))
    source = _Place(input)
    listed = checksums.parse(source.read(checksums.SUMS), f"{input}/{checksums.SUMS}")
    sizes = {name: source.size(name) for name in [*listed, checksums.SUMS]}
    if MANIFEST not in listed:
        raise UserError(f"damaged {input}/{checksums.SUMS}: it does not list {MANIFEST}; copy the folder again")
    with _target(output, set(sizes)) as target, Reporter("copying", sum(sizes.values()), ["MB"], quiet) as reporter:
        done = 0
        # The manifest says that all is there.
        for names in (sorted(set(listed) - {MANIFEST}), [checksums.SUMS], [MANIFEST]):
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                for size in pool.map(lambda name: _copy_file(source, target, name, listed.get(name)), names):
                    done += size
                    reporter.update(done, done / 1e6)
    return done


class _Place:
    """A folder, or what a store has under an address. Raises UserError for what the store refuses."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        if places.is_remote(address):
            self._store, path = places.open_store(address)
            self._path = path.rstrip("/")
        else:
            self._store, self._path = fs.LocalFileSystem(), os.path.abspath(self.address)

    def files(self) -> set[str]:
        with self._explained(""):
            selector = fs.FileSelector(self._path, allow_not_found=True, recursive=True)
            found = [info.path for info in self._store.get_file_info(selector) if info.is_file]
        return {path.removeprefix(self._path).lstrip("/") for path in found}

    def size(self, name: str) -> int:
        with self._explained(name):
            info = self._store.get_file_info(f"{self._path}/{name}")
        if not info.is_file:
            raise UserError(f"{self.address}/{name} is missing. Name a finished output of data_prep.build_examples")
        return cast(int, info.size)

    def read(self, name: str) -> bytes:
        return b"".join(self.blocks(name))

    def blocks(self, name: str) -> Iterator[bytes]:
        if not self.size(name):
            return
        with self._explained(name), self._store.open_input_stream(f"{self._path}/{name}", compression=None) as stream:
            while block := stream.read(_BLOCK):
                yield block

    def write(self, name: str, blocks: Iterator[bytes]) -> None:
        """Where the store is one of objects, a file is there when it is closed, and not before."""
        path = f"{self._path}/{name}"
        with self._explained(name):
            if self._store.type_name not in ("s3", "gcs"):  # these have no folders
                self._store.create_dir(path.rsplit("/", 1)[0], recursive=True)
            with self._store.open_output_stream(path, compression=None) as stream:
                for block in blocks:
                    stream.write(block)

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.address}/{name}: {places.first_line(error)}. Check the address, the credentials and the space"
            ) from None


@contextlib.contextmanager
def _target(output: str, names: set[str]) -> Iterator[_Place]:
    """Where files may be written. A store may hold what a stopped copy of these files left, and nothing else."""
    if not places.is_remote(output):
        with new_folder(Path(os.path.abspath(output))) as folder:
            yield _Place(str(folder))
        return
    target = _Place(output)
    there = target.files()
    if MANIFEST in there:
        raise UserError(f"output {output} exists. Name another --output, or remove it first")
    if others := there - names:
        raise UserError(f"{output} holds {min(others)}, which is no part of the output. Name another --output")
    yield target


def _copy_file(source: _Place, target: _Place, name: str, wanted: str | None) -> int:
    digest, size = hashlib.sha256(), 0

    def hashed() -> Iterator[bytes]:
        nonlocal size
        for block in source.blocks(name):
            digest.update(block)
            size += len(block)
            yield block
        if wanted is not None and digest.hexdigest() != wanted:
            raise UserError(
                f"damaged {source.address}/{name}: its sha256 is not that of {checksums.SUMS}; "
                "copy or build the input again"
            )

    target.write(name, hashed())
    if (stored := target.size(name)) != size:
        raise UserError(f"{target.address}/{name} has {stored} bytes where {size} were written; copy again")
    return size


def main(arguments: Sequence[str]) -> None:
    parser = Parser("data_prep.copy_examples", DESCRIPTION)
    parser.add_argument("--input", required=True, metavar="DIR_OR_URL", help="a finished output")
    parser.add_argument(
        "--output", required=True, metavar="URL_OR_DIR", help="gs://BUCKET/NAME, s3://BUCKET/NAME or DIR"
    )
    given = parser.parse_args(arguments)
    size = copy(given.input, given.output, quiet=False)
    print(f"{given.output}: {size / 1e6:.1f} MB, every file as {checksums.SUMS} says")


if __name__ == "__main__":
    command.run(main)
