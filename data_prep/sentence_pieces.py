"""Learns a SentencePiece vocabulary (Kudo and Richardson 2018) with the sentencepiece library, from word counts.

Kinds: unigram (Kudo 2018; XLM-R and ALBERT use it) and sentencepiece_bpe. The library's trainer is a function of its
input and options if its number of threads is fixed, its input is sorted, and its own random sampling is not used.
It reads words with counts (its TSV format), so its memory and time depend only on the number of distinct words.
It runs in a separate process, whose log shows its progress.

The model numbers its pieces like the library (<unk> <s> </s>, then its own); the tokenizer numbers them like XLM-R:
<s> <pad> </s> <unk>, the model's own, and <mask> last.
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from bert_jax.command import UserError
from data_prep import counting

BEGINNING = "\u2581"  # marks the beginning of a word
MODEL_TYPES = {"unigram": "unigram", "sentencepiece_bpe": "bpe"}
# <pad> and <mask>, which are not pieces of the model.
ADDED_TOKENS = 2
# Fixed, because sums of floats depend on the number of threads.
_THREADS = 8
_TRAIN = "import json, sys, sentencepiece; sentencepiece.SentencePieceTrainer.train(**json.load(sys.stdin))"
# Characters that TSV cannot hold and that the library's clean-up drops.
_CONTROL = dict.fromkeys([*range(0x20), 0x7F])


class SentencePieceSplitter:
    """Words are chunks between white space, with SentencePiece's mark of the beginning; the library does the rest.

    A chunk keeps its punctuation: the library's Unigram makes a candidate of every string that two chunks share.
    """

    def chunks(self, text: str) -> list[str]:
        return text.split()

    def words(self, chunk: str) -> Iterator[str]:
        first, *others = counting.windows(chunk)
        yield BEGINNING + first
        yield from others

    def unknown(self, chunk: str) -> int:
        return 0


def learn(
    word_counts: Mapping[str, int],
    vocab_size: int,
    *,
    kind: str,
    lowercase: bool = False,
    character_coverage: float = counting.CHARACTER_COVERAGE,
    on_share: Callable[[float], None] = lambda share: None,
) -> bytes:
    """Learns from the counts of SentencePieceSplitter's words; returns the model as the library's protocol buffer.

    It has fewer pieces than `vocab_size` if the text gives no more. `on_share` gets the approximate share of the work
    that is done. Raises UserError if the characters alone do not fit, and if the library fails.
    """
    if vocab_size <= 3 + ADDED_TOKENS:
        raise UserError(f"--vocab_size {vocab_size} is too small for the special tokens. Use more, for example 8192")
    with tempfile.TemporaryDirectory() as folder:
        table, prefix = Path(folder) / "words.tsv", Path(folder) / "trained"
        with table.open("w", encoding="utf-8", newline="\n") as file:
            for word in sorted(word_counts):
                if cleaned := word.translate(_CONTROL):
                    file.write(f"{cleaned}\t{word_counts[word]}\n")
        options = {
            "input": str(table),
            "input_format": "tsv",
            "model_prefix": str(prefix),
            "model_type": MODEL_TYPES[kind],
            "vocab_size": vocab_size - ADDED_TOKENS,
            "hard_vocab_limit": False,
            "character_coverage": character_coverage,
            "normalization_rule_name": "nmt_nfkc_cf" if lowercase else "nmt_nfkc",
            "add_dummy_prefix": False,  # the words have it already, and
            "remove_extra_whitespaces": False,  # this would remove it
            "num_threads": _THREADS,
        }
        _run(options, vocab_size, on_share)
        return _finished(prefix.with_suffix(".model").read_bytes())


def _run(options: dict[str, object], vocab_size: int, on_share: Callable[[float], None]) -> None:
    """Runs the library's trainer in a separate process, because it may terminate the process on errors.

    Its log tells the progress and, in the last line, the error.
    """
    most_pieces, last = vocab_size, "no message"
    with subprocess.Popen([sys.executable, "-c", _TRAIN], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        try:
            process.stdin.write(json.dumps(options).encode())
            process.stdin.close()
            for line in process.stderr:
                last = line.decode("utf-8", "replace").strip() or last
                if merged := re.search(r"Merged: .*merges=(\d+)", last):
                    on_share(min(1.0, int(merged[1]) / vocab_size))
                elif pruned := re.search(r"EM sub_iter=\d+ size=(\d+)", last):
                    # Each round keeps the same share of the pieces and takes about the same time.
                    pieces = max(int(pruned[1]), vocab_size)
                    most_pieces = max(most_pieces, pieces)
                    if pieces < most_pieces:
                        on_share(1 - math.log(pieces / vocab_size) / math.log(most_pieces / vocab_size))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise _error(last, vocab_size)


def _error(last: str, vocab_size: int) -> UserError:
    """Turns the last line of the log into an error that says what to change."""
    if sizes := re.search(r"smaller than required_chars. (\d+) vs (\d+)", last):
        needed = int(sizes[2]) + ADDED_TOKENS
        return UserError(
            f"--vocab_size {vocab_size} is too small: the special tokens and the characters of the text "
            f"already take {needed}. Use more, for example --vocab_size {max(8192, 4 * needed)}"
        )
    return UserError(f"the sentencepiece library failed: {last}. Use more text, or another --vocab_size")


def _finished(model: bytes) -> bytes:
    """Restores the model's own handling of word beginnings, and removes the paths of the training files."""
    messages: Any = sentencepiece_model_pb2  # its classes are created at import
    proto = messages.ModelProto.FromString(model)
    proto.trainer_spec.ClearField("input")
    proto.trainer_spec.ClearField("model_prefix")
    proto.normalizer_spec.add_dummy_prefix = True
    proto.normalizer_spec.remove_extra_whitespaces = True
    return bytes(proto.SerializeToString(deterministic=True))
