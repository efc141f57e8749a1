"""Drafts stored as `pytorch_model*.bin`, the form of the EAGLE authors' checkpoints.

The server converts such a draft to safetensors once, so that server, trainer and spool
read one form. Converted drafts are cached and do not change:
`~/.cache/vllm_tide/converted/<fingerprint>/<name of the draft>`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from torch import Tensor

from vllm_tide.draft.checkpoint import read_bin, stored_shapes, write_checkpoint
from vllm_tide.draft.config import DraftError, bin_files, read_config
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
    root, config = cache or default_cache("converted"), read_config(folder)
    tensors: dict[str, Tensor] = {}
    for path in (files := bin_files(folder)):
        tensors |= read_bin(path)
    stats = [(str(path.resolve()), path.stat()) for path in files]
    facts = [config, [(name, s.st_size, s.st_mtime_ns) for name, s in stats]]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    out = root / digest[:32] / folder.resolve().name
    if _usable(out, {name: tuple(tensor.shape) for name, tensor in tensors.items()}):
        return out
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Copies: tensors may share memory, which safetensors refuses.
        write_checkpoint(out, config, {name: t.clone() for name, t in tensors.items()})
    except OSError as error:
        raise DraftError(
            f"its copy in {str(root)!r} cannot be written ({error.strerror}); set "
            "XDG_CACHE_HOME to a writable directory with enough space."
        ) from None
    return out


def _usable(folder: Path, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Return whether a directory has a configuration and tensors of these shapes."""
    try:
        return (folder / "config.json").exists() and stored_shapes(folder) == shapes
    except DraftError:  # a damaged copy
        return False
