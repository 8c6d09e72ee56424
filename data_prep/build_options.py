"""The options of build-examples, and the shares of a corpus that several processes or machines build on their own.

A share is a group of whole files (`share_sources`). Share k numbers its units from k * 2**20, so shards and sequence
keys never collide between shares, and merge-shards joins outputs without reading a row. Machines that have the same
files in different places divide them alike, because names, sizes and weights alone decide (`digest`).
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from bert_jax.config import options as option_lib
from bert_jax.config.options import Valid, between, option
from bert_jax.data.example import max_predictions
from bert_jax.data.manifest import COUNTED, PAIRS, SCHEMA_VERSION
from bert_jax.data.masking import rule as masking_rule
from bert_jax.data.masking.rule import MaskingRule, ReplacementShares
from bert_jax.errors import UserError
from data_prep import output_files, sequences
from data_prep.readers.corpus import Reading, Source
from data_prep.sentences import RULE_VERSION

MOST = 2048  # shares; times UNITS it gives the 31 bits that a sequence key has for the unit's number
UNITS = 1 << 20  # in a share
_PART = re.compile(r"\+(\d+)|(\d+|all)/(\d+)")


class Share(NamedTuple):
    """Share `number` of `of`. If `of` is 0, the job has all files, and is merged with earlier outputs later."""

    number: int
    of: int

    @property
    def is_divided(self) -> bool:
        """Whether other shares hold the rest of the corpus. Number 0 of 0 is an earlier output."""
        return self.of > 1 or (self.of == 0 and self.number > 0)

    @property
    def first_unit(self) -> int:
        return self.number * UNITS


WHOLE = Share(0, 1)


def parse_share(part: str) -> list[Share]:
    """Returns the shares that --part selects.

    Args:
        part: 3/16, all/16, +5, or "" for the whole corpus.

    Raises:
        UserError: The text has another form, or a number is out of range.
    """
    if not part:
        return [WHOLE]
    match = _PART.fullmatch(part)
    added, number, of = match.groups() if match else (None, None, None)
    if added is not None and int(added) < MOST:
        return [Share(int(added), 0)]
    shares = [Share(index, int(of)) for index in range(int(of))] if of is not None and int(of) <= MOST else []
    if number is not None and number != "all":
        shares = [share for share in shares if share.number == int(number)]
    if not shares:
        raise UserError(f"--part {part}: use I/N with I from 0 to N - 1, all/N, or +NUMBER, and at most {MOST} shares")
    return shares


def share_sources(share: Share, sources: Sequence[Source]) -> tuple[Source, ...]:
    """Selects a share's files.

    Files are taken from the largest to the smallest, equal sizes by name. Each goes to the share with the fewest bytes.

    Raises:
        UserError: There are fewer files than shares.
    """
    if share.of <= 1:
        return tuple(sources)
    if len(sources) < share.of:
        raise UserError(
            f"--part divides files among {share.of} jobs, but --input matches {len(sources)}; split the files, or use "
            "fewer parts"
        )
    sizes = [0] * share.of  # bytes of each share
    chosen = []
    for _, _, source in sorted(zip((-source.bytes for source in sources), names(sources), sources, strict=True)):
        smallest = sizes.index(min(sizes))
        # An empty file counts as one byte; otherwise all empty files would go to one share.
        sizes[smallest] += max(source.bytes, 1)
        if smallest == share.number:
            chosen.append(source)
    return tuple(sorted(chosen))


def digest(sources: Sequence[Source]) -> str:
    """Hashes the files' names, sizes and weights."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, source in sorted(zip(names(sources), sources, strict=True)):
        size, weight = source.bytes, source.weight
        hasher.update(f"{name}\0{size}{'' if weight == 1 else f'*{weight:g}'}\n".encode(errors="surrogateescape"))
    return hasher.hexdigest()


def names(sources: Sequence[Source]) -> list[str]:
    """Names the files uniquely, by their file names or else by their paths below the folder common to all."""
    paths = [PurePath(source.path) for source in sources]
    if len({path.name for path in paths}) == len(paths):
        return [path.name for path in paths]
    folders = set.intersection(*({*path.parents} for path in paths))
    above = max((len(folder.parts) for folder in folders), default=0)
    return ["/".join(path.parts[above:]) for path in paths]


