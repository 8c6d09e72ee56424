"""Spans and relations: their files, rows, predictions and metrics."""

import copy
import dataclasses
import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_finetuning
from hypothesis import given, settings
from hypothesis import strategies as st
from random_checkpoints import odd_config, random_checkpoint

from bert_jax.config import AdamW, EvalConfig, FinetuneConfig, LinearSchedule, ModelConfig, ModelOptions, SpanPairConfig
from bert_jax.errors import UserError
from bert_jax.model.bert import abstract_params, bind
from bert_jax.model.runtime import Runtime
from bert_jax.tasks import measurement
from bert_jax.tasks.evaluation import evaluate
from bert_jax.tasks.finetuning import finetune
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.kinds.span import SpanPairTask, SpanTask, spans_above, without_overlaps
from bert_jax.tasks.kinds.span_data import SpanAnswer, SpanRows, read_spans
from bert_jax.tasks.metrics import best_threshold
from bert_jax.tasks.prediction import predict
from bert_jax.tasks.reading.inputs import InputRecord
from bert_jax.tasks.reading.tables import Columns
from bert_jax.tasks.registry import to_json
from bert_jax.tasks.rows import Relation, Span, SpannedSentence, Split, TaskBatch
from bert_jax.tasks.task import Task
from bert_jax.tokenization import tokenizer as tokenizer_lib
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.train.objectives import means

letters = tiny_finetuning.letters  # a fixture

GOOD = {
    "tokens": ["Bank", "of", "China", "hired", "Ann"],
    "spans": [{"start": 0, "end": 3, "label": "ORG"}, {"start": 2, "end": 3, "label": "LOC"}, {"start": 4, "end": 5}],
    "relations": [{"head": 2, "tail": 0, "label": "works_for"}],
}


def written(folder: Path, *objects: Any) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    return path


def test_spans_nest_and_relations_are_between_them(tmp_path):
    split = read_spans(written(tmp_path, GOOD, {"tokens": ["No"], "spans": []}), Columns(), True, relations=False)
    first, second = split.items
    assert first.spans == (Span("ORG", 0, 3), Span("LOC", 2, 3), Span("", 4, 5))
    assert first.relations == (Relation("works_for", 2, 0),)
    assert second.spans == () and second.line == 2 and split.labelled


