"""Text to rows for pretraining: `build` for notebooks, `python -m data_prep.build_examples` for a terminal."""

import functools
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from bert_jax import command
from bert_jax import tokenizer as tokenizers
from bert_jax.command import Parser, Stopped, UserError
from bert_jax.data.manifest import PAIRS
from bert_jax.data.masking import UNITS, Split
from bert_jax.files import incomplete, refuse_existing
from data_prep import engines, formats
from data_prep.job import Arguments, Job, Record
from data_prep.objectives import OBJECTIVES
from data_prep.progress import Reporter
from data_prep.readers import Corpus, Reading, Source, find_sources
from data_prep.token_cache import TokenCache
from data_prep.units import Cut, Splitter, Unit, UnusableCorpus
from data_prep.worker import build_unit

SHORT_SEQ_PROB = 0.1  # google-research/bert, create_pretraining_data.py
MOST_PACKED = 256
MB = 1_000_000
GB = 1_000_000_000

DESCRIPTION = """\
Turns text into rows for pretraining: sentences, token ids, pairs, fixed-width Arrow shards with a manifest.

  python -m data_prep.build_examples --input 'books/*.txt.xz' --tokenizer vocab.txt --output data/books_128 \\
      --seq_len 128 --objective nsp --masking dynamic --mask_unit word

Input is text with a blank line between documents, .jsonl or .parquet, each plain or .gz .xz .zst, on this machine, gs://
or s3://; or tfds:NAME[:SPLIT]. Lines are cut into sentences, so a line may be a sentence or a paragraph.
OUTPUT gets train/, eval/ (documents chosen by a hash of their text), tokenizer/ and manifest.json; docs/data_format.md
describes them. Work goes on in OUTPUT.incomplete: a job that was stopped, or killed, goes on where it was when the
same command is given again. The same text and options give the same shards, byte for byte, with any number of workers.
"""


def build(
    input: str | Path,
    tokenizer: str | Path,
    output: str | Path,
    seq_len: int,
    *,
    objective: str = "nsp",
    masking: str = "dynamic",
    mask_unit: str = "token",
    mask_rate: float = 0.15,
    mask_split: str | Sequence[float] = "0.8,0.1,0.1",
    random_tokens: str = "uniform",
    reorder_rate: float = 0.0,
    dupe_factor: int = 1,
    pack: int = 1,
    eval_fraction: float = 0.01,
    short_seq_prob: float | None = None,
    delete_rate: float = 0.0,
    insert_rate: float = 0.0,
    lowercase: bool | None = None,
    seed: int = 0,
    engine: str = "local",
    engine_options: str = "",
    format: str = "arrow",
    workers: int = 0,
    unit_mb: float = 0.0,
    weights: str | Sequence[float] = (),
    document: str = "blank_line",
    text_field: str = "text",
    dedup: bool = False,
    on_error: str = "fail",
    token_cache: str | Path | None = None,
    token_cache_gb: float = 50.0,
    quiet: bool = True,
) -> dict[str, Any]:
    """Builds the examples as the command does, and returns the manifest; see its --help for the arguments.

    With more than one worker, call it under `if __name__ == "__main__"` in a script, as multiprocessing needs.
    Raises UserError for a mistake in the arguments or the input; finished units are then kept for the next call.
    """
    _check_choices(objective, masking, mask_unit, engine)
    formats.check(format, masking, pack)
    split = _split(mask_split)
    _check_numbers(seq_len, mask_rate, dupe_factor, pack, eval_fraction, short_seq_prob, seed, workers, unit_mb)
    _check_rates(delete_rate, insert_rate, token_cache_gb)
    if objective not in PAIRS and short_seq_prob:
        raise UserError(f"--short_seq_prob is for --objective {' and '.join(PAIRS)}; {objective} makes none short")
    output = Path(os.path.abspath(output))
    refuse_existing(output)
    sources = _without(find_sources(str(input), _weights(weights)), incomplete(output))
    corpus = Corpus(sources, Reading(text_field, document, on_error))
    loaded = tokenizers.load(tokenizer, lowercase)
    if short_seq_prob is None:
        # Packing makes short sequences of its own (recut.py), and more of them would not fill rows of few sequences.
        short_seq_prob = SHORT_SEQ_PROB if objective in PAIRS and pack == 1 else 0.0
    arguments = Arguments(
        objective=objective,
        seq_len=seq_len,
        masking=masking,
        mask_unit=mask_unit,
        mask_rate=mask_rate,
        mask_split=split,
        random_tokens=random_tokens,
        reorder_rate=reorder_rate,
        dupe_factor=dupe_factor,
        pack=pack,
        format=format,
        eval_fraction=eval_fraction,
        short_seq_prob=short_seq_prob,
        delete_rate=delete_rate,
        insert_rate=insert_rate,
        seed=seed,
        unit_bytes=round(unit_mb * MB) if unit_mb else _default_unit_bytes(corpus.sources),
        tokenizer_hash=loaded.content_hash,
        sources=corpus.sources,
        text_field=text_field,
        document=document,
        dedup=dedup,
    )
    _check_masking(arguments)
    cache = None
    if token_cache is not None:
        cache = TokenCache(Path(os.path.abspath(token_cache)), round(token_cache_gb * GB))
        cache.prepare()
    with Job(output, arguments, loaded) as job:
        return _run(job, corpus, engine, engine_options, workers, cache, quiet)


