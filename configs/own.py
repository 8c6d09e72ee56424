r"""A task of your own: texts or pairs in a table, or tagged words in CoNLL columns or CoNLL-U.

    bert-jax finetune --config own --train train.tsv --dev dev.tsv --text review --label stars --model CHECKPOINT \
        --output runs/stars

The file name determines the format: .csv (quoted as in RFC 4180), .jsonl (one object per line), .json (the same, or a
list of objects), .parquet, tfds:NAME[:SPLIT] (data that TensorFlow Datasets has prepared in TFDS_DATA_DIR); any other
file is a TSV, with one example per line and fields separated by one tab, never quoted. Text files may be compressed
(.gz, .xz, .zst).
task.text, task.text_pair and task.label name columns of the header line or, if all are numbers from 0, columns of a TSV
or CSV without a header. Labels are those of the training file; with --config.task=regression they are numbers. In
JSON lines, Parquet and prepared data, numbers become the class names that the file defines. A file whose labels are all
empty (in these formats also null or -1) is unlabelled.

A file that ends in .conllu, .conll, .iob, .iob2 or .bio (or any file with --config.task=tagging) contains tagged
words. CoNLL-U uses FORM and UPOS unless task.text and task.label name other fields (--config.task.label=XPOS); CoNLL
columns use the first and the last unless these keys give numbers. Tags such as B-PER and I-PER are evaluated by entity.
The recipe tagging describes tables of words, and entities by their characters.

Without --dev, a tenth of the rows (task.dev_share) is held out of the training file by a hash of the text.

SQuAD's JSON (.json), and tables of question, context and answers with --config.task=question, contain questions
whose answer is a part of a text; the recipe squad describes the options.

With --config.task=multilabel, a text may have any number of labels: a list, a text with commas between them or
with a list ("['a', 'b']"), or several columns of 1 and 0 (--config.task.label=toxic,insult).

With --config.task=token_regression, the label of a word is a number, or - or _ for none. JSON lines may also have
words as lists: {"tokens": [...], "labels": [...]}. For multiple choice see the recipe choice.

--config.task.truncation=right    a text over task.max_length loses its end; or left, middle; or nothing: windows and
                                  windows_max train on all parts, and answer with the mean or maximum of theirs

Hardware  any; one accelerator for BERT-Base, a CPU for small models
Hours     not measured here
Expected  depends on the data
Source    Devlin et al. 2019, appendix A.3: batch 16 or 32, learning rate 2e-5 to 5e-5, 2 to 4 epochs
"""

import ml_collections

from bert_jax.config import AdamW, FinetuneConfig, LinearSchedule, recipe


def get_config() -> ml_collections.ConfigDict:
    return recipe(
        FinetuneConfig(
            optimizer=AdamW(learning_rate=3e-5, schedule=LinearSchedule(warmup_steps=-1)),  # -1: a tenth of the steps
            batch_size=32,
            epochs=3.0,
        )
    )
