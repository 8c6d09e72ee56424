"""Token ids kept for jobs with another length or objective on the same text (--token_cache DIR).

    DIR/TOKENIZER-rRULE/TEXT.ids   the ids of one unit: TOKENIZER and TEXT are hashes, RULE is the version of the
                                   rule for sentences, with -keep if line breaks are kept, so another tokenizer, text
                                   or rule finds nothing

A file is written under a unique name and renamed, and it ends with a hash of its content. An incomplete or modified
file is ignored, and its unit is tokenized again. So any number of jobs may use one folder at the same time.
"""

import contextlib
import hashlib
import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_jax.command import UserError
from data_prep.objectives import Encoded
from data_prep.sentences import RULE_VERSION

_SUFFIX = ".ids"
_UNFINISHED = ".unfinished"
_DIGEST_BYTES = 16
_NAMED_BY = 16  # characters of the tokenizer's hash; the files hold all of it
_LEFT_BEHIND = 24 * 3600  # seconds after which an unfinished file has no writer any more
_REFUSED = 256  # units that a full cache refuses before it is listed again


@dataclass
class _Known:
    """What a process knows of a cache: its bytes, those it stored itself since it listed it, and refused units."""

    bytes: int
    stored: int = 0
    refused: int = 0


_KNOWN: dict[Path, _Known] = {}


@dataclass(frozen=True)
class TokenCache:
    """A folder of encoded units with at most `limit` bytes; units beyond that are not stored."""

    directory: Path
    limit: int
    newlines: str = "join"  # or keep, as in BuildOptions

    @property
    def rule(self) -> str:
        return str(RULE_VERSION) if self.newlines == "join" else f"{RULE_VERSION}-{self.newlines}"

    def prepare(self) -> None:
        """Creates the folder, and removes what killed writers left.

        Raises UserError if the path is a file, and OSError if it cannot be written.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UserError(f"--token_cache {self.directory} is a file. Choose a folder") from None
        _KNOWN.pop(self.directory, None)
        for path in self.directory.glob(f"*/*{_UNFINISHED}"):
            with contextlib.suppress(FileNotFoundError):  # another job has just finished or removed it
                if time.time() - path.stat().st_mtime > _LEFT_BEHIND:
                    path.unlink()

    def bytes(self) -> int:
        """The total size of the stored units."""
        total = 0
        for folder in os.scandir(self.directory):
            for entry in os.scandir(folder) if folder.is_dir() else ():
                if entry.name.endswith(_SUFFIX):
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat().st_size
        return total

    def _has_room(self, size: int) -> bool:
        """Whether so many bytes fit. The folder may hold thousands of files, so it is rarely listed.

        A process knows what it has stored itself. It lists the folder again after a thousandth of the limit, at each
        unit in the last tenth, and where the cache is full, at times. So up to a hundred processes stay below the
        limit, but for one unit of each.
        """
        known = _KNOWN.get(self.directory)
        full = known is not None and known.bytes + size > self.limit
        if (
            known is None
            or known.stored > self.limit // 1000
            or (not full and known.bytes > self.limit * 9 // 10)
            or (full and known.refused >= _REFUSED)
        ):
            known = _KNOWN[self.directory] = _Known(self.bytes())
        if known.bytes + size > self.limit:
            known.refused += 1
            return False
        known.bytes += size
        known.stored += size
        return True

    def holds(self, tokenizer_hash: str, text_hash: str) -> bool:
        return self._path(tokenizer_hash, text_hash).exists()

    def load(self, tokenizer_hash: str, text_hash: str) -> Encoded | None:
        """The unit that `store` was given, or None."""
        try:
            content = self._path(tokenizer_hash, text_hash).read_bytes()
        except FileNotFoundError:
            return None
        body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if _digest(body) != digest:
            return None
        line, _, data = body.partition(b"\n")
        header = json.loads(line)
        if (header["tokenizer"], header["text"], header["rule"]) != (tokenizer_hash, text_hash, self.rule):
            return None
        id_bytes = header["tokens"] * np.dtype(header["dtype"]).itemsize
        lengths = np.frombuffer(data, "<u4", offset=id_bytes)
        ids = np.frombuffer(data, header["dtype"], header["tokens"])
        return Encoded(
            ids.astype(ids.dtype.newbyteorder("="), copy=False),
            _ends(lengths[: header["sentences"]]),
            _ranges(lengths[header["sentences"] :]),
            header["empty"],
        )

    def store(self, tokenizer_hash: str, text_hash: str, encoded: Encoded) -> None:
        """Stores an encoded unit, unless the cache is full. Raises OSError, for example if the disk is full."""
        ids = encoded.ids.astype(encoded.ids.dtype.newbyteorder("<"), copy=False)
        header = {
            "tokenizer": tokenizer_hash,
            "text": text_hash,
            "rule": self.rule,
            "dtype": ids.dtype.str,
            "tokens": len(ids),
            "sentences": len(encoded.offsets) - 1,
            "empty": encoded.empty,
        }
        lengths = np.concatenate([np.diff(encoded.offsets), np.diff(encoded.documents, axis=1)[:, 0]]).astype("<u4")
        body = b"".join([json.dumps(header).encode(), b"\n", ids.tobytes(), lengths.tobytes()])
        path = self._path(tokenizer_hash, text_hash)
        path.parent.mkdir(parents=True, exist_ok=True)  # on a worker of an engine, none may have made it
        if not self._has_room(len(body) + _DIGEST_BYTES):
            return
        unfinished = path.with_name(f"{path.stem}.{os.getpid()}.{secrets.token_hex(4)}{_UNFINISHED}")
        try:
            unfinished.write_bytes(body + _digest(body))
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _path(self, tokenizer_hash: str, text_hash: str) -> Path:
        return self.directory / f"{tokenizer_hash[:_NAMED_BY]}-r{self.rule}" / (text_hash + _SUFFIX)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _ends(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _ranges(lengths: np.ndarray) -> np.ndarray:
    ends = _ends(lengths)
    return np.stack([ends[:-1], ends[1:]], axis=1)
