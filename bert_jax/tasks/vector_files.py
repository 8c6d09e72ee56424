"""Writes the vectors of a file's texts as a folder of shards, and resumes if that was interrupted.

DIR.incomplete holds job.json, what the vectors depend on, and the complete shards; the same call skips their texts. The
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
from bert_jax.tasks.embedder import TEXT_POOLS, Embedder, EncodeOptions, report_truncated, settings_of
from bert_jax.tasks.reading.inputs import Texts, files_read, read_stream

FORMATS = ("npy", "parquet")
DTYPES = ("float32", "float16")
# Readers of Parquet folders skip names that begin with an underscore.
JOB, MANIFEST, LOCK = "job.json", "_manifest.json", ".lock"
HASH = "_sha256"  # ends the names of what is compared by its content
TEXTS_AT_ONCE = 4096  # encoded and embedded together; it bounds the memory of long texts


def converted(vectors: np.ndarray, dtype: str, flag: str) -> np.ndarray:
    """The vectors in the dtype that the flag sets; the same array if it has that dtype already.

    Raises UserError for a finite value that becomes infinite.
    """
    if vectors.dtype == dtype:
        return vectors
    with np.errstate(over="ignore"):
        found = vectors.astype(dtype)
    for first in range(0, len(found), TEXTS_AT_ONCE):
        part = slice(first, first + TEXTS_AT_ONCE)
        if (np.isinf(found[part]) & np.isfinite(vectors[part])).any():
            raise _too_large(found.dtype, flag)
    return found


def check_range(vectors: np.ndarray, flag: str, where: str = "") -> None:
    """Raises UserError for values that are not finite, since their dtype, which the flag sets, does not hold them."""
    if not np.isfinite(vectors).all():
        raise _too_large(vectors.dtype, flag, where)


def _too_large(dtype: np.dtype, flag: str, where: str = "") -> UserError:
    return UserError(f"{where}a value is too large for {dtype}. Use {flag} float32")


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
    """Writes a vector of each text, and returns the content of _manifest.json: job, count, width, and the shards.

    Shards vectors-00000.npy hold [shard_size, width]; those of Parquet the columns `row`, the number of the text from
    0, and `embedding`, a list of fixed size. job says what the vectors depend on. Raises UserError if the output
    exists, if DIR.incomplete is that of another job, and for an input without texts.
    """
    refuse_existing(output)
    first = list(islice(texts, 1))  # before anything is written, which could only be resumed by the same command
    if not first:
        raise UserError("the input has no texts. Write one on each line")
    texts = chain(first, texts)
    folder = incomplete_path(output)
    folder.mkdir(parents=True, exist_ok=True)
    job = {**job, "format": format, "dtype": dtype, "shard_size": shard_size}
    with lock(folder / LOCK):
        _check_job(folder, job)
        names = sorted(path.name for path in folder.glob(f"vectors-*.{format}"))
        done = sum(1 for _ in islice(texts, len(names) * shard_size))
        count, width = done, 0
        while shard := _embedded(texts, embed, shard_size, dtype):
            name = f"vectors-{len(names):05}.{format}"
            write_atomic(folder / name, _npy(shard) if format == "npy" else _parquet(shard, count))
            names.append(name)
            count, width = count + sum(map(len, shard)), shard[0].shape[1]
            shard.clear()  # before the next one takes as much memory
            print_note(f"{folder / name}: {count} texts so far")
        manifest = {**job, "count": count, "width": width or _width(folder / names[-1]), "shards": names}
        write_json(folder / MANIFEST, manifest)
        folder.rename(output)
        for name in (JOB, LOCK):  # afterwards, so that a kill leaves what the same command continues
            (output / name).unlink(missing_ok=True)
    return manifest


def _check_job(folder: Path, job: Mapping[str, Any]) -> None:
    if not (folder / JOB).exists():
        if any(path.name != LOCK for path in folder.iterdir()):
            raise UserError(f"{folder} exists and is no unfinished output. Move it, or choose another --output")
        write_json(folder / JOB, job)
        return
    before = read_json(folder / JOB)
    if changed := [name for name in job if before.get(name) != job[name]]:
        if changed[0].endswith(HASH):
            what = changed[0].removesuffix(HASH)
            raise UserError(f"{folder} was begun with another {what}. Remove it, or choose another --output")
        raise UserError(
            f"{folder} was begun with {changed[0]}={before.get(changed[0])!r}, not {job[changed[0]]!r}. Run the same "
            "command to resume it, or remove it"
        )


def _embedded(
    texts: Iterator[Texts], embed: Callable[[Sequence[Texts]], np.ndarray], size: int, dtype: str
) -> list[np.ndarray]:
    """The vectors of the next `size` texts, in parts."""
    parts: list[np.ndarray] = []
    while size and (window := list(islice(texts, min(TEXTS_AT_ONCE, size)))):
        parts.append(converted(embed(window), dtype, "--dtype"))
        size -= len(window)
    return parts


def _npy(shard: Sequence[np.ndarray]) -> Iterator[bytes | memoryview]:
    """The blocks of a file of NumPy, without a copy of the vectors."""
    shape = (sum(map(len, shard)), shard[0].shape[1])
    header = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(shard[0].dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, about)
    yield header.getbuffer()
    for part in shard:
        yield np.ascontiguousarray(part).data


def _parquet(shard: Sequence[np.ndarray], first: int) -> memoryview:
    """The content of a Parquet file of vectors whose first row has this number."""
    width, count = shard[0].shape[1], sum(map(len, shard))
    lists = [pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(part.ravel()), width) for part in shard]
    columns = {"row": pyarrow.array(np.arange(first, first + count)), "embedding": pyarrow.chunked_array(lists)}
    content = io.BytesIO()
    pq.write_table(pyarrow.table(columns), content)
    return content.getbuffer()


def _width(path: Path) -> int:
    if path.suffix == ".npy":
        return int(np.load(path, mmap_mode="r").shape[1])
    return int(pq.read_schema(path).field("embedding").type.list_size)


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
    """Writes the vectors of the texts of a file to a folder of shards, and returns its manifest .

    options are those of EncodeOptions. Memory does not depend on the number of texts. An interrupted call is resumed by
    the same call. Raises UserError as embed, read_stream and write_vectors do.
    """
    source, output = Path(source), Path(output)
    texts = read_stream(source, form, text, text_pair)
    files = input_files(source, form)
    refuse_existing(output)
    loaded = checkpoint if isinstance(checkpoint, LoadedModel) else open_checkpoint(checkpoint, average)
    encoding = from_keywords(EncodeOptions, options)
    found = settings_of(loaded, encoding)
    if found.pool not in TEXT_POOLS:
        raise UserError(f"--format {format} is for one vector per text, but --pool is {found.pool}. Use --format npz")
    model = Embedder(loaded, found, batch_size=encoding.batch_size, compute_dtype=encoding.compute_dtype)
    job = {
        "checkpoint": loaded.origin,
        "step": loaded.step,
        "average": average,
        "input": str(source),
        "input_bytes": sum(file.stat().st_size for file in files if file.exists()),
        f"input{HASH}": _sha256_of_files(files),
        f"model{HASH}": _sha256_of_model(loaded),
        "form": form,
        "columns": [text, text_pair],
        "compute_dtype": encoding.compute_dtype,
        **dataclasses.asdict(found),
    }
    manifest = write_vectors(texts, model.vectors, output, job=job, format=format, dtype=dtype, shard_size=shard_size)
    report_truncated(model, manifest["count"])
    return manifest


def _sha256_of_files(files: Sequence[Path]) -> str:
    """The hash of the hashes of files. That of a pipe is random, because what it held cannot be compared."""
    digest = hashlib.sha256()
    for path in files:
        if not path.is_file():
            digest.update(os.urandom(8))
            continue
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _sha256_of_model(loaded: LoadedModel) -> str:
    """The hash of parameters and tokenizer."""
    digest = hashlib.sha256(loaded.vocabulary.content_hash.encode())
    for path in sorted(loaded.params):
        digest.update(path.encode() + b"\0")
        digest.update(np.ascontiguousarray(loaded.params[path]).data)
    return digest.hexdigest()


def input_files(source: Path, form: str) -> list[Path]:
    """The files of the input. Prints that they are several."""
    files = files_read(source, form)
    if len(files) > 1:
        for line in measurement.file_remarks(source):
            print_note(line)
    return files


def write_arrays(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Writes a .npz file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_atomic(path, content.getbuffer())
