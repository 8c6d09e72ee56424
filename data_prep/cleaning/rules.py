"""Published quality rules for web text (`RULES`); before them, combining marks and language identification."""

import functools
import importlib.util
import itertools
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bert_jax.array_types import UInt64
from bert_jax.errors import UserError, install_hint

# Combining marks, which Python's regular expressions do not count as parts of words.


@functools.cache
def combining_marks(first: int = 0, last: int = 0xFFFF) -> str:
    r"""Lists vowel signs and accents (Unicode categories Mn, Mc and Me) for a character class.

    \w lacks them, so a pattern for letters and digits alone cuts words in Hindi, Tamil or vowelled Hebrew.
    """
    # Marks above U+FFFF, in rarer scripts such as Adlam, are left out by default, because they halve the speed: `re`
    # looks the others up in a table, but compares these ranges one by one.
    marks = [point for point in range(first, last + 1) if unicodedata.category(chr(point)).startswith("M")]
    # In a run of consecutive code points, the differences to their indices are equal.
    runs = itertools.groupby(enumerate(marks), lambda numbered: numbered[1] - numbered[0])
    ranges = ([point for _, point in run] for _, run in runs)
    return "".join(f"{chr(points[0])}-{chr(points[-1])}" for points in ranges)


def marks_in(text: str) -> str:
    """Lists the combining marks for a pattern that this text needs: those above U+FFFF only if it has any."""
    # UTF-16 makes two of each character above U+FFFF; counting them is many times as fast as searching for marks.
    if text.isascii() or len(text.encode("utf-16-le", "surrogatepass")) == 2 * len(text):
        return combining_marks()
    return combining_marks(last=sys.maxunicode) if _wide_mark().search(text) else combining_marks()


@functools.cache
def _wide_mark() -> re.Pattern[str]:
    return re.compile(f"(?=[\U00010000-\U0010ffff])[{combining_marks(first=0x10000, last=sys.maxunicode)}]")


# Language identification by py3langid (Lui and Baldwin 2012; 97 languages), whose model is in its wheel.

LONGEST = 4000  # characters that are read; more would only take longer


def check(languages: tuple[str, ...]) -> None:
    """Checks the languages to keep.

    Raises:
        UserError: A language is unknown, or the package is missing.
    """
    if not languages:
        return
    if importlib.util.find_spec("py3langid") is None:
        raise UserError(f"--languages needs a package that is not installed: {install_hint('clean')}")
    known = set(_identifier().labels)
    for language in languages:
        if language not in known:
            raise UserError(f"--languages: unknown language {language!r}; choose from {', '.join(sorted(known))}")


def identify(text: str) -> tuple[str, float]:
    """Returns a text's most probable language as an ISO 639-1 code, and its probability."""
    language, probability = _identifier().classify(text[:LONGEST])
    return str(language), float(probability)


@functools.cache
def _identifier() -> Any:
    from py3langid import langid

    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


# Published rules for the quality of web text. A rule reads one document, and gives a reason if it drops it.
#
# c4                 Raffel et al. 2020, section 2.2: lines and pages that are not prose; it also removes lines. The
#                    paper's list of bad words is left out.
# gopher             Rae et al. 2021, appendix A.1.1: length, length of words, symbols, bullets, common English words
# gopher_repetition  the same, table A1: repeated lines, paragraphs and n-grams
# fineweb            Penedo et al. 2024, section 3.6: lines without punctuation, short lines, repeated lines
#
# White space separates words, so these rules are for languages that write spaces; c4 and gopher's common words are for
# English. If a paper leaves a detail open, we follow huggingface/datatrove, with these exceptions:
#
# - Sentences end at . ! or ? before a space; no tokenizer runs.
# - gopher: the common English words are also recognized in capitals; ‣ ◦ ● ▪ * are bullets, too; blank lines are not
#   counted as lines; words without a letter or digit are not counted for the length.
# - gopher_repetition: an n-gram that occurs once is not repeated; of repeated n-grams that overlap, each word counts
#   (the paper counts their characters once; datatrove continues after the first).
# - fineweb: the limits are the paper's: 10% of repeated characters instead of 1%, equality drops, a line of 30
#   characters is not short, and there is no limit of line breaks per word. Quotation marks, as in earlier versions of
#   the filter, and an ellipsis also end a line.

