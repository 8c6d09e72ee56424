"""Makes sequences for each objective from a unit's ids, as spans.

nsp             [CLS] A [SEP] B [SEP], B is random half of the time (BERT)
sop             [CLS] A [SEP] B [SEP], consecutive, and swapped half of the time (ALBERT)
full_sentences  [CLS] A [SEP], whole sentences, a separator between documents (RoBERTa)
doc_sentences   [CLS] A [SEP], whole sentences of one document (RoBERTa)
single          [CLS] A [SEP], T - 2 ids of one document, or the rest of it (SpanBERT)

A unit's ids are concatenated, sentence by sentence and document by document. A segment is a span [begin, end) of this
array, so no function here handles an id. Start with `spans` at the end: it makes passages or pairs, and splits some of
them to fill packed rows (`fill_gaps`).
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Bool, Int64, UInt
from bert_jax.data.manifest import OBJECTIVES, PAIRS
from bert_jax.errors import UserError
from data_prep.packing import gaps

RANDOM_SEGMENT = 1  # the label if B is from another document (nsp)
# Pretraining objectives, for advice in a message (copied from bert_jax.train.objectives, which imports jax).
OF_TRAINING = ("mlm", "causal", "bidirectional_lm", "replaced_tokens", "diffusion")

Ranges = Sequence[tuple[int, int]]  # by document, its sentences [first, last)
Draw = Callable[[], float]


class Encoded(NamedTuple):
    """A unit's text as ids, without documents and sentences that have none."""

    ids: UInt[np.ndarray, "n"]
    offsets: Int64[np.ndarray, "sentences+1"]  # sentence i is ids[offsets[i]:offsets[i + 1]]
    documents: Int64[np.ndarray, "documents 2"]  # by document, its sentences [first, last)
    empty: int  # documents without a token


class Pair(NamedTuple):
    """One sequence `[CLS] A [SEP] B [SEP]`: A and B as spans of the unit's ids."""

    a_begin: int
    a_end: int
    b_begin: int
    b_end: int
    label: int  # 0: B follows A; 1: B is from another document (nsp), or precedes A (sop)


class Spans(NamedTuple):
    """A unit's sequences, in the order of the text."""

    ids: UInt[np.ndarray, "n"]
    sequences: Int64[np.ndarray, "Q 5"]  # Pairs of spans of ids; with one segment, B is empty and the label -1
    segments: int  # in a sequence: 1 or 2
    late: Bool[np.ndarray, "Q"]  # which are pieces made to fill gaps, to be packed last


class Borders(NamedTuple):
    """Indices into the ids of `Spans`: first ids of sentences, and separators between documents."""

    positions: Int64[np.ndarray, "K"]  # ascending
    separators: Bool[np.ndarray, "K"]  # which positions are separators


# Sequences of one segment.


def sentence_passages(
    begins: Sequence[int], ends: Sequence[int], documents: Ranges, room: int
) -> list[tuple[int, int]]:
    """Groups whole sentences into passages of at most `room` ids; a document starts a new passage.

    With the documents of a unit this is DOC-SENTENCES (Liu et al. 2019, section 4.1). With all sentences as one
    document, in a stream with separators between documents, it is FULL-SENTENCES.

    Args:
        begins, ends: The sentences' spans.

    Returns:
        Spans that begin and end at sentence borders, unless a sentence is longer than the room.
    """
    passages = []
    for first, last in documents:
        while first < last:
            begin = begins[first]
            # A sentence longer than the room gives full passages and a remainder, which the next sentences join: no id
            # is lost.
            while ends[first] - begin > room:
                passages.append((begin, begin + room))
                begin += room
            # The first sentence that ends beyond the room begins the next passage.
            first = bisect_right(ends, begin + room, first + 1, last)
            passages.append((begin, ends[first - 1]))
    return passages


