"""Sequences for tests of masking, and its laws again in plain Python, one sequence and one word at a time."""

import itertools
from typing import NamedTuple

import numpy as np
from data_format_reader import GOLDEN, WORD, combine, mix, order_hash
from hypothesis import strategies as st

from bert_jax.data.example import Rows
from bert_jax.data.masking.masker import Masked, Masker
from bert_jax.data.masking.rule import UNITS, MaskingRule
from bert_jax.tokenization.vocabulary import Vocabulary

KEEPING = tuple(unit for unit in UNITS if unit != "infill")  # the units that keep every position of a row

PAD, UNK, CLS, SEP, MASK = range(5)
VOCABULARY, FIRST_WHOLE, FIRST_INSIDE = 40, 5, 25
UNSPACED, ATTACHED = (22, 23, 24, 25, 26, 27, 28), (37, 38, 39)  # with the rule "scripts" for words


class Facts(Vocabulary):
    """A vocabulary of forty: 0-4 special, 5-24 start a word, 25-39 continue one.

    With the rule "scripts", 22-28 are words of their own, and 37-39 continue any word.
    """

    kind = "wordpiece"
    vocab_size, pad_id, mask_id, special_ids = VOCABULARY, PAD, MASK, (PAD, UNK, CLS, SEP, MASK)
    continuation = np.arange(VOCABULARY) >= FIRST_INSIDE
    unspaced = np.isin(np.arange(VOCABULARY), UNSPACED)
    attached = np.isin(np.arange(VOCABULARY), ATTACHED)

    def __init__(self) -> None:
        pass


class Sequence(NamedTuple):
    ids: list[int]
    first_length: int
    key: int


def sequences(most: int) -> st.SearchStrategy[Sequence]:
    """Any sequence of 1 to `most` tokens, mostly ordinary ones."""
    tokens = st.one_of(st.integers(FIRST_WHOLE, VOCABULARY - 1), st.integers(0, VOCABULARY - 1))
    return st.builds(
        lambda ids, share, key: Sequence(ids, max(1, round(share * len(ids))), key),
        st.lists(tokens, min_size=1, max_size=most),
        st.floats(0, 1),
        st.integers(0, WORD - 1),
    )


def pack_rows(packed: list[list[Sequence]], width: int, pack: int) -> Rows:
    count = len(packed)
    ids = np.full((count, width), PAD, np.uint16)
    lengths, firsts = np.zeros((2, count, pack), np.uint16)
    keys = np.zeros((count, pack), np.uint64)
    for row, sequences in enumerate(packed):
        joined = [token for sequence in sequences for token in sequence.ids]
        ids[row, : len(joined)] = joined
        for s, sequence in enumerate(sequences):
            lengths[row, s], firsts[row, s], keys[row, s] = len(sequence.ids), sequence.first_length, sequence.key
    return Rows(ids, lengths, firsts, np.full((count, pack), -1, np.int8), keys)


def apply(rows: Rows, unit: str = "word", rate: float = 0.15, seed: int = 1, epoch: int = 0, **rule) -> Masked:
    masker = Masker(Facts(), MaskingRule(unit, rate, **rule), seed)
    return masker.apply(rows, np.full(len(rows.input_ids), epoch, np.int64), rows.input_ids.shape[1])


