"""The checks of `vllm-tide doctor` and the report of their findings."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_tide.config import ConfigError, TideConfig, parse_tide
from vllm_tide.speculative import FRESH, is_inline, mistakes, notes, read_json_object

# Check functions and their modules, in the order of the report. A module is imported at
# its first check, so that an import error affects no other module.
CHECKS = {
    "versions": "install",
    "patches": "install",
    "extension": "install",
    "configuration": "models",
    "fit": "models",
    "shared_memory": "machine",
    "run_directory": "machine",
    "switches": "machine",
    "trainer_device": "machine",
    "state_directory": "machine",
    "spool": "machine",
}


class Status(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"  # works, with a limitation or risk
    FAILED = "failed"  # a server or trainer started now would not work
    SKIPPED = "skipped"  # not checked, for the given reason


@dataclass(frozen=True, slots=True)
class Finding:
    """One entry of the report; `advice` is the remedy, or empty."""

    status: Status
    sentence: str
    advice: str = ""
    name: str = ""


ok = partial(Finding, Status.OK)
warning = partial(Finding, Status.WARNING)
failed = partial(Finding, Status.FAILED)
skipped = partial(Finding, Status.SKIPPED)


@dataclass(frozen=True, slots=True)
class Subject:
    """Configuration and run directory, the input of every check."""

    run_dir: Path
    source: str | None = None  # the --config argument
    error: str = ""  # mistakes in the configuration, one per line
    speculative: Mapping[str, Any] = field(default_factory=dict)
    # Its tide section; defaults without one, or if it is invalid.
    tide: TideConfig = field(default_factory=lambda: TideConfig.model_validate({}))
    usable: bool = True
    model: str | None = None  # the target: a directory or hub name

    @property
    def draft(self) -> str | None:
        name = self.speculative.get("model")
        return name if isinstance(name, str) and name else None

    @property
    def notes(self) -> Iterable[str]:
        """Notes on settings without effect and unusual values."""
        tokens = self.speculative.get("num_speculative_tokens")
        return notes(self.tide, tokens, self.draft) if self.usable else ()

    @property
    def revision(self) -> str | None:
        value = self.speculative.get("revision")
        return value if isinstance(value, str) else None


_Examine = Callable[[Subject], Finding | Iterable[Finding]]


def make_subject(
    source: str | None, model: str | None, run_dir: Path | None
) -> Subject:
    """Read a file or inline JSON; mistakes become part of the subject.

    The default run directory is the configuration's, else the server's default.
    """
    from vllm_tide.transport.rendezvous import default_run_dir

    speculative: dict[str, Any] = {}
    tide: TideConfig | None = None
    error = ""
    try:
        if source is None:
            tide = TideConfig.model_validate({})
        else:
            speculative = read_json_object(source)
            if speculative.get("tide") is None:
                where = "the inline JSON" if is_inline(source) else source
                fresh = speculative.get("model") == FRESH
                effect = (
                    f"the server refuses {FRESH!r}" if fresh else "vllm_tide is off"
                )
                raise ConfigError(
                    f"tide: {where} has no tide section, so {effect}; add "
                    '"tide": {} for the defaults.'
                )
            error = "\n".join(mistakes(speculative, whole=True))
            tide = parse_tide(speculative["tide"])
    except ConfigError as reason:
        error = error or str(reason)
    if run_dir is None:
        configured = tide.run_dir if tide is not None else None
        run_dir = Path(configured) if configured else default_run_dir()
    usable = tide is not None
    tide = tide or TideConfig.model_validate({})
    return Subject(run_dir, source, error, speculative, tide, usable, model)


def check(name: str, *, configured: bool = False) -> Callable[[_Examine], _Examine]:
    """Decorate a check function; `name` is the default name of its findings.

    A `configured` check is skipped if the configuration is invalid.
    """

    def decorate(function: _Examine) -> _Examine:
        def named(subject: Subject) -> Iterator[Finding]:
            if configured and not subject.usable:
                yield skipped("The configuration is invalid.", name=name)
                return
            findings = function(subject)
            for finding in [findings] if isinstance(findings, Finding) else findings:
                yield replace(finding, name=finding.name or name)

        return named

    return decorate


def examine(subject: Subject, checks: Iterable[str] = CHECKS) -> Iterator[Finding]:
    """Run the checks; an exception in one becomes a finding."""
    for name in checks:
        try:
            module = import_module(f"vllm_tide.doctor.{CHECKS[name]}")
            yield from getattr(module, name)(subject)
        except Exception as error:  # noqa: BLE001 - other checks must run
            if isinstance(error, PermissionError):
                sentence = f"{error.filename} cannot be read ({error.strerror})."
                advice = "Run this as the server's user, or grant the permission."
                yield failed(sentence, advice, name.replace("_", " "))
                continue
            yield failed(
                f"The check failed ({type(error).__name__}: {error}).",
                "Reinstall vllm_tide; if other checks pass, report this.",
                name=name.replace("_", " "),
            )


def worst(findings: Iterable[Finding]) -> Status:
    """Return the overall status: failed, warning or ok."""
    statuses = {finding.status for finding in findings}
    ranked = (Status.FAILED, Status.WARNING)
    return next((status for status in ranked if status in statuses), Status.OK)


def exit_code(findings: Sequence[Finding], *, strict: bool = False) -> int:
    """Return 1 if a check failed, or for warnings if `strict`."""
    return {Status.FAILED: 1, Status.WARNING: int(strict)}.get(worst(findings), 0)


def report(findings: Sequence[Finding], version: str, code: int) -> dict[str, Any]:
    """Return the JSON document of `--json`."""
    fields = ("name", "status", "sentence", "advice")
    return {
        "status": worst(findings),
        "exit_code": code,
        "vllm_tide": version,
        "checks": [{key: getattr(f, key) for key in fields} for f in findings],
    }


def as_text(findings: Sequence[Finding], columns: int | None = None) -> str:
    """Format findings as blocks with advice after an arrow, and counts."""
    width = columns or shutil.get_terminal_size().columns
    width = min(max(width, 60), 110)
    wrapper = textwrap.TextWrapper(
        width, break_long_words=False, break_on_hyphens=False
    )
    longest = max((len(finding.name) for finding in findings), default=0)
    indent = " " * (9 + longest + 2)
    lines = []
    for finding in findings:
        wrapper.initial_indent = f"{finding.status:<9}{finding.name:<{longest}}  "
        wrapper.subsequent_indent = indent
        lines += wrapper.wrap(finding.sentence)
        wrapper.initial_indent = f"{indent}-> "
        wrapper.subsequent_indent = f"{indent}   "
        lines += wrapper.wrap(finding.advice)
    counts = Counter(finding.status for finding in findings)
    lines.append(", ".join(f"{counts[status]} {status}" for status in Status))
    return "\n".join(lines)


_COLOURS = {Status.OK: 32, Status.WARNING: 33, Status.FAILED: 31, Status.SKIPPED: 2}


def coloured(text: str) -> str:
    """Colour the status at the start of each line of `as_text`."""

    def paint(match: re.Match[str]) -> str:
        return f"\x1b[{_COLOURS[Status(match[0])]}m{match[0]}\x1b[0m"

    return re.sub(rf"^({'|'.join(Status)})\b", paint, text, flags=re.MULTILINE)
