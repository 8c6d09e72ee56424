"""Trains a tokenizer on text: the same text and options give the same bytes."""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_jax import command
from bert_jax.command import UserError
from bert_jax.progress import Reporter
from bert_jax.storage.local import atomic_folder
from bert_jax.tokenization.byte_bpe import ByteBPESpec
from bert_jax.tokenization.sentencepiece_model import SentencePieceSpec
from bert_jax.tokenization.tokenizer_spec import TokenizerSpec
from bert_jax.tokenization.wordpiece import WordPieceSpec
from bert_jax.tokenizer import KINDS, Tokenizer
from data_prep import byte_bpe, counting, readers, sampling, sentence_pieces, wordpiece
from data_prep.readers.corpus import patterns

DEFAULT_READING = readers.Reading()

DESCRIPTION = """\
Trains a vocabulary on text and writes a tokenizer folder, which data_prep.build_examples and Hugging Face
transformers both read.

    python -m data_prep.train_tokenizer --input 'data_prep/sample/books/*.txt.xz' --output tokenizer --vocab_size 8192

--kind   wordpiece          BERT: merges characters to pieces, inner ones marked ##; every CJK ideograph is a word
         bpe                RoBERTa: merges bytes to pieces, so no text is unknown
         unigram            XLM-R: SentencePiece, the pieces that make the text most likely
         sentencepiece_bpe  SentencePiece, merges characters to pieces

The same text and options give the same bytes (with the same version of the sentencepiece library, for its kinds).
Words are counted first, in one pass and in bounded memory; then pieces are learned from the counts.

Several languages: with --alpha, each pattern of --input (or each file, if there is one pattern) is a language, and
the words of language i count as if its share of the text were p_i^alpha / sum_j p_j^alpha: 0.5 in XLM, 0.3 in XLM-R.

    ... --input 'text/en/*.txt.xz,text/sw/*.txt.xz' --kind unigram --alpha 0.3 --vocab_size 250000

Memory: at most --max_words distinct words, with adjacent punctuation, are counted at once (unigram: half as many), in
about 150 bytes each; learning takes up to 1000 bytes for each word without punctuation (unigram: 2200 with it). Beyond
that limit rare words are sampled by hash, so that frequencies stay right on average. Text without spaces (Chinese,
Japanese, Thai) is counted by ideographs and parts of phrases."""


def train(
    paths: Sequence[str | Path],
    output: str | Path,
    *,
    vocab_size: int,
    lowercase: bool = False,
    kind: str = "wordpiece",
    alpha: float | None = None,
    character_coverage: float = counting.CHARACTER_COVERAGE,
    max_words: int = counting.MAX_CHUNKS,
    reading: readers.Reading = DEFAULT_READING,
    quiet: bool = True,
) -> Tokenizer:
    """Trains a tokenizer on files or patterns, writes its folder, and returns it.

    With `alpha`, each of `paths` is a language (`data_prep.sampling`); their shares are printed. `output` must not
    exist; it appears complete or not at all. If the text gives fewer pieces than requested, the smaller vocabulary is
    written and a warning is printed. Raises UserError for an unknown kind, an empty corpus, a vocab_size below the
    number of characters, options out of range, an output that exists, and whatever `readers` raises.
    """
    if kind not in KINDS:
        raise UserError(f"unknown --kind {kind}; choose from {', '.join(KINDS)}")
    if vocab_size < 1:
        raise UserError(f"--vocab_size {vocab_size} must be positive. Use a number such as 8192 or 30522")
    if alpha is not None and not 0 <= alpha <= 1:
        raise UserError(
            f"--alpha {alpha:g} must be from 0 (all languages equal) to 1 (the shares of the text). Try 0.3"
        )
    if not 0 < character_coverage <= 1:
        raise UserError(f"--character_coverage {character_coverage:g} must be above 0 and at most 1. Try 0.9995")
    if max_words < 1000:
        raise UserError(f"--max_words {max_words} is too small. Use 1000 or more")
    groups = {str(path): readers.find_sources(str(path)) for path in paths}
    if alpha is None:
        groups = {"all": tuple(sorted({source for group in groups.values() for source in group}))}
    corpora = {name: readers.Corpus(sources, reading) for name, sources in groups.items()}
    with atomic_folder(Path(output)) as folder:
        limit = max_words // 2 if kind == "unigram" else max_words
        words = _count(corpora, _splitter(kind, lowercase), alpha, limit, quiet)
        with Reporter("learning pieces", 1.0, ("tokens",), quiet) as reporter:
            content = _learn(kind, words, vocab_size, lowercase, character_coverage, reporter)
        trained = Tokenizer(content)
        trained.save(folder)
    if trained.vocab_size < vocab_size:
        print(
            f"warning: the text gives {trained.vocab_size} tokens, fewer than --vocab_size {vocab_size}: nothing "
            "else occurs twice. Use more text, or this size",
            file=sys.stderr,
        )
    return trained


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.Parser("data_prep.train_tokenizer", DESCRIPTION)
    add = parser.add_argument
    add(
        "--input",
        required=True,
        metavar="GLOB",
        help="text, JSONL or Parquet files, plain or compressed: globs, quoted and separated by commas; required",
    )
    add("--output", required=True, metavar="DIR", help="folder to create; must not exist; required")
    add("--kind", default="wordpiece", choices=list(KINDS), help="default wordpiece")
    add(
        "--vocab_size",
        type=int,
        required=True,
        metavar="N",
        help="number of tokens, including special ones (BERT: 30522); required",
    )
    parser.add_switch(
        "lowercase",
        help="lower-case before anything else, and strip accents (SentencePiece: lower-case only); "
        "default --nolowercase: keep both",
    )
    add(
        "--alpha",
        type=float,
        metavar="A",
        help="for several languages: exponent of their shares, 0 to 1; default: the shares of the text",
    )
    add(
        "--character_coverage",
        type=float,
        default=counting.CHARACTER_COVERAGE,
        metavar="SHARE",
        help=f"share of the text whose characters get a token (bpe: all do); default {counting.CHARACTER_COVERAGE}",
    )
    add(
        "--max_words",
        type=int,
        default=counting.MAX_CHUNKS,
        metavar="N",
        help=f"distinct words counted at once; default {counting.MAX_CHUNKS}",
    )
    add(
        "--text_field",
        default="text",
        metavar="NAME",
        help="field of JSONL, Parquet and TFDS records that holds the text; default text",
    )
    add(
        "--document",
        default="blank_line",
        choices=readers.DOCUMENT,
        help="what separates the documents of text; default blank_line",
    )
    add("--on_error", default="fail", choices=readers.ON_ERROR, help="for input that cannot be used; default fail")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    flags = _parse(arguments)
    trained = train(
        [flags.input] if flags.alpha is None else _languages(flags.input),
        flags.output,
        vocab_size=flags.vocab_size,
        lowercase=bool(flags.lowercase),
        kind=flags.kind,
        alpha=flags.alpha,
        character_coverage=flags.character_coverage,
        max_words=flags.max_words,
        reading=readers.Reading(flags.text_field, flags.document, flags.on_error),
        quiet=False,
    )
    case = "lower-cased" if trained.lowercase else "cased"
    print(f"{flags.output}: {KINDS[trained.kind]}, {trained.vocab_size} tokens, {case}")


