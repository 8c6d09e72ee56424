"""Data sets of Hugging Face's `datasets` library that `save_to_disk` wrote: which Arrow files hold their rows.

FOLDER/state.json          the names of the Arrow files in order, next to dataset_info.json
FOLDER/dataset_dict.json   the splits, each a folder with a state.json
"""

import json
from typing import Any

from bert_jax.command import UserError
from bert_jax.storage.compression import read_blocks

_SPLIT = "train"


def arrow_files(folder: str) -> list[str] | None:
    """The paths of the Arrow files of a saved data set, of a saved DatasetDict those of its split "train".

    None if the folder is no saved data set. Raises UserError for a DatasetDict without that split, and for damaged or
    unsupported files.
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
    """The object in a JSON file; None if the file does not exist."""
    try:
        content = json.loads(b"".join(read_blocks(path)).decode())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}). Save the data set again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}). Correct that") from None
    return content if isinstance(content, dict) else {}
