"""IOB1, IOB2 and IOBES against seqeval's strict readers, and entity scores against the official Perl script."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval import scheme as strict

from bert_jax.config import TaskConfig
from bert_jax.model.heads import structured
from bert_jax.tasks import registry
from bert_jax.tasks.kinds import tagging
from bert_jax.tasks.kinds.tagging import TaggingTask, entities, irregular_tags, tags_of
from bert_jax.tasks.metrics import TAGGING_METRICS, compute_metrics
from bert_jax.tasks.rows import Sentence, Span, Split

ENTITY_METRICS = ("precision", "recall", "f1")
BIO = st.lists(st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"]), min_size=1, max_size=9)
IOBES = st.lists(st.sampled_from(["O", *(f"{m}-{t}" for m in "BIES" for t in "XY")]), min_size=1, max_size=9)

BARE_IOBES = st.lists(st.lists(st.sampled_from("OBIES"), min_size=1, max_size=9), min_size=2, max_size=2)


def strictly(tags: list[str], scheme: type) -> list[Span]:
    """The entities that seqeval's strict reader of a scheme finds."""
    return [Span(found.tag, found.start, found.end) for found in strict.Tokens(tags, scheme).entities]


@settings(deadline=None)
@given(tags=IOBES | BIO)
def test_rewritten_tags_mark_the_same_entities_and_all_follow(tags: list[str]) -> None:
    found = entities(tags)
    for ends, scheme in ((False, strict.IOB2), (True, strict.IOBES)):
        rewritten = list(tags_of(found, len(tags), ends))
        assert entities(rewritten) == found == strictly(rewritten, scheme)
        assert irregular_tags([rewritten]) == 0
        assert structured.marks_ends(rewritten) == (ends and bool(found))


@settings(deadline=None)
@given(tags=BIO)
def test_tags_of_bio_are_regular_where_a_strict_reader_finds_all_that_conlleval_finds(tags: list[str]) -> None:
    readings = [strictly(tags, strict.IOB2) == entities(tags), strictly(tags, strict.IOB1) == entities(tags)]
    assert (irregular_tags([tags]) == 0) == any(readings)


@settings(deadline=None)
@given(tags=IOBES)
def test_tags_of_iobes_are_regular_where_a_strict_reader_finds_all_that_conlleval_finds(tags: list[str]) -> None:
    if structured.marks_ends(tags):
        assert (irregular_tags([tags]) == 0) == (strictly(tags, strict.IOBES) == entities(tags))


@pytest.mark.parametrize(
    ("sentences", "count"),
    [
        ([["B-X", "I-X", "O", "I-X"], ["B-Y"]], 1),  # IOB2 with an I-X after O
        ([["B-LOC", "I-PER", "O"], ["B-LOC"], ["B-PER"]], 1),
        ([["I-X", "I-X", "B-X", "I-X"], ["I-Y", "I-X", "O"]], 0),  # IOB1
        ([["I-X", "I-X", "B-X"], ["I-Y", "O", "B-X"]], 1),  # IOB1 with a B-X after O
        ([["B-X", "E-X", "S-Y"]], 0),
        ([["B-X", "O", "E-Y", "S-Y", "B-X", "I-Y", "E-Y", "B-Y"]], 4),  # cut off, unbegun, of two types, unended
    ],
)
def test_tags_that_cannot_follow_are_counted(sentences: list[list[str]], count: int) -> None:
    assert irregular_tags(sentences) == count


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from("OBI"), min_size=1, max_size=9), min_size=2, max_size=2) | BARE_IOBES)
def test_tags_without_types_are_those_of_one_type(sentences: list[list[str]]) -> None:
    typed = [[tag if tag == "O" else f"{tag}-X" for tag in tags] for tags in sentences]
    found, wanted = list(map(entities, sentences)), list(map(entities, typed))
    assert [[span._replace(label="X") for span in spans] for spans in found] == wanted
    assert {span.label for spans in found for span in spans} <= {"_"}
    assert irregular_tags(sentences) == irregular_tags(typed)
    for ends in (False, True):
        rewritten = [tags_of(spans, 9, ends) for spans in found]
        assert list(map(entities, rewritten)) == found and {tag for tags in rewritten for tag in tags} <= set("OBIES")
    lengths = min(map(len, sentences))
    truth, guess = ([tags[:lengths]] for tags in sentences)
    wanted_truth, wanted_guess = ([tags[:lengths]] for tags in typed)
    assert compute_metrics(TAGGING_METRICS, ENTITY_METRICS, truth, guess) == compute_metrics(
        TAGGING_METRICS, ENTITY_METRICS, wanted_truth, wanted_guess
    )


@settings(deadline=None)
@given(
    tags=st.lists(
        st.sampled_from(["O", *(f"{mark}-{name}" for mark in "BILU" for name in "XY")]), min_size=1, max_size=9
    )
)
def test_bilou_is_iobes_by_other_letters(tags: list[str]) -> None:
    split = Split(Path("train.conll"), (Sentence(tuple("w" * len(tags)), tuple(tags), (1,)),), True)
    (found,) = tagging.with_usual_letters(split).items
    assert found.tags is not None and strictly(list(found.tags), strict.IOBES) == strictly(tags, strict.BILOU)
    if not {tag[0] for tag in tags} & set("LU"):
        assert found.tags == tuple(tags)


