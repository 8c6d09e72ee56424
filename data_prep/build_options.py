"""The options of build_examples: their defaults, their documentation, the values they may have, and their flags."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_jax.command import Parser, UserError
from bert_jax.data.manifest import PAIRS
from bert_jax.data.masking import UNITS
from data_prep import engines, formats
from data_prep.objectives import OBJECTIVES

MOST_PACKED = 256  # sequences in a row
_MASKING = ("dynamic", "static")

DESCRIPTION = """\
Builds pretraining examples from text: sentences, token ids, pairs, fixed-width Arrow shards with a manifest.

  python -m data_prep.build_examples --input 'books/*.txt.xz' --tokenizer vocab.txt --output data/books_128 \\
      --seq_len 128 --objective nsp --masking dynamic --mask_unit word

The input is text with a blank line between documents, .jsonl or .parquet, each plain or .gz .xz .zst, on this machine,
gs:// or s3://; or tfds:NAME[:SPLIT]. Lines are split into sentences, so a line may be a sentence or a paragraph.
OUTPUT gets train/, eval/ (documents chosen by a hash of their text), tokenizer/ and manifest.json; docs/data_format.md
describes them. The job writes to OUTPUT.incomplete. If it is stopped or killed, the same command continues it. The
same text and options give the same shards, byte for byte, with any number of workers.
"""


def _flag(help: str, *, metavar: str | None = None, parse: Callable[[str], Any] = str) -> dict[str, Any]:
    """The metadata of a field: the documentation of its flag, and the function that parses the flag's value."""
    return {"help": help, "metavar": metavar, "parse": parse}


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(",")) if text else ()


@dataclass(frozen=True)
class BuildOptions:
    """What to build, from what, and how. Raises UserError, with the name of the flag, for a value out of range."""

    input: str | Path = field(
        metadata=_flag("files, for example 'text/*.txt.xz'; commas separate several patterns", metavar="GLOB")
    )
    tokenizer: str | Path = field(metadata=_flag("a tokenizer folder or a vocab.txt", metavar="DIR_OR_VOCAB"))
    output: str | Path = field(metadata=_flag("the folder to create", metavar="DIR"))
    seq_len: int = field(metadata=_flag("tokens in a row, for example 128", metavar="T", parse=int))
    weights: tuple[float, ...] = field(
        default=(),
        metadata=_flag(
            "how often each pattern's documents are read, for example 1,0.5,3; default 1 each",
            metavar="W,W",
            parse=_numbers,
        ),
    )
    document: str = field(
        default="blank_line",
        metadata=_flag("what separates the documents of text: blank_line, or file (each file is one document)"),
    )
    text_field: str = field(
        default="text", metadata=_flag("field of JSONL, Parquet and TFDS records that holds the text", metavar="NAME")
    )
    dedup: bool = field(
        default=False, metadata=_flag("skip documents that are equal, byte for byte, to an earlier one")
    )
    on_error: str = field(default="fail", metadata=_flag("for input that cannot be used: fail, or skip and count it"))
    objective: str = field(
        default="nsp",
        metadata=_flag("nsp (BERT), sop (ALBERT), full_sentences or doc_sentences (RoBERTa), or single (SpanBERT)"),
    )
    masking: str = field(
        default="dynamic", metadata=_flag("dynamic (masks change every epoch) or static (masks are stored in the rows)")
    )
    mask_unit: str = field(
        default="token",
        metadata=_flag(
            "what is masked as a whole: token (the original BERT), word, ngram (1 to 3 words, ALBERT) or span (1 to 10 "
            "words, SpanBERT)"
        ),
    )
    mask_rate: float = field(
        default=0.15, metadata=_flag("share of the tokens of a sequence that is predicted", metavar="R", parse=float)
    )
    mask_split: tuple[float, ...] = field(
        default=(0.8, 0.1, 0.1),
        metadata=_flag(
            "shares of the predicted tokens that become [MASK], become a random token, or stay; default 0.8,0.1,0.1",
            metavar="M,R,K",
            parse=_numbers,
        ),
    )
    random_tokens: str = field(
        default="uniform",
        metadata=_flag("distribution of random tokens: uniform, or unigram (that of the text; dynamic masking only)"),
    )
    reorder_rate: float = field(
        default=0.0,
        metadata=_flag(
            "share of the tokens that is in shuffled trigrams and predicted, besides masking (StructBERT)",
            metavar="R",
            parse=float,
        ),
    )
    dupe_factor: int = field(
        default=1, metadata=_flag("number of different pairings of each document", metavar="K", parse=int)
    )
    pack: int = field(
        default=1, metadata=_flag("maximum number of sequences in a row; 1 disables packing", metavar="S", parse=int)
    )
    eval_fraction: float = field(
        default=0.01, metadata=_flag("share of the documents that is held out in eval/", metavar="R", parse=float)
    )
    short_seq_prob: float | None = field(
        default=None,
        metadata=_flag(
            "share of documents that give shorter sequences, for nsp and sop; default 0.1, or 0 with --pack",
            metavar="P",
            parse=float,
        ),
    )
    delete_rate: float = field(
        default=0.0, metadata=_flag("share of the tokens that is deleted, as noise", metavar="R", parse=float)
    )
    insert_rate: float = field(
        default=0.0, metadata=_flag("random tokens inserted for each token, as noise", metavar="R", parse=float)
    )
    lowercase: bool | None = field(
        default=None,
        metadata=_flag(
            "lower-case the text, or --nolowercase to keep its case: for a vocab.txt only; default: lower-case unless "
            "the vocabulary holds capitals"
        ),
    )
    format: str = field(
        default="arrow",
        metadata=_flag("format of the shards: arrow, or for other programs tfds or tfrecord", metavar="NAME"),
    )
    engine: str = field(default="local", metadata=_flag("what runs the job: local, beam or ray (docs/engines.md)"))
    engine_options: str = field(
        default="",
        metadata=_flag("flags for beam or ray, for example '--runner=FlinkRunner'; default: none", metavar="FLAGS"),
    )
    workers: int = field(
        default=0,
        metadata=_flag("number of processes; 0: one for each core (ray: of the cluster)", metavar="N", parse=int),
    )
    unit_mb: float = field(
        default=0.0,
        metadata=_flag("MB of text in a work unit; 0: a 16th of the text, from 1 to 8", metavar="MB", parse=float),
    )
    token_cache: str | Path | None = field(
        default=None,
        metadata=_flag(
            "folder that keeps token ids for later jobs on the same text, as of another --seq_len; default: none",
            metavar="DIR",
        ),
    )
    token_cache_gb: float = field(
        default=50.0,
        metadata=_flag("maximum size of the token cache in GB (2.2 bytes a token)", metavar="GB", parse=float),
    )
    seed: int = field(default=0, metadata=_flag("seed of pairs and masks", parse=int))

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        formats.check(self.format, self.masking, self.pack)
        if len(self.mask_split) != 3:
            given = ",".join(map(str, self.mask_split))
            raise UserError(f"--mask_split {given}: expected three shares that sum to 1, for example 0.8,0.1,0.1")
        if self.objective not in PAIRS and self.short_seq_prob:
            raise UserError(
                f"--short_seq_prob is only for --objective {' and '.join(PAIRS)}; leave it out for {self.objective}"
            )

    def _check_choices(self) -> None:
        for flag, known in (
            ("objective", OBJECTIVES),
            ("masking", _MASKING),
            ("mask_unit", UNITS),
            ("engine", engines.NAMES),
        ):
            if (value := getattr(self, flag)) not in known:
                raise UserError(f"unknown --{flag} {value}; choose from {', '.join(known)}")

    def _check_numbers(self) -> None:
        for flag, is_valid, expected in (
            ("seq_len", lambda value: 8 <= value <= 65535, "from 8 to 65535"),
            ("mask_rate", lambda value: 0 < value <= 1, "above 0 and at most 1, for example 0.15"),
            ("dupe_factor", lambda value: 1 <= value <= 1000, "from 1 to 1000"),
            ("pack", lambda value: 1 <= value <= MOST_PACKED, f"from 1 to {MOST_PACKED}"),
            ("eval_fraction", lambda value: 0 <= value < 1, "at least 0 and below 1"),
            ("short_seq_prob", lambda value: value is None or 0 <= value <= 1, "from 0 to 1"),
            ("seed", lambda value: 0 <= value < 1 << 63, "at least 0 and below 2**63"),
            ("workers", lambda value: value >= 0, "at least 0 (0: one for each core)"),
            ("unit_mb", lambda value: value == 0 or 0.01 <= value <= 1000, "0 (chosen by size), or from 0.01 to 1000"),
            ("delete_rate", lambda value: 0 <= value <= 0.5, "from 0 to 0.5"),
            ("insert_rate", lambda value: 0 <= value <= 0.5, "from 0 to 0.5"),
            ("token_cache_gb", lambda value: 0 <= value <= 1e9, "from 0 to 1e+09"),
        ):
            if not is_valid(value := getattr(self, flag)):
                raise UserError(f"--{flag} {value}: it must be {expected}")


