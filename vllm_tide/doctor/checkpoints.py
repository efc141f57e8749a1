"""Local checkpoints, read as far as their headers: names, shapes and sizes of tensors.

A safetensors file begins with its header (8 bytes of length, then JSON), so nothing of
the weights is read, whatever their size.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOST_HEADER_BYTES = 100 << 20


class CheckpointError(ValueError):
    """A checkpoint cannot be read; one sentence says why."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; its type as safetensors names it ("BF16")."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def local_checkpoint(name: str, revision: str | None = None) -> Path | None:
    """Directory of a model on this machine; None if it would have to be fetched.

    Args:
        name: Directory or hub name.
        revision: On the hub.
    """
    from vllm_tide.engine.draft_facts import local_dir

    try:
        return local_dir(str(Path(name).expanduser()), revision)
    except (ImportError, OSError, ValueError):
        return None


def model_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a model.

    Raises:
        CheckpointError: It is not there, or no JSON object.
    """
    path = directory / "config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return value


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Tensors of all safetensors files of a directory.

    Raises:
        CheckpointError: There is no such file, or one is cut short or damaged.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no .safetensors file.")
    found: dict[str, StoredTensor] = {}
    for path in files:
        try:
            found |= _header(path)
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is no whole safetensors file ({error})."
            ) from None
    return found


def _header(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(8)
        (length,) = struct.unpack("<Q", start) if len(start) == 8 else (size,)
        if length > min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError("its header runs past the end")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size - 8 - length:
            raise ValueError(f"{name} runs past the end")
        shape = tuple(int(dim) for dim in entry["shape"])
        if (end > begin) != (math.prod(shape) > 0):
            raise ValueError(f"{name} has the wrong size")
        found[str(name)] = StoredTensor(str(entry["dtype"]), shape, end - begin)
    return found
