"""docs/data_format.md is enough to read an output: a reader written from it alone gives what our loader gives."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_format_reader as reader
import numpy as np
import pytest
import tokenizer_kinds
from tokenizer_kinds import unspaced_documents

from bert_jax.data.example import Rows
from bert_jax.data.loader import EVALUATION_SEED, DatasetLoader
from bert_jax.data.shards import open_dataset
from bert_jax.tokenization.tokenizer import load
from data_prep.build import build
from data_prep.build_options import BuildOptions

DOCUMENT = (Path(__file__).parent.parent.parent / "docs" / "data_format.md").read_text(encoding="utf-8")
OPTIONS: dict[str, dict[str, Any]] = {
    "nsp_static_word": {"masking": "static", "mask_unit": "word", "dupe_factor": 2, "seed": 7},
    "nsp_dynamic_word": {"mask_unit": "word"},
    "sop_dynamic_token_packed": {"objective": "sop", "pack": 4, "mask_rate": 0.3},
    "doc_sentences_static_ngram_packed": {
        "objective": "doc_sentences",
        "pack": 3,
        "masking": "static",
        "mask_unit": "ngram",
        "mask_split": (0.5, 0.3, 0.2),
    },
    "nsp_dynamic_by_frequency": {"random_tokens": "unigram", "mask_split": (0.2, 0.7, 0.1), "delete_rate": 0.1},
    "nsp_dynamic_out_of_order": {"mask_unit": "word", "reorder_rate": 0.1},
    "sop_static_out_of_order": {"objective": "sop", "masking": "static", "mask_unit": "ngram", "reorder_rate": 0.3},
    "nsp_static_word_bpe": {"masking": "static", "mask_unit": "word"},
    "single_dynamic_span_unigram": {"objective": "single", "mask_unit": "span"},
    "sop_ngram_spm": {"objective": "sop", "mask_unit": "ngram", "masking": "static"},
    "full_sentences_dynamic_ngram": {"objective": "full_sentences", "mask_unit": "ngram"},
    "single_dynamic_span": {"objective": "single", "mask_unit": "span"},
    "nsp_dynamic_infill_packed": {"mask_unit": "infill", "pack": 2, "mask_rate": 0.4},
    "full_sentences_dynamic_infill": {
        "objective": "full_sentences",
        "mask_unit": "infill",
        "mask_split": (1.0, 0.0, 0.0),
    },
    "single_static_span_packed": {"objective": "single", "pack": 2, "masking": "static", "mask_unit": "span"},
    "unspaced_static_word_bpe": {"objective": "single", "masking": "static", "mask_unit": "word"},
    "unspaced_dynamic_ngram_bytes": {"mask_unit": "ngram"},
}


# By how they are trained in tests/helpers/tokenizer_kinds.py; the other outputs have WordPiece.
TOKENIZERS = {
    "nsp_static_word_bpe": "bpe",
    "full_sentences_dynamic_infill": "bpe",
    "single_dynamic_span_unigram": "unigram",
    "sop_ngram_spm": "sentencepiece_bpe",
    "unspaced_static_word_bpe": "bpe",
    "unspaced_dynamic_ngram_bytes": "unigram_bytes",
}


@pytest.fixture(scope="module", params=OPTIONS)
def output(request: pytest.FixtureRequest, sample_text: Path, vocab_dir: Path, tmp_path_factory) -> reader.Output:
    folder, tokenizer = tmp_path_factory.mktemp("format"), vocab_dir
    content = sample_text.read_text(encoding="utf-8").replace(" of ", "\tof ")  # byte-level BPE has tokens of tabs
    if request.param.startswith("unspaced"):
        content = "\n\n".join(unspaced_documents(30))
    if kind := TOKENIZERS.get(request.param):
        tokenizer = folder / "tokenizer"
        tokenizer_kinds.make(kind, content.split("\n"), tokenizer)
    options = OPTIONS[request.param]
    text = folder / "text.txt"
    text.write_text(content, encoding="utf-8")
    build(BuildOptions(str(text), tokenizer, folder / "out", 48, eval_fraction=0.25, workers=1, **options))
    return reader.Output(folder / "out")


@pytest.mark.parametrize("part", ["train", "eval"])
def test_reader_from_the_documentation_gives_the_loaders_batches(output: reader.Output, part) -> None:
    manifest = output.manifest
    width, pack, most = manifest["seq_len"], manifest["pack"], manifest["masking"]["max_predictions"]
    dataset = open_dataset(output.directory, part)
    loader = DatasetLoader(dataset, dataset.vocabulary(), seed=3)
    rows = list(output.rows(part))
    assert len(rows) == manifest["parts"][part]["rows"] == dataset.rows
    [batch] = loader.evaluation_batches(len(rows))
    for number, stored in enumerate(rows):
        row = stored
        if dataset.masking.unit == "infill":
            row = reader.infilled(output, stored, width, EVALUATION_SEED, 0)
        for name, values in reader.model_view(row, width, pack).items():
            assert getattr(batch, name)[number].tolist() == values, name
        ids, predicted = list(row.ids), dict(row.predicted)
        if not dataset.static and not predicted:
            for sequence in row.sequences:
                words = row.ids[sequence.start : sequence.start + sequence.length]
                for position, (seen, truth) in reader.masks(output, words, sequence, EVALUATION_SEED, 0).items():
                    ids[sequence.start + position] = seen
                    predicted[sequence.start + position] = truth
        filler = [0] * (most - len(predicted))
        assert batch.input_ids[number].tolist() == ids
        assert batch.masked_positions[number].tolist() == sorted(predicted) + filler
        assert batch.masked_ids[number].tolist() == [predicted[slot] for slot in sorted(predicted)] + filler
        assert batch.masked_weights[number].tolist() == [1.0] * len(predicted) + filler


def test_special_tokens_and_insides_of_words_are_those_of_the_tokenizer(output: reader.Output) -> None:
    tokenizer = load(output.directory / "tokenizer")
    assert output.special == set(tokenizer.special_ids)
    assert output.inside == set(np.flatnonzero(tokenizer.continuation).tolist())


def test_scripts_without_spaces_are_those_of_the_tokenizer(output: reader.Output) -> None:
    tokenizer = load(output.directory / "tokenizer")
    if output.manifest["masking"].get("words") is None:
        text = [row.predicted.get(slot, token) for row in output.rows("train") for slot, token in enumerate(row.ids)]
        assert not tokenizer.unspaced[text].any()
        return
    assert output.unspaced == set(np.flatnonzero(tokenizer.unspaced).tolist())
    assert output.attached == set(np.flatnonzero(tokenizer.attached).tolist())
    assert 0 < len(output.attached) < len(output.unspaced)


def test_static_masks_are_those_of_the_documentation(output: reader.Output) -> None:
    """Epoch 0 and the manifest's seed, over the ids as they were before masking."""
    manifest = output.manifest
    if manifest["masking"]["kind"] == "dynamic":
        assert all(not row.predicted for row in output.rows("train"))
        return
    for row in output.rows("train"):
        truth = [row.predicted.get(slot, token) for slot, token in enumerate(row.ids)]
        found: dict[int, int] = {}
        for sequence in row.sequences:
            ids = truth[sequence.start : sequence.start + sequence.length]
            for position, (seen, was) in reader.masks(output, ids, sequence, manifest["seed"], 0).items():
                assert row.ids[sequence.start + position] == seen
                found[sequence.start + position] = was
        assert found == row.predicted


