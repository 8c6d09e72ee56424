"""What build_examples and merge_shards print about an output, or why a job made no rows."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.data.manifest import PAIRS, read_unigram_counts
from bert_jax.storage.local import as_typed
from bert_jax.tokenizer import Tokenizer
from data_prep.job import Job
from data_prep.objectives import fewest_documents
from data_prep.readers.reading import is_text
from data_prep.token_cache import TokenCache
from data_prep.unit_records import UnitRecord
from data_prep.units import TOO_FEW_FOR_EVAL, UnitSplitter

# Few articles, stories or chapters have one sentence, and many paragraphs.
_MANY_OF_ONE_SENTENCE = 0.2
_WORTH_A_LINE = 0.005  # below this share, 0% would be printed
_MANY_LONG_WORDS = 0.01
# Rare words alone never give this much; a vocabulary of another language, script or case does.
_MUCH_UNKNOWN = 0.2


def listed(skipped: Mapping[str, int]) -> str:
    """Counts of skipped documents by reason, in one line."""
    return ", ".join(f"{count} {reason}" for reason, count in skipped.items())


def why_no_rows(records: Sequence[UnitRecord]) -> str:
    """Explains why a corpus gives no training rows, and what to change."""
    skipped = {reason for record in records for reason in record.skipped}
    if "no_other_document" in skipped:
        return (
            "--input holds one document with tokens, and --objective nsp takes random segments from another one. "
            "Separate documents by blank lines, name the line that separates them (--document_separator), or use "
            "--objective full_sentences"
        )
    if "too_short" in skipped:
        return "every document of --input has one token, and --objective sop splits each in two. Use more text"
    return "no document of --input has a token: the tokenizer drops every character. Check both"


def print_summary(
    job: Job, manifest: dict[str, Any], splitter: UnitSplitter, megabytes: float, tokens: int, seconds: float
) -> None:
    """Prints a paragraph to stderr: rows, speed, what was skipped, and warnings.

    megabytes and tokens are those of this run, without the units that a resumed job found finished.
    """
    train, held_out = manifest["parts"]["train"], manifest["parts"]["eval"]
    lines = [
        f"{as_typed(str(job.output))}: {train['rows']} rows for training, {held_out['rows']} for evaluation, from "
        f"{splitter.documents} documents; {seconds:.1f} s, {megabytes / seconds:.1f} MB/s, "
        f"{tokens / 1e6 / seconds:.2f} M tokens/s",
        *output_lines(job.output, manifest, job.tokenizer, splitter.moved_to_train),
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)


def output_lines(output: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer, moved_to_train: int = 0) -> list[str]:
    """What was skipped in an output, and warnings about it.

    moved_to_train   documents chosen for eval that were too few for a part
    """
    skipped = manifest["counts"]["skipped"]
    return [
        *eval_lines(manifest, moved_to_train),
        *([f"skipped: {listed(skipped)}"] if skipped else []),
        *word_lines(manifest["counts"]),
        *document_lines(manifest),
        *separator_lines(manifest),
        *pair_lines(manifest["objective"], tokenizer),
        *copy_lines(manifest),
        *unknown_lines(output, manifest, tokenizer),
    ]


def eval_lines(manifest: Mapping[str, Any], moved_to_train: int = 0) -> list[str]:
    """Why no document is held out, and what to change."""
    eval_fraction = manifest["eval_fraction"]
    if not eval_fraction or manifest["parts"]["eval"]["documents"]:
        return []
    fewest, left_out = fewest_documents(manifest["objective"]), manifest["counts"]["skipped"].get(TOO_FEW_FOR_EVAL)
    if manifest["counts"]["documents"] - sum(manifest["skipped_reading"].values()) < 2 * fewest:
        return [f"nothing is held out for eval, which needs {2 * fewest} documents or more. Use more text"]
    if left_out:
        return [
            f"{left_out} document(s) chosen for eval are left out, because they are too few for a part. Raise "
            "--eval_fraction, or use more text"
        ]
    if moved_to_train >= fewest:
        return [f"all documents are in train, because --eval_fraction {eval_fraction} left too few for it. Lower it"]
    if moved_to_train:
        return [
            f"{moved_to_train} document(s) chosen for eval are in train, because they are too few for a part. Raise "
            "--eval_fraction, or use more text"
        ]
    return [f"no document was chosen for eval (--eval_fraction {eval_fraction}). Raise it, or use more text"]


def word_lines(counts: Mapping[str, Any]) -> list[str]:
    """The share of the words that masking as a whole can hardly ever choose, as a warning if it is large."""
    if not counts.get("words"):
        return []
    share = counts["long_words"] / counts["words"]
    stated = f"{share:.2%} of the words are longer than the mask budget of their sequence"
    if share <= _MANY_LONG_WORDS:
        return [stated]
    return [
        f"warning: {stated}, so their tokens are hardly ever predicted. Use --mask_unit token, or raise --mask_rate or "
        "--seq_len"
    ]


def document_lines(manifest: Mapping[str, Any]) -> list[str]:
    """The shares of documents of one sentence and of random pairs, as a warning if these are parts of documents.

    Nothing if there are no pairs and hardly any such documents.
    """
    counts = manifest["counts"]
    if not counts["used"] or "one_sentence" not in counts:
        return []
    alone = counts["one_sentence"] / counts["used"]
    random = counts.get("random_pairs", 0) / max(counts["sequences"], 1)
    stated = f"{alone:.0%} of the documents have one sentence"
    if "random_pairs" in counts:
        stated += f"; {random:.0%} of the pairs have a random segment (50% are intended)"
    if alone <= _MANY_OF_ONE_SENTENCE:
        return [stated] if alone >= _WORTH_A_LINE or "random_pairs" in counts else []
    chosen = manifest["reading"].get("input_format", "auto")
    if all(is_text(source["path"], chosen) for source in manifest["sources"]):
        advice = (
            "If blank lines separate the paragraphs of a file and not its documents, name the line that separates "
            "documents (--document_separator), use --document file, or remove blank lines within documents"
        )
    else:
        advice = (
            "If the records of --input are lines or paragraphs and not documents, join those of a document into one "
            "record"
        )
    return [f"warning: {stated}. {advice}"]


def separator_lines(manifest: Mapping[str, Any]) -> list[str]:
    """A warning if --document_separator separates nothing, as when it is misspelled."""
    separator, files = manifest["reading"].get("document_separator"), len(manifest["sources"])
    if not separator or manifest["counts"]["documents"] > files:
        return []
    return [f"warning: --document_separator {separator!r} separates nothing: each file of --input is one document"]


def pair_lines(objective: str, tokenizer: Tokenizer) -> list[str]:
    """A warning if fine-tuning puts more separators between two texts than the rows of this objective have."""
    if objective not in PAIRS or tokenizer.pair_separators == 1:
        return []
    cls, sep = tokenizer.roles.cls_token, tokenizer.roles.sep_token
    return [
        f"warning: rows are {cls} A {sep} B {sep}, but models of this vocabulary read pairs of texts with "
        f"{tokenizer.pair_separators} {sep} between them in fine-tuning. Use a --tokenizer with [CLS] and [SEP]: "
        "one of --kind wordpiece, or hf:albert/albert-base-v2"
    ]


def copy_lines(manifest: Mapping[str, Any]) -> list[str]:
    """A warning if the rows of a document are written more than once: nothing in the shards differs between them."""
    copies = manifest["dupe_factor"]
    differ = manifest["objective"] in PAIRS or manifest["masking"]["kind"] == "static" or manifest["pack"] > 1
    if copies == 1 or differ or any(manifest["corruption"].values()):
        return []
    return [
        f"warning: --dupe_factor {copies} wrote each row {copies} times. Masks are chosen in training, so more epochs "
        "give the same and need no disk space"
    ]


def unknown_lines(output: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> list[str]:
    """A warning if the vocabulary does not know much of the text."""
    share = unknown_share(output, manifest, tokenizer)
    if share <= _MUCH_UNKNOWN:
        return []
    return [
        f"warning: {share:.0%} of the text is {tokenizer.roles.unk_token}: does --tokenizer fit the language and the "
        "case of this text?"
    ]


def unknown_share(output: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> float:
    """The share of [UNK] in the text of train: tokens that are neither ordinary nor [CLS] or [SEP].

    With full_sentences, which puts a [SEP] between most documents, the result may be slightly too low.
    """
    if not tokenizer.has_unknown:
        return 0.0
    train, objective = manifest["parts"]["train"], manifest["objective"]
    marks = train["sequences"] * (3 if objective in PAIRS else 2)
    if objective == "full_sentences":
        marks += train["used"] * manifest["dupe_factor"]
    text = max(train["tokens"] - marks, 1)
    return max(text - int(read_unigram_counts(output, manifest).sum()), 0) / text


def print_cache_summary(cache: TokenCache, tokenizer_hash: str, records: Sequence[UnitRecord]) -> None:
    held = sum(cache.holds(tokenizer_hash, record.text_hash) for record in records)
    line = f"{cache.directory} holds the tokens of {held} of {len(records)} units"
    unit = 2 * sum(record.counts["tokens"] for record in records) // max(len(records), 1)  # bytes of its ids, about
    if held < len(records) and cache.bytes() + unit > cache.limit:
        line += "; it is full: raise --token_cache_gb, or remove files that are no longer used"
    print(line, file=sys.stderr, flush=True)
