"""Question answering: windows of contexts, the best answers, the official metrics, and a model that learns."""

import itertools
import json
import lzma
import math
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_finetuning
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import byte_pairs

from bert_jax.config import AdamW, FinetuneConfig, LinearSchedule, ModelOptions, QuestionConfig
from bert_jax.errors import UserError
from bert_jax.tasks import measurement
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.kinds.question import (
    SQUAD2_METRICS,
    QuestionTask,
    RowAnswers,
    best_spans,
    best_threshold,
    compared_words,
    decode,
    squad1_metrics,
    squad2_metrics,
)
from bert_jax.tasks.kinds.question_data import Answer, AnswerSpan, Question, QuestionRows
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.rows import Split
from bert_jax.tasks.windows import cut_windows
from bert_jax.tokenization import tokenizer as tokenizer_lib

letters = tiny_finetuning.letters  # a fixture

TASK = QuestionTask("own", max_length=12, max_query_length=3, doc_stride=3, metrics=("f1", "exact_match"))


def split_of(*questions: tuple[str, str, tuple[Answer, ...] | None]) -> Split[Question]:
    items = tuple(Question(str(n), *one, f"line {n}") for n, one in enumerate(questions, 1))
    return Split(Path("train.jsonl"), items, labelled=items[0].answers is not None)


def best_windows(pieces: int, room: int, stride: int) -> list[tuple[int, int, list[int]]]:
    """Windows and what each has at best, as run_squad.py tells it: by a loop over windows and pieces."""
    windows, start = [], 0
    while True:
        end = min(start + room, pieces)
        windows.append((start, end))
        if end == pieces:
            break
        start += min(end - start, stride)
    owned: list[list[int]] = [[] for _ in windows]
    for piece in range(pieces):
        best, place = None, 0
        for number, (first, end) in enumerate(windows):
            if first <= piece < end:
                score = min(piece - first, end - 1 - piece) + 0.01 * (end - first)
                if best is None or score > best:
                    best, place = score, number
        owned[place].append(piece)
    return [(first, end, mine) for (first, end), mine in zip(windows, owned, strict=True)]


@given(st.integers(0, 400), st.integers(1, 130), st.integers(1, 140))
@settings(max_examples=30)
def test_windows_and_their_best_pieces_are_those_of_a_plain_loop(pieces, room, stride):
    expected = best_windows(pieces, room, stride)
    found = cut_windows(pieces, room, stride).tolist()
    assert [(first, end, list(range(begin, stop))) for first, end, begin, stop in found] == expected


def test_a_row_is_a_question_and_a_window_of_its_context(letters):
    split = split_of(("ab?c", "abc defghi jk", (Answer("hi", 8),)))
    rows = TASK.encode(split, letters)
    assert rows.count == 3 and rows.truncated == 1
    assert measurement.remarks(rows, TASK) == ["train.jsonl: 1 questions lost tokens to task.max_query_length=3"]
    batch = rows.batch(np.arange(3), 12)
    words = letters.tokens(batch.input_ids[1])
    assert words == ["[CLS]", "a", "##b", "?", "[SEP]", "d", "##e", "##f", "##g", "##h", "##i", "[SEP]"]
    assert batch.segment_ids[1].tolist() == [0] * 5 + [1] * 7
    # h and i are at positions 9 and 10 of the second window, 6 and 7 of the third, and not in the first.
    assert list(zip(batch.labels.first, batch.labels.last, strict=True)) == [(0, 0), (9, 10), (6, 7)]
    assert batch.label_weights.tolist() == [1, 1, 1]
    assert batch.labels.begin.tolist() == [5, 5, 5] and batch.labels.end.tolist() == [11, 11, 10]


def test_roberta_has_two_separators_between_the_texts(tmp_path):
    tokenizer = tokenizer_lib.load(byte_pairs(tmp_path, []))
    rows = TASK.encode(split_of((" ab", "cd", (Answer("d", 1),))), tokenizer)
    assert tokenizer.tokens(rows.input_ids) == ["<s>", "a", "b", "</s>", "</s>", "c", "d", "</s>"]
    assert rows.places[0, :2].tolist() == [6, 6]


