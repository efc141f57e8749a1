"""What a run directory and the segments it names say, as of now."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tide.transport.peek import WeightsPeek, peek_ring, peek_weights
from vllm_tide.transport.rendezvous import EngineManifest, inspect_manifests
from vllm_tide.transport.ring_format import RingStats


@dataclass(frozen=True, slots=True)
class EngineLook:
    """An announced engine.

    Attributes:
        alive: None where its pid cannot be looked up.
        ring: None without capture, or when it is gone.
        weights: None without swaps, or when it is gone.
    """

    manifest: EngineManifest
    alive: bool | None
    ring: RingStats | None
    weights: WeightsPeek | None


@dataclass(frozen=True, slots=True)
class TrainerLook:
    """A trainer's status file.

    Attributes:
        name: The engine it reports under.
        status: Fields of `TrainerStatus`, as they were read.
        age_s: Since it was written (s).
    """

    name: str
    status: Mapping[str, Any]
    age_s: float

    def number(self, *keys: str) -> float | None:
        """A finite number at a path of keys; None if there is none."""
        value = self._at(keys)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if math.isfinite(value) else None
        return None

    def count(self, *keys: str) -> int:
        """A number as a whole one; 0 if there is none."""
        return int(self.number(*keys) or 0)

    def text(self, *keys: str) -> str:
        """A text at a path of keys; empty if there is none."""
        value = self._at(keys)
        return value if isinstance(value, str) else ""

    def flag(self, *keys: str) -> bool:
        """Whether a path of keys holds true."""
        return self._at(keys) is True

    def _at(self, keys: tuple[str, ...]) -> Any:
        value: Any = self.status
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def look_at_engines(run_dir: Path) -> list[EngineLook]:
    """Engines that announced themselves, oldest first; dead ones too."""
    found = [
        EngineLook(
            manifest,
            manifest.owner_alive(),
            peek_ring(str(manifest.ring)),
            peek_weights(str(manifest.weights)),
        )
        for _, manifest in inspect_manifests(run_dir)
        if manifest is not None
    ]
    return sorted(found, key=lambda look: look.manifest.created_unix)


def look_at_trainers(run_dir: Path) -> list[TrainerLook]:
    """Status files of trainers, the newest first."""
    found = []
    for path in run_dir.glob("trainer-*.json"):
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
            age_s = max(0.0, time.time() - float(status["updated_unix"]))
        except (LookupError, OSError, RecursionError, TypeError, ValueError):
            continue
        if math.isfinite(age_s):
            name = path.stem.removeprefix("trainer-")
            found.append(TrainerLook(name, status, age_s))
    return sorted(found, key=lambda look: (look.age_s, look.name))