def test_a_file_without_what_is_asked_for_is_not_labelled(tmp_path):
    path = written(tmp_path, {"tokens": ["a"], "spans": [{"start": 0, "end": 1, "label": "X"}]})
    assert read_spans(path, Columns(), False, relations=False).labelled
    assert not read_spans(path, Columns(), False, relations=True).labelled
    with pytest.raises(UserError, match="has no column 'relations'"):
        read_spans(path, Columns(), True, relations=True)
    renamed = written(tmp_path, {"words": ["a"], "entities": []})
    assert read_spans(renamed, Columns("words", "", "entities"), True, relations=False).items[0].words == ("a",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": []}, r"tokens is \[\]; expected a list of words"),
        ({"tokens": ["a", ""]}, "expected a list of words, each a text that is not empty"),
        ({"spans": "x"}, "spans is 'x'; expected a list of spans"),
        ({"spans": [3]}, r"spans\[0\] is 3; expected an object like"),
        (
            {"spans": [{"start": 0, "end": True, "label": "X"}]},
            r"spans\[0\] is .*word indices from 0, the end exclusive",
        ),
        ({"spans": [{"start": 2, "end": 2, "label": "X"}]}, "is from word 2 to 2, but the sentence has"),
        ({"spans": [{"start": 2, "end": 6, "label": "X"}]}, r"is from word 2 to 6"),
        ({"relations": [{"head": 0, "tail": 3, "label": "r"}]}, r"relations\[0\] is from span 0 to 3; expected the"),
        ({"relations": [{"head": 0, "tail": 0, "label": "r"}]}, r"two different spans \(the line has 3\)"),
        ({"relations": [{"head": 0, "tail": 1}]}, "expected an object like"),
        ({"relations": 4}, "relations is 4; expected a list of relations"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(tmp_path, change, said):
    with pytest.raises(UserError, match=rf"train.jsonl line 2: .*{said}"):
        read_spans(written(tmp_path, GOOD, GOOD | change), Columns(), True, relations=True)


def test_a_file_of_another_kind_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"train.tsv: spans are read from .jsonl or .parquet"):
        read_spans(tmp_path / "train.tsv", Columns(), True, relations=False)


def test_relations_between_given_spans_are_predicted_for_a_file_without_any(tmp_path):
    task = SpanPairTask("own", relations_between="given")
    bare = {name: GOOD[name] for name in ("tokens", "spans")}
    split = task.read(written(tmp_path, bare), Columns(), False)
    assert not split.labelled and len(split.items[0].spans) == 3
    with pytest.raises(UserError, match="has no column 'spans'"):
        task.read(written(tmp_path, {"tokens": ["a"]}), Columns(), False)
    with pytest.raises(UserError, match="has no column 'relations'"):
        task.read(written(tmp_path, bare), Columns(), True)


def test_a_file_whose_labels_are_all_null_is_not_labelled(tmp_path):
    withheld = GOOD | {"spans": None, "relations": None}
    for relations, name in ((False, "spans"), (True, "relations")):
        path = written(tmp_path, withheld, withheld)
        assert not read_spans(path, Columns(), False, relations=relations).labelled
        with pytest.raises(UserError, match=f"train.jsonl has no labels: column '{name}' is null throughout"):
            read_spans(path, Columns(), True, relations=relations)
        assert read_spans(written(tmp_path, withheld, withheld | {name: []}), Columns(), False, relations).labelled


TASK = SpanTask("own", ("X", "Y"), max_length=16, metrics=("f1", "precision", "recall"), max_span=3)
PAIRS = SpanPairTask(
    "own",
    ("X", "Y"),
    max_length=16,
    metrics=("relation_f1", "relation_recall", "f1"),
    max_span=3,
    relation_labels=("r", "s"),
    threshold=0.5,
)
WORDS_OF_LINES = ["the cat sat on a mat", "a dog .", "river the the cat"]
MODEL = ModelConfig(vocab_size=60, layers=1, width=16, heads=2, feed_forward=16, max_positions=32)


def split_of(*items: tuple[str, list[Span], list[Relation]], labelled: bool = True) -> Split[SpannedSentence]:
    sentences = (SpannedSentence(tuple(words.split()), tuple(spans), tuple(relations), line)
                 for line, (words, spans, relations) in enumerate(items, start=1))  # fmt: skip
    return Split(Path("train.jsonl"), tuple(sentences), labelled)


NESTED = split_of(
    ("ab c de f", [Span("X", 0, 3), Span("Y", 1, 2), Span("Y", 0, 3), Span("X", 3, 4)], [Relation("s", 1, 3)]),
    ("g h", [], []),
    ("i jk l", [Span("Y", 0, 1), Span("X", 0, 3)], [Relation("r", 0, 1), Relation("r", 1, 0)]),
)


@pytest.mark.parametrize("scores", ["binary", "classes"])
def test_each_span_of_a_row_learns_its_types_and_all_others_that_they_are_none(letters, scores):
    task = replace(TASK, span_scores=scores)
    rows = task.encode(NESTED, letters)
    batch = rows.batch(np.array([2, 0, -1]), 12)
    assert batch.labels.word_slots[1, :5].tolist() == [1, 3, 4, 6, 0]
    for place, item in ((0, NESTED.items[2]), (1, NESTED.items[0]), (2, None)):
        for first in range(10):
            for length in range(1, 4):
                inside = item is not None and first + length <= len(item.words)
                assert batch.label_weights[place, first, length - 1] == inside
                types = {span.label for span in (item.spans if item else ()) if span[1:] == (first, first + length)}
                said = batch.labels.types[place, first, length - 1]
                if scores == "binary":
                    assert said.tolist() == [label in types for label in task.labels]
                else:
                    assert (said == 0) == (not types) and (said == 0 or task.labels[said - 1] in types)


def test_a_row_without_special_tokens_has_a_place_for_each_word(letters):
    bare = copy.copy(letters)
    bare.begin = bare.end = 0
    words = [chr(ord("a") + number) for number in range(12)]
    split = split_of((" ".join(words), [Span("X", 11, 12)], []))
    batch = TASK.encode(split, bare).batch(np.array([0]), 12)
    assert batch.labels.words.tolist() == [[1] * 12] and batch.labels.types[0, 11, 0].any()


def test_relations_are_trained_between_the_labelled_spans_of_a_row(letters):
    rows = PAIRS.encode(NESTED, letters)
    batch = rows.batch(np.array([0, 1, 2]), 12)
    assert batch.labels.pair_firsts[0].tolist() == [0, 1, 0, 3]
    assert batch.labels.pair_lengths[2].tolist() == [1, 3, 0, 0]
    assert batch.labels.relations[0].sum() == batch.labels.relations[0, 1, 3] == 2
    assert batch.labels.relations[2, 0, 1] == batch.labels.relations[2, 1, 0] == 1
    assert batch.labels.relation_weights.sum(axis=(1, 2)).tolist() == [12, 0, 2]


def test_what_rows_cannot_hold_is_counted_and_still_measured(letters):
    long = split_of(("a b c d e f g h", [Span("X", 0, 4), Span("X", 5, 7), Span("Y", 4, 5)], [Relation("r", 1, 2)]))
    task = replace(PAIRS, max_length=8)  # a row holds six of its words
    rows = task.encode(long, letters)
    counts = {"words": 8, "spans": 1, "spans_too_long": 1, "spans_cut": 1, "relations": 0, "relations_lost": 1}
    assert task.describe(rows).counts == counts
    found = task.measure(rows, [answer(task, rows, 0, {(4, 1, 1): 0.9}), answer(task, rows, 1, {})])
    assert found == {"relation_f1": 0, "relation_recall": 0, "f1": pytest.approx(2 / 4)}


def test_an_unknown_type_is_refused_with_its_line(letters):
    with pytest.raises(UserError, match=r"train.jsonl line 1: unknown label 'Z'; the task's labels are: 'X', 'Y'"):
        TASK.encode(split_of(("a", [Span("Z", 0, 1)], [])), letters)


def answer(
    task: Task, rows: SpanRows, row: int, spans: dict[tuple[int, int, int], float], related: dict | None = None
) -> SpanAnswer:
    """That a row has these spans, by first word, length and type; and relations between those by their places."""
    width = 24
    best = sorted(spans, key=spans.__getitem__, reverse=True)
    places = np.zeros(width, np.int32)
    scores = np.zeros(width, np.float32)
    pairs, relations = np.zeros((2, width), np.int32), np.zeros((width, width), np.int32)
    for number, (first, length, kind) in enumerate(best):
        places[number] = (first * task.max_span + length - 1) * len(task.labels) + kind
        scores[number] = spans[first, length, kind]
        pairs[:, number] = first, length
    for (head, tail), kind in (related or {}).items():
        relations[head, tail] = kind
    return SpanAnswer(places, scores, *pairs, relations, np.full(relations.shape, 0.75, np.float32))


PLACES = st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 1))  # first word, length, type
SCORES = st.sampled_from([0.1, 0.3, 0.5, 0.8])


