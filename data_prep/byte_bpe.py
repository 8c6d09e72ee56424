"""Learns a byte-level BPE vocabulary from word counts, like GPT-2's (Radford et al. 2019) and RoBERTa's (Liu et al.).

GPT-2's rule splits the text (the `tokenizers` library's ByteLevel pre-tokenizer), in which a word includes the space
before it. Each byte of its UTF-8 is written as a printable character ("\u0120" is the space), and the most frequent
pairs of pieces are merged (data_prep/merges.py), which gives the merges of the library's BpeTrainer. Every text can
be encoded, because all 256 bytes are in the vocabulary.

The order of ids is: <s> <pad> </s> <unk> as in RoBERTa, the bytes by code point, merges in order, and <mask> last.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from tokenizers import normalizers, pre_tokenizers

from bert_jax.command import UserError
from data_prep import counting
from data_prep.merges import Merges

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"
# Steps of the `tokenizers` library that normalize text like BERT's uncased models.
LOWERCASE = ("NFD", "Lowercase", "StripAccents")
# As the `tokenizers` library's ByteLevelBPETokenizer.train.
MIN_FREQUENCY = 2
# All of Unicode's White_Space separates words (str.isspace would add U+001C to U+001F). A space joins the next word.
_CHUNK = re.compile(" ?[^\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_WHOLE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # does not split


class ByteSplitter:
    """Words by GPT-2's rule, written byte by byte. White space between words is not counted by itself."""

    def __init__(self, lowercase: bool = False) -> None:
        steps = [getattr(normalizers, name)() for name in LOWERCASE] if lowercase else []
        self._normalize = normalizers.Sequence(steps).normalize_str
        self._split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str

    def chunks(self, text: str) -> list[str]:
        return _CHUNK.findall(text)

    def words(self, chunk: str) -> Iterator[str]:
        chunk = self._normalize(chunk)
        for written, (start, end) in self._split(chunk):
            if end - start <= counting.LONGEST_WORD:
                yield written
            else:
                yield from map(written_bytes, counting.windows(chunk[start:end]))

    def unknown(self, chunk: str) -> int:
        return 0


def written_bytes(text: str) -> str:
    """The bytes of a text, each as a printable character."""
    return "".join(written for written, _ in _WHOLE.pre_tokenize_str(text))


def learn(
    word_counts: Mapping[str, int],
    vocab_size: int,
    *,
    min_frequency: int = MIN_FREQUENCY,
    on_token: Callable[[int], None] = lambda size: None,
) -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens by id, and the merges in order, from the counts of written words.

    The result has fewer tokens than `vocab_size` if no pair is left that occurs `min_frequency` times. `on_token` gets
    the size of the vocabulary as it grows. The result depends only on the counts and options, and not on the order of
    `word_counts`. Raises UserError if the special tokens and bytes do not fit.
    """
    tokens = [*SPECIAL_TOKENS, *BYTES]
    if vocab_size <= len(tokens):
        raise UserError(
            f"--vocab_size {vocab_size} is too small: the special tokens and the 256 bytes already take "
            f"{len(tokens) + 1}. Use more, for example --vocab_size 8192"
        )
    ids = {token: index for index, token in enumerate(tokens)}
    words = sorted(word_counts)
    pairs = Merges(
        [[ids[byte] for byte in word] for word in words], [word_counts[word] for word in words], min_frequency
    )
    merges: list[tuple[str, str]] = []
    while len(tokens) < vocab_size - 1 and (pair := pairs.most_frequent()):
        left, right = tokens[pair[0]], tokens[pair[1]]
        # Two different pairs may give the same piece ("a" "bc", "ab" "c"), which is one token with two merges.
        if left + right not in ids:
            ids[left + right] = len(tokens)
            tokens.append(left + right)
            on_token(len(tokens))
        merges.append((left, right))
        pairs.merge(pair, ids[left + right])
    return [*tokens, MASK], merges
