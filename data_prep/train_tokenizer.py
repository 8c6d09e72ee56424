"""Trains a tokenizer on text: the same text and options give the same bytes. The algorithm: data_prep/wordpiece.py."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bert_jax import command, tokenizer_files
from bert_jax.command import UserError
from bert_jax.files import new_folder
from bert_jax.tokenizer import Tokenizer
from data_prep import readers, wordpiece
from data_prep.progress import Reporter

DESCRIPTION = """\
Trains a vocabulary on text and writes a tokenizer folder, which data_prep.build_examples and Hugging Face
transformers both read.

    python -m data_prep.train_tokenizer --input 'data_prep/sample/books/*.txt.xz' --output tokenizer --vocab_size 8192

The same text and options give the same bytes. Words are counted first, in one pass and in bounded memory; then the
most frequent pairs of pieces are merged, as the Hugging Face WordPiece trainer does, with ties broken by rule
(data_prep/wordpiece.py says how)."""


def train(
    paths: Sequence[str | Path],
    output: str | Path,
    *,
    vocab_size: int,
    lowercase: bool = False,
    kind: str = "wordpiece",
    quiet: bool = True,
) -> Tokenizer:
    """Trains a tokenizer on the files and writes its folder; returns it.

    `output` must not exist; it appears whole or not at all. A vocabulary smaller than asked for, when the text has no
    more repeated pieces, is written and said on stderr. Raises UserError for an unknown kind, an empty corpus, a
    vocab_size under the number of characters, an output that exists, and what `readers.documents` raises.
    """
    if kind != "wordpiece":
        raise UserError(f"--kind {kind} does not exist yet. Only --kind wordpiece does now")
    if vocab_size < 1:
        raise UserError(f"--vocab_size {vocab_size} is no size. Give a number such as 8192 or 30522")
    output = Path(output)
    with new_folder(output) as folder:
        words = _count_words([Path(path) for path in paths], lowercase, quiet)
        with Reporter("merging pieces", vocab_size, ["tokens"], quiet) as reporter:
            tokens = wordpiece.learn(words, vocab_size, on_token=lambda size: reporter.update(size, size))
        vocabulary = tokenizer_files.Vocabulary(tuple(tokens), lowercase=lowercase, strip_accents=lowercase)
        trained = Tokenizer(vocabulary)
        trained.save(folder)
    if len(tokens) < vocab_size:
        print(
            f"warning: the text gives {len(tokens)} tokens, fewer than --vocab_size {vocab_size}: no further pair of "
            f"pieces occurs {wordpiece.MIN_FREQUENCY} times. Give more text, or this size",
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
    flags = parser.parse_args(arguments)
    trained = train(
        readers.expand(flags.input),
        flags.output,
        vocab_size=flags.vocab_size,
        lowercase=bool(flags.lowercase),
        kind=flags.kind,
        quiet=False,
    )
    print(f"{flags.output}: WordPiece, {trained.vocab_size} tokens, {'lower-cased' if trained.lowercase else 'cased'}")


def _count_words(paths: list[Path], lowercase: bool, quiet: bool) -> dict[str, int]:
    total = sum(path.stat().st_size for path in paths if path.is_file())
    with Reporter("counting words", total, ["MB"], quiet) as reporter:

        def documents() -> Iterator[str]:
            done = 0

            def read(size: int) -> None:
                nonlocal done
                done += size
                reporter.update(done, done / 1e6)

            for path in paths:
                yield from readers.documents(path, on_read=read)

        words = wordpiece.count_words(wordpiece.count_chunks(documents()), lowercase)
    if not words:
        raise UserError(f"no words in the {len(paths)} files of --input ({paths[0]} ...). Give files with text")
    return words


if __name__ == "__main__":
    command.run(main)
