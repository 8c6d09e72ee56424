"""Figures are counted again here one row, one slot at a time, from the documentation of the columns."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bert_jax.data.shards import open_dataset
from data_prep.audit import verify
from data_prep.build_examples import build
from data_prep.figures import binned

OPTIONS = {
    "nsp_static_word": {"masking": "static", "mask_unit": "word"},
    "nsp_dynamic_token": {"masking": "dynamic", "mask_unit": "token"},
    "sentences_static_token": {"objective": "full_sentences", "masking": "static", "mask_unit": "token"},
}


@pytest.fixture(scope="module", params=OPTIONS)
def output(request: pytest.FixtureRequest, sample_text: Path, vocab_dir: Path, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("figures") / "out"
    build(str(sample_text), vocab_dir, directory, 64, eval_fraction=0.25, workers=1, **OPTIONS[request.param])
    return directory


def test_figures_are_those_of_a_count_by_hand(output: Path) -> None:
    """Static masks; the counts of dynamic ones are compared with the manifest by verify."""
    found = verify(output)
    for part, figures in found.figures.items():
        dataset = open_dataset(output, part)
        inside = set(np.flatnonzero(dataset.tokenizer().continuation).tolist())
        rows = dataset.gather(np.arange(dataset.rows))
        lengths, labels, predictions, runs = Counter(), Counter(), Counter(), Counter()
        replaced, unigrams = Counter(), Counter()
        for row in range(dataset.rows):
            ids = rows.input_ids[row].tolist()
            length = int(rows.sequence_lengths[row, 0])
            lengths[length] += 1
            labels[int(rows.next_sentence_labels[row, 0])] += 1
            if rows.masked_counts is None:
                unigrams.update(ids[:length])
                continue
            count = int(rows.masked_counts[row])
            predictions[count] += 1
            slots = rows.masked_positions[row, :count].tolist()
            truths = dict(zip(slots, rows.masked_ids[row, :count].tolist(), strict=True))
            for slot, truth in truths.items():
                seen = ids[slot]
                mask = found.tokenizer.mask_id
                replaced["[MASK]" if seen == mask else "kept" if seen == truth else "random"] += 1
                if slot - 1 not in truths:
                    end, words = slot, 0
                    while end in truths:
                        words += end == slot or truths[end] not in inside or dataset.mask_unit == "token"
                        end += 1
                    runs[words] += 1
            unigrams.update(truths.get(slot, token) for slot, token in enumerate(ids[:length]))
        assert Counter(dict(enumerate(figures.lengths.tolist()))) == lengths
        assert +Counter(figures.labels) == labels
        assert Counter(dict(enumerate(figures.unigrams.tolist()))) == unigrams
        assert figures.tokens == sum(length * count for length, count in lengths.items()) == sum(unigrams.values())
        if dataset.static:
            assert Counter(dict(enumerate(figures.predictions.tolist()))) == predictions
            assert Counter(dict(enumerate(figures.runs.tolist()))) == runs
            assert figures.replaced.tolist() == [replaced[name] for name in ("[MASK]", "random", "kept")]


def test_share_of_each_replacement_is_that_of_the_paper(output: Path) -> None:
    """80, 10, 10 (Devlin et al. 2019): of some thousand predictions, five deviations either way; 1 in 10**6 alarms."""
    counts = sum(figures.replaced for figures in verify(output).figures.values())
    for count, share in zip(counts, (0.8, 0.1, 0.1), strict=True):
        assert abs(count - share * counts.sum()) < 5 * (share * (1 - share) * counts.sum()) ** 0.5


def test_every_document_is_accounted_for(output: Path, sample_text: Path) -> None:
    manifest = json.loads((output / "manifest.json").read_text())
    counts = manifest["counts"]
    assert counts["documents"] == 12 >= sum(counts["skipped"].values())


@pytest.mark.parametrize(("size", "bins"), [(1, 8), (7, 8), (64, 8), (65, 8), (129, 32)])
def test_bins_are_a_partition(size: int, bins: int) -> None:
    counts = np.arange(size + 1)
    found = binned(counts, bins)
    assert len(found) <= bins and found[0][0] == 1 and found[-1][1] == size
    assert all(last + 1 == first for (_, last, _), (first, _, _) in itertools.pairwise(found))
    assert sum(count for _, _, count in found) == counts.sum()
