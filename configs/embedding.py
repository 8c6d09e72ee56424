r"""Vectors of texts: trained on pairs, on triplets with hard negatives, or on pairs with a score.

    bert-jax finetune --config embedding --workdir runs/vectors --config.init_from=CHECKPOINT \
        --config.task.train=pairs.jsonl --config.task.text=question --config.task.text_pair=answer
    bert-jax finetune --config embedding --workdir runs/sts --config.init_from=CHECKPOINT \
        --config.task.train=train.tsv --config.task.dev=dev.tsv --config.task.text=sentence1 \
        --config.task.text_pair=sentence2 --config.task.label=score

Files are tables (TSV, CSV, JSON lines, Parquet) as in the recipe own. A training file without the column task.label
gives the contrastive loss: each text finds its text_pair among those of the whole global batch, and the hard negatives
that task.negatives names, so a larger batch_size is a harder task. A file with it gives CoSENT.
docs/sentence_embeddings.md describes pooling, prompts, Matryoshka dimensions, evaluation, and the export to
sentence-transformers.

Hardware  any; the vectors of all devices are compared, so the batch may be as large as the mesh holds
Hours     not measured here
Expected  depends on the data and the checkpoint; not measured here
Source    learning rate 2e-5, one epoch and a tenth of it as warm-up: Reimers and Gurevych 2019, section 3.1; a scale
          of 20: the default of sentence-transformers; batch 64 is our choice
"""

import ml_collections

from bert_jax.config import AdamW, EmbeddingConfig, FinetuneConfig, LinearSchedule, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        FinetuneConfig(
            task=EmbeddingConfig(),
            optimizer=AdamW(learning_rate=2e-5, schedule=LinearSchedule(warmup_steps=-1)),  # -1: a tenth of the steps
            batch_size=64,
            epochs=1.0,
            length_pool=1,  # negatives of any length, not those of similar length
        )
    )
