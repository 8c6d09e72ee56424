"""Cuts lines of running text into sentences, by rule.

Next-sentence prediction wants actual sentences, not arbitrary spans (google-research/bert,
create_pretraining_data.py). A sentence ends at . ! ? or an ellipsis, with any closing quotes and brackets,
before a space and something other than a lower-case letter; unless the word before the full stop is known to
take one (Dr., J., e.g., No. 5). Scripts that put no space after a sentence have full stops of their own. A
line never joins the next; text with one sentence a line mostly stays as it is, but a line that holds what looks like
two sentences is cut too. A piece without a letter or digit (a lone full stop or quote) stays with the sentence before.
"""

import itertools
import re

# Goes up by one whenever a text may give other sentences than before: caches of tokens are kept by it.
RULE_VERSION = 1

_CLOSERS = "\"'”’»)\\]}"
_OPENERS = "\"'“‘«([{—–-"
_BEFORE_WORD = _OPENERS + "’\n\t"
# A place where a sentence may end: the marks, then the space. A lower-case ASCII letter after it rules most
# others out here, in the regular expression engine; what is left is looked at one by one.
# One set of marks comes first, which the engine looks for at the speed of a memory scan.
_CANDIDATE = re.compile(
    # A space follows. A run of marks is looked at from its first one only, and nothing is given back, so that the
    # work is linear whatever the text.
    rf"[.!?…؟。！？｡।۔](?:(?<=[.!?…؟])(?<![.!?…؟]{{2}})[.!?…؟]*+[{_CLOSERS}]*+\s++(?![a-z])"
    rf"|(?<=[。！？｡।۔])[”’」』）{_CLOSERS}]*\s*)"  # none need follow: Chinese, Japanese, Hindi, Urdu
)
_LONGEST_ABBREVIATION = 8
_LONGEST_LOOK_BACK = 64  # characters, for the space before an abbreviation

# Words that take a full stop before a name (or anything else) and never end a sentence.
_TITLES = """mr mrs ms mx dr drs prof ste mt rev hon fr sr sra sen rep gov pres gen maj col lt capt cpt
cmdr cdr adm sgt cpl pvt brig supt insp messrs mme mlle mgr msgr esq vs v viz cf eg e.g ie i.e ca approx
ed eds trans ibid univ dept assn bros"""
# Words that take one before a number: "No. 5", "Vol. II".
_COUNTED = "no nos nr fig figs eq sec ch chap p pp op vol vols bk pt art par"
# Words that take one and may end a sentence too: they do when a word follows that often begins one.
_EITHER = """st jr inc ltd co corp plc llc etc al a.m p.m b.c a.d bc u.s u.k u.s.a u.n e.u d.c ph.d m.d
b.a m.a jan feb mar apr jun jul aug sept oct nov dec ave blvd rd sq ft lb lbs oz est"""
_STARTERS = """The A An He She It They We You I This That These Those There Here In On At As By For From
With After Before During When While Although Though If But And Or So Then However Since Until Because
What Who Why How Where His Her Its Their Our My Your One Some Many Most All Both Each Another Other Not
No Yes"""

_NEVER_LAST = frozenset(_TITLES.split())
_BEFORE_NUMBER = frozenset(_COUNTED.split())
_MAY_BE_LAST = frozenset(_EITHER.split())
_OFTEN_FIRST = frozenset(_STARTERS.split())
_NEXT_WORD = re.compile(rf"[{re.escape(_OPENERS)}\s]*([^\s.,;:!?'’]*)")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")  # J, U.S, e.g; letters of any script
_ALPHANUMERIC = re.compile(r"[^\W_]")
_NUMBER = re.compile(r"\d|[IVXLCDM]+\b")


def split_sentences(line: str) -> list[str]:
    """The sentences of a line, in order, without outer white space; nothing but white space is lost."""
    word = _ALPHANUMERIC.search(line)
    if word is None:
        return [whole] if (whole := line.strip()) else []
    first_word = word.start()
    borders = [0]
    for match in _CANDIDATE.finditer(line, first_word):
        end = match.end()
        if end == len(line):
            break
        if _ends_sentence(line, borders[-1], match.start(), end):
            if _ALPHANUMERIC.search(line, borders[-1], end):
                borders.append(end)
            else:
                borders[-1] = end
    if _ALPHANUMERIC.search(line, borders[-1]) is None:
        borders.pop()
    return [line[begin:end].strip() for begin, end in itertools.pairwise([*borders, len(line)])]


def document_sentences(document: str) -> list[str]:
    """The sentences of a document: those of its lines, one after another."""
    sentences: list[str] = []
    for line in document.split("\n"):
        sentences += split_sentences(line)
    return sentences


def _ends_sentence(line: str, begin: int, mark: int, end: int) -> bool:
    """Whether the mark at `mark` ends the sentence begun at `begin`; the next one would begin at `end`."""
    following = line[end]
    if following in _OPENERS and end + 1 < len(line):
        following = line[end + 1]
    if following.islower():
        return False
    if line[mark] != "." or line[mark + 1] in ".!?…؟":
        return True
    begin_look = max(begin, mark - _LONGEST_LOOK_BACK)
    word = line[max(line.rfind(" ", begin_look, mark) + 1, begin_look) : mark].lstrip(_BEFORE_WORD)
    for dash in "—-":
        word = word.rpartition(dash)[2]
    if len(word) > _LONGEST_ABBREVIATION or not word or word == "I":
        return True
    lowered = word.lower()
    if lowered in _NEVER_LAST:
        return False
    if lowered in _BEFORE_NUMBER:
        return not (following.isdigit() or (lowered != "no" and _NUMBER.match(line, end)))
    if lowered in _MAY_BE_LAST or ((len(word) == 1 or "." in word) and _INITIALS.fullmatch(word)):
        return len(word) > 1 and _often_first(line, end)
    # "1. First, ..." is the number of a list; "in 1914. Then ..." is not.
    return not (word.isdigit() and line[begin:mark].strip() == word)


def _often_first(line: str, place: int) -> bool:
    match = _NEXT_WORD.match(line, place)
    return match is not None and match.group(1) in _OFTEN_FIRST
