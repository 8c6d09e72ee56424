"""Finds the files of a data set that is split into several Parquet files. The first file's name represents all.

Hugging Face's `datasets` names them NAME-00000-of-00003.parquet. Earlier versions added 16 hexadecimal digits, which
differ between the files.
"""

import glob
import re
from collections.abc import Mapping
from pathlib import Path

from bert_jax.command import UserError

_FIRST = re.compile(r"(?P<name>.+)-00000-of-(?P<count>\d{5})(?P<digits>-[0-9a-f]{16})?\.parquet")


def files_of(path: Path) -> list[Path]:
    """The files of the data set whose first file is `path`, in order, existing or not; otherwise `path` alone.

    Raises UserError if two files, which differ in their digits, have the same number.
    """
    match = _FIRST.fullmatch(path.name)
    if not match:
        return [path]
    files = [path]
    for number in range(1, int(match["count"])):
        start = f"{match['name']}-{number:05d}-of-{match['count']}"
        if not match["digits"]:
            files.append(path.with_name(start + ".parquet"))
            continue
        digits = "[0-9a-f]" * 16
        found = sorted(path.parent.glob(f"{glob.escape(start)}-{digits}.parquet"))
        files.append(_only(found) or path.with_name(start + match["digits"] + ".parquet"))
    return files


def first_file(folder: Path, name: str) -> Path | None:
    """The file NAME-00000-of-....parquet in a folder, or None.

    Raises UserError if there are two, which belong to different data sets.
    """
    found = folder.glob(name + "-00000-of-*.parquet")
    return _only(sorted(path for path in found if _FIRST.fullmatch(path.name)))


def check_apart(files: Mapping[str, Path]) -> None:
    """Raises UserError if the file of one split is one of several files that another split consists of."""
    for split, path in files.items():
        others = {file.resolve() for file in files_of(path)[1:]}
        for other, file in files.items():
            if file.resolve() in others:
                raise UserError(
                    f"{split} is {path}, which reads all {len(others) + 1} files of this data set, but {other} is one "
                    f"of them: {file.name}. To use them as separate splits, rename them, such as to {other}.parquet"
                )


def _only(found: list[Path]) -> Path | None:
    if len(found) > 1:
        raise UserError(f"{found[0]} and {found[1].name} belong to different data sets. Remove the files of one")
    return found[0] if found else None
