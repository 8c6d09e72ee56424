"""Writes tests/testdata/original_bert: rows made by google-research/bert, and their content as read by TensorFlow.

    python tests/tools/make_original_tfrecord.py --script DIR_OF_create_pretraining_data.py

It needs TensorFlow and a copy of google-research/bert, so no test runs it. The text consists of the beginnings of
chapters of the sample; bert-jax train-tokenizer trains the vocabulary on it.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from data_prep import readers, train_tokenizer
from data_prep.sentences import document_sentences
from data_prep.train_tokenizer import TokenizerOptions

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "tests" / "testdata" / "original_bert"
LENGTH, PREDICTIONS = 48, 8
CHAPTERS, SENTENCES = 6, 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", type=Path, required=True)
    script = parser.parse_args().script
    FOLDER.mkdir(exist_ok=True)
    book = readers.expand(str(ROOT / "data_prep" / "sample" / "books" / "*.txt.xz"))[0]
    chapters = [document_sentences(text)[:SENTENCES] for text in readers.documents(book) if len(text) > 5000]
    text = FOLDER / "text.txt"
    text.write_text("\n\n".join("\n".join(chapter) for chapter in chapters[:CHAPTERS]) + "\n", encoding="utf-8")
    train_tokenizer.train(TokenizerOptions(text, FOLDER / "vocab", vocab_size=600, lowercase=True))
    (FOLDER / "vocab" / "vocab.txt").rename(FOLDER / "vocab.txt")
    sys.modules["tensorflow"] = tf.compat.v1  # the script was written for TensorFlow 1
    sys.path.insert(0, str(script))
    sys.argv[1:] = [
        f"--input_file={text}",
        f"--output_file={FOLDER / 'rows.tfrecord'}",
        f"--vocab_file={FOLDER / 'vocab.txt'}",
        "--do_lower_case=True",
        f"--max_seq_length={LENGTH}",
        f"--max_predictions_per_seq={PREDICTIONS}",
        "--dupe_factor=1",
        "--do_whole_word_mask=True",
    ]
    try:
        runpy.run_path(str(script / "create_pretraining_data.py"), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, ended
    np.savez_compressed(FOLDER / "fields.npz", **fields(FOLDER / "rows.tfrecord"))
    for path in (text, *(FOLDER / "vocab").iterdir()):
        os.remove(path)
    (FOLDER / "vocab").rmdir()


def fields(path: Path) -> dict[str, np.ndarray]:
    """Returns the content of the file according to TensorFlow's parser."""
    integers = dict.fromkeys(("input_ids", "input_mask", "segment_ids"), LENGTH)
    integers |= {"masked_lm_positions": PREDICTIONS, "masked_lm_ids": PREDICTIONS, "next_sentence_labels": 1}
    layout = {name: tf.io.FixedLenFeature([width], tf.int64) for name, width in integers.items()}
    layout["masked_lm_weights"] = tf.io.FixedLenFeature([PREDICTIONS], tf.float32)
    records = tf.data.TFRecordDataset(str(path)).map(lambda record: tf.io.parse_single_example(record, layout))
    examples = list(records.as_numpy_iterator())
    return {name: np.stack([example[name] for example in examples]) for name in layout}


if __name__ == "__main__":
    main()
