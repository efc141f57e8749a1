"""The answer of a check: a status, one sentence, and what to do if it is not fine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: How it is.
        sentence: What was found.
        advice: What to do; empty when it is fine.
    """

    name: str
    status: Status
    sentence: str
    advice: str = ""


def ok(name: str, sentence: str) -> Finding:
    """It is as it should be."""
    return Finding(name, Status.OK, sentence)


def skipped(name: str, sentence: str, advice: str = "") -> Finding:
    """It was not looked at, and the sentence says why."""
    return Finding(name, Status.SKIPPED, sentence, advice)


def warning(name: str, sentence: str, advice: str) -> Finding:
    """It works, but not as well as it could, or not for long."""
    return Finding(name, Status.WARNING, sentence, advice)


def failed(name: str, sentence: str, advice: str) -> Finding:
    """A server or trainer started now would not work."""
    return Finding(name, Status.FAILED, sentence, advice)


def worst(findings: Iterable[Finding]) -> Status:
    """The status of the whole: failed, warning or ok."""
    found = {finding.status for finding in findings}
    for status in (Status.FAILED, Status.WARNING):
        if status in found:
            return status
    return Status.OK
