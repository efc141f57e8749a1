"""Rollback without a running trainer: the command publishes the older draft itself.

The engine verifies and installs it like any draft; the next trainer continues from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_tide.deploy.store import (
    DraftStore,
    DraftUnreadable,
    fingerprint_of,
    has_weights,
)
from vllm_tide.draft.checkpoint import read_tensors
from vllm_tide.draft.config import DraftError
from vllm_tide.draft.kind import canonical
from vllm_tide.draft.tensor_bytes import from_bytes, to_bytes
from vllm_tide.transport.draft_weights import DraftWeights, WeightsRefused
from vllm_tide.transport.rendezvous import EngineManifest
from vllm_tide.transport.shm import TransportError
from vllm_tide.transport.versions import first_version, number_of
from vllm_tide.transport.weights import WeightsSegment, WeightsWriter


def initial_draft(draft_path: str | Path, shared: Collection[str]) -> dict[str, Tensor]:
    """Read the trained tensors of a draft's checkpoint, by parameter.

    Raises:
        TransportError: It cannot be read.
    """
    try:
        return canonical(_trained_tensors(draft_path, shared))
    except DraftError as error:
        raise TransportError(f"{error} Nothing was rolled back.") from error


def _trained_tensors(
    draft_path: str | Path, shared: Collection[str]
) -> dict[str, Tensor]:
    tensors = read_tensors(draft_path)
    return {n: t for n, t in tensors.items() if n != "t2d" and n not in shared}


def roll_back(manifest: EngineManifest, folder: Path) -> dict[str, int]:
    """Publish the draft before the last published one to an engine.

    That is the newest stored draft with different weights, else the server's initial
    checkpoint. Drafts stored after it are removed.

    Args:
        folder: Directory of the trainer's draft store.

    Returns:
        As `Deployment.rollback`.

    Raises:
        TransportError: There is no earlier draft, or a trainer is attached.
        DraftError: A model's directory cannot be read.
    """
    if (manifest.tide.get("spool") or {}).get("url"):
        raise TransportError(
            "this engine is trained through a spool: run the rollback on the trainer's "
            "host"
        )
    if not manifest.weights:
        preset = manifest.tide.get("preset", "full")
        why = "" if preset == "full" else f", as tide.preset is {preset!r}"
        raise TransportError(f"it installs no drafts: tide.swap.enabled is false{why}")
    with closing(WeightsWriter.attach(manifest.weights)) as writer:
        version = number_of(writer.latest_version)
        if not writer.latest_version:
            raise TransportError(
                "no draft has been published: there is nothing to roll back"
            )
        live = _published(manifest.weights)
        given = _trained_tensors(manifest.draft_path, manifest.shared)
        to, master, before = 0, canonical(given), None
        names = canonical({name: name for name in given})
        fingerprint = fingerprint_of(manifest.target_path, manifest.draft_path)
        store = DraftStore(folder, fingerprint)
        try:
            for stored in store.drafts(strict=True):
                if not has_weights(stored.master, live):
                    to, master, before = stored.version, stored.master, stored
                    break
        except DraftUnreadable as error:
            raise TransportError(f"{error} Nothing was rolled back.") from error
        if has_weights(master, live):
            raise TransportError(
                f"version {version} is the initial draft: nothing was rolled back"
            )
        # First, so that a kill in between leaves no removed draft for the next server.
        store.drop_newer(before)
        figures: Mapping[str, Any] = before.holdout if before else {"initial": True}
        writer.publish(
            DraftWeights.encode(
                to_bytes({old: master[name] for name, old in names.items()}),
                first_version(version + 1),
                {**figures, "rollback_of": version, "to": to, "reason": "ordered"},
            )
        )
    number = before.version if before else 0
    return {"version": version, "to": to, "served_as": version + 1, "stored": number}


def _published(segment: str) -> dict[str, Tensor]:
    """Return the last published weights; empty if they cannot be read."""
    with closing(WeightsSegment.attach(segment)) as reader:
        try:
            return canonical(from_bytes(reader.read().tensors))
        except WeightsRefused:
            return {}
