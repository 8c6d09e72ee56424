"""Learns vocabularies from word counts: WordPiece and byte-level BPE by merges, SentencePiece by its library.

Each kind has a splitter, whose words data_prep/counting.py counts, and a function that learns from the counts.
"""

import heapq
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import pre_tokenizers

from bert_jax.errors import UserError
from bert_jax.storage.files import naming_temporary
from bert_jax.tokenization import wordpiece
from bert_jax.tokenization.byte_bpe import PRE_TOKENS, TURKIC, library_normalizer
from bert_jax.tokenization.wordpiece import MAX_WORD_LENGTH, WordPieceSpec, library_tokenizer, split_chunks
from data_prep import counting

MIN_FREQUENCY = 2  # of a merged pair, as in the `tokenizers` library's BertWordPieceTokenizer and ByteLevelBPETokenizer


def _check_size(vocab_size: int, contents: str, taken: int) -> None:
    if taken > vocab_size:
        raise UserError(
            f"--vocab_size {vocab_size} is too small: the special tokens and {contents} already take {taken}. "
            f"Use more, for example --vocab_size {max(8192, 4 * taken)}"
        )


# Byte-pair merges (Sennrich et al. 2016) over word counts: the most frequent pair of adjacent pieces becomes a piece,
# repeatedly. Among equally frequent pairs, the one with the lowest ids (left, then right) comes first, as in the
# `tokenizers` library's BpeTrainer.

Pair = tuple[int, int]


class Merges:
    """Counts adjacent pairs of pieces in words, and keeps the counts up to date while pairs are merged.

    Args:
        words: Lists of piece ids, which `merge` modifies.
        counts: How often each word occurs.
        min_frequency: The lowest count of a pair that is merged.
    """

    def __init__(self, words: list[list[int]], counts: list[int], min_frequency: int) -> None:
        self._words = words
        self._word_counts = counts
        self._min_frequency = max(min_frequency, 1)
        self._counts: Counter[Pair] = Counter()
        # Indices of words that contain, or once contained, the pair.
        self._places: defaultdict[Pair, array[int]] = defaultdict(lambda: array("i"))
        for index, word in enumerate(words):
            for pair in itertools.pairwise(word):
                self._counts[pair] += counts[index]
                self._places[pair].append(index)
        # Negative counts, so that the most frequent pair comes first, then lowest ids. Entries may be out of date.
        self._heap = [(-count, pair) for pair, count in self._counts.items() if count >= self._min_frequency]
        heapq.heapify(self._heap)

    def most_frequent(self) -> Pair | None:
        """Returns the most frequent pair, or None if no pair is frequent enough."""
        while self._heap:
            negative_count, pair = heapq.heappop(self._heap)
            count = self._counts[pair]
            if count == -negative_count:
                return pair
            # Out of date. A pair that became more frequent has a newer entry already; others get theirs here.
            if self._min_frequency <= count < -negative_count:
                heapq.heappush(self._heap, (-count, pair))
        return None

    def merge(self, pair: Pair, merged: int) -> None:
        """Replaces the pair by the piece `merged`, from left to right, wherever it occurs."""
        changes: defaultdict[Pair, int] = defaultdict(int)
        words, counts, places = self._words, self._word_counts, self._places
        left, right = pair
        joined = [merged]
        for index in places.pop(pair):
            word = words[index]
            at = 0
            # A word may be listed twice, or have lost the pair to another merge.
            while left in word[at:-1]:
                at = word.index(left, at) + 1
                if word[at] != right:
                    continue
                word[at - 1 : at + 1] = joined
                # The pair's neighbours become neighbours of the new piece.
                if at > 1:
                    before = word[at - 2]
                    changes[before, left] -= counts[index]
                    changes[before, merged] += counts[index]
                    places[before, merged].append(index)
                if at < len(word):
                    after = word[at]
                    changes[right, after] -= counts[index]
                    changes[merged, after] += counts[index]
                    places[merged, after].append(index)
        for changed, difference in changes.items():
            self._counts[changed] += difference
            if self._counts[changed] <= 0:
                del self._counts[changed]
                places.pop(changed, None)
            elif difference > 0 and self._counts[changed] >= self._min_frequency:
                heapq.heappush(self._heap, (-self._counts[changed], changed))
        self._counts.pop(pair, None)


