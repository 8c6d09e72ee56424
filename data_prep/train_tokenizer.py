"""Trains a tokenizer on text: the same text and options give the same bytes."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bert_jax import command, tokenizer_files
from bert_jax.command import UserError
from bert_jax.files import new_folder
from bert_jax.tokenizer import Tokenizer
from data_prep import counting, readers, sampling, wordpiece
from data_prep.progress import Reporter

DESCRIPTION = """\
Trains a vocabulary on text and writes a tokenizer folder, which data_prep.build_examples and Hugging Face
transformers both read.

    python -m data_prep.train_tokenizer --input 'data_prep/sample/books/*.txt.xz' --output tokenizer --vocab_size 8192

The same text and options give the same bytes. Words are counted first, in one pass and in bounded memory; then the
most frequent pairs of pieces are merged, as the Hugging Face WordPiece trainer does, with ties broken by rule
(data_prep/wordpiece.py says how).

Several languages: with --alpha, each pattern of --input (or each file, if there is one pattern) is a language, and
the words of language i count as if its share of the text were p_i^alpha / sum_j p_j^alpha: 0.5 in XLM, 0.3 in XLM-R.

    ... --input 'text/en/*.txt.xz,text/sw/*.txt.xz' --alpha 0.3 --vocab_size 120000