@settings(deadline=None, max_examples=50)
@given(guesses=st.tuples(*(st.dictionaries(PLACES, SCORES, max_size=2 * len(item.words)) for item in NESTED.items)))
def test_spans_are_measured_as_sets_at_the_best_threshold(letters, guesses):
    rows = TASK.encode(NESTED, letters)
    truth = {(number, span) for number, item in enumerate(NESTED.items) for span in item.spans}
    answers = [answer(TASK, rows, row, guess) for row, guess in enumerate(guesses)]
    by_threshold = {}
    for threshold in (0.05, 0.2, 0.4, 0.6, 0.9):
        said = {
            (row, Span(TASK.labels[kind], first, first + length))
            for row, guess in enumerate(guesses)
            for (first, length, kind), score in guess.items()
            if score >= threshold
        }
        hits = len(said & truth)
        f1 = 2 * hits / (len(said) + len(truth))
        by_threshold[threshold] = [f1, hits / len(said) if said else 0, hits / len(truth)]
        found = replace(TASK, threshold=threshold).measure(rows, answers)
        assert list(found.values()) == pytest.approx(by_threshold[threshold])
    best = TASK.measure(rows, answers)
    assert best["f1"] == pytest.approx(max(f1 for f1, _, _ in by_threshold.values()))
    task = TASK.calibrated(best)
    assert task.measure(rows, answers) == {name: best[name] for name in TASK.metrics}
    assert TASK.calibrated({}).threshold == 0.5 and task.calibrated({}) == task


