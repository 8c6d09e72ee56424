"""Builds all parts of a job at the same time, each in a process that reads its own files, and merges them.

The processes are on this machine, or those of an engine (engines/), which gets parts in place of units: a unit without
text, whose number is that of the part. Its worker reads the files of the part and returns the finished output, which
arrives in OUTPUT.parts/arriving and then gets its name in OUTPUT.parts.
"""

import dataclasses
import functools
import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from bert_jax import tokenizer as tokenizers
from bert_jax.command import UserError
from bert_jax.data.manifest import MANIFEST, PARTS, read_manifest
from bert_jax.progress import Reporter
from bert_jax.storage.local import lock, write_atomic
from bert_jax.storage.remote import is_remote
from data_prep import engines, processes
from data_prep.build_options import BuildOptions
from data_prep.engines.remote import KILLED
from data_prep.job import NOT_COMPARED
from data_prep.merge_shards import merge
from data_prep.readers import hub_dataset, tfds_corpus
from data_prep.readers.corpus import find_sources, patterns
from data_prep.resumable import check_arguments, own_folders, parts_folder, unit_folder
from data_prep.shares import Share, sources_of
from data_prep.unit_records import UnitRecord
from data_prep.units import Unit

ARRIVING = "arriving"


def build_parts(options: BuildOptions, output: Path, every: list[Share], *, quiet: bool) -> dict[str, Any]:
    """Builds --part all/N as N parts in OUTPUT.parts, which a later run resumes, and returns the merged manifest.

    Raises UserError for what is wrong with the options or the input, and if the system kills a process.
    """
    if options.engine != "local":
        _check_absolute(str(options.input))
    folder = parts_folder(output)
    arguments = _arguments(options, output, every)
    if folder.exists() and not (folder / "job").exists():
        raise UserError(f"{folder} exists and is no unfinished output. Move it, or choose another --output")
    unit_folder(folder).mkdir(parents=True, exist_ok=True)
    with lock(folder / "job" / "lock"):
        folders = {share: folder / _name(share) for share in every}
        missing = [share for share in every if not (folders[share] / MANIFEST).exists()]
        try:
            check_arguments(folder, arguments, begun=len(missing) < len(every))
            with Reporter("building parts", len(missing), ("parts", "M tokens"), quiet) as reporter:
                for tokens in (_run if options.engine == "local" else _run_elsewhere)(options, missing, folder):
                    reporter.advance(1, 1, tokens / 1e6)
        finally:
            if not any(folder.glob("*-of-*")):  # finished or begun
                shutil.rmtree(folder, ignore_errors=True)
        manifest = merge(list(folders.values()), output, quiet=quiet)
        shutil.rmtree(folder)
    return manifest


def _arguments(options: BuildOptions, output: Path, every: list[Share]) -> dict[str, Any]:
    """What decides the bytes of all parts, as JSON values. Raises UserError for mistakes that every part would find."""
    sources = find_sources(str(options.input), options.weights, own_folders(output))
    for share in every:
        sources_of(share, sources)
    tokenizer = tokenizers.load(options.tokenizer, options.lowercase)
    values = {name: value for name, value in vars(options).items() if name not in NOT_COMPARED}
    values |= {"unit_mb": options.unit_mb, "sources": sources, "tokenizer_hash": tokenizer.content_hash}
    found: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return found


def _name(share: Share) -> str:
    return f"{share.number}-of-{share.of}"


def _run(options: BuildOptions, missing: list[Share], folder: Path) -> Iterator[int]:
    """Builds parts on this machine, and yields the tokens of each that is finished."""
    parts = [
        dataclasses.replace(options, part=f"{share.number}/{share.of}", output=folder / _name(share), workers=1)
        for share in missing
    ]
    workers = min(options.workers or processes.cores(), len(parts))
    if workers <= 1:
        yield from map(build_part, parts)
        return
    with processes.open_pool(workers) as pool:
        try:
            for future in as_completed([pool.submit(build_part, part) for part in parts]):
                yield future.result()
        except BrokenProcessPool:
            raise UserError(f"{KILLED}, with fewer --workers") from None
        except BaseException:
            # Finished units are kept, so no process is waited for.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def build_part(part: BuildOptions, own: tuple[Path, ...] = ()) -> int:
    from data_prep.build_examples import build  # which imports this module

    build(part, own=own)
    return int(read_manifest(Path(part.output))["counts"]["source_tokens"])


def _run_elsewhere(options: BuildOptions, missing: list[Share], folder: Path) -> Iterator[int]:
    """Builds parts by the workers of an engine, and yields the tokens of each that is finished."""
    if not missing:
        return
    by_number = {share.number: share for share in missing}
    if options.token_cache is not None:  # workers have other current folders
        options = dataclasses.replace(options, token_cache=Path(os.path.abspath(options.token_cache)))
    work = functools.partial(build_elsewhere, options, by_number, folder)
    units = (Unit("train", number, (), "") for number in by_number)
    shutil.rmtree(folder / ARRIVING, ignore_errors=True)  # what an earlier run did not receive whole
    for share in missing:
        for name in (*PARTS, "tokenizer"):
            (folder / ARRIVING / _name(share) / name).mkdir(parents=True)
    tokenizers.load(options.tokenizer, options.lowercase).save(folder / "tokenizer")
    given = options.engine_options
    for record in engines.run(options.engine, work, units, options.workers, directory=folder, options=given):
        name = _name(by_number[record.number])
        (folder / ARRIVING / name).rename(folder / name)
        yield record.counts["source_tokens"]


def build_elsewhere(
    options: BuildOptions, shares: dict[int, Share], parts: Path, directory: Path, unit: Unit
) -> UnitRecord:
    """On a worker of an engine: builds the part with the number of a unit, in the folder of a job there.

    parts   the folder of all parts, which --input may also match
    """
    share = shares[unit.number]
    part = dataclasses.replace(
        options,
        part=f"{share.number}/{share.of}",
        output=directory / ARRIVING / _name(share),
        tokenizer=directory / "tokenizer",
        lowercase=None,
        workers=1,
        engine="local",
        engine_options="",
    )
    record = UnitRecord(unit.name, "", {"source_tokens": build_part(part, own=(parts,))}, {}, [])
    write_atomic(unit_folder(directory) / f"{record.name}.json", json.dumps(record._asdict()).encode())
    return record


def _check_absolute(given: str) -> None:
    """Raises UserError for a relative path, which workers would look for in folders of their own."""
    for pattern in patterns(given):
        elsewhere = is_remote(pattern) or pattern.startswith(tfds_corpus.PREFIX) or hub_dataset.is_name(pattern)
        if not elsewhere and not os.path.isabs(pattern):
            raise UserError(
                f"--input {pattern}: the workers of an engine read the files of their parts themselves. Give an "
                "absolute path, or an address, that all of them and this machine can reach"
            )
