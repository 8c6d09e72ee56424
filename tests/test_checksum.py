import numpy as np
import pytest

from bert_jax import checksum
from data_prep.formats.ragged import crc32c, fixed


def test_published_values():
    """RFC 3720, appendix B.4."""
    assert checksum.crc32c(bytes(32)) == 0x8A9136AA
    assert checksum.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert checksum.crc32c(bytes(range(32))) == 0x46DD794E
    assert checksum.crc32c(b"") == 0


@pytest.mark.parametrize("size", [4, 5, 63, 64, 127, 4099, 70_001])
def test_pieces_and_blocks_change_nothing(size, monkeypatch):
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    [wanted] = crc32c(fixed(content[None]))
    assert checksum.crc32c(content) == checksum.crc32c(content.tobytes()) == wanted
    monkeypatch.setattr(checksum, "_BLOCK", 1000)
    assert checksum.crc32c(content) == wanted
