"""The shares of a corpus that jobs build apart, on one machine or on many: each is a group of whole files.

The units of share number k are numbered from k * 2**20 on, so their shards and sequence keys differ from those of
every other share, and merge_shards joins outputs without reading a row. A manifest lists the shares of its output,
`shares: [{number, of, corpus, sources, documents, versions}]`: `of` is the number of shares of the job that it was a
part of, 0 if it was added later, `corpus` a hash of the names, sizes and weights of all files of that job, and
`sources` how many of the manifest's sources belong to the share. An output without the key is one share, number 0.

Jobs with equal hashes divide the files alike, wherever their machines have them: which share a file belongs to depends
only on what the hash covers.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from bert_jax.command import UserError
from data_prep.readers import Source

MOST = 2048  # shares: a unit's number has 31 bits in a sequence key
UNITS = 1 << 20  # of a share


class Share(NamedTuple):
    """Share `number` of `of`. With of = 0, all files of a job that is to be merged with earlier outputs."""

    number: int
    of: int

    @property
    def is_divided(self) -> bool:
        """Whether it is a part of a corpus of which other shares hold the rest. Number 0 of 0 is an earlier output."""
        return self.of > 1 or (self.of == 0 and self.number > 0)

    @property
    def first_unit(self) -> int:
        return self.number * UNITS


WHOLE = Share(0, 1)


def parse(given: str) -> list[Share]:
    """The shares that --part names: 3/16, all/16, or +5; nothing: the whole corpus as one. Raises UserError."""
    if not given:
        return [WHOLE]
    number, slash, count = given.partition("/")
    problem = UserError(f"--part {given}: use I/N with I from 0 to N - 1, all/N, or +NUMBER, and at most {MOST} shares")
    if not slash and given.startswith("+") and given[1:].isdecimal() and int(given) < MOST:
        return [Share(int(given), 0)]
    if not count.isdecimal() or not 1 <= int(count) <= MOST:
        raise problem
    every = [Share(each, int(count)) for each in range(int(count))]
    if number == "all":
        return every
    if not number.isdecimal() or int(number) >= int(count):
        raise problem
    return [every[int(number)]]


def sources_of(share: Share, sources: Sequence[Source]) -> tuple[Source, ...]:
    """The files of a share: the largest go first, those of equal size by name, each to the share with the fewest bytes.

    Raises UserError if there are fewer files than shares.
    """
    if share.of <= 1:
        return tuple(sources)
    if len(sources) < share.of:
        raise UserError(
            f"--part divides files among {share.of} jobs, but --input matches {len(sources)}; split the files, or use "
            "fewer parts"
        )
    sizes = [0] * share.of
    chosen = []
    for _, _, source in sorted(zip((-source.bytes for source in sources), names(sources), sources, strict=True)):
        smallest = sizes.index(min(sizes))
        sizes[smallest] += max(source.bytes, 1)
        if smallest == share.number:
            chosen.append(source)
    return tuple(sorted(chosen))


def digest(sources: Sequence[Source]) -> str:
    """A hash of the names, sizes and weights of files."""
    found = hashlib.blake2b(digest_size=16)
    for name, source in sorted(zip(names(sources), sources, strict=True)):
        size, weight = source.bytes, source.weight
        found.update(f"{name}\0{size}{'' if weight == 1 else f'*{weight:g}'}\n".encode(errors="surrogateescape"))
    return found.hexdigest()


def names(sources: Sequence[Source]) -> list[str]:
    """A name for each file, which no other file has: its own, wherever it is, if these differ.

    Otherwise it is the path below the folder that all of the files are in.
    """
    paths = [PurePath(source.path) for source in sources]
    if len({path.name for path in paths}) == len(paths):
        return [path.name for path in paths]
    folders = set.intersection(*({*path.parents} for path in paths))
    above = max((len(folder.parts) for folder in folders), default=0)
    return ["/".join(path.parts[above:]) for path in paths]


def of_manifest(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of a manifest's shares; of an output without them, the one that it is."""
    if found := manifest.get("shares"):
        return [dict(share) for share in found]
    return [
        {
            "number": 0,
            "of": 0,
            "corpus": "",
            "sources": len(manifest["sources"]),
            "documents": manifest["counts"]["documents"] - sum(manifest["skipped_reading"].values()),
            "versions": manifest["versions"],
        }
    ]