def test_without_a_threshold_a_file_is_measured_at_that_of_predictions(tmp_path):
    path = tmp_path / "dev.jsonl"
    spans = [{"start": 0, "end": 2, "label": "X"}, {"start": 2, "end": 3, "label": "Y"}]
    path.write_text("".join(json.dumps({"tokens": words.split(), "spans": spans}) + "\n" for words in WORDS_OF_LINES))
    model = random_checkpoint(tmp_path, odd_config(layers=1), TASK.objective().heads, task=to_json(TASK))
    found = measurement.evaluate(model, path).metrics
    half = dataclasses.replace(model, task=to_json(replace(TASK, threshold=0.5)))
    assert found == measurement.evaluate(half, path).metrics and "threshold" not in found
    best = FineTuned(model)
    rows = best.encode(TASK.read(path, TASK.columns, True))
    assert found["f1"] < TASK.measure(rows, best.answers(rows))["f1"]


@settings(deadline=None)
@given(
    pairs=st.lists(st.tuples(st.sampled_from(np.linspace(0.05, 0.95, 7).tolist()), st.booleans()), max_size=12),
    missed=st.integers(0, 3),
)
def test_the_calibrated_threshold_is_the_best_of_all(pairs, missed):
    scores, true = np.array([pair[0] for pair in pairs], float), np.array([pair[1] for pair in pairs], bool)
    total = int(true.sum()) + missed

    def f1(threshold: float) -> float:
        kept = scores >= threshold
        return 2 * true[kept].sum() / max(1, kept.sum() + total)

    found = best_threshold(scores, true, total)
    assert 0 < found < 1
    assert f1(found) == max(map(f1, [found, *np.linspace(0, 1, 50)]))


def test_a_relation_is_right_with_its_spans_their_types_and_its_label(letters):
    rows = PAIRS.encode(NESTED, letters)
    answers = [
        # Right; and a relation to a span below the threshold, which is not predicted.
        answer(PAIRS, rows, 0, {(1, 1, 1): 0.9, (3, 1, 0): 0.8, (0, 1, 0): 0.3}, {(0, 1): 2, (1, 2): 1}),
        answer(PAIRS, rows, 1, {}),
        # The head of the second one has another type: one of two predictions is right.
        answer(PAIRS, rows, 2, {(0, 1, 1): 0.9, (0, 3, 0): 0.8, (0, 1, 0): 0.7}, {(0, 1): 1}),
    ]
    found = PAIRS.measure(rows, answers)
    assert found == pytest.approx({"relation_f1": 2 * 2 / (3 + 3), "relation_recall": 2 / 3, "f1": 2 * 4 / (5 + 6)})
    told = PAIRS.predictions(rows, answers)
    assert told[0]["spans"][0] == {"type": "Y", "text": "c", "score": pytest.approx(0.9), "words": [1, 2]}
    assert told[0]["relations"] == [{"type": "s", "head": 0, "tail": 1, "score": 0.75}]
    assert told[1] == {"words": ["g", "h"], "spans": [], "relations": []}


