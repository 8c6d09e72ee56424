"""Adds words to a model's vocabulary, or drops the tokens that a text does not use."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bert_jax.config.options import option, parse
from bert_jax.errors import UserError
from bert_jax.interop.huggingface_export import describe
from bert_jax.interop.loaded_model import LoadedModel
from bert_jax.interop.open_checkpoint import CheckpointOptions
from bert_jax.interop.resizing import Resized, Usage, VocabularyChange, grow, resize_checkpoint
from bert_jax.interop.sentence_transformers import prompt_texts
from bert_jax.progress import Reporter
from bert_jax.tasks.reading.tables import numbered_lines
from bert_jax.tokenization.tokenizer import Tokenizer

TEXTS_AT_ONCE = 10_000

DESCRIPTION = """Adds words to a trained model's vocabulary, or drops the tokens that a text does not use.

  bert-jax resize-vocabulary --checkpoint CHECKPOINT --output grown --add_tokens words.txt
  bert-jax resize-vocabulary --checkpoint CHECKPOINT --output small --trim 'text/*.txt.xz'

The output is a Hugging Face folder, which transformers opens, or a workdir if this format cannot hold the model (a CRF,
relative positions). The other commands take both as a checkpoint and as --tokenizer.

--add_tokens  a file with one word on each line, as the tokenizer looks it up (lower-cased, without accents, if the
              vocabulary is). Each word becomes one token, or two in byte-level BPE, with and without the space before
              it. Its rows of parameters are the means of the rows of its former tokens; all other rows stay. For
              WordPiece, byte-level BPE and SentencePiece Unigram.
--trim        the text whose tokens to keep: files in any format of build-examples. Its lines keep their tokens, under
              new ids, also in shards and after prompts. Special and added tokens, prompts, bytes and single characters
              always stay, so other text can still be encoded, perhaps in more tokens.

After adding words, train the model further (docs/adapting.md). Shards belong to one vocabulary, so build them again
with --tokenizer OUTPUT."""


def add_tokens(checkpoint: str | Path, words: str | Path, output: str | Path, average: str = "") -> Resized:
    """Adds the words in a file to a model's vocabulary; the other arguments are as in resize_checkpoint.

    Raises:
        UserError: `grow` refuses a word of the file, or resize_checkpoint raises it.
    """
    file = Path(words)
    # Only spaces are stripped; other white space is a mistake, which `grow` reports.
    lines = [word for _, line in numbered_lines(file) if (word := line.strip(" "))]

    def change(loaded: LoadedModel) -> VocabularyChange:
        try:
            return grow(Tokenizer(loaded.vocabulary.spec), lines)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None

    return resize_checkpoint(checkpoint, output, change, average)


def trim(checkpoint: str | Path, text: str, output: str | Path, average: str = "", quiet: bool = False) -> Resized:
    """Drops the tokens that a text does not use; the other arguments are as in resize_checkpoint.

    Args:
        text: A pattern of files, as --input of build-examples. Its lines keep their tokens: alone, after each prompt of
            the model's task, and in shards of build-examples.

    Raises:
        UserError: The files have no text, or resize_checkpoint raises it.
    """
    from data_prep.readers import of_flag
    from data_prep.readers.corpus import Corpus, find_sources

    def change(loaded: LoadedModel) -> VocabularyChange:
        tokenizer = Tokenizer(loaded.vocabulary.spec)
        prompts = prompt_texts(loaded.task or {})
        usage = Usage(tokenizer)
        try:
            corpus = Corpus(find_sources(text))
            with Reporter("reading text", corpus.total_bytes, ("MB",), quiet) as progress:
                whole = tokenizer.spec.keeps_newlines
                texts = (text for document in corpus.documents() for text in document_texts(document, prompts, whole))
                # In blocks, because encoding many texts at once uses all cores, and a corpus may not fit in memory.
                while block := list(itertools.islice(texts, TEXTS_AT_ONCE)):
                    usage.add(block)
                    progress.update(corpus.bytes_read, corpus.bytes_read / 1e6)
            usage.add(prompts)
        except UserError as error:
            raise of_flag(error, "--trim") from None
        return usage.trim()

    return resize_checkpoint(checkpoint, output, change, average)


def document_texts(document: str, prompts: Sequence[str] = (), whole: bool = False) -> Iterator[str]:
    """Yields the texts that commands encode in a document: its lines, also after prompts, and the sentences of shards.

    Args:
        whole: Whether shards may keep line breaks, so that the document itself is such a text.
    """
    from data_prep.sentences import document_sentences

    lines = document.split("\n")
    for prompt in ("", *prompts):
        yield from (prompt + line for line in lines)
    yield from set(document_sentences(document)).difference(lines)
    if whole:
        yield document


@dataclass(frozen=True, kw_only=True)
class Options(CheckpointOptions):
    output: str = option(help="the folder to create; it must not exist", metavar="DIR")
    add_tokens: str = option("", "words to add, one on each line", metavar="FILE")
    trim: str = option("", "the text whose tokens to keep", metavar="GLOB")

    def __post_init__(self) -> None:
        if bool(self.add_tokens) == bool(self.trim):
            raise UserError("give one of --add_tokens FILE and --trim GLOB")


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax resize-vocabulary", DESCRIPTION, Options, arguments)
    if options.add_tokens:
        done = add_tokens(options.checkpoint, options.add_tokens, options.output, options.average)
    else:
        done = trim(options.checkpoint, options.trim, options.output, options.average)
    sizes = " -> ".join(f"{size / 1e6:.1f}" for size in (done.bytes_before, done.bytes_after) if size is not None)
    weights = f", {sizes} MB of weights" if done.bytes_after is not None else " in a workdir"
    tokens = f"{done.tokens_before:,} -> {done.loaded.model.vocab_size:,} tokens"
    print(f"{options.output}: {tokens}{weights}; {describe(done.loaded)}")
