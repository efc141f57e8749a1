"""Drafts stored as `pytorch_model*.bin`, the form of the EAGLE authors' checkpoints.

The server converts such a draft to safetensors once, so that server, trainer and spool
read one form. Converted drafts are cached and do not change:
`~/.cache/vllm_tide/converted/<fingerprint>/<name of the draft>`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from vllm_tide.draft.checkpoint import write_checkpoint
from vllm_tide.draft.config import DraftError, bin_files, read_config, regular_file
from vllm_tide.draft.fresh import default_cache


def converted_directory(folder: Path, cache: Path | None = None) -> Path:
    """Return the directory of a `.bin` draft in safetensors, written if not cached.

    Concurrent processes write equal files.

    Args:
        folder: A draft with `bin_files`.
        cache: Cache folder; by default under `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        DraftError: A file is damaged, or the cache cannot be written.
    """
    root, files = cache or default_cache("converted"), bin_files(folder)
    config = read_config(folder)
    try:
        stats = [(str(path.resolve()), path.stat()) for path in files]
        facts = [config, [(name, s.st_size, s.st_mtime_ns) for name, s in stats]]
        text = json.dumps(facts, sort_keys=True).encode()
        out = root / hashlib.sha256(text).hexdigest()[:32] / folder.resolve().name
        if (out / "config.json").exists():  # written last
            return out
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for path in files:
            tensors |= _read(path)
        write_checkpoint(out, config, tensors)
    except OSError as error:
        raise DraftError(
            f"its copy in {str(root)!r} cannot be written ({error.strerror}); set "
            "XDG_CACHE_HOME to a writable directory."
        ) from None
    return out


def _read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file of `torch.save`; it cannot run code."""
    regular_file(path)
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # Copies: tensors may share memory, which safetensors refuses.
        return {str(name): tensor.detach().clone() for name, tensor in stored.items()}
    except Exception as error:  # noqa: BLE001 - any bytes
        raise DraftError(
            f"{path.name} cannot be read ({type(error).__name__}); convert it to "
            "safetensors."
        ) from None
