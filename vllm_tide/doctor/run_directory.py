"""May server and trainer meet in the run directory?"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from vllm_tide.doctor.file_systems import can_be_made
from vllm_tide.doctor.finding import Finding, failed, ok, warning
from vllm_tide.doctor.subject import Subject

NAME = "run directory"
_ELSEWHERE = "Set tide.run_dir or TIDE_RUN_DIR to a directory of your own."


def check(subject: Subject) -> Iterator[Finding]:
    """Look, and leave it as it is."""
    yield judge(subject.run_dir)


def judge(run_dir: Path) -> Finding:
    """Owner, kind and mode of a run directory, or whether it can be made."""
    try:
        status = run_dir.lstat()
    except FileNotFoundError:
        if can_be_made(run_dir):
            return ok(NAME, f"{run_dir} is made by the first server, mode 0700.")
        return failed(NAME, f"{run_dir} does not exist and cannot be made.", _ELSEWHERE)
    except OSError as error:
        return failed(NAME, f"{run_dir}: {error.strerror}.", _ELSEWHERE)
    if not stat.S_ISDIR(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "no directory"
        return failed(NAME, f"{run_dir} is {kind}.", f"Remove it. {_ELSEWHERE}")
    if status.st_uid != os.geteuid():
        return failed(
            NAME,
            f"{run_dir} belongs to user {status.st_uid}, this is {os.geteuid()}.",
            "Run server and trainer as one user. " + _ELSEWHERE,
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode != 0o700:
        return warning(
            NAME,
            f"{run_dir} has mode {mode:04o} and not 0700.",
            f"chmod 700 {run_dir}; the next server does it too.",
        )
    if not os.access(run_dir, os.W_OK | os.X_OK):
        return failed(NAME, f"{run_dir} cannot be written.", _ELSEWHERE)
    return ok(NAME, f"{run_dir}, mode 0700, ours.")
