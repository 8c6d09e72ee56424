"""Reads data sets saved by Hugging Face's `datasets`, on its Hub, or prepared by TensorFlow Datasets (TFDS)."""

import json
import re
from typing import Any

from bert_jax.data.shards import open_tfds
from bert_jax.errors import UserError
from bert_jax.storage.files import OnRead, ignore_progress, read_blocks
from bert_jax.storage.remote import find_files
from data_prep.readers import Items, Refusal, check
from data_prep.readers import text as plain_text
from data_prep.readers.text import damaged

# Data sets that `datasets` wrote with `save_to_disk`:
#
# FOLDER/state.json          the names of the Arrow files in order, next to dataset_info.json
# FOLDER/dataset_dict.json   the splits, which are folders with a state.json

_SPLIT = "train"


def arrow_files(folder: str) -> list[str] | None:
    """Lists a saved data set's Arrow files, or a saved DatasetDict's in the split "train"; None for other folders.

    Raises:
        UserError: The DatasetDict has no such split, or a file is damaged or unsupported.
    """
    folder = folder.rstrip("/")
    if (state := _read_json(f"{folder}/state.json")) is not None:
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise UserError(
                f"{folder} is saved with a list of row numbers, by an old version of datasets. "
                "Load it with datasets and save it again"
            )
        try:
            files = [f"{folder}/{file['filename']}" for file in state["_data_files"]]
        except (KeyError, TypeError):
            raise UserError(f"{folder}/state.json names no files. Save the data set again") from None
        if not files:
            raise UserError(f"{folder} is a saved data set without rows. Remove it from --input")
        return files
    if (splits := _read_json(f"{folder}/dataset_dict.json")) is not None:
        names = splits.get("splits") or []
        if _SPLIT not in names:
            known = ", ".join(f"{folder}/{name}" for name in names)
            raise UserError(f"{folder} is a saved DatasetDict without the split {_SPLIT}. Name a split: {known}")
        return arrow_files(f"{folder}/{_SPLIT}")
    return None


def _read_json(path: str) -> dict[str, Any] | None:
    """Returns the object in a JSON file; None if the file does not exist."""
    try:
        content = json.loads(b"".join(read_blocks(path)).decode())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        problem = "is not valid JSON" if isinstance(error, ValueError) else "cannot be read"
        raise UserError(f"{path} {problem} ({error}). Correct that, or save the data set again") from None
    return content if isinstance(content, dict) else {}


# Data sets of the Hugging Face Hub by name: hf:ORG/NAME[:CONFIG[:SPLIT]].
#
# The Hub keeps data sets that it can read also as Parquet, in the branch refs/convert/parquet, as
# CONFIG/SPLIT/0000.parquet and so on. Of a large one it may have only the first part, in CONFIG/partial-SPLIT.

_ADDRESS = re.compile(r"hf:(?P<name>[^:/@]+/[^:/@]+)(?::(?P<config>[^:/]+))?(?::(?P<split>[^:/]+))?")


def is_name(address: str) -> bool:
    """Whether an address is a data set's name, and not a path (hf://)."""
    return address.startswith("hf:") and not address.startswith("hf://")


def parquet_pattern(address: str) -> str:
    """Returns the pattern for a split's Parquet files; the default split is "train".

    Raises:
        UserError: The address is invalid, the Hub does not have the data set as Parquet, or the configuration or split
            is unknown.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise UserError(f"{address} is not of the form hf:ORG/NAME[:CONFIG[:SPLIT]], such as hf:wikimedia/wikipedia")
    name, config, split = match["name"], match["config"], match["split"] or "train"
    root = f"hf://datasets/{name}@refs/convert/parquet"
    files = f"name its files, for example 'hf://datasets/{name}/**/*.parquet'"
    if not (configs := _folders(root)):
        raise UserError(
            f"{address}: the Hub has no data set {name}, does not have it as Parquet, or gives no access. "
            f"Check the name, log in (hf auth login), or {files}"
        )
    if config is None:
        # As in `datasets`: the only configuration, or the one that is called default.
        config = configs[0] if len(configs) == 1 else "default"
    if config not in configs:
        raise UserError(f"{address} needs a configuration; choose from hf:{name}:CONFIG with {', '.join(configs)}")
    splits = _folders(f"{root}/{config}")
    if f"partial-{split}" in splits:
        raise UserError(
            f"{address}: the Hub has only the first part of the split {split} as Parquet, "
            f"which is hf:{name}:{config}:partial-{split}. For the whole split, {files}"
        )
    if split not in splits:
        raise UserError(f"{address}: unknown split {split}; choose from {', '.join(splits)}")
    return f"{root}/{config}/{split}/*.parquet"


def _folders(parent: str) -> list[str]:
    return [match.path.rpartition("/")[2] for match in find_files(f"{parent}/*") if match.is_folder]


# Documents of prepared TFDS datasets: tfds:NAME[:SPLIT] (bert_jax/data/shards.py).

TFDS_PREFIX = "tfds:"


def size(address: str) -> int:
    """Returns a split's stored bytes.

    Raises:
        UserError: The split is not prepared, or only for TensorFlow.
    """
    builder, split = open_tfds(address)
    return int(builder.info.splits[split].num_bytes)


def documents(address: str, field: str, on_read: OnRead = ignore_progress) -> Items:
    """Yields a split's documents: the text in its examples' `field`."""
    builder, split = open_tfds(address)
    features = builder.info.features
    if field not in features:
        problem = f"no feature {field!r}; the features are {', '.join(features)}"
        raise Refusal("no_text_column", address, problem, "Use another --text_field")
    try:
        for number, example in enumerate(builder.as_data_source(split), start=1):
            place, text = f"{address}, example {number}", example[field]
            if isinstance(text, str):
                text = text.encode()
            if not isinstance(text, bytes):
                yield Refusal("no_text_field", place, f"no text in {field!r}", "Use another --text_field")
                continue
            is_long = len(text) > plain_text.MAX_DOCUMENT_BYTES
            yield plain_text.too_long(place) if is_long else check(text, place)
            on_read(len(text))
    except Exception as error:  # TFDS has no exception for a file that is missing or damaged
        raise damaged(address, error) from None
