"""Report sections on a fine-tuned model, from its predictions for the dev file.

`error_sections` predicts and calls the task kind's function in SECTIONS, at the end. `score_tagger` compares a tagger
with the most-frequent-tag baseline.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from bert_jax import config as config_lib
from bert_jax.array_types import Float64
from bert_jax.config import TaskConfig
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import open_checkpoint
from bert_jax.model.heads import structured
from bert_jax.reporting import mistakes, page
from bert_jax.reporting.document import Bar, Markup, Section, Table, number, percent
from bert_jax.reporting.mistakes import (
    CORRECT,
    MISSED,
    SPAN_RESULTS,
    SPURIOUS,
    compare_spans,
    error_card,
    highlight,
    truncate,
)
from bert_jax.storage.location import Location
from bert_jax.tasks import held_out, registry, tag_schemes
from bert_jax.tasks.inference import FineTuned
from bert_jax.tasks.kinds import tagging
from bert_jax.tasks.kinds.choice import ChoiceRows, ChoiceTask
from bert_jax.tasks.kinds.classification import ClassificationTask, RegressionTask
from bert_jax.tasks.kinds.question import QuestionTask, squad1_metrics
from bert_jax.tasks.kinds.question_data import QuestionRows
from bert_jax.tasks.kinds.span import SpanTask
from bert_jax.tasks.kinds.span_data import SpanRows
from bert_jax.tasks.kinds.tagging import TaggingTask, TagRows
from bert_jax.tasks.kinds.token_regression import TokenRegressionTask
from bert_jax.tasks.rows import LabelledRows, Sentence, Span, Split, TaskRows
from bert_jax.tasks.task import Task
from bert_jax.tasks.word_rows import LabelledWordRows
from bert_jax.train.workdir import WorkdirConfig

QUESTION_WORDS = ("what", "who", "when", "where", "which", "why", "how many", "how much", "how", "whose", "whom")
CONTEXT = 160  # characters shown on each side of an answer
WORST = 12  # examples shown
MOST_CLASSES = 20  # in a matrix; with more classes the most frequent confusions are listed
NARROW = 6  # classes of a matrix next to which a table fits
MOST_CONFUSED = 15
BARS = 3  # classes shown on a card

AnyTask = TypeVar("AnyTask", bound=Task)
AnyRows = TypeVar("AnyRows", bound=TaskRows)


@dataclass(frozen=True, eq=False)
class DevPredictions(Generic[AnyTask, AnyRows]):
    """Items of the dev file with the model's predictions and losses."""

    task: AnyTask
    path: Path
    rows: AnyRows
    predictions: Sequence[dict[str, Any]]  # by item
    losses: Float64[np.ndarray, "K"]  # by item; NaN for items without a label
    total: int  # items in the file, or held-out ones, of which this may be a sample
    held_out: bool = False  # whether the file is the training file, which held them out

    @property
    def items(self) -> Sequence[Any]:
        """The items, in file order."""
        return self.rows.split.items

    @property
    def description(self) -> str:
        """Describes the examples: the whole file, or a sample."""
        examples = "held-out examples" if self.held_out else "examples"
        if len(self.items) == self.total:
            return f"all {self.total:,} {examples} of {self.path.name}"
        return f"{len(self.items):,} evenly spaced {examples} of the {self.total:,} of {self.path.name}"

    def worst(self, count: int) -> list[int]:
        """Returns the items with the highest losses, in descending order."""
        # An item whose loss is unknown sorts last and is then left out.
        known = np.where(np.isnan(self.losses), -np.inf, self.losses)
        return [int(item) for item in np.argsort(-known, kind="stable")[:count] if np.isfinite(known[item])]


def predict_dev(workdir: Location, config: WorkdirConfig, most: int) -> DevPredictions:
    """Predicts up to `most` items of a run's dev file.

    Raises:
        UserError: the file is not named or does not exist, or the checkpoint cannot be opened.
    """
    model = FineTuned(open_checkpoint(workdir))
    named = config_lib.load(TaskConfig, dict(config.training.get("task") or {}), "task")
    _, files = registry.resolve(named)
    path = files.get("dev", files["train"])
    split = registry.read(model.task, path)
    if "dev" not in files:
        # Without a dev file, training held out a part of its own file: the same examples are chosen again.
        _, chosen = held_out.of_run(config.training)
        if not chosen:
            raise UserError("the task has no dev file (--config.task.dev)")
        split = dataclasses.replace(split, items=tuple(split.items[index] for index in chosen))
    total = len(split.items)
    if total > most:
        # Spaced evenly, because a file may be sorted by label.
        sampled = np.unique(np.linspace(0, total - 1, most).astype(int))
        split = dataclasses.replace(split, items=tuple(split.items[index] for index in sampled))
    rows = model.encode(split)
    answers, losses = model.item_losses(rows)
    return DevPredictions(
        model.task, path, rows, model.task.predictions(rows, answers), losses, total, "dev" not in files
    )


