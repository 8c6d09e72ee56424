"""Writes the vectors of a file's texts to a folder of shards, and resumes an interrupted run.

DIR.incomplete holds job.json, which describes the run, and the complete shards, whose texts the same call skips. The
folder appears under its own name when it is complete (law 7), with _manifest.json in the place of job.json.
"""

import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as pq

from bert_jax.config.options import from_keywords
from bert_jax.errors import UserError
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.progress import print_note
from bert_jax.storage.files import incomplete_path, lock, read_json, refuse_existing, write_atomic, write_json
from bert_jax.tasks import measurement
from bert_jax.tasks.embedder import TOKEN_POOLS, Embedder, EncodeOptions, report_truncated, vector_settings
from bert_jax.tasks.reading.inputs import Texts, files_read, read_stream

FORMATS = ("npy", "parquet")
DTYPES = ("float32", "float16")
# Readers of Parquet folders skip names that begin with an underscore.
JOB, MANIFEST, LOCK = "job.json", "_manifest.json", ".lock"
HASH = "_sha256"  # ends the names of what is compared by its content
TEXTS_AT_ONCE = 4096  # encoded and embedded together; it bounds the memory of long texts


def converted(vectors: np.ndarray, dtype: str, flag: str) -> np.ndarray:
    """Converts vectors to a flag's dtype; returns the same array if it has that dtype already.

    Raises:
        UserError: A finite value becomes infinite.
    """
    if vectors.dtype == dtype:
        return vectors
    # The check below reports an overflow, and the flag that avoids it.
    with np.errstate(over="ignore"):
        result = vectors.astype(dtype)
    # In parts, because the masks of a whole array may not fit in memory next to it.
    for first in range(0, len(result), TEXTS_AT_ONCE):
        part = slice(first, first + TEXTS_AT_ONCE)
        check_range(~np.isinf(result[part]) | ~np.isfinite(vectors[part]), result.dtype, flag)
    return result


def check_range(in_range: np.ndarray, dtype: Any, flag: str, source: str = "") -> None:
    """Raises UserError unless all values are in the range of the dtype, which a flag sets."""
    if not in_range.all():
        raise UserError(f"{source}a value is too large for {dtype}. Use {flag} float32")


def write_vectors(
    texts: Iterator[Texts],
    embed: Callable[[Sequence[Texts]], np.ndarray],
    output: Path,
    *,
    job: Mapping[str, Any],
    format: str = "npy",
    dtype: str = "float32",
    shard_size: int = 65536,
) -> dict[str, Any]:
    """Writes one vector per text to shards, and returns the content of _manifest.json: job, count, width, shards.

    A shard vectors-00000.npy holds [shard_size, width]. One of Parquet has the columns `row`, the text's number from
    0, and `embedding`, a list of fixed size. `job` describes the run.

    Raises:
        UserError: The output exists, DIR.incomplete belongs to another job, or there are no texts.
    """
    refuse_existing(output)
    # Before anything is written, which only the same command could resume.
    first = list(islice(texts, 1))
    if not first:
        raise UserError("the input has no texts. Write one on each line")
    texts = chain(first, texts)
    folder = incomplete_path(output)
    folder.mkdir(parents=True, exist_ok=True)
    job = {**job, "format": format, "dtype": dtype, "shard_size": shard_size}
    with lock(folder / LOCK):
        _check_job(folder, job)
        # Shards appear whole, by rename, so that all of those which exist are complete.
        names = sorted(path.name for path in folder.glob(f"vectors-*.{format}"))
        # Skips the texts of complete shards. They are counted, because the last shard may be smaller.
        count, width = sum(1 for _ in islice(texts, len(names) * shard_size)), 0
        while shard := _next_shard(texts, embed, shard_size, dtype):
            name = f"vectors-{len(names):05}.{format}"
            write_atomic(folder / name, _npy(shard) if format == "npy" else _parquet(shard, count))
            names.append(name)
            count, width = count + sum(map(len, shard)), shard[0].shape[1]
            shard.clear()  # before the next one takes as much memory
            print_note(f"{folder / name}: {count} texts so far")
        if not width:  # an interrupted run had written all shards
            last = folder / names[-1]
            width = int(
                np.load(last, mmap_mode="r").shape[1]
                if format == "npy"
                else pq.read_schema(last).field("embedding").type.list_size
            )
        manifest = {**job, "count": count, "width": width, "shards": names}
        write_json(folder / MANIFEST, manifest)
        folder.rename(output)
        # After the rename, so that the same command can resume if it is killed before.
        for name in (JOB, LOCK):
            (output / name).unlink(missing_ok=True)
    return manifest


def _check_job(folder: Path, job: Mapping[str, Any]) -> None:
    """Writes job.json to an empty folder; raises UserError for a folder with another job or none."""
    if not (folder / JOB).exists():
        # This call has just created the lock.
        if any(path.name != LOCK for path in folder.iterdir()):
            raise UserError(
                f"{folder} exists and was not left by an interrupted run. Move it, or choose another --output"
            )
        write_json(folder / JOB, job)
        return
    before = read_json(folder / JOB)
    if changed := next((name for name in job if before.get(name) != job[name]), ""):
        # Hashes tell users nothing, so only their names are shown.
        values = f"{changed}={before.get(changed)!r}, not {job[changed]!r}"
        begun = f"another {changed.removesuffix(HASH)}" if changed.endswith(HASH) else values
        raise UserError(
            f"{folder} was begun with {begun}. Remove it, choose another --output, or run the same command to resume it"
        )