def covered(rows: QuestionRows, question: int) -> list[str]:
    """The part of the context that the label of each row covers."""
    found = []
    for row in range(rows.question_offsets[question], rows.question_offsets[question + 1]):
        places = AnswerSpan(*rows.places[row])
        if places.first:
            pieces = rows.first_pieces[row] - places.begin
            start = rows.characters[pieces + places.first, 0]
            found.append(rows.split.items[question].context[start : rows.characters[pieces + places.last, 1]])
    return found


contexts = st.text("abcde  \u200b", min_size=1, max_size=30).filter(lambda text: any(map(str.isalpha, text)))


@settings(max_examples=30)
@given(st.data(), contexts, st.integers(9, 16))
def test_labels_cover_the_answer_in_each_window_that_contains_it(letters, data, context, max_length):
    places = [place for place, character in enumerate(context) if character.isalpha()]
    start = data.draw(st.sampled_from(places))
    end = data.draw(st.sampled_from([place for place in places if place >= start])) + 1
    split = split_of(("a?", context, (Answer(context[start:end], start),)))
    rows = replace(TASK, max_length=max_length).encode(split, letters)
    texts = covered(rows, 0)
    assert set(texts) <= {context[start:end]}
    pieces = sum(1 for character in context[start:end] if character.isalpha())
    room = max_length - 5  # what is longer than two windows share may lie across both
    assert texts or pieces > room - TASK.doc_stride + 1
    assert rows.moved == rows.not_found == 0 and (rows.label_weights == 1).all()


def test_a_moved_answer_is_found_and_counted_and_a_missing_one_is_not_trained(letters):
    split = split_of(
        ("a", "ab cd ab", (Answer("ab", 3),)),  # not there, but at 0 and 6: the nearest, of equals the first
        ("a", "ab cd", (Answer("x", 0), Answer("cd", 3))),  # the second answer is there
        ("a", "ab cd", (Answer("x", 0),)),
        ("a", "ab cd", ()),
        ("a", "ab  cd", (Answer("ab cd", None),)),  # white space matches any
    )
    rows = TASK.encode(split, letters)
    assert [covered(rows, question) for question in range(5)] == [["ab"], ["cd"], [], [], ["ab  cd"]]
    assert rows.places[0, 0] == 3 and rows.label_weights.tolist() == [1, 1, 0, 1, 1]
    assert TASK.describe(rows).counts == {"unanswerable": 1, "answers_moved": 1, "answers_not_found": 1}
    assert TASK.describe(rows).remarks == [
        "train.jsonl: 1 answers are not at their answer_start; the nearest occurrence is used",
        "train.jsonl: 1 of 5 questions have no answer that occurs in the context; they are not trained on",
    ]


def test_without_labels_nothing_weighs(letters):
    rows = TASK.encode(split_of(("a", "ab cd", None)), letters)
    assert rows.label_weights.tolist() == [0] and rows.batch(np.array([0, -1]), 12).label_weights.tolist() == [0, 0]


def test_a_question_that_leaves_no_room_is_refused(letters):
    with pytest.raises(UserError, match=r"max_length is 12 and task.max_query_length 9, which leaves no space for"):
        replace(TASK, max_query_length=9).encode(split_of(("abcdefghi", "a", ())), letters)


ROWS = 16  # of a batch: one program for all
_best = jax.jit(best_spans, static_argnums=(2, 3))


def answers_of(rows: QuestionRows, logits: np.ndarray, count: int = 8, longest: int = 4) -> list[RowAnswers]:
    assert rows.count <= ROWS
    indices = np.concatenate([np.arange(rows.count), np.full(ROWS - rows.count, -1)])
    batch = rows.batch(indices, logits.shape[1])
    labels = AnswerSpan(*map(jnp.asarray, batch.labels))
    found = jax.device_get(_best(jnp.asarray(logits[indices]), labels, count, longest))
    return [RowAnswers(*(part[row] for part in found)) for row in range(rows.count)]


