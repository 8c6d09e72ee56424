"""Data sets of the Hugging Face Hub by their names: hf:ORG/NAME[:CONFIG[:SPLIT]].

The Hub keeps every data set that it can read as Parquet too, in the branch refs/convert/parquet, as
CONFIG/SPLIT/0000.parquet and so on; of a large one perhaps only the first part, in CONFIG/partial-SPLIT.
"""

import re

from bert_jax.command import UserError
from bert_jax.storage.listing import find_files

PREFIX = "hf:"
_ADDRESS = re.compile(r"hf:(?P<name>[^:/@]+/[^:/@]+)(?::(?P<config>[^:/]+))?(?::(?P<split>[^:/]+))?")


def is_name(address: str) -> bool:
    """Whether an address is a data set's name, and not a path (hf://)."""
    return address.startswith(PREFIX) and not address.startswith(f"{PREFIX}//")


def may_be_name(pattern: str) -> bool:
    """Whether a pattern that matches no file may be meant as ORG/NAME of the Hub."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", pattern) is not None


def parquet_pattern(address: str) -> str:
    """The pattern of the Parquet files of a split, "train" by default.

    Raises UserError for an invalid address, a data set that the Hub does not have as Parquet, and an unknown
    configuration or split.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise UserError(f"{address} is not of the form hf:ORG/NAME[:CONFIG[:SPLIT]], such as hf:wikimedia/wikipedia")
    name, config, split = match["name"], match["config"], match["split"] or "train"
    root = f"hf://datasets/{name}@refs/convert/parquet"
    files = f"name its files, for example 'hf://datasets/{name}/**/*.parquet'"
    if not (configs := _folders(root)):
        raise UserError(
            f"{address}: the Hub has no data set {name}, has it not as Parquet, or gives no access. "
            f"Check the name, log in (hf auth login), or {files}"
        )
    if config is None:
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
    return [found.path.rpartition("/")[2] for found in find_files(f"{parent}/*") if found.is_folder]
