"""Decodes the predicted spans and relations of a file, and compares them with the true ones."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int64

from bert_jax.tasks.example import Span
from bert_jax.tasks.kinds.span_objective import CANDIDATES, SpanAnswer
from bert_jax.tasks.kinds.span_rows import SpanRows


class Candidates(NamedTuple):
    """The best spans of all rows, G of them, each with one type."""

    rows: Int64[np.ndarray, "G"]
    firsts: Int64[np.ndarray, "G"]  # index among the words of the row
    lengths: Int64[np.ndarray, "G"]
    types: Int64[np.ndarray, "G"]
    scores: Float[np.ndarray, "G"]

    def above(self, threshold: float) -> "Candidates":
        """The candidates with at least this probability."""
        kept = self.scores >= threshold
        return Candidates(*(values[kept] for values in self))


class PredictedRelation(NamedTuple):
    """A relation between two spans of a sentence."""

    sentence: int
    label: str
    head: Span
    tail: Span
    score: float


def candidates(rows: SpanRows, answers: Sequence[SpanAnswer], types: int) -> Candidates:
    """The best spans of each row over `types` types: CANDIDATES for each of its words, or fewer if it has fewer."""
    kept = np.minimum(CANDIDATES * np.diff(rows.row_words), [len(answer.places) for answer in answers])
    row_of = np.repeat(np.arange(rows.count), kept)
    places = np.concatenate([answer.places[:count] for answer, count in zip(answers, kept, strict=True)])
    scores = np.concatenate([answer.scores[:count] for answer, count in zip(answers, kept, strict=True)])
    word_and_length, type_ids = np.divmod(places.astype(np.int64), types)
    firsts, lengths = np.divmod(word_and_length, rows.longest)
    return Candidates(row_of, firsts, lengths + 1, type_ids, scores.astype(np.float64)).above(np.nextafter(0, 1))


def is_true(rows: SpanRows, found: Candidates, types: int) -> Bool[np.ndarray, "G"]:
    """Which candidates are true spans."""
    true_rows = np.repeat(np.arange(rows.count), np.diff(rows.span_offsets))
    shape = rows.count, int(rows.lengths.max()), rows.longest + 1, types
    true = np.ravel_multi_index((true_rows, rows.firsts, rows.lengths_in_words, rows.types), shape)
    return np.isin(np.ravel_multi_index((found.rows, found.firsts, found.lengths, found.types), shape), true)


def best_threshold(scores: Float[np.ndarray, "G"], true: Bool[np.ndarray, "G"], total: int) -> float:
    """The lowest probability of a predicted span, for the best F1 against `total` true spans.

    It is midway between the last span that is predicted and the next one, as in decision trees; the highest one of
    equal F1; and 1/2 where no candidate is true.
    """
    order = np.argsort(-scores, kind="stable")
    scores, hits = scores[order], np.cumsum(true[order])
    # Predicting the first n gives F1 = 2 * hits / (n + total). A threshold can only separate different scores.
    cuts = np.flatnonzero(np.diff(scores, append=-1))
    if not len(cuts) or not hits[-1]:
        return 0.5
    last = cuts[np.argmax(hits[cuts] / (cuts + 1 + total))]
    following = scores[last + 1] if last + 1 < len(scores) else 0.0
    return float((scores[last] + following) / 2)


def sentence_of_rows(rows: SpanRows) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
    """The sentence of each row, and how many of its words are in earlier rows."""
    sentences = rows.items()
    return sentences, rows.row_words[:-1] - rows.sentence_offsets[sentences]


def predicted_spans(rows: SpanRows, found: Candidates, labels: Sequence[str]) -> list[dict[Span, float]]:
    """The spans of each sentence and their probabilities, in reading order, an outer span before those inside it."""
    sentences, before = sentence_of_rows(rows)
    by_sentence: list[dict[Span, float]] = [{} for _ in range(len(rows.sentence_offsets) - 1)]
    order = np.lexsort((-found.lengths, found.firsts, found.rows))
    for row, first, length, kind, score in zip(*(values[order].tolist() for values in found), strict=True):
        start = first + int(before[row])
        by_sentence[sentences[row]][Span(labels[kind], start, start + length)] = score
    return by_sentence


def predicted_relations(
    rows: SpanRows, answers: Sequence[SpanAnswer], spans: Sequence[Sequence[Span]], relation_labels: Sequence[str]
) -> list[PredictedRelation]:
    """The relations between these spans of each sentence, each once.

    Several given spans may have the same words; a predicted relation then holds for all of them.
    """
    sentences, before = sentence_of_rows(rows)
    by_words: list[dict[tuple[int, int], list[Span]]] = [{} for _ in spans]
    for sentence, of_sentence in enumerate(spans):
        for span in of_sentence:
            by_words[sentence].setdefault((span.first, span.end), []).append(span)
    found: dict[tuple[int, str, Span, Span], float] = {}
    for row, answer in enumerate(answers):
        sentence, start = int(sentences[row]), int(before[row])
        firsts = answer.pair_firsts + start
        paired = [
            by_words[sentence].get(pair, [])
            for pair in zip(firsts.tolist(), (firsts + answer.pair_lengths).tolist(), strict=True)
        ]
        for head, tail in np.argwhere(answer.relations > 0).tolist():
            if head != tail:
                label = relation_labels[answer.relations[head, tail] - 1]
                score = float(answer.relation_scores[head, tail])
                for a, b in itertools.product(paired[head], paired[tail]):
                    if a != b:
                        found.setdefault((sentence, label, a, b), score)
    return [PredictedRelation(*ends, score) for ends, score in found.items()]
