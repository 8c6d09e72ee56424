r"""Tasks of SuperGLUE by the class of a text or a pair: boolq, cb, rte or wic.

    bert-jax finetune --config superglue:task=boolq --workdir runs/boolq \
        --config.init_from=CHECKPOINT --config.task.data_dir=SUPERGLUE

SUPERGLUE is the folder with BoolQ/, CB/, RTE/ and WiC/, each with train.jsonl, val.jsonl and test.jsonl as
super.gluebenchmark.com provides them; a clone of the Hugging Face data set, or tfds: (data that TensorFlow Datasets has
prepared). Results call rte superglue_rte: it has the texts of GLUE's rte in another layout. wic asks whether a word has
the same sense in two sentences; markers surround it in both ("to my * place * later"), so the head is that of any pair.
--config.task.submission=DIR also writes the leaderboard's files, DIR/BoolQ.jsonl and so on.

Hardware  any; one accelerator for BERT-Large
Hours     not measured here
Expected  published test scores of BERT-Large, cased (Wang et al. 2019b, table 3); not measured here, because the
          data are not available; dev scores are not comparable. The layouts are tested

          | task  | metric             | BERT-Large  | most frequent class |
          | boolq | accuracy           | 77.4        | 62.3                |
          | cb    | macro F1, accuracy | 75.7, 83.6  | 21.7, 48.4          |
          | rte   | accuracy           | 71.7        | 50.3                |
          | wic   | accuracy           | 69.6        | 50.0                |

Source    Wang et al. 2019b, section 5.1: rate 1e-5, at most 10 epochs, the best by dev; here all 10 are run. Batch 16
          and the row lengths are chosen here from the lengths of the texts. The paper's wic baseline also reads the
          vectors of the two words
"""

import ml_collections

from bert_jax.config import AdamW, AutoTaskConfig, FinetuneConfig, LinearSchedule, recipe
from bert_jax.errors import UserError

# The task's name, and its longest rows: passages are long, pairs of sentences are not.
TASKS = {"boolq": ("boolq", 256), "cb": ("cb", 256), "rte": ("superglue_rte", 256), "wic": ("wic", 128)}


def get_config(argument: str = "task=boolq") -> ml_collections.ConfigDict:
    name = argument.removeprefix("task=")
    if name not in TASKS:
        raise UserError(f"superglue: unknown task {argument}; use task=NAME, NAME one of {', '.join(TASKS)}")
    task_name, max_length = TASKS[name]
    return recipe(
        FinetuneConfig(
            task=AutoTaskConfig(name=task_name, max_length=max_length),
            optimizer=AdamW(learning_rate=1e-5, schedule=LinearSchedule(warmup_steps=-1)),  # -1: a tenth of the steps
            batch_size=16,
            epochs=10.0,
        )
    )
