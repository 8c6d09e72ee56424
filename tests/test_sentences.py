import hashlib
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.sentences import RULE_VERSION, document_sentences, split_sentences

SAMPLE = Path(__file__).parent.parent / "data_prep" / "sample" / "books"

CASES = [
    ["It was dark.", "He left!", "Did she?", "Yes."],
    ["Mr. and Mrs. Smith met Dr. J. R. Jones of St. Louis.", "They left."],
    ["He lived in the U.S.", "The U.S. Army came on Jan. 5, e.g. by ship."],
    ["See No. 5, Vol. II and pp. 3-4.", "No.", "It is not there."],
    ['"Stop!" he cried.', '"I will not."', "(She did.)", "[Then] he ran."],
    ["Wait... what?", "No!!", "It fell.", "“So it did.”", "‘Ah.’"],
    ["1. The first point.", "It was in 1914.", "Then it ended."],
    ["It rose by 3.5 per cent.", "See example.com for more."],
    ["It was I.", "He knew it in the 1990's.", "So did they."],
    ["彼は言った。", "「はい。」", "そして去った。"],
    ["यह एक वाक्य है।", "यह दूसरा है।"],
    ["Well!  said he.  and so on...  and left.", "It ended."],
    ["What؟؟؟", "He asked: what؟", "Yes."],
    ["She came—Mr. Darcy saw her--Mrs. Bennet too.", "All was well."],
]


@pytest.mark.parametrize("sentences", CASES, ids=[case[0][:20] for case in CASES])
def test_line_of_sentences_is_cut_between_them(sentences: list[str]) -> None:
    separator = "" if sentences[0].endswith("。") else " "
    assert split_sentences(separator.join(sentences)) == sentences


@pytest.mark.parametrize("sentence", [sentence for case in CASES for sentence in case])
def test_line_of_one_sentence_stays_whole(sentence: str) -> None:
    assert split_sentences(sentence) == [sentence]


@given(st.text(alphabet=st.sampled_from("aB1.!?…'\"“”()[] \t—。」x"), max_size=80))
def test_nothing_but_white_space_is_lost(line: str) -> None:
    sentences = split_sentences(line)
    assert "".join("".join(sentences).split()) == "".join(line.split())
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)


@given(st.text(max_size=60))
def test_any_unicode_is_taken(line: str) -> None:
    assert "".join("".join(split_sentences(line)).split()) == "".join(line.split())


@pytest.mark.parametrize(
    ("line", "sentences"),
    [
        ("He left. . She stayed.", ["He left. .", "She stayed."]),
        ("He left. ' . . ' And she stayed. ***", ["He left. ' . .", "' And she stayed. ***"]),
        (". . . He left. She stayed.", [". . . He left.", "She stayed."]),
        (" ... ! ", ["... !"]),
        ("***", ["***"]),
    ],
)
def test_piece_without_a_letter_or_digit_stays_with_the_sentence_before(line: str, sentences: list[str]) -> None:
    assert split_sentences(line) == sentences


@pytest.mark.parametrize("repeated", [".", "?!", '."', ". ", "Dr.\t", " ", '"', "1. "])
def test_work_is_linear_in_the_length_of_a_line(repeated: str) -> None:
    """Were it quadratic, this would take minutes."""
    for first, last in (("a", "b"), ("", " B")):
        line = first + repeated * (200_000 // len(repeated) ** 2) + last
        assert "".join("".join(split_sentences(line)).split()) == "".join(line.split())


def test_sentences_do_not_cross_lines() -> None:
    assert document_sentences("no full stop\nand on\n\nThird. Fourth") == ["no full stop", "and on", "Third.", "Fourth"]


def test_sentences_of_a_novel_have_the_length_of_sentences() -> None:
    """A wrong rule shows as fragments (a title cut off) or as whole paragraphs."""
    with lzma.open(SAMPLE / "austen_sense_and_sensibility.txt.xz", "rt", encoding="utf-8") as file:
        sentences = document_sentences(file.read())
    words = sorted(len(sentence.split()) for sentence in sentences)
    assert 12 <= words[len(words) // 2] <= 26
    cut_titles = [sentence for sentence in sentences if sentence.endswith((" Mr.", " Mrs.", " Dr.", " St."))]
    assert not cut_titles


def test_another_rule_has_another_version() -> None:
    """When this fails the rule has changed: raise RULE_VERSION, or caches of tokens keep the old sentences."""
    document = lzma.decompress(min(SAMPLE.glob("*.xz")).read_bytes()).decode()
    digest = hashlib.sha256("\n".join(document_sentences(document)).encode()).hexdigest()
    assert {1: "977ba96fa89c2a3a"}[RULE_VERSION] == digest[:16]
