"""Trains a vocabulary on text and writes a tokenizer folder."""

from collections.abc import Sequence

from bert_jax.config.options import parse
from bert_jax.tokenization.vocabulary import KINDS
from data_prep.vocabulary import TokenizerOptions, train

DESCRIPTION = """\
Trains a vocabulary on text and writes a tokenizer folder for bert-jax build-examples and Hugging Face transformers.

    bert-jax train-tokenizer --input 'data_prep/sample/books/*.txt.xz' --output tokenizer --vocab_size 8192

--kind   wordpiece          BERT: merges characters to pieces, inner ones marked ##; every CJK ideograph is a word
         bpe                RoBERTa: merges bytes to pieces, so no text is unknown
         unigram            XLM-R: SentencePiece, the pieces that make the text most likely
         sentencepiece_bpe  SentencePiece, merges characters to pieces

The same text and options give the same bytes (for the kinds of sentencepiece, with the same version of the library).
Words are counted first, in one pass and in bounded memory; then pieces are learned from the counts.

Several languages: with --alpha, each pattern of --input (or each file, if there is one pattern) is a language, and the
words of language i count as if its share of the text were p_i^alpha / sum_j p_j^alpha: 0.5 in XLM, 0.3 in XLM-R.

    ... --input 'text/en/*.txt.xz,text/sw/*.txt.xz' --kind unigram --alpha 0.3 --vocab_size 250000

Memory: at most --max_words distinct words, with adjacent punctuation, are counted at once (unigram: half as many), in
about 150 bytes each; learning takes up to 1000 bytes for each word without punctuation (unigram: 2200 with it). Beyond
that limit, rare words are sampled by hash, so that frequencies stay right on average. Text without spaces (Chinese,
Japanese, Thai) is counted by ideographs and parts of phrases."""


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax train-tokenizer", DESCRIPTION, TokenizerOptions, arguments)
    trained = train(options, quiet=False)
    case = "lower-cased" if trained.lowercase else "cased"
    print(f"{options.output}: {KINDS[trained.kind]}, {trained.vocab_size} tokens, {case}")
