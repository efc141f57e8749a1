"""The facts of a profile that need neither torch nor vLLM: the doctor compares them."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from vllm_tide.patch_series import load_manifest, patches_root


def digest(value: Any) -> str:
    """Short SHA-256 of a value's JSON."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def patch_digest() -> str:
    """Digest of the patch series."""
    manifest = load_manifest(patches_root())
    return digest(sorted(manifest.patches.items()))


def preloaded_libraries(value: str) -> list[str]:
    """Names of the libraries of an LD_PRELOAD; where they lie does not matter."""
    return sorted(Path(name).name for name in value.split(":"))


def cpu_name() -> str:
    """The CPU's name as the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = [
        line.partition(":")[2].strip()
        for line in text.splitlines()
        if line.startswith(("model name", "Model"))
    ]
    return names[0] if names else platform.machine()