def test_given_spans_are_read_from_what_is_predicted_and_answered_by_their_places(letters):
    task = replace(PAIRS, relations_between="given", metrics=("relation_f1",), labels=())
    given_spans = [{"start": 0, "end": 2}, {"start": 1, "end": 2, "label": "any"}]
    split = task.parse(Path("in"), [InputRecord(1, {"text": "ann lee", "spans": given_spans})])
    rows = task.encode(split, letters)
    batch = rows.batch(np.array([0]), 16)
    assert batch.labels.pair_lengths.tolist() == [[2, 1]] and not batch.label_weights.any()
    relations = np.array([[0, 2], [0, 0]], np.int32)
    said = SpanAnswer(None, None, batch.labels.pair_firsts[0], batch.labels.pair_lengths[0], relations, relations / 2.0)
    (told,) = task.predictions(rows, [said])
    assert told["spans"][1] == {"type": "any", "text": "lee", "score": 1.0, "start": 4, "end": 7, "words": [1, 2]}
    assert told["relations"] == [{"type": "s", "head": 0, "tail": 1, "score": 1.0}]
    with pytest.raises(UserError, match="in line 1 has no field 'spans'"):
        task.parse(Path("in"), [InputRecord(1, {"text": "ann lee"})])


def test_given_spans_of_the_same_words_are_related_once(letters):
    task = replace(PAIRS, relations_between="given", metrics=("relation_precision",))
    spans = [Span("X", 0, 1), Span("Y", 0, 1), Span("X", 1, 2)]
    rows = task.encode(split_of(("a b", spans, [Relation("r", 0, 2), Relation("r", 1, 2)])), letters)
    related = np.array([[0, 0, 1], [0, 0, 1], [0, 0, 0]], np.int32)
    scores = np.full((3, 3), 0.9, np.float32)
    answer = SpanAnswer(None, None, rows.firsts, rows.lengths_in_words, related, scores)
    (told,) = task.predictions(rows, [answer])
    assert [(one["head"], one["tail"]) for one in told["relations"]] == [(0, 2), (1, 2)]
    itself = answer._replace(relations=np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0]], np.int32))
    (told,) = task.predictions(rows, [itself])
    assert [(one["head"], one["tail"]) for one in told["relations"]] == [(0, 1), (1, 0)]
    assert task.measure(rows, [answer]) == {"relation_precision": 1.0}


def test_a_training_file_determines_types_relations_and_the_longest_span():
    bare = replace(PAIRS, labels=(), relation_labels=(), max_span=0, metrics=(), threshold=0.0)
    found = bare.complete(NESTED)
    assert (found.labels, found.relation_labels, found.max_span) == (("X", "Y"), ("r", "s"), 3)
    assert found.metrics == ("relation_f1", "relation_precision", "relation_recall", "f1", "precision", "recall")
    with pytest.raises(UserError, match=r"train.jsonl has no relations"):
        bare.complete(split_of(("a", [Span("X", 0, 1)], [])))


def test_a_file_of_entity_tags_is_one_of_flat_spans(tmp_path):
    path = tmp_path / "train.conll"
    path.write_text("EU I-ORG\nsays O\n\nAnn B-PER\nLee I-PER\nEve B-PER\n")
    split = TASK.read(path, Columns(), True)
    assert [item.spans for item in split.items] == [(Span("ORG", 0, 1),), (Span("PER", 0, 2), Span("PER", 2, 3))]
    with pytest.raises(UserError, match="holds tags but no relations"):
        PAIRS.read(path, Columns(), True)


VARIANTS = {
    "binary": PAIRS,
    "classes": replace(TASK, span_scores="classes"),
    "given": replace(PAIRS, relations_between="given", metrics=("relation_f1",)),
}


@functools.cache
def params_of(name: str) -> dict:
    draw = np.random.default_rng(1)
    wanted = abstract_params(MODEL, VARIANTS[name].objective().heads)
    return jax.tree.map(lambda leaf: draw.normal(0, 0.3, leaf.shape).astype(np.float32), wanted)


@functools.partial(jax.jit, static_argnums=0)
def computed(name: str, params: dict, batch: TaskBatch) -> tuple:
    objective = VARIANTS[name].objective()
    model = bind(MODEL, objective.heads, params, Runtime())
    outputs = objective.outputs(model, batch, None)
    terms, counts = objective.loss_terms(model, outputs, batch), objective.counts(batch)
    answers = objective.answers(model, outputs, batch)
    return terms, counts, means(terms, counts), outputs._replace(vectors=None), answers


