"""Compares predicted entities, or any typed spans, with the true ones. Pure Python."""

from collections import Counter
from collections.abc import Iterable, Sequence

from bert_jax.tasks.example import Span

CORRECT, TYPE, BORDER, BOTH = "correct", "wrong type", "wrong border", "wrong type and border"
MISSED, SPURIOUS = "missed", "spurious"
SPAN_RESULTS = (CORRECT, TYPE, BORDER, BOTH, MISSED, SPURIOUS)


def compare_spans(true: Sequence[Span], predicted: Sequence[Span]) -> list[tuple[str, Span]]:
    """Returns the result of each true span, then the predicted spans that are spurious.

    A true span is correct if it was predicted; of wrong type if another type was predicted for its words; of wrong
    border if a predicted span of its type overlaps it; both if one of another type does; else missed. A predicted span
    that overlaps no true span is spurious. The wrong ones are those that Chinchor and Sundheim (1993, MUC-5) call
    incorrect or partial.
    """
    results: list[tuple[str, Span]] = []
    exact = set(predicted)
    for span in true:
        near = [other for other in predicted if _overlap(span, other)]
        if span in exact:
            result = CORRECT
        elif any(other[1:] == span[1:] for other in near):
            result = TYPE
        elif any(other.label == span.label for other in near):
            result = BORDER
        else:
            result = BOTH if near else MISSED
        results.append((result, span))
    return results + [(SPURIOUS, span) for span in predicted if not any(_overlap(span, other) for other in true)]


def count_by_type(results: Iterable[tuple[str, Span]]) -> dict[str, Counter[str]]:
    """Returns how often each of SPAN_RESULTS occurs, by type."""
    counts: dict[str, Counter[str]] = {}
    for result, span in results:
        counts.setdefault(span.label, Counter())[result] += 1
    return dict(sorted(counts.items()))


def _overlap(left: Span, right: Span) -> bool:
    return left.first < right.end and right.first < left.end
