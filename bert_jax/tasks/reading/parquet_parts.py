"""Data sets in several Parquet files, of which the first one's name stands for them all.

NAME-00000-of-00003.parquet is what `datasets` of Hugging Face calls them; earlier on with 16 hexadecimal digits behind
that, other ones in each file.
"""

import glob
import re
from collections.abc import Mapping
from pathlib import Path

from bert_jax.command import UserError

_FIRST = re.compile(r"(?P<name>.+)-00000-of-(?P<count>\d{5})(?P<digits>-[0-9a-f]{16})?\.parquet")


def files_of(path: Path) -> list[Path]:
    """The files that a first one stands for, in order, whether they are there or not; any other file alone.

    Raises UserError where two files, which differ in their digits, have the same place.
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
    """The first of the files in a folder that are NAME-00000-of-... and so on, if it is there.

    Raises UserError where there are two, which are of different data sets.
    """
    found = folder.glob(name + "-00000-of-*.parquet")
    return _only(sorted(path for path in found if _FIRST.fullmatch(path.name)))


def check_apart(files: Mapping[str, Path]) -> None:
    """Raises UserError where the file of one split is among those that the file of another one stands for."""
    for split, path in files.items():
        others = {file.resolve() for file in files_of(path)[1:]}
        for other, file in files.items():
            if file.resolve() in others:
                raise UserError(
                    f"{split} is {path}, which stands for all {len(others) + 1} files of its name, and {other} is one "
                    f"of them: {file.name}. Give files of other names, as {other}.parquet, if they are to be apart"
                )


def _only(found: list[Path]) -> Path | None:
    if len(found) > 1:
        raise UserError(f"{found[0]} and {found[1].name} are there, of different data sets. Remove those of one")
    return found[0] if found else None