def error_sections(workdir: Location, config: WorkdirConfig, most: int) -> list[Section]:
    """Returns sections on up to `most` dev examples, or one with the reason why the file cannot be read."""
    try:
        dev = predict_dev(workdir, config, most)
    except UserError as error:
        return [Section("Errors on the dev file", note=f"Not shown: {error}.")]
    # A kind from an extension may have no sections.
    sections = next((SECTIONS[kind] for kind in type(dev.task).__mro__ if kind in SECTIONS), None)
    return sections(dev) if sections else []


def _classification(dev: DevPredictions[ClassificationTask, LabelledRows]) -> list[Section]:
    names, labels = dev.task.labels, dev.rows.item_labels.astype(int)
    shares = np.array([[prediction["scores"][name] for name in names] for prediction in dev.predictions])
    predicted = np.array([names.index(prediction["label"]) for prediction in dev.predictions])
    confidence = shares[np.arange(len(shares)), predicted]

    def card(item: int) -> str:
        # The prediction and the label are among the bars; the most likely of the other classes fill them.
        classes = dict.fromkeys([predicted[item], labels[item], *np.argsort(-shares[item])])
        shown = sorted(list(classes)[:BARS], key=lambda k: -shares[item, k])
        bars = [Bar(names[k], shares[item, k], percent(shares[item, k]), bool(k == labels[item])) for k in shown]
        correct = predicted[item] == labels[item]
        result = "correct with a low probability" if correct else f"predicted {names[predicted[item]]}"
        example = dev.items[item]
        return error_card(f"{names[labels[item]]}, {result}", f"line {example.line}", _texts(example), bars)

    return [
        Section("Confusion matrix", [_confusions(labels, predicted, names)], f"On {dev.description}."),
        _calibration_section(dev, confidence, predicted == labels),
        _worst_section(dev, card),
    ]


def _regression(dev: DevPredictions[RegressionTask, LabelledRows]) -> list[Section]:
    labels = dev.rows.item_labels.astype(float)
    predicted = np.array([prediction["score"] for prediction in dev.predictions])
    lines = [f"line {item.line}" for item in dev.items]
    error = predicted - labels
    note = (
        f"On {dev.description}: the mean absolute error is {number(float(np.abs(error).mean()))}, the mean error "
        f"{number(float(error.mean()))}."
    )

    def card(item: int) -> str:
        heading = f"{number(labels[item])}, predicted {number(predicted[item])}"
        return error_card(heading, lines[item], _texts(dev.items[item]))

    return [_scatter_section(labels, predicted, lines, note), _worst_section(dev, card)]


def _tagging(dev: DevPredictions[TaggingTask, TagRows]) -> list[Section]:
    # Labels are stored by token: a word's label is at its first token.
    rows = dev.rows
    names = dev.task.labels
    labels = rows.labels[rows.word_starts].astype(int)
    predicted = np.array([names.index(tag) for prediction in dev.predictions for tag in prediction["tags"]])
    tags = [[names[tag] for tag in labels[start:end]] for start, end in pairwise(rows.sentence_offsets)]
    sections = []
    if structured.marks_entities(names):
        results = [
            compare_spans(tag_schemes.entities(true), tag_schemes.entities(prediction["tags"]))
            for true, prediction in zip(tags, dev.predictions, strict=True)
        ]
        sections.append(_entity_section(dev, results))

    def card(item: int) -> str:
        prediction, lines = dev.predictions[item], dev.items[item].lines
        triples = list(zip(prediction["words"], prediction["tags"], tags[item], strict=True))
        words = [
            page.text(word) if tag == label else highlight(word, f"{tag}, not {label}") for word, tag, label in triples
        ]
        heading = f"{sum(tag != label for _, tag, label in triples)} of {len(triples)} words wrong"
        place = f"line {lines[0]}" if lines[0] == lines[-1] else f"lines {lines[0]}-{lines[-1]}"
        return error_card(heading, place, " ".join(words))

    note = f"Words of {dev.description}."
    confusions = Section("Confusion of tags", [_confusions(labels, predicted, names)], note)
    return [*sections, confusions, _worst_section(dev, card)]


