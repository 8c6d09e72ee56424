r"""Multiple choice: swag (which sentence follows), copa (cause or effect, from SuperGLUE), or your own items.

    bert-jax finetune --config choice:task=swag --workdir runs/swag --config.init_from=CHECKPOINT
    bert-jax finetune --config choice:task=own --workdir runs/own --config.init_from=CHECKPOINT \
        --config.task.train=train.csv --config.task.dev=dev.csv --config.task.text=context \
        --config.task.choices=one,two,three --config.task.label=right

The files of swag are searched in --config.task.data_dir, $BERT_JAX_DATA and its folder swag/ (train.csv, val.csv of
https://github.com/rowanz/swagaf), those of copa in superglue/COPA (train.jsonl, val.jsonl). For your own items,
task.choices names the columns of the choices (an empty field is no choice) or, in JSON lines, one column with a list of
texts; task.text_pair names the common beginning of all choices; task.label is the text of the correct choice (where all
labels of the training file are), an index from 0, which numbers of JSON and Parquet always are, or a letter from A. A
batch of 16 items of 4 choices has 64 sequences of up to task.max_length tokens each.

Hardware  any; one accelerator for BERT-Base, a CPU for small models
Hours     not measured here
Expected  published accuracy of BERT-Base and BERT-Large: swag, dev 81.6 and 86.6, Large on test 86.3 (Devlin et al.
          2019, table 4); copa, Large on test 70.6 (Wang et al. 2019b, table 3). Neither is measured here
Source    swag: Devlin et al. 2019, section 4.4: batch 16, 3 epochs, rate 2e-5; copa: Wang et al. 2019b, section 5: rate
          1e-5, up to 10 epochs
"""

import ml_collections

from bert_jax.config import AdamW, ChoiceConfig, FinetuneConfig, LinearSchedule, recipe
from bert_jax.errors import UserError

EPOCHS_AND_RATES = {"swag": (3.0, 2e-5), "copa": (10.0, 1e-5), "own": (3.0, 2e-5)}


def get_config(argument: str = "task=swag") -> ml_collections.ConfigDict:
    name = argument.removeprefix("task=")
    if name not in EPOCHS_AND_RATES:
        raise UserError(f"choice: unknown task {argument}; use task=NAME, NAME one of {', '.join(EPOCHS_AND_RATES)}")
    epochs, rate = EPOCHS_AND_RATES[name]
    return recipe(
        FinetuneConfig(
            task=ChoiceConfig() if name == "own" else ChoiceConfig(name=name, max_length=128),
            optimizer=AdamW(learning_rate=rate, schedule=LinearSchedule(warmup_steps=-1)),  # -1: a tenth of the steps
            batch_size=16,
            epochs=epochs,
        )
    )
