"""The metrics of SQuAD: cases counted by hand, thresholds by brute force, and an implementation of others."""

import itertools
import json
import lzma
import math
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.errors import UserError
from bert_jax.tasks.kinds.question import SQUAD2_METRICS, best_threshold, compared_words, squad1_metrics, squad2_metrics

# Labels, prediction, exact match and F1 of SQuAD 1.1, and of 2.0, counted by hand.
CASES = [
    (["Denver Broncos"], "Denver Broncos", (1, 1), (1, 1)),
    (["Denver Broncos"], "the Denver Broncos.", (1, 1), (1, 1)),  # an article and a full stop do not count
    (["Denver Broncos"], "Broncos", (0, 2 / 3), (0, 2 / 3)),  # precision 1, recall 1/2
    (["Denver Broncos", "Broncos"], "Broncos", (1, 1), (1, 1)),  # the best label counts
    (["a b c d"], "b c e", (0, 2 * (2 / 3) * (2 / 3) / (4 / 3)), (0, 2 / 3)),  # label: b c d
    (["10,000"], "10000", (1, 1), (1, 1)),  # punctuation vanishes, it does not part
    (["well-known"], "well known", (0, 0), (0, 0)),
    (["x x y"], "x", (0, 0.5), (0, 0.5)),  # each word as often as both have it
    (["one"], "", (0, 0), (0, 0)),
    (["the"], "a", (1, 0), (1, 1)),  # no word counts: 1.1 finds no shared word, 2.0 two empty answers
    (["the", "river"], "a", (1, 0), (0, 0)),  # 2.0 skips labels without words
    (["É"], "é", (1, 1), (1, 1)),
]
NONE = [([], "", (1, 1)), ([], "Denver", (0, 0)), ([], "the", (1, 1))]


def test_cases_counted_by_hand():
    for truths, guess, (exact, f1), second in CASES:
        assert squad1_metrics(("exact_match", "f1"), [truths], [guess]) == pytest.approx(
            {"exact_match": exact, "f1": f1}
        )
        found = squad2_metrics(("exact", "f1"), [truths], [guess], [0.0], 0.5)
        assert (found["exact"], found["f1"]) == pytest.approx(second), (truths, guess)
    for truths, guess, second in NONE:
        found = squad2_metrics(("exact", "f1"), [truths], [guess], [0.0], 0.5)
        assert (found["exact"], found["f1"]) == second, guess


def test_words_that_count():
    assert compared_words("The  “Area”, an A-team (U.S.)") == ["“area”", "ateam", "us"]
    assert compared_words("Theatre another anthem") == ["theatre", "another", "anthem"]


def test_an_answer_is_withheld_above_the_threshold_only():
    truths, guesses = [["a"], ["b"], []], ["a", "b", "c"]
    names = ("exact", "HasAns_exact", "NoAns_exact")
    found = squad2_metrics(names, truths, guesses, [0.2, 0.3, 0.3], 0.3)
    assert found == pytest.approx({"exact": 2 / 3, "HasAns_exact": 1, "NoAns_exact": 0})
    found = squad2_metrics(names, truths, guesses, [0.2, 0.3, 0.3], 0.29)
    assert found == pytest.approx({"exact": 2 / 3, "HasAns_exact": 0.5, "NoAns_exact": 1})


def test_without_a_threshold_the_best_of_the_split_is_taken():
    found = squad2_metrics(SQUAD2_METRICS, [["a"], ["b"], []], ["a", "x", "c"], [0.1, 0.8, 0.6], None)
    assert found["best_f1_thresh"] == 0.1 and found["f1"] == found["best_f1"] == pytest.approx(2 / 3)
    assert found["NoAns_f1"] == 1 and found["HasAns_f1"] == 0.5


def test_a_share_of_no_questions_is_undefined():
    found = squad2_metrics(SQUAD2_METRICS, [["a"]], ["a"], [0.0], 0.5)
    assert math.isnan(found["NoAns_f1"]) and found["HasAns_f1"] == 1


def test_an_unknown_metric_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="unknown metric 'bleu' for this kind of task; choose from: exact_match, f1"):
        squad1_metrics(("bleu",), [["a"]], ["a"])