# Returns the text, which c4 shortens, and the reason to drop it, or "" to keep it.
Rule = Callable[[str], tuple[str, str]]

_PARAGRAPH = re.compile(r"\n{2,}")
_LETTER_OR_DIGIT = re.compile(r"[^\W_]")
_AROUND_WORDS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~“”‘’«»„…—–"

# google-research/text-to-text-transfer-transformer and tensorflow_datasets, text/c4_utils.py
_C4_ENDS = (".", "?", "!", '"', "'")
_C4_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_C4_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_C4_SENTENCE = re.compile(r"[.!?][\"')\]]*(?:\s|$)")
_C4_LEAST_SENTENCES, _C4_LEAST_WORDS, _C4_LONGEST_WORD = 5, 3, 1000

_COMMON_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_LEAST_COMMON_WORDS = 2
_WORDS = 50, 100_000
_MEAN_LETTERS = 3, 10
_MOST_SYMBOLS_A_WORD = 0.1
_MOST_BULLETS, _MOST_ELLIPSES = 0.9, 0.3
_BULLETS = ("•", "‣", "◦", "●", "▪", "-", "*")
_LEAST_WITH_LETTERS = 0.8

# Rae et al. 2021, table A1: shares of lines or paragraphs, shares of their characters, and of those of n-grams.
_MOST_DUPLICATES, _MOST_DUPLICATE_CHARACTERS = 0.30, 0.20
_MOST_OF_TOP = {2: 0.20, 3: 0.18, 4: 0.16}
_MOST_OF_DUPLICATES = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}

_FINEWEB_ENDS = (".", "!", "?", '"', "'", "…", "”", "’", "。", "！", "？", "।", "؟")
_CODE_FACTOR, _PLACE_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1342543DE82EF95)

_LEAST_ENDING, _MOST_SHORT, _SHORT, _MOST_REPEATED = 0.12, 0.67, 30, 0.1


def c4(text: str) -> tuple[str, str]:
    """Keeps lines that end like a sentence, have 3 words, and are neither code nor notices; needs 5 sentences."""
    prose = []
    sentences = 0
    for line in text.splitlines():
        if len(line) > _C4_LONGEST_WORD and any(len(word) > _C4_LONGEST_WORD for word in line.split()):
            continue
        line = _C4_CITATION.sub("", line.strip())
        if not line.endswith(_C4_ENDS) or line.endswith("...") or len(line.split()) < _C4_LEAST_WORDS:
            continue
        lowered = line.lower()
        if "lorem ipsum" in lowered:
            return text, "c4_lorem_ipsum"
        if "javascript" in lowered:
            continue
        if "{" in line:
            return text, "c4_curly_bracket"
        if any(phrase in lowered for phrase in _C4_POLICY):
            continue
        sentences += len(_C4_SENTENCE.findall(line)) or 1
        prose.append(line)
    if sentences < _C4_LEAST_SENTENCES:
        return text, "c4_few_sentences"
    return "\n".join(prose).strip(), ""


def gopher(text: str) -> tuple[str, str]:
    words = text.split()
    spoken = [word for word in words if word.isalnum() or _LETTER_OR_DIGIT.search(word)]
    count = len(spoken)
    if not _WORDS[0] <= count <= _WORDS[1]:
        return text, "gopher_length"
    if not _MEAN_LETTERS[0] <= sum(map(len, spoken)) / count <= _MEAN_LETTERS[1]:
        return text, "gopher_word_length"
    symbols = text.count("#"), text.count("...") + text.count("…")
    if max(symbols) > _MOST_SYMBOLS_A_WORD * len(words):
        return text, "gopher_symbols"
    lines = [line for line in text.splitlines() if line.strip()]
    if sum(line.lstrip().startswith(_BULLETS) for line in lines) > _MOST_BULLETS * len(lines):
        return text, "gopher_bullets"
    if sum(line.rstrip().endswith(("...", "…")) for line in lines) > _MOST_ELLIPSES * len(lines):
        return text, "gopher_ellipses"
    with_letters = sum(word[0].isalpha() or any(map(str.isalpha, word)) for word in spoken)
    if with_letters < _LEAST_WITH_LETTERS * len(words):
        return text, "gopher_letters"
    common = set()
    for word in spoken:
        if (bare := word.strip(_AROUND_WORDS).lower()) in _COMMON_WORDS:
            common.add(bare)
            if len(common) == _LEAST_COMMON_WORDS:
                return text, ""
    return text, "gopher_common_words"


