"""Splits lines of running text into sentences, by rules for the detected language (`split_sentences`).

Next-sentence prediction needs actual sentences, not arbitrary spans (google-research/bert,
create_pretraining_data.py). A sentence ends at . ! ? or an ellipsis (in Greek also at a semicolon), with any closing
quotes and brackets, before a space and anything other than a lower-case letter, unless the word before the full stop
is known to take one (Dr., J., z. B., No. 5: languages.toml). Scripts without a space after sentences have full stops
of their own; Thai has none, and is split at spaces. A sentence never spans two lines, and a line may hold several. A
piece without a letter or digit (a single full stop or quote) stays with the sentence before it.

`joined_sentences` replaces line breaks by spaces, or by nothing between characters of scripts without spaces between
words (Chinese, Japanese, Thai). `kept_pieces` keeps all white space, for code and verse.
"""

import itertools
import re
import tomllib
import unicodedata
from pathlib import Path
from typing import NamedTuple

from bert_jax.tokenization.specification import is_unspaced
from bert_jax.tokenization.wordpiece import WHITE_SPACE


class Language(NamedTuple):
    """Abbreviations, grouped by whether a full stop after them ends the sentence; languages.toml explains the lists."""

    common: frozenset[str]
    never: frozenset[str]  # the full stop never ends a sentence: titles before names
    counted: frozenset[str]  # it does not end a sentence before a number: No. 5
    may: frozenset[str]  # it ends one if a common word follows
    last: frozenset[str]  # it ends one before anything but a lower-case letter, however short the word
    known: frozenset[str]  # all abbreviations above, and their parts
    ordinals: bool  # whether a number with a full stop is an ordinal: der 4. Mai


TITLES = frozenset(("mr", "mrs", "dr", "prof", "rev", "st"))  # known in every language


def _language(ordinals: bool = False, **words: str) -> Language:
    listed = {name: frozenset(words.get(name, "").split()) for name in ("common", "never", "counted", "may", "last")}
    abbreviations = frozenset().union(*(listed[name] for name in ("never", "counted", "may", "last")))
    parts = (part for word in abbreviations for part in (word, *word.lower().split(".")))
    return Language(**listed, known=TITLES.union(parts), ordinals=ordinals)


_TABLES = tomllib.loads((Path(__file__).parent / "languages.toml").read_text(encoding="utf-8"))
LANGUAGES = {name: _language(**table) for name, table in _TABLES.items()}


# Increase this whenever a text may give other sentences than before, or worker.py passes them to the tokenizer in
# another way. Token caches have it in their keys, and a job that began with another version is not resumed.
RULE_VERSION = 4

_CLOSERS = "\"'”’“‘»«›)\\]}"
_OPENERS = "\"'“‘«‹„‚»([{¿¡—–-"  # also dashes
_UNSPACED = "。．！？｡।॥།༎۔։።။។"  # marks that end a sentence without a space
# A position where a sentence may end: the marks, then the space. The engine of regular expressions rules most positions
# out by a lower-case ASCII letter after the space; Python code checks the others.
# A set of marks comes first, which the engine finds at the speed of a memory scan. A run of marks is examined only from
# its first mark on, and possessive quantifiers never backtrack, so the work is linear for any text. French puts a space
# before a closing quote.
_SPACED = (
    rf"(?:(?<=[MARKS])(?<![MARKS]{{2}})[MARKS]*+[{_CLOSERS}]*+(?:[ \xa0\u202f][»”](?=\s))?+\s++(?![a-z])"
    # No space is needed in Chinese, Japanese, Hindi, Urdu, Armenian, Ethiopic, Burmese, Khmer and Tibetan. A particle
    # such as と after a closing bracket means that the quotation is in the middle of a Japanese sentence, and a wide
    # full stop may be in the middle of a number.
    rf"|(?<=[{_UNSPACED}])[{_UNSPACED}]*+[\"'”’」』）〉》】)\]}}]*+"
    r"(?!(?<=[」』）])[とっなのがはをにもで、])(?!(?<=\d．)\d)\s*)"
)