def _question(dev: DevPredictions[QuestionTask, QuestionRows]) -> list[Section]:
    scores = np.zeros((len(dev.items), 2))  # exact match and F1
    groups: dict[str, list[int]] = {}
    for item, (question, prediction) in enumerate(zip(dev.items, dev.predictions, strict=True)):
        groups.setdefault(question_word(question.question), []).append(item)
        # A question without an answer is right if none is predicted.
        scores[item] = not prediction["answer"]
        if labels := [answer.text for answer in question.answers or ()]:
            metrics = squad1_metrics(("exact_match", "f1"), [labels], [prediction["answer"]])
            scores[item] = metrics["exact_match"], metrics["f1"]
    without = np.array([question.answers == () for question in dev.items])
    shown = {word: groups[word] for word in sorted(groups, key=lambda word: (word == "other", -len(groups[word])))}
    if without.any() and not without.all():
        shown["has an answer"] = np.flatnonzero(~without).tolist()
        shown["has no answer"] = np.flatnonzero(without).tolist()
    shown["all"] = list(range(len(scores)))
    rows = [
        [name, f"{len(items):,}", *(percent(float(mean)) for mean in scores[items].mean(axis=0))]
        for name, items in shown.items()
    ]
    note = f"On {dev.description}. Exact match and F1 are those of the official SQuAD scripts."
    table = Table(["questions", "number", "exact match", "F1"], [rows])

    def card(item: int) -> str:
        question, prediction = dev.items[item], dev.predictions[item]
        label = question.answers[0].text if question.answers else None
        heading = f"{label or 'no answer'}, predicted {prediction['answer'] or 'no answer'}"
        # The context around the predicted answer, or else around the first label, with the answer highlighted.
        context, start, end = question.context, prediction["start"], prediction["end"]
        if start is None:
            start = context.find(label) if label else 0
        end = start if end is None else end
        before, after = context[max(start - CONTEXT, 0) : start], context[end : end + CONTEXT]
        answer = highlight(context[start:end], percent(prediction["score"])) if end > start else ""
        excerpt = f"{'…' if start > CONTEXT else ''}{page.text(before)}{answer}{page.text(after)}"
        dots = "…" if end + CONTEXT < len(context) else ""
        content = f"<b>Q</b>{page.text(truncate(question.question))}<br>{excerpt}{dots}"
        return error_card(truncate(heading, 120), question.place, content)

    return [Section("Scores by question word", [table], note), _worst_section(dev, card)]


def question_word(question: str) -> str:
    """Returns the first question word (QUESTION_WORDS) in a question, or `other`."""
    letters = "".join(letter if letter.isalnum() else " " for letter in question.lower())
    # The spaces around words keep "how" from being found in "show".
    words = f" {' '.join(letters.split())} "
    places = {word: words.find(f" {word} ") for word in QUESTION_WORDS if f" {word} " in words}
    # "how many" and "how" begin at one place, where the longer one counts.
    return min(places, key=lambda word: (places[word], -len(word)), default="other")


def _choice(dev: DevPredictions[ChoiceTask, ChoiceRows]) -> list[Section]:
    labels = dev.rows.labels.astype(int)
    highest = np.array([max(prediction["scores"].values()) for prediction in dev.predictions])
    correct = np.array([choice["label"] == label for choice, label in zip(dev.predictions, labels, strict=True)])

    def card(item: int) -> str:
        example, scores = dev.items[item], dev.predictions[item]["scores"]
        bars = [
            Bar(truncate(example.choices[int(choice)], 60), share, percent(share), bool(int(choice) == labels[item]))
            for choice, share in scores.items()
        ]
        content = page.text(truncate(f"{example.context} {example.start}".strip()))
        heading = "correct with a low probability" if correct[item] else ""
        return error_card(heading, f"line {example.line}", content, bars)

    return [_calibration_section(dev, highest, correct), _worst_section(dev, card)]