def gopher_repetition(text: str) -> tuple[str, str]:
    size = max(len(text), 1)
    for name, parts in (("paragraphs", _PARAGRAPH.split(text.strip())), ("lines", text.splitlines())):
        parts = [part for part in parts if part.strip()]
        count, characters = _duplicates(parts)
        if count > _MOST_DUPLICATES * len(parts) or characters > _MOST_DUPLICATE_CHARACTERS * size:
            return text, f"gopher_repeated_{name}"
    grams = NGrams(text.split())
    for n, most in _MOST_OF_TOP.items():
        if grams.top_characters(n) > most * size:
            return text, f"gopher_top_{n}_gram"
    # Longer repeated n-grams never hold more characters, so if a length has none, all longer ones have none either.
    for n, most in _MOST_OF_DUPLICATES.items():
        characters = grams.repeated_characters(n)
        if characters > most * size:
            return text, f"gopher_repeated_{n}_grams"
        if not characters:
            break
    return text, ""


def fineweb(text: str) -> tuple[str, str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if sum(line.endswith(_FINEWEB_ENDS) for line in lines) <= _LEAST_ENDING * len(lines):
        return text, "fineweb_punctuation"
    if _duplicates(lines)[1] >= _MOST_REPEATED * sum(map(len, lines)):
        return text, "fineweb_repeated_lines"
    if sum(len(line) < _SHORT for line in lines) >= _MOST_SHORT * len(lines):
        return text, "fineweb_short_lines"
    return text, ""


RULES: dict[str, Rule] = {"gopher_repetition": gopher_repetition, "gopher": gopher, "c4": c4, "fineweb": fineweb}


def _duplicates(parts: Sequence[str]) -> tuple[int, int]:
    """Counts repetitions of earlier parts, and their characters."""
    if len(set(parts)) == len(parts):
        return 0, 0
    repeated = [(count - 1, len(part)) for part, count in Counter(parts).items()]
    return sum(count for count, _ in repeated), sum(count * size for count, size in repeated)


class NGrams:
    """The n-grams of some words, compared by 64-bit hashes."""

    def __init__(self, words: Sequence[str]) -> None:
        numbers: dict[str, int] = {}
        codes = np.fromiter((numbers.setdefault(word, len(numbers)) for word in words), np.uint64, len(words))
        self._codes = (codes + np.uint64(1)) * _CODE_FACTOR
        self._lengths = np.fromiter(map(len, words), np.int64, len(words))

    def top_characters(self, n: int) -> int:
        """Counts the characters, with spaces, in all copies of the most frequent n-gram, the first of several.

        Returns 0 if none is repeated.
        """
        _, firsts, counts = np.unique(self._hashes(n), return_index=True, return_counts=True)
        most = int(counts.max(initial=0))
        if most < 2:
            return 0
        first = int(firsts[counts == most].min())
        return most * (int(self._lengths[first : first + n].sum()) + n - 1)

    def repeated_characters(self, n: int) -> int:
        """Counts the characters of words in repetitions of earlier n-grams; a word counts once."""
        hashes = self._hashes(n)
        _, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        repeated = np.flatnonzero(firsts[inverse] != np.arange(len(hashes)))
        # A word is in a repetition if more of them have begun than ended before it.
        borders = np.zeros(len(self._codes) + 1, np.int64)
        np.add.at(borders, repeated, 1)
        np.add.at(borders, repeated + n, -1)
        return int(self._lengths[np.cumsum(borders)[:-1] > 0].sum())

    def _hashes(self, n: int) -> UInt64[np.ndarray, " m"]:
        hashes = np.zeros(max(len(self._codes) - n + 1, 0), np.uint64)
        for place in range(n if len(hashes) else 0):
            hashes = hashes * _PLACE_FACTOR + self._codes[place : place + len(hashes)]
        return hashes