def blocks(begins: Int64[np.ndarray, "n"], ends: Int64[np.ndarray, "n"], room: int) -> Int64[np.ndarray, "Q 2"]:
    """Splits documents' ids [begin, end) into spans of `room` and a remainder (Joshi et al. 2020, section 4.2)."""
    # Span k of a document begins at its begin + k * room. `arange` counts k on over all documents, so the first index
    # of each document is subtracted.
    counts = -((begins - ends) // room)
    begin = np.repeat(begins - room * (np.cumsum(counts) - counts), counts) + room * np.arange(counts.sum())
    return np.stack([begin, np.minimum(begin + room, np.repeat(ends, counts))], axis=1)


# Pairs of segments. They use only the generator's `random()`, whose results are equal in all versions of Python.

_COINS = 53  # random() is a multiple of 2**-53, which gives that many fair coins


def next_sentence_pairs(
    offsets: Sequence[int], documents: Ranges, seq_len: int, short_seq_prob: float, generator: Random
) -> list[Pair]:
    """Makes pairs from a unit's documents, in order (Devlin et al. 2019, appendix A.2).

    As `create_instances_from_document` in google-research/bert, create_pretraining_data.py, except that the random
    segment never comes from the same document (there it rarely does).

    Args:
        offsets: Sentence i is ids[offsets[i]:offsets[i + 1]], and not empty.
        documents: Two or more.
        short_seq_prob: Share of documents with a shorter target length.
    """
    room = seq_len - 3
    draw = generator.random
    pairs: list[Pair] = []
    for document, (first, last) in enumerate(documents):
        target = _target(room, short_seq_prob, draw)
        while first < last:
            begin = offsets[first]
            chunk_end = bisect_left(offsets, begin + target, first + 1, last)
            sentences = chunk_end - first
            # A has at least one sentence. B has the rest of the chunk, or a random segment about as long.
            split = first + (1 + int(draw() * (sentences - 1)) if sentences > 1 else 1)
            a_end = offsets[split]
            if sentences == 1 or draw() < 0.5:
                b_begin, b_end = _random_segment(offsets, documents, document, target - (a_end - begin), draw)
                label = RANDOM_SEGMENT
                first = split  # the rest of the chunk is used by the next pair
            else:
                b_begin, b_end = a_end, offsets[chunk_end]
                label = 0
                first = chunk_end
            pairs.append(truncate(Pair(begin, a_end, b_begin, b_end, label), room, generator))
    return pairs


def sentence_order_pairs(
    offsets: Sequence[int], documents: Ranges, seq_len: int, short_seq_prob: float, generator: Random
) -> list[Pair]:
    """Pairs consecutive segments, swapped half of the time (Lan et al. 2020, section 3.1).

    Chunks are those of google-research/albert, create_pretraining_data.py. There, a chunk of one sentence gets a random
    segment, labelled as swapped; here it is split at a random token, so all pairs come from one document.

    Args:
        documents: Two tokens or more in each; otherwise as for `next_sentence_pairs`.
    """
    room = seq_len - 3
    draw = generator.random
    pairs: list[Pair] = []
    for first, last in documents:
        target = _target(room, short_seq_prob, draw)
        while first < last:
            begin = offsets[first]
            chunk_end = bisect_left(offsets, begin + target, first + 1, last)
            if offsets[last] - offsets[chunk_end] == 1:  # one token cannot be split, so it joins this chunk
                chunk_end = last
            sentences = chunk_end - first
            if sentences > 1:
                split = offsets[first + 1 + int(draw() * (sentences - 1))]
            else:
                split = begin + 1 + int(draw() * (offsets[chunk_end] - begin - 1))
            pairs.append(truncate(_ordered(begin, split, offsets[chunk_end], draw), room, generator))
            first = chunk_end
    return pairs


def cut_long_sentences(encoded: Encoded, room: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Cuts sentences of more than half a pair's room into pieces of at most an eighth, to pair like sentences.

    A pair is a chunk of sentences that just exceeds the room, and loses the excess. Without cutting, text without
    punctuation loses 95% of its tokens, and all its pairs of nsp are random.

    Returns:
        The offsets of the pieces, and by document its pieces [first, last).
    """
    lengths, most = np.diff(encoded.offsets), max(room // 8, 4)
    counts = np.where(lengths > room // 2, -(-lengths // most), 1)
    firsts = np.concatenate([[0], np.cumsum(counts)])
    # Piece k of a sentence with n pieces begins after k/n of its ids. `arange` counts k on over all sentences.
    piece = np.arange(firsts[-1]) - np.repeat(firsts[:-1], counts)
    within = piece * np.repeat(lengths, counts) // np.repeat(counts, counts)
    begins = np.repeat(encoded.offsets[:-1], counts) + within
    documents = [(first, last) for first, last in firsts[encoded.documents].tolist()]
    return [*begins.tolist(), int(encoded.offsets[-1])], documents


def _target(room: int, short_seq_prob: float, draw: Draw) -> int:
    # Mostly the whole row, and sometimes less, so that pretraining sees short inputs too.
    return 2 + int(draw() * (room - 1)) if draw() < short_seq_prob else room


def _ordered(begin: int, split: int, end: int, draw: Draw) -> Pair:
    return Pair(split, end, begin, split, 1) if draw() < 0.5 else Pair(begin, split, split, end, 0)


def _random_segment(
    offsets: Sequence[int], documents: Ranges, document: int, wanted: int, draw: Draw
) -> tuple[int, int]:
    """Returns a random run of another document's sentences: `wanted` ids or the rest, at least one sentence."""
    other = int(draw() * (len(documents) - 1))
    other += other >= document  # skips the document itself
    first, last = documents[other]
    start = first + int(draw() * (last - first))
    begin = offsets[start]
    return begin, offsets[bisect_left(offsets, begin + wanted, start + 1, last)]


def truncate(pair: Pair, room: int, generator: Random) -> Pair:
    """Shortens a pair to `room` ids, as if one by one from the longer segment (B if equal) and from a random end."""
    a_begin, a_end, b_begin, b_end, label = pair
    a_length, b_length = a_end - a_begin, b_end - b_begin
    excess = a_length + b_length - room
    if excess <= 0:
        return pair
    # First the longer segment is shortened to the other's length, then both in turn.
    from_longer = min(excess, abs(a_length - b_length))
    from_a, from_b = (from_longer, 0) if a_length > b_length else (0, from_longer)
    excess -= from_longer
    from_a += excess // 2
    from_b += excess - excess // 2
    # How many ids a segment loses in front is a sum of fair coins, which is sampled at once.
    a_front, b_front = _heads(from_a, generator), _heads(from_b, generator)
    return Pair(a_begin + a_front, a_end - (from_a - a_front), b_begin + b_front, b_end - (from_b - b_front), label)


def _heads(coins: int, generator: Random) -> int:
    """Tosses fair coins and counts the heads."""
    heads = 0
    while coins > 0:
        tossed = min(coins, _COINS)
        heads += (int(generator.random() * (1 << _COINS)) & ((1 << tossed) - 1)).bit_count()
        coins -= tossed
    return heads


# Pieces of sequences for packed rows. Sequences that nearly fill a row leave gaps of a few tokens, into which only
# short sequences fit, and a corpus has few of those. So a few random sequences are split into pieces of just these
# lengths, as many as the gaps can take. No text is lost, and all other sequences keep the form and length that their
# objective gave them. (Krell et al. 2021 fill rows with the short sequences that a corpus happens to have.)

# Tokens of the shortest piece: one or two between the special ones, and one more.
SHORTEST = 6
# More text is selected than the gaps hold, because the remainder of a split sequence fills no gap.
_MARGIN = 1.05

# (begin, tokens, end of the span) -> a sequence with that many tokens from `begin`, and how many tokens it consumed
Piece = Callable[[int, int, int], tuple[Pair, int]]
# The spans of a sequence that may be split: its own text, without a random segment.
Own = Callable[[Pair], list[tuple[int, int]]]


def fill_gaps(
    sequences: Int64[np.ndarray, "Q 5"], segments: int, seq_len: int, most: int, own: Own, piece: Piece, draw: Draw
) -> tuple[Int64[np.ndarray, "m 5"], Bool[np.ndarray, "m"]]:
    """Splits some sequences (Pairs) for rows with at most `most` sequences.

    Returns:
        The sequences in text order, and which are pieces, to be packed last.
    """
    lengths = sequence_lengths(sequences, segments)
    gap_tokens = sum(room for room in gaps(lengths, seq_len, most) if room >= SHORTEST)
    # A selected sequence leaves its row, which opens another gap; hence the division.
    wanted = _MARGIN * gap_tokens / (1 + gap_tokens / lengths.sum())
    # Only long sequences are split, and at most half of them. The remainder is then small by comparison.
    long = np.flatnonzero(lengths > seq_len // 2).tolist()
    chosen: dict[int, None] = {}
    while wanted > 0 and len(chosen) < len(long) // 2:
        number = long[int(draw() * len(long))]
        if number not in chosen:
            chosen[number] = None
            wanted -= lengths[number]
    whole = np.ones(len(sequences), bool)
    whole[list(chosen)] = False
    left = sorted(room for room in gaps(lengths[whole], seq_len, most) if room >= SHORTEST)

    pieces: list[Pair] = []
    numbers = np.flatnonzero(whole).tolist()  # by result, the sequence that it is a part of
    for number in chosen:
        before = len(pieces)
        pair = Pair(*sequences[number].tolist())
        spans = own(pair)
        if not left or min(end - begin for begin, end in spans) < segments:
            pieces.append(pair)
        else:
            for begin, end in spans:
                pieces += _cut(begin, end, left, segments, piece)
        numbers += [number] * (len(pieces) - before)
    joined = np.concatenate([sequences[whole], np.array(pieces, np.int64).reshape(-1, 5)])
    order = np.argsort(numbers, kind="stable")
    return joined[order], order >= np.count_nonzero(whole)


def sequence_lengths(sequences: Int64[np.ndarray, "Q 5"], segments: int) -> Int64[np.ndarray, "Q"]:
    """Computes lengths in tokens, with [CLS] and one [SEP] per segment."""
    return sequences[:, 1] - sequences[:, 0] + sequences[:, 3] - sequences[:, 2] + segments + 1


def _cut(begin: int, end: int, left: list[int], segments: int, piece: Piece) -> list[Pair]:
    """Splits a span into pieces as long as the widest gaps that they can fill; the last may be a remainder.

    `left` holds the gaps, ascending. Filled ones are removed.
    """
    pieces = []
    while end - begin >= segments:
        tokens = end - begin
        place = bisect_right(left, tokens + segments + 1) - 1
        if place >= 0:
            # A remainder needs a token per segment. If too few would be left, the piece takes them all.
            fitting = left.pop(place) - segments - 1
            tokens = fitting if tokens - fitting >= segments else tokens
        made, taken = piece(begin, tokens, end)
        pieces.append(made)
        begin += taken
    return pieces


def check(objective: str) -> None:
    """Checks the name of an objective.

    Raises:
        UserError: It is unknown.
    """
    if objective not in OBJECTIVES:
        hint = f". {objective} is an objective of training: bert-jax pretrain --config.objective={objective}"
        hint = hint if objective in OF_TRAINING else ""
        raise UserError(f"unknown --objective {objective}; choose from {', '.join(OBJECTIVES)}{hint}")


def segment_count(objective: str) -> int:
    """Returns the number of segments in a sequence."""
    return 2 if objective in PAIRS else 1


def fewest_documents(objective: str) -> int:
    """Returns how many documents a part needs: 2 for nsp, whose random segments come from another document."""
    return 2 if objective == "nsp" else 1


def usable(objective: str, encoded: Encoded) -> tuple[Encoded, dict[str, int]]:
    """Removes documents that the objective cannot use, and counts them by reason."""
    skipped = {"no_tokens": encoded.empty} if encoded.empty else {}
    documents = encoded.documents
    if objective == "nsp" and len(documents) == 1:
        skipped["no_other_document"] = 1
        documents = documents[:0]
    if objective == "sop":
        long_enough = np.diff(encoded.offsets[documents], axis=1)[:, 0] > 1
        if not long_enough.all():
            skipped["too_short"] = int((~long_enough).sum())
            documents = documents[long_enough]
    return encoded._replace(documents=documents), skipped


def spans(
    objective: str, encoded: Encoded, seq_len: int, most: int, short_seq_prob: float, separator: int, generator: Random
) -> Spans:
    """Makes one pairing of documents from `usable`, for rows with at most `most` sequences.

    Args:
        separator: The id between documents in full_sentences.
    """
    ids, segments = encoded.ids, segment_count(objective)
    if segments == 2:
        sequences, own, piece = _pairs(objective, encoded, seq_len, short_seq_prob, generator)
    else:
        sequences, own, piece = _passages(objective, encoded, seq_len)
        if objective == "full_sentences":
            ids = np.insert(ids, encoded.offsets[encoded.documents[:, 0]], separator)
    late = np.zeros(len(sequences), bool)
    if most > 1:
        sequences, late = fill_gaps(sequences, segments, seq_len, most, own, piece, generator.random)
    return Spans(ids, sequences, segments, late)


def _pairs(
    objective: str, encoded: Encoded, seq_len: int, short_seq_prob: float, generator: Random
) -> tuple[Int64[np.ndarray, "Q 5"], Own, Piece]:
    offsets, documents = cut_long_sentences(encoded, seq_len - 3)
    pair = next_sentence_pairs if objective == "nsp" else sentence_order_pairs
    draw = generator.random

    def own(whole: Pair) -> list[tuple[int, int]]:
        if objective == "nsp" and whole.label == RANDOM_SEGMENT:
            return [whole[:2]]
        first, second = sorted([whole[:2], whole[2:4]])
        return [(first[0], second[1])] if first[1] == second[0] else [first, second]

    def piece(begin: int, tokens: int, end: int) -> tuple[Pair, int]:
        # Splits at a random sentence border in the piece, or at a random position if there is none.
        first, last = bisect_right(offsets, begin), bisect_left(offsets, begin + tokens)
        split = (
            offsets[first + int(draw() * (last - first))] if first < last else begin + 1 + int(draw() * (tokens - 1))
        )
        if objective == "sop":
            return _ordered(begin, split, begin + tokens, draw), tokens
        consecutive = Pair(begin, split, split, begin + tokens, 0), tokens
        if draw() < 0.5:
            return consecutive
        document = bisect_right(documents, begin, key=lambda sentences: offsets[sentences[1]])
        b_begin, b_end = _random_segment(offsets, documents, document, begin + tokens - split, draw)
        b_end = min(b_end, b_begin + begin + tokens - split)
        # A is longer if the other document ends early. If it left one token before `end`, too few for another pair, the
        # piece is consecutive after all.
        a_end = begin + tokens - (b_end - b_begin)
        return (Pair(begin, a_end, b_begin, b_end, 1), a_end - begin) if a_end != end - 1 else consecutive

    return _table(pair(offsets, documents, seq_len, short_seq_prob, generator), 5), own, piece


def _passages(objective: str, encoded: Encoded, seq_len: int) -> tuple[Int64[np.ndarray, "Q 5"], Own, Piece]:
    documents = encoded.documents
    begins, separator_positions = _with_separators(objective, encoded)
    ends, separators = begins + np.diff(encoded.offsets), separator_positions.tolist()
    if objective == "single":
        passages = blocks(begins[documents[:, 0]], ends[documents[:, 1] - 1], seq_len - 2)
    else:
        ranges = [(0, len(begins))] if separators else [(first, last) for first, last in documents.tolist()]
        passages = _table(sentence_passages(begins.tolist(), ends.tolist(), ranges, seq_len - 2), 2)
    last = passages[:, 1:]

    def own(whole: Pair) -> list[tuple[int, int]]:
        # Separators are left out: a piece neither begins nor ends with one, and has text of one document.
        begin, end = whole[:2]
        inner = separators[bisect_left(separators, begin) : bisect_left(separators, end)]
        return list(zip([begin, *(place + 1 for place in inner)], [*inner, end], strict=True))

    def piece(begin: int, tokens: int, end: int) -> tuple[Pair, int]:
        return Pair(begin, begin + tokens, begin + tokens, begin + tokens, -1), tokens

    return np.concatenate([passages, last, last, np.full_like(last, -1)], axis=1), own, piece


def left_out(made: Spans, separator: int) -> int:
    """Counts the ids of the text, which has no separators, in no sequence."""
    # How many sequences hold an id is the number of spans that begin before or at it, less those that end there.
    spans = made.sequences[:, :4]
    holding = np.bincount(spans[:, ::2].ravel(), minlength=len(made.ids) + 1)
    holding -= np.bincount(spans[:, 1::2].ravel(), minlength=len(made.ids) + 1)
    return int(np.count_nonzero((np.cumsum(holding)[: len(made.ids)] == 0) & (made.ids != separator)))


def borders(objective: str, encoded: Encoded) -> Borders:
    """Finds sentence borders in the ids that `spans` returns for the same documents."""
    begins, separators = _with_separators(objective, encoded)
    positions = np.concatenate([begins, separators])
    order = np.argsort(positions)
    return Borders(positions[order], order >= len(begins))


def _with_separators(objective: str, encoded: Encoded) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "k"]]:
    """Returns positions of first ids and of separators, which full_sentences puts before every document."""
    begins = encoded.offsets[:-1]
    if objective != "full_sentences":
        return begins, np.zeros(0, np.int64)
    # Every separator moves all later sentences by one.
    firsts = encoded.documents[:, 0]
    shift = np.zeros(len(begins), np.int64)
    shift[firsts] = 1
    begins = begins + np.cumsum(shift)
    return begins, begins[firsts] - 1


def _table(rows: Sequence[tuple[int, ...]], width: int) -> Int64[np.ndarray, "Q K"]:
    # np.array gives the same, and takes seven times as long.
    return np.fromiter(itertools.chain.from_iterable(rows), np.int64, width * len(rows)).reshape(-1, width)
