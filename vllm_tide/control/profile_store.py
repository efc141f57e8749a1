"""Stores fitted time models, each under everything that changes it.

A profile of another model, device or version is silently wrong, so a file says what it
was measured on and loading it for something else is refused with the difference named.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tide.control.fit import FitReport
from vllm_tide.control.time_model import TimeModel
from vllm_tide.transport.rendezvous import write_private

FORMAT = 1


class ProfileError(ValueError):
    """A file holds no usable profile; the message is one sentence."""


class ProfileMismatch(ProfileError):
    """A profile was measured on something else; the message says what differs."""


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A profile as read.

    Attributes:
        report: The fit's report, `FitReport.to_json` of it if read from a file.
    """

    model: TimeModel
    facts: dict[str, Any]
    report: FitReport | dict[str, Any]


def profile_key(facts: Mapping[str, Any]) -> str:
    """SHA-256 of the facts' canonical JSON, hexadecimal."""
    text = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def default_path(key: str) -> Path:
    """Where a profile is kept: `$XDG_CACHE_HOME` or `~/.cache`, then our folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "vllm_tide" / "profiles" / f"{key}.json"


def save(
    path: Path,
    model: TimeModel,
    facts: Mapping[str, Any],
    fit_report: FitReport | Mapping[str, Any],
) -> None:
    """Write a profile: whole or not at all, readable by the owner only.

    Args:
        path: File; its folder is made.
    """
    fit = fit_report.to_json() if isinstance(fit_report, FitReport) else fit_report
    content = {
        "format": FORMAT,
        "key": profile_key(facts),
        "facts": dict(facts),
        "time_model": model.to_json(),
        "fit": dict(fit),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def load(path: Path, facts: Mapping[str, Any] | None = None) -> StoredProfile:
    """Read a profile.

    Args:
        facts: Facts of the running engine; None: not compared.

    Raises:
        ProfileMismatch: It was measured on something else.
        ProfileError: It holds no profile of this version.
        OSError: It cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ProfileError(
                f"profile {str(path)!r} has format {content['format']}, this version "
                f"reads {FORMAT}; measure again with `vllm-tide profile`."
            )
        stored = StoredProfile(
            TimeModel.from_json(content["time_model"]), content["facts"], content["fit"]
        )
    except ProfileError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise ProfileError(
            f"{str(path)!r} holds no profile ({type(error).__name__}: {error})."
        ) from None
    if facts is not None:
        _compare(path, stored.facts, dict(facts))
    return stored


def _compare(path: Path, stored: dict[str, Any], running: dict[str, Any]) -> None:
    # Through JSON: a tuple of facts is a list once stored.
    running = json.loads(json.dumps(running))
    differing = [
        f"{name} is {stored.get(name)!r} there and {running.get(name)!r} here"
        for name in sorted(stored.keys() | running.keys())
        if stored.get(name) != running.get(name)
    ]
    if differing:
        raise ProfileMismatch(
            f"profile {str(path)!r} was measured on something else: "
            f"{', '.join(differing)}; measure again with `vllm-tide profile`."
        )
