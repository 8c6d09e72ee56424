r"""DistilBERT: six of a BERT-Base's twelve layers, trained to predict what it predicts (Sanh et al. 2019).

    bert-jax pretrain --config distilbert --workdir runs/distilbert --config.data.train=SHARDS \
        --config.distill.teacher=TEACHER --config.init_from=TEACHER

TEACHER is any checkpoint of BERT-Base's architecture with a masked-language-model head: a workdir, an export, or a
Hugging Face folder such as that of bert-base-uncased. SHARDS are of `build-examples --objective full_sentences
--seq_len 512 --masking dynamic --tokenizer TEACHER`. For a teacher of another architecture, such as one of six layers,
add --config.model.preset=checkpoint --config.model.layers=3 --config.init_layers=0,2,5 (docs/adapting.md).

The loss is 5 times the divergence from the teacher's distributions at temperature 2, at all tokens, plus 2 times that
of masked tokens, plus the cosine distance of the last hidden states. The student keeps the segment embeddings of the
teacher, which the published one dropped, and trains its position embeddings, which the published one kept fixed
(--config.optimizer.rates="{'^embeddings/position/': 0}").

Hardware  published: 8 V100 of 16 GB; not run here
Hours     published: about 90
Expected  published, on dev: a mean of GLUE of 77.0, where its teacher has 79.5 (table 1); not measured here
Source    Sanh et al. 2019, sections 3 and 4: dynamic masking, no next sentences, the text of BERT. Weights and
          temperature of the terms, all tokens, learning rate, warmup, betas, decay, clipping, batches of 5 x 50 rows on
          each of 8 GPUs, three epochs: README.md, train.py and distiller.py of research_projects/distillation in
          huggingface/transformers; layers: its scripts/extract_distilbert.py. Its masks prefer rare tokens, and these
          shards do not. Steps: three epochs of 3.3 G words of 1.3 tokens each, this repository's estimate
"""

import ml_collections

from bert_jax.config import AdamW, DistillConfig, LinearSchedule, MaskedLM, ModelOptions, PretrainConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset="base", layers=6),
            init_layers=(0, 2, 4, 7, 9, 11),
            distill=DistillConfig(
                temperature=2.0, soft_weight=5.0, hard_weight=2.0, hidden_weight=1.0, positions="all"
            ),
            optimizer=AdamW(
                learning_rate=5e-4,
                schedule=LinearSchedule(warmup_steps=0, warmup_share=0.05),
                beta2=0.98,
                weight_decay=0.0,
                clip_norm=5.0,
            ),
            objective=MaskedLM(next_sentence=False),
            batch_size=2000,
            microbatches=50,
            steps=12_500,
        )
    )