def _run(
    job: Job, corpus: Corpus, engine: str, engine_options: str, workers: int, cache: TokenCache | None, quiet: bool
) -> dict[str, Any]:
    """Splits, skips what is finished, sends the rest to the engine, and finishes the folder."""
    arguments = job.arguments
    fewest = 2 if arguments.objective == "nsp" else 1
    splitter = Splitter(Cut(arguments.unit_bytes, arguments.eval_fraction, fewest), arguments.dedup)
    records: list[Record] = []
    tokens = done = 0

    def tell() -> None:
        """An engine may read far ahead: as done counts the share of what is read that is in finished units."""
        share = done / max(splitter.documents, 1)
        reporter.update(corpus.bytes_read * share, splitter.bytes / MB * share, tokens / 1e6)

    def unfinished() -> Iterator[Unit]:
        nonlocal done
        try:
            for unit in splitter.split(reported()):
                record = job.finished(unit)
                if record is None:
                    yield unit
                else:
                    records.append(record)
                    done += record.counts["documents"]
        except UnusableCorpus as error:
            raise _with_skipped(error, corpus.refused + splitter.skipped) from None

    def reported() -> Iterator[bytes | None]:
        for document in corpus.texts():
            tell()
            yield document

    resumed = job.finished_units()
    if resumed and not quiet:
        print(f"going on in {job.directory}: {resumed} units are finished", file=sys.stderr)
    with Reporter("building examples", corpus.total_bytes, ("MB", "M tokens"), quiet) as reporter:
        work = functools.partial(build_unit, arguments, cache)
        for record in engines.run(engine, work, unfinished(), workers, directory=job.directory, options=engine_options):
            records.append(record)
            tokens += record.counts["source_tokens"]
            done += record.counts["documents"]
            tell()
        if not any(record.counts["rows"] for record in records if record.part == "train"):
            raise UnusableCorpus(_nothing(records))
        manifest = job.finish(records, corpus.refused + splitter.skipped)
    if not quiet:
        _tell(job, manifest, splitter, tokens, reporter.seconds())
        if cache is not None:
            _tell_of_cache(cache, arguments.tokenizer_hash, records)
    return manifest


def _with_skipped(error: UnusableCorpus, skipped: Counter[str]) -> UnusableCorpus:
    return UnusableCorpus(f"{error}; skipped: {_told(skipped)}") if skipped else error


def _told(skipped: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in skipped.items())


def _nothing(records: list[Record]) -> str:
    skipped = {reason for record in records for reason in record.skipped}
    if "no_other_document" in skipped:
        return (
            "--input holds one document with tokens, and --objective nsp takes random segments from another one. "
            "Part the documents by blank lines, or give --objective full_sentences"
        )
    if "too_short" in skipped:
        return "every document of --input is of one token, and --objective sop parts each in two. Give more text"
    return "no document of --input has a token: the tokenizer drops all its characters. Check --input and --tokenizer"


def _tell(job: Job, manifest: dict[str, Any], splitter: Splitter, tokens: int, seconds: float) -> None:
    """One paragraph at the end, on stderr."""
    train, held_out = manifest["parts"]["train"], manifest["parts"]["eval"]
    lines = [
        f"{job.output}: {train['rows']} rows for training, {held_out['rows']} for evaluation, from "
        f"{splitter.documents} documents; {seconds:.1f} s, {splitter.bytes / MB / seconds:.1f} MB/s, "
        f"{tokens / 1e6 / seconds:.2f} M tokens/s"
    ]
    if job.arguments.eval_fraction and not held_out["documents"]:
        lines.append(_no_eval(splitter, job.arguments.eval_fraction))
    if skipped := manifest["counts"]["skipped"]:
        lines.append(f"skipped: {_told(skipped)}")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _tell_of_cache(cache: TokenCache, tokenizer_hash: str, records: list[Record]) -> None:
    held = sum(cache.holds(tokenizer_hash, record.text_hash) for record in records)
    told = f"{cache.directory} holds the tokens of {held} of {len(records)} units"
    more = "" if held == len(records) else "; it is full: raise --token_cache_gb, or remove what is of no more use"
    print(told + more, file=sys.stderr, flush=True)


