"""The published rules for text quality, each against a text that it alone drops, and against brute force."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.cleaning import rules

SENTENCES = [
    "The harbour was quiet when the last of the boats came home with its lamps still burning.",
    "Nobody on the pier had slept, and the children were wrapped in blankets that smelled of salt.",
    "An old woman counted the masts aloud, as she had done in every storm for forty years.",
    "When she reached eleven she stopped, and the men beside her looked down at their boots.",
    "Somewhere behind the warehouses a dog began to bark at the rising water.",
    "It was then that the lighthouse keeper remembered the twelfth boat and the boy who steered it.",
]
PROSE = "\n".join(SENTENCES)


def test_prose_passes_every_rule_unchanged():
    for rule in rules.RULES.values():
        assert rule(PROSE) == (PROSE, "")


WORDS = [f"{first}{second}{third}" for first in "bdfgklm" for second in "aeiou" for third in "nrst"]


COMMON = ("the", "of", "and", "that", "with", "to", "be", "have")
UNCOMMON = " ".join(word for word in PROSE.split() if word.lower() not in COMMON)
TRAILING = "\n".join(line[:-1] + ("..." if number < 2 else ".") for number, line in enumerate(SENTENCES))
GROUPS = [" ".join(f"{word}x" for word in WORDS[start : start + 6]) for start in range(0, 36, 6)]
REPEATED = " ".join([*GROUPS, *WORDS, *GROUPS[::-1]])


@pytest.mark.parametrize(
    ("rule", "text", "reason"),
    [
        ("gopher", "The end of a very short text.", "gopher_length"),
        ("gopher", "the of " * 50_001, "gopher_length"),
        ("gopher", "of a i " * 30, "gopher_word_length"),
        ("gopher", "internationalization of globalization " * 30, "gopher_word_length"),
        ("gopher", PROSE + " #" * 12, "gopher_symbols"),
        ("gopher", PROSE + "..." * 5, ""),
        ("gopher", PROSE + "..." * 12, "gopher_symbols"),
        ("gopher", "\n".join("• " + line for line in SENTENCES), "gopher_bullets"),
        ("gopher", TRAILING, "gopher_ellipses"),
        ("gopher", PROSE + " 1234" * 30, "gopher_letters"),
        ("gopher", UNCOMMON, "gopher_common_words"),
        ("gopher", UNCOMMON + " the" * 2, "gopher_common_words"),
        ("gopher", UNCOMMON + ' "The end of, and', ""),
        ("gopher", " ".join(PROSE.split()[:45]) + " -- …" * 5, "gopher_length"),
        ("gopher", PROSE + " ½" * 30, "gopher_letters"),
        ("gopher", PROSE + " --" * 30, "gopher_letters"),
        ("gopher_repetition", "\n\n".join([*SENTENCES[:4], *SENTENCES[:2]]), "gopher_repeated_paragraphs"),
        ("gopher_repetition", "\n".join([*SENTENCES[:4], *SENTENCES[:2]]), "gopher_repeated_lines"),
        ("gopher_repetition", PROSE + " rain wind" * 25, "gopher_top_2_gram"),
        ("gopher_repetition", REPEATED, "gopher_repeated_5_grams"),
        ("c4", PROSE.replace("storm", "lorem ipsum"), "c4_lorem_ipsum"),
        ("c4", PROSE.replace("storm", "{storm}"), "c4_curly_bracket"),
        ("c4", PROSE + "\nBy these terms of use, {you} agree.", "c4_curly_bracket"),
        ("c4", "\n".join([*SENTENCES[:4], "Two [edit] words."]), "c4_few_sentences"),
        ("c4", "\n".join(SENTENCES[:4]), "c4_few_sentences"),
        ("c4", PROSE.replace(".", ""), "c4_few_sentences"),
        ("fineweb", PROSE.replace(".", ""), "fineweb_punctuation"),
        ("fineweb", "\n".join(["Menu.", "Home.", "News."] * 3 + SENTENCES[:2]), "fineweb_repeated_lines"),
        ("fineweb", "\n".join([f"Item {number}." for number in range(9)] + SENTENCES[:3]), "fineweb_short_lines"),
    ],
)
def test_a_rule_drops_what_it_is_for(rule, text, reason):
    assert rules.RULES[rule](text)[1] == reason


def test_c4_keeps_the_sentences_of_a_page_and_no_notices():
    page = "\n".join(
        [
            "Home | News | Contact",
            "[2] " + SENTENCES[0] + "[3]",
            "This site uses cookies to do its work.",
            *SENTENCES[1:4],
            "Please enable Javascript to read this page.",
            "Two words.",
            "This line has no end...",
            f"A {'very' * 300} long word is here.",
            SENTENCES[4] + " " + SENTENCES[5],
        ]
    )
    kept = [*SENTENCES[:4], SENTENCES[4] + " " + SENTENCES[5]]
    assert rules.c4(page) == ("\n".join(kept), "")


@given(st.lists(st.sampled_from(["ab", "cde", "f"]), max_size=30), st.integers(1, 6))
def test_characters_of_repeated_n_grams_are_counted_as_by_brute_force(words, n):
    grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    repeated = {start + k for start, gram in enumerate(grams) if gram in grams[:start] for k in range(n)}
    assert rules.NGrams(words).of_duplicates(n) == sum(len(words[place]) for place in repeated)
    counts = Counter(grams)
    most = max(counts.values(), default=0)
    sizes = {count * len(" ".join(gram)) for gram, count in counts.items() if count == most} if most > 1 else {0}
    assert rules.NGrams(words).of_top(n) in sizes


def test_no_text_makes_a_rule_fail():
    generator = random.Random(0)
    for size in (0, 1, 2, 5, 100):
        for _ in range(50):
            text = "".join(generator.choice("ab.\n \t#…•{[1]é中") for _ in range(size))
            for rule in rules.RULES.values():
                kept, reason = rule(text)
                assert kept == text or not reason
