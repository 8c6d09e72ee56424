"""What a tagger has to beat: the most frequent tag of each word."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from bert_jax.command import UserError
from bert_jax.tasks.example import Sentence, Split


@dataclass(frozen=True)
class Baseline:
    """What the most frequent tag of each word reaches; NaN for an accuracy over no words."""

    accuracy: float
    unknown_accuracy: float  # over the words that the training file does not hold
    words: int
    unknown_words: int


def most_frequent_tag_baseline(train: Split[Sentence], test: Split[Sentence]) -> Baseline:
    """Tags each word as it mostly is in train, and an unknown word by train's most frequent tag.

    The baseline of Jurafsky and Martin, Speech and Language Processing, chapter on part-of-speech tagging. Words
    are compared as written; of equally frequent tags the first in the alphabet is taken.
    """
    by_word: dict[str, Counter[str]] = defaultdict(Counter)
    for word, tag in _tagged_words(train):
        by_word[word][tag] += 1
    overall = sum(by_word.values(), Counter())
    choice = {word: _most_frequent(counts) for word, counts in by_word.items()}
    fallback = _most_frequent(overall)
    pairs = list(_tagged_words(test))
    right = [choice.get(word, fallback) == tag for word, tag in pairs]
    unknown = [hit for hit, (word, _) in zip(right, pairs, strict=True) if word not in choice]
    mean_unknown = sum(unknown) / len(unknown) if unknown else float("nan")
    return Baseline(sum(right) / len(right), mean_unknown, len(right), len(unknown))


def _tagged_words(split: Split[Sentence]) -> list[tuple[str, str]]:
    if not split.labelled:
        raise UserError(f"{split.path} has no tags; the baseline needs them")
    return [pair for item in split.items for pair in zip(item.words, item.tags or (), strict=True)]


def _most_frequent(counts: Counter[str]) -> str:
    return min(counts, key=lambda tag: (-counts[tag], tag))
