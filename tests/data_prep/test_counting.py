"""Counting is exact until memory is full, right on average beyond, and the same for every script."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import counting, learners
from data_prep.counting import ChunkCounter, count_words, windows


class Plain:
    """Words are chunks between white spaces."""

    def chunks(self, text: str) -> list[str]:
        return text.split()

    def words(self, chunk: str) -> list[str]:
        return windows(chunk)

    def unknown(self, chunk: str) -> int:
        return 0

    def changed(self, chunk: str) -> str:
        return ""


SPLITTERS = [learners.WordPieceSplitter(lowercase=False), learners.ByteSplitter()]
THAI = "ภาษาไทยเป็นภาษาที่มีระดับเสียงของคำแน่นอนหรือวรรณยุกต์เช่นเดียวกับภาษาจีน"
CHINESE = "汉语是分析语有声调文字系统汉字是一种意音文字兼具表意和表音功能"


@pytest.mark.parametrize("splitter", SPLITTERS, ids=["wordpiece", "bpe"])
@given(
    texts=st.lists(st.text(alphabet="ab\u0301é, .\n\r\t\u2028\u00a0\u3000'中文かไท่าï–#🙂1", max_size=80), max_size=6)
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_counts_are_those_of_the_librarys_words(splitter, texts):
    """Splitting a whole text by the library gives the same words as chunk by chunk, white space included."""
    counter = ChunkCounter(splitter)
    counter.add(texts)
    assert count_words(counter.counts, splitter) == Counter(word for text in texts for word in splitter.words(text))


@given(word=st.text("aก่๋x\u0301", min_size=1, max_size=200))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_windows_join_to_the_word(word):
    parts = windows(word)
    assert "".join(parts) == word and all(parts)
    assert len(parts) == -(-len(word) // counting.LONGEST_WORD)


def test_windows_keep_marks_with_their_letter():
    parts = windows(THAI * 3)
    assert len(parts) > 5 and "".join(parts) == THAI * 3
    assert all(len(part) <= counting.LONGEST_WORD + 2 and part[0] not in "่้๊๋ัิีึืุู็์" for part in parts)


@pytest.mark.parametrize("splitter", SPLITTERS, ids=["wordpiece", "bpe"])
def test_unspaced_scripts_stay_small_and_do_not_vanish(splitter):
    """Every sentence is new, and memory is full many times over; yet characters keep their share."""
    generator = random.Random(2)
    counter = ChunkCounter(splitter, max_chunks=2000)
    characters: Counter[str] = Counter()
    for _ in range(300):
        document = "\n".join(
            "".join(generator.choices(letters, k=generator.randrange(20, 120)))
            for letters in (THAI, CHINESE, "abcdefgh ")
            for _ in range(4)
        )
        characters.update(letter for letter in document if not letter.isspace())
        counter.add([document])
        assert len(counter.counts) <= 2000
    assert counter.thinned > 3
    found: Counter[str] = Counter()
    for word, count in count_words(counter.counts, splitter).items():
        for letter in word.removeprefix("##") if isinstance(splitter, learners.WordPieceSplitter) else word:
            found[letter] += count
    if isinstance(splitter, learners.ByteSplitter):
        written = Counter()
        for letter, count in characters.items():
            for byte in learners.written_bytes(letter):
                written[byte] += count
        characters, found = written, Counter({byte: count for byte, count in found.items() if byte in written})
    for letter, count in characters.most_common(12):
        # Each count is a sum over some 500 independent draws: 25% is five standard deviations.
        assert abs(found[letter] - count) < 0.25 * count, letter


def test_thinning_keeps_what_is_frequent_and_the_total():
    generator = random.Random(1)
    documents = [" ".join(["often", "also"] * 5 + [f"rare{generator.random()}" for _ in range(40)]) for _ in range(100)]
    counter, again = ChunkCounter(Plain(), max_chunks=400), ChunkCounter(Plain(), max_chunks=400)
    for document in documents:
        counter.add([document])
        again.add([document])
    assert counter.counts["often"] == counter.counts["also"] == 500
    assert len(counter.counts) <= 400 and counter.thinned > 5
    assert counter.counts == again.counts
    assert 3200 < sum(counter.counts.values()) - 1000 < 4800  # of 4000, by some 100 draws of weight 16 to 32
    full = ChunkCounter(Plain())
    full.add(documents)
    assert len(full.counts) == 4002 and not full.thinned


def test_long_documents_are_counted_in_parts(monkeypatch):
    text = "one two three\n" * 1000 + "four " * 3000
    monkeypatch.setattr(counting, "BLOCK_CHARACTERS", 777)
    counter = ChunkCounter(Plain())
    counter.add([text, "five", "six\n" * 900])
    assert counter.counts == {"one": 1000, "two": 1000, "three": 1000, "four": 3000, "five": 1, "six": 900}


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.3, 0.0])
def test_languages_count_by_the_power_of_their_share(alpha):
    """Shares of counts against the formula of Lample and Conneau (2019), section 3.1."""
    generator = random.Random(5)
    sizes = {"large": 60_000, "middle": 6_000, "small": 600}
    texts = {name: [" ".join(f"{name}{generator.randrange(400)}" for _ in range(size))] for name, size in sizes.items()}
    chunks, shares = counting.count_chunks(texts.items(), Plain(), alpha)
    portions = {name: len(texts[name][0]) / sum(len(each[0]) for each in texts.values()) for name in sizes}
    powers = {name: portion**alpha for name, portion in portions.items()}
    for share in shares:
        expected = powers[share.language] / sum(powers.values())
        assert share.text == pytest.approx(portions[share.language])
        assert share.counted == pytest.approx(expected, rel=1e-3)
        counted = sum(len(word) * count for word, count in chunks.items() if word.startswith(share.language))
        all_counted = sum(len(word) * count for word, count in chunks.items())
        assert counted / all_counted == pytest.approx(expected, rel=0.05)
    assert (chunks, shares) == counting.count_chunks(texts.items(), Plain(), alpha)
    few, _ = counting.count_chunks(texts.items(), Plain(), alpha, max_chunks=600)
    assert len(few) <= 300 and {"large", "middle", "small"} == {word.rstrip("0123456789") for word in few}