def all_spans(rows: QuestionRows, logits: np.ndarray, longest: int) -> list[tuple[float, int, int]]:
    """Every span of every window of the first question: score, and characters, best first."""
    found = []
    for row in range(rows.question_offsets[1]):
        places = AnswerSpan(*rows.places[row].tolist())
        for first in range(places.best_begin, places.best_end):
            for last in range(first, min(first + longest, places.end)):
                pieces = rows.first_pieces[row] - places.begin
                start, end = rows.characters[pieces + first, 0], rows.characters[pieces + last, 1]
                found.append((float(np.float32(logits[row, first, 0]) + np.float32(logits[row, last, 1])), start, end))
    return sorted(found, key=lambda span: -span[0])


@settings(max_examples=15)
@given(st.integers(1, 40), st.sampled_from([2, 4]), st.integers(0, 2**32 - 1))
def test_the_best_spans_are_those_of_a_search_through_all(letters, pieces, longest, seed):
    context = " ".join("abcdefghij"[place % 10] for place in range(pieces))
    rows = TASK.encode(split_of(("a?", context, ()), ("b", "c d", ())), letters)
    logits = np.random.default_rng(seed).normal(size=(rows.count, 12, 2)).astype(np.float32)
    decoded = decode(rows, answers_of(rows, logits, 8, longest), 8)
    expected = all_spans(rows, logits, longest)[:8]
    assert [(span.score, span.start, span.end) for span in decoded[0].spans] == expected
    null = logits[: rows.question_offsets[1], 0].sum(axis=-1).min()
    assert decoded[0].no_answer == pytest.approx(1 / (1 + math.exp(expected[0][0] - null)))
    assert sum(decoded[0].shares) == pytest.approx(1) and len(decoded[0].shares) == len(expected) + 1
    assert decoded[1].text("c d") in ("c", "d", "c d")


def test_padding_and_the_question_are_no_answer(letters):
    rows = TASK.encode(split_of(("a?", "b c", ())), letters)
    logits = np.zeros((1, 12, 2), np.float32)
    logits[0, [0, 1, 2, 3, 6, 7, 11]] = 100
    logits[0, 4, 0] = logits[0, 5, 1] = 1
    (decoded,) = decode(rows, answers_of(rows, logits), 8)
    assert decoded.text("b c") == "b c" and len(decoded.spans) == 3 and decoded.no_answer == pytest.approx(1)


def test_a_context_without_pieces_has_no_answer(letters):
    rows = TASK.encode(split_of(("a?", "\u200b", None)), letters)
    (decoded,) = decode(rows, answers_of(rows, np.zeros((1, 12, 2), np.float32)), 8)
    assert decoded.spans == () and decoded.no_answer == 1 and decoded.text("\u200b") == ""
    told = TASK.predictions(rows, answers_of(rows, np.zeros((1, 12, 2), np.float32)))
    assert told == [{"id": "1", "answer": "", "score": 1.0, "start": None, "end": None, "scores": []}]


def made_answers(rows: QuestionRows, *found: tuple[int, int, float, float]) -> list[RowAnswers]:
    """One span for each row: first position, last position, score, null."""
    return [RowAnswers(*(np.array([part]) for part in one[:3]), np.array(one[3])) for one in found]


