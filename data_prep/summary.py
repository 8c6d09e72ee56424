"""The lines that build-examples and merge-shards print about an output, and the reports of cleaning before the job.

bert-jax clean writes a report next to its text. Manifests of shards made from such text list each report once,
`cleaning: [{report, sha256, documents, bytes, dropped, removed_lines, refused}]`, to account for every document.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.data.manifest import PAIRS, read_unigram_counts
from bert_jax.progress import print_note
from bert_jax.storage.files import as_typed, read_blocks
from bert_jax.storage.remote import as_address, find_files, is_remote
from bert_jax.tokenization.tokenizer import Tokenizer
from data_prep.job import Job, UnitRecord
from data_prep.readers.corpus import Source, is_text
from data_prep.sequences import fewest_documents, segment_count
from data_prep.units import NEEDS_ANOTHER, TOO_FEW_FOR_EVAL, UnitSplitter
from data_prep.worker import TokenCache

REPORT = "report.json"
PART = "part-{:05d}.jsonl.zst"
_IS_PART = re.compile(r"part-\d{5,}\.jsonl\.zst")
_COUNTS = ("documents", "bytes", "dropped", "refused")  # keys of reports that hold counts by name
_LINES = "removed_lines"

# Few articles, stories or chapters have only one sentence, but many paragraphs do.
_MANY_OF_ONE_SENTENCE = 0.2
_WORTH_A_LINE = 0.005  # below this share, 0% would be printed
_MANY_LONG_WORDS = 0.01
_MANY_LEFT_OUT = 0.05
_MANY_RANDOM = 0.6  # of the pairs, half of which should be random
# Rare words alone never give this much; a vocabulary of another language, script or case does.
_MUCH_UNKNOWN = 0.2


def cleaning_reports(sources: Iterable[Source]) -> list[dict[str, Any]]:
    """Reads the digests and counts of the reports next to the sources, locally or from an object store.

    Ignores files with the same name but without these counts.

    Raises:
        OSError: A file cannot be read.
    """
    folders = dict.fromkeys(
        folder for source in sources for folder, _, name in [source.path.rpartition("/")] if _IS_PART.fullmatch(name)
    )
    reports = []
    for path in (f"{folder}/{REPORT}" if folder else REPORT for folder in folders):
        content = b"".join(read_blocks(path)) if find_files(path) else b""
        try:
            report = json.loads(content)
        except ValueError:
            continue
        if _is_report(report):
            counts = {name: report[name] for name in (*_COUNTS, _LINES)}
            reports.append({"report": path, "sha256": hashlib.sha256(content).hexdigest(), **counts})
    return merged([reports])


def merged(lists: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Lists the reports of several manifests, without copies."""
    by_digest: dict[str, dict[str, Any]] = {}
    for report in itertools.chain.from_iterable(lists):
        by_digest.setdefault(report["sha256"], report)
    return list(by_digest.values())


def _is_report(content: Any) -> bool:
    def are_counts(value: Any) -> bool:
        return isinstance(value, dict) and all(type(count) is int and count >= 0 for count in value.values())

    return (
        isinstance(content, dict)
        and all(are_counts(content.get(name)) for name in _COUNTS)
        and are_counts({_LINES: content.get(_LINES)})
        and all({"read", "kept"} <= content[name].keys() for name in ("documents", "bytes"))
    )


def listed(skipped: Mapping[str, int]) -> str:
    """Formats counts of skipped documents by reason, in one line."""
    return ", ".join(f"{count} {reason}" for reason, count in skipped.items())


def why_no_rows(records: Sequence[UnitRecord]) -> str:
    """Explains why a corpus gives no training rows, and what to change."""
    skipped = {reason for record in records for reason in record.skipped}
    if "no_other_document" in skipped:
        return f"--input holds one document with tokens, {NEEDS_ANOTHER}"
    if "too_short" in skipped:
        return "every document of --input has one token, and --objective sop splits each in two. Use more text"
    return "no document of --input has a token: the tokenizer drops every character. Check both"


