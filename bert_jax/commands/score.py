"""Scores the sentences of a file by their pseudo-log-likelihood, and prefers one of each pair."""

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bert_jax.config.options import check, option, parse
from bert_jax.errors import UserError
from bert_jax.interop.open_checkpoint import CheckpointOptions
from bert_jax.storage.files import format_of_ending, write_atomic
from bert_jax.tasks.reading.inputs import STREAM_FORMS, TEXT, numbered_texts
from bert_jax.tasks.scoring import MASKINGS, ORIGINAL, preferred, score_texts
from bert_jax.train.compilation import enable_compilation_cache

PAIR = "text_pair"
TIE = "tie"
DIGITS = 7  # significant digits of a float32
ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # of --output

DESCRIPTION = """Scores sentences by a masked language model, and says which sentence of a pair it prefers.

  bert-jax score --checkpoint CHECKPOINT --input sentences.txt --output scores.jsonl
  bert-jax score --checkpoint CHECKPOINT --input pairs.jsonl --text good --text_pair bad --group uid

The score is the pseudo-log-likelihood (Salazar et al. 2020): the sum over a sentence's tokens of
the natural logarithm of P(token | all others), where the token is masked. Special tokens are not
scored. It falls with every token, so compare sentences of similar length, or divide by `tokens`.

--input     a UTF-8 file, plain or compressed, whose name decides the form (or --form): .jsonl, .csv
            and .parquet have columns, which --text, --text_pair and --group name. Any other file
            has a sentence on each line; a tab separates a pair. - is standard input.
--masking   original         each token is masked alone
            within_word_l2r  and the tokens that follow it in its word, so that a word of several
                             pieces does not give itself away (Kauf and Ivanova 2023). A word is
                             what the tokenizer splits before it looks for pieces.

The first sentence of a pair is the acceptable one: accuracy is the share of pairs in which its
score is higher. Ties do not count as correct. --group uid,phenomenon prints two tables: accuracy by
the values of these columns, and the mean, in which each group counts the same.

Output: an object per input, in order: its text, score and tokens; in pairs also text_pair,
score_pair, tokens_pair and preferred (the name of a column, or tie); and its groups. Columns keep
their names. FILE.jsonl, FILE.csv and FILE.parquet hold the rows, FILE.json the accuracies, too.
Without --output and --group, JSON lines go to standard output. A score that is not finite is null.
An empty sentence, or one with more tokens than the model has positions, is an error that names its
line, before anything is scored.
"""


@dataclass(frozen=True, kw_only=True)
class Options(CheckpointOptions):
    input: str = option(help="the sentences (see above); - for standard input", metavar="FILE")
    output: str = option("", "the file to write; default: standard output", metavar="FILE")
    masking: str = option(ORIGINAL, "see above", choices=MASKINGS)
    form: str = option("auto", "of the input", aliases=["input_format"], choices=STREAM_FORMS)
    text: str = option("", "column of the sentence; default: text", metavar="NAME")
    text_pair: str = option("", "column of the second sentence of a pair", metavar="NAME")
    group: tuple[str, ...] = option((), "columns by whose values the accuracy is shown", metavar="NAME,...")

    def __post_init__(self) -> None:
        check(self)
        if self.output:
            format_of_ending(self.output, ENDINGS)
        if self.group and not self.text_pair:
            raise UserError("--group is for the accuracy of pairs; name their second sentence with --text_pair")
        names = [self.text or TEXT, self.text_pair or PAIR, *self.group]
        names += ["score", "tokens", "score_pair", "tokens_pair", "preferred"]
        if repeated := next((name for name in names if names.count(name) > 1), ""):
            raise UserError(f"the output would have two columns {repeated!r}. Rename the column of the input")


