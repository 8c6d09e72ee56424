"""A local copy of shards that are in an object store or on a slow disk, kept between runs and shared by them.

Training maps shards into memory, so they must be on a local disk. The copy of an output has its own folder in the
cache, CACHE/NAME-HASH with the hash of its manifest, so an output that was built again gets another folder. A copy is
used without reading it once its files have the sizes in the manifest; their hashes are checked while they are copied.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.data.manifest import MANIFEST, PARTS, Part, parse_manifest
from bert_jax.storage.local import wait_for_lock, write_atomic
from bert_jax.storage.remote import Folder, is_remote

_PARALLEL_FILES = 8  # a store takes a while to answer each request
_DIGITS = 12  # of the hash in a folder's name


def local_copy(address: str, cache_dir: str, parts: Sequence[Part], log: Callable[[str], object]) -> str:
    """Copies what the cache does not have yet, and returns the folder there that replaces `address`.

    address   the output of build_examples, or its train/ or eval/ folder: gs://, s3:// or a local path
    parts     the parts to copy, together with the tokenizer and the unigram counts; an address that ends in train/ or
              eval/ selects that part
    log       gets a line if anything is copied

    A process waits for another one that copies the same output; a call after a failure continues with the missing
    files. Raises UserError for an address that cannot be read or holds no finished output, a file that differs from
    the manifest, and a cache_dir that is not local; OSError if the disk is full.
    """
    if is_remote(cache_dir):
        raise UserError(f"data.cache_dir={cache_dir} is in an object store; choose a folder on a local disk")
    source, chosen = open_output(address)
    content = source.read(MANIFEST)
    manifest = parse_manifest(content, f"{source.address}/{MANIFEST}")
    name = source.address.rsplit("/", 1)[-1]
    folder = Path(os.path.abspath(cache_dir)) / f"{name}-{hashlib.sha256(content).hexdigest()[:_DIGITS]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as lock:
        if not wait_for_lock(lock):
            raise UserError(f"data.cache_dir={cache_dir} is on a file system without locks; choose one on a local disk")
        _complete(source, folder, manifest, (chosen,) if chosen else parts, log)
        if not (folder / MANIFEST).exists():  # written last, because a folder with a manifest can be opened
            write_atomic(folder / MANIFEST, content)
    return str(folder / chosen) if chosen else str(folder)


def open_output(address: str) -> tuple[Folder, Part | None]:
    """The output of build_examples that an address belongs to, and the part if the address ends in one."""
    output = Folder(address)
    parent, _, last = output.address.rpartition("/")
    if last in PARTS and output.read_if_present(MANIFEST) is None:
        return Folder(parent), "train" if last == "train" else "eval"
    return output, None


def _complete(
    source: Folder, folder: Path, manifest: Mapping[str, Any], parts: Sequence[Part], log: Callable[[str], object]
) -> None:
    """Copies the files that are missing or do not have their full size."""
    shards = [shard for shard in manifest["shards"] if shard["name"].startswith(tuple(f"{part}/" for part in parts))]
    hashes = {shard["name"]: shard["sha256"] for shard in shards}
    sizes = {shard["name"]: shard["bytes"] for shard in shards}
    others = [name for name in source.names("tokenizer") if ".." not in name.split("/")]
    sizes |= {name: source.size(name) for name in [*others, manifest["unigram_counts"]]}
    missing = [name for name, size in sizes.items() if _size(folder / name) != size]
    if not missing:
        return
    megabytes = sum(sizes[name] for name in missing) / 1e6
    log(f"copying {len(missing)} files of {source.address} to {folder} ({megabytes:,.1f} MB)")

    def fetch(name: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, source.verified_blocks(name, hashes.get(name), sizes[name]))

    with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
        list(pool.map(fetch, missing))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