def _no_eval(splitter: Splitter, eval_fraction: float) -> str:
    """Why no document is held out, and what would change it."""
    moved, fewest = splitter.moved_to_train, splitter.cut.fewest
    if splitter.documents < 2 * fewest:
        return f"nothing is held out for eval: that takes {2 * fewest} documents or more. Give more text"
    if moved >= fewest:
        return f"all documents are in train: --eval_fraction {eval_fraction} left too few for it. Lower it"
    if moved:
        return (
            f"{moved} document(s) chosen for eval went to train: too few to be a part. "
            "Raise --eval_fraction, or give more text"
        )
    return f"no document was chosen for eval (--eval_fraction {eval_fraction}). Raise it, or give more text"


def _weights(given: str | Sequence[float]) -> list[float]:
    """--weights as numbers."""
    try:
        return [float(weight) for weight in (given.split(",") if isinstance(given, str) and given else given)]
    except ValueError:
        raise UserError(f"--weights {given}; give a number for each pattern of --input, as 1,0.5,3") from None


def _without(sources: Sequence[Source], folder: Path) -> tuple[Source, ...]:
    """The sources that are not in a folder: a pattern may name what an earlier run of this job left, too."""
    inside = os.path.realpath(folder) + os.sep
    return tuple(source for source in sources if not os.path.realpath(source.path).startswith(inside))


