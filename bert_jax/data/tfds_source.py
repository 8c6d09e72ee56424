"""Opens data sets that TensorFlow Datasets (TFDS) has prepared, without TensorFlow: tfds:NAME[:SPLIT].

NAME is a TFDS name ("wikipedia/20230601.en:1.0.0", "glue/mrpc") or the folder of a prepared version. SPLIT is "train"
by default, and may be a slice ("train[:10%]").
"""

import os
import re
from typing import Any

from bert_jax.command import UserError, install_hint
from bert_jax.storage.remote import first_line

_NAME = re.compile(r"tfds:(?P<name>[^:]+(?::(?:\d+|\*)\.(?:\d+|\*)\.(?:\d+|\*))?)(?::(?P<split>[^:]+(?:\[[^\]]*\])?))?")


def open_tfds(address: str) -> tuple[Any, str]:
    """The builder and the split of an address.

    Raises UserError for an invalid address, a data set that is not prepared on this machine or is in a format that
    requires TensorFlow, and an unknown split.
    """
    import tensorflow_datasets as tfds  # its import takes seconds

    match = _NAME.fullmatch(address)
    if match is None:
        raise UserError(f"{address} is not of the form tfds:NAME[:SPLIT], such as tfds:wikipedia/20230601.en:train")
    name, split = match["name"], match["split"] or "train"
    try:
        if name.startswith(("/", "./", "../", "~")):
            builder = tfds.builder_from_directory(name)
        else:
            # TFDS itself reads the variable only once, at import.
            builder = tfds.core.read_only_builder.builder_from_files(name, data_dir=os.environ.get("TFDS_DATA_DIR"))
    except Exception as error:
        raise UserError(
            f"{address} is not prepared on this machine ({first_line(error)}). Preparing needs TensorFlow: run "
            f"{install_hint('tensorflow')}, then tfds build NAME --file_format=array_record, and set TFDS_DATA_DIR to "
            "the folder with the prepared data"
        ) from None
    if builder.info.file_format not in builder.info.file_format.with_random_access():
        raise UserError(
            f"{address} is prepared as {builder.info.file_format.value}, which only TensorFlow can read. "
            "Prepare it again with --file_format=array_record"
        )
    try:
        builder.info.splits[split]
    except (KeyError, ValueError):
        known = ", ".join(builder.info.splits)
        raise UserError(f"{address}: unknown split {split}; choose from {known}") from None
    return builder, split
