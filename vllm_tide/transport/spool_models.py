"""Models for a trainer on another host: the target's rows and the initial draft.

The target is a directory of that host or a model of the Hugging Face hub, of which only
the files with the embedding and the lm_head are fetched. The initial draft is in the
spool.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from functools import partial
from pathlib import Path

from vllm_tide.transport.identity import ROWS, rows_fingerprint
from vllm_tide.transport.rendezvous import make_private, write_private
from vllm_tide.transport.shm import TransportError, sanitize_for_log
from vllm_tide.transport.spool import (
    INITIAL,
    MAX_DRAFT_BYTES,
    SHA256,
    EngineEntry,
    EngineFolder,
)

_INDEX = "model.safetensors.index.json"
# A valid file name: no path, not hidden, printable ASCII.
_PLAIN = re.compile(r"[!-\-0-~][ -.0-~]{0,250}")


def find_models(
    folder: EngineFolder, entry: EngineEntry, model: str | None, cache: Path | None
) -> tuple[Path, Path]:
    """Return local directories of the engine's target and initial draft.

    Args:
        model: Directory, or hub id with an optional "@revision"; None is the directory
            that the engine uses.
        cache: Directory for drafts; None is ``~/.cache/vllm_tide/spool``.

    Raises:
        TransportError: The target is not found or differs, or the draft is damaged.
    """
    path = entry.manifest.target_path
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = cache or Path(base) / "vllm_tide" / "spool"
    target = Path(model or path).expanduser()
    if not target.is_dir():
        if model is None:
            raise TransportError(
                f"the target {path} of engine {folder.engine_id} is not on this host: "
                "give its directory or hub id (vllm-tide train --model)"
            )
        target = _fetch_rows(model)
    if rows_fingerprint(target) != entry.identity.get("rows"):
        raise TransportError(
            f"{target} is not the target {path} of engine {folder.engine_id}: "
            "configuration or embedding differ; give the same model (vllm-tide train "
            "--model)"
        )
    return target, _fetch_draft(folder, entry, cache)


def _fetch_rows(model: str) -> Path:
    """Fetch configuration and rows of a model of the hub; return their directory."""
    name, _, revision = model.partition("@")
    try:
        from huggingface_hub import snapshot_download

        fetch = partial(snapshot_download, name, revision=revision or None)
        folder = Path(fetch(allow_patterns=["config.json", _INDEX]))
        files = {"model.safetensors"}
        if (folder / _INDEX).exists():
            where = json.loads((folder / _INDEX).read_bytes())["weight_map"]
            files = {file for tensor, file in where.items() if tensor.endswith(ROWS)}
        return Path(fetch(allow_patterns=sorted(files)))
    except Exception as error:
        raise TransportError(
            f"--model {model!r} is no directory and could not be fetched from the hub "
            f"({type(error).__name__}: {sanitize_for_log(error)})"
        ) from error


def _fetch_draft(folder: EngineFolder, entry: EngineEntry, cache: Path) -> Path:
    """Download the initial draft to a directory named by its content; return it."""
    files, store = sorted(entry.draft_files.items()), folder.store
    into = cache / f"draft-{hashlib.sha256(json.dumps(files).encode()).hexdigest()}"
    try:
        make_private(into)
        for name, digest in files:
            data = None
            if _PLAIN.fullmatch(name) and SHA256.fullmatch(digest):
                data = store.read(folder.path(INITIAL, digest), MAX_DRAFT_BYTES)
            if data is None or hashlib.sha256(data).hexdigest() != digest:
                raise TransportError(
                    f"the initial draft of engine {folder.engine_id} in {store.url} "
                    f"is damaged: {sanitize_for_log(name)}"
                )
            write_private(into / name, data)
    except OSError as error:
        raise TransportError(f"cannot write {into}: {error.strerror}") from error
    return into
