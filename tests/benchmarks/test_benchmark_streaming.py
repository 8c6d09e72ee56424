"""The statistics of benchmarks.streaming, of known orders and of streamed rows."""

import pytest

from benchmarks import streaming
from benchmarks.streaming import BATCHES_TOGETHER, DOCUMENT_ROWS, permuted_order, quality, streamed_order


def test_statistics_of_a_random_order_are_those_of_chance():
    rows, together = 200_000, 16 * BATCHES_TOGETHER
    found = quality(permuted_order(rows), rows, 16)
    assert found.document_pairs == pytest.approx(1, abs=0.3)  # 228 pairs are expected: more than 4 standard deviations
    assert found.batch_variance == pytest.approx(1, abs=0.1)
    assert found.variance_of_100 == pytest.approx(1, abs=0.5)
    assert found.document_again == pytest.approx(1 - (1 - (DOCUMENT_ROWS - 1) / rows) ** together, abs=0.01)
    assert found.moved < 0.01


def test_statistics_of_rows_in_order_show_it():
    found = quality(lambda numbers: numbers, 20_000, 20)
    pairs = DOCUMENT_ROWS * (DOCUMENT_ROWS - 1) / 2
    assert found.document_pairs == pytest.approx(pairs / (190 * 19 / 19_999))
    assert found.document_again == found.moved == 1
    assert found.batch_variance > 10 and found.variance_of_100 > 500


@pytest.mark.slow
def test_streamed_rows_are_shuffled_well_within_batches():
    """A batch has no more rows of one document than by chance, and is as mixed as random rows are."""
    rows = 400_000
    found = quality(streamed_order(rows, 16, 0.05 * rows * streaming.ROW_BYTES), rows, 16)
    assert found.document_pairs < 1
    assert found.batch_variance == pytest.approx(1, abs=0.15)
    assert found.variance_of_100 < 12 and found.document_again < 0.9
    assert found.moved < 0.05
