"""TFDS datasets that are prepared already, read without TensorFlow: tfds:NAME[:SPLIT].

NAME is as TFDS has it ("wikipedia/20230601.en:1.0.0"), or the folder of a prepared version. SPLIT is "train" unless
given, and may be a slice ("train[:10%]").
"""

import os
import re
from typing import Any

from bert_jax.command import UserError
from data_prep.readers.places import first_line
from data_prep.readers.refusal import Items, Refusal, check
from data_prep.readers.streams import OnRead, damaged, nothing

PREFIX = "tfds:"
_NAME = re.compile(r"tfds:(?P<name>[^:]+(?::(?:\d+|\*)\.(?:\d+|\*)\.(?:\d+|\*))?)(?::(?P<split>[^:]+(?:\[[^\]]*\])?))?")


def size(address: str) -> int:
    """The bytes of a split as stored. Raises UserError when it is not prepared, or not made to be read so."""
    builder, split = _open(address)
    if builder.info.file_format not in builder.info.file_format.with_random_access():
        raise UserError(
            f"{address}: prepared as {builder.info.file_format.value}, which TensorFlow alone reads. "
            "Prepare it with --file_format=array_record"
        )
    try:
        return int(builder.info.splits[split].num_bytes)
    except (KeyError, ValueError):
        there = ", ".join(builder.info.splits)
        raise UserError(f"{address}: no split {split}; there is: {there}. Give tfds:NAME:SPLIT") from None


def documents(address: str, field: str, on_read: OnRead = nothing) -> Items:
    """The documents of a split: what each example holds under `field`."""
    builder, split = _open(address)
    features = builder.info.features
    if field not in features:
        what = f"no feature {field!r}; there is: {', '.join(features)}"
        yield Refusal("no_text_column", address, what, "Give --text_field")
        return
    try:
        for number, example in enumerate(builder.as_data_source(split), start=1):
            text = example[field]
            if isinstance(text, str):
                text = text.encode()
            where = f"{address}, example {number}"
            if not isinstance(text, bytes):
                yield Refusal("no_text_field", where, f"no text in {field!r}", "Give --text_field")
                continue
            yield check(text, where)
            on_read(len(text))
    except Exception as error:  # TFDS has no kind of its own for a file that is gone or damaged
        yield damaged(address, first_line(error))


def _open(address: str) -> tuple[Any, str]:
    """The builder and the split that an address names."""
    import tensorflow_datasets as tfds  # takes seconds

    match = _NAME.fullmatch(address)
    if match is None:
        raise UserError(f"{address}: not tfds:NAME[:SPLIT], as tfds:wikipedia/20230601.en:train")
    name, split = match["name"], match["split"] or "train"
    try:
        if name.startswith(("/", "./", "../", "~")):
            builder = tfds.builder_from_directory(name)
        else:
            # TFDS itself looks at the variable once, when it is imported.
            builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=os.environ.get("TFDS_DATA_DIR"))
    except Exception as error:
        raise UserError(
            f"{address}: not prepared here ({first_line(error)}). Prepare it with TFDS, in an environment with "
            "TensorFlow (tfds build, --file_format=array_record), and set TFDS_DATA_DIR to where it lies"
        ) from None
    return builder, split
