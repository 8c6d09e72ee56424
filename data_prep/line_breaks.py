"""What stands between the sentences of a document: a space, nothing, or the white space of the text.

`joined_sentences` turns each line break into a space, or into nothing between characters of scripts without spaces
between words (Chinese, Japanese, Thai). `kept_pieces` keeps all white space, which code and verse need.
"""

import itertools
import unicodedata
from typing import NamedTuple

from bert_jax.tokenization.scripts import is_unspaced
from bert_jax.tokenization.wordpiece_engine import WHITE_SPACE
from data_prep.sentences import language_of, split_sentences

# Marks around a character that do not decide whether a space separates it from the next one.
_AFTER = "\"'”’“‘»«›)]}.!?…,;:—–-"
_BEFORE = "\"'“‘«‹„‚»([{¿¡—–-"
# Full stops that need no space after them, though their scripts separate words by spaces (Hindi, Urdu, Armenian,
# Ethiopic): a space is put after them.
_SPACED_STOPS = "।॥۔։።"
# White_Space of Unicode, at which byte-level BPE splits text. (str.isspace includes U+001C to U+001F.)
_WHITE_SPACE = frozenset(" \n" + WHITE_SPACE)


class JoinedSentences(NamedTuple):
    """The sentences of a document, and whether each follows the one before without a space."""

    sentences: list[str]
    direct: list[bool]


def joined_sentences(document: str) -> JoinedSentences:
    """The sentences of all lines of a document, in order."""
    language = language_of(document)
    sentences: list[str] = []
    direct: list[bool] = []
    for line in document.split("\n"):
        if found := split_sentences(line, language):
            direct.append(bool(sentences) and _joins_lines(sentences[-1], found[0]))
            direct += _direct_in_line(line, found)
            sentences += found
    return JoinedSentences(sentences, direct)


def kept_pieces(document: str) -> list[str]:
    """A document split into its sentences, each with the white space before it; joined, they are the document.

    Byte-level BPE gives each piece the ids that it has within the document: sentences between which the library may
    not split stay together.
    """
    language = language_of(document)
    pieces: list[str] = []
    begin = end = 0  # of the last piece, of the last sentence
    joins = True  # whether the next sentence belongs to the last piece
    for line in document.split("\n"):
        for sentence in split_sentences(line, language):
            # Only white space stands between sentences, so this is where the sentence begins.
            place = document.index(sentence, end)
            if not joins and _may_split(document, end):
                pieces.append(document[begin:end])
                begin = end
            end = place + len(sentence)
            # StripAccents deletes a line of accents, and the white space before and after it becomes one.
            joins = unicodedata.category(sentence[0]) == "Mn"
    return [*pieces, document[begin:]]


def _joins_lines(before: str, after: str) -> bool:
    """Whether two lines join without a space: where both end in characters of scripts without spaces, or one in their
    punctuation, which includes its space.
    """
    if any(is_unspaced(one) and unicodedata.category(one).startswith("P") for one in (before[-1], after[0])):
        return True
    last, first = before.rstrip(_AFTER)[-1:] or before[-1], after.lstrip(_BEFORE)[:1] or after[0]
    return is_unspaced(last) and is_unspaced(first)


def _direct_in_line(line: str, sentences: list[str]) -> list[bool]:
    """For each sentence of a line but the first, whether it follows the one before without white space."""
    if len(sentences) == 1 or line.isascii():
        return [False] * (len(sentences) - 1)
    direct = []
    end = line.index(sentences[0]) + len(sentences[0])
    for before, sentence in itertools.pairwise(sentences):
        begin = line.index(sentence, end)
        direct.append(begin == end and before.rstrip(_AFTER)[-1:] not in _SPACED_STOPS)
        end = begin + len(sentence)
    return direct


def _may_split(document: str, place: int) -> bool:
    """Whether byte-level BPE always splits a document at a place, by GPT-2's regular expression.

    It splits before the first of several white spaces, and between punctuation and a letter.
    """
    before, after = document[place - 1], document[place]
    return after in _WHITE_SPACE or (after.isalpha() and is_unspaced(after) and not before.isalnum())
