"""A local copy of shards that lie in an object store or on a slow disk, kept between runs and shared by them.

Training maps shards into memory, so they have to lie on a disk of the machine. The copy of an output has a folder of
its own in the cache, CACHE/NAME-HASH by the hash of its manifest, and is used as it is once its files have the sizes
that the manifest says: an output that was built anew is another folder. What is copied is hashed on the way.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.data.manifest import MANIFEST, PARTS, Part, parse_manifest
from bert_jax.files import write_whole
from bert_jax.stores import Place, is_remote

_AT_ONCE = 8  # files under way; a store answers each after a while
_DIGITS = 12  # of the hash in a folder's name


def local_copy(address: str, cache_dir: str, parts: Sequence[Part], say: Callable[[str], object]) -> str:
    """Copies what is not in the cache yet, and returns the folder there, in the place of `address`.

    address   the output of build_examples, or its train/ or eval/: gs://, s3:// or a path
    parts     what of it is wanted, beside the tokenizer; train/ or eval/ at the end of the address decides otherwise
    say       is told what is going to be copied
    A process waits for another that copies the same. Raises UserError for an address that cannot be read or holds no
    finished output, a file that does not arrive as the manifest says, and a cache_dir that is not local; OSError for a
    full disk. The same call then goes on with what is missing.
    """
    if is_remote(cache_dir):
        raise UserError(f"data.cache_dir={cache_dir} is in an object store; name a folder on a disk of this machine")
    source, chosen = _open(address)
    content = source.read(MANIFEST)
    manifest = parse_manifest(content, f"{source.address}/{MANIFEST}")
    name = source.address.rsplit("/", 1)[-1]
    folder = Path(os.path.abspath(cache_dir)) / f"{name}-{hashlib.sha256(content).hexdigest()[:_DIGITS]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _complete(source, folder, manifest, (chosen,) if chosen else parts, say)
        if not (folder / MANIFEST).exists():  # the last: a folder with it can be opened
            write_whole(folder / MANIFEST, content)
    return str(folder / chosen) if chosen else str(folder)


def _open(address: str) -> tuple[Place, Part | None]:
    """The output that an address is of, and the part at the address's end."""
    place = Place(address)
    above, _, last = place.address.rpartition("/")
    if last in PARTS and not place.has(MANIFEST):
        return Place(above), "train" if last == "train" else "eval"
    return place, None


def _complete(
    source: Place, folder: Path, manifest: Mapping[str, Any], parts: Sequence[Part], say: Callable[[str], object]
) -> None:
    """Copies the files that are not there in full."""
    shards = [shard for shard in manifest["shards"] if shard["name"].startswith(tuple(f"{part}/" for part in parts))]
    hashes = {shard["name"]: shard["sha256"] for shard in shards}
    sizes = {shard["name"]: shard["bytes"] for shard in shards}
    others = [name for name in source.files("tokenizer") if ".." not in name.split("/")]
    sizes |= {name: source.size(name) for name in [*others, manifest["unigram_counts"]]}
    missing = [name for name, size in sizes.items() if _size(folder / name) != size]
    if not missing:
        return
    megabytes = sum(sizes[name] for name in missing) / 1e6
    say(f"copying {len(missing)} files of {source.address} to {folder} ({megabytes:,.1f} MB)")

    def fetch(name: str) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(target, source.blocks(name), f"{source.address}/{name}", sizes[name], hashes.get(name))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(fetch, missing))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _write(target: Path, blocks: Iterator[bytes], origin: str, size: int, sha256: str | None) -> None:
    """Writes a file under a temporary name, and renames it once it is what it should be."""
    unfinished = target.with_name(f"{target.name}.tmp")
    digest, written = hashlib.sha256(), 0
    try:
        with unfinished.open("wb") as file:
            for block in blocks:
                digest.update(block)
                written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
        if written != size or sha256 not in (None, digest.hexdigest()):
            raise UserError(
                f"damaged {origin}: {written} bytes of sha256 {digest.hexdigest()[:_DIGITS]}, wanted were {size} of "
                f"{(sha256 or 'any')[:_DIGITS]}; copy or build it again"
            )
        unfinished.replace(target)
    except OSError as error:
        error.filename = error.filename or str(target)
        raise
    finally:
        unfinished.unlink(missing_ok=True)
