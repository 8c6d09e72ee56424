import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_prep.sequences import blocks, sentence_passages

# Documents as the lengths of their sentences in tokens.
documents_of_lengths = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=8), min_size=1, max_size=6)


def stream(lengths: list[list[int]]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Sentences' begins and ends with a separator before each document, and the documents' sentences."""
    begins, ends, documents, place = [], [], [], 0
    for document in lengths:
        place += 1
        documents.append((len(begins), len(begins) + len(document)))
        for length in document:
            begins.append(place)
            place += length
            ends.append(place)
    return begins, ends, documents


@given(documents_of_lengths, st.integers(2, 40), st.booleans())
def test_nothing_is_lost_or_doubled_and_no_sentence_that_fits_is_cut(
    lengths: list[list[int]], room: int, across: bool
) -> None:
    begins, ends, documents = stream(lengths)
    spans = sentence_passages(begins, ends, [(0, len(begins))] if across else documents, room)
    used = np.zeros(ends[-1], int)
    for begin, end in spans:
        assert 0 < end - begin <= room
        used[begin:end] += 1
    tokens = np.zeros(ends[-1], bool)
    for begin, end in zip(begins, ends, strict=True):
        tokens[begin:end] = True
    assert (used[tokens] == 1).all()
    assert (used[~tokens] <= across).all(), "a separator stands inside a passage of full sentences or is left out"
    starts = {begin for begin, _ in spans}
    for begin, end in zip(begins, ends, strict=True):
        if end - begin <= room:
            assert not any(begin < start < end for start in starts)


@given(documents_of_lengths, st.integers(2, 40))
def test_passages_are_as_long_as_they_can_be(lengths: list[list[int]], room: int) -> None:
    begins, ends, documents = stream(lengths)
    spans = sentence_passages(begins, ends, documents, room)
    last_of_document = {ends[last - 1] for _, last in documents}
    for begin, end in spans:
        if end in ends and end not in last_of_document:
            assert ends[ends.index(end) + 1] - begin > room, "the next sentence would have fitted"


def test_full_sentences_continue_across_documents() -> None:
    # Two documents of sentences 3, 4 and 5, 2, separators at 0 and 8.
    begins, ends, documents = stream([[3, 4], [5, 2]])
    assert sentence_passages(begins, ends, [(0, 4)], 12) == [(1, 8), (9, 16)]
    assert sentence_passages(begins, ends, [(0, 4)], 13) == [(1, 14), (14, 16)]
    assert sentence_passages(begins, ends, documents, 13) == [(1, 8), (9, 16)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 200)), min_size=1, max_size=9), st.integers(1, 50))
def test_blocks_are_full_but_for_the_last_of_a_document(documents: list[tuple[int, int]], room: int) -> None:
    begins, ends, expected, place = [], [], [], 0
    for gap, length in documents:
        place += gap
        begins.append(place)
        expected += [[start, min(start + room, place + length)] for start in range(place, place + length, room)]
        place += length
        ends.append(place)
    assert blocks(np.array(begins), np.array(ends), room).tolist() == expected