def _token_regression(dev: DevPredictions[TokenRegressionTask, LabelledWordRows]) -> list[Section]:
    # The arrays hold the words of all sentences, one after the other.
    rows = dev.rows
    known = rows.label_weights[rows.word_starts] > 0
    labels = rows.labels[rows.word_starts].astype(float)
    predicted = np.array([value for prediction in dev.predictions for value in prediction["numbers"]])
    words = [word for item in dev.items for word in item.words]
    errors = np.abs(predicted - labels)
    note = f"Words of {dev.description}: the mean absolute error is {number(float(errors[known].mean()))}."

    def card(item: int) -> str:
        span = slice(rows.sentence_offsets[item], rows.sentence_offsets[item + 1])
        shown = [
            page.text(word) + (f" <small>{number(value)}, not {number(label)}</small>" if labelled else "")
            for word, value, label, labelled in zip(
                words[span], predicted[span], labels[span], known[span], strict=True
            )
        ]
        heading = f"mean absolute error {number(float(errors[span][known[span]].mean()))}"
        return error_card(heading, f"line {dev.items[item].lines[0]}", " ".join(shown))

    labelled_words = [word for word, labelled in zip(words, known, strict=True) if labelled]
    return [_scatter_section(labels[known], predicted[known], labelled_words, note), _worst_section(dev, card)]


def _spans(dev: DevPredictions[SpanTask, SpanRows]) -> list[Section]:
    results: list[list[tuple[str, Span]]] = []
    relations: Counter[tuple[str, str]] = Counter()  # by type and result
    for sentence, prediction in zip(dev.items, dev.predictions, strict=True):
        spans = [Span(span["type"], *span["words"]) for span in prediction["spans"]]
        results.append(compare_spans(sentence.spans, spans))
        # A relation is its type, its head and its tail.
        true = {(link.label, sentence.spans[link.head], sentence.spans[link.tail]) for link in sentence.relations}
        links = prediction.get("relations", ())
        predicted = {(link["type"], spans[link["head"]], spans[link["tail"]]) for link in links}
        for result, found in ((CORRECT, true & predicted), (MISSED, true - predicted), (SPURIOUS, predicted - true)):
            relations.update((label, result) for label, _, _ in found)
    sections = [] if dev.task.pairs_are_given else [_entity_section(dev, results)]
    if relations:
        columns = (CORRECT, MISSED, SPURIOUS)
        types = sorted({name for name, _ in relations})
        rows = [[name, *(f"{relations[name, result]:,}" for result in columns)] for name in types]
        note = f"On {dev.description}. A relation is correct if its type and both spans are."
        sections.append(Section("Relations", [Table(["type", *columns], [rows])], note))

    def card(item: int) -> str:
        words = dev.items[item].words
        wrong = [(result, span) for result, span in results[item] if result != CORRECT]
        listed = " ".join(highlight(" ".join(words[s.first : s.end]), f"{s.label}, {result}") for result, s in wrong)
        content = page.text(truncate(" ".join(words))) + (f"<br>{listed}" if listed else "")
        heading = f"{len(wrong)} of {len(results[item])} spans wrong"
        return error_card(heading, f"line {dev.items[item].line}", content)

    return [*sections, _worst_section(dev, card)]


def _worst_section(dev: DevPredictions, card: Callable[[int], str]) -> Section:
    note = "In descending order of the loss. High losses often show errors in the file."
    return Section("Examples with the highest loss", [Markup("".join(map(card, dev.worst(WORST))))], note)


def _entity_section(dev: DevPredictions, results: Sequence[Sequence[tuple[str, Span]]]) -> Section:
    """Counts true entities by type and result, and spurious predictions."""
    counts = Counter((name, result) for result, span in chain.from_iterable(results) for name in (span.label, None))
    types = sorted({span.label for sentence in results for _, span in sentence})
    rows = []
    for name in [*types, None]:  # None: all types
        true = sum(counts[name, result] for result in SPAN_RESULTS if result != SPURIOUS)
        recall = percent(counts[name, CORRECT] / true) if true else "-"
        rows.append([name or "all", f"{true:,}", recall, *(f"{counts[name, result]:,}" for result in SPAN_RESULTS)])
    note = (
        f"On {dev.description}. Wrong border: a predicted entity of the same type overlaps it; wrong type: another "
        "type was predicted for the same words; missed: no predicted entity overlaps it; spurious: a predicted entity "
        "overlaps no true one."
    )
    return Section("Entities", [Table(["type", "true", "recall", *SPAN_RESULTS], [rows])], note)


