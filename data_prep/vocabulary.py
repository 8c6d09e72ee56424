"""Trains a tokenizer on text: the same text and options give the same bytes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bert_jax.config.options import Valid, option, yes_or_no
from bert_jax.errors import UserError
from bert_jax.progress import Reporter, print_note
from bert_jax.storage.files import atomic_folder
from bert_jax.tokenization.byte_bpe import ByteBPESpec
from bert_jax.tokenization.sentencepiece_model import SentencePieceSpec
from bert_jax.tokenization.specification import TURKIC, TokenizerSpec
from bert_jax.tokenization.tokenizer import Tokenizer
from bert_jax.tokenization.vocabulary import LEARNED_KINDS
from bert_jax.tokenization.wordpiece import MAX_WORD_LENGTH, WordPieceSpec
from data_prep import counting, learners, processes
from data_prep.readers.corpus import Corpus, Reading, Source, find_sources, patterns, text_bytes

_MUCH_UNKNOWN = 0.01  # of the characters
_MANY_TURKIC = 0.02  # of the words; a fifth or more in Turkish and Azeri


@dataclass(frozen=True)
class TokenizerOptions(Reading):
    """Options of `train` and of the command, which also describes them.

    Raises:
        UserError: A value is out of range. The message names the flag.
    """

    input: str | Path = option(help="text, as build_examples reads it: globs, separated by commas", metavar="GLOB")
    output: str | Path = option(help="the folder to create", metavar="DIR")
    vocab_size: int = option(
        help="number of tokens, including special ones (BERT: 30522)",
        metavar="N",
        valid=Valid(lambda size: size > 0, "a positive number, such as 8192 or 30522"),
    )
    kind: str = option("wordpiece", "the kind of vocabulary", metavar="NAME", choices=tuple(LEARNED_KINDS))
    lowercase: bool | str | None = option(
        None,
        "lower-case before anything else; tr or az: as in Turkish and Azeri (I becomes ı, not for SentencePiece); "
        "default --nolowercase",
        metavar="LANGUAGE",
        valid=Valid(lambda language: language in (True, False, *TURKIC), "no value, or tr or az"),
    )
    strip_accents: bool | None = option(
        None,
        "yes: remove marks from letters, as BERT's uncased models do, which suits English (é becomes e; in Hindi, Thai "
        "or Vietnamese it removes vowels and tones); no, the default: keep them",
        metavar="yes|no",
        parser=yes_or_no,
    )
    alpha: float | None = option(
        None,
        "for several languages: exponent of their shares, 0 to 1; default: the shares of the text",
        metavar="A",
        valid=Valid(lambda alpha: 0 <= alpha <= 1, "a number from 0 (all languages equal) to 1 (their shares)"),
    )
    character_coverage: float = option(
        counting.CHARACTER_COVERAGE,
        "share of the text whose characters get a token (bpe: all do)",
        metavar="SHARE",
        valid=Valid(lambda share: 0 < share <= 1, "a share above 0 and at most 1, such as 0.9995"),
    )
    max_words: int = option(
        counting.MAX_CHUNKS,
        "distinct words counted at once",
        metavar="N",
        valid=Valid(lambda count: count >= 1000, "1000 or more"),
    )

    max_gb: float = option(
        10.0,
        "text to count, in GB; of more text, a share of the documents, by their hash",
        metavar="GB",
        valid=Valid(lambda size: size > 0, "a number above 0, such as 10"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind in ("unigram", "sentencepiece_bpe"):
            problem = "--strip_accents yes" if self.strip_accents else f"--lowercase {self.lowercase}"
            if self.strip_accents or self.turkic:
                raise UserError(
                    f"{problem} is not for --kind {self.kind}. Use --kind bpe or wordpiece, or leave it out"
                )

    @property
    def turkic(self) -> bool:
        """Whether text is lower-cased as in Turkish and Azeri."""
        return self.lowercase in TURKIC


def train(options: TokenizerOptions, *, quiet: bool = True) -> Tokenizer:
    """Trains a tokenizer as the command does, writes its folder, and returns it.

    Prints the languages' shares (with `alpha`), and warnings about the text. If several workers read a wiki dump, call
    this under `if __name__ == "__main__"` in a script, as multiprocessing requires.

    Raises:
        UserError: The corpus is empty or unreadable, vocab_size is too small for the characters, or the output exists.
    """
    reading = replace(options, workers=options.workers or processes.cores())
    groups = {"all": str(options.input)}
    if options.alpha is not None:
        # Each pattern of --input is a language. With a single pattern, each of its files is one.
        languages = patterns(str(options.input))
        if len(languages) < 2:
            languages = [source.path for source in find_sources(str(options.input))]
        groups = {name: name for name in languages}
    sources = _sampled({name: find_sources(pattern) for name, pattern in groups.items()}, options.max_gb)
    corpora = {name: Corpus(chosen, reading) for name, chosen in sources.items()}
    with atomic_folder(Path(options.output)) as folder:
        words = _count(corpora, options, quiet)
        with Reporter("learning pieces", 1.0, ("tokens",), quiet) as reporter:
            content = _learn(words, options, reporter)
        trained = Tokenizer(content)
        trained.save(folder)
    if trained.vocab_size < options.vocab_size:
        print_note(
            f"warning: the text gives {trained.vocab_size} tokens, fewer than --vocab_size {options.vocab_size}: "
            "nothing else occurs twice. Use more text, or this size"
        )
    return trained


def _sampled(sources: dict[str, tuple[Source, ...]], max_gb: float) -> dict[str, tuple[Source, ...]]:
    """Weights the sources so that about `max_gb` of their text is read, and prints the share if it is not all."""
    size = sum(text_bytes(chosen) for chosen in sources.values())
    share = max_gb * 1e9 / max(size, 1)
    if share >= 1:
        return sources
    print_note(
        f"counting {share:.2%} of the documents, chosen by their hash: about {max_gb:g} of {size / 1e9:,.1f} GB "
        "(--max_gb)"
    )
    return {name: tuple(source._replace(weight=share) for source in chosen) for name, chosen in sources.items()}


def _count(corpora: dict[str, Corpus], options: TokenizerOptions, quiet: bool) -> dict[str, int]:
    """Counts words. Prints the languages' shares, and warnings about refused input and too long words."""
    splitter: counting.WordSplitter = learners.SentencePieceSplitter(bool(options.lowercase))
    if options.kind in ("wordpiece", "bpe"):
        steps = bool(options.lowercase), bool(options.strip_accents), options.turkic
        splitter = learners.WordPieceSplitter(*steps)
        if options.kind == "bpe":
            splitter = learners.ByteSplitter(learners.byte_normalizers(*steps))
    limit = options.max_words // 2 if options.kind == "unigram" else options.max_words
    total = sum(corpus.total_bytes for corpus in corpora.values())
    with Reporter("counting words", total, ("MB",), quiet) as reporter:

        def documents(corpus: Corpus) -> Iterator[str]:
            for document in corpus.documents():
                yield document
                read = sum(source.bytes_read for source in corpora.values())
                reporter.update(read, read / 1e6)

        if options.alpha is None:
            counter = counting.ChunkCounter(splitter, limit)
            for corpus in corpora.values():
                counter.add(documents(corpus))
            chunks = counter.counts
            split = counter.split, counter.changed
            too_long = {"the text": counter.unknown / max(counter.characters, 1)}
        else:
            texts = ((name, documents(corpus)) for name, corpus in corpora.items())
            chunks, shares = counting.count_chunks(texts, splitter, options.alpha, limit)
            split = 0, 0  # not known, because languages have other weights
            for share in shares:
                print(f"{share.language}: {share.text:.2%} of the text, counted as {share.counted:.2%}")
            too_long = {share.language: share.unknown for share in shares}
        if options.lowercase or options.strip_accents:
            _print_changes(counting.count_changes(chunks, splitter, *split), options)
        words = counting.count_words(chunks, splitter)
    for name, corpus in corpora.items():
        for reason, count in corpus.refused.items():
            if reason == "not_sampled":
                continue
            print_note(f"warning: {name}: {count} documents or rests of files skipped: {reason}")
    for name, unknown in too_long.items():
        if unknown > _MUCH_UNKNOWN:
            print_note(
                f"warning: {unknown:.0%} of {name} is in words of more than {MAX_WORD_LENGTH} characters, each of "
                "which WordPiece makes one [UNK], as in Thai and Khmer, which put no space between words. Use --kind "
                "unigram"
            )
    if not words:
        first = next(source.path for corpus in corpora.values() for source in corpus.sources)
        raise UserError(f"no words in the files of --input ({first} ...). Use files with text")
    return words


