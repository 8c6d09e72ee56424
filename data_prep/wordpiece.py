"""Learns a WordPiece vocabulary from word counts: byte-pair merges in a fixed order, so the result is reproducible.

It learns what the `tokenizers` library's WordPieceTrainer learns: byte-pair encoding (Sennrich et al. 2016) over
characters, in which a character inside a word has the prefix "##". The most frequent pair of adjacent pieces becomes a
piece, repeatedly, until the vocabulary is full. It is not the original WordPiece of Schuster and Nakajima (2012), which
chooses the pair that most increases the likelihood of a language model; Google never published that trainer, and
vocabularies made by merges work as well (bert_jax encodes both by the same longest-match rule).

The library's own trainer is not used because it counts into hash maps of random order, and that order decides between
pairs of equal count: the same text then gives other ids and sometimes other pieces. Here
  - pieces start as characters: the most frequent ones, ties by code point, until they cover a share of the text, and
    at least ALPHABET_MINIMUM; a word with any other character is left out, because it would be encoded as [UNK];
  - among pairs of equal count, the first by (left id, right id) is merged;
  - the order of ids is: special tokens, characters, characters inside a word, each by code point, then merges in order.
Every CJK ideograph is a word (the tokenizer's normalizer makes it one), so Chinese text needs as many tokens as it has
different characters. The covered share limits their number, as in the multilingual vocabularies of BERT.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from bert_jax.command import UserError
from bert_jax.tokenization.wordpiece import MAX_WORD_LENGTH, SPECIAL_TOKENS, WordPieceSpec
from bert_jax.tokenization.wordpiece_engine import library_tokenizer, split_chunks
from data_prep import counting
from data_prep.merges import Merges

INSIDE = "##"
# Both as in the `tokenizers` library's BertWordPieceTokenizer.train.
ALPHABET_MINIMUM = 1000
MIN_FREQUENCY = 2
# White space for str.split; the library drops these characters before it splits.
_SEPARATORS = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
# Most characters that end a word: ASCII punctuation, 。 and 、, and ideographs.
_BORDERS = re.compile("[!-/:-@\\[-`{-~\u3001\u3002\u3400-\u4dbf\u4e00-\u9fff]")


class WordPieceSplitter:
    """The tokenizer's words: normalized, and split at punctuation and ideographs, by the library."""

    def __init__(self, lowercase: bool) -> None:
        self._library = library_tokenizer(WordPieceSpec(SPECIAL_TOKENS, lowercase=lowercase, strip_accents=lowercase))
        self._normalize = self._library.normalizer.normalize_str
        self._split = self._library.pre_tokenizer.pre_tokenize_str

    def chunks(self, text: str) -> list[str]:
        # str.split is five times as fast, and equal unless the text has one of these characters.
        return split_chunks(text) if _SEPARATORS.search(text) else text.split()

    def words(self, chunk: str) -> Iterator[str]:
        """The words, with "##" before all windows of a long one but the first (any other "#" is a word of its own)."""
        for word, _ in self._split(self._normalize(chunk)):
            first, *others = counting.windows(word)
            yield first
            yield from (INSIDE + window for window in others)

    def unknown(self, chunk: str) -> int:
        if len(chunk) <= MAX_WORD_LENGTH or max(map(len, _BORDERS.split(chunk))) <= MAX_WORD_LENGTH:
            return 0  # without the library, which takes longer
        lengths = (len(word) for word, _ in self._split(self._normalize(chunk)))
        return sum(length for length in lengths if length > MAX_WORD_LENGTH)


def learn(
    word_counts: Mapping[str, int],
    vocab_size: int,
    *,
    min_frequency: int = MIN_FREQUENCY,
    alphabet_minimum: int = ALPHABET_MINIMUM,
    character_coverage: float = counting.CHARACTER_COVERAGE,
    on_token: Callable[[int], None] = lambda size: None,
) -> list[str]:
    """The tokens of a WordPiece vocabulary, by id: special tokens, characters, merges.

    The keys of `word_counts` are words, or insides of words ("##" and two or more characters). The result has fewer
    tokens than `vocab_size` if no pair is left that occurs `min_frequency` times. `on_token` gets the size of the
    vocabulary as it grows. The result depends only on the counts and options, and not on the order of `word_counts`.
    Raises UserError if the special tokens and characters alone do not fit.
    """
    alphabet = _alphabet(word_counts, alphabet_minimum, character_coverage)
    allowed = set(alphabet)
    words = {word: _split(word) for word in sorted(word_counts) if word}
    words = {word: parts for word, parts in words.items() if allowed.issuperset("".join(parts))}
    inside = sorted(set().union(*(rest for _, rest in words.values())))
    tokens = [*SPECIAL_TOKENS, *alphabet, *(INSIDE + character for character in inside)]
    if len(tokens) > vocab_size:
        raise UserError(
            f"--vocab_size {vocab_size} is too small: the special tokens and the {len(alphabet)} characters of the text"
            f" already take {len(tokens)}. Use more, for example --vocab_size {max(8192, 4 * len(tokens))}"
        )
    ids = {token: index for index, token in enumerate(tokens)}
    beginning = {character: ids[character] for character in alphabet}
    within = {character: ids[INSIDE + character] for character in inside}
    merges = Merges(
        [[*map(beginning.__getitem__, first), *map(within.__getitem__, rest)] for first, rest in words.values()],
        [word_counts[word] for word in words],
        min_frequency,
    )
    del words
    while len(tokens) < vocab_size and (pair := merges.most_frequent()):
        token = tokens[pair[0]] + tokens[pair[1]].removeprefix(INSIDE)
        # Two different pairs may give the same piece ("a" "##bc", "ab" "##c"), which is one token.
        if token not in ids:
            ids[token] = len(tokens)
            tokens.append(token)
            on_token(len(tokens))
        merges.merge(pair, ids[token])
    return tokens


def _split(word: str) -> tuple[str, str]:
    """The first character of a word ("" for the inside of a word) and the others."""
    if len(word) > len(INSIDE) and word.startswith(INSIDE):
        return "", word[len(INSIDE) :]
    return word[0], word[1:]


def _alphabet(word_counts: Mapping[str, int], minimum: int, coverage: float) -> list[str]:
    """The most frequent characters, in code point order."""
    counts: Counter[str] = Counter()
    for word, count in word_counts.items():
        for character in "".join(_split(word)) if word else "":
            counts[character] += count
    wanted = coverage * counts.total()
    chosen: list[str] = []
    covered = 0
    for character in sorted(counts, key=lambda character: (-counts[character], character)):
        if len(chosen) >= minimum and covered >= wanted:
            break
        chosen.append(character)
        covered += counts[character]
    return sorted(chosen)