def _next_shard(
    texts: Iterator[Texts], embed: Callable[[Sequence[Texts]], np.ndarray], size: int, dtype: str
) -> list[np.ndarray]:
    """Embeds the next `size` texts, in parts."""
    parts: list[np.ndarray] = []
    while size and (window := list(islice(texts, min(TEXTS_AT_ONCE, size)))):
        parts.append(converted(embed(window), dtype, "--dtype"))
        size -= len(window)
    return parts


def _npy(shard: Sequence[np.ndarray]) -> Iterator[bytes | memoryview]:
    """Yields the blocks of a NumPy file, without copying the vectors."""
    shape = (sum(map(len, shard)), shard[0].shape[1])
    header = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(shard[0].dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, about)
    yield header.getbuffer()
    for part in shard:
        yield np.ascontiguousarray(part).data


def _parquet(shard: Sequence[np.ndarray], first: int, more: Mapping[str, Sequence[str]] | None = None) -> memoryview:
    """Makes a Parquet file whose first row has this number, with more columns of texts."""
    width, count = shard[0].shape[1], sum(map(len, shard))
    lists = [pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(part.ravel()), width) for part in shard]
    columns = {"row": pyarrow.array(np.arange(first, first + count)), "embedding": pyarrow.chunked_array(lists)}
    content = io.BytesIO()
    pq.write_table(pyarrow.table({**columns, **(more or {})}), content)
    return content.getbuffer()


def embed_file(
    checkpoint: str | Path | LoadedModel,
    source: str | Path,
    output: str | Path,
    *,
    format: str = "npy",
    dtype: str = "float32",
    shard_size: int = 65536,
    form: str = "auto",
    text: str = "",
    text_pair: str = "",
    average: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Embeds the texts in a file to a folder of shards, and returns its manifest.

    Memory does not depend on the number of texts. If a call is interrupted, the same call resumes it.

    Args:
        options: Those of EncodeOptions.

    Raises:
        UserError: As in embed, read_stream and write_vectors.
    """
    source, output = Path(source), Path(output)
    # Mistakes in the input and the output come before the model, which takes longer to open.
    texts = read_stream(source, form, text, text_pair)
    files = input_files(source, form)
    refuse_existing(output)
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    encoding = from_keywords(EncodeOptions, options)
    chosen = vector_settings(loaded, encoding)
    if chosen.pool in TOKEN_POOLS:
        raise UserError(f"--format {format} is for one vector per text, but --pool is {chosen.pool}. Use --format npz")
    model = Embedder(loaded, chosen, batch_size=encoding.batch_size, compute_dtype=encoding.compute_dtype)
    # Paths and steps may be the same for other content, so the content is compared too.
    parameters = hashlib.sha256(loaded.vocabulary.content_hash.encode())
    for path in sorted(loaded.params):
        parameters.update(path.encode() + b"\0")
        parameters.update(np.ascontiguousarray(loaded.params[path]).data)
    job = {
        "checkpoint": loaded.origin,
        "step": loaded.step,
        "average": average,
        "input": str(source),
        "input_bytes": sum(file.stat().st_size for file in files if file.exists()),
        f"input{HASH}": _sha256_of_files(files),
        f"model{HASH}": parameters.hexdigest(),
        "form": form,
        "columns": [text, text_pair],
        "compute_dtype": encoding.compute_dtype,
        **dataclasses.asdict(chosen),
    }
    manifest = write_vectors(texts, model.vectors, output, job=job, format=format, dtype=dtype, shard_size=shard_size)
    report_truncated(model, manifest["count"])
    return manifest


def _sha256_of_files(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        if not path.is_file():
            # A pipe cannot be read twice, so no run resumes another one that reads a pipe.
            digest.update(os.urandom(8))
            continue
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def input_files(source: Path, form: str) -> list[Path]:
    """Lists the files of an input, and prints a note if there are several."""
    files = files_read(source, form)
    if len(files) > 1:
        for line in measurement.file_remarks(source):
            print_note(line)
    return files


def write_table(arrays: Mapping[str, np.ndarray], texts: Sequence[Texts], path: Path) -> None:
    """Writes the columns row, embedding and text (text_pair) to a Parquet file, atomically.

    Raises:
        UserError: There is not one vector per text.
    """
    if "offsets" in arrays:
        raise UserError(f"{path} is for one vector per text. Use --pool mean or cls, or write FILE.npz")
    columns = dict(zip(("text", "text_pair"), map(list, zip(*texts, strict=True)), strict=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, _parquet([arrays["embeddings"]], 0, columns))


def write_arrays(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Writes a .npz file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_atomic(path, content.getbuffer())
