"""Combining marks, which Python's regular expressions do not count as parts of words."""

import functools
import unicodedata


@functools.cache
def combining_marks() -> str:
    r"""Vowel signs and accents (Unicode's categories Mn, Mc and Me), for the inside of a character class.

    \w has none of them, so that a pattern of letters and digits alone cuts words of Hindi, Tamil or vowelled Hebrew.
    Those above U+FFFF, of rarer scripts such as Adlam, are left out: `re` looks the others up in a table, and with them
    compares ranges one by one, which halves the speed.
    """
    marks = [point for point in range(0x10000) if unicodedata.category(chr(point)).startswith("M")]
    ranges: list[list[int]] = []
    for mark in marks:
        if ranges and mark == ranges[-1][1] + 1:
            ranges[-1][1] = mark
        else:
            ranges.append([mark, mark])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)
