"""Entities, or any typed spans, that were found, and in which way the others went wrong. Pure Python."""

from collections import Counter
from collections.abc import Iterable, Sequence

from bert_jax.tasks.example import Span

CORRECT, TYPE, BORDER, BOTH = "right", "wrong type", "wrong border", "wrong type and border"
MISSED, SPURIOUS = "missed", "spurious"
SPAN_RESULTS = (CORRECT, TYPE, BORDER, BOTH, MISSED, SPURIOUS)


def compare_spans(truth: Sequence[Span], guess: Sequence[Span]) -> list[tuple[str, Span]]:
    """What became of each true span, and which guesses are spurious.

    A true span is right when it was guessed; of wrong type when its words were; of wrong border when a guess of its
    type overlaps it; both when a guess of another type does; else missed. A guess that overlaps no true span is
    spurious. So every true span has one outcome. The wrong ones are those that Chinchor and Sundheim (1993, MUC-5)
    call incorrect or partial.
    """
    found: list[tuple[str, Span]] = []
    guessed = set(guess)
    for span in truth:
        near = [other for other in guess if _overlap(span, other)]
        if span in guessed:
            outcome = CORRECT
        elif any(other[1:] == span[1:] for other in near):
            outcome = TYPE
        elif any(other.label == span.label for other in near):
            outcome = BORDER
        else:
            outcome = BOTH if near else MISSED
        found.append((outcome, span))
    return found + [(SPURIOUS, span) for span in guess if not any(_overlap(span, other) for other in truth)]


def count_by_type(judged: Iterable[tuple[str, Span]]) -> dict[str, Counter[str]]:
    """By type, how often each of SPAN_RESULTS came about."""
    counts: dict[str, Counter[str]] = {}
    for outcome, span in judged:
        counts.setdefault(span.label, Counter())[outcome] += 1
    return dict(sorted(counts.items()))


def _overlap(left: Span, right: Span) -> bool:
    return left.first < right.end and right.first < left.end
