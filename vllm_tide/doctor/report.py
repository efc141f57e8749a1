"""Findings as text for people and as JSON for scripts."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence

from vllm_tide.doctor.finding import Finding, Status, worst

_LEAST_COLUMNS, _MOST_COLUMNS = 60, 110


def as_text(findings: Sequence[Finding], columns: int | None = None) -> str:
    """One block per finding, what to do behind an arrow, and a line of counts."""
    width = columns or shutil.get_terminal_size().columns
    width = min(max(width, _LEAST_COLUMNS), _MOST_COLUMNS)
    longest = max((len(finding.name) for finding in findings), default=0)
    indent = " " * (9 + longest + 2)
    lines = []
    for finding in findings:
        head = f"{finding.status:<9}{finding.name:<{longest}}  "
        lines += _wrapped(finding.sentence, head, indent, width)
        if finding.advice:
            lines += _wrapped(finding.advice, f"{indent}-> ", f"{indent}   ", width)
    counts = Counter(finding.status for finding in findings)
    lines.append(", ".join(f"{counts[status]} {status}" for status in Status))
    return "\n".join(lines)


def exit_code(findings: Sequence[Finding], *, strict: bool = False) -> int:
    """2 when something failed; 1 for warnings if these count."""
    return {Status.FAILED: 2, Status.WARNING: int(strict)}.get(worst(findings), 0)


def as_json(findings: Sequence[Finding], version: str, code: int) -> str:
    """One object: status, exit code, version of vllm-tide, checks."""
    return json.dumps(
        {
            "status": worst(findings),
            "exit_code": code,
            "vllm_tide": version,
            "checks": [
                {
                    "name": finding.name,
                    "status": finding.status,
                    "sentence": finding.sentence,
                    "advice": finding.advice,
                }
                for finding in findings
            ],
        },
        indent=1,
    )


def _wrapped(text: str, head: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
