"""Classes and scores of texts and pairs, the nine tasks of GLUE: sst2, cola, mrpc, stsb, qqp, mnli, qnli, rte or wnli.

    bert-jax finetune --config glue:task=sst2 --workdir runs/sst2 --config.init_from=CHECKPOINT

The files (SST-2/train.tsv and so on; also .xz, .gz and .zst) are searched in --config.task.data_dir, $BERT_JAX_DATA and
its folder glue/. data_dir may also be a clone of the Hugging Face data set, or tfds: (data that TensorFlow Datasets has
prepared in TFDS_DATA_DIR). --config.task.train=FILE and --config.task.dev=FILE name files of the same layout, such as
the four columns of an MNLI subset. --config.seeds=5 trains five times, because scores of the small tasks vary by points
between seeds. --config.task.submission=DIR also writes the leaderboard's files (DIR/SST-2.tsv and so on).

mnli is evaluated on dev_matched.tsv under plain metric names and on dev_mismatched.tsv as dev_mismatched_accuracy. The
diagnostic set (AX: diagnostic/diagnostic.tsv next to MNLI/) has no training files: the mnli model answers it, and if it
has labels (diagnostic-full.tsv) it is evaluated (ax_matthews_correlation). Published RTE, MRPC and STS-B scores often
start from a model fine-tuned on MNLI: --config.init_from=runs/mnli does that, and result.json records it under `start`.

Hardware  any; one accelerator for BERT-Base, a CPU for small models
Hours     published: at most one on a Cloud TPU, a few on a GPU (Devlin et al. 2019, section 3.2); not measured here
Expected  published test scores of BERT-Base and BERT-Large (Devlin et al. 2019, table 1); not measured here, and a
          score on dev is not the same number

          | task | metric                          | Base       | Large      |
          | sst2 | accuracy                        | 93.5       | 94.9       |
          | cola | Matthews correlation            | 52.1       | 60.5       |
          | mrpc | F1                              | 88.9       | 89.3       |
          | stsb | Spearman correlation            | 85.8       | 86.5       |
          | qqp  | F1                              | 71.2       | 72.1       |
          | mnli | accuracy, matched / mismatched  | 84.6, 83.4 | 86.7, 85.9 |
          | qnli | accuracy                        | 90.5       | 92.7       |
          | rte  | accuracy                        | 66.4       | 70.1       |
          | wnli | accuracy                        | left out there: the most frequent class has 65.1    |

Source    Devlin et al. 2019, section 4.1: batch 32, 3 epochs, the best of the rates 5e-5, 4e-5, 3e-5 and 2e-5 by dev
          (here 3e-5; for another set --config.optimizer.learning_rate); dropout 0.1; Adam as in appendix A.2,
          with the correction of its moments that the code of then left out (Zhang et al. 2021, section 4)
"""

import ml_collections

from bert_jax.config import AdamW, AutoTaskConfig, FinetuneConfig, LinearSchedule, recipe
from bert_jax.errors import UserError

TASKS = ("sst2", "cola", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")


def get_config(argument: str = "task=sst2") -> ml_collections.ConfigDict:
    name = argument.removeprefix("task=")
    if name == "ax":
        raise UserError("glue:ax has no training files. Use glue:task=mnli, whose model answers it")
    if name not in TASKS:
        raise UserError(f"glue: unknown task {argument}; use task=NAME, NAME one of {', '.join(TASKS)}")
    return recipe(
        FinetuneConfig(
            task=AutoTaskConfig(name=name, max_length=128),
            optimizer=AdamW(learning_rate=3e-5, schedule=LinearSchedule(warmup_steps=-1)),  # -1: a tenth of the steps
            batch_size=32,
            epochs=3.0,
        )
    )