def parse(arguments: Sequence[str]) -> BuildOptions:
    """Parses the flags of the command, which are the fields of BuildOptions. Raises UserError for a mistake in them."""
    parser = Parser("data_prep.build_examples", DESCRIPTION)
    for option in dataclasses.fields(BuildOptions):
        flag, help = f"--{option.name}", option.metadata["help"]
        if option.name == "lowercase":
            parser.add_switch(option.name, help=help)
        elif option.default is False:
            parser.add_argument(flag, action="store_true", help=help)
        else:
            required = option.default is dataclasses.MISSING
            parser.add_argument(
                flag,
                required=required,
                default=None if required else option.default,
                type=_reported(flag, option.metadata["parse"]),
                metavar=option.metadata["metavar"],
                help=help if required or "default" in help else f"{help}; default {option.default}",
            )
    return BuildOptions(**vars(parser.parse_args(_options_joined(arguments))))


def _reported(flag: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The parser of lists of numbers, with an error that shows what it expects; argparse reports the others itself."""
    if parse is not _numbers:
        return parse

    def reported(text: str) -> Any:
        try:
            return parse(text)
        except ValueError:
            raise UserError(f"{flag} {text}: expected numbers separated by commas, for example 0.8,0.1,0.1") from None

    return reported


def _options_joined(arguments: Sequence[str]) -> list[str]:
    """The same flags with =, because argparse takes a value that begins with -- for another flag."""
    joined = list(arguments)
    if "--engine_options" in joined[:-1]:
        index = joined.index("--engine_options")
        joined[index : index + 2] = [f"--engine_options={joined[index + 1]}"]
    return joined
