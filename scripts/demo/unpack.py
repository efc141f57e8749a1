"""Unpacks the weights of the drafts and of the tests' target, kept compressed here.

    python scripts/demo/unpack.py

`scripts/install.sh` and the tests call it; safe to run again and beside itself.
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
    """Where the weights are kept compressed."""
    return weights.with_name(weights.name + ".xz")


def pack(weights: Path) -> None:
    """Compress `weights` beside themselves."""
    # Two bytes a weight, of which one repeats.
    best = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}
    best |= {"lc": 0, "lp": 1, "pb": 1}
    data = lzma.compress(weights.read_bytes(), check=lzma.CHECK_CRC32, filters=[best])
    packed(weights).write_bytes(data)


def unpack(weights: Path) -> None:
    """Write `weights` unless they are there and no older than their archive.

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
    """Write all of them."""
    for weights in WEIGHTS:
        unpack(weights)


if __name__ == "__main__":
    unpack_all()