def test_keys_guarantees_and_counts_hold(output: reader.Output) -> None:
    manifest = output.manifest
    seen: set[int] = set()
    for part in ("train", "eval"):
        rows = list(output.rows(part))
        keys = [sequence.key for row in rows for sequence in row.sequences]
        units: dict[int, list[int]] = {}
        for key in keys:
            units.setdefault(key >> 32, []).append(key & 0xFFFFFFFF)
        assert all((unit >= 1 << 31) == (part == "eval") for unit in units)
        assert all(sorted(ordinals) == list(range(len(ordinals))) for ordinals in units.values())
        assert seen.isdisjoint(keys) and len(set(keys)) == len(keys)
        seen.update(keys)
        counts = manifest["parts"][part]
        assert counts["documents"] == counts["used"] + sum(counts["skipped"].values())
        assert counts["rows"] == len(rows) and counts["sequences"] == len(keys)
        assert counts["tokens"] == sum(sequence.length for row in rows for sequence in row.sequences)
        if manifest["masking"]["kind"] == "static":
            assert counts["predictions"] == sum(len(row.predicted) for row in rows)


def test_unigram_counts_are_those_of_train(output: reader.Output) -> None:
    counts = [0] * output.manifest["tokenizer"]["vocab_size"]
    for row in output.rows("train"):
        for slot, token in enumerate(row.ids):
            counts[row.predicted.get(slot, token)] += 1
    assert output.unigram_counts() == [0 if index in output.special else count for index, count in enumerate(counts)]


def test_every_column_and_every_key_of_the_manifest_is_documented(output: reader.Output) -> None:
    for name in Rows._fields:
        assert f"| `{name}` |" in DOCUMENT, name
    named = set(re.findall(r"`([\w.]+)`", DOCUMENT))
    manifest = output.manifest
    wanted = set(manifest) | set(manifest["masking"]) | set(manifest["tokenizer"]) | set(manifest["counts"])
    wanted |= set(manifest["shards"]) | {"name", "rows", "bytes", "sha256"} | set(manifest["sources"][0])
    wanted |= {key for part in manifest["parts"].values() for key in part}
    assert not wanted - named, f"docs/data_format.md does not name {sorted(wanted - named)}"


def test_every_file_of_an_output_is_documented(output: reader.Output) -> None:
    tree = DOCUMENT.split("## The folder")[1].split("## ")[0]
    for path in output.directory.rglob("*"):
        if path.is_file() and path.suffix != ".arrow":
            assert path.name in tree, path.name


# The integers of a manifest that may be above 2**53, and what they are below.
WIDE = {"seed": 2**63, "first_sequence_key": 2**64}


def assert_json_that_any_language_reads(directory: Path) -> dict[str, int]:
    """No NaN or infinity, and no integer over 2**53 but the documented ones, whose largest values are returned."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"), parse_constant=refuse)
    wide: dict[str, int] = {}
    for key, number in integers(manifest):
        if abs(number) > 2**53:
            assert 0 <= number < WIDE[key], (key, number)
            wide[key] = max(number, wide.get(key, 0))
    return wide


def integers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """The integers in a JSON value, each with the key that is the nearest above it."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from integers(one, name)
    elif isinstance(value, list):
        for one in value:
            yield from integers(one, key)
    elif isinstance(value, int):
        yield key, value


def test_numbers_in_the_manifest_are_json_that_any_language_reads(output: reader.Output) -> None:
    assert not assert_json_that_any_language_reads(output.directory)


@pytest.mark.parametrize("format", ["arrow", "tfds"])
def test_only_the_seed_takes_more_than_53_bits(sample_text: Path, vocab_dir: Path, tmp_path: Path, format: str) -> None:
    options: dict[str, Any] = {"masking": "static", "eval_fraction": 0.25, "workers": 1}
    build(BuildOptions(str(sample_text), vocab_dir, tmp_path / "out", 48, format=format, seed=2**63 - 1, **options))
    wide = assert_json_that_any_language_reads(tmp_path / "out")
    assert wide == {"seed": 2**63 - 1}
