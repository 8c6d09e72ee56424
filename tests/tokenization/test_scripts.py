"""Characters of scripts without spaces, and tokens that begin with them or with a part of one."""

import sys
import unicodedata

import pytest
import unspaced_text

from bert_jax.tokenization.specification import MARKS, UNSPACED, begins_unspaced, continues_character, is_unspaced


def is_mark(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in MARKS)


def test_languages_without_spaces_are_told_from_others() -> None:
    assert all(is_unspaced(character) for character in "中国語ひらがなカタカナーｶﾅ，。「」、！ไทยລາວမြန်ខ្មែរབོད𠮷㐀")
    assert not any(is_unspaced(character) for character in " aé.,“”…—한국어ㅋㅠहिन्दी।عربيעβя0①")
    text = "".join((*unspaced_text.CHINESE, *unspaced_text.JAPANESE, *unspaced_text.THAI))
    others = {character for character in text if not is_unspaced(character)}
    assert others <= {*"Python2020 “”"}


def test_marks_are_those_of_unicode() -> None:
    """In the blocks of Thai, Lao, Tibetan, Myanmar and Khmer, and of Kana."""
    for code in [*range(0x0E00, 0x10A0), *range(0x1780, 0x1800), *range(0x3040, 0x3100)]:
        category = unicodedata.category(chr(code))
        if category != "Cn":  # not assigned by this version of Unicode
            assert is_mark(chr(code)) == (category in ("Mn", "Mc")), hex(code)


def test_every_character_and_every_part_of_one_is_told_as_by_enumeration() -> None:
    """Each part at the beginning of a character may become any of the characters that begin so."""
    begun: dict[bytes, tuple[str, str]] = {}  # the lowest and the highest
    for code in range(0x80, sys.maxunicode + 1):
        outermost = code % 64 in (0, 63)  # the lowest or the highest with the same bytes but the last
        examined = code < 0x3200 or code % 101 == 0 or 0xFE00 < code < 0x10000
        if not (outermost or examined) or 0xD800 <= code < 0xE000:
            continue
        character = chr(code)
        whole = character.encode()
        if examined:
            mark = is_mark(character)
            assert begins_unspaced(whole + b"a") == (is_unspaced(character) and not mark), hex(code)
            assert continues_character(whole + b"a") == mark
            rests = [whole[at:] for at in range(1, len(whole))]
            assert all(continues_character(rest) and not begins_unspaced(rest) for rest in rests)
        for size in range(1, len(whole)):
            first, _ = begun.get(whole[:size], (character, character))
            begun[whole[:size]] = first, character
    for part, (first, last) in begun.items():
        assert begins_unspaced(part) == (is_unspaced(first) and is_unspaced(last)), part
        assert not continues_character(part)


@pytest.mark.parametrize("utf8", [b"", b"a", b" \xe4", b"<0xE4>"])
def test_ascii_is_neither(utf8: bytes) -> None:
    assert not begins_unspaced(utf8) and not continues_character(utf8)


def test_ranges_are_ascending_and_apart() -> None:
    for ranges in (UNSPACED, MARKS):
        borders = [border for one in ranges for border in (one[0], one[1] + 1)]
        assert borders == sorted(borders)
