"""Near-duplicates: MinHash against exact Jaccard similarities, and planted copies among distinct documents."""

import random
from pathlib import Path

import numpy as np

from data_prep.cleaning.unit import BANDS, ROWS, Index, bands, minhash, shingles
from data_prep.readers import corpus as readers

BOOKS = Path(__file__).parent.parent.parent / "data_prep" / "sample" / "books"
WORDS = 200


def test_shared_hashes_estimate_the_jaccard_similarity():
    generator = np.random.default_rng(0)
    for similarity in (0.0, 0.2, 0.5, 0.8, 0.95):
        errors = []
        for _ in range(40):
            values = np.unique(generator.integers(0, 1 << 63, 1200).astype(np.uint64))[:1000]
            shared = round(1000 * 2 * similarity / (1 + similarity)) // 2 * 2
            left, right = values[: 500 + shared // 2], values[500 - shared // 2 :]
            exact = len(np.intersect1d(left, right)) / len(np.union1d(left, right))
            errors.append((minhash(left) == minhash(right)).mean() - exact)
        deviation = np.sqrt(0.25 / (BANDS * ROWS) / len(errors))
        assert abs(np.mean(errors)) < 4 * deviation


def test_shingles_are_runs_of_five_words_in_any_case_and_punctuation():
    same = [shingles(text) for text in ("One, two; three four FIVE six", "one two three four five SIX!")]
    assert len(same[0]) == 2 and (same[0] == same[1]).all()
    assert len(shingles("one two three four five six one two three four five")) == 6  # of 7 runs, the last is the first
    assert len(shingles("")) == 0 and len(shingles("two words")) == 1
    assert len(shingles("लड़का गया और लड़की गयी थी")) == 2  # vowel signs are parts of words
    assert len(shingles("港口很安静最后的船")) == 5  # of scripts without spaces, characters are words
    assert len(shingles("12港口, A4港口")) == 2  # also after a digit or a Latin letter
    assert len(shingles("\U0001e922\U0001e944\U0001e923 " * 4 + "\U0001e924\U0001e94a\U0001e925")) == 1  # Adlam


def documents() -> list[str]:
    """Passages of 200 words of novels, which share nothing."""
    texts = (text for path in readers.expand(str(BOOKS / "*.txt.xz")) for text in readers.documents(path))
    words = [word for text in texts for word in text.split()]
    return [" ".join(words[start : start + WORDS]) for start in range(0, len(words) - WORDS, WORDS)][:1000]


def test_planted_near_duplicates_are_found_and_distinct_documents_stay():
    distinct = documents()
    generator = random.Random(1)
    planted = []
    for text in distinct:
        words = text.split()
        for place in generator.sample(range(WORDS), 3):  # a similarity of about 0.86
            words[place] = generator.choice(("north", "seven", "lamps"))
        planted.append(" ".join(words).upper() + " Read more!")
    index = Index()
    kept = sum(index.add(bands(text)) for text in distinct)
    lost = sum(index.add(bands(text)) for text in planted)
    assert len(distinct) >= 500 and kept >= 0.99 * len(distinct)
    assert lost <= 0.05 * len(planted)


def test_a_dropped_document_does_not_drop_others():
    text = documents()[0].split()
    steps = [" ".join([*text[number * 12 :], *(f"new{n}" for n in range(number * 12))]) for number in range(8)]
    index = Index()
    kept = [index.add(bands(step)) for step in steps]
    assert kept[0] and not kept[1] and any(kept[2:])  # a chain of near-duplicates does not end in one document
