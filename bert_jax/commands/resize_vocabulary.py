"""Adds words to the vocabulary of a model, or drops the tokens that a text does not use."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bert_jax import command_line
from bert_jax.errors import UserError
from bert_jax.interop import export, huggingface_export, sentence_transformers
from bert_jax.interop.loaded_model import LoadedModel, part_of
from bert_jax.interop.open_checkpoint import add_average_flag, open_checkpoint
from bert_jax.interop.resizing import Usage, VocabularyChange, grow, with_vocabulary
from bert_jax.progress import Reporter
from bert_jax.storage.files import refuse_existing
from bert_jax.tasks.reading.tables import numbered_lines
from bert_jax.tokenization.tokenizer import Tokenizer

TEXTS_AT_ONCE = 10_000

DESCRIPTION = """Adds words to the vocabulary of a trained model, or drops the tokens that a text does not use.

  bert-jax resize-vocabulary --checkpoint CHECKPOINT --output grown --add_tokens words.txt
  bert-jax resize-vocabulary --checkpoint CHECKPOINT --output small --trim 'text/*.txt.xz'

CHECKPOINT is a workdir, a step in it, an export, or a Hugging Face folder. The output is a Hugging Face folder, which
transformers opens, or a workdir for a model that this format cannot hold (a CRF, relative positions). The other
commands take both as a checkpoint and as --tokenizer.

--add_tokens  a file with one word on each line, in the form that the tokenizer looks up (lower-cased, without accents,
              if the vocabulary is). Each word becomes one token, whose rows in the token table and in the output are
              the means of those of the tokens that it had before. All other rows stay. In byte-level BPE a word has two
              tokens, with and without the space before it. For WordPiece, byte-level BPE and SentencePiece Unigram.
--trim        the text whose tokens to keep: files in any format of build_examples. Its lines keep their tokens, under
              new ids, also in shards and after the prompts of a model of vectors. Special and added tokens, prompts,
              bytes and single characters always stay, so other text can be encoded, too, though perhaps in more tokens.

After words were added, train the model further: docs/adapting.md. Shards belong to one vocabulary, so
build them again with --tokenizer OUTPUT."""


class Resized(NamedTuple):
    """A model with its new vocabulary, and how large it was.

    tokens_before   tokens of the old vocabulary
    bytes_before    of the weights' files in the checkpoint; None if it is not a Hugging Face folder
    bytes_after     of those in the output; None if it is a workdir
    """

    loaded: LoadedModel
    tokens_before: int
    bytes_before: int | None
    bytes_after: int | None


def add_tokens(checkpoint: str | Path, words: str | Path, output: str | Path, average: str = "") -> Resized:
    """Adds the words of a file to a model's vocabulary, and writes it in the format that `--help` names.

    average is as in open_checkpoint. The output appears complete or not at all. Raises UserError, with the name of the
    file, for whatever `grow` refuses, for an output that exists, and whenever open_checkpoint and export do.
    """
    file = Path(words)
    found = [word for _, line in numbered_lines(file) if (word := line.strip(" "))]

    def change(loaded: LoadedModel) -> VocabularyChange:
        try:
            return grow(Tokenizer(loaded.vocabulary.spec), found)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None

    return _resize(checkpoint, output, average, change)


def trim(checkpoint: str | Path, text: str, output: str | Path, average: str = "", quiet: bool = False) -> Resized:
    """Drops the tokens that a text does not use, and writes the model in the format that `--help` names.

    text is a pattern of files, as --input of build_examples. Its lines keep their tokens, alone, after each prompt of
    the model's task, and in the shards that build_examples makes of them. average is as in open_checkpoint. The output
    appears complete or not at all. Raises UserError for files without text, for an output that exists, and whenever
    open_checkpoint and export do.
    """
    from data_prep.readers import Corpus, find_sources, of_flag

    def change(loaded: LoadedModel) -> VocabularyChange:
        tokenizer = Tokenizer(loaded.vocabulary.spec)
        prompts = sentence_transformers.prompts_of(loaded.task or {})
        usage = Usage(tokenizer)
        try:
            corpus = Corpus(find_sources(text))
            with Reporter("reading text", corpus.total_bytes, ("MB",), quiet) as progress:
                forms = (texts_of(one, prompts, tokenizer.spec.keeps_newlines) for one in corpus.documents())
                texts = itertools.chain.from_iterable(forms)
                while block := list(itertools.islice(texts, TEXTS_AT_ONCE)):
                    usage.add(block)
                    progress.update(corpus.bytes_read, corpus.bytes_read / 1e6)
            usage.add(prompts)
        except UserError as error:
            raise of_flag(error, "--trim") from None
        return usage.trim()

    return _resize(checkpoint, output, average, change)


def texts_of(document: str, prompts: Sequence[str] = (), whole: bool = False) -> Iterator[str]:
    """Yields the texts that commands encode of a document: lines, also after prompts, and the sentences of shards.

    whole   whether shards may keep line breaks, and so have the tokens of the whole document
    """
    from data_prep.sentences import joined_sentences

    lines = document.split("\n")
    for prompt in ("", *prompts):
        yield from (prompt + line for line in lines)
    yield from set(joined_sentences(document).sentences).difference(lines)
    if whole:
        yield document


def _resize(
    checkpoint: str | Path, output: str | Path, average: str, change: Callable[[LoadedModel], VocabularyChange]
) -> Resized:
    refuse_existing(Path(output))
    loaded = open_checkpoint(checkpoint, average)
    if loaded.heads.generator:
        loaded = part_of(loaded, "discriminator")
    format = _format_of(loaded)
    resized = with_vocabulary(loaded, change(loaded))
    export.export_loaded(resized, output, format)
    return Resized(resized, loaded.vocabulary.vocab_size, _weight_bytes(checkpoint), _weight_bytes(output))


def _format_of(loaded: LoadedModel) -> str:
    """Returns the format of export that holds a model; one that transformers opens if there is one."""
    task = loaded.task or {}
    embeds = task.get("kind") == sentence_transformers.KIND and sentence_transformers.has_known_pooling(task)
    try:
        huggingface_export.check(huggingface_export.sentence_encoder(loaded)[0] if embeds else loaded)
    except UserError:
        return "orbax"
    return "sentence_transformers" if embeds else "hf"


def _weight_bytes(folder: str | Path) -> int | None:
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) or None


def main(arguments: Sequence[str]) -> None:
    parser = command_line.Parser("bert-jax resize-vocabulary", DESCRIPTION)
    parser.add_argument("--checkpoint", required=True, help="the model whose vocabulary to change")
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to create; it must not exist")
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--add_tokens", metavar="FILE", help="words to add, one on each line")
    job.add_argument("--trim", metavar="GLOB", help="the text whose tokens to keep")
    add_average_flag(parser)
    options = parser.parse_args(arguments)
    if options.add_tokens is not None:
        done = add_tokens(options.checkpoint, options.add_tokens, options.output, options.average)
    else:
        done = trim(options.checkpoint, options.trim, options.output, options.average)
    known = [size for size in (done.bytes_before, done.bytes_after) if size is not None]
    sizes = " -> ".join(f"{size / 1e6:.1f}" for size in known)
    weights = f", {sizes} MB of weights" if done.bytes_after is not None else " in a workdir"
    print(
        f"{options.output}: {done.tokens_before:,} -> {done.loaded.model.vocab_size:,} tokens{weights}; "
        f"{huggingface_export.describe(done.loaded)}"
    )
