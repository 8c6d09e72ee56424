"""A task of your own: texts or pairs in a table, or tagged words in CoNLL columns or CoNLL-U.

    python -m bert_jax.finetune --config configs/own.py --workdir runs/stars --config.init_from=CHECKPOINT \\
        --config.task.train=train.tsv --config.task.dev=dev.tsv --config.task.text=review --config.task.label=stars

What a table is, its ending says: .csv (quoted where needed, as RFC 4180 has it), .jsonl (an object a line), .parquet,
tfds:NAME[:SPLIT] (data that TensorFlow Datasets has prepared, in TFDS_DATA_DIR); any other is a TSV, one example a
line, fields parted by one tab and never quoted. Text may be compressed (.gz, .xz, .zst). task.text, task.text_pair and
task.label name columns of the header line, or, when all are numbers from 0, columns of a TSV or CSV without a header.
Labels are those of the training file; with --config.task.kind=regression they are numbers. In JSON lines, Parquet and
prepared data numbers become the names that the file gives its classes. A file whose labels are all empty (there also
null or -1) is unlabelled.

A file that ends in .conllu, .conll, .iob, .iob2 or .bio (or any with --config.task.kind=tagging) holds tagged words:
of CoNLL-U FORM and UPOS unless task.text and task.label name others (--config.task.label=XPOS), of columns the first
and the last unless they give numbers. Tags like B-PER and I-PER are measured by whole entities.

SQuAD's JSON (.json) holds questions whose answer is a part of a text, as do tables of question, context and answers
with --config.task.kind=question; see configs/squad.py for what can be set.

With --config.task.kind=token_regression the label of a word is a number; - or _ stands where it has none. Words may
also be lists in JSON lines, {"tokens": [...], "labels": [...]}. Items of multiple choice: configs/choice.py.

Hardware  any; by BERT-Base one accelerator, by small models a CPU
Hours     not measured by us
Expected  depends on the data
Source    Devlin et al. 2019, appendix A.3: batch 16 or 32, rate 2e-5 to 5e-5, 2 to 4 epochs
"""

import ml_collections

from bert_jax.config import FinetuneConfig, OptimizerConfig, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        FinetuneConfig(
            optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=-1),  # -1: a tenth of the steps
            batch_size=32,
            epochs=3.0,
        )
    )
