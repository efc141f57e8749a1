"""The arms of the learning suite: who drafts, and when the draft is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_tide.speculative import merged

from .control_arms import BenchError
from .learning_options import SuiteOptions
from .learning_server import draft_config, trained_section


@dataclass(frozen=True, slots=True)
class LearningArm:
    """One arm.

    Attributes:
        name: As on the command line.
        drafts: A draft is served.
        mode: `tide.schedule.mode` of its trainer; None: it is never trained.
        spacing: `tide.deploy.min_requests`, the laziness of synchronisation (Aurora,
            figure 5); None: as configured.
    """

    name: str
    drafts: bool
    mode: str | None = None
    spacing: int | None = None


ARMS = (
    LearningArm("none", drafts=False),
    LearningArm("frozen", drafts=True),
    LearningArm("always", drafts=True, mode="always"),
    LearningArm("tide", drafts=True, mode="tide"),
    LearningArm("gated", drafts=True, mode="gated"),
)
ARM_NAMES = tuple(arm.name for arm in ARMS)


def arms_of(names: Sequence[str]) -> list[LearningArm]:
    """Return the arms in order, each once.

    Raises:
        BenchError: An arm is unknown, or none was given.
    """
    if not names:
        raise BenchError("--arms names no arm")
    return [_arm_of(name) for name in dict.fromkeys(names)]


def _arm_of(name: str) -> LearningArm:
    known = {arm.name: arm for arm in ARMS}
    base, at, spacing = name.partition("@")
    if base not in known:
        raise BenchError(f"--arms: there is no arm {name!r}; known: {', '.join(known)}")
    if not at:
        return known[base]
    if known[base].mode is None:
        raise BenchError(f"--arms: {name!r}: only arms that are trained take @REQUESTS")
    if not spacing.isdecimal():
        raise BenchError(
            f"--arms: {name!r}: after @ comes a number of requests between two "
            "publications"
        )
    return replace(known[base], name=name, spacing=int(spacing))


def config_of(
    arm: LearningArm, options: SuiteOptions, run_dir: Path
) -> dict[str, Any] | None:
    """Return the object for `--speculative-config`; None without speculation."""
    if not arm.drafts:
        return None
    draft = str(options.draft)
    if arm.mode is None:
        return draft_config(options, draft)
    section = trained_section(options, run_dir)
    # After the user's own knobs: the mode is what the arm is.
    section = merged(section, {"schedule": {"mode": arm.mode}})
    if arm.spacing is not None:
        section = merged(section, {"deploy": {"min_requests": arm.spacing}})
    return draft_config(options, draft, section)