questions = st.lists(
    st.tuples(st.booleans(), st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from([0.1, 0.2, 0.3, 0.9])),
    min_size=1,
    max_size=6,
)


@given(questions)
def test_no_threshold_is_better_than_the_best(drawn):
    """All thresholds between questions, sorted by probability; ties are in the order of the file."""
    answerable = np.array([one[0] for one in drawn])
    scores = np.array([one[1] if one[0] else 0.0 for one in drawn])
    no_answer = np.array([one[2] for one in drawn])
    best = best_threshold(scores, no_answer, answerable, np.ones(len(drawn), bool))
    order = sorted(range(len(drawn)), key=lambda place: no_answer[place])
    reached = []
    for answered in range(len(drawn) + 1):
        given_ones = set(order[:answered])
        reached.append(
            sum(scores[place] if place in given_ones else float(not answerable[place]) for place in range(len(drawn)))
        )
    assert best.score == pytest.approx(max(reached) / len(drawn))
    first = reached.index(max(reached))
    assert best.threshold == (no_answer[order[first - 1]] if first else 0.0)


def squad_questions(file: Path, seed: int) -> list[dict]:
    """Real questions, with predictions that are right, a word too long, wrong, or empty."""
    content = json.loads(lzma.decompress(file.read_bytes()))
    draw = random.Random(seed)
    found = []
    paragraphs = itertools.chain.from_iterable(article["paragraphs"] for article in content["data"])
    for paragraph in paragraphs:
        words = paragraph["context"].split(" ")
        for question in paragraph["qas"]:
            answers = [answer["text"] for answer in question["answers"]]
            start = draw.randrange(len(words))
            longer = [f"{answer} {words[start]}" for answer in answers[:2]]
            guess = draw.choice([*answers[:2], *longer, " ".join(words[start : start + draw.randint(1, 6)]), ""])
            sure = (0.4 if answers else 0.6) + draw.uniform(-0.4, 0.4)
            found.append({"answers": answers, "guess": guess, "no_answer": round(sure, 3), "threshold": 0.45})
    return found


def assert_equal_metrics(asked: list[dict], theirs: dict) -> None:
    truths, guesses = [one["answers"] for one in asked], [one["guess"] for one in asked]
    no_answer = [one["no_answer"] for one in asked]
    ours = squad2_metrics(SQUAD2_METRICS, truths, guesses, no_answer, asked[0]["threshold"])
    for metric, value in ours.items():
        if metric in theirs:
            share = value if metric.endswith("thresh") else 100 * value
            assert share == pytest.approx(theirs[metric], abs=1e-9), metric
    assert set(ours) - set(theirs) <= {"NoAns_f1", "NoAns_exact"}  # which 1.1 has none of
    if all(truths):
        first = squad1_metrics(("exact_match", "f1"), truths, guesses)
        exact, f1 = np.array(theirs["each"]).T
        assert first == pytest.approx({"exact_match": exact.mean(), "f1": f1.mean()}, abs=1e-12)


def test_metrics_of_some_real_questions_equal_those_of_transformers():
    golden = json.loads((Path(__file__).parent.parent / "testdata" / "squad_metrics.json").read_text(encoding="utf-8"))
    assert_equal_metrics(golden["questions"], golden["metrics"])


@pytest.mark.slow
def test_metrics_of_all_real_questions_are_those_of_transformers(bert_jax_data, peer_python, tmp_path):
    asked = {}
    for name in ("dev-v1.1.json", "dev-v2.0.json"):
        asked[name] = squad_questions(bert_jax_data / "squad" / f"{name}.xz", seed=1)
        (tmp_path / name).write_text(json.dumps(asked[name]))
    script = Path(__file__).parent.parent / "tools" / "check_squad.py"
    command = [peer_python, str(script), *(str(tmp_path / name) for name in asked)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    if told == ["null"]:
        pytest.skip("this transformers has no squad_metrics any more; name a Python with an older one")
    for name, line in zip(asked, told, strict=True):
        assert_equal_metrics(asked[name], json.loads(line))
