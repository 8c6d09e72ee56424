"""What build_examples prints at the end of a job, or why the job made no rows."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.data.manifest import PAIRS, read_unigram_counts
from bert_jax.tokenizer import Tokenizer
from data_prep.job import Job
from data_prep.token_cache import TokenCache
from data_prep.unit_records import UnitRecord
from data_prep.units import TOO_FEW_FOR_EVAL, UnitSplitter

# Few articles, stories or chapters have one sentence, and many paragraphs.
_MANY_OF_ONE_SENTENCE = 0.2
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
        f"{job.output}: {train['rows']} rows for training, {held_out['rows']} for evaluation, from "
        f"{splitter.documents} documents; {seconds:.1f} s, {megabytes / seconds:.1f} MB/s, "
        f"{tokens / 1e6 / seconds:.2f} M tokens/s"
    ]
    if job.arguments.options.eval_fraction and not held_out["documents"]:
        lines.append(_no_eval(splitter, job.arguments.options.eval_fraction))
    if skipped := manifest["counts"]["skipped"]:
        lines.append(f"skipped: {listed(skipped)}")
    lines += word_lines(manifest["counts"])
    lines += document_lines(manifest["counts"])
    lines += separator_lines(manifest)
    lines += pair_lines(manifest["objective"], job.tokenizer)
    if (share := unknown_share(job.output, manifest, job.tokenizer)) > _MUCH_UNKNOWN:
        lines.append(
            f"warning: {share:.0%} of the text is {job.tokenizer.roles.unk_token}: "
            "does --tokenizer fit the language and the case of this text?"
        )
    print("\n".join(lines), file=sys.stderr, flush=True)


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


def document_lines(counts: Mapping[str, Any]) -> list[str]:
    """The shares of documents of one sentence and of random pairs, as a warning if blank lines end paragraphs."""
    if not counts["used"] or "one_sentence" not in counts:
        return []
    alone = counts["one_sentence"] / counts["used"]
    random = counts.get("random_pairs", 0) / max(counts["sequences"], 1)
    stated = f"{alone:.0%} of the documents have one sentence"
    if "random_pairs" in counts:
        stated += f"; {random:.0%} of the pairs have a random segment (50% are intended)"
    if alone <= _MANY_OF_ONE_SENTENCE:
        return [stated]
    return [
        f"warning: {stated}. If blank lines separate the paragraphs of a file and not its documents, name the line "
        "that separates documents (--document_separator), use --document file, or remove blank lines within documents"
    ]


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


def _no_eval(splitter: UnitSplitter, eval_fraction: float) -> str:
    """Explains why no document is held out, and what to change."""
    moved, fewest = splitter.moved_to_train, splitter.min_documents
    if splitter.documents < 2 * fewest:
        return f"nothing is held out for eval, which needs {2 * fewest} documents or more. Use more text"
    if splitter.skipped[TOO_FEW_FOR_EVAL]:
        return (
            f"{splitter.skipped[TOO_FEW_FOR_EVAL]} document(s) chosen for eval are left out, because they are too few "
            "for a part. Raise --eval_fraction, or use more text"
        )
    if moved >= fewest:
        return f"all documents are in train, because --eval_fraction {eval_fraction} left too few for it. Lower it"
    if moved:
        return (
            f"{moved} document(s) chosen for eval are in train, because they are too few for a part. "
            "Raise --eval_fraction, or use more text"
        )
    return f"no document was chosen for eval (--eval_fraction {eval_fraction}). Raise it, or use more text"
