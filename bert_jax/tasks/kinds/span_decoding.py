"""Decodes the predicted spans and relations of a file, and compares them with the true ones."""

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from bert_jax.tasks.example import Span
from bert_jax.tasks.kinds.span_objective import CANDIDATES, SpanAnswer
from bert_jax.tasks.kinds.span_rows import SpanRows

OVERLAPS = ("any", "nested", "flat")

SentenceRelation = tuple[int, str, Span, Span]  # the number of the sentence, the label, the head and the tail
Scored = dict[Span, float]  # the spans of a sentence and their probabilities


def candidate_spans(rows: SpanRows, answers: Sequence[SpanAnswer], labels: Sequence[str]) -> list[Scored]:
    """The best spans of each sentence, in reading order, an outer span before those inside it.

    They are the best of each row: CANDIDATES for each of its words, or fewer if it has fewer.
    """
    found: list[Scored] = [{} for _ in rows.split.items]
    for answer, words, sentence, start in zip(answers, np.diff(rows.row_words), *sentence_of_rows(rows), strict=True):
        kept = slice(CANDIDATES * words)
        word_and_length, types = np.divmod(answer.places[kept].astype(np.int64), len(labels))
        firsts, lengths = np.divmod(word_and_length, rows.longest)
        order = np.lexsort((-lengths, firsts))
        columns = (values[order].tolist() for values in (start + firsts, lengths, types, answer.scores[kept]))
        for first, length, kind, score in zip(*columns, strict=True):
            if score > 0:
                found[sentence][Span(labels[kind], first, first + length + 1)] = score
    return found


def spans_above(threshold: float, found: Sequence[Scored]) -> list[Scored]:
    """The spans of each sentence with at least this probability."""
    return [{span: score for span, score in one.items() if score >= threshold} for one in found]


def without_overlaps(found: Sequence[Scored], overlap: str) -> list[Scored]:
    """The spans of each sentence without those that overlap a more probable one (Yu et al. 2020, section 3).

    overlap is one of OVERLAPS: with `flat`, two spans have no common word; with `nested`, one of two with a common word
    lies in the other; with `any`, all are kept. The first of equally probable spans is kept. Spans above a threshold
    are the same whether it is applied before or afterwards.
    """
    if overlap == "any":
        return list(found)
    kept: list[Scored] = []
    for one in found:
        chosen: list[Span] = []
        for span in sorted(one, key=one.__getitem__, reverse=True):
            if not any(_clash(span, other, overlap) for other in chosen):
                chosen.append(span)
        kept.append({span: score for span, score in one.items() if span in chosen})
    return kept


def _clash(one: Span, other: Span, overlap: str) -> bool:
    apart = one.end <= other.first or other.end <= one.first
    if apart or overlap == "flat":
        return not apart
    inside = one.first <= other.first and other.end <= one.end
    around = other.first <= one.first and one.end <= other.end
    return not (inside or around)


def sentence_of_rows(rows: SpanRows) -> tuple[Int64[np.ndarray, "R"], Int64[np.ndarray, "R"]]:
    """The sentence of each row, and how many of its words are in earlier rows."""
    sentences = rows.items()
    return sentences, rows.row_words[:-1] - rows.sentence_offsets[sentences]


def predicted_relations(
    rows: SpanRows, answers: Sequence[SpanAnswer], spans: Sequence[Sequence[Span]], relation_labels: Sequence[str]
) -> dict[SentenceRelation, float]:
    """The relations between these spans of each sentence, and their probabilities.

    Several given spans may have the same words; a predicted relation then holds for all of them.
    """
    sentences, before = sentence_of_rows(rows)
    by_words: list[dict[tuple[int, int], list[Span]]] = [{} for _ in spans]
    for sentence, of_sentence in enumerate(spans):
        for span in of_sentence:
            by_words[sentence].setdefault((span.first, span.end), []).append(span)
    found: dict[SentenceRelation, float] = {}
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
    return found
