r"""ModernBERT-base's size in three phases: next tokens, masked tokens, then a decay on long rows; 100 B tokens.

    bert-jax pretrain --config phases --workdir runs/phases --config.data.train=SHORT \
        --config.data.phases="{19073: 'LONG'}"

SHORT are shards of `build-examples --objective doc_sentences --pack 32 --seq_len 1024`. LONG, for the decay, are of
other text, such as that of a domain or of higher quality, with `--seq_len 8192 --pack 64` and the same tokenizer.

| phase | from step | tokens | objective | rows of positions | masked | rate |
|---|---|---|---|---|---|---|
| causal | 0 | 45 B | next tokens, causal attention | 4,608 of 1,024 | none | warmup over 3 B, then constant |
| trunk | 9,536 | 45 B | masked tokens | 4,608 of 1,024 | 30% | constant |
| decay | 19,073 | 10 B | masked tokens | 576 of 8,192 | 30%, falling linearly to 15% | 1 - sqrt to 0.1% of the peak |

Borders are steps of full rows, while the length, the warmup and the decay of the rate are counted in the tokens that
the rows hold on average. Rows that are 99.8% full, as packed ones are, shift the decay of the rate by 38 steps.

Another decay from any checkpoint of the trunk, with its optimizer state, here after 15,000 steps (70.8 B tokens) on
OTHER, in a workdir of its own:

    bert-jax pretrain --config phases --workdir runs/decay --config.data.train=SHORT \
        --config.branch_from=runs/phases/checkpoints/15000 --config.data.phases="{15000: 'OTHER'}" \
        --config.batch_schedule='{0: 4608, 15000: 576}' \
        --config.data.mask_schedule='{0: 0.3, 15000: 0.3, 17119: 0.15}' \
        --config.tokens=80.8e9

Hardware  not run here
Hours     not measured
Expected  not measured here. Gisserot-Boukhlef et al. 2025 report that causal phases of a quarter, a half and three
          quarters of the run, then masked ones, give better encoders than masked tokens alone at equal steps. Weller
          et al. 2025 find that masked training of a decoder gives a worse encoder than masked tokens alone
Source    Batch, peak rate, warmup, optimizer and decay of weights: Warner et al. 2024 (the recipe modernbert). A half
          of the trunk each: one of the splits of Gisserot-Boukhlef et al. 2025. Rows, mask rates, the shape and the
          end of the decay: BioClinical ModernBERT, phase1_base.yaml and phase2_base.yaml of
          lindvalllab/BioClinical-ModernBERT (30%, then 15%; 576 rows of 8,192; one_minus_sqrt, alpha_f 0.001).
          Linear fall of the mask rate: Ankner et al. 2024. The lengths of the phases are this repository's choice.
          Rotary bases are those of the long rows in all phases, because a run has one model. The decay begins at the
          peak rate of the trunk; both sources train long rows at 3e-4, after a phase at that rate
"""

import ml_collections

from bert_jax.config import (
    CheckpointConfig,
    ModelOptions,
    Phases,
    PretrainConfig,
    PretrainDataConfig,
    StableAdamW,
    WSDSchedule,
    recipe,
)

CAUSAL, TRUNK, DECAY = 45e9, 45e9, 10e9  # tokens of the phases
ROWS, LENGTH = 4608, 1024
LONG_ROWS, LONG_LENGTH = 576, 8192
MASKED_FROM = int(CAUSAL / (ROWS * LENGTH))
DECAY_FROM = int((CAUSAL + TRUNK) / (ROWS * LENGTH))
END = DECAY_FROM + int(DECAY / (LONG_ROWS * LONG_LENGTH))
RATE = 8e-4


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        PretrainConfig(
            model=ModelOptions(preset="modernbert_base"),
            data=PretrainDataConfig(
                mask_schedule={0: 0.3, DECAY_FROM: 0.3, END: 0.15},
                mask_shape="linear",
            ),
            optimizer=StableAdamW(
                learning_rate=RATE,
                schedule=WSDSchedule(warmup_steps=0, warmup_tokens=3e9, decay_tokens=DECAY, final_share=0.001),
                beta2=0.98,
                weight_decay=1e-5 / RATE,  # published as 1e-5 per step at the peak rate, not multiplied by the rate
                clip_norm=0.0,
            ),
            checkpoint=CheckpointConfig(every_steps=1000, keep_every=1000),
            objective=Phases({0: "causal", MASKED_FROM: "mlm"}),
            batch_size=ROWS,
            batch_schedule={0: ROWS, DECAY_FROM: LONG_ROWS},
            steps=0,
            tokens=CAUSAL + TRUNK + DECAY,
        )
    )
