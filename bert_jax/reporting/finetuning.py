"""What a report shows of a fine-tuned model, by kind: what it confuses, how sure it is, its worst examples."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from bert_jax.command import UserError
from bert_jax.reporting import class_metrics, page, span_errors, square_plots
from bert_jax.reporting.curves import number, percent
from bert_jax.reporting.dev_predictions import DevPredictions, predict_dev
from bert_jax.reporting.errors import Example, example_list, marked, matrix, shortened
from bert_jax.reporting.page import Bar
from bert_jax.reporting.questions import question_examples, question_sections
from bert_jax.reporting.span_errors import CORRECT, SPAN_RESULTS, SPURIOUS
from bert_jax.tasks.example import LabelledRows, Span
from bert_jax.tasks.kinds import tagging_schemes
from bert_jax.tasks.kinds.tagging import TagRows
from bert_jax.tasks.kinds.token_regression import NumberRows
from bert_jax.train.workdir import WorkdirConfig

WORST = 12  # examples
MOST_CLASSES = 20  # in a matrix; beyond that the most frequent confusions are listed
BESIDE = 6  # classes of a matrix that leaves room for a table
MOST_CONFUSED = 15
BARS = 3  # of the likeliest labels


def error_sections(workdir: Path, config: WorkdirConfig, most: int) -> list[str]:
    """Sections on up to `most` examples of the dev file; one that says why there are none where it is gone."""
    try:
        found = predict_dev(workdir, config, most)
    except UserError as error:
        return [page.section("What it gets wrong", "", f"Not shown: {error}.")]
    draw = _BY_KIND.get(found.task.kind)
    return draw(found) if draw else []


def _classification(found: DevPredictions) -> list[str]:
    assert isinstance(found.rows, LabelledRows)
    names, truth = found.task.labels, found.rows.labels.astype(int)
    shares = np.array([[told["scores"][name] for name in names] for told in found.predictions])
    guess = shares.argmax(axis=1)
    counts = class_metrics.confusion(truth, guess, len(names))
    calibration = class_metrics.calibrate(shares.max(axis=1), guess == truth)
    sure = float(shares.max(axis=1).mean())
    note = (
        f"On {found.said}: it is {percent(sure)} sure on average and right in "
        f"{percent(float((guess == truth).mean()))}; the expected calibration error is {percent(calibration.error)} "
        f"({class_metrics.BINS} bins). Orange is the gap between how sure it is and how often it is right."
    )
    examples = []
    for item in found.worst(WORST):
        likeliest = np.argsort(-shares[item])[:BARS]
        kept = likeliest if truth[item] in likeliest else [*likeliest[:-1], truth[item]]
        bars = [
            Bar(names[label], shares[item, label], percent(shares[item, label]), label == truth[item]) for label in kept
        ]
        example = found.items[item]
        heading = f"{names[truth[item]]}, taken for {names[guess[item]]}"
        if guess[item] == truth[item]:
            heading = f"{names[truth[item]]}, hardly"
        examples.append(Example(heading, f"line {example.line}", _texts(example), tuple(bars)))
    return [
        page.section("Who is taken for whom", _confusions(counts, names), f"On {found.said}."),
        page.section(
            "How sure, and how right", f'<div class="charts">{square_plots.reliability(calibration)}</div>', note
        ),
        _worst(example_list(examples)),
    ]


def _regression(found: DevPredictions) -> list[str]:
    assert isinstance(found.rows, LabelledRows)
    truth = found.rows.labels.astype(float)
    guess = np.array([told["score"] for told in found.predictions])
    names = [f"line {item.line}" for item in found.items]
    off = guess - truth
    note = (
        f"On {found.said}: off by {number(float(np.abs(off).mean()))} on average, by {number(float(off.mean()))} with "
        "its sign."
    )
    examples = [
        Example(
            f"{number(truth[item])}, guessed {number(guess[item])}",
            f"line {found.items[item].line}",
            _texts(found.items[item]),
        )
        for item in found.worst(WORST)
    ]
    chart = f'<div class="charts">{square_plots.scatter(truth, guess, names)}</div>'
    return [page.section("Truth and guess", chart, note), _worst(example_list(examples))]


def _tagging(found: DevPredictions) -> list[str]:
    rows = found.rows
    assert isinstance(rows, TagRows)
    names = found.task.labels
    ids = {name: index for index, name in enumerate(names)}
    truth = rows.labels[rows.word_starts].astype(int)
    guess = np.array([ids[tag] for told in found.predictions for tag in told["tags"]])
    counts = class_metrics.confusion(truth, guess, len(names))
    true_tags = [[names[tag] for tag in truth[start:end]] for start, end in pairwise(rows.sentence_offsets)]
    sections = []
    if tagging_schemes.marks_entities(names):
        judged = [
            span_errors.compare_spans(tagged_spans(true), tagged_spans(told["tags"]))
            for true, told in zip(true_tags, found.predictions, strict=True)
        ]
        sections.append(entity_section(found, [one for sentence in judged for one in sentence]))
    examples = []
    for item in found.worst(WORST):
        told, true = found.predictions[item], true_tags[item]
        shown = [
            page.text(word) if tag == wanted else marked(word, f"{tag}, not {wanted}")
            for word, tag, wanted in zip(told["words"], told["tags"], true, strict=True)
        ]
        wrong = sum(tag != wanted for tag, wanted in zip(told["tags"], true, strict=True))
        sentence = found.items[item]
        heading = f"{wrong} of {len(true)} words wrong"
        examples.append(Example(heading, f"lines {sentence.lines[0]}-{sentence.lines[-1]}", " ".join(shown)))
    note = f"Words of {found.said}."
    return [
        *sections,
        page.section("Which tag is taken for which", _confusions(counts, names), note),
        _worst(example_list(examples)),
    ]


def _question(found: DevPredictions) -> list[str]:
    return [*question_sections(found), _worst(example_list(question_examples(found, found.worst(WORST))))]


def _choice(found: DevPredictions) -> list[str]:
    truth = np.array([int(label) for label in found.rows.arrays()["labels"]])
    shares = [list(told["scores"].values()) for told in found.predictions]
    right = np.array([told["label"] == label for told, label in zip(found.predictions, truth, strict=True)])
    calibration = class_metrics.calibrate(np.array([max(one) for one in shares]), right)
    note = (
        f"On {found.said}: right in {percent(float(right.mean()))}; the expected calibration error is "
        f"{percent(calibration.error)} ({class_metrics.BINS} bins)."
    )
    examples = []
    for item in found.worst(WORST):
        one, told = found.items[item], found.predictions[item]
        bars = [
            Bar(shortened(one.choices[int(place)], 60), share, percent(share), int(place) == truth[item])
            for place, share in told["scores"].items()
        ]
        content = page.text(shortened(f"{one.context} {one.start}".strip()))
        examples.append(
            Example("" if told["label"] != truth[item] else "right, hardly", f"line {one.line}", content, tuple(bars))
        )
    chart = f'<div class="charts">{square_plots.reliability(calibration)}</div>'
    return [page.section("How sure, and how right", chart, note), _worst(example_list(examples))]


def _token_regression(found: DevPredictions) -> list[str]:
    rows = found.rows
    assert isinstance(rows, NumberRows)
    known = rows.label_weights[rows.word_starts] > 0
    truth = rows.labels[rows.word_starts].astype(float)
    guess = np.array([number for told in found.predictions for number in told["numbers"]])
    words = [word for item in found.items for word in item.words]
    off = (guess - truth)[known]
    note = f"Words of {found.said}: off by {number(float(np.abs(off).mean()))} on average."
    chart = square_plots.scatter(
        truth[known], guess[known], [word for word, kept in zip(words, known, strict=True) if kept]
    )
    examples = []
    for item in found.worst(WORST):
        start, end = rows.sentence_offsets[item], rows.sentence_offsets[item + 1]
        shown = [
            page.text(words[word])
            + (f" <small>{number(guess[word])}, not {number(truth[word])}</small>" if known[word] else "")
            for word in range(start, end)
        ]
        mean = float(np.abs(guess[start:end] - truth[start:end])[known[start:end]].mean())
        examples.append(
            Example(f"off by {number(mean)} on average", f"line {found.items[item].lines[0]}", " ".join(shown))
        )
    return [
        page.section("Truth and guess", f'<div class="charts">{chart}</div>', note),
        _worst(example_list(examples)),
    ]


def _spanned(found: DevPredictions) -> list[str]:
    judged, related, examples = [], [], {}
    for item, (sentence, told) in enumerate(zip(found.items, found.predictions, strict=True)):
        guess = [Span(span["type"], *span["words"]) for span in told["spans"]]
        judged.append(span_errors.compare_spans(sentence.spans, guess))
        examples[item] = _span_example(sentence.words, f"line {sentence.line}", judged[-1])
        true = {(one.label, sentence.spans[one.head], sentence.spans[one.tail]) for one in sentence.relations}
        guessed = {(one["type"], guess[one["head"]], guess[one["tail"]]) for one in told.get("relations", ())}
        related += [(CORRECT if one in guessed else span_errors.MISSED, one[0]) for one in sorted(true)]
        related += [(SPURIOUS, one[0]) for one in sorted(guessed - true)]
    sections = []
    if not found.task.pairs_are_given:
        sections.append(entity_section(found, [one for sentence in judged for one in sentence]))
    if related:
        counts = {name: Counter(outcome for outcome, label in related if label == name) for _, name in sorted(related)}
        kinds = (CORRECT, span_errors.MISSED, SPURIOUS)
        rows = [[name, *(f"{each[outcome]:,}" for outcome in kinds)] for name, each in sorted(counts.items())]
        note = f"On {found.said}. Right: the type and both spans are."
        sections.append(page.section("Relations", page.table(["type", *kinds], rows), note))
    return [*sections, _worst(example_list(examples[item] for item in found.worst(WORST)))]


def _span_example(words: Sequence[str], place: str, judged: Sequence[tuple[str, Span]]) -> Example:
    """The sentence, and below it each of its spans that went wrong."""
    wrong = [(outcome, span) for outcome, span in judged if outcome != CORRECT]
    listed = " ".join(marked(" ".join(words[span.first : span.end]), f"{span.label}, {how}") for how, span in wrong)
    heading = f"{len(wrong)} of {len(judged)} spans wrong"
    return Example(heading, place, page.text(shortened(" ".join(words))) + (f"<br>{listed}" if listed else ""))


def entity_section(found: DevPredictions, judged: list[tuple[str, Span]]) -> str:
    """By type, what became of each true entity, and how many were guessed where there is none."""
    counts = span_errors.count_by_type(judged)
    rows = []
    for name, each in [*counts.items(), ("all", sum(counts.values(), start=Counter()))]:
        true = sum(each[outcome] for outcome in SPAN_RESULTS if outcome != SPURIOUS)
        recall = percent(each[CORRECT] / true) if true else "-"
        rows.append([name, f"{true:,}", recall, *(f"{each[outcome]:,}" for outcome in SPAN_RESULTS)])
    table = page.table(["type", "true", "found", *SPAN_RESULTS], rows)
    note = (
        f"On {found.said}. Wrong border: a guess of the type overlaps it; wrong type: another was guessed for its very "
        "words; missed: nothing was guessed there; spurious: guessed where there is none."
    )
    return page.section("Entities", table, note)


def tagged_spans(tags: list[str]) -> list[Span]:
    """By the rules of conlleval."""
    return [Span(*entity) for entity in tagging_schemes.entities(tags)]


def _confusions(counts: np.ndarray, names: tuple[str, ...]) -> str:
    """A matrix, or of many classes a list; and how well each class is found."""
    seen = [index for index in range(len(names)) if counts[index].any() or counts[:, index].any()]
    counts, shown = counts[np.ix_(seen, seen)], [names[index] for index in seen]
    scores = class_metrics.class_scores(counts)
    table = page.table(
        ["class", "true", "precision", "recall", "F1"],
        [[name, f"{counts[index].sum():,}", *map(percent, _row(scores, index))] for index, name in enumerate(shown)],
    )
    if len(shown) <= MOST_CLASSES:
        beside = "pair" if len(shown) <= BESIDE else "stacked"
        return f'<div class="{beside}">{matrix(counts, shown)}{table}</div>'
    confused = page.table(
        ["truth", "taken for", "times", "of the truth"],
        [
            [a, b, f"{count:,}", percent(share)]
            for a, b, count, share in class_metrics.most_confused(counts, shown, MOST_CONFUSED)
        ],
    )
    return f'<div class="pair">{confused}{table}</div>'


def _row(scores: class_metrics.ClassScores, index: int) -> tuple[float, float, float]:
    return float(scores.precision[index]), float(scores.recall[index]), float(scores.f1[index])


def _texts(example) -> str:
    pair = "" if example.text_pair is None else f"<br><b>B</b>{page.text(shortened(example.text_pair))}"
    mark = "<b>A</b>" if pair else ""
    return f"{mark}{page.text(shortened(example.text))}{pair}"


def _worst(cards: str) -> str:
    return page.section(
        "Worst examples", cards, "Those of the greatest loss, the greatest first: often the file is wrong."
    )


_BY_KIND: dict[str, Callable[[DevPredictions], list[str]]] = {
    "classification": _classification,
    "regression": _regression,
    "tagging": _tagging,
    "spans": _spanned,
    "span_pairs": _spanned,
    "token_regression": _token_regression,
    "question": _question,
    "choice": _choice,
}
