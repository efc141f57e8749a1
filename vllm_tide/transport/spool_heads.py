"""Heads in a spool: the same publications as in the weights segment, as files.

``<version>.safetensors``, then ``<version>.json`` with the publication's manifest
(SHA-256 of every tensor), then ``latest.json``. The last few are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_tide.transport import publication
from vllm_tide.transport.header import TransportError
from vllm_tide.transport.publication import (
    Publication,
    TensorInput,
    WeightsRefused,
)
from vllm_tide.transport.spool import EngineFolder
from vllm_tide.transport.spool_store import NotOurs

KEPT = 3
HEADS = "heads"
_LATEST = f"{HEADS}/latest.json"
_MANIFEST = re.compile(r"[0-9]{12}\.json")


class HeadConflict(TransportError):  # noqa: N818 - says what it is
    """Another trainer has published meanwhile."""


@dataclass(frozen=True)
class EncodedHead:
    """A head as it is stored; private bytes, so the tensors may change at once."""

    version: int
    manifest: str
    body: bytes


def encode_head(
    tensors: Mapping[str, TensorInput],
    *,
    version: int,
    parent_version: int,
    meta: dict[str, Any],
) -> EncodedHead:
    """Serialise a head; ValueError if a tensor contradicts itself."""
    _, manifest, body = publication.encode(tensors, version, parent_version, meta)
    return EncodedHead(version, manifest.decode(), body)


def write_head(folder: EngineFolder, head: EncodedHead) -> None:
    """Store a head and make it the latest.

    Raises HeadConflict if it is not the newest.
    """
    latest = latest_head(folder)
    if head.version <= latest:
        raise HeadConflict(
            f"engine {folder.engine_id}: head {head.version} is not newer than "
            f"{latest} in {folder.store.url}: another trainer publishes to it; stop one"
        )
    stem = f"{head.version:012d}"
    manifest = head.manifest.encode()
    folder.store.write(folder.path(HEADS, f"{stem}.safetensors"), head.body)
    entry = {
        "version": head.version,
        "bytes": len(head.body),
        "manifest": head.manifest,
        "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
    }
    folder.write_json(f"{HEADS}/{stem}.json", entry, durable=True)
    folder.write_json(_LATEST, {"version": head.version}, durable=True)
    _drop_old(folder)


def latest_head(folder: EngineFolder) -> int:
    """Version of the latest head; 0 if there is none."""
    value = folder.read_json(_LATEST)
    version = 0 if value is None else value.get("version")
    if type(version) is not int or not 0 < version <= publication.MAX_VERSION:
        return 0
    return version


def read_head(folder: EngineFolder, version: int) -> Publication:
    """Read a head and verify it.

    Raises:
        WeightsRefused: empty, truncated, format or sha256.
    """
    stem = f"{version:012d}"
    entry = folder.read_json(f"{HEADS}/{stem}.json")
    if entry is None:
        raise WeightsRefused("empty", f"head {version} has no manifest")
    told = entry.get("bytes")
    most = max(told, 0) + 1 if type(told) is int else 0
    body = folder.store.read(folder.path(HEADS, f"{stem}.safetensors"), most)
    if body is None or len(body) != told:
        raise WeightsRefused("truncated", f"head {version} is not whole")
    try:
        manifest = str(entry["manifest"]).encode()
        digest = bytes.fromhex(entry["manifest_sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsRefused(
            "format", f"the manifest of head {version} cannot be read: {error}"
        ) from error
    data = np.frombuffer(body, np.uint8).copy()
    return publication.decode(version, digest, manifest, data)


def as_input(head: Publication) -> dict[str, TensorInput]:
    """A publication's tensors in the form that publishing takes."""
    return {
        name: (item.dtype, item.shape, item.data) for name, item in head.tensors.items()
    }


def _drop_old(folder: EngineFolder) -> None:
    names = sorted(folder.store.sizes(folder.path(HEADS)))
    stems = [n[:12] for n in names if _MANIFEST.fullmatch(n)]
    for stem in stems[:-KEPT]:
        for name in (f"{stem}.json", f"{stem}.safetensors"):
            with contextlib.suppress(NotOurs):
                folder.store.remove(folder.path(HEADS, name))
