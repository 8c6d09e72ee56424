"""Learning a WordPiece vocabulary from word counts: byte-pair merges with a fixed order, so the result never varies.

What is learned is what the `tokenizers` library's WordPieceTrainer learns: byte-pair encoding (Sennrich et al. 2016)
over characters, in which a character inside a word carries the prefix "##". The most frequent pair of neighbouring
pieces becomes a piece, again and again, until the vocabulary is full. It is not the original WordPiece of Schuster
and Nakajima (2012), who choose the pair that raises the likelihood of a language model most; Google never published
that trainer, and vocabularies made by merges serve as well (bert_jax encodes both by the same longest-match rule).

Why not the library's trainer: it counts into hash maps of random order, and pairs of equal count fall as that order
has them, so that the same text gives other ids and sometimes other pieces. Here
  - pieces start as characters: the most frequent, ties by code point, until they cover a share of the text, and
    ALPHABET_MINIMUM at least; a word with another character in it is left out, for it would be encoded as [UNK];
  - among pairs of equal count the first by (left id, right id) is merged;
  - ids: special tokens, characters, characters inside a word, each by code point, then merges as they came.
Every CJK ideograph is a word (the tokenizer's normaliser makes it one), so a text in Chinese needs as many tokens as
it has characters: this is what the share is for, and the multilingual vocabularies of BERT hold them so.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from bert_jax.command import UserError
from bert_jax.tokenization.wordpiece import SPECIAL_TOKENS, WordPieceSpec
from bert_jax.tokenization.wordpiece_engine import split_chunks
from data_prep import counting
from data_prep.merges import Merges

INSIDE = "##"
# Both as in the `tokenizers` library's BertWordPieceTokenizer.train.
ALPHABET_MINIMUM = 1000
MIN_FREQUENCY = 2
# White space to str.split, and dropped before it is looked for by the library.
_SEPARATORS = re.compile("[\x0b\x0c\x1c-\x1f\x85]")


class WordPieceSplitter:
    """Words as the tokenizer has them: normalised, and parted at punctuation and ideographs, by the library."""

    def __init__(self, lowercase: bool) -> None:
        self._library = WordPieceSpec(SPECIAL_TOKENS, lowercase=lowercase, strip_accents=lowercase).build()
        self._normalize = self._library.normalizer.normalize_str
        self._split = self._library.pre_tokenizer.pre_tokenize_str

    def chunks(self, text: str) -> list[str]:
        # Where there is none of the characters that the two treat differently, str.split is five times as fast.
        return split_chunks(text) if _SEPARATORS.search(text) else text.split()

    def words(self, chunk: str) -> Iterator[str]:
        """The words, "##" before each window but the first of a long one ("#" else is always a word of its own)."""
        for word, _ in self._split(self._normalize(chunk)):
            first, *others = counting.windows(word)
            yield first
            yield from (INSIDE + window for window in others)


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

    `word_counts` are by word, or by the inside of one ("##" and two characters or more). Fewer tokens than
    `vocab_size` when no pair is left that occurs `min_frequency` times. `on_token` is told the size of the vocabulary
    as it grows. Depends on nothing but the counts and options, not even the order of `word_counts`.
    Raises UserError when the special tokens and characters alone do not fit.
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
            f" already take {len(tokens)}. Give more, such as --vocab_size {max(8192, 4 * len(tokens))}"
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
        # A piece may come about in two ways ("a" "##bc", "ab" "##c"); it is one token still.
        if token not in ids:
            ids[token] = len(tokens)
            tokens.append(token)
            on_token(len(tokens))
        merges.merge(pair, ids[token])
    return tokens


def _split(word: str) -> tuple[str, str]:
    """The first character of a word, "" if it is the inside of one, and the others."""
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
