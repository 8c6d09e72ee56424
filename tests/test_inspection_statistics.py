"""The statistics are counted again here row by row and position by position, as the format documents the columns."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bert_jax.data.shards import open_dataset
from bert_jax.reporting.chart import bin_counts
from data_prep.build_examples import build
from data_prep.build_options import BuildOptions
from data_prep.inspection.statistics import REPLACEMENTS
from data_prep.inspection.verification import verify

OPTIONS = {
    "nsp_static_word": {"masking": "static", "mask_unit": "word"},
    "nsp_dynamic_token": {"masking": "dynamic", "mask_unit": "token"},
    "sop_static_packed": {"objective": "sop", "masking": "static", "mask_unit": "word", "pack": 4, "mask_rate": 0.3},
    "single_dynamic_packed": {"objective": "single", "masking": "dynamic", "mask_unit": "word", "pack": 3},
    "sentences_static_token": {"objective": "full_sentences", "masking": "static", "mask_unit": "token"},
    "doc_sentences_static": {"objective": "doc_sentences", "masking": "static", "mask_unit": "word"},
}


@pytest.fixture(scope="module", params=OPTIONS)
def output(request: pytest.FixtureRequest, sample_text: Path, vocab_dir: Path, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("statistics") / "out"
    build(
        BuildOptions(
            str(sample_text), vocab_dir, directory, 64, eval_fraction=0.25, workers=1, **OPTIONS[request.param]
        )
    )
    return directory


def test_statistics_equal_a_count_by_hand(output: Path) -> None:
    """With static masks; `verify` compares the counts of dynamic ones with the manifest."""
    found = verify(output)
    for part, statistics in found.statistics.items():
        dataset = open_dataset(output, part)
        inside = set(np.flatnonzero(dataset.vocabulary().continuation).tolist())
        rows = dataset.gather(np.arange(dataset.rows))
        names = ("lengths", "filled", "packed", "labels", "predictions", "runs", "replaced", "unigrams")
        by_hand: dict[str, Counter] = {name: Counter() for name in names}
        for row in range(dataset.rows):
            ids = rows.input_ids[row].tolist()
            lengths = [length for length in rows.sequence_lengths[row].tolist() if length]
            count = 0 if rows.masked_counts is None else int(rows.masked_counts[row])
            positions = [] if rows.masked_positions is None else rows.masked_positions[row, :count].tolist()
            labels = {position: int(rows.masked_ids[row, number]) for number, position in enumerate(positions)}
            by_hand["filled"][sum(lengths)] += 1
            by_hand["packed"][len(lengths)] += 1
            by_hand["unigrams"].update(
                labels.get(position, token) for position, token in enumerate(ids[: sum(lengths)])
            )
            start = 0
            for sequence, length in enumerate(lengths):
                by_hand["lengths"][length] += 1
                by_hand["labels"][int(rows.next_sentence_labels[row, sequence])] += 1
                by_hand["predictions"][sum(start <= position < start + length for position in positions)] += 1
                start += length
            for position, label in labels.items():
                mask = ids[position] == found.tokenizer.mask_id
                by_hand["replaced"]["[MASK]" if mask else "kept" if ids[position] == label else "random"] += 1
                if position - 1 not in labels:
                    end, words = position, 0
                    while end in labels:
                        words += end == position or labels[end] not in inside or dataset.masking.unit == "token"
                        end += 1
                    by_hand["runs"][words] += 1
        drawn = {"predictions", "runs", "replaced"} if not dataset.static else set()
        for name in set(names) - drawn - {"labels", "replaced"}:
            assert Counter(dict(enumerate(getattr(statistics, name).tolist()))) == by_hand[name], name
        assert Counter(statistics.labels) == by_hand["labels"]
        assert statistics.tokens == sum(length * count for length, count in by_hand["lengths"].items())
        if dataset.static:
            assert statistics.replaced.tolist() == [by_hand["replaced"][name] for name in REPLACEMENTS]


def test_share_of_each_replacement_is_that_of_the_paper(output: Path) -> None:
    """80, 10, 10 (Devlin et al. 2019), within five standard deviations: one false alarm in 10**6."""
    counts = sum(part.replaced for part in verify(output).statistics.values())
    for count, share in zip(counts, (0.8, 0.1, 0.1), strict=True):
        assert abs(count - share * counts.sum()) < 5 * (share * (1 - share) * counts.sum()) ** 0.5


def test_every_document_is_accounted_for(output: Path, sample_text: Path) -> None:
    manifest = json.loads((output / "manifest.json").read_text())
    counts = manifest["counts"]
    assert counts["documents"] == 12 == counts["used"] + sum(counts["skipped"].values())


@pytest.mark.parametrize(("size", "bins"), [(1, 8), (7, 8), (64, 8), (65, 8), (129, 32)])
def test_bins_are_a_partition(size: int, bins: int) -> None:
    counts = np.arange(size + 1)
    found = bin_counts(counts, bins)
    assert len(found) <= bins and found[0][0] == 1 and found[-1][1] == size
    assert all(last + 1 == first for (_, last, _), (first, _, _) in itertools.pairwise(found))
    assert sum(count for _, _, count in found) == counts.sum()