def _candidate(marks: str) -> re.Pattern[str]:
    return re.compile(rf"[{marks}{_UNSPACED}]" + _SPACED.replace("MARKS", marks))


_CANDIDATE = _candidate(".!?…؟")
_GREEK = _candidate(".!?…;\u037e")
_LONGEST_LOOK_BACK = 64  # characters, for the space before an abbreviation
_LONGEST_ABBREVIATION = 8
_BEFORE_WORD = _OPENERS + "’\n\t\u3000"
_ALPHANUMERIC = re.compile(r"[^\W_]")
_BEFORE_FIRST = re.compile(rf"[{re.escape(_OPENERS)}\s]*+")
_NEXT_WORD = re.compile(r"[^\s.,;:!?'’]*")
_NUMBER = re.compile(r"\d|[IVXLCDM]+\b")
# Devanagari writes an initial as a syllable, or spells the name of a Latin letter.
_SYLLABLE = (
    "[\u0904-\u0939\u0958-\u0961\u0972-\u097f]"
    "(?:\u094d\u200d?[\u0915-\u0939\u0958-\u095f]"
    "|[\u0900-\u0903\u093a-\u093c\u093e-\u094f\u0955-\u0957\u0962\u0963])*+"
)
_LETTER_NAME = "एफ|एच|आई|आय|एल|एम|एन|आर|एस|डब्ल्यू|डब्लू|एक्स|वाई|वाय|जेड|ज़ेड|ज़ेड|झेड"
_INITIAL = rf"(?:{_LETTER_NAME}|{_SYLLABLE}|[^\W\d_])"
_INITIALS = re.compile(rf"(?:{_INITIAL}\.)*{_INITIAL}")  # J, U.S, e.g; letters of any script
_ORDINAL = re.compile(r"\d{1,2}|[IVXLCDM]+")
_BEFORE_INITIAL = re.compile(r"(?:(?<!\w)[^\W\d_]{1,3}\.\s?){1,3}\Z")  # the "z. " of "z. B."

_THAI = re.compile("[\u0e00-\u0eff]")
_SHORTEST_THAI = 40  # characters; a shorter piece joins the one before it
_THAI_PIECE = re.compile(r".{80,}?(?:\s+|\Z)|.+\Z", re.DOTALL)  # spaces separate clauses; short ones stay together

_BY_COMMON_WORD = {  # the languages in which a word is common
    word: tuple(name for name, language in LANGUAGES.items() if word in language.common)
    for language in LANGUAGES.values()
    for word in language.common
}
_DETECTED_FROM = 500  # characters of a text


def detect_language(text: str) -> str:
    """Detects the language at the beginning of a text, one of LANGUAGES; English if no word decides."""
    votes: dict[str, int] = {"en": 0}
    for word in text[:_DETECTED_FROM].lower().split():
        for name in _BY_COMMON_WORD.get(word, ()):
            votes[name] = votes.get(name, 0) + 1
    return max(votes, key=votes.__getitem__)


def document_sentences(document: str) -> list[str]:
    """Splits a document's lines into sentences."""
    return joined_sentences(document)[0]


