"""Sentence classification and regression from a GLUE folder: sst2, cola, mrpc, stsb or rte.

    python -m bert_jax.finetune --config configs/glue.py:task=sst2 --workdir runs/sst2 --config.init_from=CHECKPOINT

The files (SST-2/train.tsv and so on; .xz and .gz too) are looked for in --config.task.data_dir, or in $BERT_JAX_DATA
and its glue/. --config.seeds=0,1,2,3,4 trains five times: the small tasks swing by points from seed to seed.

Hardware  any; by BERT-Base one accelerator, by small models a CPU
Hours     published: at most one on a Cloud TPU, a few on a GPU (Devlin et al. 2019, section 3.2); not measured by us
Expected  published test scores of BERT-Base and BERT-Large (Devlin et al. 2019, table 1); not measured by us, and a
          score on dev is not the same number

          | task | metric                | Base | Large |
          | sst2 | accuracy              | 93.5 | 94.9 |
          | cola | Matthews correlation  | 52.1 | 60.5 |
          | mrpc | F1                    | 88.9 | 89.3 |
          | stsb | Spearman correlation  | 85.8 | 86.5 |
          | rte  | accuracy              | 66.4 | 70.1 |

Source    Devlin et al. 2019, section 4.1: batch 32, 3 epochs, the best of the rates 5e-5, 4e-5, 3e-5 and 2e-5 by dev
          (here 3e-5; for another set --config.optimizer.learning_rate); dropout 0.1; Adam as in appendix A.2,
          with the correction of its moments that the code of then left out (Zhang et al. 2021, section 4)
"""

import ml_collections

from bert_jax.command import UserError
from bert_jax.config import FinetuneConfig, OptimizerConfig, TaskConfig, recipe

TASKS = ("sst2", "cola", "mrpc", "stsb", "rte")


def get_config(argument: str = "task=sst2") -> ml_collections.ConfigDict:
    name = argument.removeprefix("task=")
    if name not in TASKS:
        raise UserError(
            f"configs/glue.py:{argument}: no such task; use configs/glue.py:task=NAME, one of {', '.join(TASKS)}"
        )
    return recipe(
        FinetuneConfig(
            task=TaskConfig(name=name, max_length=128),
            optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=-1),  # -1: a tenth of the steps
            batch_size=32,
            epochs=3.0,
        )
    )
