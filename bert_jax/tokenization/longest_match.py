"""WordPiece's greedy longest match for many words at once, by numpy (Schuster and Nakajima 2012; Devlin et al. 2019).

From left to right, a word's next token is the longest token that is a prefix of the rest of the word. If there is none,
the whole word is unknown. Two tries in one table hold the tokens: one for tokens that begin a word, one for tokens that
continue a word. All words walk the table in step. The reference is WordpieceTokenizer of google-research/bert; the
`tokenizers` library looks up one shorter prefix after another.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Int32, Int64, UInt8

# States of the table: no token continues in this way; nothing read yet, at the beginning or inside of a word.
_NOWHERE, _BEGIN, _INSIDE = range(3)
_NO_TOKEN = -1


class _Spelling(NamedTuple):
    """Texts encoded as columns of the table."""

    columns: UInt8[np.ndarray, "n"]  # of all texts, each followed by a 0
    begins: Int64[np.ndarray, "m"]  # of each text in `columns`
    ends: Int64[np.ndarray, "m"]

    def has_columns(self) -> Bool[np.ndarray, "m"]:
        """Which texts are not empty and consist only of characters that have a column."""
        before = np.cumsum(self.columns == 0)
        return (
            (self.begins < self.ends) & (before[self.begins] == before[self.ends - 1]) & (self.columns[self.begins] > 0)
        )


class LongestMatch:
    """Encodes words of certain ASCII characters, which normalization does not change, as WordPiece ids.

    tokens       the vocabulary, by id
    prefix       the prefix of tokens that continue a word: "##"
    characters   the ASCII characters that words may consist of
    longest      longer words are not encoded here
    unknown_id   the id of a word that no sequence of tokens spells
    """

    def __init__(
        self, tokens: Sequence[str], *, prefix: str, characters: str, longest: int, unknown_id: int, dtype: type
    ) -> None:
        # Column 0 stands for all other characters: no transition leads on from them.
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
        """The ids of each word; None for a word that is empty, too long, or has other characters.

        Raises UnicodeEncodeError for a lone surrogate.
        """
        spelling = self._spell(words)
        encodable = spelling.has_columns() & (spelling.ends - spelling.begins <= self._longest)
        owners, ids = self._walk(spelling, np.flatnonzero(encodable))
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
        """The ids of the selected words, and the word that each id belongs to, in the order of the words."""
        columns = spelling.columns
        at = spelling.begins[word]
        state = np.full(len(word), _BEGIN, np.int32)
        # The longest token read since the last match, and where it ends.
        token, end = np.full(len(word), _NO_TOKEN, np.int32), at.copy()
        owners, matches = [word[:0]], [token[:0]]
        while len(word):
            state = self._table[state, columns[at]]
            at += 1
            here = self._token[state]
            np.copyto(token, here, where=here != _NO_TOKEN)
            np.copyto(end, at, where=here != _NO_TOKEN)
            stuck = np.flatnonzero(state == _NOWHERE)
            if not len(stuck):
                continue
            # These words cannot read on: emit their longest token, and restart behind it or finish.
            owners.append(word[stuck])
            matches.append(token[stuck])
            over = (token[stuck] == _NO_TOKEN) | (columns[end[stuck]] == 0)
            state[stuck], at[stuck], token[stuck] = _INSIDE, end[stuck], _NO_TOKEN
            if over.any():
                left = np.ones(len(word), bool)
                left[stuck[over]] = False
                word, at, state, token, end = word[left], at[left], state[left], token[left], end[left]
        return self._in_order(np.concatenate(owners), np.concatenate(matches), len(spelling.begins))

    def _in_order(
        self, owner: Int64[np.ndarray, "n"], match: Int32[np.ndarray, "n"], words: int
    ) -> tuple[Int64[np.ndarray, "m"], Int32[np.ndarray, "m"]]:
        """Tokens in the order of their words. A word that has no match becomes the unknown token alone."""
        lost = match == _NO_TOKEN
        unknown = np.zeros(words, bool)
        unknown[owner[lost]] = True
        kept = lost | ~unknown[owner]
        order = np.argsort(owner[kept], kind="stable")
        return owner[kept][order], np.where(lost, np.int32(self._unknown_id), match)[kept][order]


def _trie(
    spelling: _Spelling, width: int, roots: Int64[np.ndarray, "m"], ids: Int64[np.ndarray, "m"]
) -> tuple[Int32[np.ndarray, "k width"], Int32[np.ndarray, "k"]]:
    """The transitions of a trie, state by column, and the token that ends at each state.

    width        the number of columns
    roots, ids   for each token, the state at which it begins and its id
    """
    columns, begins, ends = spelling
    spelled = spelling.has_columns()
    state, at, end, ids = roots[spelled], begins[spelled], ends[spelled], ids[spelled]
    # The tokens that are longer than this level of the trie, and the state at which each token has ended.
    reading, ended = np.arange(len(ids)), np.zeros(len(ids), np.int64)
    rows, first, last = [], 0, _INSIDE + 1  # the states of this level
    while first < last:
        edge = (state - first) * width + columns[at]
        used = np.zeros((last - first) * width, bool)
        used[edge] = True
        found = np.flatnonzero(used)
        leads = np.full(len(used), _NOWHERE, np.int32)
        leads[found] = np.arange(last, last + len(found))
        rows.append(leads.reshape(-1, width))
        state, at = leads[edge].astype(np.int64), at + 1
        over = at == end[reading]
        ended[reading[over]] = state[over]
        state, at, reading = state[~over], at[~over], reading[~over]
        first, last = last, last + len(found)
    token = np.full(last, _NO_TOKEN, np.int32)
    token[ended] = ids
    return np.concatenate(rows), token
