"""Published rules for the quality of web text, by name. Each reads one document, and names why it drops it.

c4                 Raffel et al. 2020, section 2.2: lines and pages that are not prose; it also removes lines. The
                   paper's list of bad words is left out.
gopher             Rae et al. 2021, appendix A.1.1: length, length of words, symbols, bullets, common English words
gopher_repetition  the same, table A1: repeated lines, paragraphs and n-grams
fineweb            Penedo et al. 2024, section 3.6: lines without punctuation, short lines, repeated lines

Words are what white space separates, so these rules are for languages that write spaces; c4 and the common words of
gopher are for English. Where a paper leaves a detail open, it is that of huggingface/datatrove, which computes words by
another tokenizer, and so decides a few borderline documents differently.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

# The text that is kept, which c4 shortens, and why the document is dropped; an empty reason: it is not.
Rule = Callable[[str], tuple[str, str]]

_PARAGRAPH = re.compile(r"\n{2,}")
_LETTER = re.compile(r"[^\W\d_]")
_PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")

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
_LEAST_ENDING, _MOST_SHORT, _SHORT, _MOST_REPEATED = 0.12, 0.67, 30, 0.1


def c4(text: str) -> tuple[str, str]:
    """Keeps lines that end as a sentence does, have 3 words, and are neither code nor notices, and then 5 sentences."""
    kept = []
    sentences = 0
    for line in text.splitlines():
        words = line.split()
        if len(words) < _C4_LEAST_WORDS or any(len(word) > _C4_LONGEST_WORD for word in words):
            continue
        line = _C4_CITATION.sub("", line.strip())
        if not line.endswith(_C4_ENDS) or line.endswith("..."):
            continue
        lowered = line.lower()
        if "lorem ipsum" in lowered:
            return text, "c4_lorem_ipsum"
        if "javascript" in lowered or any(phrase in lowered for phrase in _C4_POLICY):
            continue
        if "{" in line:
            return text, "c4_curly_bracket"
        sentences += len(_C4_SENTENCE.findall(line)) or 1
        kept.append(line)
    if sentences < _C4_LEAST_SENTENCES:
        return text, "c4_few_sentences"
    return "\n".join(kept), ""


def gopher(text: str) -> tuple[str, str]:
    words = text.split()
    spoken = [word for word in words if word not in _PUNCTUATION]
    count = len(spoken)
    if not _WORDS[0] <= count <= _WORDS[1]:
        return text, "gopher_length"
    if not _MEAN_LETTERS[0] <= sum(map(len, spoken)) / count <= _MEAN_LETTERS[1]:
        return text, "gopher_word_length"
    symbols = text.count("#"), text.count("...") + text.count("…")
    if max(symbols) > _MOST_SYMBOLS_A_WORD * count:
        return text, "gopher_symbols"
    lines = [line for line in text.splitlines() if line.strip()]
    if sum(line.lstrip().startswith(_BULLETS) for line in lines) > _MOST_BULLETS * len(lines):
        return text, "gopher_bullets"
    if sum(line.rstrip().endswith(("...", "…")) for line in lines) > _MOST_ELLIPSES * len(lines):
        return text, "gopher_ellipses"
    if sum(_LETTER.search(word) is not None for word in words) < _LEAST_WITH_LETTERS * count:
        return text, "gopher_letters"
    common = 0
    for word in words:
        common += word.lower() in _COMMON_WORDS
        if common == _LEAST_COMMON_WORDS:
            return text, ""
    return text, "gopher_common_words"


def gopher_repetition(text: str) -> tuple[str, str]:
    size = max(len(text), 1)
    for what, parts in (("paragraphs", _PARAGRAPH.split(text.strip())), ("lines", text.splitlines())):
        parts = [part for part in parts if part.strip()]
        count, characters = _duplicates(parts)
        if count > _MOST_DUPLICATES * len(parts) or characters > _MOST_DUPLICATE_CHARACTERS * size:
            return text, f"gopher_repeated_{what}"
    words = text.split()
    lengths = list(map(len, words))
    for n, most in _MOST_OF_TOP.items():
        if _of_top(words, n) > most * size:
            return text, f"gopher_top_{n}_gram"
    # The share of characters in longer repeated n-grams is never larger, so without a repeated 5-gram all are 0.
    for n, most in _MOST_OF_DUPLICATES.items():
        found = _of_duplicates(words, lengths, n)
        if found > most * size:
            return text, f"gopher_repeated_{n}_grams"
        if not found:
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
    """How many parts repeat an earlier one, and their characters."""
    if len(set(parts)) == len(parts):
        return 0, 0
    repeated = [(count - 1, len(part)) for part, count in Counter(parts).items()]
    return sum(count for count, _ in repeated), sum(count * size for count, size in repeated)


def _of_top(words: Sequence[str], n: int) -> int:
    """The characters of all occurrences of the most frequent n-gram; of n-grams as frequent, of the first."""
    grams = Counter(zip(*(words[start:] for start in range(n)), strict=False))
    if not grams:
        return 0
    gram, count = grams.most_common(1)[0]
    return count * (sum(map(len, gram)) + n - 1) if count > 1 else 0


def _of_duplicates(words: Sequence[str], lengths: Sequence[int], n: int) -> int:
    """The characters of words within n-grams that repeat an earlier one, each word once."""
    seen: set[tuple[str, ...]] = set()
    characters = covered = 0
    for start, gram in enumerate(zip(*(words[begin:] for begin in range(n)), strict=False)):
        if gram in seen:
            first = max(start, covered)
            characters += sum(lengths[first : start + n])
            covered = start + n
        seen.add(gram)
    return characters
