"""Decompression of the committed weights of the drafts and of the tests' target.

    python scripts/demo/unpack.py

`scripts/install.sh` and the tests run it. It is idempotent, and several processes may
run it concurrently.
"""

import lzma
import os
import shutil
from pathlib import Path

WEIGHTS = tuple(
    Path(__file__).resolve().parent / model / "model.safetensors"
    for model in ("target", "draft", "smollm2_draft")
)


def packed(weights: Path) -> Path:
    """Return the path of the compressed weights."""
    return weights.with_name(weights.name + ".xz")


def pack(weights: Path) -> None:
    """Compress `weights` into the same folder."""
    # Two bytes per weight, one of which is repetitive.
    best = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}
    best |= {"lc": 0, "lp": 1, "pb": 1}
    data = lzma.compress(weights.read_bytes(), check=lzma.CHECK_CRC32, filters=[best])
    packed(weights).write_bytes(data)


def unpack(weights: Path) -> None:
    """Write `weights` unless they exist and are not older than their archive.

    Raises:
        lzma.LZMAError, EOFError: The archive is damaged.
    """
    archive = packed(weights)
    if weights.exists() and weights.stat().st_mtime >= archive.stat().st_mtime:
        return
    part = weights.with_name(f".{weights.name}.{os.getpid()}")
    try:
        with lzma.open(archive) as source, part.open("wb") as out:
            shutil.copyfileobj(source, out)
        part.rename(weights)
    finally:
        part.unlink(missing_ok=True)


def unpack_all() -> None:
    """Unpack all weights."""
    for weights in WEIGHTS:
        unpack(weights)


if __name__ == "__main__":
    unpack_all()