def _add_merges(
    tokens: list[str],
    words: list[list[int]],
    counts: list[int],
    size: int,
    min_frequency: int,
    on_token: Callable[[int], None],
    prefix: str = "",
) -> list[tuple[str, str]]:
    """Adds merged pieces to `tokens` until there are `size`, and returns the merged pairs in order.

    Words are lists of token ids. `prefix` marks pieces inside words.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    pairs = Merges(words, counts, min_frequency)
    merges = []
    while len(tokens) < size and (pair := pairs.most_frequent()):
        left, right = tokens[pair[0]], tokens[pair[1]]
        token = left + right.removeprefix(prefix)
        # Two pairs may give the same piece ("a" "bc", "ab" "c"): one token with two merges.
        if token not in ids:
            ids[token] = len(tokens)
            tokens.append(token)
            on_token(len(tokens))
        merges.append((left, right))
        pairs.merge(pair, ids[token])
    return merges


# WordPiece as the `tokenizers` library's WordPieceTrainer learns it: byte-pair encoding over characters, in which "##"
# marks a character inside a word. The original WordPiece of Schuster and Nakajima (2012) chooses the pair that most
# increases a language model's likelihood. Google never published that trainer, and vocabularies made by merges work as
# well (bert_jax encodes both by the same longest-match rule).
#
# The library's own trainer counts into hash maps with a random order, which decides between equally frequent pairs: the
# same text then gives other ids and sometimes other pieces. Here
#   - pieces start as characters: the most frequent ones, ties by code point, until they cover a share of the text, and
#     at least ALPHABET_MINIMUM; a word with any other character is left out, because it would be encoded as [UNK];
#   - ids have this order: special tokens, characters, characters inside a word, both by code point, then merges.
# Every CJK ideograph is a word (the tokenizer's normalizer makes it one), so Chinese text needs as many tokens as it
# has different characters. The covered share limits their number, as in BERT's multilingual vocabularies.

INSIDE = "##"
ALPHABET_MINIMUM = 1000  # as in the `tokenizers` library's BertWordPieceTokenizer.train
# White space for str.split; the library drops these characters before it splits.
_SEPARATORS = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
# Most characters that end a word: ASCII punctuation, 。 and 、, and ideographs.
_BORDERS = re.compile("[!-/:-@\\[-`{-~\u3001\u3002\u3400-\u4dbf\u4e00-\u9fff]")


class WordPieceSplitter(counting.WordSplitter):
    """Splits as the tokenizer does: the library normalizes text, and splits it at punctuation and ideographs."""

    def __init__(self, lowercase: bool, strip_accents: bool = False, turkic: bool = False) -> None:
        self._library = library_tokenizer(
            WordPieceSpec(wordpiece.SPECIAL_TOKENS, lowercase, strip_accents, turkic=turkic)
        )
        self._plain = library_tokenizer(WordPieceSpec(wordpiece.SPECIAL_TOKENS, False, False)).normalizer.normalize_str
        self._normalize = self._library.normalizer.normalize_str
        self._changes = lowercase or strip_accents
        self._split = self._library.pre_tokenizer.pre_tokenize_str

    def chunks(self, text: str) -> list[str]:
        # str.split is five times as fast, and equal unless the text has one of these characters.
        return split_chunks(text) if _SEPARATORS.search(text) else text.split()

    def words(self, chunk: str) -> Iterator[str]:
        """Yields words, and a long one in windows, with "##" before all but the first."""
        # "##" cannot be mistaken for text, in which every "#" is a word of its own.
        for word, _ in self._split(self._normalize(chunk)):
            first, *others = counting.windows(word)
            yield first
            yield from (INSIDE + window for window in others)

    def changed(self, chunk: str) -> str:
        normal = self._normalize(chunk) if self._changes else ""
        return normal if normal and normal != self._plain(chunk) else ""

    def unknown(self, chunk: str) -> int:
        # Most chunks are short, or short between borders, and need no slow call to the library.
        if len(chunk) <= MAX_WORD_LENGTH or max(map(len, _BORDERS.split(chunk))) <= MAX_WORD_LENGTH:
            return 0
        lengths = (len(word) for word, _ in self._split(self._normalize(chunk)))
        return sum(length for length in lengths if length > MAX_WORD_LENGTH)


def learn_wordpiece(
    word_counts: Mapping[str, int],
    vocab_size: int,
    *,
    min_frequency: int = MIN_FREQUENCY,
    alphabet_minimum: int = ALPHABET_MINIMUM,
    character_coverage: float = counting.CHARACTER_COVERAGE,
    on_token: Callable[[int], None] = lambda size: None,
) -> list[str]:
    """Learns a WordPiece vocabulary.

    Args:
        word_counts: Counts of words, and of word-internal parts ("##" and two or more characters), in any order.
        on_token: Gets the vocabulary's size as it grows.

    Returns:
        The tokens by id: special tokens, characters, then merges. They are fewer than `vocab_size` if no pair is left
        that occurs `min_frequency` times.

    Raises:
        UserError: The special tokens and characters alone do not fit.
    """
    counts: Counter[str] = Counter()
    for word, count in word_counts.items():
        for character in "".join(_split(word)) if word else "":
            counts[character] += count
    # The most frequent characters, until those before one cover enough of the text; then in code point order.
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    covered = itertools.accumulate((counts[character] for character in ranked), initial=0)
    needed = character_coverage * counts.total()
    alphabet = sorted(
        character
        for rank, (character, before) in enumerate(zip(ranked, covered, strict=False))
        if rank < alphabet_minimum or before < needed
    )
    allowed = set(alphabet)
    words = [word for word in sorted(word_counts) if word and allowed.issuperset("".join(_split(word)))]
    inside = sorted({character for word in words for character in _split(word)[1]})
    tokens = [*wordpiece.SPECIAL_TOKENS, *alphabet, *(INSIDE + character for character in inside)]
    _check_size(vocab_size, f"the {len(alphabet)} characters of the text", len(tokens))
    # A character has two ids: one at the beginning of a word, and one inside.
    beginning = {character: index for index, character in enumerate(alphabet, len(wordpiece.SPECIAL_TOKENS))}
    within = {character: index for index, character in enumerate(inside, len(tokens) - len(inside))}
    spelled = [[*(beginning[c] for c in first), *(within[c] for c in rest)] for first, rest in map(_split, words)]
    _add_merges(tokens, spelled, [word_counts[word] for word in words], vocab_size, min_frequency, on_token, INSIDE)
    return tokens


def _split(word: str) -> tuple[str, str]:
    """A word's first character ("" for a word-internal part) and the others."""
    if len(word) > len(INSIDE) and word.startswith(INSIDE):
        return "", word[len(INSIDE) :]
    return word[0], word[1:]