def split_sentences(line: str, language: str | None = None) -> list[str]:
    """Splits a line into sentences, and loses nothing but the white space around them.

    Args:
        language: One of LANGUAGES; detected by default.
    """
    first = 0  # the first letter or digit: marks before it end no sentence
    if not line[:1].isalnum():
        word = _ALPHANUMERIC.search(line)
        if word is None:
            return [whole] if (whole := line.strip()) else []
        first = word.start()
    name = language or detect_language(line)
    rules = LANGUAGES[name]
    # Places instead of text, because each of many marks would otherwise copy the whole sentence that it joins.
    begins: list[int] = []  # of the sentences
    begin = 0  # of the text after them
    for match in (_GREEK if name == "el" else _CANDIDATE).finditer(line, first):
        mark, end = match.span()
        if end == len(line):
            break
        if not "A" <= line[end] <= "Z":
            # No lower-case letter may follow, even after opening quotes and dashes. Running text in Georgian has no
            # case, although Unicode calls its letters lower-case.
            first = _BEFORE_FIRST.match(line, end).end()  # type: ignore[union-attr]
            if first < len(line) and line[first].islower() and not "\u10d0" <= line[first] <= "\u10ff":
                continue
        if line[mark] in ".．" and line[mark + 1] not in ".．!?…؟" and not _ends(line, begin, mark, end, rules):
            continue
        if _ALPHANUMERIC.search(line, begin, end):  # marks alone join the sentence before them
            begins.append(begin)
        begin = end
    if _ALPHANUMERIC.search(line, begin):
        begins.append(begin)
    sentences = [line[begin:end].strip() for begin, end in itertools.pairwise([*begins, len(line)])]
    has_thai = "\u0e32" in line or "\u0eb2" in line  # the frequent vowel aa of Thai and of Lao
    return _cut_at_spaces(sentences) if has_thai else sentences


def _ends(line: str, begin: int, mark: int, end: int, rules: Language) -> bool:
    """Whether the full stop at `mark` ends the sentence from `begin`; the next one would begin at `end`."""
    look = max(begin, mark - _LONGEST_LOOK_BACK)
    word = line[max(line.rfind(" ", look, mark) + 1, look) : mark]
    # Most words are decided here: plain words of two letters or more that are no known abbreviation.
    if (
        len(word) > 1
        and word.isalpha()
        and word.lower() not in rules.known
        and not (rules.ordinals and word.isupper())
        and not "\u0900" <= word[0] <= "\u0eff"
    ):
        return True
    word = word.lstrip(_BEFORE_WORD).replace("\u202f", "\xa0").rpartition("\xa0")[2].replace("．", ".")
    if _THAI.match(word):  # Thai has no full stop, so this is an abbreviation such as กม.
        return False
    # `word` becomes the part after the last dash, and `whole` the abbreviation with its earlier parts: "z.B." for "B".
    whole = word
    for dash in "—–-":
        word = word.rpartition(dash)[2]
    if not word or len(word) > _LONGEST_ABBREVIATION:
        return True
    if line[max(mark - len(whole) - 2, 0) : mark - len(whole)].rstrip().endswith("."):  # the "z. " of "z. B."
        before = _BEFORE_INITIAL.search(line, look, mark - len(whole))
        whole = "".join(before.group().split()) + whole if before else whole
    if whole in rules.last or whole.lower() in rules.last:
        return True
    lowered = word.lower()
    if lowered in rules.never or (lowered in TITLES and lowered not in rules.may) or whole.lower() in rules.never:
        return False
    if lowered in rules.counted:
        if line[end].isdigit() or (lowered != "no" and _NUMBER.match(line, end)):
            return False
        if len(word) > 1:
            return True
    if lowered in rules.may or whole.lower() in rules.may or (rules.ordinals and _ORDINAL.fullmatch(word)):
        return _often_first(line, end, rules)
    if _INITIALS.fullmatch(word):
        if "." not in word:
            return word == "I" and rules is LANGUAGES["en"]
        return _often_first(line, end, rules)
    # "1. First, ..." is the number of a list; "in 1914. Then ..." is not.
    return not (word.isdigit() and line[begin:mark].strip() == word)


def _often_first(line: str, place: int, rules: Language) -> bool:
    """Whether the word at a position often begins sentences."""
    first = _BEFORE_FIRST.match(line, place).end()  # type: ignore[union-attr]
    word = _NEXT_WORD.match(line, first, first + _LONGEST_LOOK_BACK)
    return word is not None and word.group().lower() in rules.common


