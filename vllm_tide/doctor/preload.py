"""Are the libraries preloaded that vLLM's CPU kernels are fast with?"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_tide.doctor.builds import torch_build, vllm_device
from vllm_tide.doctor.finding import Finding, ok, skipped, warning
from vllm_tide.doctor.subject import Subject

NAME = "preload"
_SOURCE = "'. scripts/env.sh' before 'vllm serve'"


def check(subject: Subject) -> Iterator[Finding]:
    """Look at LD_PRELOAD as a server started from this shell would."""
    del subject
    if vllm_device(torch_build()) != "cpu":
        yield skipped(NAME, "Only the CPU backend needs one.")
    elif platform.machine() != "x86_64":
        yield skipped(NAME, "Intel OpenMP is for x86-64.")
    else:
        installed = Path(sys.prefix) / "lib" / "libiomp5.so"
        yield judge(os.environ.get("LD_PRELOAD", ""), installed.is_file())


def judge(preloaded: str, installed: bool) -> Finding:
    """Judge a value of LD_PRELOAD.

    Args:
        preloaded: The value.
        installed: Whether Intel OpenMP is in this environment.
    """
    libraries = [Path(name) for name in re.split(r"[: ]", preloaded) if name]
    gone = [str(lib) for lib in libraries if lib.is_absolute() and not lib.is_file()]
    if gone:
        return warning(
            NAME,
            f"LD_PRELOAD names {', '.join(gone)}, which does not exist.",
            f"Correct it, or run {_SOURCE}.",
        )
    names = [library.name for library in libraries]
    if not any(name.startswith(("libiomp", "libomp")) for name in names):
        first = "" if installed else "pip install intel-openmp, then "
        return warning(
            NAME,
            "Intel OpenMP is not preloaded: the engine's kernels run slower.",
            f"{first}{_SOURCE}.",
        )
    more = "" if any("tcmalloc" in name for name in names) else "; tcmalloc is not"
    return ok(NAME, f"Intel OpenMP is preloaded{more}.")
