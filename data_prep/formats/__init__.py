"""The formats of shards: Arrow for training here, TFDS and TFRecord for readers elsewhere (docs/data_format.md)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.command import UserError
from bert_jax.data.example import Rows
from bert_jax.data.shards import read_shard, write_shard

ReadShard = Callable[[Path], Rows]


class Format(NamedTuple):
    """How shards of one format are written and read.

    `write` writes rows to a path whole or not at all, and returns what the manifest says of it, but its name.
    `reader` makes, from a manifest, the function that reads a shard of it; that raises
    bert_jax.data.shards.Corrupt for a file that is not of the format. `finish` is called when all shards are there,
    before the manifest is written: it may add files, and rename shards in the folder and in the manifest alike.
    """

    suffix: str
    write: Callable[[Path, Rows], dict[str, Any]]
    reader: Callable[[Mapping[str, Any]], ReadShard]
    finish: Callable[[Path, dict[str, Any]], None]


def _write_arrow(path: Path, rows: Rows) -> dict[str, Any]:
    return dict(write_shard(path, rows)._asdict())


def _arrow() -> Format:
    return Format(".arrow", _write_arrow, lambda manifest: read_shard, lambda directory, manifest: None)


def _tfds() -> Format:
    from data_prep.formats import tfds

    return Format(tfds.UNNUMBERED, tfds.write, tfds.reader, tfds.finish)


def _tfrecord() -> Format:
    from data_prep.formats import tfrecord

    return Format(".tfrecord", tfrecord.write, tfrecord.reader, lambda directory, manifest: None)


# Each is imported where it is asked for.
FORMATS: dict[str, Callable[[], Format]] = {"arrow": _arrow, "tfds": _tfds, "tfrecord": _tfrecord}


def check(format: str, masking: str, pack: int) -> None:
    """Raises UserError for a format that is not here, or that has no place for rows of these options."""
    if format not in FORMATS:
        raise UserError(f"--format {format} is not here; there is: {', '.join(FORMATS)}")
    if format == "tfrecord" and masking != "static":
        raise UserError(f"--format tfrecord holds masked rows, not --masking {masking}; give --masking static")
    if format == "tfrecord" and pack > 1:
        raise UserError(f"--format tfrecord holds one sequence a row, not --pack {pack}; leave out --pack")


def write(format: str, directory: Path, stem: str, rows: Rows) -> dict[str, Any]:
    """Writes the shard directory/stem (a part and a name, as train/shard-00000), and returns its manifest entry."""
    suffix, write_rows, _, _ = FORMATS[format]()
    return {"name": stem + suffix} | write_rows(directory / (stem + suffix), rows)


def reader(manifest: Mapping[str, Any]) -> ReadShard:
    """The function that reads a shard of a manifest's folder. Raises UserError for a format that is not here."""
    if manifest["format"] not in FORMATS:
        there = ", ".join(FORMATS)
        raise UserError(f"shards of format {manifest['format']!r} are not read here; there is: {there}")
    return FORMATS[manifest["format"]]().reader(manifest)
