import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_prep.units import summarise


@given(st.lists(st.integers(1, 100), min_size=1, max_size=300), st.sampled_from([100, 101, 128, 512]))
def test_statistics_are_those_of_the_lengths_one_by_one(lengths: list[int], seq_len: int) -> None:
    told = summarise(np.bincount(lengths, minlength=seq_len + 1))
    assert (told["min"], told["max"]) == (min(lengths), max(lengths))
    assert abs(told["mean"] - np.mean(lengths)) < 1e-3
    for name, share in (("median", 0.5), ("p95", 0.95)):
        assert told[name] == np.quantile(lengths, share, method="inverted_cdf")
    uppers = [upper for upper, _ in told["histogram"]]
    assert len(uppers) <= 32 and uppers[-1] == seq_len and uppers == sorted(set(uppers))
    lower = 0
    for upper, count in told["histogram"]:
        assert count == sum(lower < length <= upper for length in lengths)
        lower = upper


def test_no_sequence_has_no_length() -> None:
    assert summarise(np.zeros(9, np.int64))["histogram"] == []