def _languages(pattern: str) -> list[str]:
    """The languages: the patterns of --input, or its files if there is one pattern."""
    parts = patterns(pattern)
    return parts if len(parts) > 1 else [source.path for source in readers.find_sources(pattern)]


def _splitter(kind: str, lowercase: bool) -> counting.WordSplitter:
    if kind == "wordpiece":
        return wordpiece.WordPieceSplitter(lowercase)
    return byte_bpe.ByteSplitter(lowercase) if kind == "bpe" else sentence_pieces.SentencePieceSplitter()


def _learn(
    kind: str, words: dict[str, int], vocab_size: int, lowercase: bool, character_coverage: float, reporter: Reporter
) -> TokenizerSpec:
    """Learns a vocabulary of the given kind."""
    first: list[int] = []

    def report(size: int) -> None:
        # The k-th most frequent pair occurs about 1/k times as often as the first, so the time grows like a logarithm.
        if not first:
            first.append(size)
        reporter.update(math.log1p(size - first[0]) / math.log1p(max(vocab_size - first[0], 1)), size)

    if kind == "wordpiece":
        tokens = wordpiece.learn(words, vocab_size, character_coverage=character_coverage, on_token=report)
        return WordPieceSpec(tuple(tokens), lowercase=lowercase, strip_accents=lowercase)
    if kind == "bpe":
        tokens, merges = byte_bpe.learn(words, vocab_size, on_token=report)
        return ByteBPESpec(tuple(tokens), tuple(merges), normalizers=byte_bpe.LOWERCASE if lowercase else ())
    return SentencePieceSpec(
        sentence_pieces.learn(
            words,
            vocab_size,
            kind=kind,
            lowercase=lowercase,
            character_coverage=character_coverage,
            on_share=lambda share: reporter.update(share, share * vocab_size),
        )
    )


def _count(
    corpora: dict[str, readers.Corpus],
    splitter: counting.WordSplitter,
    alpha: float | None,
    max_words: int,
    quiet: bool,
) -> dict[str, int]:
    """Counts words. Prints the shares of the languages, and a warning on stderr for refused input."""
    total = sum(corpus.total_bytes for corpus in corpora.values())
    with Reporter("counting words", total, ("MB",), quiet) as reporter:

        def documents(corpus: readers.Corpus) -> Iterator[str]:
            for document in corpus.documents():
                yield document
                read = sum(each.bytes_read for each in corpora.values())
                reporter.update(read, read / 1e6)

        if alpha is None:
            counter = counting.ChunkCounter(splitter, max_words)
            for corpus in corpora.values():
                counter.add(documents(corpus))
            chunks = counter.counts
        else:
            texts = ((name, documents(corpus)) for name, corpus in corpora.items())
            chunks, shares = sampling.count_chunks(texts, splitter, alpha, max_words)
            for share in shares:
                print(f"{share.language}: {share.text:.2%} of the text, counted as {share.counted:.2%}")
        words = counting.count_words(chunks, splitter)
    for name, corpus in corpora.items():
        for reason, count in corpus.refused.items():
            print(f"warning: {name}: {count} documents or rests of files skipped: {reason}", file=sys.stderr)
    if not words:
        first = next(source.path for corpus in corpora.values() for source in corpus.sources)
        raise UserError(f"no words in the files of --input ({first} ...). Use files with text")
    return words


if __name__ == "__main__":
    command.run(main)
