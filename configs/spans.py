"""Spans of words that may nest (kind=spans), and relations between them (kind=span_pairs), from files of your own.

    python -m bert_jax.finetune --config configs/spans.py:kind=spans --workdir runs/nested \\
        --config.init_from=CHECKPOINT --config.task.train=train.jsonl --config.task.dev=dev.jsonl

Files are JSON lines (or Parquet) with `tokens` and `spans`, and for pairs `relations`:

    {"tokens": ["Bank", "of", "China", "hired", "Ann"],
     "spans": [{"start": 0, "end": 3, "label": "ORG"}, {"start": 2, "end": 3, "label": "LOC"},
               {"start": 4, "end": 5, "label": "PER"}],
     "relations": [{"head": 2, "tail": 0, "label": "works_for"}]}

start and end are words from 0, end exclusive; head and tail are places in spans. Flat spans come from CoNLL columns of
entity tags, too: files that end in .conll, .iob, .iob2 or .bio (--config.task.train=train.conll).

--config.task.max_span=8          the words of the longest span that is looked for; the longest of the training file,
                                  at most 12. Cost and memory grow with it
--config.task.span_scores=binary  a yes or no for each type, so that a span may have several; or classes: one of them
--config.task.threshold=0.5       the probability from which a span is one; else what gives the best F1 on dev
--config.task.relations_between=predicted   relations between spans that are learnt, too; or given: between those of
                                  the input, at prediction also

Hardware  any; by BERT-Base one accelerator, by small models a CPU
Hours     not measured by us
Expected  depends on the data; published, and not measured by us: nested entities, test F1: GENIA 80.5, ACE 2005 85.4
          (Yu et al. 2020, BERT-Large, all spans); ACE 2005 within sentences, BERT-Base: entities 88.7, relations with
          both spans and their types right 64.6 (the models released with Zhong and Chen 2021, an encoder for each)
Source    batch 16 and ten epochs: Zhong and Chen 2021, appendix; rate 5e-5: Devlin et al. 2019, appendix A.3
"""

import ml_collections

from bert_jax.command import UserError
from bert_jax.config import FinetuneConfig, OptimizerConfig, TaskConfig, recipe

KINDS = ("spans", "span_pairs")


def get_config(argument: str = "kind=spans") -> ml_collections.ConfigDict:
    kind = argument.removeprefix("kind=")
    if kind not in KINDS:
        raise UserError(
            f"configs/spans.py:{argument}: no such kind; use configs/spans.py:kind=NAME, one of {', '.join(KINDS)}"
        )
    return recipe(
        FinetuneConfig(
            task=TaskConfig(kind=kind, max_length=128),
            optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=-1),  # -1: a tenth of the steps
            batch_size=16,
            epochs=10.0,
        )
    )