Memory: at most --max_words distinct words are counted at once, marks around them included; each takes about 150
bytes, and again as much while pieces are merged. Beyond them the rare ones are sampled by hash, so that frequencies
stay right on average. Text without spaces (Chinese, Japanese, Thai) counts by ideographs and pieces of phrases."""


@dataclass
class Corpus:
    """The text to train on: files, each group of them a language; notes how far it has been read."""

    groups: dict[str, list[Path]]
    bytes_read: int = 0
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        paths = [path for group in self.groups.values() for path in group]
        self.total_bytes = sum(path.stat().st_size for path in paths if path.is_file())

    def documents(self, language: str) -> Iterator[str]:
        for path in self.groups[language]:
            yield from readers.documents(path, on_read=self._read)

    def _read(self, size: int) -> None:
        self.bytes_read += size


def train(
    paths: Sequence[str | Path],
    output: str | Path,
    *,
    vocab_size: int,
    lowercase: bool = False,
    kind: str = "wordpiece",
    alpha: float | None = None,
    character_coverage: float = wordpiece.CHARACTER_COVERAGE,
    max_words: int = counting.MAX_CHUNKS,
    quiet: bool = True,
) -> Tokenizer:
    """Trains a tokenizer on files or patterns and writes its folder; returns it.

    With `alpha` each of `paths` is a language (`data_prep.languages`); their shares are printed. `output` must not
    exist; it appears whole or not at all. A vocabulary smaller than asked for, when the text has no more repeated
    pieces, is written and said on stderr. Raises UserError for an unknown kind, an empty corpus, a vocab_size under
    the number of characters, options out of range, an output that exists, and what `readers` raises.
    """
    if kind != "wordpiece":
        raise UserError(f"--kind {kind} does not exist yet. Only --kind wordpiece does now")
    if vocab_size < 1:
        raise UserError(f"--vocab_size {vocab_size} is no size. Give a number such as 8192 or 30522")
    if alpha is not None and not 0 <= alpha <= 1:
        raise UserError(f"--alpha {alpha:g} is not within 0 (all languages alike) and 1 (as the text is). Try 0.3")
    if not 0 < character_coverage <= 1:
        raise UserError(f"--character_coverage {character_coverage:g} is no share of the text. Try 0.9995")
    if max_words < 1000:
        raise UserError(f"--max_words {max_words} is too few to learn from. Give 1000 or more, such as 2000000")
    corpus = Corpus({str(path): readers.expand(str(path)) for path in paths})
    with new_folder(Path(output)) as folder:
        splitter = wordpiece.Splitter(lowercase)
        words = _count(corpus, splitter, alpha, max_words, quiet)
        with Reporter("merging pieces", vocab_size, ("tokens",), quiet) as reporter:
            tokens = wordpiece.learn(
                words,
                vocab_size,
                character_coverage=character_coverage,
                on_token=lambda size: reporter.update(size, size),
            )
        vocabulary = tokenizer_files.Vocabulary(tuple(tokens), lowercase=lowercase, strip_accents=lowercase)
        trained = Tokenizer(vocabulary)
        trained.save(folder)
    if trained.vocab_size < vocab_size:
        print(
            f"warning: the text gives {trained.vocab_size} tokens, fewer than --vocab_size {vocab_size}: no further "
            f"pair of pieces occurs {wordpiece.MIN_FREQUENCY} times. Give more text, or this size",
            file=sys.stderr,
        )
    return trained


def main(arguments: Sequence[str]) -> None:
    parser = command.Parser("data_prep.train_tokenizer", DESCRIPTION)
    parser.add_argument(
        "--input",
        required=True,
        metavar="GLOB",
        help="text files (.txt, also .gz or .xz), a quoted glob or several parted by commas; required",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to make; must not exist; required")
    parser.add_argument(
        "--kind",
        default="wordpiece",
        choices=["wordpiece", "bpe", "unigram"],
        help="default wordpiece, the only one that exists now",
    )
    parser.add_argument(
        "--vocab_size",
        type=int,
        required=True,
        metavar="N",
        help="tokens, special ones included (BERT: 30522); required",
    )
    parser.add_switch(
        "lowercase",
        help="lower-case and strip accents before anything else; default --nolowercase: keep both",
    )
    parser.add_argument(
        "--alpha",
        type=float,
        metavar="A",
        help="several languages: exponent of their shares, 0 to 1; default: the text as it is",
    )
    parser.add_argument(
        "--character_coverage",
        type=float,
        default=wordpiece.CHARACTER_COVERAGE,
        metavar="SHARE",
        help=f"of the text, by characters that get a token; default {wordpiece.CHARACTER_COVERAGE}",
    )
    parser.add_argument(
        "--max_words",
        type=int,
        default=counting.MAX_CHUNKS,
        metavar="N",
        help=f"distinct words counted at once; default {counting.MAX_CHUNKS}",
    )
    flags = parser.parse_args(arguments)
    patterns = [flags.input] if flags.alpha is None else _languages(flags.input)
    trained = train(
        patterns,
        flags.output,
        vocab_size=flags.vocab_size,
        lowercase=bool(flags.lowercase),
        kind=flags.kind,
        alpha=flags.alpha,
        character_coverage=flags.character_coverage,
        max_words=flags.max_words,
        quiet=False,
    )
    print(f"{flags.output}: WordPiece, {trained.vocab_size} tokens, {'lower-cased' if trained.lowercase else 'cased'}")


def _languages(pattern: str) -> list[str]:
    """The patterns of --input; the files of it if it is one."""
    parts = [part.strip() for part in pattern.split(",") if part.strip()]
    return parts if len(parts) > 1 else [str(path) for path in readers.expand(pattern)]


def _count(
    corpus: Corpus, splitter: counting.Splitter, alpha: float | None, max_words: int, quiet: bool
) -> dict[str, int]:
    """The counts of words. Prints the shares of languages."""
    with Reporter("counting words", corpus.total_bytes, ("MB",), quiet) as reporter:

        def reported(documents: Iterable[str]) -> Iterator[str]:
            for document in documents:
                yield document
                reporter.update(corpus.bytes_read, corpus.bytes_read / 1e6)

        texts = ((name, reported(corpus.documents(name))) for name in corpus.groups)
        if alpha is None:
            counter = counting.ChunkCounter(splitter, max_words)
            for _, documents in texts:
                counter.add(documents)
            chunks = counter.counts
        else:
            chunks, shares = sampling.count_chunks(texts, splitter, alpha, max_words)
            for share in shares:
                print(f"{share.language}: {share.text:.2%} of the text, counted as {share.counted:.2%}")
    words = counting.count_words(chunks, splitter)
    if not words:
        first = next(path for group in corpus.groups.values() for path in group)
        raise UserError(f"no words in the files of --input ({first} ...). Give files with text")
    return words


if __name__ == "__main__":
    command.run(main)