@settings(max_examples=100)
@given(
    found=st.dictionaries(
        st.tuples(st.sampled_from("XY"), st.integers(0, 6), st.integers(1, 4)), st.floats(0.01, 1), max_size=14
    ),
    overlap=st.sampled_from(["flat", "nested"]),
    threshold=st.sampled_from([0.0, 0.3, 0.6]),
)
def test_of_spans_that_overlap_the_most_probable_are_kept(found, overlap, threshold):
    """No kept spans clash, by the sets of their words, and a dropped one clashes with a kept one that is as likely."""
    scored = {Span(label, first, first + length): score for (label, first, length), score in found.items()}
    (kept,) = without_overlaps([scored], overlap)

    def clash(one: Span, other: Span) -> bool:
        words, others = set(range(one.first, one.end)), set(range(other.first, other.end))
        return bool(words & others) and (overlap == "flat" or not (words <= others or others <= words))

    assert not any(clash(*pair) for pair in itertools.combinations(kept, 2))
    for span in set(scored) - set(kept):
        assert any(clash(span, other) and kept[other] >= scored[span] for other in kept)
    assert list(kept) == [span for span in scored if span in kept]  # in reading order
    before = without_overlaps(spans_above(threshold, [scored]), overlap)
    assert before == spans_above(threshold, [kept])
    assert without_overlaps([scored], "any") == [scored]


@pytest.mark.parametrize("overlap", ["flat", "nested"])
def test_predictions_and_metrics_are_of_the_spans_that_are_kept(letters, overlap):
    task = replace(PAIRS, span_overlap=overlap, threshold=0.2)
    rows = task.encode(NESTED, letters)
    guesses = {(0, 1, 0): 0.9, (0, 2, 0): 0.8, (1, 2, 1): 0.7}  # the second contains the first; the third crosses it
    answers = [answer(task, rows, 0, guesses), answer(task, rows, 1, {}), answer(task, rows, 2, {})]
    told = [tuple(span["words"]) for span in task.predictions(rows, answers)[0]["spans"]]
    assert sorted(told) == {"flat": [(0, 1), (1, 3)], "nested": [(0, 1), (0, 2)]}[overlap]


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.6])
def test_a_relation_is_predicted_from_its_threshold_or_where_it_is_likelier_than_none(threshold):
    objective = replace(PAIRS, relation_threshold=threshold).objective()
    logits = np.random.default_rng(0).normal(0, 2, (1, 6, 6, 3)).astype(np.float32)
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    relations, scores = objective.best_relations(jax.numpy.asarray(logits))
    for place in np.ndindex(1, 6, 6):
        none, *others = shares[place].tolist()
        chosen = max(others) >= threshold if threshold else max(others) > none
        assert relations[place] == (1 + int(np.argmax(others)) if chosen else 0)
        assert scores[place] == pytest.approx(max(others) if chosen else none, rel=1e-5)


@pytest.mark.parametrize(("name", "kind"), [("endpoints", ("hidden", "mean")), ("boundary", ("networks", "mean"))]
                         + [("content", ("networks", "attention"))])  # fmt: skip