def print_summary(
    job: Job, manifest: dict[str, Any], splitter: UnitSplitter, megabytes: float, tokens: int, seconds: float
) -> None:
    """Prints rows, speed, skipped documents and warnings to stderr. Megabytes and tokens are of this run alone."""
    train, held_out = manifest["parts"]["train"], manifest["parts"]["eval"]
    folder = job.directory if is_remote(job.output) else job.output
    name = as_typed(as_address(job.output))
    lines = [
        f"{name}: {train['rows']} rows for training, {held_out['rows']} for evaluation, from "
        f"{splitter.documents} documents; {seconds:.1f} s, {megabytes / seconds:.1f} MB/s, "
        f"{tokens / 1e6 / seconds:.2f} M tokens/s",
        *output_lines(folder, manifest, job.tokenizer, splitter.moved_to_train),
    ]
    for line in lines:
        print_note(line)


def output_lines(output: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer, moved_to_train: int = 0) -> list[str]:
    """Describes skipped documents, and warns.

    `moved_to_train` counts documents chosen for eval, but too few for a part.
    """
    skipped, files = manifest["counts"]["skipped"], len(manifest["sources"])
    separator = manifest["reading"].get("document_separator")
    lines = [
        _eval_line(manifest, moved_to_train),
        f"skipped: {listed(skipped)}" if skipped else "",
        token_line(manifest),
        word_line(manifest["counts"]),
        document_line(manifest),
        f"warning: --document_separator {separator!r} separates nothing: each file of --input is one document"
        if separator and manifest["counts"]["documents"] <= files
        else "",
        pair_line(manifest["objective"], tokenizer),
        copy_line(manifest),
    ]
    unknown = unknown_share(output, manifest, tokenizer)
    if unknown > _MUCH_UNKNOWN:
        lines.append(
            f"warning: {unknown:.0%} of the text is {tokenizer.roles.unk_token}: does --tokenizer fit the language and "
            "the case of this text?"
        )
    return [line for line in lines if line]


def _eval_line(manifest: Mapping[str, Any], moved_to_train: int) -> str:
    """Explains why no document is held out, and how to change it."""
    eval_fraction, counts = manifest["eval_fraction"], manifest["counts"]
    if not eval_fraction or manifest["parts"]["eval"]["documents"]:
        return ""
    fewest, left_out = fewest_documents(manifest["objective"]), counts["skipped"].get(TOO_FEW_FOR_EVAL)
    if counts["documents"] - sum(manifest["skipped_reading"].values()) < 2 * fewest:
        return f"nothing is held out for eval, which needs {2 * fewest} documents or more. Use more text"
    if moved_to_train >= fewest and not left_out:
        return f"all documents are in train, because --eval_fraction {eval_fraction} left too few for it. Lower it"
    if left_out or moved_to_train:
        state = f"{left_out} document(s) chosen for eval are left out"
        if not left_out:
            state = f"{moved_to_train} document(s) chosen for eval are in train"
        return f"{state}, because they are too few for a part. Raise --eval_fraction, or use more text"
    return f"no document was chosen for eval (--eval_fraction {eval_fraction}). Raise it, or use more text"


def token_line(manifest: Mapping[str, Any]) -> str:
    """States how many tokens were read, kept and left out, as a warning if many are left out."""
    counts = manifest["counts"]
    read, left = counts["source_tokens"] * manifest["dupe_factor"], counts.get("left_out")
    if left is None or not read:
        return ""
    stated = f"{read:,} tokens read, {read - left:,} kept, {left:,} left out ({left / read:.1%})"
    if left / read <= _MANY_LEFT_OUT:
        return stated
    return f"warning: {stated}: pairs are cut to --seq_len. Use --objective full_sentences, or a larger --seq_len"


def word_line(counts: Mapping[str, Any]) -> str:
    """States the fraction of words too long for whole-word masks, as a warning if it is large."""
    if not counts.get("words"):
        return ""
    share = counts["long_words"] / counts["words"]
    stated = f"{share:.2%} of the words are longer than the mask budget of their sequence"
    if share <= _MANY_LONG_WORDS:
        return stated
    return (
        f"warning: {stated}, so their tokens are hardly ever predicted. Use --mask_unit token, or raise --mask_rate or "
        "--seq_len"
    )


