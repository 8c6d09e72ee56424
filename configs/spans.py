r"""Spans of words that may nest (kind=spans), and relations between them (kind=span_pairs), from your own files.

    bert-jax finetune --config spans:kind=spans --workdir runs/nested \
        --config.init_from=CHECKPOINT --config.task.train=train.jsonl --config.task.dev=dev.jsonl

Files are JSON lines (or Parquet) with `tokens` and `spans`, and for pairs `relations`:

    {"tokens": ["Bank", "of", "China", "hired", "Ann"],
     "spans": [{"start": 0, "end": 3, "label": "ORG"}, {"start": 2, "end": 3, "label": "LOC"},
               {"start": 4, "end": 5, "label": "PER"}],
     "relations": [{"head": 2, "tail": 0, "label": "works_for"}]}

start and end are word indices from 0, end exclusive; head and tail are indices into spans. CoNLL columns of entity tags
also give flat spans: files that end in .conll, .iob, .iob2 or .bio (--config.task.train=train.conll). With a text
instead of tokens (task.text=text), spans count its characters, as spaCy, doccano, Prodigy and Label Studio write them.

--config.task.max_span=8          the maximum number of words of a span; default: that of the training file, at most
                                  12. Time and memory grow with it
--config.task.span_scores=binary  yes or no for each type, so a span may have several; or classes: one type per span
--config.task.threshold=0.5       the minimum probability of a span; default: the threshold with the best F1 on dev
--config.task.span_vectors=endpoints        what a span's vector is made of; or boundary, content (benchmarks/scores.py)
--config.task.span_overlap=any    predicted spans; nested: no two overlap in part; flat: no two have a common word
--config.task.relation_threshold=0.5        the minimum probability of a relation; default: that of no relation
--config.task.relations_between=predicted   relations between predicted spans; or given: between the spans of the
                                  input, also at prediction

Hardware  any; one accelerator for BERT-Base, a CPU for small models
Hours     not measured here
Expected  depends on the data; published, and not measured here: nested entities, test F1: GENIA 80.5, ACE 2005 85.4
          (Yu et al. 2020, BERT-Large, all spans); ACE 2005 within sentences, BERT-Base: entities 88.7, relations with
          both spans and their types right 64.6 (the models released with Zhong and Chen 2021, an encoder for each)
Source    this repository's choice, from these: princeton-nlp/PURE (Zhong and Chen 2021) has batches of 16, 100 epochs,
          1e-5 and for the head 5e-4 for entities, and batches of 32, ten epochs and 2e-5 for relations; 5e-5 is the
          highest rate of Devlin et al. 2019, appendix A.3
"""

import ml_collections

from bert_jax.config import AdamW, FinetuneConfig, LinearSchedule, TaskConfig, recipe
from bert_jax.errors import UserError

KINDS = ("spans", "span_pairs")


def get_config(argument: str = "kind=spans") -> ml_collections.ConfigDict:
    kind = argument.removeprefix("kind=")
    if kind not in KINDS:
        raise UserError(f"spans: unknown kind {argument}; use kind=NAME, NAME one of {', '.join(KINDS)}")
    return recipe(
        FinetuneConfig(
            task=TaskConfig.kinds[kind](max_length=128),
            optimizer=AdamW(learning_rate=5e-5, schedule=LinearSchedule(warmup_steps=-1)),  # -1: a tenth of the steps
            batch_size=16,
            epochs=10.0,
        )
    )
