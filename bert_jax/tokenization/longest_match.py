"""WordPiece's longest match first for many words at once, as arrays (Schuster and Nakajima 2012; Devlin et al. 2019).

From the left, a word's next piece is the longest token that the rest of it begins with; where there is none, the whole
word is unknown. The tokens are two tries in one table, one of those that begin a word and one of the insides, and all
words walk it in step. google-research/bert, WordpieceTokenizer, is the rule; the `tokenizers` library looks up one
shortening after another.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Int32, Int64, UInt8

# Places in the table: no token goes on so; nothing read yet, at the beginning of a word and inside of one.
_NOWHERE, _BEGIN, _INSIDE = range(3)
_NO_TOKEN = -1


class _Spelling(NamedTuple):
    """Texts as columns of the table."""

    columns: UInt8[np.ndarray, "n"]  # of all of them, with a 0 behind each
    begins: Int64[np.ndarray, "m"]  # of each text
    ends: Int64[np.ndarray, "m"]

    def ours(self) -> Bool[np.ndarray, "m"]:
        """Which texts have a character, and none without a column."""
        before = np.cumsum(self.columns == 0)
        return (
            (self.begins < self.ends) & (before[self.begins] == before[self.ends - 1]) & (self.columns[self.begins] > 0)
        )


class LongestMatch:
    """Words of some characters of ASCII, which nothing normalises, as the ids of WordPiece.

    tokens       the vocabulary, by id
    prefix       what tokens of a word's inside begin with: "##"
    characters   of ASCII, that the words to be encoded are made of
    longest      words of more characters are left to others
    unknown_id   the id of a word that no tokens make up
    """

    def __init__(
        self, tokens: Sequence[str], *, prefix: str, characters: str, longest: int, unknown_id: int, dtype: type
    ) -> None:
        # 0 for what is none of the characters: nothing goes on there.
        self._columns = bytes(characters.find(chr(byte)) + 1 for byte in range(256))
        self._longest, self._unknown_id, self._dtype = longest, unknown_id, dtype
        whole = self._spell(tokens)
        inside = np.flatnonzero(np.fromiter((token.startswith(prefix) for token in tokens), bool, len(tokens)))
        begins = np.concatenate([whole.begins, whole.begins[inside] + len(prefix.encode())])
        spelling = _Spelling(whole.columns, begins, np.concatenate([whole.ends, whole.ends[inside]]))
        roots = np.repeat([_BEGIN, _INSIDE], [len(tokens), len(inside)])
        ids = np.concatenate([np.arange(len(tokens)), inside])
        self._table, self._token = _trie(spelling, len(characters) + 1, roots, ids)

    def encode(self, words: Sequence[str]) -> list[bytes | None]:
        """The ids of each word; None for one that is empty, too long, or of other characters.

        Raises UnicodeEncodeError for a lone surrogate.
        """
        spelling = self._spell(words)
        ours = spelling.ours() & (spelling.ends - spelling.begins <= self._longest)
        owners, ids = self._walk(spelling, np.flatnonzero(ours))
        bounds = (np.searchsorted(owners, np.arange(len(words) + 1)) * np.dtype(self._dtype).itemsize).tolist()
        joined = ids.astype(self._dtype).tobytes()
        return [joined[first:last] or None for first, last in itertools.pairwise(bounds)]

    def _spell(self, texts: Sequence[str]) -> _Spelling:
        encoded = [text.encode() for text in texts]
        columns = np.frombuffer(b"\0".join([*encoded, b""]).translate(self._columns), np.uint8)
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ends = np.cumsum(lengths + 1) - 1
        return _Spelling(columns, ends - lengths, ends)

    def _walk(
        self, spelling: _Spelling, word: Int64[np.ndarray, "k"]
    ) -> tuple[Int64[np.ndarray, "n"], Int32[np.ndarray, "n"]]:
        """Of the words that are numbered, the ids and which word each is of, word by word."""
        columns = spelling.columns
        at = spelling.begins[word]
        place = np.full(len(word), _BEGIN, np.int32)
        # The longest token that has been read since the last piece, and where it ends.
        token, end = np.full(len(word), _NO_TOKEN, np.int32), at.copy()
        owners, pieces = [word[:0]], [token[:0]]
        while len(word):
            place = self._table[place, columns[at]]
            at += 1
            here = self._token[place]
            np.copyto(token, here, where=here != _NO_TOKEN)
            np.copyto(end, at, where=here != _NO_TOKEN)
            stuck = np.flatnonzero(place == _NOWHERE)
            if not len(stuck):
                continue
            owners.append(word[stuck])
            pieces.append(token[stuck])
            over = (token[stuck] == _NO_TOKEN) | (columns[end[stuck]] == 0)
            place[stuck], at[stuck], token[stuck] = _INSIDE, end[stuck], _NO_TOKEN
            if over.any():
                left = np.ones(len(word), bool)
                left[stuck[over]] = False
                word, at, place, token, end = word[left], at[left], place[left], token[left], end[left]
        return self._in_order(np.concatenate(owners), np.concatenate(pieces), len(spelling.begins))

    def _in_order(
        self, owner: Int64[np.ndarray, "n"], piece: Int32[np.ndarray, "n"], words: int
    ) -> tuple[Int64[np.ndarray, "m"], Int32[np.ndarray, "m"]]:
        """Pieces by their words, and of a word that got stuck with no token the unknown one alone."""
        lost = piece == _NO_TOKEN
        unknown = np.zeros(words, bool)
        unknown[owner[lost]] = True
        kept = lost | ~unknown[owner]
        order = np.argsort(owner[kept], kind="stable")
        return owner[kept][order], np.where(lost, np.int32(self._unknown_id), piece)[kept][order]


def _trie(
    spelling: _Spelling, width: int, roots: Int64[np.ndarray, "m"], ids: Int64[np.ndarray, "m"]
) -> tuple[Int32[np.ndarray, "k width"], Int32[np.ndarray, "k"]]:
    """Where each column leads from each place, and the token that has been read at a place.

    width        how many columns there are
    roots, ids   of each token that is spelt, the place where it begins and its number
    """
    columns, begins, ends = spelling
    ours = spelling.ours()
    place, at, end, ids = roots[ours], begins[ours], ends[ours], ids[ours]
    reading, ended = np.arange(len(ids)), np.zeros(len(ids), np.int64)  # the tokens that go on; where each has ended
    rows, first, last = [], 0, _INSIDE + 1  # the places that they are at: a level of the tries
    while first < last:
        edge = (place - first) * width + columns[at]
        used = np.zeros((last - first) * width, bool)
        used[edge] = True
        found = np.flatnonzero(used)
        leads = np.full(len(used), _NOWHERE, np.int32)
        leads[found] = np.arange(last, last + len(found))
        rows.append(leads.reshape(-1, width))
        place, at = leads[edge].astype(np.int64), at + 1
        over = at == end[reading]
        ended[reading[over]] = place[over]
        place, at, reading = place[~over], at[~over], reading[~over]
        first, last = last, last + len(found)
    token = np.full(last, _NO_TOKEN, np.int32)
    token[ended] = ids
    return np.concatenate(rows), token