def random_rows(count: int, width: int, seed: int = 0, inside_share: float = 0.3) -> Rows:
    """Full rows of one pair each: [CLS] A [SEP] B [SEP]."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(FIRST_WHOLE, FIRST_INSIDE, (count, width)).astype(np.uint16)
    inside = generator.random(ids.shape) < inside_share
    ids[inside] = generator.integers(FIRST_INSIDE, VOCABULARY, inside.sum())
    first = generator.integers(3, width - 2, count)
    ids[:, 0], ids[:, -1], ids[np.arange(count), first - 1] = CLS, SEP, SEP
    lengths = np.full((count, 1), width, np.uint16)
    keys = np.arange(count, dtype=np.uint64)[:, None]
    return Rows(ids, lengths, first[:, None].astype(np.uint16), np.zeros((count, 1), np.int8), keys)


# The reference: the same law in plain Python, one sequence at a time.


def words_of(sequence: Sequence, unit: str, rule: str = "spaces") -> list[list[int]]:
    words: list[list[int]] = []
    base = -1  # the last token that is not attached to the one before it
    for position, token in enumerate(sequence.ids):
        before, base = base, base if rule == "scripts" and token in ATTACHED else token
        if token < FIRST_WHOLE:
            continue
        after_special = sequence.ids[position - 1] < FIRST_WHOLE if position else True
        goes_on = unit != "token" and token >= FIRST_INSIDE
        if rule == "scripts" and token not in ATTACHED and (token in UNSPACED or before in UNSPACED):
            goes_on = False
        if goes_on and not after_special and position != sequence.first_length:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def choose(sequence: Sequence, rule: MaskingRule, seed: int, epoch: int) -> list[int]:
    """The positions to be predicted, ascending."""
    words = words_of(sequence, rule.unit, rule.words)
    state = combine(1, seed, epoch, sequence.key)
    order = sorted(range(len(words)), key=lambda word: (order_hash(state, words[word][0]), word))
    budget = max(1, round(rule.rate * len(sequence.ids)))
    chosen: list[int] = []
    for word in order:
        if rule.unit in ("token", "word"):
            run = words[word] if len(chosen) + len(words[word]) <= budget else []
        elif words[word][0] in chosen:
            continue
        else:
            together = neighbours(sequence, words, word)
            drawn = run_length(sequence, rule, seed, epoch, words[word][0], len(together))
            run = []
            for other in together[:drawn]:
                meets = rule.unit == "span" and other[0] in chosen
                if meets or len(chosen) + len(run) + len(other) > budget:
                    break
                run += other
            if any(position in chosen for position in run):
                continue
        chosen += run
    if not chosen and words:
        chosen = words[order[0]][:budget]
    return sorted(chosen)


def neighbours(sequence: Sequence, words: list[list[int]], first: int) -> list[list[int]]:
    """The words from one on that nothing parts."""
    together = [words[first]]
    for word in words[first + 1 :]:
        if word[0] != together[-1][-1] + 1 or word[0] == sequence.first_length:
            break
        together.append(word)
    return together


def run_length(sequence: Sequence, rule: MaskingRule, seed: int, epoch: int, position: int, room: int) -> int:
    value = mix((combine(4, seed, epoch, sequence.key) + position * GOLDEN) % WORD) >> 32
    if rule.unit == "ngram":
        weights = [1 / size for size in range(1, min(room, 3) + 1)]
    else:
        weights = [0.2 * 0.8 ** (size - 1) for size in range(1, 11)]
    size = 1
    while size < len(weights) and value >= round(sum(weights[:size]) / sum(weights) * 2**32):
        size += 1
    return size


def reorder(sequence: Sequence, rule: MaskingRule, seed: int, epoch: int, chosen: list[int]) -> dict[int, int]:
    """What stands at each position that is moved: trigrams of one segment without special or chosen tokens."""
    order_state, state = (combine(stream, seed, epoch, sequence.key) for stream in (5, 6))
    places = sorted(range(len(sequence.ids) - 2), key=lambda place: (order_hash(order_state, place), place))
    moved: dict[int, int] = {}
    for place in places:
        trigram = range(place, place + 3)
        if len(moved) == 3 * round(rule.reorder_rate * len(sequence.ids) / 3):
            break
        parted = any(position == sequence.first_length for position in trigram[1:])
        taken = any(p in chosen or p in moved or sequence.ids[p] < FIRST_WHOLE for p in trigram)
        if not parted and not taken:
            pick = (mix((state + place * GOLDEN) % WORD) >> 32) * 6 >> 32
            order = list(itertools.permutations(trigram))[pick]
            moved |= {position: sequence.ids[source] for position, source in zip(trigram, order, strict=True)}
    return moved


def reference(sequence: Sequence, rule: MaskingRule, seed: int, epoch: int) -> dict[int, int]:
    """What stands at each predicted position after masking."""
    ordinary = range(FIRST_WHOLE, VOCABULARY)
    state = combine(2, seed, epoch, sequence.key)
    replaced: dict[int, int] = {}
    for position in choose(sequence, rule, seed, epoch):
        word = mix((state + position * GOLDEN) % WORD)
        if rule.unit != "span" or position - 1 not in replaced:
            case = word >> 32
        random_id = ordinary[(word % 2**32) * len(ordinary) >> 32]
        original = sequence.ids[position]
        shares = rule.split.mask, rule.split.mask + rule.split.random
        below = [round(share * 2**32) for share in shares]
        replaced[position] = MASK if case < below[0] else random_id if case < below[1] else original
    replaced |= reorder(sequence, rule, seed, epoch, list(replaced)) if rule.reorder_rate else {}
    return dict(sorted(replaced.items()))
