"""The C++ extension is built so that a fault in it ends a process, and no more."""

from __future__ import annotations

import struct
from pathlib import Path

from vllm_tide import _shm

PT_DYNAMIC, PT_GNU_RELRO = 2, 0x6474E552
DT_BIND_NOW, DT_FLAGS, DT_FLAGS_1 = 24, 30, 0x6FFFFFFB


def segments(elf: bytes) -> list[tuple[int, int, int]]:
    """Type, offset and size of the segments of a 64-bit little-endian file."""
    (at,), (size, number) = (
        struct.unpack_from("<Q", elf, 32),
        struct.unpack_from("<HH", elf, 54),
    )
    heads = (struct.unpack_from("<IIQQQQ", elf, at + n * size) for n in range(number))
    return [(kind, offset, length) for kind, _, offset, _, _, length in heads]


def test_the_extension_is_hardened():
    elf = Path(_shm.__file__).read_bytes()
    found = {kind: (offset, length) for kind, offset, length in segments(elf)}
    assert PT_GNU_RELRO in found
    offset, length = found[PT_DYNAMIC]
    tags = dict(struct.iter_unpack("<QQ", elf[offset : offset + length]))
    # What the loader has bound is read-only: no call can be sent elsewhere.
    assert (
        DT_BIND_NOW in tags or tags.get(DT_FLAGS, 0) & 8 or tags.get(DT_FLAGS_1, 0) & 1
    )
    assert b"__stack_chk_fail" in elf
