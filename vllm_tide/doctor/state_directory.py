"""Will the last good draft and the checkpoints outlive the machine?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vllm_tide.doctor.file_systems import can_be_made, is_memory
from vllm_tide.doctor.finding import Finding, failed, ok, skipped, warning
from vllm_tide.doctor.subject import Subject

NAME = "state directory"
_CHOOSE = "Set tide.train.state_dir to a directory on a disk."


def check(subject: Subject) -> Iterator[Finding]:
    """`tide.train.state_dir`, else `heads` in the run directory."""
    if subject.tide is None:
        yield skipped(NAME, "The configuration cannot be used.")
        return
    chosen = subject.tide.train.state_dir
    folder = Path(chosen).expanduser() if chosen else subject.run_dir / "heads"
    yield judge(folder, in_memory=is_memory(folder))


def judge(folder: Path, *, in_memory: bool) -> Finding:
    """Judge a directory.

    Args:
        folder: Need not exist.
        in_memory: Whether it lies on a file system in memory.
    """
    if folder.is_dir():
        usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    else:
        usable = not folder.exists() and can_be_made(folder)
    if not usable:
        return failed(NAME, f"{folder} cannot be written.", _CHOOSE)
    if in_memory:
        return warning(
            NAME,
            f"{folder} lies in memory: the last good draft is lost when the machine "
            "restarts.",
            _CHOOSE,
        )
    return ok(NAME, f"{folder} can be written and is on a disk.")