# Byte-level BPE like GPT-2's (Radford et al. 2019) and RoBERTa's (Liu et al.). GPT-2's rule splits the text (the
# `tokenizers` library's ByteLevel pre-tokenizer); a word includes the space before it. Its UTF-8 bytes are written as
# printable characters ("Ġ" is the space). All 256 bytes are in the vocabulary, so it encodes every text. Ids have this
# order: <s> <pad> </s> <unk> as in RoBERTa, the bytes by code point, merges in order, and <mask> last.

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_WHOLE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # does not split


class ByteSplitter(counting.WordSplitter):
    """Splits by GPT-2's rule into words written byte by byte; other white space between words is a word, too."""

    def __init__(self, normalizers: Sequence[str] = ()) -> None:
        self._normalize = library_normalizer(normalizers).normalize_str
        self._split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str

    def chunks(self, text: str) -> list[str]:
        return PRE_TOKENS.findall(text)

    def words(self, chunk: str) -> Iterator[str]:
        chunk = self._normalize(chunk)
        for written, (start, end) in self._split(chunk):
            if end - start <= counting.LONGEST_WORD:
                yield written
            else:
                yield from map(written_bytes, counting.windows(chunk[start:end]))

    def changed(self, chunk: str) -> str:
        normal = self._normalize(chunk)
        return normal if normal != chunk else ""