def test_bmes_is_iobes_and_classes_stay_as_they_are() -> None:
    for tags, wanted in [
        (("B-X", "M-X", "E-X", "S-Y"), ("B-X", "I-X", "E-X", "S-Y")),
        (("B", "M", "E"), ("B", "M", "E")),
        (("L-X", "NOUN"), ("L-X", "NOUN")),
        (("M-X", "L-X"), ("M-X", "L-X")),
    ]:
        split = Split(
            Path("train.conll"), (Sentence(tuple("w" * len(tags)), tags, (1,)), Sentence(("a",), None, ())), True
        )
        first, second = tagging.with_usual_letters(split).items
        assert first.tags == wanted and second.tags is None


def test_tags_without_types_mark_entities_where_they_can() -> None:
    assert structured.marks_entities({"O", "B", "I"}) and structured.marks_entities({"O", "I"})
    for classes in ({"B", "I"}, {"O", "S"}, {"O", "B", "M", "E"}, {"I", "E"}):
        assert not structured.marks_entities(classes)
    assert tagging.closed_set({"O", "I"}) == {"O", "B", "I"}
    assert tagging.closed_set({"O", "B", "E"}) == set("OBIES")
    task, path = TaggingTask("own", max_length=8), Path("train.conll")
    split = Split(path, (Sentence(("a", "b"), ("I", "I"), (1, 2)), Sentence(("c", "d"), ("O", "I"), (4, 5))), True)
    task = task.complete(split)
    assert task.labels == ("O", "B", "I") and task.metrics[0] == "f1"
    assert task.label_ids(split) == [1, 2, 0, 1]  # IOB1 is encoded as IOB2, also in a sentence without O


def test_a_set_of_tags_is_closed_in_its_scheme() -> None:
    assert tagging.closed_set({"I-X"}) == {"O", "B-X", "I-X"}
    assert tagging.closed_set({"S-X", "O"}) == {"O", "B-X", "I-X", "E-X", "S-X"}
    assert not structured.marks_entities({"O"}) and not structured.marks_entities({"B-X", "NOUN"})


@settings(deadline=None)
@given(
    pairs=st.lists(
        st.lists(st.tuples(*[st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"])] * 2), min_size=1), min_size=1
    )
)
def test_entity_scores_are_shares_of_equal_entities(pairs: list[list[tuple[str, str]]]) -> None:
    truth, guess = ([[pair[side] for pair in sentence] for sentence in pairs] for side in (0, 1))
    sides = [{(row, found) for row, tags in enumerate(part) for found in entities(tags)} for part in (truth, guess)]
    right = len(sides[0] & sides[1])
    found = compute_metrics(TAGGING_METRICS, ENTITY_METRICS, truth, guess)
    wanted = [right / len(sides[1] or "0"), right / len(sides[0] or "0"), 2 * right / (sum(map(len, sides)) or 1)]
    assert list(found.values()) == pytest.approx(wanted)


@pytest.fixture(scope="module")
def official() -> Path:
    """The conlleval of CoNLL-2003 (version 2004-01-26), where $BERT_JAX_CONLLEVAL names it."""
    if "BERT_JAX_CONLLEVAL" not in os.environ:
        pytest.skip("BERT_JAX_CONLLEVAL names no conlleval.pl (of https://www.clips.uantwerpen.be/conll2003/ner/)")
    return Path(os.environ["BERT_JAX_CONLLEVAL"])


def by_official(script: Path, truth: list[list[str]], guess: list[list[str]]) -> dict[str, float]:
    """What the official script prints, in percent with two digits, and its counts."""
    lines = [
        "\n".join(f"word {' '.join(pair)}" for pair in zip(*pair, strict=True)) + "\n\n"
        for pair in zip(truth, guess, strict=True)
    ]
    said = subprocess.run(["perl", script], input="".join(lines), capture_output=True, text=True, check=True).stdout
    names = {"precision": "precision", "recall": "recall", "f1": "FB1", "accuracy": "accuracy"}
    return {name: float(re.search(rf"{word}: +([\d.]+)", said)[1]) for name, word in names.items()}


def percent(found: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{100 * value:.2f}") for name, value in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_scores_of_any_tags_are_the_official_ones(official: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    tags = np.array(["O", *(f"{mark}-{name}" for mark in "BI" for name in ("PER", "LOC", "A-B"))])
    truth, guess = [], []
    for _ in range(400):
        said = draw.choice(tags, draw.integers(1, 30))
        truth.append(said.tolist())
        guess.append(np.where(draw.random(len(said)) < 0.3, draw.choice(tags, len(said)), said).tolist())
    names = (*ENTITY_METRICS, "accuracy")
    assert percent(compute_metrics(TAGGING_METRICS, names, truth, guess)) == by_official(official, truth, guess)


@pytest.mark.slow
def test_scores_of_predictions_on_conll_2003_are_the_official_ones(official: Path, bert_jax_data: Path) -> None:
    """Predicts each word's most frequent tag of the training file, which gives many invalid sequences."""
    task, files = registry.resolve(TaskConfig(name="conll2003", data_dir=os.fspath(bert_jax_data)))
    counts: dict[str, Counter] = {}
    for sentence in registry.read(task, files["train"]).items:
        for word, tag in zip(sentence.words, sentence.tags, strict=True):
            counts.setdefault(word, Counter())[tag] += 1
    test = registry.read(task, files["test"]).items
    truth = [list(item.tags) for item in test]
    guess = [[counts[word].most_common(1)[0][0] if word in counts else "O" for word in item.words] for item in test]
    names = (*ENTITY_METRICS, "accuracy")
    assert percent(compute_metrics(TAGGING_METRICS, names, truth, guess)) == by_official(official, truth, guess)
