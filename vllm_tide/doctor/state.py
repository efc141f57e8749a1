"""Checks of what outlives a server: its profile, its drafts, its spool."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

from vllm_tide.doctor.install import torch_build, vllm_device, vllm_distribution
from vllm_tide.doctor.machine import can_be_made, is_memory
from vllm_tide.doctor.run import Finding, Subject, check, failed, ok, skipped, warning

OLD_DAYS = 90
SPOOL_SECONDS = 10.0  # a back end may retry for minutes
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

_MEASURE = "Run 'vllm-tide profile --model M --draft D' in the shell that serves"
_DISK = "Set tide.train.state_dir to a directory on a disk."
_SPOOL = "Correct tide.spool.url, its access rights or the network."


@check("profile", configured=True)
def profile(subject: Subject) -> Finding:
    """Judges the configured time model, else those kept for this machine.

    The server compares the models' shapes too; without loading vLLM only the facts of
    machine and installation can be compared.
    """
    from vllm_tide.control.profile_store import default_path

    control = subject.tide.control
    if control.policy == "static":
        return skipped("tide.control.policy is static, which needs none.")
    if control.profile is not None:
        return _configured_profile(Path(control.profile).expanduser())
    if control.policy == "threshold":
        return skipped("tide.control.policy is threshold, which needs none.")
    folder = default_path("").parent
    if vllm_device() not in ("cuda", "rocm"):
        without = None
    elif subject.speculative.get("enable_adaptive_verification") is not False:
        text = "vLLM measures times at each start that has adaptive verification."
        without = ok(text)
    else:
        without = warning(
            "A start on a GPU does not measure forward times, and nothing in "
            f"{folder} fits this installation: lengths are static, not the policy's.",
            f"{_MEASURE}, or do not set enable_adaptive_verification to false.",
        )
    return _kept_profile(folder, without)


def known_facts() -> dict[str, Any]:
    """Those of a profile's facts that are known without loading vLLM."""
    from vllm_tide.engine import facts as engine_facts

    preloaded = os.environ.get("LD_PRELOAD", "")
    facts: dict[str, Any] = {
        "patches": engine_facts.patch_digest(),
        "preloaded": engine_facts.preloaded_libraries(preloaded),
    }
    if (build := torch_build()) is not None:
        facts["torch"] = build.version
    if version := _vllm_version():
        facts["vllm"] = version
    if vllm_device() == "cpu":
        facts["device"] = engine_facts.cpu_name()
    return facts


def _vllm_version() -> str | None:
    """`vllm.__version__`, which may differ from the wheel's."""
    vllm = vllm_distribution()
    if vllm is None:
        return None
    with suppress(OSError):
        path = Path(str(vllm.locate_file("vllm/_version.py")))
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines:
            if line.startswith("__version__ ="):
                return line.rpartition("=")[2].strip().strip("'\"")
    return vllm.version


def _configured_profile(path: Path) -> Finding:
    from vllm_tide.control.profile_store import load

    advice = f"{_MEASURE}, or leave tide.control.profile out."
    try:
        stored = load(path)
    except OSError as error:
        return failed(f"{path} cannot be read ({error.strerror}).", advice)
    except _DAMAGE as why:
        return failed(str(why), advice)
    if differing := _differing(stored.facts, known_facts()):
        return failed(f"{path} is of another machine: {differing}.", advice)
    return _aged(path, "")


def _kept_profile(folder: Path, without: Finding | None) -> Finding:
    """Judges kept profiles; `without` if none fits, where a start measures none."""
    from vllm_tide.control.profile_store import load, profile_key

    facts = known_facts()
    fitting, num_others, broken = [], 0, []
    for path in sorted(folder.glob("*.json")):
        try:
            stored = load(path)
            if profile_key(stored.facts) != path.stem:
                broken.append(path.name)
            elif _differing(stored.facts, facts):
                num_others += 1
            else:
                fitting.append(path)
        except (OSError, *_DAMAGE):
            broken.append(path.name)
    if not fitting and without is not None:
        return without
    if broken:
        return warning(
            f"{folder} holds files that are no profile: {', '.join(broken)}.",
            "Remove them; what they were is measured anew.",
        )
    if not fitting:
        return warning(
            f"None in {folder} fits this machine and installation ({num_others} of "
            "others): the first start measures for a few seconds.",
            f"{_MEASURE}: it measures longer and better.",
        )
    newest = max(fitting, key=lambda path: path.stat().st_mtime)
    return _aged(newest, f" ({len(fitting)} of this machine)")


def _differing(stored: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} is {stored.get(name)!r} there and {value!r} here"
        for name, value in facts.items()
        if stored.get(name) != value
    )


def _aged(path: Path, more: str) -> Finding:
    days = max(time.time() - path.stat().st_mtime, 0) / 86400
    age = f"{days * 1440:.0f} minutes"
    if days >= 2:
        age = f"{days:.0f} days"
    elif days * 24 >= 2:
        age = f"{days * 24:.0f} hours"
    text = f"{path} fits this machine{more}; measured {age} ago."
    if days > OLD_DAYS:
        return warning(
            text, f"{_MEASURE}: kernels, firmware and neighbours change in that time."
        )
    return ok(f"{text} The server compares the models' shapes too.")


@check("state directory", configured=True)
def state_directory(subject: Subject) -> Finding:
    """Judges where the last good draft and the checkpoints are kept."""
    chosen = subject.tide.train.state_dir
    folder = Path(chosen).expanduser() if chosen else subject.run_dir / "heads"
    if folder.is_dir():
        usable = os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    else:
        usable = not folder.exists() and can_be_made(folder)
    if not usable:
        return failed(f"{folder} cannot be written.", _DISK)
    if is_memory(folder):
        return warning(
            f"{folder} lies in memory: the last good draft is lost when the machine "
            "restarts.",
            _DISK,
        )
    return ok(f"{folder} can be written and is on a disk.")


@check("spool", configured=True)
def spool(subject: Subject) -> Finding:
    """Lists the spool of the configuration; makes no missing directory."""
    url = subject.tide.spool.url
    if not url:
        return skipped("tide.spool.url is not set.")
    if "://" not in url or url.startswith("file://"):
        folder = Path(url.removeprefix("file://")).expanduser()
        if not folder.exists():
            if can_be_made(folder):
                return ok(f"{folder} is made by the relay, mode 0700.")
            return failed(f"{folder} cannot be made.", _SPOOL)
    answers: list[Finding] = []
    # A thread that cannot be stopped must not keep the command from ending.
    thread = Thread(target=lambda: answers.append(_listed(url)), daemon=True)
    thread.start()
    thread.join(SPOOL_SECONDS)
    late = failed(f"No answer within {SPOOL_SECONDS:.0f} s.", _SPOOL)
    return answers[0] if answers else late


def _listed(url: str) -> Finding:
    from vllm_tide.transport.shm import TransportError
    from vllm_tide.transport.spool_store import open_store

    try:
        store = open_store(url)
        engines = store.folders("")
    except TransportError as error:
        return failed(str(error), _SPOOL)
    return ok(f"{store.url} can be listed: {len(engines)} folders.")