def test_metrics_and_predictions_of_questions_that_may_have_no_answer(letters):
    task = replace(TASK, unanswerable=True, metrics=SQUAD2_METRICS)
    split = split_of(("a", "b c", (Answer("b", 0),)), ("a", "b c", (Answer("c", 2),)), ("a", "b c", ()))
    rows = task.encode(split, letters)
    # Answers b, b and c; none is the less likely the higher the score of the answer.
    answers = made_answers(rows, (3, 3, 2.0, 0.0), (3, 3, 1.0, 0.0), (4, 4, 0.5, 0.0))
    found = task.measure(rows, answers)
    sure = [1 / (1 + math.exp(score)) for score in (2.0, 1.0, 0.5)]
    assert found["best_f1_thresh"] == pytest.approx(sure[0]) and found["f1"] == found["best_f1"] == pytest.approx(2 / 3)
    calibrated = task.calibrated(found)
    assert calibrated.null_threshold == found["best_f1_thresh"]
    assert calibrated.measure(rows, answers) == found
    assert replace(task, null_threshold=0.5).measure(rows, answers)["f1"] == pytest.approx(1 / 3)
    told = calibrated.predictions(rows, answers)
    assert [one["answer"] for one in told] == ["b", "", ""] and [one["id"] for one in told] == ["1", "2", "3"]
    assert (told[0]["start"], told[0]["end"]) == (0, 1) and told[0]["score"] == pytest.approx(1 - sure[0])
    assert told[1]["start"] is None and told[1]["score"] == told[1]["no_answer_probability"] == pytest.approx(sure[1])
    assert told[2]["scores"] == [{"answer": "c", "score": pytest.approx(1 - sure[2]), "start": 2, "end": 3}]
    assert TASK.calibrated({"f1": 1.0}) == TASK
    chosen = replace(TASK, metrics=("f1",)).complete(split)  # the threshold is measured, too
    assert chosen.calibrated(chosen.measure(rows, answers)).null_threshold == found["best_f1_thresh"]
    assert replace(TASK, metrics=("f1",), null_threshold=0.5).complete(split).metrics == ("f1",)
    settled = replace(task, null_threshold=0.5)
    assert settled.calibrated(settled.measure(rows, answers)) == settled
    assert task.calibrated({}).null_threshold == 0.5
    squad1 = TASK.complete(split_of(("a", "b", (Answer("b", 0),))))
    assert squad1.metric_names(split) == (*SQUAD2_METRICS, "task_loss") == settled.metric_names(split)
    assert "exact_match" in squad1.metric_names(split_of(("a", "b", (Answer("b", 0),))))
    with pytest.raises(UserError, match=r"null_threshold is 0.5, but every question of .* has an answer"):
        replace(TASK, null_threshold=0.5).complete(split_of(("a", "b", (Answer("b", 0),))))
    with pytest.raises(UserError, match=r"task.null_threshold is 1.5. Use a number from 0 to 1"):
        replace(TASK, null_threshold=1.5)


def test_a_model_of_answers_always_is_measured_on_questions_without_by_the_rules_of_2(letters):
    split = split_of(("a", "b c", (Answer("b", 0),)), ("a", "b c", ()))
    rows = TASK.encode(split, letters)
    answers = made_answers(rows, (3, 3, 2.0, 0.0), (3, 3, 1.0, 0.0))
    found = TASK.measure(rows, answers)  # at 1/2: no threshold is ever recorded
    assert (found["HasAns_f1"], found["NoAns_f1"], found["best_f1"]) == (1, 0, 1)
    assert [one["answer"] for one in TASK.predictions(rows, answers)] == ["b", "b"]


def test_metrics_that_are_never_measured_are_refused_before_training(letters):
    answered, none = split_of(("a", "b", (Answer("b", 0),))), split_of(("a", "b c", ()))
    exact_match, exact = (replace(TASK, metrics=(name,)) for name in ("exact_match", "exact"))
    with pytest.raises(UserError, match=r"unknown metric 'exact_match' .* choose from: f1, exact, HasAns_f1"):
        exact_match.complete(none)
    with pytest.raises(UserError, match=r"has 'exact_match', but .* has questions without an answer; choose .* exact,"):
        exact_match.complete(answered).metric_names(none)
    with pytest.raises(UserError, match=r"has 'exact', but .* no question without an answer; choose from: f1, exact_m"):
        exact.complete(answered).metric_names(answered)
    assert exact.complete(answered).metric_names(none) == ("exact", "task_loss")


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
        first = squad1_metrics(("exact_match", "f1"), [truths], [guess])
        assert first == pytest.approx({"exact_match": exact, "f1": f1})
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