def manifest_shares(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a manifest's share entries, `{number, of, corpus, sources, documents, versions}`.

    `of` is the share count of the job, or 0 for a share added later; `corpus` is the `digest` of all files of that job;
    `sources` counts the manifest's sources that belong to the share.
    """
    if shares := manifest.get("shares"):
        return [dict(share) for share in shares]
    # An output built without --part is share number 0.
    return [
        {
            "number": 0,
            "of": 0,
            "corpus": "",
            "sources": len(manifest["sources"]),
            "documents": manifest["counts"]["documents"] - sum(manifest["skipped_reading"].values()),
            "versions": manifest["versions"],
        }
    ]


ENGINES = ("local", "beam", "ray")  # data_prep/engines

DESCRIPTION = """\
Builds pretraining examples from text: sentences, token ids, pairs, fixed-width Arrow shards with a manifest.

  bert-jax build-examples --input 'books/*.txt.xz' --tokenizer vocab.txt --output data/books_128 --seq_len 128

The input is text with a blank line between documents, .jsonl, .csv, .tsv, .parquet, .arrow, a folder of Hugging Face's
save_to_disk, .warc, .wet or .xml of MediaWiki, each plain or .bz2 .gz .xz .zst, on this machine, gs://, s3:// or hf://;
or hf:ORG/NAME[:CONFIG[:SPLIT]] or tfds:NAME[:SPLIT]. A line may be a sentence or a paragraph.
OUTPUT gets train/, eval/ (documents chosen by a hash of their text), tokenizer/ and manifest.json. The same text and
options give the same bytes, with any number of workers. A job that was stopped continues by the same command.
"""


@dataclass(frozen=True)
class BuildOptions(Reading):
    """Options of `build` and of the command, which also describes them.

    Raises:
        UserError: A value is out of range, or two options exclude each other. The message names the flag.
    """

    input: str | Path = option(
        help="files, for example 'text/*.txt.xz'; commas separate several patterns", metavar="GLOB"
    )
    tokenizer: str | Path = option(help="a tokenizer folder, a vocab.txt, or hf:NAME", metavar="DIR_OR_VOCAB")
    output: str | Path = option(help="the folder to create", metavar="DIR")
    seq_len: int = option(
        help="tokens in a row, for example 128", metavar="T", valid=between(8, 65535), aliases=["max_length"]
    )
    weights: tuple[float, ...] = option(
        (), "how often each pattern's documents are read, such as 1,0.5,3", metavar="W,W"
    )
    newlines: str = option(
        "join",
        "line breaks: join (a space, or none in Chinese), or keep (byte BPE)",
        choices=("join", "keep"),
    )
    dedup: bool = option(False, "skip documents that equal an earlier one, apart from white space")
    objective: str = option(
        "nsp",
        "nsp (BERT), sop (ALBERT), full_sentences, doc_sentences (RoBERTa), single (SpanBERT)",
    )
    masking: str = option(
        "dynamic",
        "dynamic (new masks every epoch), static (stored)",
        choices=("dynamic", "static"),
    )
    mask_unit: str = option(
        "token",
        "token, word, ngram (ALBERT), span (SpanBERT), infill",
        choices=masking_rule.UNITS,
    )
    mask_rate: float = option(
        0.15,
        "share of a sequence's tokens to predict",
        metavar="R",
        valid=Valid(lambda rate: 0 < rate <= 1, "a share above 0 and at most 1, such as 0.15"),
    )
    mask_split: tuple[float, ...] = option(
        (0.8, 0.1, 0.1),
        "of these, shares of [MASK], random, unchanged; default 0.8,0.1,0.1",
        metavar="M,R,K",
        valid=Valid(lambda shares: len(shares) == 3, "three shares that sum to 1, such as 0.8,0.1,0.1"),
    )
    random_tokens: str = option("uniform", "uniform, or unigram (as in the text)")
    reorder_rate: float = option(
        0.0,
        "share of tokens to shuffle, predicted too (StructBERT)",
        metavar="R",
    )
    dupe_factor: int = option(
        1,
        "times that a document is used, with other pairs and masks",
        metavar="K",
        valid=between(1, 1000),
    )
    pack: int = option(1, "most sequences in a row; 1: no packing", metavar="S", valid=between(1, 256))
    eval_fraction: float | None = option(
        None,
        "share of documents for eval/; default: 0.01, at most 10 M tokens",
        metavar="R",
        valid=Valid(lambda share: share is None or 0 <= share < 1, "a share of at least 0 and below 1"),
    )
    short_seq_prob: float | None = option(
        None,
        "nsp, sop: share of shorter sequences; default 0.1, or 0 with --pack",
        metavar="P",
        valid=between(0, 1),
    )
    delete_rate: float = option(0.0, "noise: share of tokens to delete", metavar="R", valid=between(0, 0.5))
    insert_rate: float = option(0.0, "noise: random tokens to insert, per token", metavar="R", valid=between(0, 0.5))
    permute_sentences: float = option(
        0.0,
        "noise: share of sentences to shuffle (BART; not nsp, sop)",
        metavar="R",
        valid=between(0, 1),
    )
    rotate_documents: float = option(
        0.0,
        "noise: share of documents to rotate (BART; not nsp, sop)",
        metavar="R",
        valid=between(0, 1),
    )
    lowercase: bool | None = option(
        None,
        "for a vocab.txt, or --nolowercase; default: unless it holds capitals",
    )
    format: str = option("arrow", "of the shards: arrow, or for other programs tfds", choices=output_files.FORMATS)
    engine: str = option("local", "local, beam or ray (docs/data.md)", choices=ENGINES)
    engine_options: str = option(
        "", "flags for beam or ray, such as '--runner=FlinkRunner'", metavar="FLAGS", dashes=True
    )
    part: str = option(
        "",
        "a share, for merge-shards; all/N: all; +K: a later one",
        metavar="I/N",
    )
    unit_mb: float = option(
        0.0,
        "text of a work unit; 0: a 16th of all, 1 to 8",
        metavar="MB",
        valid=Valid(lambda size: size == 0 or 0.01 <= size <= 1000, "0 (chosen by size), or from 0.01 to 1000"),
    )
    token_cache: str | Path | None = option(
        None,
        "folder of token ids for later jobs on the same text",
        metavar="DIR",
    )
    token_cache_gb: float = option(50.0, "its maximum size (2.2 bytes a token)", metavar="GB", valid=between(0, 1e9))
    seed: int = option(
        0,
        "seed of pairs and masks",
        valid=Valid(lambda seed: 0 <= seed < 1 << 63, "a whole number from 0 to 2**63 - 1"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        sequences.check(self.objective)
        parse_share(self.part)
        is_static, is_pair = self.masking == "static", self.objective in PAIRS
        refused = {
            "--part builds arrow shards, which merge_shards joins; omit --format": (
                bool(self.part) and self.format != "arrow"
            ),
            f"--short_seq_prob is only for --objective {' and '.join(PAIRS)}; leave it out for {self.objective}": (
                not is_pair and self.short_seq_prob
            ),
            "--permute_sentences and --rotate_documents change the order that the labels of --objective "
            f"{self.objective} describe; leave them out, or use full_sentences, doc_sentences or single": (
                is_pair and (self.permute_sentences or self.rotate_documents)
            ),
            "--mask_unit infill needs --masking dynamic: rows with static masks would lack the text of the spans, "
            "which --verify and the token counts need": is_static and self.mask_unit == "infill",
            # `rule` itself refuses rates and shares that contradict each other.
            "--random_tokens unigram needs --masking dynamic, because counts are known only at the end of the job": (
                self.rule.random == "unigram" and is_static
            ),
        }
        for problem, applies in refused.items():
            if applies:
                raise UserError(problem)

    @property
    def rule(self) -> MaskingRule:
        shares = ReplacementShares(*map(float, self.mask_split))
        rates = float(self.mask_rate), float(self.reorder_rate)
        return MaskingRule(self.mask_unit, rates[0], shares, self.random_tokens, rates[1], words="scripts")

    @property
    def counted(self) -> tuple[str, ...]:
        """Names of the manifest's counts under these options, apart from `skipped`."""
        pairs = ("random_pairs",) if self.objective == "nsp" else ()
        words = ("words", "long_words") if self.mask_unit != "token" else ()
        return (*COUNTED, "left_out", *pairs, *words)

    @property
    def max_predictions(self) -> int:
        return max_predictions(self.seq_len, self.pack, self.mask_rate, self.reorder_rate)


def parse(arguments: Sequence[str]) -> BuildOptions:
    """Parses the command's flags, which are the fields of BuildOptions.

    Raises:
        UserError: A flag is unknown, missing or invalid.
    """
    return option_lib.parse("bert-jax build-examples", DESCRIPTION, BuildOptions, arguments)


# Options that do not affect the shards, or only through the sources, the tokenizer and the unit size.
NOT_COMPARED = frozenset(
    ("input", "weights", "on_error", "tokenizer", "lowercase", "unit_mb", "output")
    + ("engine", "engine_options", "workers", "token_cache", "token_cache_gb")
)


class Arguments(NamedTuple):
    """Everything that decides the shards' bytes."""

    options: BuildOptions
    short_seq_prob: float
    eval_fraction: float
    unit_bytes: int
    share: Share
    sources: tuple[Source, ...]  # of the share
    corpus_hash: str  # over the sources of all shares
    tokenizer_hash: str

    def to_json(self) -> dict[str, Any]:
        """The content of arguments.json."""
        values = {name: value for name, value in vars(self.options).items() if name not in NOT_COMPARED} | {
            "short_seq_prob": self.short_seq_prob,
            "eval_fraction": self.eval_fraction,
            "unit_bytes": self.unit_bytes,
            "sources": self.sources,
            "tokenizer_hash": self.tokenizer_hash,
            "sentence_rule": RULE_VERSION,
            "schema_version": SCHEMA_VERSION,
        }
        return json.loads(json.dumps(values))
