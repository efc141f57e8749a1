"""The part of vLLM's scheduler that TIDE reads, with an empty cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def idle_scheduler(requests: dict[str, Any] | None = None) -> Any:
    """Return a scheduler with these requests by id."""
    manager = SimpleNamespace(block_pool=SimpleNamespace(blocks=[]))
    return SimpleNamespace(requests=requests or {}, kv_cache_manager=manager)
