"""Data that TensorFlow Datasets has prepared, found without TensorFlow: tfds:NAME[:SPLIT].

NAME is as TFDS has it ("wikipedia/20230601.en:1.0.0", "glue/mrpc"), or the folder of a prepared version. SPLIT is
"train" unless given, and may be a slice ("train[:10%]").
"""

import os
import re
from typing import Any

from bert_jax.command import UserError
from bert_jax.storage.remote import first_line

_NAME = re.compile(r"tfds:(?P<name>[^:]+(?::(?:\d+|\*)\.(?:\d+|\*)\.(?:\d+|\*))?)(?::(?P<split>[^:]+(?:\[[^\]]*\])?))?")


def open_tfds(address: str) -> tuple[Any, str]:
    """The builder and the split that an address names.

    Raises UserError for what is no such address, not prepared here, or prepared in a form that TensorFlow alone
    reads, and for a split that there is not.
    """
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
    if builder.info.file_format not in builder.info.file_format.with_random_access():
        raise UserError(
            f"{address}: prepared as {builder.info.file_format.value}, which TensorFlow alone reads. "
            "Prepare it with --file_format=array_record"
        )
    try:
        builder.info.splits[split]
    except (KeyError, ValueError):
        there = ", ".join(builder.info.splits)
        raise UserError(f"{address}: no split {split}; there is: {there}. Give tfds:NAME:SPLIT") from None
    return builder, split
