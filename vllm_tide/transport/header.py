"""Page 0 of a segment: what it is, who owns it, whether the header is undamaged.

Magic, format version, size, owner, length and CRC at 0; the spec as JSON at 256.
Written once, before the segment's name is told to anyone.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from vllm_tide import _shm
from vllm_tide.transport.process import Holder

PAGE_BYTES = 4096
LINE_BYTES = 64
WORDS_AT = PAGE_BYTES
DATA_AT = 2 * PAGE_BYTES

_SPEC_AT = 256
_SPEC_BYTES = PAGE_BYTES - _SPEC_AT
# magic, format version, spec length, size, owner pid, owner start, owner namespace
_HEADER = struct.Struct("<8sIIQQQQ")
_CRC = struct.Struct("<I")

# What JSON of the wrong shape can raise while it is read.
MALFORMED = (
    ArithmeticError,
    AttributeError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
)


class TransportError(RuntimeError):
    """A segment or run directory cannot be used; one sentence says why."""


def said(value: object) -> str:
    """What another process wrote, fit for a log: printable, 200 characters at most."""
    return str(value)[:200].encode("unicode_escape").decode("ascii")[:200]


@dataclass(frozen=True)
class Header:
    """Fields of page 0.

    Args:
        magic: Eight bytes naming the kind of segment.
    """

    magic: bytes
    format_version: int
    size_bytes: int
    owner: Holder
    spec: dict[str, Any]

    def encode(self) -> bytes:
        """The bytes of page 0.

        Raises:
            TransportError: If the spec is too large for the page.
        """
        spec = json.dumps(self.spec, separators=(",", ":")).encode()
        if len(spec) > _SPEC_BYTES:
            raise TransportError(
                f"the description of a segment takes {len(spec)} bytes, and "
                f"{_SPEC_BYTES} is the most: shorten engine_id or the layer list"
            )
        head = _HEADER.pack(
            self.magic,
            self.format_version,
            len(spec),
            self.size_bytes,
            *self.owner,
        )
        head += _CRC.pack(_shm.crc32c(spec, _shm.crc32c(head)))
        return head.ljust(_SPEC_AT, b"\0") + spec

    @classmethod
    def decode(cls, page: bytes) -> Header | None:
        """Read page 0; None if it is not a complete, undamaged header."""
        if len(page) < PAGE_BYTES:
            return None
        magic, version, length, size, *owner = _HEADER.unpack_from(page)
        if length > _SPEC_BYTES:
            return None
        spec = page[_SPEC_AT : _SPEC_AT + length]
        (crc,) = _CRC.unpack_from(page, _HEADER.size)
        if crc != _shm.crc32c(spec, _shm.crc32c(page[: _HEADER.size])):
            return None
        try:
            fields = json.loads(spec)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict):
            return None
        return cls(magic, version, size, Holder(*owner), fields)
