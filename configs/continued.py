r"""Continues the pretraining of a checkpoint on other text, with a new warmup and decay of the learning rate.

    bert-jax pretrain --config continued --workdir runs/continued --config.init_from=CHECKPOINT \
        --config.data.mixture="{domain: ('DOMAIN', 0.75), general: ('GENERAL', 0.25)}"

CHECKPOINT is a workdir or a Hugging Face folder of any supported family, and decides the architecture. DOMAIN and
GENERAL are shards of `build-examples --tokenizer CHECKPOINT`. GENERAL replays text like that of the first pretraining
against forgetting; `--config.data.train=DOMAIN` trains without. docs/adapting.md has every step, and the
perplexities of an example before and after.

The rate rises over 1% of the steps, since the optimizer state begins at zero, and decays to a tenth of the peak along a
cosine. Set `steps` by the text (a few epochs of it), and the rate by the model: at most the peak of its pretraining,
which `bert-jax recipes NAME` shows for published models.

Hardware  any; the example of docs/adapting.md ran on 2 CPU cores
Hours     by the text and the model
Expected  docs/adapting.md, of a tiny model; larger ones are not measured here
Source    A new warmup and decay of the rate, and replay of the first text: Ibrahim et al. 2024. The rate, the batch,
          the lengths and the share of replay are this repository's choice
"""

import ml_collections

from bert_jax.config import AdamW, CosineSchedule, ModelOptions, PretrainConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset="checkpoint"),
            optimizer=AdamW(
                learning_rate=1e-4, schedule=CosineSchedule(warmup_steps=0, warmup_share=0.01, final_share=0.1)
            ),
            batch_size=256,
            steps=10_000,
        )
    )
