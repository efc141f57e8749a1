"""Runs the checks in order; one that breaks is itself a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module

from vllm_tide.doctor.finding import Finding, failed
from vllm_tide.doctor.subject import Subject

Check = Callable[[Subject], Iterable[Finding]]

# Module of this package with a function `check`. Imported one by one, so that a broken
# installation breaks the findings that need it and no others.
CHECKS = (
    "versions",
    "device",
    "patches",
    "extension",
    "configuration",
    "fit",
    "shared_memory",
    "run_directory",
    "cores",
    "preload",
    "gpus",
    "ports",
    "profile",
    "state_directory",
    "spool",
)


def examine(subject: Subject, checks: Iterable[str] = CHECKS) -> Iterator[Finding]:
    """Findings of all checks, in the order of `CHECKS`."""
    for name in checks:
        try:
            check: Check = import_module(f"vllm_tide.doctor.{name}").check
            yield from check(subject)
        except Exception as error:  # noqa: BLE001 - what breaks here must not hide the rest
            yield failed(
                name.replace("_", " "),
                f"Cannot be examined ({type(error).__name__}: {error}).",
                "Repair the installation (scripts/install.sh) and look again; if the "
                "rest is fine, report this.",
            )
