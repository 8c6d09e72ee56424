"""Combining marks, which Python's regular expressions do not count as parts of words."""

import functools
import re
import sys
import unicodedata


@functools.cache
def combining_marks(wide: bool) -> str:
    r"""Vowel signs and accents (Unicode's categories Mn, Mc and Me), for the inside of a character class.

    \w has none of them, so that a pattern of letters and digits alone cuts words of Hindi, Tamil or vowelled Hebrew.
    Those above U+FFFF, of rarer scripts such as Adlam, are among them only if `wide`: `re` looks the others up in a
    table, and with them compares ranges one by one, which halves the speed.
    """
    marks = [point for point in range(sys.maxunicode + 1 if wide else 0x10000) if _is_mark(point)]
    return _ranges(marks)


def has_wide_marks(text: str) -> bool:
    """Whether a text has marks above U+FFFF."""
    if text.isascii() or len(text.encode("utf-16-le", "surrogatepass")) == 2 * len(text):
        return False  # in a fraction of the time: UTF-16 makes two of each character above U+FFFF
    return _wide_mark().search(text) is not None


@functools.cache
def _wide_mark() -> re.Pattern[str]:
    marks = [point for point in range(0x10000, sys.maxunicode + 1) if _is_mark(point)]
    return re.compile(f"(?=[\U00010000-\U0010ffff])[{_ranges(marks)}]")


def _is_mark(point: int) -> bool:
    return unicodedata.category(chr(point)).startswith("M")


def _ranges(points: list[int]) -> str:
    ranges: list[list[int]] = []
    for point in points:
        if ranges and point == ranges[-1][1] + 1:
            ranges[-1][1] = point
        else:
            ranges.append([point, point])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)
