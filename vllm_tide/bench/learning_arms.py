"""The arms of the learning suite: who drafts, and when the draft is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .control_arms import BenchError
from .learning_options import SuiteOptions, merged
from .learning_server import draft_config, trained_section


@dataclass(frozen=True, slots=True)
class LearningArm:
    """One arm.

    Attributes:
        name: As on the command line.
        drafts: A draft is served.
        mode: `tide.schedule.mode` of its trainer; None: it is never trained.
    """

    name: str
    drafts: bool
    mode: str | None = None


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
    known = {arm.name: arm for arm in ARMS}
    for name in names:
        if name not in known:
            raise BenchError(
                f"--arms: there is no arm {name!r}; known: {', '.join(known)}"
            )
    if not names:
        raise BenchError("--arms names no arm")
    return [known[name] for name in dict.fromkeys(names)]


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
    return draft_config(options, draft, section)