def byte_normalizers(lowercase: bool, strip_accents: bool, turkic: bool) -> tuple[str, ...]:
    """The steps of a ByteBPESpec. StripAccents removes all marks, BERT's normalizer those without a width (Mn)."""
    steps = {TURKIC: turkic, "NFD": strip_accents, "Lowercase": lowercase, "StripAccents": strip_accents}
    return tuple(name for name, used in steps.items() if used)


def written_bytes(text: str) -> str:
    """Writes a text's bytes as printable characters."""
    return "".join(written for written, _ in _WHOLE.pre_tokenize_str(text))


def learn_byte_bpe(
    word_counts: Mapping[str, int], vocab_size: int, on_token: Callable[[int], None] = lambda size: None
) -> tuple[list[str], list[tuple[str, str]]]:
    """Learns a byte-level BPE vocabulary.

    Args:
        word_counts: Counts of words written in bytes, in any order.
        on_token: Gets the vocabulary's size as it grows.

    Returns:
        The tokens by id, and the merges in order. The tokens are fewer than `vocab_size` if no pair is left that occurs
        MIN_FREQUENCY times.

    Raises:
        UserError: The special tokens and bytes do not fit.
    """
    tokens = [*SPECIAL_TOKENS, *BYTES]
    _check_size(vocab_size, "the 256 bytes", len(tokens) + 1)  # and <mask>
    ids = {byte: index for index, byte in enumerate(BYTES, len(SPECIAL_TOKENS))}
    words = sorted(word_counts)
    counts = [word_counts[word] for word in words]
    spelled = [[ids[byte] for byte in word] for word in words]
    merges = _add_merges(tokens, spelled, counts, vocab_size - 1, MIN_FREQUENCY, on_token)
    return [*tokens, MASK], merges


# SentencePiece vocabularies (Kudo and Richardson 2018), which the sentencepiece library learns from word counts.
#
# Kinds: unigram (Kudo 2018; XLM-R and ALBERT use it) and sentencepiece_bpe. The library's trainer is a function of its
# input and options if its number of threads is fixed, its input is sorted, and its own random sampling is not used.
# It reads words with counts (its TSV format), so its memory and time depend only on the number of distinct words.
#
# The model numbers its pieces like the library (<unk> <s> </s>, then its own); the tokenizer numbers them like XLM-R:
# <s> <pad> </s> <unk>, the model's own, and <mask> last.

BEGINNING = "\u2581"  # marks the beginning of a word
MODEL_TYPES = {"unigram": "unigram", "sentencepiece_bpe": "bpe"}
ADDED_TOKENS = 2  # <pad> and <mask>, which are not pieces of the model
_THREADS = 8  # fixed, because sums of floats depend on the number of threads
_TRAIN = "import json, sys, sentencepiece; sentencepiece.SentencePieceTrainer.train(**json.load(sys.stdin))"
# Characters that TSV cannot hold and that the library's clean-up drops.
_CONTROL = dict.fromkeys([*range(0x20), 0x7F])


class SentencePieceSplitter(counting.WordSplitter):
    """Splits at white space only, and puts SentencePiece's mark before words.

    Punctuation stays, because Unigram takes every string that two chunks share as a candidate.
    """

    def __init__(self, lowercase: bool = False) -> None:
        self._lowercase = lowercase

    def chunks(self, text: str) -> list[str]:
        return text.split()

    def words(self, chunk: str) -> Iterator[str]:
        first, *others = counting.windows(chunk)
        yield BEGINNING + first
        yield from others

    def changed(self, chunk: str) -> str:
        folded = chunk.casefold() if self._lowercase else chunk
        return folded if folded != chunk else ""


