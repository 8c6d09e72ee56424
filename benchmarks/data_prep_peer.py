"""The bare Hugging Face encoder on a text, for benchmarks.data_prep: prints {"tokens", "seconds"} as JSON.

    RAYON_NUM_THREADS=2 python -m benchmarks.data_prep_peer TEXT VOCABULARY

Only encode_batch_fast is timed: not reading the text, not splitting it into lines, and nothing is written.
"""

import json
import sys
import time
from pathlib import Path

from bert_jax.tokenization import wordpiece
from bert_jax.tokenization.wordpiece import library_tokenizer

LINES_TOGETHER = 4096


def main() -> None:
    text, vocabulary = map(Path, sys.argv[1:])
    library = library_tokenizer(wordpiece.from_lines(vocabulary, {}, None))
    lines = [line for line in text.read_text(encoding="utf-8").split("\n") if line]
    tokens = 0
    started = time.monotonic()
    for start in range(0, len(lines), LINES_TOGETHER):
        encodings = library.encode_batch_fast(lines[start : start + LINES_TOGETHER], add_special_tokens=False)
        tokens += sum(map(len, encodings))
    print(json.dumps({"tokens": tokens, "seconds": time.monotonic() - started}))


if __name__ == "__main__":
    main()
