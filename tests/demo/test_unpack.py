"""The demo pair's weights are stored compressed and unpacked once."""

import lzma

import pytest

from scripts.demo.unpack import WEIGHTS, pack, packed, unpack


def test_a_packed_file_is_restored_once(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\x01\x3f" * 999)
    pack(weights)
    weights.unlink()
    unpack(weights)
    assert weights.read_bytes() == b"\x01\x3f" * 999

    before = weights.stat().st_ino
    unpack(weights)
    assert weights.stat().st_ino == before


def test_a_damaged_archive_leaves_nothing_behind(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(9999))
    pack(weights)
    weights.unlink()
    archive = packed(weights)
    archive.write_bytes(archive.read_bytes()[:-20])
    with pytest.raises((lzma.LZMAError, EOFError)):
        unpack(weights)
    assert list(tmp_path.iterdir()) == [archive]


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda path: path.parent.name)
def test_the_demo_pair_exists(weights):
    with lzma.open(packed(weights)) as archive:
        assert archive.read() == weights.read_bytes()
