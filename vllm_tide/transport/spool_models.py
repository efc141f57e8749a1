"""Models for a trainer on another host, carried by the spool.

The embedding and output rows of the target (not the target), once per target, and the
draft each engine started with. Files first, then ``files.json`` with their SHA-256.
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
# A file's name in the list: in this folder, not hidden, of printable ASCII.
_PLAIN = re.compile(r"[!-\-0-~][ -.0-~]{0,250}")
_FLOATS = ("F32", "F16", "BF16")


def upload_models(folder: EngineFolder, manifest: EngineManifest) -> str:
    """Put into the spool what is not there yet; the SHA-256 of the target's list.

    The target's rows lie under it, so that no others are ever taken for them.
    """
    store = folder.store
    files = _target_files(Path(manifest.target_path))
    rows = hashlib.sha256(_listed(files)).hexdigest()
    if store.read(f"{TARGETS}/{rows}/{_LIST}") is None:
        _upload(store, f"{TARGETS}/{rows}", files)
    draft = folder.path("draft")
    if store.read(f"{draft}/{_LIST}") is None:
        _upload(store, draft, _draft_files(Path(manifest.draft_path)))
    return rows


def local_models(
    folder: EngineFolder, entry: EngineEntry, cache: Path | None = None
) -> tuple[Path, Path]:
    """Directories of the target's rows and of the first draft on this host.

    The engine's own target directory where this host has the same one; else a copy out
    of the spool in `cache`, ``~/.cache/vllm_tide/spool`` when None.

    Raises:
        TransportError: If neither this host nor the spool has them.
    """
    cache = cache or default_cache()
    target = Path(entry.manifest.target_path)
    if not _is_target(target, entry.identity.get("target", "")):
        # It becomes part of a path and comes from a file.
        rows = checked_name(entry.identity.get("rows", ""), "rows")
        target = cache / rows[:32]
        _download(folder.store, f"{TARGETS}/{rows}", target, rows)
    name = f"draft-{folder.engine_id}"
    return target, _download(folder.store, folder.path("draft"), cache / name)


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vllm_tide" / "spool"


def _target_files(folder: Path) -> dict[str, list[bytes]]:
    """Configuration and rows of a target, under the names its checkpoint uses."""
    found: dict[str, tuple[Path, dict[str, Any], int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, begin = read_header(path)
        for name, entry in header.items():
            suffix = next((s for s in _ROWS if name == s or name.endswith("." + s)), "")
            if not suffix:
                continue
            # As `TargetRows`: of several names the shortest is the text model's.
            known = found.get(suffix)
            if known is None or len(name) < len(known[1]["name"]):
                found[suffix] = (path, {**entry, "name": name}, begin)
    # In order of name, without gaps.
    parts: list[bytes] = []
    header, at = {}, 0
    for path, entry, begin in sorted(found.values(), key=lambda item: item[1]["name"]):
        if entry["dtype"] not in _FLOATS:
            raise TransportError(
                f"{path}: {entry['name']} has type {entry['dtype']}: a trainer needs "
                "rows that are not quantised"
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


def _is_target(folder: Path, wanted: str) -> bool:
    try:
        return target_fingerprint(folder) == wanted
    except TransportError:
        return False


def _download(store: Store, name: str, into: Path, sha256: str = "") -> Path:
    """Copy a folder of files here, whole or not at all.

    Args:
        sha256: Of its list, in hexadecimal; empty: it is not known.
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
    if _is_whole(into, listed):
        return into
    try:
        shutil.rmtree(into, ignore_errors=True)
        make_private(into.parent)
        temporary = Path(tempfile.mkdtemp(dir=into.parent, prefix=".spool-"))
        try:
            for file, wanted in listed.items():
                data = store.read(f"{name}/{file}")
                if data is None or hashlib.sha256(data).hexdigest() != wanted:
                    raise TransportError(f"{name}/{file} in {store.url} is damaged")
                (temporary / file).write_bytes(data)
            if not into.is_dir():  # another trainer may have been quicker
                temporary.rename(into)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except MemoryError as error:
        raise TransportError(f"{name} in {store.url} does not fit in memory") from error
    except OSError as error:
        raise TransportError(f"cannot write {into}: {error.strerror}") from error
    return into


def _is_whole(folder: Path, listed: dict[str, Any]) -> bool:
    """A crash of the host can leave files short or empty under their names."""
    try:
        for name, sha256 in listed.items():
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    return False
    except OSError:
        return False
    return folder.is_dir()
