"""Masking for the masked language model: which tokens are predicted, and what stands in their place.

Everything is a function of (seed, epoch, sequence key, rate, rule) and the position within the sequence (law 2), by
counter-based hashing: no batch, order of rows, packing or process changes a mask. Vectorised over all sequences.

A sequence of n slots has a budget of max(1, round(rate * n)) predictions. Its words come in random order, and by the
unit of masking
  token, word  each is taken whole if it still fits the budget and skipped if not (google-research/bert,
               create_pretraining_data.py; Devlin et al. 2019, section 3.1, and the whole-word variant of 2019-05-31);
  ngram        each begins an n-gram of 1 to 3 words, p(n) ~ 1/n over those that the text has room for, shortened until
               it fits, skipped if it holds a chosen word (google-research/albert, create_pretraining_data.py; Lan et
               al. 2020, section 3.1);
  span         each that is not chosen yet begins a span of 1 to 10 words, p(n) ~ 0.8**n (geometric with p = 0.2, cut
               and normalised: 3.8 words on average), which ends before a chosen word or where the text or the budget
               does (facebookresearch/SpanBERT, fairseq/data/masking.py; Joshi et al. 2020, section 3.1).
A chosen token becomes [MASK] in 80% of cases, a random token in 10%, and stays itself in 10% (or any other split);
with spans one draw decides for a whole span, and spans that touch are one, as in SpanBERT's code.

With a reorder rate, trigrams of tokens that are not chosen, in random order while they share none, are shuffled and
predicted too, round(rate * n / 3) of them (Wang et al. 2019, StructBERT, section 2.2.1; its 5% of trigrams are
counted here by the share of the slots that they take).

What differs from those programs:
  - no special token is ever predicted, [UNK] and [MASK] included (bert: all but [CLS] and [SEP] may be);
  - a random token is never a special one (bert: any line of the vocabulary);
  - the inside of a word at the start of a segment or after a special token begins a word (bert: it goes on with the
    last word before the special token), and no n-gram or span goes over a special token;
  - where no word fits the budget, the first tokens of the first word are taken, so that a sequence has at least one
    prediction unless it holds special tokens alone (bert: none); no other word is cut (SpanBERT: the last one is);
  - a span ends before a chosen word (SpanBERT: it goes on behind it);
  - no cap on predictions besides the rate: a row has room for all (bert: max_predictions_per_seq).
"""

from bert_jax.data.masking.masker import Masked, Masker, MaskingTokenizer
from bert_jax.data.masking.rate_schedule import RateSchedule
from bert_jax.data.masking.rule import BERT_SHARES, RANDOM_TOKENS, UNITS, MaskingRule, ReplacementShares
from bert_jax.data.masking.span_boundaries import SpanTargets, span_targets

__all__ = [
    "BERT_SHARES",
    "RANDOM_TOKENS",
    "UNITS",
    "Masked",
    "Masker",
    "MaskingRule",
    "MaskingTokenizer",
    "RateSchedule",
    "ReplacementShares",
    "SpanTargets",
    "span_targets",
]