def main(arguments: Sequence[str]) -> None:
    options = parse("bert-jax score", DESCRIPTION, Options, arguments)
    enable_compilation_cache()
    path = Path("/dev/stdin" if options.input == "-" else options.input)
    records = list(numbered_texts(path, options.form, options.text, options.text_pair, options.group))
    if not records:
        raise UserError(f"{path} has no sentences. Write one on each line, or below the header of a table")
    rows = list(_scored(options, path, records))
    summary = summarize(rows, options.text or TEXT, options.text_pair or PAIR, options.group)
    written = [_finite(row) for row in rows]
    if options.output:
        write_atomic(Path(options.output), _content(written, summary, format_of_ending(options.output, ENDINGS)))
    elif not options.group:
        print("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written), end="")
    # The rows on standard output stay free of other lines.
    print(_table(summary), file=sys.stdout if options.output or options.group else sys.stderr)


def _scored(options: Options, path: Path, records: Sequence[tuple[int, tuple[Any, ...]]]) -> Iterator[dict[str, Any]]:
    """Yields a row for each record: its texts and groups, their scores, and the preferred text."""
    counts = [len(values) - len(options.group) for _, values in records]
    texts = [text for (_, values), count in zip(records, counts, strict=True) for text in values[:count]]
    lines = [line for (line, _), count in zip(records, counts, strict=True) for _ in range(count)]
    scores = score_texts(
        options.checkpoint,
        texts,
        options.masking,
        average=options.average,
        name=lambda index: f"{path} line {lines[index]}",
    )
    names = options.text or TEXT, options.text_pair or PAIR
    remaining = iter(zip(scores.values.tolist(), scores.tokens.tolist(), strict=True))
    for (_, values), count in zip(records, counts, strict=True):
        row = dict(zip((*names[:count], *options.group), values, strict=True))
        parts = [next(remaining) for _ in range(count)]
        for suffix, (value, tokens) in zip(("", "_pair"), parts, strict=False):
            row |= {f"score{suffix}": value, f"tokens{suffix}": tokens}
        if count == 2:
            better = preferred(parts[0][0], parts[1][0])
            row["preferred"] = TIE if better is None else names[better]
        yield row


def summarize(rows: Sequence[Mapping[str, Any]], text: str, pair: str, groups: Sequence[str]) -> dict[str, Any]:
    """Returns the counts and the accuracy of pairs, by group too, or the pseudo-perplexity of sentences."""
    pairs = [row for row in rows if pair in row]
    if not pairs:
        tokens = sum(row["tokens"] for row in rows)
        loss = -sum(row["score"] for row in rows) / tokens
        return {"sentences": len(rows), "tokens": tokens, "pseudo_loss": loss}
    tables = {}
    for name in groups:
        right: dict[str, list[bool]] = {}
        for row in pairs:
            right.setdefault(str(row[name]), []).append(row["preferred"] == text)
        parts = {key: {"pairs": len(all_), "accuracy": sum(all_) / len(all_)} for key, all_ in sorted(right.items())}
        mean = sum(part["accuracy"] for part in parts.values()) / len(parts)
        tables[name] = {"mean_accuracy": mean, "groups": parts}
    correct = sum(row["preferred"] == text for row in pairs)
    ties = sum(row["preferred"] == TIE for row in pairs)
    return {"pairs": len(pairs), "ties": ties, "accuracy": correct / len(pairs), "by": tables}


def _table(summary: Mapping[str, Any]) -> str:
    """Returns the lines that a terminal shows."""
    if "sentences" in summary:
        loss = summary["pseudo_loss"]
        return f"{summary['sentences']:,} sentences, {summary['tokens']:,} tokens: {-loss:.4f} per token"
    lines = []
    for name, table in summary["by"].items():
        parts = table["groups"]
        width = max(map(len, [name, f"mean of {len(parts)}", *parts]))
        lines += [f"{name:{width}}  pairs  accuracy"]
        lines += [f"{key:{width}} {part['pairs']:6}  {part['accuracy']:8.2%}" for key, part in parts.items()]
        lines += [f"{f'mean of {len(parts)}':{width}} {'':6}  {table['mean_accuracy']:8.2%}", ""]
    ties = f"; {summary['ties']:,} with equal scores" if summary["ties"] else ""
    return "\n".join([*lines, f"accuracy {summary['accuracy']:.2%} of {summary['pairs']:,} pairs{ties}"])


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Rounds scores to a float32's digits; NaN and infinities become null, as JSON has neither."""
    return {
        name: (float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None) if isinstance(value, float) else value
        for name, value in row.items()
    }


def _content(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], form: str) -> bytes:
    """Returns the content of the output file."""
    if form == "parquet":
        stored = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), stored)
        return stored.getvalue()
    if form == "json":
        return (json.dumps({**summary, "rows": rows}, ensure_ascii=False, indent=1) + "\n").encode()
    if form == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    written = io.StringIO()
    # Lines of text may be pairs and single sentences.
    table = csv.DictWriter(written, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return written.getvalue().encode()
