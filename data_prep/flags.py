"""The flags of build_examples: what they are, and which values they may have."""

from collections.abc import Sequence
from typing import Any

from bert_jax.command import Parser, UserError
from bert_jax.data.masking import UNITS, ReplacementShares
from data_prep import engines
from data_prep.objectives import OBJECTIVES

MOST_PACKED = 256

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
    add("--unit_mb", type=float, default=0.0, help="MB of text a work unit; default 0: a 16th of the text, from 1 to 8")
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


def weights(given: str | Sequence[float]) -> list[float]:
    """--weights as numbers."""
    try:
        return [float(weight) for weight in (given.split(",") if isinstance(given, str) and given else given)]
    except ValueError:
        raise UserError(f"--weights {given}; give a number for each pattern of --input, as 1,0.5,3") from None


def check_choices(objective: str, masking: str, mask_unit: str, engine: str) -> None:
    for flag, value, known in (
        ("objective", objective, OBJECTIVES),
        ("masking", masking, ("dynamic", "static")),
        ("mask_unit", mask_unit, UNITS),
        ("engine", engine, engines.NAMES),
    ):
        if value not in known:
            raise UserError(f"--{flag} {value} is not here; there is: {', '.join(known)}")


def split(given: str | Sequence[float]) -> ReplacementShares:
    """Three shares, or a text of them as 0.8,0.1,0.1. MaskingRule looks at their values."""
    try:
        return ReplacementShares(*map(float, given.split(",") if isinstance(given, str) else given))
    except (TypeError, ValueError):
        raise UserError(f"--mask_split {given}; it is three shares that sum to 1, as 0.8,0.1,0.1") from None


def check_numbers(
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


def check_rates(delete_rate: float, insert_rate: float, token_cache_gb: float) -> None:
    for flag, value, most in (
        ("delete_rate", delete_rate, 0.5),
        ("insert_rate", insert_rate, 0.5),
        ("token_cache_gb", token_cache_gb, 1e9),
    ):
        if not 0 <= value <= most:
            raise UserError(f"--{flag} {value}; it must be from 0 to {most:g}")
