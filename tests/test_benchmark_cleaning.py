"""The comparison of cleaning rules with datatrove: its pages reach every rule, and it explains each disagreement."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cleaning
from data_prep import readers
from data_prep.cleaning.rules import RULES

ROOT = Path(__file__).parent.parent
BOOKS = str(ROOT / "data_prep" / "sample" / "books" / "*.txt.xz")


def test_pages_lie_on_both_sides_of_every_rule() -> None:
    whole, pages = cleaning.texts_of(readers.expand(BOOKS), megabytes=0.1, count=480)
    assert sum(len(text.encode()) for text in whole) >= 100_000 and len(pages) == 480
    dropped = {name: Counter(rule(page)[1] for page in pages) for name, rule in RULES.items()}
    for name, found in dropped.items():
        assert len(pages) / 2 < found[""] < len(pages), name
    reasons = {f"gopher_{what}" for what in ("length", "word_length", "symbols", "ellipses", "letters", "common_words")}
    reasons |= {f"gopher_repeated_{what}" for what in ("lines", "paragraphs")}
    reasons |= {"c4_few_sentences", "c4_lorem_ipsum", "c4_curly_bracket"}
    reasons |= {"fineweb_punctuation", "fineweb_short_lines", "fineweb_repeated_lines"}
    assert reasons <= {reason for found in dropped.values() for reason in found}


def test_agreement_and_disagreements_are_counted() -> None:
    ours = [("a", ""), ("b", "gopher_bullets"), ("c", "gopher_bullets"), ("d", "gopher_length")]
    theirs = [("a", ""), ("b", ""), ("c", ""), ("d", "gopher_short_doc")]
    assert cleaning.agreement(ours, theirs, range(4)) == 0.5
    assert cleaning.agreement(ours, theirs, range(3, 4)) == 1.0
    (one,) = cleaning.differences("gopher", ["a", "bbb", "c", "d"], ours, theirs, own_words=False)
    assert (one["bert_jax"], one["datatrove"], one["documents"], one["example"]) == ("gopher_bullets", "keeps", 2, "c")
    line = f"{'x' * 29}."
    (short,) = cleaning.differences(
        "fineweb", [line], [(line, RULES["fineweb"](line)[1])], [("", "short_line_ratio")], True
    )
    assert short["bert_jax"] == "keeps" and "exactly 30 characters" in short["why"]
    (unknown,) = cleaning.differences("c4", ["a"], [("a", "c4_lorem_ipsum")], [("a", "")], own_words=False)
    assert unknown["why"] is None


def printed(*flags: str) -> list[dict[str, Any]]:
    line = [sys.executable, "-m", "benchmarks.cleaning", f"--text={BOOKS}", "--megabytes=0.1", "--repeats=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([*line, *flags], cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    return [json.loads(text) for text in ran.stdout.splitlines()]


@pytest.mark.slow
def test_command_prints_a_line_for_each_rule_without_the_peer() -> None:
    decisions, *speeds = printed("--pages=48")
    assert set(decisions["results"]) == {"dropped"} and set(decisions["results"]["dropped"]) == set(RULES)
    assert [line["name"] for line in speeds] == [f"cleaning_{name}" for name in (*RULES, "all")]
    assert all(line["value"] > 0 and line["peer_value"] is None for line in speeds)


@pytest.mark.slow
def test_every_disagreement_with_datatrove_has_an_explanation() -> None:
    """With equal words, c4 keeps the same text of every page, and the other rules agree on 95% of the pages."""
    if "BERT_JAX_DATATROVE_PYTHON" not in os.environ:
        pytest.skip("BERT_JAX_DATATROVE_PYTHON names no Python with datatrove and spacy")
    decisions, *_ = printed("--pages=240", f"--peer_python={os.environ['BERT_JAX_DATATROVE_PYTHON']}")
    for words in ("own_words", "same_words"):
        for rule, found in decisions["results"][words].items():
            assert all(one["why"] for one in found["differences"]), (words, rule, found)
    same = decisions["results"]["same_words"]
    assert same["c4"]["agreement"] == same["c4"]["same_kept_text"] == 1
    assert min(found["agreement"] for found in same.values()) > 0.95