def _print_changes(changes: counting.Changes, options: TokenizerOptions) -> None:
    """Prints what share of the words lower-casing and stripping accents change, and a warning about Turkish."""
    flags = ["--lowercase"] if options.lowercase else []
    flags += ["--strip_accents yes"] if options.strip_accents else []
    stated = f"{' and '.join(flags)}: {changes.share:.1%} of the words change"
    before, after = changes.example
    print_note(f"{stated}, such as {before} to {after}" if before else stated)
    if options.lowercase is True and changes.turkic > _MANY_TURKIC:
        print_note(
            f"warning: {changes.turkic:.0%} of the words have ı or İ, as in Turkish and Azeri, where the small letter "
            "of I is ı. Use --lowercase tr or az (--kind bpe or wordpiece), or keep capitals"
        )


def _learn(words: dict[str, int], options: TokenizerOptions, reporter: Reporter) -> TokenizerSpec:
    vocab_size, lowercase, coverage = options.vocab_size, bool(options.lowercase), options.character_coverage
    steps = lowercase, bool(options.strip_accents), options.turkic
    first: list[int] = []

    def report(size: int) -> None:
        # The k-th most frequent pair occurs about 1/k times as often as the first, so the time grows like a logarithm.
        if not first:
            first.append(size)
        reporter.update(math.log1p(size - first[0]) / math.log1p(max(vocab_size - first[0], 1)), size)

    if options.kind == "wordpiece":
        tokens = learners.learn_wordpiece(words, vocab_size, character_coverage=coverage, on_token=report)
        return WordPieceSpec(tuple(tokens), *steps[:2], turkic=options.turkic)
    if options.kind == "bpe":
        tokens, merges = learners.learn_byte_bpe(words, vocab_size, on_token=report)
        return ByteBPESpec(tuple(tokens), tuple(merges), normalizers=learners.byte_normalizers(*steps))
    model = learners.learn_sentence_pieces(
        words,
        vocab_size,
        kind=options.kind,
        lowercase=lowercase,
        character_coverage=coverage,
        on_share=lambda share: reporter.update(share, share * vocab_size),
    )
    return SentencePieceSpec(model)