def test_a_key_chooses_the_vectors_of_spans(name, kind):
    heads = replace(PAIRS, span_vectors=name).objective().heads
    assert (heads.spans.boundaries, heads.spans.content) == kind


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"span_vectors": "middle"}, "unknown task.span_vectors 'middle'; choose from endpoints, boundary, content"),
        ({"span_overlap": "some"}, "unknown task.span_overlap 'some'; choose from any, nested, flat"),
        ({"relation_threshold": 1.0}, r"task.relation_threshold is 1.0. Use a probability below 1"),
        ({"metrics": ("f1", "accuracy")}, "unknown metric 'accuracy'"),
        ({"relations_between": "given", "metrics": ("f1",)}, "unknown metric 'f1'"),
    ],
)
def test_span_options_that_cannot_be_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        replace(PAIRS, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"span_overlap": "flat"}, "task.span_overlap is flat"),
        ({"span_scores": "classes"}, "task.span_scores is classes"),
        ({"threshold": 0.5}, "task.threshold is 0.5"),
        ({"labels": ("ORG", "PER")}, "task.labels is ORG,PER"),
    ],
)
def test_options_of_predicted_spans_are_refused_where_spans_are_given(changes, said):
    task = SpanPairTask("own", relations_between="given", **changes)
    with pytest.raises(UserError, match=f"{said}, which applies to predicted spans"):
        task.complete(NESTED)


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_and_fillers_change_neither_loss_nor_answers(letters, name):
    task = VARIANTS[name]
    rows = task.encode(NESTED, letters)
    found = [jax.device_get(computed(name, params_of(name), rows.batch(np.array(order), length)))
             for order, length in (([0, 1, 2], 10), ([0, 1, 2, -1], 16))]  # fmt: skip
    (terms, counts, metrics, outputs, answers), (*more, _, more_answers) = found
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-4), [terms, counts, metrics], more)
    assert set(metrics) >= {"loss", "task_loss", "task_accuracy"}
    measured = [
        replace(task, threshold=0.3).measure(rows, [jax.tree.map(lambda leaf, row=row: leaf[row], said)
                                                          for row in range(3)])
        for said in (answers, more_answers)
    ]  # fmt: skip
    assert measured[0] == measured[1]
    if name == "classes":
        truth = rows.batch(np.arange(3), 10)
        shares = jax.nn.log_softmax(outputs.logits, axis=-1)
        picked = np.take_along_axis(np.asarray(shares), truth.labels.types[..., None], axis=-1)[..., 0]
        assert terms["task"].loss == pytest.approx(-(picked * truth.label_weights).sum(), rel=1e-4)


@pytest.fixture
def learning_letters(tmp_path: Path) -> Tokenizer:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh()[]"]) + "\n")
    return tokenizer_lib.load(path, lowercase=True)


def bracketed(draw: np.random.Generator) -> dict:
    """A sentence in which ( ... ) is a GROUP and [ x ] in it an ITEM, which belongs to every group of the sentence."""
    words, spans = [], []
    for _ in range(draw.integers(1, 3)):
        words += draw.choice(list("abcd"), draw.integers(0, 2)).tolist()
        start = len(words)
        words += ["(", *draw.choice(list("abcd"), 1), "[", str(draw.choice(list("efgh"))), "]", ")"]
        spans += [
            {"start": start, "end": start + 6, "label": "GROUP"},
            {"start": start + 2, "end": start + 5, "label": "ITEM"},
        ]
    relations = [
        {"head": head, "tail": tail, "label": "part"}
        for head, tail in itertools.product(range(1, len(spans), 2), range(0, len(spans), 2))
    ]
    return {"tokens": words, "spans": spans, "relations": relations}


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_model_learns_nested_spans_and_their_relations(tmp_path, learning_letters):
    draw = np.random.default_rng(0)
    for name, count in (("train", 400), ("dev", 60), ("test", 60)):
        lines = (json.dumps(bracketed(draw)) + "\n" for _ in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "dev", "test")}
    config = FinetuneConfig(
        model=ModelOptions(layers=1, width=32, heads=2, feed_forward=64, max_positions=32),
        task=SpanPairConfig(max_length=32, **files),
        optimizer=AdamW(learning_rate=5e-3, schedule=LinearSchedule(warmup_steps=10)),
        batch_size=32,
        epochs=8.0,
        eval=EvalConfig(every_steps=1000),  # at the end only
    )
    result = finetune(config, tmp_path / "run", learning_letters)
    found = {name: metric["mean"] for name, metric in result["metrics"].items()}
    assert found["test_f1"] > 0.95 and found["test_relation_f1"] > 0.9, found
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["task"]
    assert stored["threshold"] == pytest.approx(found["threshold"]) and stored["max_span"] == 6
    again = evaluate(tmp_path / "run", tmp_path / "test.jsonl")
    assert again["f1"] == pytest.approx(found["test_f1"]) and "threshold" not in again
    (told,) = predict(tmp_path / "run", [{"tokens": ["b", "(", "a", "[", "e", "]", ")"]}])
    assert [(span["type"], span["words"]) for span in told["spans"]] == [("GROUP", [1, 7]), ("ITEM", [3, 6])]
    assert [relation["type"] for relation in told["relations"]] == ["part"]
