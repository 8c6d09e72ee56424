"""Answers that are part of a text: squad1, squad2 (some questions have no answer), or new_wiki.

    bert-jax finetune --config squad:task=squad1 --workdir runs/squad --config.init_from=CHECKPOINT

squad1 reads train-v1.1.json and dev-v1.1.json, squad2 train-v2.0.json and dev-v2.0.json, new_wiki the questions of
SQuADShifts on other Wikipedia articles (squadshifts_new_wiki.json) and dev-v1.1.json; also .xz, .gz and .zst. Without
SQuAD's training file, `python -m benchmarks.scores --split_squad` splits its dev file by article. The files are
searched in --config.task.data_dir, $BERT_JAX_DATA and its folder squad/. The recipe own with
--config.task=question reads your own files, in SQuAD's JSON or with a question, a context and answers per line
(.jsonl).

A long text is read in windows: task.max_length pieces each, with the question (cut to task.max_query_length), every
task.doc_stride. Answers are exact parts of the text, of up to task.max_answer_length pieces. For squad2, the checkpoint
stores the no-answer threshold with the best F1 on dev.

Hardware  any; one accelerator for BERT-Base, a CPU for small models
Hours     published: about half an hour on a Cloud TPU, a few hours on a GPU (Devlin et al. 2019, section 3.2); not
          measured here
Expected  published, on dev; not measured here

          | task   | metric           | Base        | Large       |
          | squad1 | exact match / F1 | 80.8 / 88.5 | 84.1 / 90.9 |  Devlin et al. 2019, table 2
          | squad2 | exact / F1       |             | 78.7 / 81.9 |  table 3

Source    Devlin et al. 2019, section 4.2: batch 32, 3 epochs, 5e-5 (squad1); section 4.3: batch 48, 2 epochs, 5e-5
          (squad2); windows and lengths as run_squad.py of google-research/bert
"""

import ml_collections

from bert_jax.config import AdamW, FinetuneConfig, LinearSchedule, QuestionConfig, recipe
from bert_jax.errors import UserError

TASKS = ("squad1", "squad2", "new_wiki")


def get_config(argument: str = "task=squad1") -> ml_collections.ConfigDict:
    name = argument.removeprefix("task=")
    if name not in TASKS:
        raise UserError(f"squad: unknown task {argument}; use task=NAME, NAME one of {', '.join(TASKS)}")
    return recipe(
        FinetuneConfig(
            task=QuestionConfig(name=name, max_length=384),
            optimizer=AdamW(learning_rate=5e-5, schedule=LinearSchedule(warmup_steps=-1)),  # -1: a tenth of the steps
            batch_size=48 if name == "squad2" else 32,
            epochs=2.0 if name == "squad2" else 3.0,
        )
    )
