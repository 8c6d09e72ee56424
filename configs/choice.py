"""Multiple choice: swag (which sentence goes on), copa (cause or effect, of SuperGLUE), or items of your own.

    python -m bert_jax.finetune --config configs/choice.py:task=swag --workdir runs/swag --config.init_from=CHECKPOINT
    python -m bert_jax.finetune --config configs/choice.py:task=own --workdir runs/own --config.init_from=CHECKPOINT \\
        --config.task.train=train.csv --config.task.dev=dev.csv --config.task.text=context \\
        --config.task.choices=one,two,three --config.task.label=right

swag is looked for in --config.task.data_dir, or in $BERT_JAX_DATA and its swag/ (train.csv, val.csv of
https://github.com/rowanz/swagaf); copa in superglue/COPA (train.jsonl, val.jsonl). Of your own, task.choices names the
columns of the choices (an empty one is none) or, in JSON lines, one that holds a list of texts; task.text_pair what
every choice starts with; task.label a place from 0, a letter from A, or the text of the right choice. A batch of 16
items of 4 choices is 64 sequences, each of up to task.max_length tokens.

Hardware  any; by BERT-Base one accelerator, by small models a CPU
Hours     not measured by us
Expected  published accuracy of BERT-Base and BERT-Large: swag, dev 81.6 and 86.6, Large on test 86.3 (Devlin et al.
          2019, table 4); copa, Large on test 70.6 (Wang et al. 2019b, table 3). Neither is measured by us
Source    swag: Devlin et al. 2019, section 4.4: batch 16, 3 epochs, rate 2e-5; copa: Wang et al. 2019b, section 5: rate
          1e-5, up to 10 epochs
"""

import ml_collections

from bert_jax.command import UserError
from bert_jax.config import FinetuneConfig, OptimizerConfig, TaskConfig, recipe

EPOCHS_AND_RATES = {"swag": (3.0, 2e-5), "copa": (10.0, 1e-5), "own": (3.0, 2e-5)}


def get_config(argument: str = "task=swag") -> ml_collections.ConfigDict:
    name = argument.removeprefix("task=")
    if name not in EPOCHS_AND_RATES:
        raise UserError(
            f"configs/choice.py:{argument}: no such task; use configs/choice.py:task=NAME, one of "
            f"{', '.join(EPOCHS_AND_RATES)}"
        )
    epochs, rate = EPOCHS_AND_RATES[name]
    return recipe(
        FinetuneConfig(
            task=TaskConfig(kind="choice") if name == "own" else TaskConfig(name=name, max_length=128),
            optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=-1),  # -1: a tenth of the steps
            batch_size=16,
            epochs=epochs,
        )
    )