def _calibration_section(dev: DevPredictions, confidence: np.ndarray, correct: np.ndarray) -> Section:
    calibration = mistakes.calibrate(confidence, correct)
    note = (
        f"On {dev.description}: the mean confidence is {percent(float(confidence.mean()))}, the accuracy "
        f"{percent(float(correct.mean()))}, the expected calibration error {percent(calibration.error)} "
        f"({mistakes.BINS} bins). Orange is the gap between confidence and accuracy."
    )
    return Section("Calibration", [Markup(mistakes.reliability(calibration))], note)


def _scatter_section(labels: np.ndarray, predicted: np.ndarray, names: Sequence[str], note: str) -> Section:
    return Section("Labels and predictions", [Markup(mistakes.scatter(labels, predicted, names))], note)


def _confusions(labels: np.ndarray, predicted: np.ndarray, names: tuple[str, ...]) -> Markup:
    """Returns a matrix, or a list for many classes, next to the classes' scores."""
    seen = np.union1d(labels, predicted)
    shown, counts = [names[index] for index in seen], confusion_matrix(labels, predicted, labels=seen)
    scores = precision_recall_fscore_support(labels, predicted, labels=seen, zero_division=0)
    rows = [
        [name, f"{true:,}", *(percent(float(value)) for value in values)]
        for name, *values, true in zip(shown, *scores, strict=True)
    ]
    table = page.table(["class", "true", "precision", "recall", "F1"], rows)
    if len(shown) <= MOST_CLASSES:
        # A wide matrix has the scores below it.
        layout = "pair" if len(shown) <= NARROW else "stacked"
        return Markup(f'<div class="{layout}">{mistakes.confusion_table(counts, shown)}{table}</div>')
    confused = [
        [label, prediction, f"{count:,}", percent(share)]
        for label, prediction, count, share in mistakes.most_confused(counts, shown, MOST_CONFUSED)
    ]
    listed = page.table(["label", "predicted as", "count", "share of the label"], confused)
    return Markup(f'<div class="pair">{listed}{table}</div>')


def _texts(example: Any) -> str:
    """Returns an example's text as HTML; marks a pair's texts A and B."""
    first = page.text(truncate(example.text))
    if example.text_pair is None:
        return first
    return f"<b>A</b>{first}<br><b>B</b>{page.text(truncate(example.text_pair))}"


@dataclass(frozen=True)
class TaggingScore:
    """A tagger's accuracy on the words of the test file, next to the baseline."""

    accuracy: float
    unknown_accuracy: float  # on the words that the training file does not have
    baseline: tagging.Baseline


def score_tagger(checkpoint: str | Path, config: TaskConfig) -> TaggingScore:
    """Tags a task's test file and evaluates the baseline on the same words.

    Raises:
        UserError: the checkpoint is not a tagger, or files are missing or have no tags.
    """
    named, files = registry.resolve(config)
    train, test = (cast(Split[Sentence], registry.read(named, files[split])) for split in ("train", "test"))
    model = FineTuned(open_checkpoint(checkpoint))
    predictions = model.predictions(model.encode(test))
    known = {word for sentence in train.items for word in sentence.words}
    pairs = [pair for sentence in test.items for pair in zip(sentence.words, sentence.tags or (), strict=True)]
    predicted = [tag for sentence in predictions for tag in sentence["tags"]]
    correct = np.array([guess == tag for guess, (_, tag) in zip(predicted, pairs, strict=True)])
    unknown = np.array([word not in known for word, _ in pairs])
    return TaggingScore(
        accuracy=float(correct.mean()),
        unknown_accuracy=float(correct[unknown].mean()) if unknown.any() else float("nan"),
        baseline=tagging.most_frequent_tag_baseline(train, test),
    )


# A subclass has its base class's sections unless it is listed itself.
SECTIONS: dict[type[Task[Any, Any]], Callable[[DevPredictions[Any, Any]], list[Section]]] = {
    ClassificationTask: _classification,
    RegressionTask: _regression,
    TaggingTask: _tagging,
    SpanTask: _spans,
    TokenRegressionTask: _token_regression,
    QuestionTask: _question,
    ChoiceTask: _choice,
}