def _cut_at_spaces(sentences: list[str]) -> list[str]:
    """Splits Thai and Lao sentences at spaces; leaves other scripts as they are."""
    pieces: list[str] = []
    for sentence in sentences:
        if not _THAI.search(sentence):
            pieces.append(sentence)
            continue
        begins: list[int] = []
        for match in _THAI_PIECE.finditer(sentence):
            piece = match.group().strip()
            if not begins or (len(piece) >= _SHORTEST_THAI and _ALPHANUMERIC.search(piece)):
                begins.append(match.start())
        pieces += [sentence[begin:end].strip() for begin, end in itertools.pairwise([*begins, len(sentence)])]
    return pieces


# Marks after and before a character, which do not decide whether a space separates it from the next one.
_AFTER = "\"'”’“‘»«›)]}.!?…,;:—–-"
_BEFORE = "\"'“‘«‹„‚»([{¿¡—–-"
# Full stops that need no space after them, though their scripts separate words by spaces (Hindi, Urdu, Armenian,
# Ethiopic). Joining puts a space after them.
_SPACED_STOPS = "।॥۔։።"
# Unicode's White_Space, at which byte-level BPE splits text. (str.isspace also includes U+001C to U+001F.)
_WHITE_SPACE = frozenset(" \n" + WHITE_SPACE)


def joined_sentences(document: str) -> tuple[list[str], list[bool]]:
    """Joins a document's lines, and returns its sentences and whether they follow the one before without a space."""
    language = detect_language(document)
    sentences: list[str] = []
    direct: list[bool] = []
    for line in document.split("\n"):
        in_line = split_sentences(line, language)
        if not in_line:
            continue
        direct.append(bool(sentences) and _joins_lines(sentences[-1], in_line[0]))
        sentences += in_line
        if line.isascii():
            direct += [False] * (len(in_line) - 1)
            continue
        # Splitting only drops white space. If two sentences touch in the line, there was none between them.
        end = line.index(in_line[0]) + len(in_line[0])
        for before, sentence in itertools.pairwise(in_line):
            begin = line.index(sentence, end)
            direct.append(begin == end and before.rstrip(_AFTER)[-1:] not in _SPACED_STOPS)
            end = begin + len(sentence)
    return sentences, direct


def kept_pieces(document: str) -> list[str]:
    """Splits a document into sentences with the white space before them; joined, they are the document.

    Byte-level BPE gives a piece the same ids as in the document: sentences stay together if the library might not split
    between them.
    """
    language = detect_language(document)
    pieces: list[str] = []
    begin = end = 0  # of the last piece, of the last sentence
    joins = True  # whether the next sentence belongs to the last piece
    for line in document.split("\n"):
        for sentence in split_sentences(line, language):
            # Only white space stands between sentences, so this is where the sentence begins.
            place = document.index(sentence, end)
            if not joins:
                # GPT-2's regular expression always splits before the first of several white spaces, and between
                # punctuation and a letter.
                before, after = document[end - 1], document[end]
                if after in _WHITE_SPACE or (after.isalpha() and is_unspaced(after) and not before.isalnum()):
                    pieces.append(document[begin:end])
                    begin = end
            end = place + len(sentence)
            # StripAccents deletes a line of accents, and the white space before and after it becomes one.
            joins = unicodedata.category(sentence[0]) == "Mn"
    return [*pieces, document[begin:]]


def _joins_lines(before: str, after: str) -> bool:
    """Whether two lines join without a space."""
    # Punctuation of unspaced scripts includes its own space. Otherwise both characters must be of such scripts.
    if any(is_unspaced(end) and unicodedata.category(end).startswith("P") for end in (before[-1], after[0])):
        return True
    last, first = before.rstrip(_AFTER)[-1:] or before[-1], after.lstrip(_BEFORE)[:1] or after[0]
    return is_unspaced(last) and is_unspaced(first)
