"""A baseline for taggers: the most frequent tag of each word."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from bert_jax.command import UserError
from bert_jax.tasks.example import Sentence, Split


@dataclass(frozen=True)
class Baseline:
    """The accuracies of the baseline; NaN for an accuracy over no words."""

    accuracy: float
    unknown_accuracy: float  # over the words that are not in the training file
    words: int
    unknown_words: int


def most_frequent_tag_baseline(train: Split[Sentence], test: Split[Sentence]) -> Baseline:
    """Tags each word with its most frequent tag in train, and unknown words with the most frequent tag of all.

    This is the baseline of Jurafsky and Martin, Speech and Language Processing, chapter on part-of-speech tagging.
    Words are compared as written; of equally frequent tags, the alphabetically first one is used. Raises UserError
    for a file without tags.
    """
    by_word: dict[str, Counter[str]] = defaultdict(Counter)
    for word, tag in _tagged_words(train):
        by_word[word][tag] += 1
    overall = sum(by_word.values(), Counter())
    most_frequent = {word: _most_frequent(counts) for word, counts in by_word.items()}
    fallback = _most_frequent(overall)
    pairs = list(_tagged_words(test))
    correct = [most_frequent.get(word, fallback) == tag for word, tag in pairs]
    unknown = [is_correct for is_correct, (word, _) in zip(correct, pairs, strict=True) if word not in most_frequent]
    mean_unknown = sum(unknown) / len(unknown) if unknown else float("nan")
    return Baseline(sum(correct) / len(correct), mean_unknown, len(correct), len(unknown))


def _tagged_words(split: Split[Sentence]) -> list[tuple[str, str]]:
    if not split.labelled:
        raise UserError(f"{split.path} has no tags, which the baseline needs. Name a tagged file")
    return [pair for item in split.items for pair in zip(item.words, item.tags or (), strict=True)]


def _most_frequent(counts: Counter[str]) -> str:
    return min(counts, key=lambda tag: (-counts[tag], tag))
