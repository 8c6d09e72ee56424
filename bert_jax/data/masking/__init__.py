"""Masking for the masked language model: chooses the tokens to predict, and replaces them in the input.

Read masker.py first; it applies the rule. rule.py has the rule in the form that manifests store, and splits rows into
sequences and words. selection.py chooses tokens, words or runs of words.

Masks are a function of (seed, epoch, sequence key, rate, rule) and the position in the sequence (law 2), computed by
hashing these numbers. So the batch, the order of rows, packing and the process change no mask.

A sequence of n positions has a budget of max(1, round(rate * n)) predictions. Its words are visited in random order.
The masking unit decides what a visit does:
  token, word  masks the word whole if it still fits the budget, and skips it otherwise (google-research/bert,
               create_pretraining_data.py; Devlin et al. 2019, section 3.1, and the whole-word variant of 2019-05-31);
  ngram        begins an n-gram of 1 to 3 words, p(n) ~ 1/n over the lengths for which the text has room. It is
               shortened until it fits, and skipped if it contains a chosen word (google-research/albert,
               create_pretraining_data.py; Lan et al. 2020, section 4.1);
  span         unless the word is chosen, begins a span of 1 to 10 words, p(n) ~ 0.8**n (geometric with p = 0.2,
               truncated and normalized: 3.8 words on average). It ends before a chosen word, and where the text or the
               budget ends (facebookresearch/SpanBERT, fairseq/data/masking.py; Joshi et al. 2020, section 3.1);
  infill       as span, but with Poisson lengths (mean 3), and a span becomes one position. An empty span is a
               [MASK] before the word, which is not predicted (facebookresearch/fairseq,
               fairseq/data/denoising_dataset.py; Lewis et al. 2020, section 2.2).
BART's decoder generates an infilled span. An encoder has one output per position. It predicts the span's first token at
the position that replaces the span, but neither the other tokens nor their number.

A chosen token becomes [MASK] in 80% of cases, a random token in 10%, and stays unchanged in 10% (the shares can be
set). With spans, one random choice holds for a whole span, and adjacent spans count as one, as in SpanBERT's code.

With a reorder rate, round(rate * n / 3) trigrams of tokens that were not chosen are shuffled, and predicted too. They
do not overlap (Wang et al. 2019, StructBERT, section 2.2.1; its 5% counts trigrams, the rate here counts positions).

Differences from those programs:
  - no special token is ever predicted, including [UNK] and [MASK] (bert: all except [CLS] and [SEP] may be);
  - a random token is never a special token (bert: any line of the vocabulary);
  - a continuation token at the start of a segment or after a special token begins a word (bert: it continues the last
    word before the special token), and no n-gram or span crosses a special token;
  - if no word fits the budget, the first tokens of the first word are masked, so that a sequence has at least one
    prediction unless all its tokens are special (bert: none); no other word is cut (SpanBERT: the last one is);
  - with the rule "scripts" for words, a token of a script without spaces between words is a word, together with the
    rest of its character and its marks (bert: a Chinese ideograph, which its tokenizer splits off; other scripts by
    spaces);
  - a span ends before a chosen word (SpanBERT: it continues behind it; fairseq: infilled spans may overlap);
  - masks for empty spans are before words, and a sequence never becomes longer (fairseq: they are anywhere, and
    add to the length); the infilling rate counts tokens (fairseq: words);
  - the rate alone limits predictions: a row has room for all of them (bert: max_predictions_per_seq).
"""
