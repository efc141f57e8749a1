"""Is there a time model for control, of this machine, and how old is it?

The server compares everything, the models' shapes included; without loading vLLM only
the facts of the machine and the installation can be compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_tide.control.profile_store import (
    StoredProfile,
    default_path,
    load,
    profile_key,
)
from vllm_tide.doctor.builds import torch_build, vllm_device, vllm_distribution
from vllm_tide.doctor.finding import Finding, failed, ok, skipped, warning
from vllm_tide.doctor.subject import Subject
from vllm_tide.engine.machine_facts import cpu_name, patch_digest, preloaded_libraries

NAME = "profile"
OLD_DAYS = 90
_MEASURE = "Run 'vllm-tide profile --model M --draft D' in the shell that serves"


def check(subject: Subject) -> Iterator[Finding]:
    """The configured profile, else those kept for this machine."""
    tide = subject.tide
    if tide is None:
        yield skipped(NAME, "The configuration cannot be used.")
    elif tide.control.policy == "static":
        yield skipped(NAME, "tide.control.policy is static, which needs none.")
    elif tide.control.profile is not None:
        yield judge_file(Path(tide.control.profile).expanduser(), known_facts())
    elif tide.control.policy == "threshold":
        yield skipped(NAME, "tide.control.policy is threshold, which needs none.")
    elif vllm_device(torch_build()) in ("cuda", "rocm"):
        adaptive = subject.speculative.get("enable_adaptive_verification") is not False
        yield judge_gpu(default_path("").parent, known_facts(), adaptive)
    else:
        yield judge_folder(default_path("").parent, known_facts())


def judge_gpu(folder: Path, facts: dict[str, Any], adaptive: bool) -> Finding:
    """A server on a GPU, where a start measures nothing by itself.

    Args:
        folder: Where kept profiles are.
        facts: What is known of this machine.
        adaptive: Whether enable_adaptive_verification is switched on where it can be.
    """
    if adaptive:
        said = "vLLM measures times at each start that has adaptive verification."
        return judge_folder(folder, facts, ok(NAME, said))
    lacking = warning(
        NAME,
        "A start on a GPU does not measure forward times, and nothing in "
        f"{folder} fits this installation: lengths are static, not the policy's.",
        f"{_MEASURE}, or do not set enable_adaptive_verification to false.",
    )
    return judge_folder(folder, facts, lacking)


def known_facts() -> dict[str, Any]:
    """Those of a profile's facts that are known without loading vLLM."""
    build = torch_build()
    facts: dict[str, Any] = {
        "patches": patch_digest(),
        "preloaded": preloaded_libraries(os.environ.get("LD_PRELOAD", "")),
    }
    if build is not None:
        facts["torch"] = build.version
    if (vllm := vllm_distribution()) is not None:
        facts["vllm"] = _vllm_version(vllm)
    if vllm_device(build) == "cpu":
        facts["device"] = cpu_name()
    return facts


def judge_file(path: Path, facts: dict[str, Any]) -> Finding:
    """A profile that the configuration names.

    Args:
        path: The file.
        facts: What is known of this machine.
    """
    advice = f"{_MEASURE}, or leave tide.control.profile out."
    try:
        stored = load(path)
    except OSError as error:
        return failed(NAME, f"{path} cannot be read ({error.strerror}).", advice)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as why:
        return failed(NAME, str(why), advice)
    if differing := _differing(stored, facts):
        return failed(NAME, f"{path} is of another machine: {differing}.", advice)
    return _aged(path, "")


def judge_folder(
    folder: Path, facts: dict[str, Any], without: Finding | None = None
) -> Finding:
    """The profiles kept by earlier starts.

    Args:
        folder: Where they are.
        facts: What is known of this machine.
        without: What is found if none fits; None: a start measures one.
    """
    fitting, others, broken = [], 0, []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            stored = load(path)
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            OSError,
            TypeError,
            ValueError,
        ):
            broken.append(path.name)
            continue
        if profile_key(stored.facts) != path.stem:
            broken.append(path.name)
        elif _differing(stored, facts):
            others += 1
        else:
            fitting.append(path)
    if not fitting and without is not None:
        return without
    if broken:
        return warning(
            NAME,
            f"{folder} holds files that are no profile: {', '.join(broken)}.",
            "Remove them; what they were is measured anew.",
        )
    if not fitting:
        return warning(
            NAME,
            f"None in {folder} fits this machine and installation ({others} of "
            "others): the first start measures for a few seconds.",
            f"{_MEASURE}: it measures longer and better.",
        )
    newest = max(fitting, key=lambda path: path.stat().st_mtime)
    return _aged(newest, f" ({len(fitting)} of this machine)")


def _aged(path: Path, more: str) -> Finding:
    days = (time.time() - path.stat().st_mtime) / 86400
    text = f"{path} fits this machine{more}; measured {_age(days)} ago."
    if days > OLD_DAYS:
        return warning(
            NAME,
            text,
            f"{_MEASURE}: kernels, firmware and neighbours change in that time.",
        )
    return ok(NAME, f"{text} The server compares the models' shapes too.")


def _differing(stored: StoredProfile, facts: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} is {stored.facts.get(name)!r} there and {value!r} here"
        for name, value in facts.items()
        if stored.facts.get(name) != value
    )


def _age(days: float) -> str:
    if days >= 2:
        return f"{days:.0f} days"
    hours = max(days, 0.0) * 24
    return f"{hours:.0f} hours" if hours >= 2 else f"{hours * 60:.0f} minutes"


def _vllm_version(distribution: metadata.Distribution) -> str:
    """`vllm.__version__`: its own file says it, and it may differ from the wheel's."""
    path = Path(str(distribution.locate_file("vllm/_version.py")))
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return distribution.version
    for line in text.splitlines():
        if line.startswith("__version__ ="):
            return line.rpartition("=")[2].strip().strip("'\"")
    return distribution.version
