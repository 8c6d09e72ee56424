"""Learning a WordPiece vocabulary from word counts: byte-pair merges with a fixed order, so the result never varies.

What is learned is what the `tokenizers` library's WordPieceTrainer learns: byte-pair encoding (Sennrich et al. 2016)
over characters, in which a character inside a word carries the prefix "##". The most frequent pair of neighbouring
pieces becomes a piece, again and again, until the vocabulary is full. It is not the original WordPiece of Schuster
and Nakajima (2012), who choose the pair that raises the likelihood of a language model most; Google never published
that trainer, and vocabularies made by merges serve as well (bert_jax encodes both by the same longest-match rule).

Why not the library's trainer: it counts into hash maps of random order, and pairs of equal count fall as that order
has them, so that the same text gives other ids and sometimes other pieces. Here
  - pieces start as characters: the ALPHABET_LIMIT most frequent, ties by code point; a word with another
    character in it, or of more than MAX_WORD_LENGTH characters, is left out, for it would be encoded as [UNK];
  - among pairs of equal count the first by (left piece, right piece) in code point order is merged;
  - ids: special tokens, characters, characters inside a word, each by code point, then merges as they came.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from bert_jax.command import UserError
from bert_jax.tokenizer import split_chunks
from bert_jax.tokenizer_files import MAX_WORD_LENGTH, SPECIAL_TOKENS, Vocabulary

INSIDE = "##"
# Both as in the `tokenizers` library's BertWordPieceTokenizer.train.
ALPHABET_LIMIT = 1000
MIN_FREQUENCY = 2
# Distinct chunks counted at once: about 200 MB. English passes it after some gigabytes of text.
MAX_CHUNKS = 2_000_000

Pair = tuple[int, int]


def count_chunks(documents: Iterable[str], max_chunks: int = MAX_CHUNKS) -> dict[str, int]:
    """How often each chunk between white spaces occurs, in bounded memory.

    When there are more than `max_chunks` of them, the rarest so far are forgotten until half remain, as in lossy
    counting (Manku and Motwani 2002, section 4.2); so a count may then be too low, by little for any frequent chunk.
    """
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(split_chunks(document))
        threshold = 0
        while len(counts) > max_chunks or (threshold and len(counts) > max_chunks // 2):
            threshold += 1
            counts = Counter({chunk: count for chunk, count in counts.items() if count > threshold})
    return dict(counts)


def count_words(chunks: Mapping[str, int], lowercase: bool) -> dict[str, int]:
    """How often each word occurs, chunks being normalised and parted at punctuation by the library, as in encoding."""
    library = Vocabulary(SPECIAL_TOKENS, lowercase=lowercase, strip_accents=lowercase).build()
    normalize, split = library.normalizer.normalize_str, library.pre_tokenizer.pre_tokenize_str
    counts: Counter[str] = Counter()
    for chunk, count in chunks.items():
        for word, _ in split(normalize(chunk)):
            counts[word] += count
    return dict(counts)


def learn(
    word_counts: Mapping[str, int],
    vocab_size: int,
    *,
    min_frequency: int = MIN_FREQUENCY,
    alphabet_limit: int = ALPHABET_LIMIT,
    on_token: Callable[[int], None] = lambda size: None,
) -> list[str]:
    """The tokens of a WordPiece vocabulary, by id: special tokens, characters, merges.

    Fewer than `vocab_size` when no pair is left that occurs `min_frequency` times. `on_token` is told the size of the
    vocabulary as it grows. Depends on nothing but the counts and options, the order of `word_counts` included.
    Raises UserError when the special tokens and characters alone do not fit.
    """
    alphabet = _alphabet(word_counts, alphabet_limit)
    allowed = set(alphabet)
    words = {
        word: count
        for word, count in sorted(word_counts.items())
        if 0 < len(word) <= MAX_WORD_LENGTH and allowed.issuperset(word)
    }
    inside = sorted(set().union(*(word[1:] for word in words)))
    tokens = [*SPECIAL_TOKENS, *alphabet, *(INSIDE + character for character in inside)]
    if len(tokens) > vocab_size:
        raise UserError(
            f"--vocab_size {vocab_size} is too small: the special tokens and the {len(alphabet)} characters of the text"
            f" already take {len(tokens)}. Give more, such as --vocab_size {max(8192, 4 * len(tokens))}"
        )
    ids = {token: index for index, token in enumerate(tokens)}
    merges = Merges(
        [[ids[word[0]], *(ids[INSIDE + character] for character in word[1:])] for word in words],
        list(words.values()),
        tokens,
    )
    while len(tokens) < vocab_size and (pair := merges.most_frequent(min_frequency)):
        token = tokens[pair[0]] + tokens[pair[1]].removeprefix(INSIDE)
        # A piece may come about in two ways ("a" "##bc", "ab" "##c"); it is one token still.
        if token not in ids:
            ids[token] = len(tokens)
            tokens.append(token)
            on_token(len(tokens))
        merges.merge(pair, ids[token])
    return tokens


class Merges:
    """Words as sequences of pieces, and the counts of neighbouring pairs, kept up to date while pairs are merged."""

    def __init__(self, words: list[list[int]], counts: list[int], tokens: list[str]) -> None:
        """`words` holds ids into `tokens`, a list that may grow; `counts` says how often each word occurs."""
        self._words = words
        self._word_counts = counts
        self._tokens = tokens
        self._counts: Counter[Pair] = Counter()
        self._places: dict[Pair, list[int]] = {}  # words that hold or held the pair
        for index, word in enumerate(words):
            for pair in itertools.pairwise(word):
                self._counts[pair] += counts[index]
                self._places.setdefault(pair, []).append(index)
        # The most frequent first, and among equals the first by its pieces. An entry may be out of date.
        self._heap: list[tuple[int, str, str, Pair]] = [self._entry(pair) for pair in self._counts]
        heapq.heapify(self._heap)

    def most_frequent(self, min_frequency: int) -> Pair | None:
        """The pair that occurs most often, the first by its pieces among equals; None if none is frequent enough."""
        while self._heap:
            negative_count, _, _, pair = heapq.heappop(self._heap)
            count = self._counts[pair]
            if count == -negative_count and count >= max(min_frequency, 1):
                return pair
            # Out of date: a pair that grew has a newer entry already, one that shrank gets one.
            if min_frequency <= count < -negative_count:
                heapq.heappush(self._heap, self._entry(pair))
        return None

    def merge(self, pair: Pair, merged: int) -> None:
        """Makes one piece of the pair, from left to right, wherever it occurs."""
        changes: Counter[Pair] = Counter()
        for index in self._places.pop(pair):
            word, count = self._words[index], self._word_counts[index]
            shorter = _replace(word, pair, merged)
            if len(shorter) == len(word):
                continue  # met already, or another merge took one of the two
            for old in itertools.pairwise(word):
                changes[old] -= count
            for new in itertools.pairwise(shorter):
                changes[new] += count
                if merged in new:
                    self._places.setdefault(new, []).append(index)
            self._words[index] = shorter
        for changed, difference in changes.items():
            self._counts[changed] += difference
            if self._counts[changed] <= 0:
                del self._counts[changed]
            elif difference > 0:
                heapq.heappush(self._heap, self._entry(changed))

    def _entry(self, pair: Pair) -> tuple[int, str, str, Pair]:
        return -self._counts[pair], self._tokens[pair[0]], self._tokens[pair[1]], pair


def _replace(word: list[int], pair: Pair, merged: int) -> list[int]:
    shorter: list[int] = []
    position = 0
    while position < len(word):
        if word[position] == pair[0] and position + 1 < len(word) and word[position + 1] == pair[1]:
            shorter.append(merged)
            position += 2
        else:
            shorter.append(word[position])
            position += 1
    return shorter


def _alphabet(word_counts: Mapping[str, int], limit: int) -> list[str]:
    """The most frequent characters, in code point order."""
    counts: Counter[str] = Counter()
    for word, count in word_counts.items():
        for character in word:
            counts[character] += count
    return sorted(sorted(counts, key=lambda character: (-counts[character], character))[:limit])
