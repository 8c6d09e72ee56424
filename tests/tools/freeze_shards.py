"""The inputs and the items of the group shards, for freeze.py."""

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from typing import Any

from freeze_sandbox import Sandbox, hashes, sha256

BOOKS = ("irving_rip_van_winkle", "dickens_a_christmas_carol")
PARAGRAPHS = 3  # of a document
DOCUMENTS = 60

TOKENIZERS = {
    "wordpiece": "--kind=wordpiece --vocab_size=500 --lowercase",
    "cased": "--vocab_size=600",
    "bpe": "--kind=bpe --vocab_size=500",
    "unigram": "--kind=unigram --vocab_size=400",
    "sentencepiece_bpe": "--kind=sentencepiece_bpe --vocab_size=400 --lowercase",
}

# The tokenizer, and the flags of build_examples in addition to input, output and tokenizer.
SHARDS = {
    "nsp": ("wordpiece", "--seq_len=32 --mask_unit=word --dupe_factor=2 --workers=2"),
    "packed": ("cased", "--seq_len=64 --objective=nsp --pack=4"),
    "static": ("wordpiece", "--seq_len=32 --masking=static --mask_rate=0.2 --seed=7"),
    "ngram": ("wordpiece", "--seq_len=48 --objective=sop --masking=static --mask_unit=ngram --workers=1"),
    "bpe": ("bpe", "--seq_len=32 --objective=full_sentences --random_tokens=unigram"),
    "sentences": ("unigram", "--seq_len=32 --objective=doc_sentences --pack=3 --mask_unit=word"),
    "span": ("cased", "--seq_len=32 --objective=single --mask_unit=span"),
    "span_static": ("cased", "--seq_len=32 --objective=single --mask_unit=span --masking=static --dupe_factor=2"),
    "reordered": ("sentencepiece_bpe", "--seq_len=32 --objective=single --masking=static --reorder_rate=0.1"),
    "corrupted": ("wordpiece", "--seq_len=32 --delete_rate=0.05 --insert_rate=0.05 --short_seq_prob=0.5"),
    "cached": ("wordpiece", "--seq_len=32 --mask_unit=word --dupe_factor=2 --token_cache=shards/cache"),
}
TOKENIZER = "--tokenizer=shards/tokenizer_wordpiece"
MIXED = "--seq_len=32 --weights=1,0.5 --dedup --on_error=skip --objective=full_sentences --eval_fraction=0"


def write_text(sandbox: Sandbox) -> dict[str, str]:
    """Writes the small corpora from the sample text of the checkout; returns their hashes."""
    paragraphs: list[str] = []
    for book in BOOKS:
        packed = (sandbox.checkout / "data_prep" / "sample" / "books" / f"{book}.txt.xz").read_bytes()
        paragraphs += [line for line in lzma.decompress(packed).decode("utf-8").split("\n") if line]
    starts = range(0, DOCUMENTS * PARAGRAPHS, PARAGRAPHS)
    documents = ["\n".join(paragraphs[start : start + PARAGRAPHS]) for start in starts]
    folder = sandbox.work / "shards"
    plain = ("\n\n".join(documents) + "\n").encode("utf-8")
    # The same document twice, for --dedup, and a line that is not JSON, for --on_error.
    lines = [json.dumps({"text": one}) for one in (*documents[:20], documents[3])]
    (folder / "text.txt").write_bytes(plain)
    (folder / "more.jsonl.gz").write_bytes(gzip.compress("\n".join([*lines, "{"]).encode("utf-8"), mtime=0))
    return {"text.txt": sha256(plain), "more.jsonl": sha256("\n".join(lines).encode("utf-8"))}


def items(sandbox: Sandbox) -> Iterator[tuple[str, Callable[[], Any]]]:
    work = sandbox.work

    def tokenizer(name: str, flags: str) -> Any:
        output = f"shards/tokenizer_{name}"
        sandbox.run("train-tokenizer", "--input=shards/text.txt", f"--output={output}", *flags.split())
        return hashes(work / output)

    def build(name: str, words: str, flags: str, text: str = "shards/text.txt") -> Any:
        output = f"shards/{name}"
        files = (f"--input={text}", f"--tokenizer=shards/tokenizer_{words}", f"--output={output}", "--unit_mb=0.05")
        held_out = () if "eval_fraction" in flags else ("--eval_fraction=0.2",)
        sandbox.run("build-examples", *files, *held_out, *flags.split())
        return hashes(work / output)

    def copied() -> Any:
        sandbox.run("copy-examples", "--input=shards/nsp", "--output=shards/copied")
        return hashes(work / "shards" / "copied")

    yield "text", lambda: write_text(sandbox)
    for name, flags in TOKENIZERS.items():
        yield f"tokenizer_{name}", lambda name=name, flags=flags: tokenizer(name, flags)
    for name, (words, flags) in SHARDS.items():
        yield name, lambda name=name, words=words, flags=flags: build(name, words, flags)
    yield "mixed", lambda: build("mixed", "bpe", MIXED, "shards/text.txt,shards/more.jsonl.gz")
    yield "copied", copied
    yield (
        "inspected",
        lambda: [
            sandbox.attempt("inspect-shards", f"shards/{name}", "--verify").returncode
            for name in ("nsp", "ngram", "sentences", "mixed")
        ],
    )
