"""Compares token ids with those of the libraries on random texts and on every line of a folder, for every kind.

    PYTHONPATH=.:tests python tests/tools/fuzz_tokenizer.py --count 1000000 --folder TEXTS --kinds bpe unigram

The tokenizers are trained on the beginnings of --folder's files or, without --folder, on the sample. Prints a line per
kind, and exits with 1 at the first difference.
"""

import argparse
import lzma
import sys
import tempfile
import time
from pathlib import Path

from tokenizer_kinds import KINDS, make, random_texts

from bert_jax.tokenization import tokenizer

ROOT = Path(__file__).parent.parent.parent
BLOCK_SIZE = 20_000
TRAINING_CHARACTERS = 60_000  # per file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50_000, help="number of random texts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="a folder of .txt.xz files to compare completely")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    flags = parser.parse_args()
    files = sorted((flags.folder or ROOT / "data_prep" / "sample" / "books").glob("*.txt.xz"))
    texts = [lzma.decompress(file.read_bytes()).decode() for file in files]
    training = [line for text in texts for line in text[:TRAINING_CHARACTERS].split("\n")]
    for kind in flags.kinds:
        with tempfile.TemporaryDirectory() as folder:
            library = make(kind, training, Path(folder))
            loaded = tokenizer.load(folder)
        started, compared, tokens = time.process_time(), 0, 0
        for block in blocks(texts if flags.folder else [], flags.count, flags.seed):
            ids, offsets = loaded.encode_many(block)
            for text, start, end, expected in zip(block, offsets, offsets[1:], library(block), strict=False):
                if ids[start:end].tolist() != expected:
                    sys.exit(
                        f"{kind}: {text!a}\nbert_jax {loaded.tokens(ids[start:end])}\n"
                        f"library  {loaded.tokens(expected)}"
                    )
            compared, tokens = compared + len(block), tokens + len(ids)
        seconds = time.process_time() - started
        print(f"{kind}: {compared:,} texts, {tokens:,} tokens, all equal, {seconds:.0f} s", flush=True)


def blocks(texts: list[str], count: int, seed: int):
    for text in texts:
        yield text.split("\n")
    for block in range(-(-count // BLOCK_SIZE)):
        yield random_texts(seed * 1_000_000 + block, min(BLOCK_SIZE, count - block * BLOCK_SIZE))


if __name__ == "__main__":
    main()