def document_line(manifest: Mapping[str, Any]) -> str:
    """States the fractions of one-sentence documents and random pairs, as a warning if documents look like parts.

    Empty if there are no pairs, and hardly any such documents.
    """
    counts = manifest["counts"]
    if not counts["used"] or "one_sentence" not in counts:
        return ""
    alone = counts["one_sentence"] / counts["used"]
    stated = f"{alone:.0%} of the documents have one sentence"
    if "random_pairs" in counts:
        random = counts["random_pairs"] / max(counts["sequences"], 1)
        stated += f"; {random:.0%} of the pairs have a random segment (50% are intended)"
    if alone <= _MANY_OF_ONE_SENTENCE:
        if "random_pairs" in counts and random > _MANY_RANDOM:
            return (
                f"warning: {stated}, because text of one sentence gets one. Use longer documents, a larger --seq_len, "
                "a smaller --short_seq_prob, or --objective full_sentences"
            )
        return stated if alone >= _WORTH_A_LINE or "random_pairs" in counts else ""
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
    return f"warning: {stated}. {advice}"


def pair_line(objective: str, tokenizer: Tokenizer) -> str:
    """Warns if fine-tuning puts more separators between two texts than these rows have."""
    if objective not in PAIRS or tokenizer.pair_separators == 1:
        return ""
    cls, sep = tokenizer.roles.cls_token, tokenizer.roles.sep_token
    return (
        f"warning: rows are {cls} A {sep} B {sep}, but models of this vocabulary read pairs of texts with "
        f"{tokenizer.pair_separators} {sep} between them in fine-tuning. Use a --tokenizer with [CLS] and [SEP]: "
        "one of --kind wordpiece, or hf:albert/albert-base-v2"
    )


def copy_line(manifest: Mapping[str, Any]) -> str:
    """Warns if rows are written more than once without any difference between the copies."""
    copies = manifest["dupe_factor"]
    differ = manifest["objective"] in PAIRS or manifest["masking"]["kind"] == "static" or manifest["pack"] > 1
    if copies == 1 or differ or any(manifest["corruption"].values()):
        return ""
    return (
        f"warning: --dupe_factor {copies} wrote each row {copies} times. Masks are chosen in training, so more epochs "
        "give the same and need no disk space"
    )


def unknown_share(output: Path, manifest: Mapping[str, Any], tokenizer: Tokenizer) -> float:
    """Computes the fraction of train's text that is [UNK]: neither ordinary tokens nor [CLS] or [SEP].

    With full_sentences, which puts a [SEP] between most documents, the result may be slightly too low.
    """
    if not tokenizer.has_unknown:
        return 0.0
    train, objective = manifest["parts"]["train"], manifest["objective"]
    # The unigram counts have no special tokens, so what they lack of all tokens is [UNK] or one of these marks.
    marks = train["sequences"] * (segment_count(objective) + 1)
    if objective == "full_sentences":
        marks += train["used"] * manifest["dupe_factor"]
    text = max(train["tokens"] - marks, 1)
    return max(text - int(read_unigram_counts(output, manifest).sum()), 0) / text


def print_cache_summary(cache: TokenCache, tokenizer_hash: str, records: Sequence[UnitRecord]) -> None:
    """Prints to stderr how many units the cache holds."""
    held = sum(cache.holds(tokenizer_hash, record.text_hash) for record in records)
    line = f"{cache.directory} holds the tokens of {held} of {len(records)} units"
    # The approximate size of a unit's ids, in bytes: a cache with less space than that is full.
    unit = 2 * sum(record.counts["tokens"] for record in records) // max(len(records), 1)
    if held < len(records) and cache.bytes() + unit > cache.limit:
        line += "; it is full: raise --token_cache_gb, or remove files that are no longer used"
    print_note(line)
