"""Builds all parts of a job at the same time, each in a process that reads its own files, and merges them."""

import dataclasses
import multiprocessing
import shutil
from collections.abc import Iterator
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from bert_jax.command import UserError
from bert_jax.data.manifest import MANIFEST, read_manifest
from bert_jax.progress import Reporter
from data_prep import processes
from data_prep.build_options import BuildOptions
from data_prep.engines.remote import KILLED
from data_prep.merge_shards import merge
from data_prep.shares import Share


def build_parts(options: BuildOptions, output: Path, every: list[Share], *, quiet: bool) -> dict[str, Any]:
    """Builds --part all/N as N parts in OUTPUT.parts, which a later run resumes, and returns the merged manifest.

    Raises UserError for what is wrong with the options or the input, and if the system kills a process.
    """
    folder = output.with_name(output.name + ".parts")
    folders = {share: folder / f"{share.number}-of-{share.of}" for share in every}
    missing = [share for share in every if not (folders[share] / MANIFEST).exists()]
    folder.mkdir(parents=True, exist_ok=True)
    ours = [
        dataclasses.replace(options, part=f"{share.number}/{share.of}", output=folders[share], workers=1)
        for share in missing
    ]
    with Reporter("building parts", len(every), ("parts", "M tokens"), quiet) as reporter:
        reporter.advance(len(every) - len(missing), 0, 0)
        for tokens in _run(ours, min(options.workers or processes.cores(), len(ours))):
            reporter.advance(1, 1, tokens / 1e6)
    manifest = merge(list(folders.values()), output, quiet=quiet)
    shutil.rmtree(folder)
    return manifest


def _run(parts: list[BuildOptions], workers: int) -> Iterator[int]:
    """Builds parts, and yields the tokens of each that is finished."""
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


def build_part(part: BuildOptions) -> int:
    from data_prep.build_examples import build  # which imports this module

    build(part)
    return int(read_manifest(Path(part.output))["counts"]["source_tokens"])
