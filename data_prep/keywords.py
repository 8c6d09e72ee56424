"""The options of jobs as keyword arguments, for the types of `bert_jax.build_examples` and `bert_jax.train_tokenizer`.

Names and types are those of the dataclasses, which have the descriptions (tests/test_keywords.py compares them). In
addition, `input` may list files, and an option has its further names.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Required, TypedDict

Input = str | Path | Sequence[str | Path]


class ReadingKeywords(TypedDict, total=False):
    """How text is read (data_prep.reading_options)."""

    input: Required[Input]
    output: Required[str | Path]
    input_format: str
    text_field: str
    text: str
    document: str
    document_separator: str
    on_error: str
    workers: int


class TokenizerKeywords(ReadingKeywords, total=False):
    """The options of data_prep.train_tokenizer.TokenizerOptions."""

    vocab_size: Required[int]
    kind: str
    lowercase: bool | None
    alpha: float | None
    character_coverage: float
    max_words: int


class BuildKeywords(ReadingKeywords, total=False):
    """The options of data_prep.build_options.BuildOptions; one of seq_len and max_length is required."""

    tokenizer: Required[str | Path]
    seq_len: int
    max_length: int
    weights: Sequence[float]
    newlines: str
    dedup: bool
    objective: str
    masking: str
    mask_unit: str
    mask_rate: float
    mask_split: Sequence[float]
    random_tokens: str
    reorder_rate: float
    dupe_factor: int
    pack: int
    eval_fraction: float
    short_seq_prob: float | None
    delete_rate: float
    insert_rate: float
    permute_sentences: float
    rotate_documents: float
    lowercase: bool | None
    format: str
    engine: str
    engine_options: str
    part: str
    unit_mb: float
    token_cache: str | Path | None
    token_cache_gb: float
    seed: int
