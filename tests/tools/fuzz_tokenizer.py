"""Compares ids with the libraries' on random texts, and on every line of a folder of texts, for every kind.

    PYTHONPATH=.:tests python tests/tools/fuzz_tokenizer.py --count 1000000 --folder TEXTS --kinds bpe unigram

The tokenizers are trained on --folder's files (their beginnings) or, without one, on the sample. Prints a line for each
kind; exits with 1 at the first difference.
"""

import argparse
import lzma
import sys
import tempfile
import time
from pathlib import Path

from tokenizer_kinds import KINDS, make, random_texts

from bert_jax import tokenizer

ROOT = Path(__file__).parent.parent.parent
TOGETHER = 20_000
TRAINING_CHARACTERS = 60_000  # of each file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50_000, help="random texts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="of .txt.xz files, compared whole")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    flags = parser.parse_args()
    files = sorted((flags.folder or ROOT / "data_prep" / "sample" / "books").glob("*.txt.xz"))
    texts = [lzma.decompress(file.read_bytes()).decode() for file in files]
    training = [line for text in texts for line in text[:TRAINING_CHARACTERS].split("\n")]
    for kind in flags.kinds:
        with tempfile.TemporaryDirectory() as folder:
            library = make(kind, training, Path(folder))
            ours = tokenizer.load(folder)
        started, compared, tokens = time.process_time(), 0, 0
        for block in blocks(texts if flags.folder else [], flags.count, flags.seed):
            ids, offsets = ours.encode_many(block)
            for text, start, end, expected in zip(block, offsets, offsets[1:], library(block), strict=False):
                if ids[start:end].tolist() != expected:
                    sys.exit(
                        f"{kind}: {text!a}\nours    {ours.tokens(ids[start:end])}\nlibrary {ours.tokens(expected)}"
                    )
            compared, tokens = compared + len(block), tokens + len(ids)
        seconds = time.process_time() - started
        print(f"{kind}: {compared:,} texts, {tokens:,} tokens, all equal, {seconds:.0f} s", flush=True)


def blocks(texts: list[str], count: int, seed: int):
    for text in texts:
        yield text.split("\n")
    for block in range(-(-count // TOGETHER)):
        yield random_texts(seed * 1_000_000 + block, min(TOGETHER, count - block * TOGETHER))


if __name__ == "__main__":
    main()
