"""The formats of shards: Arrow for training, TFDS and TFRecord for other programs (docs/data_format.md)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bert_jax.command import UserError
from bert_jax.data.example import Rows
from bert_jax.data.shards import read_shard, write_shard

ReadShard = Callable[[Path], Rows]


class Format(NamedTuple):
    """How shards of one format are written and read.

    `write` writes rows to a path, completely or not at all, and returns the shard's entry in the manifest without its
    name. `reader` takes a manifest and returns the function that reads one of its shards, which raises
    bert_jax.data.shards.Corrupt for a file that is not of the format. `finish` is called when all shards exist,
    before the manifest is written: it may add files, and rename shards in both the folder and the manifest.
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


# A format is imported only when it is used, because the libraries of some take long to load.
FORMATS: dict[str, Callable[[], Format]] = {"arrow": _arrow, "tfds": _tfds, "tfrecord": _tfrecord}


def check(format: str, masking: str, pack: int) -> None:
    """Raises UserError for an unknown format, or one that cannot hold rows with these options."""
    if format not in FORMATS:
        raise UserError(f"unknown --format {format}; choose from {', '.join(FORMATS)}")
    if format == "tfrecord" and masking != "static":
        raise UserError(f"--format tfrecord holds masked rows; use --masking static, not {masking}")
    if format == "tfrecord" and pack > 1:
        raise UserError(f"--format tfrecord holds one sequence in a row, not --pack {pack}; leave out --pack")


def write(format: str, directory: Path, stem: str, rows: Rows) -> dict[str, Any]:
    """Writes the shard directory/stem (a part and a name, as train/shard-00000), and returns its manifest entry."""
    suffix, write_rows, _, _ = FORMATS[format]()
    return {"name": stem + suffix} | write_rows(directory / (stem + suffix), rows)


def reader(manifest: Mapping[str, Any]) -> ReadShard:
    """The function that reads a shard of a manifest's folder. Raises UserError for an unknown format."""
    if manifest["format"] not in FORMATS:
        raise UserError(f"unknown shard format {manifest['format']!r}; expected one of {', '.join(FORMATS)}")
    return FORMATS[manifest["format"]]().reader(manifest)