def _default_unit_bytes(sources: Sequence[Source]) -> int:
    """A 32nd of the corpus, from 1 to 8 MB: enough units to share out, enough documents for a random segment."""
    text_bytes = sum(source.bytes * (3 if source.path.endswith((".xz", ".gz", ".zst")) else 1) for source in sources)
    return min(max(text_bytes // 32, MB), 8 * MB)


def _check_choices(objective: str, masking: str, mask_unit: str, engine: str) -> None:
    for flag, value, known in (
        ("objective", objective, OBJECTIVES),
        ("masking", masking, ("dynamic", "static")),
        ("mask_unit", mask_unit, UNITS),
        ("engine", engine, engines.NAMES),
    ):
        if value not in known:
            raise UserError(f"--{flag} {value} is not here; there is: {', '.join(known)}")


def _split(given: str | Sequence[float]) -> Split:
    """Three shares, or a text of them as 0.8,0.1,0.1. MaskingRule looks at their values."""
    try:
        return Split(*map(float, given.split(",") if isinstance(given, str) else given))
    except (TypeError, ValueError):
        raise UserError(f"--mask_split {given}; it is three shares that sum to 1, as 0.8,0.1,0.1") from None


def _check_masking(arguments: Arguments) -> None:
    rule = arguments.rule  # raises for what is no rule
    if rule.random == "unigram" and arguments.masking == "static":
        raise UserError("--random_tokens unigram needs --masking dynamic: the counts are known when the job has ended")


def _check_numbers(
    seq_len: int,
    mask_rate: float,
    dupe_factor: int,
    pack: int,
    eval_fraction: float,
    short_seq_prob: float | None,
    seed: int,
    workers: int,
    unit_mb: float,
) -> None:
    for flag, value, fine, wanted in (
        ("seq_len", seq_len, 8 <= seq_len <= 65535, "from 8 to 65535"),
        ("mask_rate", mask_rate, 0 < mask_rate <= 1, "above 0 and at most 1, as 0.15"),
        ("dupe_factor", dupe_factor, 1 <= dupe_factor <= 1000, "from 1 to 1000"),
        ("pack", pack, 1 <= pack <= MOST_PACKED, f"from 1 to {MOST_PACKED}"),
        ("eval_fraction", eval_fraction, 0 <= eval_fraction < 1, "at least 0 and below 1"),
        ("short_seq_prob", short_seq_prob, 0 <= (short_seq_prob or 0) <= 1, "from 0 to 1"),
        ("seed", seed, 0 <= seed < 1 << 63, "at least 0 and below 2**63"),
        ("workers", workers, workers >= 0, "at least 0 (0: one a core)"),
        ("unit_mb", unit_mb, unit_mb == 0 or 0.01 <= unit_mb <= 1000, "0 (by the corpus), or from 0.01 to 1000"),
    ):
        if not fine:
            raise UserError(f"--{flag} {value}; it must be {wanted}")


def _check_rates(delete_rate: float, insert_rate: float, token_cache_gb: float) -> None:
    for flag, value, most in (
        ("delete_rate", delete_rate, 0.5),
        ("insert_rate", insert_rate, 0.5),
        ("token_cache_gb", token_cache_gb, 1e9),
    ):
        if not 0 <= value <= most:
            raise UserError(f"--{flag} {value}; it must be from 0 to {most:g}")


def parse(arguments: Sequence[str]) -> dict[str, Any]:
    """The flags, as the keywords of `build`. Raises UserError for a mistake in them."""
    parser = Parser("data_prep.build_examples", DESCRIPTION)
    add = parser.add_argument
    add("--input", required=True, metavar="GLOB", help="files, as 'text/*.txt.xz'; several patterns parted by commas")
    add("--weights", default=(), metavar="W,W", help="copies of each pattern's documents, as 1,0.5,3; default 1 each")
    add(
        "--document",
        default="blank_line",
        help="what parts text: blank_line, or file (a file each); default blank_line",
    )
    add("--text_field", default="text", metavar="NAME", help="of JSONL, Parquet and TFDS; default text")
    add("--dedup", action="store_true", help="skip documents that were there before, byte for byte")
    add("--on_error", default="fail", help="at input that cannot be used: fail, or skip (and count it); default fail")
    add("--tokenizer", required=True, metavar="DIR_OR_VOCAB", help="a tokenizer folder, or a vocab.txt")
    add("--output", required=True, metavar="DIR", help="a folder to be made")
    add("--seq_len", required=True, type=int, metavar="T", help="slots of a row, as 128")
    add(
        "--objective",
        default="nsp",
        help="nsp (BERT), sop (ALBERT), full_sentences or doc_sentences (RoBERTa), single (SpanBERT); default nsp",
    )
    add(
        "--masking",
        default="dynamic",
        help="dynamic (masked anew in each epoch) or static (in the row); default dynamic",
    )
    add(
        "--mask_unit",
        default="token",
        help="token (as BERT first was), word (whole words), ngram (1 to 3 words, as ALBERT) or span (1 to 10 words, "
        "as SpanBERT); default token",
    )
    add("--mask_rate", type=float, default=0.15, help="share of a sequence that is predicted; default 0.15")
    add(
        "--mask_split",
        default="0.8,0.1,0.1",
        metavar="M,R,K",
        help="shares of those that become [MASK], a random token, or stay; default 0.8,0.1,0.1",
    )
    add(
        "--random_tokens",
        default="uniform",
        help="uniform, or unigram: as often as in the text (dynamic masking only); default uniform",
    )
    add(
        "--reorder_rate",
        type=float,
        default=0.0,
        metavar="R",
        help="share of a sequence in shuffled trigrams, predicted beside what is masked (as StructBERT); default 0",
    )
    add("--dupe_factor", type=int, default=1, metavar="K", help="pairings of each document; default 1")
    add("--pack", type=int, default=1, metavar="S", help="most sequences in a row; 1, the default, packs none")
    add("--eval_fraction", type=float, default=0.01, help="share of the documents held out in eval/; default 0.01")
    add("--short_seq_prob", type=float, help="share of documents cut short, for nsp and sop; default 0.1, packed 0")
    add("--delete_rate", type=float, default=0.0, metavar="R", help="share of tokens left out, as noise; default 0")
    add("--insert_rate", type=float, default=0.0, metavar="R", help="random tokens put in, for each token; default 0")
    parser.add_switch("lowercase", help="or --nolowercase: of a vocab.txt alone; default by what it holds")
    add(
        "--format",
        default="arrow",
        metavar="NAME",
        help="of the shards: arrow, or for readers elsewhere tfds or tfrecord; default arrow",
    )
    add("--engine", default="local", help="where units run: local, beam or ray (docs/engines.md); default local")
    add("--engine_options", default="", metavar="FLAGS", help="of beam or ray, as '--runner=FlinkRunner'")
    add("--workers", type=int, default=0, metavar="N", help="processes; default 0: one a core (ray: of the cluster)")
    add("--unit_mb", type=float, default=0.0, help="MB of text a work unit; default 0: a 32nd of the text, from 1 to 8")
    add("--token_cache", metavar="DIR", help="keeps tokens for a later job on the same text, as of another --seq_len")
    add("--token_cache_gb", type=float, default=50.0, help="most GB that DIR may hold (2.2 bytes a token); default 50")
    add("--seed", type=int, default=0, help="of pairs and masks; default 0")
    return vars(parser.parse_args(_options_joined(arguments)))


def _options_joined(arguments: Sequence[str]) -> list[str]:
    """The same flags with =, for argparse takes a value that begins with -- for a flag of its own."""
    joined = list(arguments)
    if "--engine_options" in joined[:-1]:
        place = joined.index("--engine_options")
        joined[place : place + 2] = [f"--engine_options={joined[place + 1]}"]
    return joined


def main(arguments: Sequence[str]) -> None:
    keywords = parse(arguments)

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(
            f"stopped by SIGTERM; finished units are kept in {incomplete(Path(keywords['output']))}: "
            "run the same command again to go on"
        )

    before = signal.signal(signal.SIGTERM, stop)
    try:
        build(**keywords, quiet=False)
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    command.run(main)
