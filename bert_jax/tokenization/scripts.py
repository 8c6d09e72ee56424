"""Characters of scripts that put no space between words, as the first bytes of a token show them.

A vocabulary marks words by the space before them, so in these scripts a whole phrase would count as one word. Masking
therefore takes each token that begins with such a character as a word (bert_jax/data/masking/sequences.py). The scripts
are those whose words Unicode finds by a dictionary (UAX #14, Line_Break=SA: Thai, Lao, Myanmar, Khmer, Tai) or that it
breaks between any two characters (Line_Break=ID: Chinese and Japanese), with their punctuation, and Tibetan. Korean
separates words by spaces, so its letters are not among them.
"""

import itertools
from bisect import bisect_right

# The first and the last code point of each range.
UNSPACED = (
    (0x0E00, 0x0FFF),  # Thai, Lao, Tibetan
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x1950, 0x19FF),  # Tai Le, New Tai Lue, Khmer symbols
    (0x1A20, 0x1AAF),  # Tai Tham
    (0x2E80, 0x312F),  # radicals, punctuation, Hiragana, Katakana, Bopomofo
    (0x3190, 0x9FFF),  # ideographs and symbols; the letters of Korean before them are left out
    (0xA9E0, 0xA9FF),  # Myanmar Extended-B
    (0xAA60, 0xAADF),  # Myanmar Extended-A, Tai Viet
    (0xF900, 0xFAFF),  # compatibility ideographs
    (0xFE30, 0xFE4F),  # compatibility forms
    (0xFF01, 0xFF9F),  # fullwidth forms, halfwidth Katakana
    (0x1AFF0, 0x1B16F),  # Kana supplements
    (0x20000, 0x3FFFF),  # ideographs of the supplementary planes
)
# Signs that belong to the character before them: vowels, tones and voicing (general categories Mn and Mc).
MARKS = (
    *((0x0E31, 0x0E31), (0x0E34, 0x0E3A), (0x0E47, 0x0E4E)),  # Thai
    *((0x0EB1, 0x0EB1), (0x0EB4, 0x0EBC), (0x0EC8, 0x0ECE)),  # Lao
    *((0x0F18, 0x0F19), (0x0F35, 0x0F35), (0x0F37, 0x0F37), (0x0F39, 0x0F39), (0x0F3E, 0x0F3F)),  # Tibetan
    *((0x0F71, 0x0F84), (0x0F86, 0x0F87), (0x0F8D, 0x0FBC), (0x0FC6, 0x0FC6)),
    *((0x102B, 0x103E), (0x1056, 0x1059), (0x105E, 0x1060), (0x1062, 0x1064), (0x1067, 0x106D)),  # Myanmar
    *((0x1071, 0x1074), (0x1082, 0x108D), (0x108F, 0x108F), (0x109A, 0x109D)),
    *((0x17B4, 0x17D3), (0x17DD, 0x17DD)),  # Khmer
    (0x3099, 0x309A),  # Kana
)


def is_unspaced(character: str) -> bool:
    """Whether a character is of a script without spaces between words."""
    return character >= "\u0e00" and _within(_UNSPACED_BORDERS, ord(character))


def begins_unspaced(utf8: bytes) -> bool:
    """Whether the bytes of a token begin with a character of such a script that is no mark.

    If they end within that character, all that it may be must lie between two characters of such scripts.
    """
    if utf8 < b"\xe0":  # a lower code point, as in most tokens
        return False
    first = _first_character(utf8)
    return first is not None and not _is_mark(first) and all(_within(_UNSPACED_BORDERS, code) for code in first)


def continues_character(utf8: bytes) -> bool:
    """Whether the bytes of a token begin within a character, or with a mark of one of these scripts."""
    if not utf8 or utf8.isascii():
        return False
    first = _first_character(utf8)
    return first is None or _is_mark(first)


def _is_mark(first: tuple[int, int]) -> bool:
    return first[0] == first[1] and _within(_MARK_BORDERS, first[0])


def _first_character(utf8: bytes) -> tuple[int, int] | None:
    """The lowest and the highest code point that the first character may have; None if it began before.

    They differ if bytes are missing at the end.
    """
    if not utf8 or utf8[0] < 0x80 or utf8[0] >= 0xF8:  # ASCII, or a byte that UTF-8 does not use
        return (0, 0)
    if utf8[0] < 0xC0:
        return None
    size = 2 if utf8[0] < 0xE0 else 3 if utf8[0] < 0xF0 else 4
    low = high = utf8[0] & (0x7F >> size)
    present = list(itertools.takewhile(lambda byte: 0x80 <= byte < 0xC0, utf8[1:size]))
    for byte in present:
        low = high = low << 6 | byte & 0x3F
    missing = 6 * (size - 1 - len(present))
    return low << missing, (high + 1 << missing) - 1


def _borders(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    """Where ranges begin and end, ascending: a code point is in one if an odd number of borders are not above it."""
    return [border for first, last in ranges for border in (first, last + 1)]


_UNSPACED_BORDERS, _MARK_BORDERS = _borders(UNSPACED), _borders(MARKS)


def _within(borders: list[int], code: int) -> bool:
    return bisect_right(borders, code) % 2 == 1
