import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.crc32c import crc32c as librarys

from data_prep.formats.ragged import Ragged, concatenate, crc32c, fixed, varints


def ragged(strings: list[bytes]) -> Ragged:
    return Ragged(np.frombuffer(b"".join(strings), np.uint8), np.array([len(one) for one in strings], np.int64))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
    ids=["zeros", "ones", "up", "down", "check"],
)
def test_crc32c_gives_the_published_values(text: bytes, wanted: int) -> None:
    """RFC 3720, appendix B.4; the last is the check value of CRC-32/ISCSI in the catalogue of Greg Cook."""
    assert crc32c(ragged([text]))[0] == wanted


@given(st.lists(st.binary(min_size=4, max_size=70), min_size=1, max_size=8))
def test_crc32c_of_strings_of_any_lengths_is_the_librarys(strings: list[bytes]) -> None:
    assert crc32c(ragged(strings)).tolist() == [librarys(one) for one in strings]


def test_crc32c_refuses_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="four bytes"):
        crc32c(ragged([b"1234", b"123"]))
    assert len(crc32c(ragged([]))) == 0


@given(st.lists(st.lists(st.binary(max_size=9), min_size=3, max_size=3), min_size=1, max_size=6), st.binary(max_size=4))
def test_concatenate_joins_the_pieces_of_each_row(rows: list[list[bytes]], between: bytes) -> None:
    columns = [ragged([row[column] for row in rows]) for column in range(3)]
    joined = concatenate([columns[0], between, columns[1], columns[2]], len(rows))
    assert joined.strings() == [row[0] + between + row[1] + row[2] for row in rows]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_varints_are_those_of_protocol_buffers(values: list[int]) -> None:
    from google.protobuf.internal.encoder import _VarintBytes

    got = varints(np.array(values, np.int64)[:, None])
    assert got.strings() == [_VarintBytes(value % 2**64) for value in values]


def test_fixed_is_the_memory_of_each_row() -> None:
    values = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    assert fixed(values).strings() == [row.tobytes() for row in values]
    assert fixed(np.arange(3, dtype=np.uint16)).strings() == [bytes([number, 0]) for number in range(3)]