question = st.tuples(st.booleans(), st.sampled_from([0.0, 0.25, 1.0]), st.sampled_from([0.1, 0.2, 0.3, 0.9]))
questions = st.lists(question, min_size=1, max_size=6)


@given(questions)
def test_no_threshold_is_better_than_the_best(drawn):
    """All thresholds between questions, sorted by probability; ties are in the order of the file."""
    answerable = np.array([one[0] for one in drawn])
    scores = np.array([one[1] if one[0] else 0.0 for one in drawn])
    no_answer = np.array([one[2] for one in drawn])
    score, threshold = best_threshold(scores, no_answer, answerable, np.ones(len(drawn), bool))
    order = sorted(range(len(drawn)), key=lambda place: no_answer[place])
    reached = []
    for answered in range(len(drawn) + 1):
        given_ones = set(order[:answered])
        reached.append(
            sum(scores[place] if place in given_ones else float(not answerable[place]) for place in range(len(drawn)))
        )
    assert score == pytest.approx(max(reached) / len(drawn))
    first = reached.index(max(reached))
    assert threshold == (no_answer[order[first - 1]] if first else 0.0)


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
    script = Path(__file__).parent.parent / "tools" / "peers.py"
    command = [peer_python, str(script), "squad", *(str(tmp_path / name) for name in asked)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    if "null" in told:
        pytest.skip("this transformers has no squad_metrics any more; name a Python with an older one")
    for name, line in zip(asked, told, strict=True):
        assert_equal_metrics(asked[name], json.loads(line))


LETTERS, DIGITS = "abcdef", "123456789"


def asked(draw: np.random.Generator, number: int) -> dict:
    """Letters, and among them the number asked for, of one or two digits; one context of four has none."""
    answer = "".join(draw.choice(list(DIGITS), draw.integers(1, 3)))
    words = draw.choice(list(LETTERS), 7).tolist()
    answers = [answer] if number % 4 else []
    for one in answers:
        words.insert(int(draw.integers(len(words) + 1)), one)
    return {"id": str(number), "question": "n", "context": " ".join(words), "answers": answers}


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_model_learns_answers_and_their_absence(tmp_path):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*LETTERS, "n", *DIGITS, *(f"##{one}" for one in DIGITS)]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *pieces]))
    tokenizer = tokenizer_lib.load(tmp_path / "vocab.txt", lowercase=True)
    draw = np.random.default_rng(0)
    for name, count in (("train", 1200), ("dev", 100), ("test", 100)):
        lines = (json.dumps(asked(draw, number)) + "\n" for number in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "dev", "test")}
    config = FinetuneConfig(
        model=ModelOptions(layers=2, width=32, heads=4, feed_forward=64, max_positions=24, dropout=0.0),
        # Windows of a context, too: some answers are in the second only.
        task=QuestionConfig(max_length=12, doc_stride=4, max_query_length=4, **files),
        optimizer=AdamW(learning_rate=5e-3, schedule=LinearSchedule(warmup_steps=10)),
        batch_size=64,
        epochs=6.0,
    )
    result = finetune(config, tmp_path / "run", tokenizer)
    found = {name: metric["mean"] for name, metric in result["metrics"].items()}
    counts = result["counts"]["test"]
    assert counts["unanswerable"] == 25 and counts["rows"] > counts["examples"] == 100
    assert found["test_HasAns_f1"] > 0.9 and found["test_NoAns_exact"] > 0.8, found
    again = evaluate(tmp_path / "run", tmp_path / "test.jsonl")
    assert again["f1"] == pytest.approx(found["test_f1"])
    contexts = ("a f c  b 47 c", "25 c d a f", "a e b c")
    told = predict(tmp_path / "run", [{"question": "n", "context": context} for context in contexts])
    assert [one["answer"] for one in told] == ["47", "25", ""]
    assert (told[0]["start"], told[0]["end"]) == (9, 11) and told[2]["start"] is None
    assert told[2]["no_answer_probability"] > 0.5 > told[0]["no_answer_probability"]
