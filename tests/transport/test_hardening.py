"""The C++ extension is linked so that a bug in it cannot redirect calls."""

from __future__ import annotations

import struct
from pathlib import Path

from vllm_tide import _shm

PT_DYNAMIC, PT_GNU_RELRO = 2, 0x6474E552
DT_BIND_NOW, DT_FLAGS, DT_FLAGS_1 = 24, 30, 0x6FFFFFFB


def segments(elf: bytes) -> list[tuple[int, int, int]]:
    """Return type, offset and size of the segments of a 64-bit little-endian file."""
    (at,), (size, number) = (
        struct.unpack_from("<Q", elf, 32),
        struct.unpack_from("<HH", elf, 54),
    )
    heads = (struct.unpack_from("<IIQQQQ", elf, at + n * size) for n in range(number))
    return [(kind, offset, length) for kind, _, offset, _, _, length in heads]


def test_relocations_bound_by_the_loader_are_read_only():
    elf = Path(_shm.__file__).read_bytes()
    ranges = {kind: (offset, length) for kind, offset, length in segments(elf)}
    assert PT_GNU_RELRO in ranges
    offset, length = ranges[PT_DYNAMIC]
    tags = dict(struct.iter_unpack("<QQ", elf[offset : offset + length]))
    assert (
        DT_BIND_NOW in tags or tags.get(DT_FLAGS, 0) & 8 or tags.get(DT_FLAGS_1, 0) & 1
    )
