import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.crc32c import crc32c as crc32c_of_library

from bert_jax import checksum


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
    ids=["zeros", "ones", "up", "down", "check"],
)
def test_published_values(content, expected):
    """RFC 3720, appendix B.4; the last is the check value of CRC-32/ISCSI in the catalogue of Greg Cook."""
    assert checksum.crc32c(content) == checksum.crc32c_of_each([content])[0] == expected


def test_empty_buffer():
    assert checksum.crc32c(b"") == 0


@given(st.lists(st.binary(min_size=4, max_size=70), min_size=1, max_size=8))
def test_checksums_of_strings_of_different_lengths_equal_those_of_a_library(strings):
    assert checksum.crc32c_of_each(strings).tolist() == [crc32c_of_library(string) for string in strings]


def test_checksums_of_each_string_need_four_bytes():
    with pytest.raises(ValueError, match="at least 4 bytes"):
        checksum.crc32c_of_each([b"1234", b"123"])
    assert len(checksum.crc32c_of_each([])) == 0


@pytest.mark.parametrize("size", [4, 5, 63, 64, 127, 4099, 70_001])
def test_pieces_and_blocks_change_nothing(size, monkeypatch):
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    [wanted] = checksum.crc32c_of_each([content.tobytes()])
    assert checksum.crc32c(content) == checksum.crc32c(content.tobytes()) == wanted
    monkeypatch.setattr(checksum, "BLOCK_BYTES", 1000)
    assert checksum.crc32c(content) == wanted