def learn_sentence_pieces(
    word_counts: Mapping[str, int],
    vocab_size: int,
    *,
    kind: str,
    lowercase: bool = False,
    character_coverage: float = counting.CHARACTER_COVERAGE,
    on_share: Callable[[float], None] = lambda share: None,
) -> bytes:
    """Learns a SentencePiece vocabulary.

    Args:
        word_counts: Counts of SentencePieceSplitter's words, in any order.
        kind: A key of MODEL_TYPES.
        on_share: Gets the approximate progress, 0 to 1.

    Returns:
        The model as the library's protocol buffer. Its pieces are fewer than `vocab_size` if the text gives no more.

    Raises:
        UserError: The characters alone do not fit, or the library fails.
    """
    _check_size(vocab_size, "one character", 3 + ADDED_TOKENS + 1)
    with tempfile.TemporaryDirectory() as folder, naming_temporary():
        table, prefix = Path(folder) / "words.tsv", Path(folder) / "trained"
        with table.open("w", encoding="utf-8", newline="\n") as file:
            for word in sorted(word_counts):
                if cleaned := word.translate(_CONTROL):
                    file.write(f"{cleaned}\t{word_counts[word]}\n")
        options = {
            "input": str(table),
            "input_format": "tsv",
            "model_prefix": str(prefix),
            "model_type": MODEL_TYPES[kind],
            "vocab_size": vocab_size - ADDED_TOKENS,
            "hard_vocab_limit": False,
            "character_coverage": character_coverage,
            "normalization_rule_name": "nmt_nfkc_cf" if lowercase else "nmt_nfkc",
            "add_dummy_prefix": False,  # the splitter has written it, and
            "remove_extra_whitespaces": False,  # this would remove it again
            "num_threads": _THREADS,
        }
        _run(options, vocab_size, on_share)
        messages: Any = sentencepiece_model_pb2  # its classes are created at import
        model = messages.ModelProto.FromString(prefix.with_suffix(".model").read_bytes())
    # Names of temporary files differ between runs. In use, text comes without marks, so the model adds them again.
    model.trainer_spec.ClearField("input")
    model.trainer_spec.ClearField("model_prefix")
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = True
    return bytes(model.SerializeToString(deterministic=True))


def _run(options: dict[str, object], vocab_size: int, on_share: Callable[[float], None]) -> None:
    """Runs the library's trainer in a separate process, because on errors it may end its process.

    Its log shows the progress and, in the last line, the error.
    """
    most_pieces, last = vocab_size, "no message"
    with subprocess.Popen([sys.executable, "-c", _TRAIN], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        try:
            process.stdin.write(json.dumps(options).encode())
            process.stdin.close()
            for line in process.stderr:
                last = line.decode("utf-8", "replace").strip() or last
                if merged := re.search(r"Merged: .*merges=(\d+)", last):
                    on_share(min(1.0, int(merged[1]) / vocab_size))
                elif pruned := re.search(r"EM sub_iter=\d+ size=(\d+)", last):
                    # Every round keeps the same share of the pieces and takes about as long: progress is logarithmic.
                    pieces = max(int(pruned[1]), vocab_size)
                    most_pieces = max(most_pieces, pieces)
                    if pieces < most_pieces:
                        on_share(1 - math.log(pieces / vocab_size) / math.log(most_pieces / vocab_size))
        except BaseException:
            process.kill()
            raise
    if not process.returncode:
        return
    if sizes := re.search(r"smaller than required_chars. (\d+) vs (\d+)", last):
        _check_size(vocab_size, "the characters of the text", int(sizes[2]) + ADDED_TOKENS)
    raise UserError(f"the sentencepiece library failed: {last}. Use more text, or another --vocab_size")
