"""Models in a spool, for a trainer on another host.

The embedding and lm_head rows of each target (not the whole target), and the initial
draft of each engine. ``files.json`` is written last, with the SHA-256 of the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from vllm_tide.transport.identity import read_header, read_tensor, target_fingerprint
from vllm_tide.transport.rendezvous import EngineManifest, make_private
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.spool import (
    MAX_JSON_BYTES,
    EngineEntry,
    EngineFolder,
    checked_name,
    parse_json,
)
from vllm_tide.transport.spool_store import Store

TARGETS = "targets"
_LIST = "files.json"
_ROWS = ("embed_tokens.weight", "lm_head.weight")
# A valid file name: no path, not hidden, printable ASCII.
_PLAIN = re.compile(r"[!-\-0-~][ -.0-~]{0,250}")
_FLOATS = ("F32", "F16", "BF16")


def upload_models(folder: EngineFolder, manifest: EngineManifest) -> str:
    """Upload missing models; return the SHA-256 of the target's ``files.json``.

    Removes abandoned files of killed relays.

    The digest names the folder of the target's rows, so it identifies their content.
    """
    store = folder.store
    files = _target_files(Path(manifest.target_path))
    rows = hashlib.sha256(_listed(files)).hexdigest()
    target, draft = f"{TARGETS}/{rows}", folder.path("draft")
    if _LIST not in store.sizes(target):
        _upload(store, target, files)
    if _LIST not in store.sizes(draft):
        _upload(store, draft, _draft_files(Path(manifest.draft_path)))
    return rows


def local_models(
    folder: EngineFolder, entry: EngineEntry, cache: Path | None = None
) -> tuple[Path, Path]:
    """Return local directories of the target's rows and of the initial draft.

    The target directory of the engine if this host has the same target; otherwise a
    download in `cache` (None: ``~/.cache/vllm_tide/spool``).

    Raises:
        TransportError: Neither this host nor the spool has them.
    """
    cache = cache or default_cache()
    target = Path(entry.manifest.target_path)
    if not _is_target(target, entry.identity.get("target", "")):
        # Validate it: it is read from a file and becomes part of a path.
        rows = checked_name(entry.identity.get("rows", ""), "rows")
        target = cache / rows[:32]
        _download(folder.store, f"{TARGETS}/{rows}", target, rows)
    name = f"draft-{folder.engine_id}"
    return target, _download(folder.store, folder.path("draft"), cache / name)


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm_tide" / "spool"


def _target_files(folder: Path) -> dict[str, list[bytes]]:
    """Return configuration and rows of a target, with the checkpoint's names."""
    rows: dict[str, tuple[Path, dict[str, Any], int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, begin = read_header(path)
        for name, entry in header.items():
            suffix = next((s for s in _ROWS if name == s or name.endswith("." + s)), "")
            if not suffix:
                continue
            # As in `TargetRows`: the shortest name is that of the text model.
            other = rows.get(suffix)
            if other is None or len(name) < len(other[1]["name"]):
                rows[suffix] = (path, {**entry, "name": name}, begin)
    # Sorted by name, without gaps.
    parts: list[bytes] = []
    header, at = {}, 0
    for path, entry, begin in sorted(rows.values(), key=lambda item: item[1]["name"]):
        if entry["dtype"] not in _FLOATS:
            raise TransportError(
                f"{path}: {entry['name']} has dtype {entry['dtype']}: a trainer needs "
                "unquantized rows"
            )
        parts.append(read_tensor(path, entry, begin))
        offsets = [at, at := at + len(parts[-1])]
        kind, shape = entry["dtype"], entry["shape"]
        header[entry["name"]] = dict(dtype=kind, shape=shape, data_offsets=offsets)
    config = (folder / "config.json").read_bytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    parts = [len(text).to_bytes(8, "little"), text, *parts]
    return {"model.safetensors": parts, "config.json": [config]}


def _draft_files(folder: Path) -> dict[str, list[bytes]]:
    paths = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    try:
        return {path.name: [path.read_bytes()] for path in paths}
    except OSError as error:
        raise TransportError(f"cannot read {folder}: {error.strerror}") from error


def _upload(store: Store, name: str, files: dict[str, list[bytes]]) -> None:
    for file, parts in files.items():
        store.write(f"{name}/{file}", *parts)
    store.write(f"{name}/{_LIST}", _listed(files))


def _listed(files: dict[str, list[bytes]]) -> bytes:
    digests = {name: hashlib.sha256() for name in files}
    for name, parts in files.items():
        for part in parts:
            digests[name].update(part)
    return json.dumps({n: digest.hexdigest() for n, digest in digests.items()}).encode()


def _is_target(folder: Path, fingerprint: str) -> bool:
    try:
        return target_fingerprint(folder) == fingerprint
    except TransportError:
        return False


def _download(store: Store, name: str, into: Path, sha256: str = "") -> Path:
    """Download a folder atomically.

    Args:
        sha256: Digest of its ``files.json`` (hex); empty if it is unknown.
    """
    raw = store.read(f"{name}/{_LIST}", MAX_JSON_BYTES + 1)
    listed = parse_json(raw)
    if listed is None:
        raise TransportError(
            f"{name} is not in {store.url} yet: is the engine's relay running?"
        )
    same = not sha256 or hashlib.sha256(raw or b"").hexdigest() == sha256
    if not (same and all(map(_PLAIN.fullmatch, listed))):
        raise TransportError(f"{name}/{_LIST} in {store.url} is damaged")
    if _is_complete(into, listed):
        return into
    try:
        shutil.rmtree(into, ignore_errors=True)
        make_private(into.parent)
        temporary = Path(tempfile.mkdtemp(dir=into.parent, prefix=".spool-"))
        try:
            for file, digest in listed.items():
                data = store.read(f"{name}/{file}")
                if data is None or hashlib.sha256(data).hexdigest() != digest:
                    raise TransportError(f"{name}/{file} in {store.url} is damaged")
                (temporary / file).write_bytes(data)
            if not into.is_dir():  # another trainer may have created it
                temporary.rename(into)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except MemoryError as error:
        raise TransportError(f"{name} in {store.url} does not fit in memory") from error
    except OSError as error:
        raise TransportError(f"cannot write {into}: {error.strerror}") from error
    return into


def _is_complete(folder: Path, listed: dict[str, Any]) -> bool:
    """Verify all files: a crash of the host can truncate them."""
    try:
        for name, sha256 in listed.items():
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    return False
    except OSError:
        return False
    return folder.is_dir()
